"""o1 in the stepping panel: its form, rings, masses and words, the focus, the user's own data."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html import unescape
from typing import Any

import numpy as np
import pytest

import lab
import lab.o1
from lab.o1 import Sizes, readings

pytest.importorskip("ipywidgets")
pytest.importorskip("anywidget")

from lab.panels.o1 import Subject
from lab.panels.panel import Panel

SMALL = "a ring of 8 slots, to follow by hand"
END = 11  # dispatches of a chunk


@pytest.fixture
def panel() -> Iterator[Panel]:
    opened = small_panel(lab.o1.session())
    yield opened
    opened.close()


def small_panel(session: lab.o1.Session, **numbers: int) -> Panel:
    """A panel of the preset to teach with, 12 rows of it, recorded once."""
    subject = Subject(session)
    subject.preset.value = SMALL
    for name, value in {"rows": 12, **numbers}.items():
        subject.numbers[name].value = value
    return Panel(subject)


def of(panel: Panel) -> Subject:
    assert isinstance(panel.subject, Subject)
    return panel.subject


def words(html: str) -> str:
    """What an HTML string says."""
    return " ".join(unescape(re.sub("<title>[^<]*</title>|<[^>]*>", " ", html)).split())


def labels(panel: Panel) -> list[str]:
    return [figure["label"] for figure in panel.figures.figures]


# ---- to teach with -------------------------------------------------------------------------------------


def test_a_token_enters_the_oldest_leaves_and_its_weight_goes_into_the_masses(panel: Panel) -> None:
    panel.position = 9 * END + 1
    told = words(panel.state.value)
    assert told.startswith("Row 9, head 0 Token 1 will leave slot 1 of group 0 for the far field. It weighs ")
    assert "▼ 9 enters" in told and "✕ leaves" in told and "● new" not in told
    assert "landmarks of head 0, once committed ■ what they had · ▨ brought by token 1" in told
    assert "group 0 8 of 8 slots filled, the oldest token in slot 1; the next token goes into slot 1" in told
    panel.position = 9 * END + 9
    assert panel.trace is not None
    before, after = (panel.trace.buffers_at(9 * END + done)["mz"][0, 3] for done in (8, 9))
    assert f"Head 0: landmark 0 {before:.3g} → {after:.3g}, landmark 1 " in words(panel.state.value)
    panel.position = 9 * END + 10
    told = words(panel.state.value)
    assert "Token 9 enters slot 1 of group 0, where token 1 lay." in told
    assert "● new" in told and "✕ 1 left" in told and "leaves" not in told.replace("nothing leaves", "")
    panel.position = 10 * END
    told = words(panel.state.value)
    assert "length stays 8, head 1 → 2, far count 1 → 2." in told
    assert "the oldest token in slot 2; the next token goes into slot 2; 2 tokens have left" in told
    assert "✓ length ≤ window, head in range, far count right" in told


def test_the_row_s_attention_is_split_in_words_and_in_the_views(panel: Panel) -> None:
    panel.position = 9 * END + 8
    assert panel.trace is not None
    shares = readings.weights(panel.trace, panel.position, 9, 0).split()
    split = (
        f"Row 9 attends with head 0: {shares[0]:.1%} sinks, {shares[1]:.1%} window, {shares[2]:.1%} its own "
        f"chunk, {shares[3]:.1%} far field."
    )
    assert split in words(panel.state.value)
    weights, parts = labels(panel)
    assert weights == split
    assert parts.startswith("Attention of rows 0 to 9, head 0, split between sinks") and parts.endswith(split)


def test_stepping_back_shows_the_same(panel: Panel) -> None:
    seen = {}
    for position in range(8 * END, 10 * END + 1):
        panel.position = position
        seen[position] = panel.state.value, labels(panel)
    for position in reversed(seen):
        panel.position = position
        assert (panel.state.value, labels(panel)) == seen[position]


def test_the_ring_is_drawn_in_memory_in_logical_order_or_both(panel: Panel) -> None:
    panel.position = 12 * END

    def tokens() -> list[list[int]]:
        return [
            [int(t) for t in re.findall(r"<title>slot \d+: token (\d+)", drawing)]
            for drawing in re.findall(r"<svg role='img' aria-label='Ring.*?</svg>", panel.state.value)
        ]

    in_memory, logical = [8, 9, 10, 11, 4, 5, 6, 7], [*range(4, 12)]
    assert tokens() == [in_memory, logical]
    of(panel).order.value = "memory"
    assert tokens() == [in_memory]
    of(panel).order.value = "logical"
    assert tokens() == [logical]


# ---- the form ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", lab.o1.PATHS)
def test_every_path_is_stepped_through(path: str, seed: int) -> None:
    sizes = Sizes(ng=2, hpg=2, d=128, w=12, ns=1, m=4, windows=(0, 9))
    panel = lab.o1.panel(
        sizes=sizes, rows=20, chunks=5, path=path, seed=seed % 1000, session=lab.o1.session()
    )
    assert panel.message.value == "" and panel.trace is not None
    assert {chunk.plan.path for chunk in panel.trace.chunks} == {path}
    assert len(panel.trace.chunks) == (20 if path == "token" else 4)
    assert of(panel).numbers["chunk"].disabled == (path == "token")
    assert of(panel).windows.value == "0, 9" and panel.trace.about["sizes"]["windows"] == (0, 9)
    assert panel.first_deviating() is None
    of(panel).head.value = 3
    for position in range(panel.slider.max + 1):
        panel.position = position
        told = words(panel.state.value)
        assert "✓ length ≤ window" in told and "group 1" in told
        assert 1 <= len(labels(panel)) <= 3
    assert "9 of 9 slots of w = 12 filled" in told
    panel.close()


def test_a_layer_on_a_text_can_be_chosen(panel: Panel) -> None:
    subject = of(panel)
    subject.numbers["w"].value = 12
    subject.data.value = "text"
    assert panel.message.value == "" and panel.trace is not None
    numbers = {name: number.value for name, number in subject.numbers.items()}
    assert (numbers["hpg"], numbers["d"]) == (1, 32)
    disabled = {name for name, number in subject.numbers.items() if number.disabled}
    assert disabled == {"hpg", "d"} and subject.seed.disabled and subject.preset.disabled
    assert "MiniLM" in subject.source.value and subject.preset.value == "as set below"
    layer = lab.o1.data.minilm()
    assert panel.trace.about["tokens"] == list(layer.tokens[2:14])
    panel.position = 12 * END
    assert words(panel.state.value).startswith(f"Row 11 ‘{layer.tokens[13]}’, head 0 ")
    assert layer.tokens[3] in panel.state.value
    np.testing.assert_array_equal(panel.trace.buffers_at(0)["q"], layer.q[2:14, :1])
    np.testing.assert_array_equal(panel.trace.buffers_at(0)["sink_k"][0], layer.k[:2, 0])
    for name, value, told in (
        ("rows", 400, "2 sinks and 400 rows: the text has 371 tokens."),
        ("ng", 13, "13 groups: the text is seen by 12 heads."),
    ):
        before, subject.numbers[name].value = subject.numbers[name].value, value
        assert told in words(panel.message.value)
        subject.numbers[name].value = before
    subject.path.value = "token"
    assert "The token path takes d = 128 or 256 dimensions a head, not 32." in words(panel.message.value)
    subject.path.value = "chunk"
    subject.data.value = "random"
    assert panel.message.value == "" and not subject.source.value and not subject.seed.disabled
    assert "tokens" not in panel.trace.about


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("m", 33, "m = 33 landmarks: the kernels take at most 32."),
        ("hpg", 9, "hpg = 9 query heads a group: the kernels take at most 8."),
        ("d", 6, "d = 6 dimensions a head: it must be a multiple of 4."),
        ("w", 0, "w = 0 ring slots: the least is 1."),
        ("ns", -1, "ns = -1 sink tokens: the least is 0."),
        ("chunk", 9, "A chunk of 9 rows is longer than the window of 8 tokens of group 0"),
        ("chunk", 65, "A chunk of 65 rows: the kernels take at most 64."),
        ("chunk", 0, "A chunk has at least 1 row, not 0."),
        ("rows", 0, "0 rows: the panel takes 1 to 8192."),
        ("rows", 10**9, "1000000000 rows: the panel takes 1 to 8192."),
        ("w", 10**9, "A trace of these sizes takes "),
        ("d", 4 * 10**8, "A trace of these sizes takes "),
        ("ng", 10**7, "A trace of these sizes takes "),
    ],
)
def test_what_is_impossible_is_refused_in_place(panel: Panel, name: str, value: int, told: str) -> None:
    panel.position = 5 * END
    trace, state = panel.trace, panel.state.value
    number = of(panel).numbers[name]
    before, number.value = number.value, value
    assert told in words(panel.message.value)
    assert panel.trace is trace and panel.state.value == state and panel.position == 5 * END
    panel.step.click()
    assert panel.position == 5 * END + 1 and panel.state.value != state
    number.value = before
    assert panel.message.value == "" and panel.slider.max == 12 * END


def test_windows_of_groups_are_read_and_refused_in_place(panel: Panel) -> None:
    subject = of(panel)
    subject.numbers["ng"].value = 2
    subject.windows.value = "0, 5"
    assert panel.message.value == "" and panel.trace is not None
    assert panel.trace.about["sizes"]["windows"] == (0, 5) and subject.preset.value == "as set below"
    panel.position = 12 * END
    assert "group 1 5 of 5 slots of w = 8 filled" in words(panel.state.value)
    assert "beyond the group's window" not in unescape(panel.state.value)
    subject.head.value = 1
    assert "beyond the group's window" in unescape(panel.state.value)
    for text, told in (
        ("5", "windows has 1 entries for ng = 2 groups."),
        ("5, 9", "The window 9 of group 1 does not fit w = 8 ring slots."),
        ("5, x", "Windows of groups are whole numbers with commas between them, not '5, x'."),
        ("5, -1", "Windows of groups are whole numbers"),
    ):
        subject.windows.value = text
        assert told in words(panel.message.value)
    subject.windows.value = " "
    assert panel.message.value == "" and panel.trace.about["sizes"]["windows"] is None


def test_the_preset_says_what_the_numbers_are(panel: Panel) -> None:
    subject = of(panel)
    recorded: list[Any] = []
    record, subject.on_change = subject.on_change, lambda: recorded.append(None)
    assert subject.preset.value == "as set below"
    subject.numbers["rows"].value = 24
    assert subject.preset.value == SMALL and len(recorded) == 1
    subject.windows.value = "3"
    assert subject.preset.value == "as set below" and len(recorded) == 2
    subject.preset.value = "default"
    assert len(recorded) == 3, "recorded anew once for all numbers"
    numbers = {name: number.value for name, number in subject.numbers.items()}
    assert numbers == {
        "ng": 2, "hpg": 4, "d": 128, "w": 128, "ns": 4, "m": 16, "rows": 240, "chunk": 16,
    }  # fmt: skip
    assert subject.windows.value == ""
    subject.path.value = "token"
    subject.preset.value = SMALL
    assert subject.path.value == "chunk", "the token path takes no heads of 8 dimensions"
    subject.on_change = record


def test_the_seed_makes_other_data_and_the_kernels_do_not(panel: Panel) -> None:
    def keys() -> np.ndarray:
        assert panel.trace is not None
        return panel.trace.buffers_at(0)["k"]

    first = keys()
    of(panel).seed.value = 1
    other = keys()
    assert (first != other).any()
    session = of(panel).session
    session.replace(session.source("o1c_land"), "o1c_land")
    np.testing.assert_array_equal(keys(), other)
    of(panel).seed.value = 0
    np.testing.assert_array_equal(keys(), first)
    of(panel).seed.value = -1
    assert "-1 as the seed: the panel takes 0 or more." in words(panel.message.value)


def test_a_smaller_form_brings_the_focus_back_into_it(panel: Panel) -> None:
    subject = of(panel)
    subject.numbers["hpg"].value = 4
    panel.position = 12 * END
    subject.head.value = 3
    assert (subject.row.value, subject.row.max, subject.head.max) == (11, 11, 3)
    subject.numbers["rows"].value = 5
    assert (subject.row.value, subject.row.max) == (4, 4)
    subject.numbers["hpg"].value = 2
    assert (subject.head.value, subject.head.max) == (1, 1)


# ---- the user's own data -------------------------------------------------------------------------------


def test_the_user_s_own_arrays_are_stepped_through(seed: int) -> None:
    sizes = Sizes(ng=2, hpg=3, d=16, w=10, ns=0, m=5, windows=(0, 7), scale=0.5)
    state, q, k, v = lab.o1.example(sizes, 30, seed)
    session = lab.o1.session()
    session.run(state, q[:14], k[:14], v[:14])
    rows = [np.array(x)[14:] for x in (q, k, v)]
    panel = lab.o1.panel(state, *rows, chunks=4, session=session)
    subject = of(panel)
    assert panel.message.value == "" and panel.trace is not None and len(panel.trace) == 4 * END
    numbers = {name: number.value for name, number in subject.numbers.items()}
    assert numbers == {
        "ng": 2, "hpg": 3, "d": 16, "w": 10, "ns": 0, "m": 5, "rows": 16, "chunk": 4,
    }  # fmt: skip
    disabled = {name for name, number in subject.numbers.items() if number.disabled}
    assert disabled == {*numbers} - {"chunk"} and subject.windows.disabled
    assert subject.windows.value == "0, 7" and panel.trace.about["sizes"]["scale"] == 0.5
    assert "group 1 7 of 7 slots of w = 10 filled" in words(panel.state.value)
    assert panel.first_deviating() is None
    first = panel.trace.buffers_at(0)["q"]

    rows[0][:] = 0.0  # what becomes of the user's arrays does not change what is shown
    session.run(state, q[14:], k[14:], v[14:])
    subject.numbers["chunk"].value = 2
    assert len(panel.trace) == 8 * END and panel.trace.buffers_at(0)["meta"][0, 2] == 4
    np.testing.assert_array_equal(panel.trace.buffers_at(0)["q"], first)

    subject.path.value = "token"
    assert "The token path takes d = 128 or 256 dimensions a head, not 16." in words(panel.message.value)
    subject.path.value = "matmul"
    subject.data.value = "random"
    assert panel.message.value == "" and panel.trace.about["sizes"]["scale"] == 0.25
    assert not subject.numbers["d"].disabled and subject.numbers["d"].value == 16
    subject.data.value = "yours"
    np.testing.assert_array_equal(panel.trace.buffers_at(0)["q"], first)
    panel.close()


def test_arrays_that_do_not_fit_are_refused_in_place(seed: int) -> None:
    state, q, k, v = lab.o1.example(Sizes(ng=2, hpg=2, d=8, w=8, ns=1, m=2), 10, seed)
    panel = lab.o1.panel(state, q, q, v, chunks=4, session=lab.o1.session())
    assert "k has the shape (10, 4, 8); it takes (10, 2, 8)." in words(panel.message.value)
    assert panel.state.value == ""
    subject = of(panel)
    subject.data.value = "random"
    assert panel.message.value == "" and panel.slider.max == 3 * END
    empty = lab.o1.panel(state, q[:0], k[:0], v[:0], chunks=4, session=lab.o1.session())
    assert words(empty.state.value) == "There are no rows." and empty.slider.max == 0
    for opened in (panel, empty):
        opened.close()


def test_what_is_given_by_half_is_refused() -> None:
    state, q, _, _ = lab.o1.example(Sizes(ng=1, hpg=1, d=8, w=8, ns=0, m=2), 3)
    with pytest.raises(lab.ArgumentError, match="state, q, k and v: k and v not given"):
        lab.o1.panel(state, q)
    with pytest.raises(lab.ArgumentError, match="There is no path 'tokens'"):
        lab.o1.panel(path="tokens")


def test_scores_of_random_data_may_have_another_scale() -> None:
    sizes = Sizes(ng=1, hpg=1, d=16, w=8, ns=0, m=2, scale=0.125)
    panel = lab.o1.panel(sizes=sizes, rows=4, chunks=2, session=lab.o1.session())
    assert panel.trace is not None and panel.trace.about["sizes"]["scale"] == 0.125
    panel.close()


def test_a_state_of_unknown_tokens_is_stepped_through_without_a_reference(seed: int) -> None:
    state, q, k, v = lab.o1.example(Sizes(ng=1, hpg=1, d=8, w=8, ns=1, m=2), 20, seed)
    lab.o1.session().run(state, q[:12], k[:12], v[:12])
    unknown = lab.o1.State(state.sizes, state.arrays)
    panel = lab.o1.panel(unknown, q[12:], k[12:], v[12:], chunks=3, session=lab.o1.session())
    for position in range(panel.slider.max + 1):
        panel.position = position
        assert "✓ length ≤ window" in words(panel.state.value)
    assert panel.first_deviating() is None
    panel.close()


# ---- the focus and the views ---------------------------------------------------------------------------


def test_the_focus_follows_the_chunk_until_a_row_of_another_is_chosen() -> None:
    panel = small_panel(lab.o1.session(), chunk=4)
    subject = of(panel)
    panel.position = END + 3
    assert subject.row.value == 7 and subject.follow.value
    subject.row.value = 5  # of the same chunk
    assert subject.follow.value and words(panel.state.value).startswith("Row 5, head 0 ")
    panel.position = END + 6
    assert subject.row.value == 5
    panel.row.value = 9
    assert panel.position == 3 * END and subject.row.value == 11
    subject.row.value = 2
    assert not subject.follow.value and words(panel.state.value).startswith("Row 2, head 0 ")
    panel.position = END
    assert subject.row.value == 2
    subject.follow.value = True
    panel.position = END + 1
    assert subject.row.value == 7
    panel.close()


def test_views_go_with_the_step(panel: Panel) -> None:
    def at(done: int) -> list[str]:
        panel.position = 9 * END + done
        return labels(panel)

    panel.position = 0
    assert labels(panel) == [
        "Attention of row 0, head 0, by the reference: the kernels have not written theirs yet."
    ]
    assert at(1)[0].startswith("Running maxima and masses of the landmarks of head 0, after 9 chunks")
    assert at(2) == [f"Error of sc after dispatch {9 * END + 1}, o1c_score."]
    assert at(4) == [f"Error of nm after dispatch {9 * END + 3}, o1c_max."]
    attention, gains = at(6)
    assert attention.startswith("Row 9 attends with head 0") and "The largest far share is " in gains
    assert at(7) == [f"Error of pz after dispatch {9 * END + 6}, o1c_sum."]
    assert [label.split()[0] for label in at(8)] == ["Row", "Attention"]
    assert at(9)[0].endswith("after 10 chunks.")
    assert len(at(10)) == len(at(11)) == 2


def test_views_can_be_chosen(panel: Panel) -> None:
    subject = of(panel)
    panel.position = 10 * END
    for chosen, told in (
        ("attention", "Row 9 attends with head 0"),
        ("split", "Attention of rows 0 to 9"),
        ("gains", "What each landmark brings to the rows of the chunk, head 0. The largest far share is "),
        ("masses", "Running maxima and masses"),
        ("distance", "Distance of each row's output from exact attention, heads of group 0."),
        ("gn", f"Error of gn after dispatch {9 * END + 4}, o1c_far."),
        ("ring_k", f"Error of ring_k after dispatch {9 * END + 9}, o1c_ring_commit."),
    ):
        subject.views.value = chosen
        (label,) = labels(panel)
        assert label.startswith(told)
    subject.views.value = "part"
    assert labels(panel) == [], "nobody writes it on this path"
    subject.views.value = "distance"
    panel.position = 0
    assert labels(panel) == []


def test_the_distance_is_marked_where_the_first_token_leaves(panel: Panel) -> None:
    of(panel).views.value = "distance"
    panel.position = 12 * END
    figure = of(panel).figures(panel.trace, panel.position, False)[0].figure  # type: ignore[arg-type]
    assert figure.layout.shapes[0].x0 == 8
    (line,) = (t for t in figure.data if t.name == "median")
    assert len(line.x) == 12


def test_dark_pages_get_dark_views(panel: Panel) -> None:
    panel.position = 10 * END
    light = panel.figures.figures
    panel.figures.dark = True
    assert panel.figures.figures != light


# ---- broken kernels ------------------------------------------------------------------------------------


def test_a_broken_kernel_is_marked_and_put_right() -> None:
    session = lab.o1.session()
    panel = small_panel(session)
    panel.position = 9 * END
    right = "at[2] = ring.far + evicted;"
    text = session.source("o1c_meta")
    assert right in text
    session.replace(text.replace(right, "at[2] = evicted;"), "o1c_meta")
    assert panel.position == 9 * END and panel.first_deviating() == 10 * END - 1
    panel.find.click()
    assert panel.position == 10 * END
    told = words(panel.state.value)
    assert "✗ Group 0: length 8 and far count 1 do not add up to 10 tokens." in told
    assert "far count stays 1" in told
    session.restore()
    assert panel.first_deviating() is None and "✗" not in words(panel.state.value)
    panel.close()


MISTAKES = [
    ("o1c_ring_commit", "ring.slot(ring.len + j)", "(ring.slot(ring.len + j) + 1) % 8"),
    ("o1c_meta", "at[1] = ring.slot(evicted);", "at[1] = 4000000000u;"),
    ("o1c_soft", "inv[i * u.nh + gh] = ", "inv[i * u.nh + gh] = NAN * "),
    ("o1c_soft", "inv[i * u.nh + gh] = ", "inv[i * u.nh + gh + 4000000] = "),
    ("o1c_far", "denominator >= 0.0f", "denominator > 1e30f"),
    ("o1c_far_e", "exp(", "-INFINITY + exp("),
]


@pytest.mark.parametrize(("kernel", "right", "wrong"), MISTAKES, ids=[m[0] + ": " + m[2] for m in MISTAKES])
def test_states_and_views_of_broken_kernels_are_shown(kernel: str, right: str, wrong: str) -> None:
    session = lab.o1.session()
    text = session.source(kernel)
    assert right in text
    session.replace(text.replace(right, wrong), kernel)
    panel = small_panel(session, chunk=3, hpg=2)
    assert panel.first_deviating() is not None
    of(panel).head.value = 1
    for position in range(panel.slider.max + 1):
        panel.position = position
        assert panel.state.value.startswith("<div class='ml'><b>Row ")
    for view in ("attention", "split", "gains", "masses", "distance", "sc", "hd", "mz", "out"):
        of(panel).views.value = view
    panel.close()


# ---- opening -------------------------------------------------------------------------------------------


def test_it_opens_on_the_default_shapes_and_the_default_session() -> None:
    panel = lab.o1.panel()
    assert panel.trace is not None and of(panel).session is lab.o1.default_session()
    sizes = panel.trace.about["sizes"]
    assert {name: sizes[name] for name in ("ng", "hpg", "w", "ns", "m", "d")} == {
        "ng": 2, "hpg": 4, "w": 128, "ns": 4, "m": 16, "d": 128,
    }  # fmt: skip
    assert [chunk.plan.rows for chunk in panel.trace.chunks] == [16] * 15
    assert of(panel).preset.value == "default" and panel.position == 0 and panel.first_deviating() is None
    panel.position = panel.slider.max
    assert "112 tokens have left for the far field" in words(panel.state.value), "the ring wraps"
    assert len(panel.state.value) < 60_000
    panel.close()


def test_without_the_notebook_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "panels", lab.panels)  # put back at the end, as the modules are
    for name in [name for name in sys.modules if name.startswith("lab.panels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(lab.LabError) as caught:
        lab.o1.panel()
    assert str(caught.value) == (
        "A panel needs ipywidgets: pip install 'metal-kernel-lab[notebook]' brings it."
    )
