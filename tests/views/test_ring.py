"""The ring as a drawing: what its cells say, which marks it has, and how large it gets."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("plotly")

from lab.o1.readings import Ring
from lab.views.ring import ring_svg

NONE = np.empty(0, int)


def ring(pushed: int, window: int = 8, slots: int | None = None, **more: Any) -> Ring:
    """The ring that has been given so many tokens, at rest."""
    tokens = np.full(slots or window, -1)
    for token in range(pushed):
        tokens[token % window] = token
    far = max(0, pushed - window)
    still = {"written": NONE, "evicted": NONE, "evicted_slots": NONE, "leaving": NONE, "entering": NONE}
    return Ring(0, window, len(tokens), pushed - far, far % window, far, 0, tokens, **{**still, **more})


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def titles(svg: str) -> list[str]:
    return [e.text or "" for e in parsed(svg).iter("title")]


def words(svg: str) -> str:
    return " ".join("".join(e.itertext()) for e in parsed(svg).iter("text"))


def cells(svg: str) -> list[str]:
    """The colours of the cells, in order."""
    return re.findall(r"<rect y='28'[^>]*? fill='([^']*)'", svg)


def test_a_full_ring_says_what_lies_where() -> None:
    svg = ring_svg(ring(11))
    assert titles(svg)[:4] == [
        "slot 0: token 8, age 2",
        "slot 1: token 9, age 1",
        "slot 2: token 10, age 0",
        "slot 3: token 3, age 7; the head; the next token goes here",
    ]
    assert len(titles(svg)) == 8 and "▲ head" in words(svg) and "▼ next" in words(svg)
    label = parsed(svg).get("aria-label") or ""
    assert label.startswith("Ring of group 0 in memory: 8 of 8 slots filled, head in slot 3, next slot 3")
    assert "slot 2 token 10, age 0" in label and parsed(svg).get("role") == "img"


def test_in_logical_order_the_oldest_comes_first() -> None:
    told = titles(ring_svg(ring(11), logical=True))
    assert [re.findall(r"token (\d+)", t)[0] for t in told] == [str(t) for t in range(3, 11)]
    assert told[0].startswith("slot 3:")
    assert len(titles(ring_svg(ring(5), logical=True))) == 5
    assert words(ring_svg(ring(0), logical=True)) == "empty"


def test_colours_go_from_the_oldest_to_the_newest() -> None:
    svg = ring_svg(ring(8))
    colours = cells(svg)
    assert len(set(colours)) == 8 and colours[0] == "#440154" and colours[-1] == "#fde725"
    assert cells(ring_svg(ring(8), logical=True)) == colours
    assert cells(ring_svg(ring(1))).count("#fde725") == 1


def test_empty_slots_and_those_beyond_the_window_have_no_colour() -> None:
    svg = ring_svg(ring(3, window=5, slots=7))
    assert cells(svg)[3:] == ["none"] * 4
    assert titles(svg)[3:] == [
        "slot 3: empty; the next token goes here",
        "slot 4: empty",
        "slot 5: beyond the group's window",
        "slot 6: beyond the group's window",
    ]
    assert words(svg).count("empty") == 2 and words(svg).count("unused") == 2


def test_a_step_s_marks_have_words() -> None:
    before = ring(10, leaving=np.array([2]), entering=np.array([10]))
    svg = ring_svg(before)
    assert "▼ 10 enters" in words(svg) and "✕ leaves" in words(svg) and "●" not in words(svg)
    assert "slot 2: token 2, age 7; the head; the next token goes here; leaves with this chunk; " in svg
    assert "leaving: 2, entering: 10" in (parsed(svg).get("aria-label") or "")
    after = ring(11, written=np.array([2]), evicted=np.array([2]), evicted_slots=np.array([2]))
    svg = ring_svg(after)
    assert "● new" in words(svg) and "✕ 2 left" in words(svg) and "leaves" not in words(svg)
    assert "slot 2: token 10, age 0; just written; token 2 has just left" in titles(svg)


def test_texts_are_shown_and_escaped() -> None:
    named = replace(ring(2), texts=("<b>&", "extraordinary", *[""] * 6))
    svg = ring_svg(named)
    assert titles(svg)[0] == "slot 0: token 0 ‘<b>&’, age 1; the head"
    assert "<b>&" in words(svg) and "extraor…" in words(svg)


def test_keys_of_no_known_token_are_said_to_be_so() -> None:
    odd = ring(4)
    odd.tokens[1] = -2
    svg = ring_svg(odd)
    assert titles(svg)[1] == "slot 1: the key of no known token" and "? key" in words(svg)


def test_a_large_ring_is_drawn_in_rows_with_marks_explained() -> None:
    chunk = {
        "written": np.arange(48, 64),
        "evicted": np.arange(48, 64),
        "evicted_slots": np.arange(48, 64),
    }
    svg = ring_svg(ring(192, window=128, **chunk))
    assert len(titles(svg)) == 128 and titles(svg)[5] == "slot 5: token 133, age 58"
    assert titles(svg)[50].endswith("just written; token 50 has just left")
    told = words(svg)
    assert told.startswith("0 32 64 96 oldest to newest · slots in memory")
    assert "◤ head: 64 · ○ next: 64 · ▣ written: 48 to 63 · ✕ left: tokens 48 to 63" in told
    going = ring_svg(ring(192, window=128, leaving=np.arange(64, 70), entering=np.arange(192, 198)))
    assert "╲ leaving: tokens 64 to 69" in words(going) and "written" not in words(going)
    logical = ring_svg(ring(192, window=128), logical=True)
    assert titles(logical)[0].startswith("slot 64: token 64, age 127")
    assert "logical order, oldest first" in words(logical)


def test_256_slots_are_drawn_in_less_than_60_kB() -> None:
    marks = {"written": np.arange(64), "evicted": np.arange(64), "evicted_slots": np.arange(64)}
    for logical in (False, True):
        svg = ring_svg(ring(576, window=256, **marks), logical=logical)
        assert len(titles(svg)) == 256 and len(svg.encode()) < 60_000


def test_in_a_very_large_ring_a_cell_stands_for_several_slots_and_says_so() -> None:
    svg = ring_svg(ring(5000, window=2000))
    assert len(titles(svg)) == 500
    assert titles(svg)[1] == "slots 4 to 7, in the newest of them, slot 7: token 4007, age 992"
    assert "a cell: 4 slots" in words(svg) and "a cell stands for 4 slots" in (
        parsed(svg).get("aria-label") or ""
    )


@pytest.mark.parametrize("slots", [8, 40, 700])
def test_rings_that_broken_kernels_left_are_drawn(slots: int, rng: np.random.Generator) -> None:
    for _ in range(20):
        words_of_meta = [int(x) for x in rng.integers(0, 1 << 32, 4)]
        tokens = rng.integers(-2, 900, slots)
        length, head, far, own = words_of_meta if rng.random() < 0.5 else [x % 60 for x in words_of_meta]
        some = [rng.choice(slots, 3, replace=False) for _ in range(3)]
        odd = Ring(
            1,
            slots - 2,
            slots,
            length,
            head,
            far,
            own,
            tokens,
            some[0],
            some[1],
            some[2],
            tokens[:2],
            tokens[2:5],
        )
        for logical in (False, True):
            assert parsed(ring_svg(odd, logical=logical)).tag == "svg"
