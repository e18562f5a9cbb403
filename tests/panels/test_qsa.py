"""QSA in the stepping panel: its form, what it says of the selection, the focus, the user's own data."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html import unescape
from typing import Any

import numpy as np
import pytest

import lab
import lab.qsa
from lab import resources
from lab.qsa import Sizes

pytest.importorskip("ipywidgets")
pytest.importorskip("anywidget")

from lab.panels.panel import Panel
from lab.panels.qsa import Subject

SMALL = "small, to follow by hand"
SCORE, SELECT, ATTEND, END = 3, 4, 5, 6  # positions in a call after which there is something
FIRST = resources.kernels() / "qsa" / "qsa.metal"


@pytest.fixture
def panel() -> Iterator[Panel]:
    opened = small_panel(lab.qsa.session())
    yield opened
    opened.close()


def small_panel(session: lab.qsa.Session, *given: Any) -> Panel:
    """A panel of small sizes; without data of the user's the form is set before anything is recorded."""
    if given:
        return lab.qsa.panel(*given, session=session)
    subject = Subject(session)
    subject.preset.value = SMALL
    return Panel(subject)


def of(panel: Panel) -> Subject:
    assert isinstance(panel.subject, Subject)
    return panel.subject


def words(html: str) -> str:
    """What an HTML string says."""
    return " ".join(unescape(re.sub("<[^>]*>", " ", html)).split())


# ---- the state -----------------------------------------------------------------------------------------


def test_the_state_tells_arguments_cut_passes_and_list_as_they_come(panel: Panel) -> None:
    of(panel).token.value = 1
    panel.position = 0
    told = words(panel.state.value)
    assert told.startswith("Token 1 Arguments pos0 = 64, max_cells = 66: ")
    assert "n_kv = 66 cells: 16 whole blocks of four, and the unfinished block 16 with 2 cells" in told
    assert "The blocks have no scores yet." in told and "has not listed cells yet" in told
    panel.position = SCORE
    told = words(panel.state.value)
    (selection,) = lab.qsa.selections(panel.trace, 0)[1:]
    assert selection.cut is not None
    assert f"19 of 66 cells are taken. The cut is at key 0x{selection.cut.key:08X}" in told
    assert "still wanted ▶ 1 31–24" in told and "has not listed cells yet" in told
    for n, one in enumerate(selection.cut.passes):
        (row,) = re.findall(rf"(?:▶ )?{n + 1} {one.shift + 7}–{one.shift} [^▶]*?0x(\w\w) (\d+) (\d+)", told)
        assert row == (f"{one.digit:02X}", str(one.cells_above), str(one.still_wanted))
    panel.position = SELECT
    assert "✓ The kernel's list is the reference's, element for element: 19 hits." in words(panel.state.value)
    assert panel.first_deviating() is None


def test_the_pass_of_the_focus_is_drawn(panel: Panel) -> None:
    panel.position = SELECT
    for number in (3, 1, 4):
        of(panel).pass_.value = number
        assert f"▶ {number} " in words(panel.state.value)
        assert f"bits {32 - 8 * number + 7} to {32 - 8 * number}" in panel.state.value


def test_a_list_that_is_wrong_is_marked_in_the_state() -> None:
    session = lab.qsa.session()
    text = session.source("qsa_topk2")
    right = "wanted - min(level, wanted)"
    assert right in text
    session.replace(text.replace(right, "wanted - min(level + 1, wanted)"), "qsa_topk2")
    panel = small_panel(session)
    panel.find.click()
    assert panel.position == SELECT
    assert re.search(
        r"✗ The kernel's list differs from the reference's: \d+ hits, 1 miss ", words(panel.state.value)
    )
    session.restore()
    assert "✓ The kernel's list" in words(panel.state.value)


def test_scores_that_are_nan_are_told_and_end_the_trace() -> None:
    session = lab.qsa.session()
    right = "*score = best;"
    panel = small_panel(session)
    session.replace(FIRST.read_text().replace(right, "*score = block == 2 ? NAN : best;"), "qsa_score")
    assert panel.slider.max == SCORE
    panel.position = SCORE
    assert "1 of 17 scores are NaN, so there is no order to select by." in words(panel.state.value)
    assert "NaN has no place in an order" in words(panel.status.value)


