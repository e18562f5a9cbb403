"""The kernels of ``kernels/qsa``, one dispatch at a time, against float64 formulas from the specification."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import lab
from lab import resources

FIRST = resources.kernels() / "qsa" / "qsa.metal"
SECOND = resources.kernels() / "qsa" / "qsa2.metal"

D = 256
TOLERANCE = 2e-6  # of the largest output
ROUNDING = 2.0**-24
NOT_WRITTEN = -7
SELECTIONS = ("qsa_topk", "qsa_topk2")
VERSIONS = ("v1", "v2", "v3")


@dataclass(frozen=True)
class Sizes:
    """The macros. A selection with a small budget has the same edges as one with a large one."""

    qh: int = 24
    qkv: int = 2
    qbudget: int = 37
    qch: int = 16
    qch2: int = 8
    qhg: int = 2

    @property
    def heads(self) -> int:
        return self.qh // self.qkv

    @property
    def defines(self) -> dict[str, int]:
        names = ("qh", "qkv", "qbudget", "qch", "qch2", "qhg")
        return {name.upper(): getattr(self, name) for name in names}

    def chunk(self, version: str) -> int:
        return self.qch2 if version == "v2" else self.qch


SMALL = Sizes()
SHIPPED = Sizes(qbudget=2051, qch=64, qch2=32)
FOUR = Sizes(qh=4, qkv=1, qch=8, qch2=5, qhg=1)


def kernel(name: str, sizes: Sizes) -> lab.Kernel:
    """A kernel, from the second file as soon as that has it. Compiled once for all tests."""
    library = lab.compile(SECOND, include=(FIRST,), defines=sizes.defines)
    return library[name]


# ---- selection -----------------------------------------------------------------------------------------


def best_cells(scores: np.ndarray, n_kv: int, budget: int) -> np.ndarray:
    """The cells that a token attends to, ascending, from its row of scores."""
    if n_kv <= budget:
        return np.arange(n_kv)
    blocks = -(-n_kv // 4)
    order = np.argsort(-scores[:blocks].astype(np.float64), kind="stable")  # equal ones stay in order
    cells = (4 * order[:, None] + np.arange(4)).ravel()
    return np.sort(cells[cells < n_kv][:budget])


def row_length(max_cells: int) -> int:
    return max_cells // 4 + 2


def select(name: str, sizes: Sizes, scores: np.ndarray, pos0: int, n_tok: int, max_cells: int) -> np.ndarray:
    """The ids that a kernel writes over ``NOT_WRITTEN``."""
    ids = np.full((n_tok, sizes.qbudget), NOT_WRITTEN, np.int32)
    block = {"pos0": pos0, "max_cells": max_cells}
    kernel(name, sizes).run_(scores, ids, block, groups=n_tok, threadgroup=1024)
    return ids


def check_selection(name: str, sizes: Sizes, scores: np.ndarray, pos0: int, max_cells: int) -> None:
    """A selection for as many tokens as there are rows of scores, element for element."""
    ids = select(name, sizes, scores, pos0, len(scores), max_cells)
    for t, (got, row) in enumerate(zip(ids, scores, strict=True)):
        n_kv = pos0 + t + 1
        want = best_cells(row, n_kv, sizes.qbudget)
        np.testing.assert_array_equal(got[: len(want)], want, f"{name}, token {t} of n_kv {n_kv}")
        assert (got[len(want) :] == NOT_WRITTEN).all(), f"{name} writes past its {len(want)} cells"


def one_byte(rng: np.random.Generator, shape: tuple[int, ...], byte: int) -> np.ndarray:
    """Positive floats whose bits differ in one byte only."""
    bits = np.full(shape, 0x3F55AA33 & ~(0xFF << 8 * byte), np.uint32)
    top = 0x7F if byte == 3 else 0xFF  # sign and exponent: no infinities, no NaN
    return (bits | (rng.integers(0, top, shape).astype(np.uint32) << np.uint32(8 * byte))).view(np.float32)


def all_but_one(rng: np.random.Generator, shape: tuple[int, ...], other: float) -> np.ndarray:
    scores = np.full(shape, 1.5, np.float32)
    scores[np.arange(shape[0]), rng.integers(0, shape[1], shape[0])] = other
    return scores


def choice(*values: float) -> Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]:
    return lambda rng, shape: rng.choice(np.array(values, np.float32), shape)


TINY = float(np.finfo(np.float32).smallest_subnormal)
LEAST = float(np.finfo(np.float32).tiny)
HUGE = float(np.finfo(np.float32).max)
SCORES: Mapping[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape, dtype=np.float32),
    "any bits": lambda rng, shape: np.nan_to_num(
        rng.integers(0, 1 << 32, shape, np.uint32).view(np.float32), nan=0.0, posinf=np.inf, neginf=-np.inf
    ),
    "ascending": lambda rng, shape: np.broadcast_to(np.arange(shape[1], dtype=np.float32), shape).copy(),
    "descending": lambda rng, shape: np.broadcast_to(-np.arange(shape[1], dtype=np.float32), shape).copy(),
    "few levels": choice(-2.0, -1.0, 0.5, 3.0),
    "all equal": choice(1.5),
    "all -infinity": choice(-np.inf),
    "all infinity": choice(np.inf),
    "all but one equal, that one higher": lambda rng, shape: all_but_one(rng, shape, 1.5000001),
    "all but one equal, that one lower": lambda rng, shape: all_but_one(rng, shape, 1.4999999),
    "all but one equal, that one infinite": lambda rng, shape: all_but_one(rng, shape, -np.inf),
    "zeros of both signs": choice(0.0, -0.0),
    "zeros and denormals": choice(0.0, -0.0, TINY, -TINY, 2 * TINY),
    "denormals": lambda rng, shape: (
        rng.integers(-(1 << 23), 1 << 23, shape).astype(np.float32) * np.float32(TINY)
    ),
    "around the least normal": choice(LEAST, -LEAST, LEAST - TINY, TINY - LEAST, LEAST + TINY),
    "infinities": choice(np.inf, -np.inf, HUGE, -HUGE, 0.0),
    **{f"byte {byte} differs": lambda rng, shape, byte=byte: one_byte(rng, shape, byte) for byte in range(4)},
    "byte 0 differs, negative": lambda rng, shape: -one_byte(rng, shape, 0),
}


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("kind", SCORES)
def test_selection_is_exact(name: str, kind: str, rng: np.random.Generator) -> None:
    max_cells = 1300
    for pos0 in (*range(0, 48, 8), 203, 1024, max_cells - 8):
        scores = SCORES[kind](rng, (8, row_length(max_cells)))
        check_selection(name, SMALL, scores, pos0, max_cells)


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("budget", [1, 3, 4, 38])
def test_selection_at_other_budgets(name: str, budget: int, rng: np.random.Generator) -> None:
    sizes = Sizes(qbudget=budget)
    for pos0 in (max(0, budget - 4), 2 * budget + 90):
        for kind in ("normal", "few levels", "all equal", "ascending", "infinities"):
            check_selection(name, sizes, SCORES[kind](rng, (8, row_length(400))), pos0, 400)


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("n_tok", range(1, 9))
def test_selection_of_one_to_eight_tokens(name: str, n_tok: int, rng: np.random.Generator) -> None:
    scores = SCORES["few levels"](rng, (n_tok, row_length(250)))
    check_selection(name, SMALL, scores, 250 - n_tok, 250)


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("pos0", [2044, 2051, 4 * 1024 - 4, 4 * 4096 - 4, 4 * 4096 + 1, 59_999])
def test_selection_at_the_shipped_budget(name: str, pos0: int, rng: np.random.Generator) -> None:
    for kind in ("normal", "few levels"):
        scores = SCORES[kind](rng, (8, row_length(pos0 + 8)))
        check_selection(name, SHIPPED, scores, pos0, pos0 + 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("kind", SCORES)
def test_selection_is_exact_with_more_blocks_than_registers_hold(
    name: str, kind: str, rng: np.random.Generator
) -> None:
    for sizes in (SMALL, SHIPPED):
        for pos0 in (4 * 4096 - 4, 4 * 8192 - 3, 59_999):
            check_selection(name, sizes, SCORES[kind](rng, (8, row_length(pos0 + 8))), pos0, pos0 + 8)


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_few_good_blocks_are_found_among_many(name: str, rng: np.random.Generator) -> None:
    scores = rng.standard_normal((1, row_length(40_000)), dtype=np.float32)
    good = np.sort(rng.choice(10_000, 9, replace=False))
    scores[0, good] = np.linspace(100, 101, 9)
    ids = select(name, Sizes(qbudget=36), scores, 39_999, 1, 40_000)
    np.testing.assert_array_equal(ids[0], (4 * good[:, None] + np.arange(4)).ravel())


@settings(max_examples=40, deadline=None, print_blob=True)
@given(data=st.data())
def test_selection_of_whatever_scores(data: st.DataObject) -> None:
    pos0 = data.draw(st.integers(0, 120), "pos0")
    n_tok = data.draw(st.integers(1, 8), "n_tok")
    elements = st.floats(width=32, allow_nan=False)
    few = data.draw(st.lists(elements, min_size=1, max_size=4), "few")
    shape = (n_tok, row_length(pos0 + n_tok))
    scores = data.draw(hnp.arrays(np.float32, shape, elements=st.one_of(st.sampled_from(few), elements)))
    for name in SELECTIONS:
        check_selection(name, SMALL, scores, pos0, pos0 + n_tok)


@pytest.fixture
def unreadable() -> Iterator[np.ndarray]:
    """A float32 array that faults when it is read."""
    memory = mmap.mmap(-1, 1 << 16, prot=0)
    yield np.frombuffer(memory, np.float32)


@pytest.mark.parametrize("name", SELECTIONS)
def test_scores_are_not_read_up_to_the_budget(name: str, unreadable: np.ndarray) -> None:
    ids = select(name, SMALL, unreadable, SMALL.qbudget - 8, 8, 60)
    for t, row in enumerate(ids):
        n_kv = SMALL.qbudget - 7 + t
        assert row[:n_kv].tolist() == list(range(n_kv))
        assert (row[n_kv:] == NOT_WRITTEN).all()
    with pytest.raises(lab.KernelFault):
        select(name, SMALL, unreadable, SMALL.qbudget, 1, 60)


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("unused", [np.inf, -np.inf])
def test_the_score_of_a_block_without_cells_has_no_effect(
    name: str, unused: float, rng: np.random.Generator
) -> None:
    max_cells = 120
    scores = rng.standard_normal((8, row_length(max_cells)), dtype=np.float32)
    for t, row in enumerate(scores):
        row[-(-(90 + t) // 4) :] = unused
    check_selection(name, SMALL, scores, 89, max_cells)


def test_a_larger_float_has_a_larger_key(rng: np.random.Generator) -> None:
    """As a second file calls okey: -0.0 and 0.0 have the same key, denormals theirs in order."""
    source = """kernel void key_of(device const float* x [[buffer(0)]], device uint* key [[buffer(1)]],
                                   uint i [[thread_position_in_grid]]) { key[i] = okey(x[i]); }"""
    key_of = lab.compile(source, include=(FIRST,)).key_of
    bits = rng.integers(0, 1 << 32, 200_000, np.uint32)
    edges = np.array([0, 1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x7F7FFFFF, 0x7F800000], np.uint32)
    bits = np.concatenate([bits, bits[:1000] & np.uint32(0x807FFFFF), edges, edges | np.uint32(1 << 31)])
    x = bits.view(np.float32)
    x = x[~np.isnan(x)]
    x = x[np.argsort(x.astype(np.float64))]
    key = np.array(key_of(x, lab.empty(x.size, np.uint32), grid=x.size)).astype(np.int64)
    np.testing.assert_array_equal(key[1:] > key[:-1], x[1:] > x[:-1])
    assert (key[1:] >= key[:-1]).all()


# ---- the cache -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cache:
    """Quantised keys and values [cell][qkv][256] with their scales [cell][qkv][4]."""

    kq: np.ndarray
    vq: np.ndarray
    ksc: np.ndarray
    vsc: np.ndarray

    @classmethod
    def random(cls, rng: np.random.Generator, sizes: Sizes, cells: int) -> Cache:
        def values() -> np.ndarray:
            return rng.integers(-127, 128, (cells, sizes.qkv, D)).astype(np.int8)

        def scales() -> np.ndarray:
            return rng.uniform(0.005, 0.03, (cells, sizes.qkv, 4)).astype(np.float16)

        return cls(values(), values(), scales(), scales())

    def keys(self, cells: np.ndarray) -> np.ndarray:
        """Those of the cells given, as the numbers they stand for."""
        return dequantised(self.kq[cells], self.ksc[cells])

    def values(self, cells: np.ndarray) -> np.ndarray:
        """As ``keys``."""
        return dequantised(self.vq[cells], self.vsc[cells])


def dequantised(q: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return q.astype(np.float64) * np.repeat(scales.astype(np.float64), D // 4, axis=-1)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def quantise(
    x: np.ndarray, first: int = 0, cells: int | None = None, sizes: Sizes = SMALL
) -> tuple[np.ndarray, np.ndarray]:
    """What qsa_quant leaves of x [n][qkv][256] in a cache full of 99 and NaN."""
    n = len(x)
    cells = n if cells is None else cells
    q = np.full((cells, sizes.qkv, D), 99, np.int8)
    scales = np.full((cells, sizes.qkv, 4), np.nan, np.float16)
    kernel("qsa_quant", sizes).run_(x, q, scales, first, grid=n * sizes.qkv * 4, threadgroup=64)
    return q, scales


def check_quantised(x: np.ndarray, q: np.ndarray, scales: np.ndarray) -> None:
    groups = x.astype(np.float64).reshape(*x.shape[:-1], 4, D // 4)
    # The division is rounded to float32 first, and may then lie on the other side of a tie between halves.
    exact = np.abs(groups).max(-1) / 127
    low, high = ((exact * (1 + side * 2 * ROUNDING)).astype(np.float16) for side in (-1, 1))
    assert ((scales == low) | (scales == high)).all()

    step = scales.astype(np.float64)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(step > 0, groups / step, 0.0)
    off = np.abs(q.reshape(groups.shape) - np.clip(steps, -127, 127))
    assert off.max() <= 0.5 + 127 * ROUNDING, "not the nearest"


@pytest.mark.parametrize("sizes", [SMALL, FOUR, Sizes(qkv=3)], ids=["2 heads", "1 head", "3 heads"])
def test_quantisation_is_to_the_nearest_of_a_half_scale(sizes: Sizes, rng: np.random.Generator) -> None:
    x = normal(rng, 50, sizes.qkv, D) * rng.lognormal(0, 4, (50, sizes.qkv, 1)).astype(np.float32)
    check_quantised(x, *quantise(x, sizes=sizes))


def test_quantisation_writes_its_own_cells_only(rng: np.random.Generator) -> None:
    x = normal(rng, 3, 2, D)
    q, scales = quantise(x, first=4, cells=9)
    check_quantised(x, q[4:7], scales[4:7])
    others = np.delete(np.arange(9), [4, 5, 6])
    assert (q[others] == 99).all()
    assert np.isnan(scales[others]).all()


def test_quantisation_of_zeros_and_of_values_too_small_for_a_half() -> None:
    x = np.zeros((1, 2, D), np.float32)
    x[0, 0, 64:128] = -0.0
    x[0, 0, 128:192] = 1e-9  # a 127th of it is no half but 0
    x[0, 1, 0] = 1e-5  # a scale that is a denormal half, rounded down: values clamp
    x[0, 1, 64] = -1.0e-5
    x[0, 1, 128:192] = np.linspace(-8e6, 8e6, 64)
    q, scales = quantise(x)
    check_quantised(x, q, scales)
    assert (scales[0, 0] == 0).all()
    assert (q[0, 0] == 0).all()
    assert q[0, 1, 0] == 127 == -q[0, 1, 64]


def test_ties_of_quantisation_go_to_the_even_neighbour() -> None:
    x = np.zeros((1, 2, D), np.float32)
    x[0, 0, :6] = [127.0, 0.5, 1.5, -0.5, -2.5, 126.5]  # the scale is 1
    q, _ = quantise(x)
    assert q[0, 0, :6].tolist() == [127, 0, 2, 0, -2, 126]


# ---- scores --------------------------------------------------------------------------------------------


def score(sizes: Sizes, cache: Cache, qcur: np.ndarray, pos0: int, max_cells: int) -> np.ndarray:
    """What qsa_score writes over NaN, with the grid that the last token needs."""
    n_tok = len(qcur)
    scores = np.full((n_tok, row_length(max_cells)), np.nan, np.float32)
    groups = (-(-((pos0 + n_tok) // 4 + 1) // 8), n_tok)
    block = {"pos0": pos0, "max_cells": max_cells}
    kernel("qsa_score", sizes).run_(qcur, cache.kq, cache.ksc, scores, block, groups=groups, threadgroup=256)
    return scores


def check_scores(sizes: Sizes, cache: Cache, qcur: np.ndarray, scores: np.ndarray, pos0: int) -> None:
    for t, row in enumerate(scores):
        n_kv = pos0 + t + 1
        whole = n_kv // 4
        means = cache.keys(np.arange(4 * whole)).reshape(whole, 4, sizes.qkv, D).mean(1)
        query = qcur[t].astype(np.float64).reshape(sizes.qkv, sizes.heads, D)
        products = np.einsum("khd,bkd->bkh", query, means).reshape(whole, sizes.qh)
        sizes_of_terms = np.einsum("khd,bkd->bkh", np.abs(query), np.abs(means)).reshape(whole, sizes.qh)
        off = np.abs(row[:whole] - products.max(-1, initial=-np.inf))
        assert (off <= 4 * ROUNDING * sizes_of_terms.max(-1, initial=0.0)).all(), (t, off.max())
        assert row[whole] == (np.inf if n_kv % 4 else -np.inf)
        assert np.isnan(row[whole + 1 :]).all()


@pytest.mark.parametrize(
    "sizes", [SMALL, FOUR, Sizes(qh=12, qkv=3), Sizes(qh=40, qkv=1, qhg=5), Sizes(qh=8, qkv=4, qhg=1)],
    ids=["24 of 2", "4 of 1", "12 of 3", "40 of 1", "8 of 4"],
)  # fmt: skip
def test_scores_are_the_largest_product_with_a_block_s_mean(sizes: Sizes, rng: np.random.Generator) -> None:
    cache = Cache.random(rng, sizes, 90)
    for pos0, n_tok in ((0, 8), (1, 1), (57, 8), (83, 7)):
        qcur = normal(rng, n_tok, sizes.qh, D)
        check_scores(sizes, cache, qcur, score(sizes, cache, qcur, pos0, 90), pos0)


def test_scores_do_not_depend_on_cells_that_are_not_there_yet(rng: np.random.Generator) -> None:
    cache = Cache.random(rng, SMALL, 64)
    cache.ksc[41:] = np.nan
    qcur = normal(rng, 3, SMALL.qh, D)
    check_scores(SMALL, cache, qcur, score(SMALL, cache, qcur, 38, 64), 38)


# ---- attention -----------------------------------------------------------------------------------------


@dataclass
class Attention:
    """A call of one of the three versions, with all it must not read full of NaN or far away."""

    sizes: Sizes
    cache: Cache
    qfull: np.ndarray
    qcur: np.ndarray
    ids: list[np.ndarray]  # of each token: ascending
    pos0: int
    part: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def random(cls, rng: np.random.Generator, sizes: Sizes, pos0: int, n_tok: int) -> Attention:
        """Random cells of those that each token sees; the other cells of the cache have NaN for a scale."""
        cache = Cache.random(rng, sizes, pos0 + n_tok)
        ids = []
        for n_kv in range(pos0 + 1, pos0 + n_tok + 1):
            ids.append(np.sort(rng.choice(n_kv, min(n_kv, sizes.qbudget), replace=False)))
        unseen = np.setdiff1d(np.arange(pos0 + n_tok), np.concatenate(ids))
        cache.ksc[unseen] = np.nan
        cache.vsc[unseen] = np.nan
        qfull = normal(rng, n_tok, sizes.qh, 2 * D)
        qfull[..., :D] = np.nan  # attention takes its queries from qcur
        return cls(sizes, cache, qfull, normal(rng, n_tok, sizes.qh, D), ids, pos0)

    def run(self, version: str) -> np.ndarray:
        """The output; partials go to ``part[version]``."""
        z, n_tok = self.sizes, len(self.qcur)
        chunks = -(-z.qbudget // z.chunk(version))
        rows = np.full((n_tok, z.qbudget), 1 << 28, np.int32)
        for row, chosen in zip(rows, self.ids, strict=True):
            row[: len(chosen)] = chosen
        c = self.cache
        part = np.full((n_tok, chunks, z.qh, D + 2), np.nan, np.float32)
        out = np.full((n_tok, z.qh, D), np.nan, np.float32)
        block = {"pos0": self.pos0, "max_cells": self.pos0 + n_tok}
        attend = {"v1": "qsa_attn", "v2": "qsa_attn2", "v3": "qsa_attn3"}[version]
        merge = {"v1": "qsa_merge", "v2": "qsa_merge2", "v3": "qsa_merge"}[version]
        groups = (chunks, z.qkv * (z.qhg if version == "v2" else 1), n_tok)
        kernel(attend, z).run_(
            self.qcur, c.kq, c.vq, c.ksc, c.vsc, rows, part, block, groups=groups, threadgroup=256
        )
        kernel(merge, z).run_(part, self.qfull, out, block, groups=(z.qh, n_tok), threadgroup=256)
        self.part[version] = part
        return out

    def scores(self, t: int, cells: np.ndarray) -> np.ndarray:
        """q.k / 16 of token t [qkv][heads][cells]."""
        query = self.qcur[t].astype(np.float64).reshape(self.sizes.qkv, self.sizes.heads, D)
        return query @ self.cache.keys(cells).transpose(1, 2, 0) / 16

    def partial(self, t: int, cells: np.ndarray) -> np.ndarray:
        """Value sum, largest score and sum of exponentials of token t [qh][256 + 2], over these cells."""
        s = self.scores(t, cells)
        top = s.max(-1, keepdims=True)
        weights = np.exp(s - top)
        sums = weights @ self.cache.values(cells).transpose(1, 0, 2)
        whole = np.concatenate([sums, top, weights.sum(-1, keepdims=True)], axis=-1)
        return whole.reshape(self.sizes.qh, D + 2)

    def exact(self) -> np.ndarray:
        """The output in float64."""
        out = []
        for t, cells in enumerate(self.ids):
            whole = self.partial(t, cells)
            with np.errstate(over="ignore"):
                gate = 1 / (1 + np.exp(-self.qfull[t, :, D:].astype(np.float64)))
            out.append(whole[:, :D] / whole[:, D + 1 :] * gate)
        return np.array(out)

    def check(self, version: str) -> None:
        """Output and partials against float64, and what is to stay unwritten."""
        close(self.run(version), self.exact())
        self._check_partials(version)

    def _check_partials(self, version: str) -> None:
        length = self.sizes.chunk(version)
        for t, (part, cells) in enumerate(zip(self.part[version], self.ids, strict=True)):
            used = -(-len(cells) // length)
            assert np.isnan(part[used:]).all(), f"{version} writes chunks past the last of token {t}"
            for chunk, got in enumerate(part[:used]):
                want = self.partial(t, cells[chunk * length : (chunk + 1) * length])
                close(got[:, :D], want[:, :D])
                close(got[:, D], want[:, D], at_least=1.0)  # it goes into an exponent, however small it is
                close(got[:, D + 1], want[:, D + 1])


def close(got: np.ndarray, want: np.ndarray, at_least: float = 0.0) -> None:
    """Within the tolerance, relative to the largest element or ``at_least``."""
    error = np.abs(got - want).max() / max(np.abs(want).max(), at_least)
    assert error <= TOLERANCE, f"{error:.3g} of the largest"


def versions_of(sizes: Sizes) -> tuple[str, ...]:
    return VERSIONS if sizes.heads == 12 else VERSIONS[:2]


@pytest.mark.parametrize("sizes", [SMALL, FOUR], ids=["24 heads of 2", "4 heads of 1"])
@pytest.mark.parametrize("pos0", [0, 8, 30, 36, 37, 200])
def test_attention_is_within_tolerance_of_float64(sizes: Sizes, pos0: int, rng: np.random.Generator) -> None:
    call = Attention.random(rng, sizes, pos0, 8)
    for version in versions_of(sizes):
        call.check(version)


@pytest.mark.parametrize("n_tok", range(1, 8))
def test_attention_of_one_to_seven_tokens(n_tok: int, rng: np.random.Generator) -> None:
    call = Attention.random(rng, SMALL, 40 - n_tok, n_tok)
    for version in VERSIONS:
        call.check(version)


@pytest.mark.parametrize("pos0", [2046, 5000])
def test_attention_at_the_shipped_sizes(pos0: int, rng: np.random.Generator) -> None:
    call = Attention.random(rng, SHIPPED, pos0, 2)
    for version in VERSIONS:
        call.check(version)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_cell_that_outweighs_all_others_is_the_output(version: str, rng: np.random.Generator) -> None:
    call = Attention.random(rng, SMALL, 60, 2)
    needles = []
    for t, cells in enumerate(call.ids):
        needles.append(next(cell for cell in cells if cell not in needles))
        queries = call.qcur[t, ::12]
        call.cache.kq[needles[t]] = np.clip(np.rint(40 * queries), -127, 127)
        call.qcur[t] = 50 * np.repeat(queries, 12, axis=0)  # scores whose exp overflows
    call.qfull[..., D:] = 100.0  # the gate is open
    out = call.run(version)
    for t, needle in enumerate(needles):
        value = np.repeat(call.cache.values(needle), 12, axis=0)
        close(out[t], value)


@pytest.mark.parametrize("version", VERSIONS)
def test_equal_keys_give_the_mean_value(version: str, rng: np.random.Generator) -> None:
    call = Attention.random(rng, SMALL, 60, 2)
    call.cache.kq[:] = call.cache.kq[call.ids[0][0]]
    call.cache.ksc[:] = 0.01
    call.qfull[..., D:] = 0.0  # the gate lets a half through
    out = call.run(version)
    for t, cells in enumerate(call.ids):
        mean = np.repeat(call.cache.values(cells).mean(0), 12, axis=0) / 2
        close(out[t], mean)


@pytest.mark.parametrize("version", VERSIONS)
def test_gates_open_and_close_at_any_size(version: str, rng: np.random.Generator) -> None:
    call = Attention.random(rng, SMALL, 50, 2)
    gates = np.array([-1e30, -200, -90, -20, 0, 20, 90, 1e30], np.float32)
    call.qfull[..., D:] = rng.choice(gates, (2, 24, D))
    out, want = call.run(version), call.exact()
    close(out, want)
    assert (out[call.qfull[..., D:] <= -200] == 0).all()


@pytest.mark.parametrize("version", VERSIONS)
def test_groups_of_zeros_count_as_zeros(version: str, rng: np.random.Generator) -> None:
    call = Attention.random(rng, SMALL, 30, 2)
    call.cache.ksc[::2, :, 1:3] = 0
    call.cache.vsc[1::2, :, 2] = 0
    call.check(version)


# ---- from keys and values to the output -----------------------------------------------------------------


def check_a_step(rng: np.random.Generator, sizes: Sizes, cells: int, n_tok: int) -> None:
    """Everything in its order on the kernels' own results: a cache built, then a call of n_tok tokens."""
    keys, values = normal(rng, cells, sizes.qkv, D), normal(rng, cells, sizes.qkv, D)
    pos0 = cells - n_tok
    planted = rng.integers(0, pos0)
    qcur = normal(rng, n_tok, sizes.qh, D)
    keys[planted] = 2 * qcur[0, :: sizes.heads]  # an old cell that the first token is to find
    kq, ksc = quantise(keys, sizes=sizes)
    vq, vsc = quantise(values, sizes=sizes)
    cache = Cache(kq, vq, ksc, vsc)
    scores = score(sizes, cache, qcur, pos0, cells)
    check_scores(sizes, cache, qcur, scores, pos0)
    for name in SELECTIONS:
        check_selection(name, sizes, scores, pos0, cells)
    ids = [best_cells(row, pos0 + t + 1, sizes.qbudget) for t, row in enumerate(scores)]
    assert planted in ids[0]
    call = Attention(sizes, cache, normal(rng, n_tok, sizes.qh, 2 * D), qcur, ids, pos0)
    for version in VERSIONS:
        call.check(version)


