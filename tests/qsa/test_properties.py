"""What holds of QSA for all sizes, caches, calls, paths and scores, looked for by hypothesis."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import event
from hypothesis import strategies as st

import lab
import lab.qsa
from lab.qsa import PATHS, Cache, Sizes, selection
from tests.properties import for_all

TOLERANCE = 2e-6  # of the largest output


# ---- what is drawn -------------------------------------------------------------------------------------

# The kernels are compiled for the constants, which takes seconds: few examples share these.
COMPILED = (
    Sizes(qh=24, qkv=2, qbudget=41, qch=16, qch2=8, qhg=2),
    Sizes(qh=12, qkv=1, qbudget=1, qch=1, qch2=1, qhg=3),
    Sizes(qh=6, qkv=3, qbudget=64, qch=64, qch2=32, qhg=1),
    Sizes(qh=4, qkv=1, qbudget=30, qch=7, qch2=5, qhg=4),
)
KINDS = ("normal", "few kinds", "all equal", "zero", "tiny", "uneven", "large")


@st.composite
def constants(draw: st.DrawFn) -> Sizes:
    """Sizes within the limits of v2, and often of all paths."""
    heads = draw(st.sampled_from([12, 12, 12, 1, 2, 4, 5, 8]))
    qch2 = draw(st.integers(1, 32))
    return Sizes(
        qh=heads * (qkv := draw(st.integers(1, 4))),
        qkv=qkv,
        qbudget=draw(st.integers(1, min(200, 128 * qch2))),
        qch=draw(st.integers(1, 64)),
        qch2=qch2,
        qhg=draw(st.sampled_from([g for g in range(1, heads + 1) if heads % g == 0 and heads // g <= 8])),
    )


def all_sizes(any_constants: bool) -> st.SearchStrategy[Sizes]:
    return constants() if any_constants else st.sampled_from(COMPILED)


def paths_of(sizes: Sizes) -> list[str]:
    return [path for path in PATHS if path != "v3" or sizes.heads_per_kv == 12]


@dataclass(frozen=True)
class Case:
    """A cache of ``cells`` cells of some kind of numbers, and calls of some tokens, each with its path."""

    sizes: Sizes
    cells: int
    calls: tuple[tuple[str, int], ...]
    kind: str
    seed: int

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.calls)

    @property
    def how(self) -> dict[str, Any]:
        """The calls as ``run`` takes them."""
        return {"tokens": [rows for _, rows in self.calls], "path": [path for path, _ in self.calls]}

    def numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of all cells, the tokens' own last: float32 [cells + rows][qkv][qd]."""
        rng = np.random.default_rng(self.seed)
        shape = self.cells + self.rows, self.sizes.qkv, self.sizes.qd
        keys, values = rng.standard_normal((2, *shape), dtype=np.float32)
        if self.kind == "few kinds":  # of blocks, so that many scores are equal
            kinds = rng.integers(0, 3, -(-shape[0] // 4)).repeat(4)[: shape[0]] * 4 + np.arange(shape[0]) % 4
            keys = rng.standard_normal((12, *shape[1:]), dtype=np.float32)[kinds]
        elif self.kind == "all equal":
            keys[:] = keys[:1]
        elif self.kind == "zero":
            keys[:], values[rng.random(len(values)) < 0.5] = 0, 0
        elif self.kind == "tiny":  # where scales are denormal halves
            keys, values = keys * np.float32(3e-6), values * np.float32(3e-6)
        elif self.kind == "uneven":  # scales that differ between groups
            for x in (keys, values):
                x *= np.repeat(10.0 ** rng.uniform(-1, 1, (*shape[:2], 4)), 64, -1).astype(np.float32)
        elif self.kind == "large":
            keys, values = keys * np.float32(100), values * np.float32(1e4)
        return keys, values

    def layer(self) -> tuple[Cache, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The cache, qfull, qcur, k, v."""
        rng = np.random.default_rng(self.seed + 1)
        z, n = self.sizes, self.cells
        qfull = rng.standard_normal((self.rows, z.qh, 2 * z.qd), dtype=np.float32)
        qcur = rng.standard_normal((self.rows, z.qh, z.qd), dtype=np.float32)
        keys, values = self.numbers()
        return Cache.of(z, keys[:n], values[:n]), qfull, qcur, keys[n:], values[n:]


@st.composite
def cases(draw: st.DrawFn, sizes: st.SearchStrategy[Sizes], kinds: tuple[str, ...] = KINDS) -> Case:
    """A case whose tokens lie around the budget, or anywhere."""
    z = draw(sizes)
    calls = tuple(
        draw(st.lists(st.tuples(st.sampled_from(paths_of(z)), st.integers(1, 8)), min_size=1, max_size=3))
    )
    near = st.integers(max(0, z.qbudget - 9), z.qbudget + 9)
    cells = draw(st.one_of(near, st.integers(0, 2 * z.qbudget + 40)))
    rows = sum(n for _, n in calls)
    room = draw(st.one_of(st.just(0), st.integers(0, 20)))
    sizes_with_room = replace(z, max_cells=cells + rows + room)
    return Case(sizes_with_room, cells, calls, draw(st.sampled_from(kinds)), draw(st.integers(0, 2**32 - 1)))


FEW = KINDS[
    :-1
]  # those whose scores are small enough for 2e-6: a rounding of a large one is more in its exponential


# ---- what is compared ----------------------------------------------------------------------------------


@functools.cache
def session(guarded: bool) -> lab.qsa.Session:
    return lab.qsa.session(guarded=guarded or None)


def off(out: Any, exact: np.ndarray) -> float:
    """Largest deviation, as a share of the largest output; NaN is one."""
    found, largest = np.abs(np.asarray(out, np.float64) - exact).max(), np.abs(exact).max()
    return float(np.nan_to_num(found / largest if largest else found, nan=np.inf))


def chosen(trace: lab.systems.Trace) -> list[np.ndarray]:
    """The cells that each token of a trace attends to, as the kernels listed them."""
    rows = [row for step in trace if "ids" in step.dispatch.writes for row in step.value("ids")]
    budget = trace.about["sizes"]["qbudget"]
    return [row[: min(trace.about["cells"] + 1 + i, budget)] for i, row in enumerate(rows)]


# ---- the definition ------------------------------------------------------------------------------------


@for_all(30, 100, lambda any_constants: {"case": cases(all_sizes(any_constants))})
def test_any_calls_give_the_definition(case: Case) -> None:
    cache, *inputs = case.layer()
    trace = lab.qsa.trace(cache, *inputs, **case.how)
    found = trace.first_deviation()
    assert found is None, str(found)
    ids = chosen(trace)
    picked = [s for call in range(len(case.calls)) for s in lab.qsa.selections(trace, call)]
    assert len(ids) == len(picked) == case.rows
    for i, (mine, wanted) in enumerate(zip(ids, picked, strict=True)):
        n_kv = case.cells + i + 1
        assert wanted.everything == (n_kv <= case.sizes.qbudget)
        np.testing.assert_array_equal(mine, wanted.ids)
        assert set(range(n_kv - n_kv % 4, n_kv)) <= set(mine.tolist()) or n_kv % 4 > case.sizes.qbudget
        event(f"cells of the unfinished block: {n_kv % 4}, all seen: {wanted.everything}")
    if case.kind in FEW:
        exact = lab.qsa.attention(cache, *inputs, ids=ids)
        assert off(lab.qsa.output(trace), exact) <= TOLERANCE


@for_all(20, 60, lambda any_constants: {"case": cases(all_sizes(any_constants)), "guarded": st.booleans()})
def test_a_run_is_its_trace_bit_for_bit(case: Case, guarded: bool) -> None:
    cache, *inputs = case.layer()
    trace = session(guarded).trace(cache, *inputs, **case.how)
    out = session(guarded).run(cache, *inputs, **case.how)
    np.testing.assert_array_equal(out, lab.qsa.output(trace))
    assert cache.cells == case.cells + case.rows
    end = trace.buffers_at(len(trace))
    for name, array in cache.arrays.items():
        np.testing.assert_array_equal(array, end[name])
    for mine, given_ in zip(cache.floats, case.numbers(), strict=True):
        np.testing.assert_array_equal(mine, given_)


# ---- one against the other -----------------------------------------------------------------------------


@for_all(25, 60, lambda any_constants: {"case": cases(all_sizes(any_constants), FEW), "data": st.data()})
def test_how_tokens_come_in_calls_does_not_matter(case: Case, data: st.DataObject) -> None:
    cache, *inputs = case.layer()
    path = data.draw(st.sampled_from(paths_of(case.sizes)))
    cuts = data.draw(st.sets(st.integers(1, case.rows)).map(lambda s: sorted({0, *s, case.rows})))
    tokens = [
        n for start, end in pairwise(cuts) for n in [8] * ((end - start) // 8) + [(end - start) % 8] if n
    ]
    one, other, mixed = cache.copy(), cache.copy(), cache.copy()
    out = np.asarray(lab.qsa.run(one, *inputs, path=path))
    np.testing.assert_array_equal(lab.qsa.run(other, *inputs, path=path, tokens=tokens), out)
    assert off(lab.qsa.run(mixed, *inputs, **case.how), out) <= TOLERANCE
    for name, array in one.arrays.items():
        np.testing.assert_array_equal(other.arrays[name], array)
        np.testing.assert_array_equal(mixed.arrays[name], array)


@for_all(25, 60, lambda any_constants: {"case": cases(all_sizes(any_constants), FEW)})
def test_all_versions_agree_to_rounding(case: Case) -> None:
    cache, *inputs = case.layer()
    traces = {path: lab.qsa.trace(cache, *inputs, path=path) for path in paths_of(case.sizes)}
    first, *others = traces.values()
    for other in others:
        for mine, theirs in zip(chosen(first), chosen(other), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert off(lab.qsa.output(other), lab.qsa.output(first)) <= TOLERANCE


@for_all(30, 200, lambda any_constants: {"case": cases(all_sizes(any_constants)), "data": st.data()})
def test_a_cache_built_in_parts_is_that_of_one_go(case: Case, data: st.DataObject) -> None:
    keys, values = case.numbers()
    whole = Cache.of(case.sizes, keys, values)
    inner = data.draw(st.lists(st.integers(0, len(keys)), max_size=6))
    cache = Cache.empty(case.sizes)
    for start, end in pairwise(sorted([0, *inner, len(keys)])):
        cache.append(keys[start:end], values[start:end])
    assert cache.cells == whole.cells == len(keys)
    for name, array in whole.arrays.items():
        np.testing.assert_array_equal(cache.arrays[name], array)


# ---- selection by any scores ---------------------------------------------------------------------------

# Instead of scores: the first numbers of the query.
GIVEN = """#include <metal_stdlib>
using namespace metal;
#ifndef QH
#define QH 24
#endif
struct QsaArgs { uint pos0; uint max_cells; };

kernel void qsa_score(device const float* qcur [[buffer(0)]], device const char* kq [[buffer(1)]],
                      device const half* ksc [[buffer(2)]], device float* scores [[buffer(3)]],
                      constant QsaArgs& args [[buffer(4)]], uint2 group [[threadgroup_position_in_grid]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    const uint block = group.x * 8 + simdgroup;
    if (block <= (args.pos0 + group.y + 1) / 4) {
        scores[group.y * (args.max_cells / 4 + 2) + block] = qcur[group.y * QH * 256 + block];
    }
}
"""


@functools.cache
def by_given_scores() -> lab.qsa.Session:
    found = lab.qsa.session()
    found.replace(GIVEN)
    return found


TINY = float(np.finfo(np.float32).smallest_subnormal)
LEAST, MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
NUMBERS = (0.0, -0.0, 1.0, -1.0, TINY, -TINY, 3 * TINY, LEAST, -LEAST, MOST, -MOST, np.inf, -np.inf)


@st.composite
def score_rows(draw: st.DrawFn, rows: int, blocks: int) -> np.ndarray:
    """Scores float32 [rows][blocks] that are hard to select by."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = rows, blocks
    kind = draw(st.sampled_from(["a few numbers", "all but one equal", "one byte", "near", "bits"]))
    if kind == "a few numbers":
        return rng.choice(np.float32(draw(st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=5))), shape)
    if kind == "all but one equal":
        one, other = draw(st.tuples(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS)))
        scores = np.full(shape, one, np.float32)
        scores[np.arange(rows), rng.integers(0, blocks, rows)] = other
        return scores
    if kind == "one byte":
        shift = draw(st.sampled_from([0, 8, 16, 24]))
        bits = np.uint32(draw(st.integers(0, 2**32 - 1))) & ~np.uint32(255 << shift)
        scores = (bits | rng.integers(0, 256, shape, np.uint32) << np.uint32(shift)).view(np.float32)
    elif kind == "near":
        start = np.float32(draw(st.sampled_from(NUMBERS[:-2]))).view(np.int32).astype(np.int64)
        scores = (start + rng.integers(-3, 4, shape)).astype(np.int32).view(np.float32)
    else:
        scores = rng.integers(0, 2**32, shape, np.uint32).view(np.float32)
    return np.where(np.isnan(scores), np.float32(0.5), scores)


def selecting(scores: np.ndarray, pos0: int, room: int) -> tuple[Any, ...]:
    """A layer whose tokens have these scores instead of queries, on constants that are compiled already."""
    rows, blocks = scores.shape
    sizes = replace(COMPILED[0], max_cells=pos0 + rows + room)
    qcur = np.zeros((rows, sizes.qh, sizes.qd), np.float32)
    qcur.reshape(rows, -1)[:, :blocks] = scores
    keys = np.zeros((pos0 + rows, sizes.qkv, sizes.qd), np.float32)
    qfull = np.zeros((rows, sizes.qh, 2 * sizes.qd), np.float32)
    return Cache.of(sizes, keys[:pos0], keys[:pos0]), qfull, qcur, keys[pos0:], keys[pos0:]


def drawn_scores(_: bool) -> dict[str, Any]:
    around = st.one_of(st.integers(36, 48), st.integers(41, 700), st.sampled_from([16383, 16384, 16400]))
    return {"pos0": around, "rows": st.integers(1, 8), "room": st.integers(0, 9), "data": st.data()}


@for_all(60, 600, drawn_scores)
def test_any_scores_select_as_the_reference_does(
    pos0: int, rows: int, room: int, data: st.DataObject
) -> None:
    scores = data.draw(score_rows(rows, (pos0 + rows) // 4 + 1), label="scores")
    layer = selecting(scores, pos0, room)
    for path in ("v1", "v2"):
        trace = by_given_scores().trace(*layer, path=path)
        for t, found in enumerate(lab.qsa.selections(trace, 0)):
            wanted = selection(scores[t], pos0 + t + 1, layer[0].sizes.qbudget)
            np.testing.assert_array_equal(found.ids, wanted.ids)
            np.testing.assert_array_equal(chosen(trace)[t], wanted.ids)


@for_all(20, 200, drawn_scores)
def test_nan_is_refused_where_it_would_be_read(pos0: int, rows: int, room: int, data: st.DataObject) -> None:
    blocks = (pos0 + rows) // 4 + 1
    token = data.draw(st.integers(0, rows - 1))
    block = data.draw(st.integers(0, (pos0 + token + 1) // 4))
    scores = np.ones((rows, blocks), np.float32)
    scores[token, block] = np.nan
    told = f"score of block {block} (cells {4 * block} to {4 * block + 3}) for token {token}:"
    cache, *inputs = selecting(scores, pos0, room)
    with pytest.raises(lab.KernelFault, match=re.escape(told)):
        by_given_scores().run(cache, *inputs)
    trace = by_given_scores().trace(cache, *inputs)
    assert len(trace) == 3 and told in trace[2].fault and cache.cells == pos0


# ---- limits --------------------------------------------------------------------------------------------


def sentences(text: str) -> int:
    return len(re.findall(r"\.(?:\s|$)", text))


BEYOND = {
    "qh": st.integers(-1000, 0),
    "qkv": st.integers(-1000, 0),
    "qd": st.integers(-1000, 1000).filter(lambda d: d != 256),
    "qbudget": st.integers(-1000, 0),
    "qch": st.integers(-1000, 0),
    "qch2": st.one_of(st.integers(-1000, 0), st.integers(33, 1000)),
    "qhg": st.integers(-1000, 0),
    "max_cells": st.integers(-1000, 0),
}


@for_all(
    60,
    2000,
    lambda _: {
        "sizes": constants(),
        "names": st.sets(st.sampled_from(sorted(BEYOND)), min_size=1),
        "data": st.data(),
    },
)
def test_every_violated_limit_of_the_sizes_has_one_sentence(
    sizes: Sizes, names: set[str], data: st.DataObject
) -> None:
    wrong = {name: data.draw(BEYOND[name], label=name) for name in sorted(names)}
    with pytest.raises(lab.ArgumentError) as caught:
        replace(sizes, **wrong)
    told = str(caught.value)
    assert sentences(told) == len(wrong)
    for name, value in wrong.items():
        assert len(re.findall(rf"(?:^|\. ){name} = {value} ", told)) == 1


@for_all(
    60,
    2000,
    lambda _: {
        "qkv": st.integers(1, 3),
        "heads": st.integers(1, 20),
        "qhg": st.integers(1, 6),
        "qbudget": st.integers(1, 5000),
        "qch": st.integers(1, 90),
        "qch2": st.integers(1, 32),
    },
)
def test_every_limit_of_a_path_has_one_sentence(
    qkv: int, heads: int, qhg: int, qbudget: int, qch: int, qch2: int
) -> None:
    sizes = Sizes(qh=qkv * heads, qkv=qkv, qbudget=qbudget, qch=qch, qch2=qch2, qhg=qhg)
    expected = {
        "v1": {},
        "v2": {
            "equal groups": heads % qhg > 0,
            "query heads a head group": heads % qhg == 0 and heads // qhg > 8,
            "up to 128 chunks": -(-qbudget // qch2) > 128,
        },
        "v3": {"query heads a KV head": heads != 12, "cells a chunk": qch > 64},
    }
    for path, limits in expected.items():
        if not any(limits.values()):
            lab.qsa.plan(sizes, path, 1, 0)
            continue
        with pytest.raises(lab.ArgumentError) as caught:
            lab.qsa.plan(sizes, path, 1, 0)
        told = str(caught.value)
        assert {what: what in told for what in limits} == limits
        assert sentences(told) == sum(limits.values())