# ---- the form ------------------------------------------------------------------------------------------


def test_every_path_can_be_chosen(panel: Panel) -> None:
    for path, kernel in (("v1", "qsa_attn"), ("v3", "qsa_attn3"), ("v2", "qsa_attn2")):
        of(panel).path.value = path
        assert panel.trace is not None and panel.trace[ATTEND - 1].kernel == kernel
        assert panel.first_deviating() is None


def test_tokens_come_in_calls_and_the_focus_follows_them(panel: Panel) -> None:
    subject = of(panel)
    subject.numbers["tokens"].value = 5
    subject.per_call.value = 2
    assert panel.slider.max == 3 * END and subject.token.max == panel.row.max == 4
    panel.position = END + SELECT
    assert subject.token.value in (2, 3) and "Token 3" in words(panel.state.value)
    panel.row.value = 4
    assert panel.position == 3 * END and subject.token.value == 4
    assert subject.follow.value
    subject.token.value = 0  # of another call, of which it is to be seen
    assert not subject.follow.value and words(panel.state.value).startswith("Token 0 ")
    panel.position = END + SELECT
    assert words(panel.state.value).startswith("Token 0 ")
    subject.follow.value = True
    assert words(panel.state.value).startswith("Token 3 ")


def test_a_smaller_form_brings_the_focus_back_into_it(panel: Panel) -> None:
    subject = of(panel)
    subject.numbers["tokens"].value = 4
    panel.position = END
    subject.token.value, subject.head.value = 3, 23
    subject.numbers["tokens"].value = 1
    assert (subject.token.value, subject.token.max) == (0, 0)
    subject.path.value = "v1"
    subject.numbers["qh"].value = 6
    assert (subject.head.value, subject.head.max) == (5, 5)
    assert panel.trace is not None and panel.trace.about["sizes"]["qh"] == 6


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("qh", 23, "qh = 23 query heads do not come in equal parts to qkv = 2 KV heads"),
        ("qhg", 1, "The path v2 takes up to 8 query heads a head group, not qh / qkv / qhg = 12"),
        ("qch2", 33, "the kernels take at most 32"),
        ("qbudget", 0, "qbudget = 0 cells to attend to: the least is 1"),
        ("tokens", 0, "0 new tokens: the panel takes 1 to 256"),
        ("cells", -1, "-1 cells of context: the panel takes 0 to 65536"),
        ("cells", 10**9, "1000000000 cells of context: the panel takes 0 to 65536"),
    ],
)
def test_what_is_impossible_is_refused_in_place(panel: Panel, field: str, value: int, told: str) -> None:
    panel.position = SELECT
    trace, state = panel.trace, panel.state.value
    number = of(panel).numbers[field]
    before, number.value = number.value, value
    assert told in words(panel.message.value)
    assert panel.trace is trace and panel.state.value == state and panel.position == SELECT
    number.value = before
    assert panel.message.value == "" and panel.slider.max == END


def test_calls_of_a_number_of_tokens_that_there_is_not_are_refused(panel: Panel) -> None:
    of(panel).per_call.value = 9
    assert "A call has 1 to 8 tokens, not 9." in words(panel.message.value)
    of(panel).seed.value = -1
    of(panel).per_call.value = 8
    assert "-1 as the seed: the panel takes 0 or more." in words(panel.message.value)


def test_a_context_within_the_budget_needs_no_cut(panel: Panel) -> None:
    of(panel).numbers["cells"].value = 10
    panel.position = END
    told = words(panel.state.value)
    assert "Every cell is taken, in order: 11 with a budget of 19." in told and "still wanted" not in told
    assert "11 hits" in told
    of(panel).numbers["cells"].value = 0
    assert (
        "Every cell is taken, in order: 1 with" in words(panel.state.value)
        and panel.first_deviating() is None
    )


