"""The float64 reference against the definition written out, and against what broken kernels leave behind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.qsa import reference
from lab.qsa.reference import Quantised
from lab.qsa.selection import chosen
from lab.systems.deviation import EPS, Distances
from lab.systems.plan import Field

Buffers = dict[str, np.ndarray]

pytestmark = pytest.mark.filterwarnings("error")


@dataclass(frozen=True)
class Sizes:
    qh: int = 6
    qkv: int = 2
    qd: int = 128
    qbudget: int = 11
    qch: int = 4
    qch2: int = 3
    max_cells: int = 64

    def chunks(self, length: int) -> int:
        return -(-self.qbudget // length)


PATHS = {
    "v1": ("qsa_quant", "qsa_score", "qsa_topk", "qsa_attn", "qsa_merge"),
    "v2": ("qsa_quant", "qsa_score", "qsa_topk2", "qsa_attn2", "qsa_merge2"),
    "v3": ("qsa_quant", "qsa_score", "qsa_topk2", "qsa_attn3", "qsa_merge"),
}


def call(rng: np.random.Generator, sizes: Sizes, pos0: int, n_tok: int, length: int | None = None) -> Buffers:
    """The buffers before a call of ``n_tok`` tokens: a cache of ``pos0`` cells, empty scratch."""
    z, length = sizes, length or sizes.qch

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    found: Buffers = {
        "qfull": normal(n_tok, z.qh, 2 * z.qd),
        "qcur": normal(n_tok, z.qh, z.qd),
        "k": normal(n_tok, z.qkv, z.qd),
        "v": normal(n_tok, z.qkv, z.qd),
        "scores": np.full((n_tok, z.max_cells // 4 + 2), np.nan, np.float32),
        "ids": np.full((n_tok, z.qbudget), -(2**31), np.int32),
        "part": np.full((n_tok, z.chunks(length), z.qh, z.qd + 2), np.nan, np.float32),
        "xp": np.full((n_tok, z.qh, z.qd), np.nan, np.float32),
    }
    for q, scale in (("kq", "ksc"), ("vq", "vsc")):
        filled = Quantised.of(normal(pos0, z.qkv, z.qd))
        found[q] = np.zeros((z.max_cells, z.qkv, z.qd), np.int8)
        found[scale] = np.zeros((z.max_cells, z.qkv, z.qd // 64), np.float16)
        found[q][:pos0], found[scale][:pos0] = filled.q, filled.scale
    return found


def fill(buffers: Buffers, expected: dict[str, Any]) -> None:
    """Write what is expected as a kernel would."""
    for name, wanted in expected.items():
        kind = buffers[name].dtype
        buffers[name] = np.where(wanted.defined, wanted.values.astype(kind), buffers[name])


def through(buffers: Buffers, sizes: Sizes, pos0: int, n_tok: int, *kernels: str) -> dict[str, Any]:
    """What the last of ``kernels`` should write, once all before it wrote what they should."""
    expected: dict[str, Any] = {}
    for kernel in kernels:
        fill(buffers, expected)
        expected = reference.expected(buffers, sizes, pos0, n_tok, kernel)
    return expected


def cache(buffers: Buffers, cells: int) -> tuple[Quantised, Quantised]:
    keys, values = (
        Quantised(buffers[q][:cells], buffers[s][:cells]) for q, s in (("kq", "ksc"), ("vq", "vsc"))
    )
    return keys, values


def written_out(buffers: Buffers, sizes: Sizes, i: int, h: int, ids: Any) -> np.ndarray:
    """The output of one token and head by the definition's sums, without any shift."""
    z = sizes
    g = h // (z.qh // z.qkv)
    over, under = np.zeros(z.qd), 0.0
    for cell in ids:
        key = [
            float(buffers["kq"][cell, g, d]) * float(buffers["ksc"][cell, g, d // 64]) for d in range(z.qd)
        ]
        value = [
            float(buffers["vq"][cell, g, d]) * float(buffers["vsc"][cell, g, d // 64]) for d in range(z.qd)
        ]
        weight = math.exp(np.dot(buffers["qcur"][i, h].astype(float), key) / math.sqrt(z.qd))
        over, under = over + weight * np.array(value), under + weight
    gate = buffers["qfull"][i, h, z.qd :].astype(float)
    return over / under / (1 + np.exp(-gate))


# ---- the 8-bit cache -----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=64, max_size=64), st.sampled_from([1.0, 1e-6, 1e-12])
)
def test_quantised_numbers_are_the_nearest_steps_of_their_scale(numbers: list[float], by: float) -> None:
    x = (np.array(numbers) * by).astype(np.float32).reshape(1, 1, 64)
    found = Quantised.of(x)
    largest = float(np.abs(x).max())
    scale = float(found.scale[0, 0, 0])
    assert scale == float(np.float16(largest / 127))
    assert np.abs(found.q.astype(int)).max() <= 127
    steps = found.q[0, 0].astype(float)
    if scale == 0:
        assert not steps.any()
    else:
        reached = np.clip(x[0, 0].astype(float), -127 * scale, 127 * scale)
        assert (np.abs(reached - steps * scale) <= scale / 2 * (1 + 1e-9)).all()
    assert found.floats().dtype == np.float64
    assert found.floats()[0, 0].tolist() == (steps * scale).tolist()


def test_scales_are_for_64_dimensions_of_a_head_and_a_cell(rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 2, 128)).astype(np.float32)
    found = Quantised.of(x)
    assert (found.q.shape, found.scale.shape, len(found)) == ((3, 2, 128), (3, 2, 2), 3)
    for cell in range(3):
        for head in range(2):
            for group in range(2):
                of = x[cell, head, 64 * group : 64 * group + 64]
                assert found.scale[cell, head, group] == np.float16(np.abs(of).max() / 127)
    np.testing.assert_array_equal(found.floats([2, 0]), found.floats()[[2, 0]])
    assert np.abs(found.floats() - x).max() <= float(found.scale.max()) / 2 * 1.001


def test_a_group_of_zeros_has_scale_0_and_so_has_one_too_small_for_half() -> None:
    x = np.zeros((1, 1, 128), np.float32)
    x[..., 64:] = 1e-7
    found = Quantised.of(x)
    assert not found.scale.any() and not found.q.any()


def test_quant_writes_the_cells_of_the_call_and_no_others(rng: np.random.Generator) -> None:
    z = Sizes()
    buffers = call(rng, z, 9, 3)
    buffers["kq"][9:] = 77
    buffers["vsc"][12:] = 0.5
    got = reference.expected(buffers, z, 9, 3, "qsa_quant")
    assert set(got) == {"kq", "ksc", "vq", "vsc"}
    for of, q, scale in (("k", "kq", "ksc"), ("v", "vq", "vsc")):
        wanted = Quantised.of(buffers[of])
        for name, new in ((q, wanted.q), (scale, wanted.scale)):
            assert got[name].defined.all()
            sure = got[name].magnitude[9:12] == 0  # a number may happen to be undecided
            assert (~sure).sum() <= max(1, 0.02 * sure.size)
            assert np.array_equal(got[name].values[9:12][sure], new[sure])
            others = [*range(9), *range(12, z.max_cells)]
            assert np.array_equal(got[name].values[others], buffers[name][others])
            assert not got[name].magnitude[others].any()
    only = {name: buffers[name] for name in ("v", "vq", "vsc")}
    assert set(reference.expected(only, z, 9, 3, "qsa_quant")) == {"vq", "vsc"}


def off(got: np.ndarray, wanted: Any) -> float:
    """The largest distance in roundings, as traces find it."""
    flat = got.reshape(-1)
    whole = Field("", 0, got.shape[-1], (("element", flat.size),))
    return float(Distances.of(got, wanted, whole).roundings.max())


def test_either_neighbour_is_right_where_rounding_to_8_bits_is_undecided(rng: np.random.Generator) -> None:
    z = Sizes(qh=1, qkv=1, qd=64, max_cells=1)
    buffers = call(rng, z, 0, 1)
    steps = np.concatenate([[127.0, 2.5, -3.5, 2.4999998, 2.5000002, 2.4999, 0.0], np.arange(57)])
    buffers["k"][0, 0] = steps * 0.25  # the scale is 0.25, exactly
    kq = reference.expected(buffers, z, 0, 1, "qsa_quant")["kq"]
    nearest = np.array([127, 2, -4, 2, 3, 2, 0, *range(57)], np.int8).reshape(1, 1, 64)
    assert off(nearest, kq) <= 1
    assert np.flatnonzero(kq.magnitude).tolist() == [1, 2, 3, 4]
    for at, both in ((1, (2, 3)), (2, (-3, -4)), (3, (2, 3)), (4, (2, 3))):
        for value in range(-5, 5):
            other = nearest.copy()
            other[0, 0, at] = value
            assert (off(other, kq) <= 1) == (value in both)
    for at in (0, 5, 6, 20):
        wrong = nearest.copy()
        wrong[0, 0, at] -= 1
        assert off(wrong, kq) == math.inf


def test_either_scale_is_right_where_rounding_to_half_is_undecided(rng: np.random.Generator) -> None:
    z = Sizes(qh=1, qkv=1, qd=64, max_cells=1)
    buffers = call(rng, z, 0, 1)
    low, high = np.float16(0.3), np.nextafter(np.float16(0.3), np.float16(1))
    between = (float(low) + float(high)) / 2
    x = np.full(64, 127 * between / 2, np.float32)
    x[0] = 127 * between  # exact in float32
    buffers["k"][0, 0] = x
    got = reference.expected(buffers, z, 0, 1, "qsa_quant")
    for scale in (low, high):
        assert off(np.full((1, 1, 1), scale), got["ksc"]) <= 1
        with_it = np.rint(np.float32(x) / np.float32(scale)).clip(-127, 127).astype(np.int8)
        assert off(with_it.reshape(1, 1, 64), got["kq"]) <= 1
    for scale in (np.nextafter(low, np.float16(0)), np.nextafter(high, np.float16(1))):
        assert off(np.full((1, 1, 1), scale), got["ksc"]) > 1
    # A little away from the middle there is nothing to decide.
    buffers["k"][0, 0] = x * np.float32(1.00001)
    got = reference.expected(buffers, z, 0, 1, "qsa_quant")
    assert off(np.full((1, 1, 1), high), got["ksc"]) == 0
    assert not got["ksc"].magnitude.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e37, 127 * 65520.0])
