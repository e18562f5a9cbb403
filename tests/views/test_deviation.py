"""Maps of how far a buffer is off, and the worst elements, on traces of small systems."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("plotly")

import lab.o1
from lab import ArgumentError
from lab.systems import Trace
from lab.views import error, of_step, worst_elements

SIZES = lab.o1.Sizes(ng=2, hpg=2, d=8, w=4, ns=1, m=3)
SOUND = "t_hat[t * d4 + x] * s[rescale_at(u, t)]"


def record(session: lab.o1.Session) -> Trace:
    state, q, k, v = lab.o1.example(SIZES, rows=8)
    return session.trace(state, q, k, v, chunks=2)


def replaced(kernel: str, changes: dict[str, str]) -> Trace:
    """The trace of a run in which the source of one kernel is another."""
    session = lab.o1.session()
    source = session.source(kernel)
    for old, new in changes.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    session.replace(source, kernel)
    return record(session)


@pytest.fixture(scope="module")
def right() -> Trace:
    return record(lab.o1.session())


@pytest.fixture(scope="module")
def broken() -> Trace:
    """A trace in which the far sums are not rescaled."""
    return replaced("o1c_far_commit", {SOUND: "t_hat[t * d4 + x]"})


def levels(figure: Any) -> np.ndarray:
    """The distances that are drawn: colours are their logarithm."""
    return 10.0 ** np.asarray(figure.data[0].z, float)


def test_relative_distances_are_shares_of_the_largest_expected_value() -> None:
    expected = np.array([[1.0, -4.0], [2.0, 0.0]])
    value = expected + np.array([[0, 0.04], [-0.4, 0]])
    figure = error(value, expected)
    np.testing.assert_allclose(levels(figure), [[1e-8, 0.01], [0.1, 1e-8]], rtol=1e-5)
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (-8, 0)
    np.testing.assert_allclose(figure.data[0].customdata[0, 1], [0, 1, -3.96, -4, 0.01], rtol=1e-6)


def test_absolute_distances_go_up_to_the_largest_expected_value() -> None:
    figure = error(np.array([[1.5, 4.0]]), np.array([[1.0, 4.0]]), mode="absolute")
    np.testing.assert_allclose(levels(figure), [[0.5, 4e-8]], rtol=1e-5)
    assert 10**figure.layout.coloraxis.cmax == pytest.approx(4)


def test_ulp_distances_count_neighbouring_float32() -> None:
    expected = np.array([1.0, 1000.0, 1e-6], np.float32)
    value = expected.copy()
    for _ in range(10):
        value = np.nextafter(value, np.float32(np.inf))
    figure = error(value, expected, mode="ulp")
    np.testing.assert_allclose(levels(figure), [[10, 10, 10]], rtol=1e-3)


def test_what_is_not_defined_has_no_colour_and_what_is_no_number_has_its_own() -> None:
    expected = np.ones((2, 3))
    value = np.array([[np.nan, 1.0, np.inf], [1.0, 7.0, 1.0]])
    figure = error(value, expected, np.array([[True, True, True], [True, False, True]]))
    assert np.isnan(figure.data[0].z[1, 1]) and np.isfinite(figure.data[0].z[0, 1])
    wild = figure.data[1]
    np.testing.assert_array_equal(np.isnan(wild.z), [[False, True, False], [True, True, True]])
    assert sorted(zip(figure.data[2].x, figure.data[2].y, strict=True)) == [(0, 0), (2, 0)]


def test_large_arrays_are_pooled_to_the_largest_distance_and_axes_say_so(rng: np.random.Generator) -> None:
    expected = rng.standard_normal((200, 1000))
    value = expected.copy()
    value[150, 777] += 1
    figure = error(value, expected, mode="absolute", rows="token", columns="dimension")
    drawn = figure.data[0]
    assert drawn.z.shape[0] <= 64 and drawn.z.shape[1] <= 256
    assert figure.layout.xaxis.title.text == "dimension (largest of each 4)"
    assert figure.layout.yaxis.title.text == "token (largest of each 4)"
    place = np.unravel_index(drawn.z.argmax(), drawn.z.shape)
    assert drawn.customdata[place][:2].tolist() == [150, 777]
    assert drawn.x[place[1]] <= 777 < drawn.x[place[1]] + 4


def test_arrays_that_do_not_fit_and_unknown_modes_are_refused() -> None:
    with pytest.raises(ArgumentError, match="of one shape"):
        error(np.zeros(3), np.zeros(4))
    with pytest.raises(ArgumentError, match="relative, absolute or ulp, not 'squared'"):
        error(np.zeros(3), np.zeros(3), mode="squared")


def test_integers_that_differ_are_off_by_their_difference() -> None:
    figure = error(np.array([3, 5], np.int32), np.array([3, 9], np.int32), mode="absolute")
    np.testing.assert_allclose(levels(figure)[0, 1], 4, rtol=1e-5)


def test_a_step_that_is_right_says_so_and_has_no_crosses(right: Trace) -> None:
    for step in right[-11:]:
        for buffer in step.dispatch.writes:
            figure = of_step(step, buffer)
            assert "all as expected" in figure.layout.title.text
            assert all(trace.type == "heatmap" for trace in figure.data)


def test_the_worst_element_of_a_broken_step_is_marked_where_it_is(broken: Trace) -> None:
    first = broken.first_deviation()
    assert first is not None and first.buffer == "t_hat"
    figure = of_step(broken[first.step], "t_hat")
    drawn, crosses = figure.data
    group, head, landmark, dimension = (int(word.split()[1]) for word in first.where.split(", "))
    told = drawn.customdata.reshape(-1, drawn.customdata.shape[-1])
    (mine,) = told[(told[:, :4] == [group, head, landmark, dimension]).all(1)]
    assert mine[4:6] == pytest.approx([first.value, first.expected], rel=1e-6)
    assert mine[6] == pytest.approx(first.relative, rel=1e-5)
    row = list(drawn.y).index((group * SIZES.hpg + head) * SIZES.m + landmark)
    marked = set(zip(crosses.x.tolist(), crosses.y.tolist(), strict=True))
    assert (drawn.x[dimension], drawn.y[row]) in marked
    assert "beyond rounding" in figure.layout.title.text


def test_rows_that_a_dispatch_has_not_touched_are_cut_away(right: Trace) -> None:
    step = next(s for s in right if s.kernel == "o1c_add" and s.plan.first == 4)
    figure = of_step(step, "out")
    rows = np.unique(figure.data[0].customdata[..., 0])
    assert rows.tolist() == [4, 5]


def test_of_several_fields_the_worst_is_shown_or_the_one_asked_for(right: Trace) -> None:
    step = next(s for s in right if s.kernel == "o1c_far_commit" and s.plan.first == 6)
    worst = max((d for d in step.deviations if d.buffer == "mz"), key=lambda d: d.roundings / d.tolerance)
    assert of_step(step, "mz").layout.title.text.startswith(f"{worst.field} of mz")
    assert of_step(step, "mz", "M").layout.title.text.startswith("M of mz after")
    with pytest.raises(ArgumentError, match="no field 'x': it has M, z"):
        of_step(step, "mz", "x")


def test_a_buffer_of_which_the_reference_says_nothing_has_a_note(right: Trace) -> None:
    figure = of_step(right[0], "ring_k")
    assert not figure.data and "says nothing of ring_k" in figure.layout.annotations[0].text
    assert "says nothing" in worst_elements(right[0], "ring_k").layout.annotations[0].text
    with pytest.raises(ArgumentError, match="no buffer 'nosuch'"):
        of_step(right[0], "nosuch")


def test_worst_elements_are_listed_in_words_the_worst_first(broken: Trace) -> None:
    first = broken.first_deviation()
    assert first is not None
    (table,) = worst_elements(broken[first.step], "t_hat", count=4).data
    marks, _, where, value, expected, *_ = table.cells.values
    assert len(where) == 4 and set(marks) == {"✗"}
    assert where[0] == first.where
    assert float(value[0]) == pytest.approx(first.value) and float(expected[0]) == pytest.approx(
        first.expected
    )
    roundings = [float(text) for text in table.cells.values[7]]
    assert roundings == sorted(roundings, reverse=True)


def test_elements_that_rounding_explains_are_listed_without_a_cross(right: Trace) -> None:
    step = next(s for s in right if s.kernel == "o1c_add")
    (table,) = worst_elements(step, "out").data
    assert set(table.cells.values[0]) == {""}


def test_where_all_is_exact_the_table_says_so(right: Trace) -> None:
    step = next(s for s in right if s.kernel == "o1c_meta")
    assert "exactly what the reference has" in worst_elements(step, "meta").layout.annotations[0].text


def test_a_buffer_that_was_not_the_kernel_s_to_write_is_compared_with_what_it_was() -> None:
    line = "    device const float4* landmark = k_tilde"
    careless = {
        "o1c_land(device const float4* q": "o1c_land(device float4* q",
        line: f"    q[0].x = 7.0f;\n{line}",
    }
    step = next(s for s in replaced("o1c_land", careless) if s.kernel == "o1c_land")
    assert "q" in step.written and "q" not in step.dispatch.writes
    assert "1 of 256 beyond rounding" in of_step(step, "q").layout.title.text
    (table,) = worst_elements(step, "q").data
    assert list(table.cells.values[0]) == ["✗"] and float(table.cells.values[3][0]) == 7


def test_a_step_that_did_not_come_to_its_end_says_why() -> None:
    step = replaced("o1c_meta", {"    if (g < u.ng) {": "    meta[1 << 28] = 1;\n    if (g < u.ng) {"})[-1]
    assert step.fault
    for figure in (of_step(step, "meta"), worst_elements(step, "meta")):
        assert not figure.data and "did not come to its end" in figure.layout.annotations[0].text
