"""What a row attends to: every column where it belongs, kernel beside reference, and their difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("plotly")

from lab.o1.readings import PARTS, Weights
from lab.views import attention_split, attention_weights
from lab.views.attention import ROWS

COLUMNS = ("sink 0", "token 3, slot 0", "token 4, slot 1", "row 0 of the chunk, token 5", "far field")


def weights(kernel: Any, reference: Any, row: int = 5) -> Weights:
    """A sink, two tokens of the window, a row of the chunk, the far field."""
    parts = np.array([0, 1, 1, 2, 3], np.uint8)
    return Weights(row, 2, COLUMNS, parts, np.array(kernel, float), np.array(reference, float))


KERNEL, REFERENCE = [0.1, 0.2, 0.25, 0.05, 0.4], [0.1, 0.2, 0.2, 0.1, 0.4]


def named(figure: Any, name: str) -> list[Any]:
    return [trace for trace in figure.data if trace.name == name]


def test_each_part_has_its_bars_at_its_columns() -> None:
    figure = attention_weights(weights(KERNEL, REFERENCE))
    for part, columns in zip(PARTS, ([0], [1, 2], [3], [4]), strict=True):
        (bars,) = named(figure, part)
        assert list(bars.x) == columns and list(bars.y) == [KERNEL[c] for c in columns]
        assert list(bars.hovertext) == [COLUMNS[c] for c in columns]
    assert "Row 5, head 2" in figure.layout.title.text


def test_the_far_share_has_an_axis_of_its_own_from_0_to_1() -> None:
    figure = attention_weights(weights(KERNEL, REFERENCE))
    (far,) = named(figure, "far")
    assert (far.xaxis, far.yaxis) == ("x2", "y3") and figure.layout.yaxis3.range == (0, 1)
    assert figure.layout.yaxis.range[1] < 0.4  # the tokens' axis ends where theirs do


def test_reference_and_difference_stand_beside_the_kernel() -> None:
    figure = attention_weights(weights(KERNEL, REFERENCE))
    near, far = named(figure, "reference")
    assert list(near.y) == REFERENCE[:4] and list(far.y) == REFERENCE[4:]
    near, far = named(figure, "difference")
    np.testing.assert_allclose(near.y, np.subtract(KERNEL, REFERENCE)[:4])
    assert list(far.y) == [0] and near.yaxis == far.yaxis == "y2"
    low, high = figure.layout.yaxis2.range
    assert low == -high and high > 0.05
    np.testing.assert_allclose(near.customdata[3], [0.05, 0.1, -0.05])


def test_the_palette_is_another_on_dark_pages() -> None:
    light, dark = (attention_weights(weights(KERNEL, REFERENCE), dark=dark) for dark in (False, True))
    assert named(light, "window")[0].marker.color != named(dark, "window")[0].marker.color
    assert light.layout.template.layout.font.color != dark.layout.template.layout.font.color


def test_weights_that_are_not_written_yet_are_said_to_be_so() -> None:
    figure = attention_weights(weights([np.nan] * 5, REFERENCE))
    assert "not written" in figure.layout.annotations[0].text
    assert list(named(figure, "reference")[0].y) == REFERENCE[:4]
    nothing = attention_weights(weights([np.nan] * 5, [np.nan] * 5))
    assert not nothing.data and "not written" in nothing.layout.annotations[0].text


def test_the_split_of_one_row_is_two_bars_below_each_other() -> None:
    figure = attention_split(weights(KERNEL, REFERENCE))
    shares = {trace.name: dict(zip(trace.y, trace.x, strict=True)) for trace in figure.data}
    assert list(shares) == list(PARTS)
    assert shares["window"] == {"kernel": pytest.approx(0.45), "reference": pytest.approx(0.4)}
    assert sum(share["kernel"] for share in shares.values()) == pytest.approx(1)
    assert "far 40.0%" in figure.data[3].text


def test_the_split_of_many_rows_stacks_the_parts_and_shows_their_difference() -> None:
    rows = [weights(KERNEL, REFERENCE, row) for row in (5, 6, 7)]
    figure = attention_split(rows)
    kernel, reference, off = ([t for t in figure.data if t.xaxis == axis] for axis in (None, "x2", "x3"))
    assert [t.name for t in kernel] == [t.name for t in reference] == [t.name for t in off] == list(PARTS)
    for traces in (kernel, reference):
        np.testing.assert_allclose(np.sum([t.y for t in traces], 0), 1)
        assert all(list(t.x) == [5, 6, 7] for t in traces)
    np.testing.assert_allclose([t.y[0] for t in off], [0, 0.05, -0.05, 0], atol=1e-15)
    assert figure.layout.barmode == "stack" and "head 2" in figure.layout.title.text


def test_of_very_many_rows_some_are_left_out_and_the_axis_says_so() -> None:
    figure = attention_split([weights(KERNEL, REFERENCE, row) for row in range(3 * ROWS)])
    assert len(figure.data[0].x) == ROWS and "every 3" in figure.layout.xaxis.title.text


def test_a_split_without_rows_or_without_weights_says_so() -> None:
    assert "no rows" in attention_split([]).layout.annotations[0].text
    figure = attention_split([weights([np.nan] * 5, REFERENCE, row) for row in (1, 2)])
    assert any("not written" in note.text for note in figure.layout.annotations)
