"""What is read from a trace at each position: scores, lists, the cut, shares; and from what broken kernels
wrote."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lab
import lab.qsa
from lab import resources
from lab.qsa import PATHS, Sizes, readings

SIZES = Sizes(qh=24, qkv=2, qbudget=41, qch=16, qch2=8, qhg=2, max_cells=80)
CELLS, CALLS = 56, [3, 2]  # the tokens see 57 to 61 cells
FIRST = resources.kernels() / "qsa" / "qsa.metal"
SCORE, SELECT, ATTEND, END = 3, 4, 5, 6  # positions in a call after which there is something

# Kernels that write anything: bits that depend on nothing but where they go and SALT.
RUBBISH = """
#include <metal_stdlib>
using namespace metal;

struct QsaArgs { uint pos0, max_cells; };

uint bits(uint i)
{
    uint x = (i + SALT) * 2654435761u;
    x ^= x >> 15;
    return x * 2246822519u;
}

kernel void qsa_quant(device const float* x [[buffer(0)]], device char* q [[buffer(1)]],
                      device half* sc [[buffer(2)]], constant uint& first [[buffer(3)]],
                      uint i [[thread_position_in_grid]])
{
    const uint group = first * QKV * 4 + i;
    sc[group] = as_type<half>(ushort(bits(group)));
    for (uint j = 0; j < 64; j++) {
        q[group * 64 + j] = char(bits(group * 64 + j));
    }
}

kernel void qsa_score(device const float* qcur [[buffer(0)]], device const char* kq [[buffer(1)]],
                      device const half* ksc [[buffer(2)]], device float* scores [[buffer(3)]],
                      constant QsaArgs& args [[buffer(4)]], uint2 group [[threadgroup_position_in_grid]],
                      uint i [[thread_index_in_threadgroup]])
{
    const uint block = group.x * 8 + i, at = group.y * (args.max_cells / 4 + 2) + block;
    if (i < 8 && block < args.max_cells / 4 + 2) {
        scores[at] = as_type<float>(bits(at));
    }
}

kernel void qsa_topk2(device const float* scores [[buffer(0)]], device int* ids [[buffer(1)]],
                      constant QsaArgs& args [[buffer(2)]], uint t [[threadgroup_position_in_grid]],
                      uint i [[thread_index_in_threadgroup]])
{
    if (i < QBUDGET && i % 9 != 0) {
        ids[t * QBUDGET + i] = SALT % 2 == 0 ? int(bits(i)) : int(bits(i) % 70);
    }
}

kernel void qsa_attn2(device const float* qcur [[buffer(0)]], device const char* kq [[buffer(1)]],
                      device const char* vq [[buffer(2)]], device const half* ksc [[buffer(3)]],
                      device const half* vsc [[buffer(4)]], device const int* ids [[buffer(5)]],
                      device float* part [[buffer(6)]], constant QsaArgs& args [[buffer(7)]],
                      uint3 group [[threadgroup_position_in_grid]], uint i [[thread_index_in_threadgroup]])
{
    const uint chunks = (QBUDGET + QCH2 - 1) / QCH2;
    for (uint h = 0; h < QH; h++) {
        const uint at = ((group.z * chunks + group.x) * QH + h) * (QD + 2) + i;
        part[at] = as_type<float>(bits(at));
        if (i < 2) {
            part[at + QD] = as_type<float>(bits(at + QD));
        }
    }
}
"""


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    """Numbers that are none are no news to a reader of traces."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def given(seed: int) -> tuple[Any, ...]:
    return lab.qsa.example(SIZES, CELLS, sum(CALLS), seed)


def everything(trace: lab.systems.Trace, position: int, token: int) -> tuple[Any, ...]:
    chosen = readings.chosen(trace, position, token, needles=[3, 50, 900])
    lists = chosen.hits, chosen.misses, chosen.extras, chosen.strays, chosen.ties, chosen.agrees
    masses = readings.chunk_masses(trace, position, token)
    weights = readings.cell_weights(trace, position, token, 13)
    (
        readings.selection_words(chosen),
        readings.list_words(chosen),
        readings.needle_words(chosen),
        readings.arguments_words(trace, token),
    )
    return chosen, lists, masses, masses.shares, masses.reference_shares, weights


