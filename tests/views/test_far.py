"""The far field's views: gains, maxima and masses, and the distance from exact attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("plotly")

from lab.o1.data import ApproximationError
from lab.o1.readings import Gains, Masses
from lab.views import approximation, approximation_over_rows, far_gains, masses
from lab.views.far import POINTS, STEPS


def gains(kernel: Any, reference: Any, first: int = 32) -> Gains:
    kernel, reference = np.array(kernel, float), np.array(reference, float)
    return Gains(1, first, kernel, reference, kernel.sum(1), reference.sum(1))


def holding(maxima: Any, sums: Any) -> Masses:
    """After chunks of 4 tokens, and right to the bit."""
    maxima, sums = np.array(maxima, float), np.array(sums, float)
    return Masses(1, 4 * np.arange(1, len(maxima) + 1), maxima, sums, maxima, sums)


def maps(figure: Any) -> list[Any]:
    return [trace for trace in figure.data if trace.type == "heatmap"]


def test_gains_stand_beside_the_reference_and_their_difference(rng: np.random.Generator) -> None:
    reference = rng.uniform(0, 0.1, (3, 4))
    kernel = reference.copy()
    kernel[2, 1] += 0.05
    figure = far_gains(gains(kernel, reference))
    first, second, third = maps(figure)
    np.testing.assert_allclose(first.z, kernel, rtol=1e-6)
    np.testing.assert_allclose(second.z, reference, rtol=1e-6)
    np.testing.assert_allclose(third.z, kernel - reference, atol=1e-8)
    assert list(first.y) == [32, 33, 34] and list(first.x) == [0, 1, 2, 3]
    np.testing.assert_allclose(first.customdata[2, 1], [kernel[2, 1], reference[2, 1], 0.05], rtol=1e-5)


def test_gains_of_kernel_and_reference_share_a_scale_and_differences_go_around_zero() -> None:
    figure = far_gains(gains([[0.1, 0.2]], [[0.1, 0.5]]))
    first, second, third = maps(figure)
    assert first.coloraxis == second.coloraxis == "coloraxis" and third.coloraxis == "coloraxis2"
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 0.5)
    assert figure.layout.coloraxis2.cmin == -figure.layout.coloraxis2.cmax


def test_negative_gains_are_shown_around_zero() -> None:
    figure = far_gains(gains([[0.1, -0.2]], [[0.1, -0.2]]))
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (-0.2, 0.2)
    assert figure.layout.coloraxis.colorscale == figure.layout.coloraxis2.colorscale


def test_far_shares_lie_beside_their_rows() -> None:
    figure = far_gains(gains([[0.1, 0.2], [0.3, 0.3]], [[0.1, 0.2], [0.2, 0.3]]))
    kernel, reference = (next(t for t in figure.data if t.name == n) for n in ("kernel", "reference"))
    assert kernel.x.tolist() == pytest.approx([0.3, 0.6]) and reference.x.tolist() == pytest.approx(
        [0.3, 0.5]
    )
    assert list(kernel.y) == list(reference.y) == [32, 33]
    assert figure.layout.yaxis4.range == figure.layout.yaxis.range == (33.5, 31.5)


def test_without_gains_there_is_a_note_and_without_the_kernels_there_is_the_reference() -> None:
    nothing = np.full((2, 3), np.nan)
    assert "nothing has left the window" in far_gains(gains(nothing, nothing)).layout.annotations[0].text
    figure = far_gains(gains(nothing, np.full((2, 3), 0.1)))
    assert any("not written" in note.text for note in figure.layout.annotations)
    np.testing.assert_allclose(maps(figure)[1].z, 0.1)


def points(figure: Any, name: str, axis: str) -> Any:
    return next(t for t in figure.data if (t.name, t.xaxis) == (name, axis) and t.x[0] is not None)


def test_maxima_and_masses_are_points_over_the_tokens_pushed() -> None:
    figure = masses(holding([[1, 2], [1.5, 2]], [[1, 1], [1.8, 2]]))
    for axis, expected in (("x", [1, 2, 1.5, 2]), ("x2", [1, 1, 1.8, 2])):
        for name in ("kernel", "reference"):
            found = points(figure, name, axis)
            assert list(found.x) == [4, 4, 8, 8] and list(found.y) == expected
            assert list(found.customdata) == [0, 1, 0, 1]
    for letter in "Mz":
        assert not points(figure, letter, "x3").y.any()


def test_a_deviation_of_the_masses_is_told_as_a_share_of_the_largest() -> None:
    figure = masses(replace(holding([[1, 2]], [[1, 4]]), masses=np.array([[1.0, 3.0]])))
    assert list(points(figure, "z", "x3").y) == [0, -0.25] and not points(figure, "M", "x3").y.any()


def test_landmarks_that_hold_nothing_have_no_points() -> None:
    figure = masses(holding([[-np.inf, -np.inf], [1, -np.inf]], [[0, 0], [1, 0]]))
    for axis in ("x", "x2"):
        assert np.isnan(points(figure, "kernel", axis).y).tolist() == [True, True, False, True]
    empty = masses(holding([[-np.inf]], [[0]]))
    assert not empty.data and "Nothing has left the window" in empty.layout.annotations[0].text


def test_of_many_chunks_some_are_shown_and_the_last_is_among_them(rng: np.random.Generator) -> None:
    values = rng.uniform(1, 2, (10 * STEPS + 3, 2))
    found = points(masses(holding(values, values)), "kernel", "x")
    assert len(found.x) <= 2 * STEPS and found.x[-1] == 4 * len(values) and found.y[-1] == values[-1, 1]


def test_each_window_has_a_line_over_the_landmarks() -> None:
    errors = [ApproximationError(w, m, 0.1 / (w * (m + 1))) for m in (16, 0, 4) for w in (64, 32)]
    figure = approximation(errors)
    first, second = figure.data
    assert (first.name, second.name) == ("window 32", "window 64")
    assert list(first.customdata) == [0, 4, 16] and list(first.x) == [0, 1, 2]
    assert list(first.y) == [0.1 / (32 * (m + 1)) for m in (0, 4, 16)]
    assert list(figure.layout.xaxis.ticktext) == ["0", "4", "16"] and figure.layout.yaxis.type == "log"
    assert first.marker.symbol != second.marker.symbol and first.line.color != second.line.color
    assert "no errors" in approximation([]).layout.annotations[0].text


def test_errors_along_the_sequence_have_a_median_and_a_band() -> None:
    errors = np.array([[1e-7, 3e-7, 2e-7], [1e-2, 4e-2, 3e-2], [2e-2, 2e-2, 9e-2]])
    figure = approximation_over_rows(errors, first=10, window=11)
    low, high, median = figure.data
    assert list(median.x) == [10, 11, 12] and list(median.y) == [2e-7, 3e-2, 2e-2]
    assert list(low.y) == [1e-7, 1e-2, 2e-2] and list(high.y) == [3e-7, 4e-2, 9e-2]
    assert median.customdata[:, 3].tolist() == [1, 1, 2]  # the worst head
    assert figure.layout.shapes[0].x0 == 11 and "first eviction" in figure.layout.annotations[0].text


def test_a_window_that_is_not_left_is_not_marked() -> None:
    assert not approximation_over_rows(np.full((4, 1), 0.1), window=8).layout.shapes


def test_long_sequences_are_pooled_and_the_axis_says_so(rng: np.random.Generator) -> None:
    errors = rng.uniform(0, 1, (3 * POINTS, 2))
    figure = approximation_over_rows(errors)
    assert len(figure.data[2].x) == POINTS and "largest of each 3" in figure.layout.xaxis.title.text
    assert figure.data[2].y.max() == np.median(errors, 1).max()
