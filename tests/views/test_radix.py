"""The radix select in HTML: digits, counts and the histogram are those of the selection."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

import lab.qsa
from lab.qsa.selection import Cut
from lab.views import radix


def cut_of(scores: object, n_kv: int, budget: int) -> Cut:
    cut = lab.qsa.selection(scores, n_kv, budget).cut
    assert cut is not None
    return cut


def cells_of(html: str) -> list[list[str]]:
    """The words of the table's rows."""
    rows = ElementTree.fromstring(html).iter("tr")
    return [["".join(cell.itertext()) for cell in row] for row in rows]


def test_the_passes_narrow_to_the_threshold() -> None:
    # Keys 0xC0000000, 0xBF800000, 0xC0400000 and, for infinity, 0xFF800000.
    cut = cut_of([2, 1, 3, 2, np.inf], 18, 8)
    head, *rows = cells_of(radix.passes(cut, 1))
    assert head == [
        "pass", "bits", "key so far", "scores", "cells", "wanted", "digit", "cells above", "still wanted",
    ]  # fmt: skip
    assert rows == [
        ["1", "31–24", "C0 ·· ·· ··", "2 to 8", "18", "8", "0xC0", "2", "6"],
        ["▶ 2", "23–16", "C0 00 ·· ··", "2 to 2.015625", "12", "6", "0x00", "4", "2"],
        ["3", "15–8", "C0 00 00 ··", "2 to 2.000061", "8", "2", "0x00", "0", "2"],
        ["4", "7–0", "C0 00 00 00", "2", "8", "2", "0x00", "0", "2"],
    ]


def test_the_histogram_has_a_bar_for_each_digit_that_occurs(rng: np.random.Generator) -> None:
    cut = cut_of(rng.standard_normal(500), 1998, 700)
    for one in cut.passes:
        svg = ElementTree.fromstring(f"<div>{radix.histogram(one)}</div>").find("svg")
        assert svg is not None
        told = [title.text for title in svg.iter("title")]
        digits = np.flatnonzero(one.histogram)
        assert told == [f"digit 0x{d:02X}, cells: {one.histogram[d]}" for d in digits]
        taken = [rect for rect in svg.iter("rect") if rect.get("fill") == "#0072b2"]
        assert len(taken) == (digits > one.digit).sum()
        label = str(svg.get("aria-label"))
        assert f": {one.cells_above} with a greater digit than 0x{one.digit:02X}" in label
        assert f"of which {one.still_wanted} wanted" in label


@pytest.mark.parametrize("score", [np.inf, -np.inf, 0.0, -0.0, -1e-45, 3e38, -3e38])
def test_scores_at_the_ends_of_the_order_are_told_as_numbers(score: float) -> None:
    html = radix.passes(cut_of([score] * 3, 12, 5), 0)
    assert "nan" not in html.lower()
    assert cells_of(html)[-1][3] == f"{np.float32(score) + 0:.7g}"


def test_a_state_of_many_scores_stays_small(rng: np.random.Generator) -> None:
    cut = cut_of(rng.standard_normal(20000), 80000, 2051)
    assert all(len(radix.passes(cut, number)) < 40_000 for number in range(4))
