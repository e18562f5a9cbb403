"""Data for QSA: random layers from their seeds, and needles that a selection finds, or, broken, loses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import lab
import lab.qsa
from lab.qsa import Sizes, data

SIZES = Sizes(qbudget=64, qch=64, max_cells=1100)


def test_random_data_comes_from_its_seed() -> None:
    cache, qfull, qcur, k, v = lab.qsa.example(SIZES, 30, 4, 5)
    assert cache.cells == 30 and qfull.shape == (4, 24, 512) and qcur.shape == (4, 24, 256)
    assert k.shape == v.shape == (4, 2, 256)
    again = lab.qsa.example(SIZES, 30, 4, 5)
    np.testing.assert_array_equal(again[0].kq, cache.kq)
    np.testing.assert_array_equal(again[1], qfull)
    assert (np.asarray(lab.qsa.example(SIZES, 30, 4, 6)[1]) != np.asarray(qfull)).any()
    with pytest.raises(lab.ArgumentError, match="There are no 3 cells and -1 tokens"):
        lab.qsa.example(SIZES, 3, -1)
    with pytest.raises(lab.ArgumentError, match="max_cells = 1100 cells: 0 are there, 1101 more"):
        lab.qsa.example(SIZES, 1101, 1)


@pytest.mark.parametrize("path", lab.qsa.PATHS)
def test_needles_are_found_and_make_the_output(seed: int, path: str) -> None:
    planted = data.needles(SIZES, 1000, 3, needles=5, seed=seed)
    assert len(set(p // 4 for p in planted.positions)) == 5 and max(planted.positions) < 500
    trace = lab.qsa.trace(planted.cache, *planted.inputs, path=path)
    assert trace.first_deviation() is None
    assert planted.found(trace) == [dict.fromkeys(planted.positions, True)] * 3
    # They have nearly all of the weight, so the output is the mark behind the gate.
    gates = np.asarray(planted.inputs[0])[..., 256:].astype(float)
    np.testing.assert_allclose(lab.qsa.output(trace), planted.mark / (1 + np.exp(-gates)), rtol=0.02)
    exact = lab.qsa.full_attention(planted.cache, *planted.inputs)
    assert np.abs(lab.qsa.output(trace) - exact).max() < 0.02 * planted.mark


# What of the score kernel is changed so that it loses needles, and the cells in which it still finds them.
BROKEN: dict[str, tuple[str, str, Callable[[int], bool]]] = {
    "the other cells of a block forgotten": ("c < 4;", "c < 1;", lambda cell: cell % 4 == 0),
    "all scores equal": ("*score = best;", "*score = 1.0f;", lambda cell: cell < 64),
    "the other way round": ("*score = best;", "*score = -best;", lambda cell: False),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_score_loses_needles(how: str) -> None:
    right, wrong, still_found = BROKEN[how]
    planted = data.needles(SIZES, 1000, 2, needles=8, seed=3)
    session = lab.qsa.session()
    text = session.source("qsa_score")
    assert right in text, f"qsa_score has no {right!r} any more: break it anew"
    session.replace(text.replace(right, wrong), names="qsa_score")
    trace = session.trace(planted.cache, *planted.inputs)
    found = trace.first_deviation()
    assert found is not None and found.kernel == "qsa_score"
    wanted = {cell: still_found(cell) for cell in planted.positions}
    assert planted.found(trace) == [wanted] * 2 and not all(wanted.values())
    # The other dispatches did nothing wrong with what they were given.
    assert {d.kernel for d in trace.deviations if d.exceeds} == {"qsa_score"}
    # A token that has lost them all attends to something else.
    exact = lab.qsa.full_attention(planted.cache, *planted.inputs)
    off = np.abs(lab.qsa.output(trace) - exact).max()
    assert (off > 0.5 * planted.mark) == (not any(wanted.values()))


def test_needles_come_from_their_seed() -> None:
    one, same, other = (data.needles(SIZES, 1000, 1, seed=seed) for seed in (1, 1, 2))
    assert one.positions == same.positions != other.positions
    np.testing.assert_array_equal(one.cache.kq, same.cache.kq)


def test_needles_need_room() -> None:
    assert len(data.needles(SIZES, 24, 1, needles=3).positions) == 3
    with pytest.raises(lab.ArgumentError) as caught:
        data.needles(SIZES, 24, 1, needles=4)
    assert str(caught.value) == (
        "The older half of 24 cells has 3 blocks for needles: 1 to 3 can be planted, not 4."
    )
    with pytest.raises(lab.ArgumentError, match="max_cells = 1100 cells: 1099 are there, 2 more do not fit"):
        data.needles(SIZES, 1099, 2)