def test_the_preset_says_what_the_numbers_are(panel: Panel) -> None:
    subject = of(panel)
    recorded: list[Any] = []
    record, subject.on_change = subject.on_change, lambda: recorded.append(None)
    assert subject.preset.value == SMALL and subject.numbers["qbudget"].value == 19
    subject.numbers["cells"].value = 63
    assert subject.preset.value == "as set below" and len(recorded) == 1
    subject.preset.value = "as specified"
    assert len(recorded) == 2, "recorded anew once for all numbers"
    numbers = {name: number.value for name, number in subject.numbers.items()}
    assert numbers == {
        "qh": 24, "qkv": 2, "qbudget": 2051, "qch": 64, "qch2": 32, "qhg": 2, "cells": 4096, "tokens": 2,
    }  # fmt: skip
    subject.preset.value = SMALL
    subject.on_change = record


def test_the_seed_makes_other_data_and_the_kernels_do_not(panel: Panel) -> None:
    def keys() -> np.ndarray:
        assert panel.trace is not None
        return panel.trace.buffers_at(0)["kq"]

    first = keys()
    of(panel).seed.value = 1
    other = keys()
    assert (first != other).any()
    session = of(panel).session
    session.replace(FIRST, "qsa_score")
    np.testing.assert_array_equal(keys(), other)
    of(panel).seed.value = 0
    np.testing.assert_array_equal(keys(), first)


# ---- needles and the user's own data -------------------------------------------------------------------


def test_planted_needles_are_told_and_saved_with_the_trace(panel: Panel) -> None:
    of(panel).data.value = "needles"
    assert panel.trace is not None
    cells = panel.trace.about["needles"]
    assert len(cells) == 3
    panel.position = SCORE
    assert f"Needles at {', '.join(map(str, cells))}." in words(panel.state.value)
    panel.position = SELECT
    assert f"3 of 3 needles found ({', '.join(map(str, cells))})." in words(panel.state.value)
    of(panel).data.value = "random"
    assert "Needles" not in panel.state.value


def test_the_user_s_own_arrays_are_stepped_through() -> None:
    sizes = Sizes(qh=8, qkv=2, qbudget=9, qch=8, qch2=4, qhg=1, max_cells=60)
    given = lab.qsa.example(sizes, 21, 3, seed=5)
    panel = small_panel(lab.qsa.session(), *given)
    subject = of(panel)
    assert panel.trace is not None and panel.trace.about["cells"] == 21
    assert panel.trace.about["sizes"] == {**panel.trace.about["sizes"], "qh": 8, "max_cells": 60}
    numbers = {name: number.value for name, number in subject.numbers.items()}
    assert numbers == {
        "qh": 8,
        "qkv": 2,
        "qbudget": 9,
        "qch": 8,
        "qch2": 4,
        "qhg": 1,
        "cells": 21,
        "tokens": 3,
    }
    assert all(number.disabled for number in subject.numbers.values()) and subject.seed.disabled
    want = lab.qsa.output(lab.qsa.session().trace(*given))
    np.testing.assert_array_equal(lab.qsa.output(panel.trace), want)

    given[0].append(*given[3:])  # what becomes of the user's cache does not change what is shown
    subject.per_call.value = 1
    assert panel.trace.about["cells"] == 21 and panel.slider.max == 3 * END

    subject.data.value = "random"
    assert not subject.seed.disabled and not subject.numbers["qh"].disabled
    subject.numbers["tokens"].value = 2
    assert panel.trace.about["sizes"]["max_cells"] == 23
    subject.data.value = "yours"
    assert subject.numbers["tokens"].value == 3 and subject.numbers["qh"].disabled
    np.testing.assert_array_equal(panel.trace.buffers_at(0)["qcur"], np.asarray(given[2])[:1])


def test_needles_may_be_the_user_s_own() -> None:
    needles = lab.qsa.data.needles(Sizes(qbudget=19, max_cells=80), 70, 2, needles=2, seed=3)
    panel = small_panel(lab.qsa.session(), needles)
    panel.position = END
    assert "2 of 2 needles found" in words(panel.state.value)


