"""Chosen cells: hits, misses and extras where they are, ties at the cut and needles marked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("plotly")

from lab.qsa.readings import Chosen
from lab.qsa.selection import selection
from lab.views import chosen_cells
from lab.views.cells import SPANS

SCORES = np.array([1.0, 3.0, 2.0, 2.0, 0.5], np.float32)


def chosen(
    ids: Any, *, scores: np.ndarray = SCORES, n_kv: int = 20, budget: int = 8, needles: Any = ()
) -> Chosen:
    found = None if np.isnan(scores).any() else selection(scores, n_kv, budget)
    ids = found.ids if found is not None and isinstance(ids, str) else ids
    listed = None if ids is None else np.asarray(ids, np.int32)
    return Chosen(0, n_kv, budget, scores, scores.astype(float), found, listed, tuple(needles))


def bars(figure: Any, name: str, up: bool) -> np.ndarray:
    """The shares of spans of one kind, upwards or downwards."""
    shares = [t.y for t in figure.data if t.type == "bar" and t.name == name and (max(t.y) > 0) == up]
    return shares[0] if shares else np.zeros(1)


def marks(figure: Any, name: str) -> Any:
    return next(t for t in figure.data if t.type == "scatter" and t.name == name)


def test_where_the_lists_agree_the_picture_is_its_own_mirror_image() -> None:
    figure = chosen_cells(chosen("right"))
    expected = [1.0 if 4 <= cell < 12 else 0.0 for cell in range(20)]
    assert list(bars(figure, "hits", True)) == expected
    assert list(bars(figure, "hits", False)) == [-x for x in expected]
    assert not bars(figure, "extras", True).any() and not bars(figure, "misses", False).any()
    assert "8 hits" in figure.layout.title.text
    assert list(figure.layout.yaxis2.ticktext) == ["0 misses", "0 extras", "8 at the cut"]


def test_misses_and_extras_are_marked_at_their_cells_by_colour_and_symbol() -> None:
    figure = chosen_cells(chosen([4, 5, 6, 7, 8, 9, 10, 13]))
    miss, extra = marks(figure, "misses"), marks(figure, "extras")
    assert list(miss.x) == [11] and list(extra.x) == [13]
    assert miss.marker.symbol != extra.marker.symbol and miss.marker.color != extra.marker.color
    assert bars(figure, "misses", False)[11] == -1 and bars(figure, "extras", True)[13] == 1
    assert bars(figure, "hits", True)[13] == 0
    assert "1 misses" in figure.layout.yaxis2.ticktext and "7 hits" in figure.layout.title.text


def test_cells_of_blocks_with_the_score_of_the_cut_are_marked() -> None:
    assert list(marks(chosen_cells(chosen("right")), "at the cut").x) == list(range(8, 16))


def test_needles_that_the_kernel_lost_are_hollow() -> None:
    needles = marks(chosen_cells(chosen("right", needles=(5, 18))), "needles")
    assert list(needles.x) == [5, 18] and list(needles.marker.symbol) == ["star", "star-open"]
    assert "lost" in needles.text[1] and "lost" not in needles.text[0]


def test_numbers_that_are_no_cells_are_told_and_not_drawn() -> None:
    figure = chosen_cells(chosen([4, 5, 6, 7, 8, 9, 10, 99]))
    assert "1 numbers that are no cells" in figure.layout.title.text
    assert bars(figure, "hits", True).sum() == 7


def test_before_the_kernel_has_listed_anything_the_reference_stands_alone() -> None:
    figure = chosen_cells(chosen(None))
    assert bars(figure, "reference", False).sum() == -8
    assert not any(t.type == "bar" and max(t.y) > 0 for t in figure.data)
    assert any("not listed" in note.text for note in figure.layout.annotations)


def test_without_an_order_the_kernel_stands_alone_and_without_both_there_is_a_note() -> None:
    nan = np.full(5, np.nan, np.float32)
    figure = chosen_cells(chosen([0, 1, 2], scores=nan))
    assert bars(figure, "kernel", True).sum() == 3 and "no order" in figure.layout.title.text
    assert "nothing is listed" in chosen_cells(chosen(None, scores=nan)).layout.annotations[0].text


def test_many_cells_are_counted_in_spans_that_the_axis_names(rng: np.random.Generator) -> None:
    scores = rng.standard_normal(2500).astype(np.float32)
    figure = chosen_cells(chosen("right", scores=scores, n_kv=9998, budget=3000))
    hits = next(t for t in figure.data if t.type == "bar" and t.name == "hits" and max(t.y) > 0)
    assert len(hits.x) <= SPANS and hits.customdata[:, 2].sum() == 3000
    assert f"of {hits.width} cells each" in figure.layout.xaxis.title.text
    assert hits.customdata[-1, 1] == 9997  # the last span ends where the cells do
    assert max(hits.y) <= figure.layout.yaxis.range[1]


def test_very_many_marks_are_one_for_each_span(rng: np.random.Generator) -> None:
    scores = np.zeros(2500, np.float32)  # all at the cut
    figure = chosen_cells(chosen("right", scores=scores, n_kv=10000, budget=5000))
    ties = marks(figure, "at the cut")
    assert len(ties.x) <= SPANS and "and 32 more" in ties.text[0]
    assert "10000 at the cut" in figure.layout.yaxis2.ticktext


def test_misses_and_extras_of_random_lists_are_all_there(rng: np.random.Generator) -> None:
    scores = rng.standard_normal(50).astype(np.float32)
    ids = np.sort(rng.choice(200, 80, replace=False))
    given = chosen(ids, scores=scores, n_kv=200, budget=80)
    figure = chosen_cells(given)
    assert list(marks(figure, "misses").x) == given.misses.tolist()
    assert list(marks(figure, "extras").x) == given.extras.tolist()
