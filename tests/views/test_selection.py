"""Block scores with the cut, and the passes of the radix select that finds it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("plotly")

from lab.qsa.readings import Chosen
from lab.qsa.selection import block_cells, okey, selection
from lab.views import block_scores, radix_passes
from lab.views.selection import BLOCKS, NEAR


def chosen(scores: Any, n_kv: int, budget: int, reference: Any = None, token: int = 3) -> Chosen:
    """What a right kernel leads to, or one that has not written its scores yet."""
    scores = np.array(scores, np.float32)
    found = None if np.isnan(scores).any() else selection(scores, n_kv, budget)
    reference = scores if reference is None else np.array(reference, float)
    return Chosen(token, n_kv, budget, scores, reference, found, None if found is None else found.ids)


def drawn(figure: Any) -> dict[str, Any]:
    """Traces by name, without the counts."""
    return {trace.name.partition(" (")[0]: trace for trace in figure.data}


SCORES = [3.0, 1.0, 2.0, 2.0, 0.5, 2.0]


def test_blocks_lie_at_their_number_and_score_by_what_becomes_of_them() -> None:
    figure = block_scores(chosen(SCORES, 24, 8))  # block 0, and one of the three with the score 2
    traces = drawn(figure)
    for name, blocks in (
        ("above the cut", [0]),
        ("at the cut, taken", [2]),
        ("at the cut, left out", [3, 5]),
        ("below", [1, 4]),
    ):
        assert list(traces[name].x) == blocks and list(traces[name].y) == [SCORES[b] for b in blocks]
    symbols = [traces[name].marker.symbol for name in list(traces)[:4]]
    assert len(set(symbols)) == 4
    assert "at the cut, left out (2)" in [trace.name for trace in figure.data]


def test_the_cut_is_a_line_at_its_score_and_the_title_has_the_margin() -> None:
    figure = block_scores(chosen([3.0, 1.0, 2.5, 0.5], 16, 8))
    assert [(line.y0, line.y1) for line in figure.layout.shapes] == [(2.5, 2.5)] * 2
    assert "cut at 2.5" in figure.layout.title.text and "margin 1.5" in figure.layout.title.text


def test_differences_from_the_reference_have_an_axis_around_zero() -> None:
    reference = np.array(SCORES) - [0, 0.25, 0, 0, 0, 0]
    figure = block_scores(chosen(SCORES, 24, 8, reference))
    assert drawn(figure)["difference"].y.tolist() == [0, 0.25, 0, 0, 0, 0]
    assert figure.layout.yaxis2.range == (-0.3125, 0.3125)


def test_blocks_next_to_the_cut_are_shown_by_rank(rng: np.random.Generator) -> None:
    scores = rng.permutation(100).astype(float)
    near = drawn(block_scores(chosen(scores, 400, 4 * 50)))["next to the cut"]
    assert list(near.x) == list(range(51 - NEAR, 51 + NEAR))
    assert list(near.y) == [100.0 - rank for rank in near.x]
    at_cut = list(near.x).index(50)
    assert "at the cut, taken" in near.text[at_cut] and "below" in near.text[at_cut + 1]
    assert near.customdata[at_cut, 3] == 4 * np.flatnonzero(scores == 50)[0]  # its first cell


def test_an_unfinished_block_lies_on_the_upper_edge_as_a_triangle() -> None:
    above = drawn(block_scores(chosen([1.0, 2.0, 0.5, np.inf], 13, 5)))["above the cut"]
    assert list(above.x) == [3] and list(above.marker.symbol) == ["triangle-up"]
    assert 2 < above.y[0] < 3 and np.isinf(above.customdata[0, 0])


def test_where_every_cell_is_taken_there_is_no_cut() -> None:
    figure = block_scores(chosen(SCORES, 24, 30))
    assert not figure.layout.shapes and list(drawn(figure)["all taken"].x) == list(range(6))
    assert "every cell is taken" in figure.layout.title.text


def test_before_scores_are_written_the_reference_is_shown() -> None:
    figure = block_scores(chosen([np.nan] * 3, 12, 8, [1, 2, 3]))
    assert list(drawn(figure)["reference"].y) == [1, 2, 3]
    assert any("not written" in note.text for note in figure.layout.annotations)
    nothing = block_scores(chosen([np.nan] * 3, 12, 8, [np.nan] * 3))
    assert "no scores yet" in nothing.layout.annotations[0].text


def test_of_many_blocks_the_largest_are_shown_with_those_at_the_cut(rng: np.random.Generator) -> None:
    scores = rng.standard_normal(5 * BLOCKS).astype(np.float32)
    given = chosen(scores, 20 * BLOCKS, 2000)
    figure = block_scores(given)
    shown = np.concatenate([t.x for t in figure.data if t.name.startswith(("above", "at the", "below"))])
    assert len(shown) <= BLOCKS + 1 and given.selection.cut.last_block in shown
    assert {int(scores[i : i + 5].argmax()) + i for i in range(0, len(scores), 5)} <= set(shown.tolist())
    assert "largest of each 5" in figure.layout.xaxis.title.text


def test_each_pass_shows_its_histogram_by_digits_that_there_are(rng: np.random.Generator) -> None:
    scores = rng.standard_normal(200).astype(np.float32)
    given = selection(scores, 799, 401)
    figure = radix_passes(given)
    for number, radix in enumerate(given.cut.passes):
        axis = f"x{number + 1}" if number else "x"
        bars = [t for t in figure.data if t.xaxis == axis and t.y is not None]
        found = {text: count for t in bars for text, count in zip(t.text, t.y, strict=True)}
        digits = np.flatnonzero(radix.histogram).tolist()
        assert found == {f"0x{d:02X}": radix.histogram[d] for d in digits}
        of_cut = next(t for t in bars if t.name.startswith("▼"))
        assert list(of_cut.text) == [f"0x{radix.digit:02X}"]
        greater = [t for t in bars if t.name.startswith("greater")]
        assert sum(t.y.sum() for t in greater) == radix.cells_above
    words = [note.text for note in figure.layout.annotations]
    for radix in given.cut.passes:
        assert any(f"{radix.wanted} wanted → {radix.still_wanted}" in text for text in words)


def test_the_passes_end_at_the_key_of_the_cut() -> None:
    scores = np.array([0.5, 2.5, 1.0], np.float32)
    figure = radix_passes(selection(scores, 12, 4))
    key = f"{int(okey(scores[1])):08X}"
    assert " ".join(key[i : i + 2] for i in range(0, 8, 2)) in figure.layout.title.text
    assert len(block_cells(12)) == 3 and "score 2.5" in figure.layout.title.text


def test_without_a_cut_no_pass_runs() -> None:
    figure = radix_passes(selection(np.zeros(3), 12, 12))
    assert not figure.data and "Every cell is taken" in figure.layout.annotations[0].text