# ---- kernels that are right ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_every_token_is_read_at_every_position(seed: int, path: str) -> None:
    trace = lab.qsa.session().trace(*given(seed), tokens=CALLS, path=path)
    assert len(trace) == 2 * END
    selected = [*lab.qsa.selections(trace, 0), *lab.qsa.selections(trace, 1)]
    for token in range(5):
        call, n_kv = token // 3, CELLS + token + 1
        for position in range(len(trace) + 1):
            done = position - call * END
            chosen, (hits, misses, extras, strays, ties, agrees), masses, shares, _, weights = everything(
                trace, position, token
            )
            assert (chosen.token, chosen.n_kv, chosen.budget) == (token, n_kv, 41)
            assert chosen.scores.shape == chosen.reference_scores.shape == (-(-n_kv // 4),)
            assert chosen.scores.dtype == np.float32 and chosen.reference_scores.dtype == np.float64
            assert np.isnan(chosen.scores).all() == (done < SCORE)
            assert (chosen.selection is None) == (done < SCORE)
            assert (chosen.kernel_ids is None) == (done < SELECT)
            assert misses.size == extras.size == strays.size == 0 and agrees == (done >= SELECT)
            assert hits.size == (41 if done >= SELECT else 0)
            assert (ties.size > 0) == (done >= SCORE)
            assert (masses.listed, masses.length) == (41, SIZES.chunk_cells(path))
            assert masses.maxima.shape == shares.shape == (24, SIZES.chunks(path))
            assert np.isnan(shares).all() == (done < ATTEND)
            assert np.isnan(masses.reference_sums).all() == (done < SELECT)
            assert weights.cells.size == (41 if done >= SELECT else 0)
            assert np.isnan(weights.kernel).all() == (done < ATTEND or not weights.cells.size)
            if done < SCORE:
                continue
            np.testing.assert_allclose(chosen.scores, chosen.reference_scores, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(chosen.selection.ids, selected[token].ids)
            assert np.isnan(readings.chosen(trace, position, token, reference=False).reference_scores).all()
            if done >= SELECT:
                np.testing.assert_array_equal(weights.cells, selected[token].ids)
                assert weights.reference.sum() == pytest.approx(1)


@pytest.mark.parametrize("path", PATHS)
def test_shares_are_those_of_the_softmax_over_the_listed_cells(seed: int, path: str) -> None:
    cache, qfull, qcur, k, v = given(seed)
    trace = lab.qsa.session().trace(cache, qfull, qcur, k, v, path=path)
    cache.append(k, v)
    keys = cache.quantised[0].floats()
    for token, head in ((0, 0), (2, 11), (4, 12), (4, 23)):
        weights = readings.cell_weights(trace, len(trace), token, head)
        exponents = keys[weights.cells, head // 12] @ np.asarray(qcur, float)[token, head] / 16
        exact = np.exp(exponents - exponents.max())
        np.testing.assert_allclose(weights.reference, exact / exact.sum(), rtol=1e-12)
        np.testing.assert_allclose(weights.kernel, weights.reference, rtol=1e-5)
        masses = readings.chunk_masses(trace, len(trace), token)
        np.testing.assert_allclose(masses.maxima, masses.reference_maxima, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(masses.sums, masses.reference_sums, rtol=1e-5)
        for shares, of in ((masses.shares, weights.kernel), (masses.reference_shares, weights.reference)):
            np.testing.assert_allclose(shares[head], np.bincount(weights.chunks, of), rtol=1e-6)


def test_below_the_budget_every_cell_is_chosen_whatever_the_scores() -> None:
    trace = lab.qsa.session().trace(*lab.qsa.example(SIZES, 30, 2))
    for position in (0, 2, END):
        chosen = readings.chosen(trace, position, 1)
        assert chosen.selection is not None and chosen.selection.everything
        assert chosen.selection.ids.tolist() == list(range(32)) and chosen.ties.size == 0
    assert chosen.agrees and chosen.hits.size == 32


def test_a_token_whose_call_is_not_recorded_yet_has_nothing(seed: int) -> None:
    trace, steps = lab.qsa.session().recording(*given(seed), tokens=CALLS, path="v1")
    for recorded in range(2 * END + 1):
        for token in (0, 4):
            chosen, _, masses, *_ = everything(trace, recorded, token)
            done = recorded - END * (token == 4)
            assert (chosen.kernel_ids is None) == (done < SELECT)
            # What it should write is known as soon as it is recorded.
            assert np.isnan(chosen.reference_scores).all() == (done < SCORE)
            assert np.isnan(masses.maxima).all() == (done < ATTEND)
            assert readings.position_of(trace, token) == min(recorded, END if token == 0 else 2 * END)
        next(steps, None)


def test_a_trace_that_was_saved_reads_the_same(seed: int, tmp_path: Path) -> None:
    trace = lab.qsa.session().trace(*given(seed), tokens=CALLS)
    trace.about["needles"] = [3, 50]
    loaded = lab.qsa.load_trace(trace.save(tmp_path))
    for position in (0, SCORE, END, 2 * END):
        one, other = (readings.chosen(t, position, 4) for t in (trace, loaded))
        np.testing.assert_array_equal(one.scores, other.scores)
        np.testing.assert_array_equal(one.reference_scores, other.reference_scores)
        assert one.needles == other.needles == (3, 50) and one.agrees == other.agrees
        masses, again = (readings.chunk_masses(t, position, 4) for t in (trace, loaded))
        np.testing.assert_array_equal(masses.shares, again.shares)


def test_what_the_trace_does_not_have_is_refused(seed: int) -> None:
    trace = lab.qsa.session().trace(*given(seed))
    with pytest.raises(lab.ArgumentError, match="The trace is of 5 tokens: there is no token 5"):
        readings.chosen(trace, 0, 5)
    with pytest.raises(lab.ArgumentError, match="The trace has 6 dispatches: there is no position 7"):
        readings.chunk_masses(trace, 7, 0)
    with pytest.raises(lab.ArgumentError, match="There are 24 query heads: there is no head 24"):
        readings.cell_weights(trace, 0, 0, 24)


# ---- needles and wrong lists ---------------------------------------------------------------------------


def test_needles_are_found_where_the_kernel_listed_them() -> None:
    needles = lab.qsa.data.needles(SIZES, CELLS, 2, needles=3)
    trace = lab.qsa.session().trace(needles.cache, *needles.inputs)
    for position, found in ((0, ()), (SCORE, ()), (SELECT, needles.positions), (END, needles.positions)):
        chosen = readings.chosen(trace, position, 1, needles.positions)
        assert (chosen.needles_found, chosen.needles_lost) == (found, ())


def test_a_list_that_is_wrong_is_told_apart() -> None:
    scores = np.array([3, 1, 2, 2, np.inf], np.float32)
    selection = lab.qsa.selection(scores, 18, 12)
    assert selection.ids.tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 16, 17]
    listed = np.array([1, 0, 3, 3, 8, 9, 10, 5, 17, 18, -1, -(2**31)], np.int32)
    chosen = readings.Chosen(0, 18, 12, scores, scores.astype(float), selection, listed, (2, 9))
    assert chosen.hits.tolist() == [0, 1, 3, 8, 9, 10, 17]
    assert chosen.misses.tolist() == [2, 11, 12, 13, 16]
    assert chosen.extras.tolist() == [5]
    assert chosen.strays.tolist() == [18, -1, -(2**31)]
    assert chosen.ties.tolist() == list(range(8, 16))
    assert (chosen.needles_found, chosen.needles_lost) == ((9,), (2,))
    assert not chosen.agrees


# ---- in words ------------------------------------------------------------------------------------------


def test_the_arguments_are_told_with_the_unfinished_block(seed: int) -> None:
    trace = lab.qsa.session().trace(*given(seed), tokens=CALLS)
    assert readings.arguments_words(trace, 1) == (
        "pos0 = 56, max_cells = 80: before the call 56 of the cache's 80 cells are filled. Token 1 of the "
        "call sees n_kv = 58 cells: 14 whole blocks of four, and the unfinished block 14 with 2 cells "
        "(56, 57)."
    )
    assert readings.arguments_words(trace, 3) == (
        "pos0 = 59, max_cells = 80: before the call 59 of the cache's 80 cells are filled. Token 0 of the "
        "call sees n_kv = 60 cells: 15 whole blocks of four, and the unfinished block 15 without cells."
    )
    begun, _ = lab.qsa.session().recording(*given(seed))
    assert readings.arguments_words(begun, 0) == "The call of token 0 has not begun: it will see 57 cells."


def test_a_cut_through_a_single_block_is_told_with_its_margin() -> None:
    scores = np.array([3, 1, 2, 1.5, np.inf], np.float32)
    assert readings.cut_words(lab.qsa.selection(scores, 18, 9)) == (
        "9 of 18 cells are taken. The cut is at key 0xC0000000, score 2: 2 blocks above it, 6 cells. One "
        "block has this very score, 2: it gives 3 of its 4 cells. The best block left out is 3, its score "
        "lower by 0.5."
    )


def test_a_cut_through_ties_is_told_with_how_many_are_taken() -> None:
    scores = np.array([2, 1, 2, 2, 0], np.float32)
    assert readings.cut_words(lab.qsa.selection(scores, 17, 6)) == (
        "6 of 17 cells are taken. The cut is at key 0xC0000000, score 2: 0 blocks above it, 0 cells. 3 "
        "blocks tie with this very score: the first 2 are taken, and the last of these, 2, gives 2 of its 4 "
        "cells. The best block left out, 3, has the same score and a higher index."
    )
    assert "No block is left out." in readings.cut_words(lab.qsa.selection(np.ones(4, np.float32), 16, 15))
    assert readings.cut_words(lab.qsa.selection(scores, 17, 17)) == (
        "Every cell is taken, in order: 17 with a budget of 17. No score is read."
    )


def test_lists_are_told_beside_the_reference_s() -> None:
    scores = np.array([3, 1, 2, 2, np.inf], np.float32)
    selection = lab.qsa.selection(scores, 18, 12)

    def told(listed: list[int] | None, needles: tuple[int, ...] = ()) -> tuple[str, str]:
        ids = None if listed is None else np.array(listed, np.int32)
        chosen = readings.Chosen(0, 18, 12, scores, scores.astype(float), selection, ids, needles)
        return readings.list_words(chosen), readings.needle_words(chosen)

    right = selection.ids.tolist()
    assert told(None, (4,)) == ("The kernel has not listed cells yet.", "Needles at 4.")
    assert told(right, (4, 9)) == (
        "The kernel's list is the reference's, element for element: 12 hits.",
        "1 of 2 needles found (9); lost: 4.",
    )
    assert told(right[::-1], (9,)) == (
        "The kernel's list differs from the reference's: 12 hits; the cells are right, but not in ascending "
        "order, once each.",
        "1 of 1 needle found (9).",
    )
    assert told([*right[:-3], 5, -7, 99])[0] == (
        "The kernel's list differs from the reference's: 9 hits, 3 misses (13, 16, 17), 1 extra (5), 2 "
        "numbers that are no cells it sees (-7, 99)."
    )
    assert told([0] * 12)[0] == (
        "The kernel's list differs from the reference's: 1 hit, 11 misses (1, 2, 3, 8, 9, 10, 11, 12, ...)."
    )


# ---- kernels that are not ------------------------------------------------------------------------------


@pytest.mark.parametrize("salt", [1, 2])
@pytest.mark.parametrize(
    "names",
    [
        ("qsa_quant",),
        ("qsa_score",),
        ("qsa_topk2",),
        ("qsa_attn2",),
        ("qsa_quant", "qsa_topk2", "qsa_attn2"),
    ],
)
def test_what_broken_kernels_write_is_read_without_an_exception(names: tuple[str, ...], salt: int) -> None:
    session = lab.qsa.session()
    session.replace(RUBBISH, names, defines={"SALT": salt, **SIZES.defines})
    trace = session.trace(*given(salt), tokens=CALLS)
    assert trace.first_deviation() is not None
    for position in range(len(trace) + 1):
        for token in range(5):
            everything(trace, position, token)
    if names == ("qsa_attn2",):
        end = readings.chunk_masses(trace, END, 0)
        part = trace[ATTEND - 1].value("part")[0]
        np.testing.assert_array_equal(end.maxima, part[..., -2].T)
        assert not np.isnan(end.reference_shares).any() and not np.array_equal(end.sums, end.reference_sums)
    if names == ("qsa_topk2",):
        chosen = readings.chosen(trace, SELECT, 0)
        assert chosen.misses.size and chosen.strays.size and not chosen.agrees
        assert np.isnan(readings.cell_weights(trace, len(trace), 0, 0).reference).all()


def test_a_fault_leaves_what_was_there_before(seed: int) -> None:
    session = lab.qsa.session()
    text = session.source("qsa_topk2").replace("list[at + c] =", "list[at + c + 100000000] =")
    session.replace(text, "qsa_topk2")
    trace = session.trace(*given(seed), tokens=CALLS)
    assert len(trace) == SELECT and trace[-1].fault
    chosen, *_ = everything(trace, SELECT, 0)
    assert chosen.kernel_ids is None and chosen.selection is not None
    everything(trace, SELECT, 4)


def test_scores_that_are_nan_have_no_selection(seed: int) -> None:
    session = lab.qsa.session()
    right = "*score = best;"
    session.replace(FIRST.read_text().replace(right, "*score = block == 2 ? NAN : best;"), "qsa_score")
    trace = session.trace(*given(seed))
    assert len(trace) == SCORE and "NaN" in trace[-1].fault
    chosen, *_ = everything(trace, SCORE, 1)
    assert readings.selection_words(readings.chosen(trace, 0, 1)) == "The blocks have no scores yet."
    assert readings.selection_words(chosen) == ("1 of 15 scores are NaN, so there is no order to select by.")
    assert chosen.selection is None and np.isnan(chosen.scores).tolist() == [b == 2 for b in range(15)]
    assert not np.isnan(chosen.reference_scores).any()
