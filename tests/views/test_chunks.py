"""Attention by chunk and along the cells: the numbers of the readings, at their places."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("plotly")

from lab.qsa.readings import Cellweights, Masses
from lab.views.chunks import SPANS, cell_shares, chunk_shares


def masses(sums: object) -> Masses:
    maxima = np.array([[1.0, 2.0, 0.5]])
    return Masses(7, 10, 4, maxima, np.array([sums], float), maxima, np.array([[3.0, 4.0, 1.0]]))


def test_shares_of_chunks_stand_beside_the_reference() -> None:
    given = masses([3, 4, 2])
    figure = chunk_shares(given, 0)
    bars, marks = figure.data
    np.testing.assert_array_equal(bars.y, given.shares[0])
    np.testing.assert_array_equal(marks.y, given.reference_shares[0])
    assert sum(bars.y) == pytest.approx(1) == sum(marks.y) and bars.y[2] > marks.y[2]
    assert bars.customdata[:, :2].tolist() == [[0, 3], [4, 7], [8, 9]]
    assert bars.customdata[:, 3].tolist() == [3, 4, 2] and marks.customdata[:, 3].tolist() == [3, 4, 1]
    assert "Token 7, head 0" in figure.layout.title.text and "4 cells" in figure.layout.title.text


def test_chunks_that_are_not_written_yet_have_no_bars() -> None:
    assert np.isnan(chunk_shares(masses([np.nan] * 3), 0).data[0].y).all()


def test_few_cells_have_a_bar_each() -> None:
    cells = np.array([1, 4, 5, 9], np.int32)
    weights = Cellweights(0, 3, cells, cells // 4, np.array([0.1, 0.2, 0.3, 0.4]), np.full(4, 0.25))
    figure = cell_shares(weights, 12)
    bars, line = figure.data
    assert bars.x.tolist() == list(range(12)) and figure.layout.yaxis.title.text == "share of each cell"
    assert bars.y.tolist() == [0, 0.1, 0, 0, 0.2, 0.3, 0, 0, 0, 0.4, 0, 0]
    assert line.y[cells].tolist() == [0.25] * 4 and line.y.sum() == 1


def test_many_cells_are_added_up_over_spans_and_the_axis_says_so(rng: np.random.Generator) -> None:
    cells = np.sort(rng.choice(4098, 2051, replace=False)).astype(np.int32)
    shares = rng.dirichlet(np.ones(2051))
    figure = cell_shares(Cellweights(0, 0, cells, cells, shares, shares), 4098)
    bars = figure.data[0]
    assert len(bars.y) <= SPANS and bars.y.sum() == pytest.approx(1)
    assert figure.layout.yaxis.title.text == "share of every 17 cells"
    for i in (0, 100, len(bars.y) - 1):
        first, last = bars.customdata[i]
        assert bars.y[i] == pytest.approx(shares[(cells >= first) & (cells <= last)].sum())
    assert bars.customdata[-1, 1] == 4097


def test_what_is_no_cell_and_what_is_not_there_yet_is_left_out() -> None:
    cells = np.array([-(2**31), 2, 99], np.int32)
    none = np.full(3, np.nan)
    bars, line = cell_shares(Cellweights(0, 0, cells, cells, np.ones(3), none), 5).data
    assert bars.y.tolist() == [0, 0, 1, 0, 0] and np.isnan(line.y).all()
    empty = np.empty(0)
    bars, line = cell_shares(Cellweights(0, 0, empty.astype(np.int32), empty, empty, empty), 5).data
    assert np.isnan(bars.y).all() and np.isnan(line.y).all()