def test_numbers_that_no_scale_holds_leave_their_group_undefined(
    rng: np.random.Generator, bad: float
) -> None:
    z = Sizes()
    buffers = call(rng, z, 5, 2)
    buffers["v"][1, 0, 70] = bad
    got = reference.expected(buffers, z, 5, 2, "qsa_quant")
    assert np.argwhere(~got["vsc"].defined).tolist() == [[6, 0, 1]]
    assert np.argwhere(~got["vq"].defined).tolist() == [[6, 0, d] for d in range(64, 128)]
    assert got["kq"].defined.all()


# ---- scores and selection ------------------------------------------------------------------------------


@pytest.mark.parametrize("pos0", [0, 1, 2, 3, 4, 5, 6, 7, 30, 56])
def test_block_scores_are_the_definition_written_out(rng: np.random.Generator, pos0: int) -> None:
    z = Sizes()
    buffers = call(rng, z, pos0, 4)
    got = through(buffers, z, pos0, 4, "qsa_quant", "qsa_score")["scores"]
    keys = cache(buffers, pos0 + 4)[0].floats()
    alone = reference.block_scores(buffers["qcur"], cache(buffers, pos0 + 4)[0])
    assert alone.shape == (4, (pos0 + 4) // 4 + 1)
    for i in range(4):
        n_kv = pos0 + i + 1
        for block in range(n_kv // 4):
            cells = keys[4 * block : 4 * block + 4].mean(0)
            best = max(buffers["qcur"][i, h].astype(float) @ cells[h // 3] for h in range(6))
            assert got.values[i, block] == pytest.approx(best, rel=1e-12)
            assert alone[i, block] == got.values[i, block]
        last = n_kv // 4
        assert got.values[i, last] == alone[i, last] == (np.inf if n_kv % 4 else -np.inf)
        assert got.magnitude[i, last] == 0
        assert (alone[i, last + 1 :] == -np.inf).all()
        assert got.defined[i].tolist() == [b <= last for b in range(z.max_cells // 4 + 2)]


@pytest.mark.parametrize("pos0", range(6, 20))
def test_ids_follow_the_scores_that_are_there(rng: np.random.Generator, pos0: int) -> None:
    z = Sizes()  # a budget of 11
    buffers = call(rng, z, pos0, 2)
    buffers["scores"][:] = rng.integers(0, 3, buffers["scores"].shape)
    for kernel in ("qsa_topk", "qsa_topk2"):
        got = reference.expected(buffers, z, pos0, 2, kernel)["ids"]
        assert got.values.dtype == np.int64
        assert not got.magnitude.any()
        for i in range(2):
            n_kv = pos0 + i + 1
            n = min(n_kv, 11)
            assert got.values[i, :n].tolist() == chosen(buffers["scores"][i], n_kv, 11).tolist()
            assert got.defined[i].tolist() == [at < n for at in range(11)]


def test_a_key_that_matches_is_found_by_its_own_selection(rng: np.random.Generator) -> None:
    q = rng.standard_normal((2, 6, 128))
    keys = 0.1 * rng.standard_normal((60, 2, 128))
    keys[17, 1] = q[1, 5]
    found = reference.chosen_cells(q, Quantised.of(keys), 11)
    assert [len(ids) for ids in found] == [11, 11]
    assert {16, 17, 18, 19} <= set(found[1].tolist())
    assert {56, 57, 58} <= set(found[0].tolist())  # the unfinished block of the first row
    everything = reference.chosen_cells(q, Quantised.of(keys), 60)
    assert [ids.tolist() for ids in everything] == [list(range(59)), list(range(60))]


# ---- attention -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("pos0", [0, 5, 9, 10, 11, 12, 40])
def test_the_dispatches_end_in_the_output_written_out(rng: np.random.Generator, path: str, pos0: int) -> None:
    z, n_tok = Sizes(), 3
    length = z.qch2 if path == "v2" else z.qch
    buffers = call(rng, z, pos0, n_tok, length)
    got = through(buffers, z, pos0, n_tok, *PATHS[path])["xp"]
    assert got.defined.all()
    ids = [buffers["ids"][i, : min(pos0 + i + 1, z.qbudget)] for i in range(n_tok)]
    alone = reference.attention(buffers["qfull"], buffers["qcur"], *cache(buffers, pos0 + n_tok), ids)
    for i in range(n_tok):
        for h in range(z.qh):
            wanted = written_out(buffers, z, i, h, ids[i])
            np.testing.assert_allclose(alone[i, h], wanted, rtol=1e-9, atol=1e-12)
            # What stood in ``part`` was float32.
            np.testing.assert_allclose(got.values[i, h], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", ["qsa_attn", "qsa_attn2", "qsa_attn3"])
@pytest.mark.parametrize("pos0", [0, 2, 3, 4, 7, 8, 10, 30])
def test_partials_are_of_their_cells(rng: np.random.Generator, kernel: str, pos0: int) -> None:
    z, n_tok = Sizes(), 2
    length = z.qch2 if kernel == "qsa_attn2" else z.qch
    buffers = call(rng, z, pos0, n_tok, length)
    got = through(buffers, z, pos0, n_tok, "qsa_quant", "qsa_score", "qsa_topk", kernel)["part"]
    keys, values = (x.floats() for x in cache(buffers, pos0 + n_tok))
    assert got.values.shape == buffers["part"].shape
    for i in range(n_tok):
        n = min(pos0 + i + 1, z.qbudget)
        written = -(-n // length)
        assert got.defined[i].all((1, 2)).tolist() == [c < written for c in range(z.chunks(length))]
        assert not got.defined[i, written:].any()
        for c in range(written):
            ids = buffers["ids"][i, c * length : min(n, (c + 1) * length)]
            for h in range(z.qh):
                exponents = keys[ids, h // 3] @ buffers["qcur"][i, h].astype(float) / math.sqrt(z.qd)
                weights = np.exp(exponents - exponents.max())
                found = got.values[i, c, h]
                assert found[z.qd] == pytest.approx(exponents.max(), rel=1e-12)
                assert found[z.qd + 1] == pytest.approx(weights.sum(), rel=1e-12)
                np.testing.assert_allclose(
                    found[: z.qd], weights @ values[ids, h // 3], rtol=1e-9, atol=1e-12
                )


def test_cells_are_attended_to_as_listed_even_if_a_selection_would_not_list_them_so(
    rng: np.random.Generator,
) -> None:
    z = Sizes()
    buffers = call(rng, z, 30, 1)
    fill(buffers, reference.expected(buffers, z, 30, 1, "qsa_quant"))
    listed = np.array([[30, 5, 5, 2, 1, 0, 9, 9, 9, 20, 7]], np.int32)
    buffers["ids"] = listed
    got = through(buffers, z, 30, 1, "qsa_attn", "qsa_merge")["xp"]
    for h in range(z.qh):
        wanted = written_out(buffers, z, 0, h, listed[0])
        np.testing.assert_allclose(got.values[0, h], wanted, rtol=1e-5, atol=1e-6)


def test_full_attention_is_over_every_cell_that_a_row_sees(rng: np.random.Generator) -> None:
    z = Sizes()
    qfull, qcur = rng.standard_normal((3, 6, 256)), rng.standard_normal((3, 6, 128))
    keys, values = rng.standard_normal((2, 20, 2, 128)).astype(np.float32)
    out = reference.full_attention(qfull, qcur, keys, values)
    assert out.shape == (3, 6, 128)
    for i in range(3):
        for h in range(z.qh):
            seen = 18 + i
            weights = np.exp(keys[:seen, h // 3].astype(float) @ qcur[i, h] / math.sqrt(z.qd))
            wanted = weights @ values[:seen, h // 3] / weights.sum() / (1 + np.exp(-qfull[i, h, 128:]))
            np.testing.assert_allclose(out[i, h], wanted, rtol=1e-9, atol=1e-12)


def test_exponents_beyond_float64_stay_finite(rng: np.random.Generator) -> None:
    qfull, qcur = rng.standard_normal((1, 6, 256)), 1e3 * rng.standard_normal((1, 6, 128))
    keys, values = 1e3 * rng.standard_normal((2, 20, 2, 128))
    qfull[..., 128:] *= 1e5
    assert np.isfinite(reference.full_attention(qfull, qcur, keys, values)).all()


def test_the_quantisation_error_is_that_of_the_8_bits(rng: np.random.Generator) -> None:
    qfull, qcur = rng.standard_normal((2, 6, 256)), rng.standard_normal((2, 6, 128))
    keys, values = rng.standard_normal((2, 40, 2, 128)).astype(np.float32)
    quantised = Quantised.of(keys), Quantised.of(values)
    ids = [range(0, 30), range(10, 40)]
    for chosen_ids in (ids, None):
        found = reference.quantisation_error(qfull, qcur, quantised, (keys, values), chosen_ids)
        seen = chosen_ids or [range(39), range(40)]
        exact, coarse = (
            reference.attention(qfull, qcur, *cells, [list(i) for i in seen])
            for cells in ((keys, values), quantised)
        )
        assert found.max_absolute == pytest.approx(np.abs(exact - coarse).max(), rel=1e-9)
        assert found.mean_absolute == pytest.approx(np.abs(exact - coarse).mean(), rel=1e-9)
        assert found.largest == pytest.approx(np.abs(exact).max())
        assert found.max_relative == found.max_absolute / found.largest
        assert 0 < found.mean_relative < found.max_relative < 0.02
    kept = tuple(x.floats() for x in quantised)
    assert reference.quantisation_error(qfull, qcur, quantised, kept, ids).max_absolute == 0
    nothing = np.zeros((40, 2, 128), np.float32)
    zeros = Quantised.of(nothing)
    assert reference.quantisation_error(qfull, qcur, (zeros, zeros), (nothing, nothing)).max_relative == 0


# ---- magnitudes ----------------------------------------------------------------------------------------


def in_float32(
    buffers: Buffers, sizes: Sizes, pos0: int, n_tok: int, length: int
) -> Iterator[tuple[str, Any]]:
    """What plain float32 arithmetic makes of the same buffers, for every value that is rounded."""
    z, f32 = sizes, np.float32
    heads = np.arange(z.qh) // (z.qh // z.qkv)

    def floats(q: str, scale: str) -> np.ndarray:
        return buffers[q].astype(f32) * np.repeat(buffers[scale].astype(f32), 64, -1)

    keys, values = floats("kq", "ksc"), floats("vq", "vsc")
    means = keys.reshape(-1, 4, z.qkv, z.qd).sum(1) * f32(0.25)
    scores = np.einsum("ihd,bhd->ihb", buffers["qcur"], means[:, heads]).max(1)
    yield "qsa_score", np.pad(scores, ((0, 0), (0, 2)))
    part = buffers["part"].copy()
    for i in range(n_tok):
        n = min(pos0 + i + 1, z.qbudget)
        for c in range(-(-n // length)):
            ids = buffers["ids"][i, c * length : min(n, (c + 1) * length)]
            exponents = np.einsum("hd,nhd->hn", buffers["qcur"][i], keys[ids][:, heads]) * f32(z.qd**-0.5)
            largest = exponents.max(-1, keepdims=True)
            weights = np.exp(exponents - largest)
            sums = np.einsum("hn,nhd->hd", weights, values[ids][:, heads])
            part[i, c] = np.concatenate([sums, largest, weights.sum(-1, keepdims=True)], -1)
    yield "attend", part
    xp = np.empty((n_tok, z.qh, z.qd), f32)
    for i in range(n_tok):
        mine = buffers["part"][i, : -(-min(pos0 + i + 1, z.qbudget) // length)]
        weights = np.exp(mine[..., -2] - mine[..., -2].max(0))[..., None]
        mean = (weights * mine[..., : z.qd]).sum(0) / (weights * mine[..., -1:]).sum(0)
        xp[i] = mean / (1 + np.exp(-buffers["qfull"][i, :, z.qd :]))
    yield "merge", xp


@pytest.mark.parametrize("loud", [1.0, 20.0])
@pytest.mark.parametrize("path", ["v1", "v2"])
def test_float32_stays_within_a_few_roundings_and_a_small_error_does_not(
    rng: np.random.Generator, path: str, loud: float
) -> None:
    z, pos0, n_tok = Sizes(qbudget=43, qch=16, qch2=8, max_cells=128), 101, 4
    length = z.qch2 if path == "v2" else z.qch
    buffers = call(rng, z, pos0, n_tok, length)
    buffers["qcur"] *= np.float32(loud)
    kernels = PATHS[path]
    fill(buffers, through(buffers, z, pos0, n_tok, *kernels))
    wanted = {kernel: reference.expected(buffers, z, pos0, n_tok, kernel) for kernel in kernels}
    names = {"qsa_score": "qsa_score", "attend": kernels[3], "merge": kernels[4]}
    for kind, got in in_float32(buffers, z, pos0, n_tok, length):
        ((name, expected),) = wanted[names[kind]].items()
        finite = expected.defined & np.isfinite(expected.values)
        got = np.where(finite, got, expected.values.astype(np.float32))
        assert off(got, expected) <= 8, name
        # An error of a thousandth of what a value is made of shows.
        at = np.unravel_index(np.argmax(np.where(finite, np.abs(expected.values), 0)), got.shape)
        got[at] *= 1.001
        assert off(got, expected) > 100 / loud, name


def test_unrounded_inputs_move_nothing_by_more_than_a_few_roundings(rng: np.random.Generator) -> None:
    z, pos0, n_tok = Sizes(), 30, 2
    buffers = call(rng, z, pos0, n_tok)
    fill(buffers, through(buffers, z, pos0, n_tok, *PATHS["v1"]))
    moved = dict(buffers)
    buffers["qfull"] *= np.float32(30)  # where a gate is all but closed it is off by more
    for name in ("qcur", "qfull", "part"):
        moved[name] = buffers[name] * (1 + EPS * rng.choice([-1, 1], buffers[name].shape))
    for kernel in ("qsa_score", "qsa_attn", "qsa_merge"):
        for name, wanted in reference.expected(buffers, z, pos0, n_tok, kernel).items():
            got = reference.expected(moved, z, pos0, n_tok, kernel)[name]
            sure = wanted.defined & np.isfinite(wanted.values)
            far = np.abs(got.values[sure] - wanted.values[sure])
            assert (far <= 4 * EPS * wanted.magnitude[sure]).all(), name


# ---- what broken kernels leave -------------------------------------------------------------------------


def test_nan_scores_leave_the_token_undefined_unless_they_are_not_read(rng: np.random.Generator) -> None:
    z = Sizes()
    buffers = call(rng, z, 30, 3)
    buffers["scores"][:] = 1.0
    buffers["scores"][1, 3] = np.nan
    buffers["scores"][2, 10] = np.nan  # beyond the token's blocks
    got = reference.expected(buffers, z, 30, 3, "qsa_topk")["ids"]
    assert got.defined.all(1).tolist() == [True, False, True]
    assert not got.defined[1].any()
    few = reference.expected(call(rng, z, 8, 3), z, 8, 3, "qsa_topk2")["ids"]  # all scores are NaN
    assert few.defined.sum(1).tolist() == [9, 10, 11]


@pytest.mark.parametrize("bad", [-1, 64, 2**31 - 1, -(2**31)])
def test_cells_that_are_not_in_the_cache_leave_the_token_undefined(
    rng: np.random.Generator, bad: int
) -> None:
    z = Sizes()
    buffers = call(rng, z, 30, 3)
    buffers["ids"][:] = np.arange(11)
    buffers["ids"][1, 10] = bad
    for kernel in ("qsa_attn", "qsa_attn2", "qsa_attn3"):
        got = reference.expected(buffers, z, 30, 3, kernel)["part"]
        assert got.defined.all((1, 2, 3)).tolist() == [True, False, True]
        assert not got.defined[1].any()


def test_what_follows_from_nan_in_the_cache_or_a_partial_is_undefined_and_nothing_else(
    rng: np.random.Generator,
) -> None:
    z = Sizes()
    buffers = call(rng, z, 30, 2)
    fill(buffers, through(buffers, z, 30, 2, *PATHS["v1"]))
    buffers["ids"][:] = [list(range(11)), list(range(11, 22))]
    broken = {**buffers, "ksc": buffers["ksc"].copy(), "vsc": buffers["vsc"].copy()}
    broken["ksc"][5, 1, 0] = np.nan
    broken["vsc"][12, 0, 1] = np.inf
    scores = reference.expected(broken, z, 30, 2, "qsa_score")["scores"]
    assert np.argwhere(~scores.defined[:, :8]).tolist() == [[0, 1], [1, 1]]
    part = reference.expected(broken, z, 30, 2, "qsa_attn")["part"]
    assert not part.defined[0, 1, 3:].any()  # heads of the second KV head, cells 4 to 7
    assert not part.defined[1, 0, :3, 64:128].any()
    assert part.defined.sum() == 2 * 3 * 6 * 130 - 3 * 130 - 3 * 64
    for bad in (np.nan, np.inf, -np.inf):
        broken = {**buffers, "part": buffers["part"].copy()}
        broken["part"][1, 2, 4, 7] = bad
        xp = reference.expected(broken, z, 30, 2, "qsa_merge")["xp"]
        assert np.argwhere(~xp.defined).tolist() == [[1, 4, 7]]
        broken["part"][0, 0, 2, z.qd + 1] = bad
        xp = reference.expected(broken, z, 30, 2, "qsa_merge")["xp"]
        assert not xp.defined[0, 2].any() and xp.defined[0, [0, 1, 3, 4, 5]].all()


def test_sums_that_float32_may_not_hold_on_the_way_are_undefined(rng: np.random.Generator) -> None:
    z = Sizes()
    buffers = call(rng, z, 30, 1)
    buffers["part"][:] = 1.0
    buffers["part"][0, :, 3, 5] = [3e38, -3e38, 1.0]
    xp = reference.expected(buffers, z, 30, 1, "qsa_merge")["xp"]
    assert np.argwhere(~xp.defined).tolist() == [[0, 3, 5]]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 3, 9, 10, 40, 61]), st.integers(1, 3))
def test_no_rubbish_makes_it_fail(seed: int, pos0: int, n_tok: int) -> None:
    rng, z = np.random.default_rng(seed), Sizes()
    for length, kernels in ((z.qch, ("qsa_attn3", "qsa_merge")), (z.qch2, ("qsa_attn2", "qsa_merge2"))):
        buffers = call(rng, z, pos0, n_tok, length)
        for name, array in buffers.items():
            if rng.random() < 0.7:
                random = np.frombuffer(rng.bytes(array.nbytes), array.dtype).reshape(array.shape)
                buffers[name] = np.where(
                    rng.random(array.shape) < rng.choice([0.001, 0.1, 1.0]), random, array
                )
        for kernel in ("qsa_quant", "qsa_score", "qsa_topk", *kernels):
            for name, got in reference.expected(buffers, z, pos0, n_tok, kernel).items():
                assert got.values.shape == got.defined.shape == got.magnitude.shape == buffers[name].shape
                assert (got.magnitude[got.defined] >= 0).all()
                if kernel != "qsa_quant":  # which keeps what was there
                    assert not np.isnan(got.values).any()


def test_another_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel 'qsa_sort' in QSA: it has qsa_quant"):
        reference.expected({}, Sizes(), 0, 1, "qsa_sort")