@pytest.mark.parametrize("cells", [36, 37, 38, 300])
def test_a_step_from_keys_and_values_to_the_output(cells: int, rng: np.random.Generator) -> None:
    check_a_step(rng, SMALL, cells, 2)


@pytest.mark.slow
@pytest.mark.parametrize("cells", [2051, 2052, 2053, 2054, 5000, 20_003, 60_000])
def test_a_step_at_the_shipped_sizes(cells: int, rng: np.random.Generator) -> None:
    check_a_step(rng, SHIPPED, cells, 2)


# ---- the two files ---------------------------------------------------------------------------------------


def test_a_second_file_of_one_s_own_defines_its_constants_and_uses_the_helpers() -> None:
    source = """
    #define QCH2 16
    #define QHG 3
    constant constexpr uint LANES = 32;
    inline uint inner(uint x) { return x / LANES; }
    kernel void qsa_merge2(device const float* part [[buffer(0)]],
                           device const float* qfull [[buffer(1)]],
                           device float* xp [[buffer(2)]],
                           constant QsaArgs& args [[buffer(3)]],
                           uint2 group [[threadgroup_position_in_grid]],
                           uint d [[thread_index_in_threadgroup]])
    {
        const float y = float(1000 * group.y + group.x + inner(d)) + float(d) / 1024.0f;
        qsa_write_prepared(y, xp, args, int(group.y), int(group.x), d);
    }
    """
    library = lab.compile(source, include=(FIRST,), defines={"QH": 4})
    assert library.warnings == ()
    xp = library.qsa_merge2(
        np.zeros(2, np.float32), np.zeros(2, np.float32), lab.empty((3, 4, D)), {"pos0": 0, "max_cells": 4},
        groups=(4, 3), threadgroup=256,
    )  # fmt: skip
    t, h, d = np.indices((3, 4, D))
    np.testing.assert_array_equal(np.array(xp), 1000 * t + h + d // 32 + d / 1024)


def test_the_files_compile_without_warnings_and_have_their_kernels() -> None:
    first, second = lab.compile(FIRST), lab.compile(SECOND, include=(FIRST,))
    assert first.warnings == second.warnings == ()
    names = ["qsa_quant", "qsa_score", "qsa_topk", "qsa_attn", "qsa_merge"]
    assert list(first) == names
    assert list(second) == [*names, "qsa_topk2", "qsa_attn2", "qsa_merge2", "qsa_attn3"]