def test_arrays_that_do_not_fit_are_refused_in_place() -> None:
    cache, _, qcur, k, v = lab.qsa.example(Sizes(qbudget=19, max_cells=80), 70, 2)
    panel = lab.qsa.panel(cache, qcur, qcur, k, v, session=lab.qsa.session())
    assert "qfull has the shape (2, 24, 256); it takes (2, 24, 512)" in words(panel.message.value)
    of(panel).data.value = "random"
    assert panel.message.value == "" and panel.slider.max == END


# ---- views ---------------------------------------------------------------------------------------------


def labels(panel: Panel) -> list[str]:
    return [figure["label"] for figure in panel.figures.figures]


def test_views_go_with_the_step(panel: Panel) -> None:
    for position in (0, 1, SCORE):
        panel.position = position
        (scores,) = labels(panel)
        assert scores.startswith("Block scores of token 0. ")
    assert "The cut is at key" in scores
    panel.position = SELECT
    scores, cells, passes = labels(panel)
    assert "element for element: 19 hits" in cells and passes.startswith("Histograms of the radix passes")
    for position in (ATTEND, END):
        panel.position = position
        by_chunk, along = labels(panel)
        assert by_chunk.startswith(
            "Shares of the chunks, head 0 of token 0, by the kernel and by the reference. "
        )
        assert along.startswith("Attention along the cells, head 0 of token 0")
    of(panel).numbers["cells"].value = 10
    panel.position = SELECT
    assert len(labels(panel)) == 2, "without a cut there are no passes"


def test_views_follow_the_focus(panel: Panel) -> None:
    panel.position = END
    of(panel).head.value = 17
    of(panel).token.value = 1
    assert all("head 17 of token 1" in label for label in labels(panel))
    of(panel).buffer.value = "scores"
    (error,) = labels(panel)
    assert error == "Error of scores after dispatch 2, qsa_score."
    panel.position = SCORE - 1
    assert labels(panel) == [], "nobody has written it"
    of(panel).buffer.value = "kq"
    assert labels(panel) == ["Error of kq after dispatch 0, qsa_quant."]


@pytest.mark.parametrize(
    ("kernel", "right", "wrong"),
    [
        ("qsa_score", "*score = best;", "*score = block == 2 ? NAN : best;"),
        ("qsa_score", "*score = best;", "*score = block % 2 ? INFINITY : -INFINITY;"),
        ("qsa_topk2", "list[at + c] = int(4 * block + c)", "list[at + c] = int(99 - 40 * block)"),
        ("qsa_topk2", "list[at + c] = int(4 * block + c)", "list[at + c + 100000000] = 0"),
        ("qsa_quant", "sc[group] = scale;", "sc[group] = half(NAN);"),
    ],
)
def test_states_and_views_of_broken_kernels_are_shown(kernel: str, right: str, wrong: str) -> None:
    session = lab.qsa.session()
    text = session.source(kernel)
    assert right in text
    session.replace(text.replace(right, wrong), kernel)
    panel = small_panel(session)
    assert panel.first_deviating() is not None
    for position in range(panel.slider.max + 1):
        for buffer in ("", "scores", "ids", "part", "xp"):
            panel.position = position
            of(panel).buffer.value = buffer
            assert "Token 0" in panel.state.value


# ---- opening -------------------------------------------------------------------------------------------


def test_it_opens_on_the_specified_sizes_and_the_default_session() -> None:
    panel = lab.qsa.panel()
    assert panel.trace is not None and of(panel).session is lab.qsa.default_session()
    assert panel.trace.about["sizes"] == {
        "qh": 24, "qkv": 2, "qd": 256, "qbudget": 2051, "qch": 64, "qch2": 32, "qhg": 2, "max_cells": 4098,
    }  # fmt: skip
    assert (panel.trace.about["cells"], panel.trace.about["rows"]) == (4096, 2)
    assert (len(panel.trace), panel.position) == (END, 0) and panel.first_deviating() is None
    panel.close()


def test_without_the_notebook_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "panels", lab.panels)  # put back at the end, as the modules are
    for name in [name for name in sys.modules if name.startswith("lab.panels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(lab.LabError) as caught:
        lab.qsa.panel()
    assert str(caught.value) == (
        "A panel needs ipywidgets: pip install 'metal-kernel-lab[notebook]' brings it."
    )
