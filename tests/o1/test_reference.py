"""The float64 reference against the definition written out, token by token, and against known cases."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from lab.o1 import reference
from lab.o1.reference import History


@dataclass(frozen=True)
class Sizes:
    ng: int = 2
    hpg: int = 2
    d: int = 4
    w: int = 5
    ns: int = 1
    m: int = 3
    scale: float | None = None


def layer(rng: np.random.Generator, sizes: Sizes, tokens: int, windows=None, signed=False) -> History:
    nh = sizes.ng * sizes.hpg
    mu = rng.standard_normal((nh, sizes.m, sizes.m))
    fresh = History.fresh(
        sizes,
        rng.standard_normal((sizes.ng, sizes.m, sizes.d)),
        rng.standard_normal((nh, sizes.m, sizes.d)),
        mu if signed else np.abs(mu),
        rng.standard_normal((sizes.ng, sizes.ns, sizes.d)),
        rng.standard_normal((sizes.ng, sizes.ns, sizes.d)),
        windows,
    )
    return fresh.push(*rng.standard_normal((2, tokens, sizes.ng, sizes.d)))


def chunk(rng: np.random.Generator, sizes: Sizes, rows: int):
    q = rng.standard_normal((rows, sizes.ng * sizes.hpg, sizes.d))
    return (q, *rng.standard_normal((2, rows, sizes.ng, sizes.d)))


def written_out(history: History, q, k, v, i: int, gh: int) -> tuple[np.ndarray, float, float]:
    """Output, far and near denominator of one row and head by the definition's sums, without any shift."""
    sizes, s = history.sizes, history.scale
    g = gh // sizes.hpg
    keys = [*history.keys[g], *k[: i + 1, g]]
    values = [*history.values[g], *v[: i + 1, g]]
    evicted = max(0, len(keys) - history.window(g))
    near = over = far = 0.0
    for key, value in [
        *zip(history.sink_k[g], history.sink_v[g], strict=True),
        *zip(keys[evicted:], values[evicted:], strict=True),
    ]:
        weight = math.exp(s * q[i, gh] @ key)
        near, over = near + weight, over + weight * value
    behind = 0.0
    for key, value in zip(keys[:evicted], values[:evicted], strict=True):
        weight = sum(
            math.exp(s * q[i, gh] @ history.k_tilde[g, a])
            * history.mu[gh, a, b]
            * math.exp(s * history.q_tilde[gh, b] @ key)
            for a in range(sizes.m)
            for b in range(sizes.m)
        )
        far, behind = far + weight, behind + weight * value
    if evicted and far >= 0:
        return (over + behind) / (near + far), far, near
    return over / near, far, near


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("windows", [None, (3, 0), (4, 5)])
@pytest.mark.parametrize("tokens", [0, 2, 5, 6, 23])
def test_attention_is_the_definition_written_out(rng, tokens, windows, signed):
    sizes = Sizes()
    history = layer(rng, sizes, tokens, windows, signed)
    q, k, v = chunk(rng, sizes, 3)
    out = reference.attention(history, q, k, v)
    assert out.shape == (3, 4, 4)
    for i in range(3):
        for gh in range(4):
            np.testing.assert_allclose(
                out[i, gh], written_out(history, q, k, v, i, gh)[0], rtol=1e-9, atol=1e-12
            )


@pytest.mark.parametrize("path", ["chunk", "matmul", "token"])
def test_the_dispatches_end_in_the_output_of_attention(rng, path):
    last = {"chunk": "o1c_add", "matmul": "o1c_gadd", "token": "o1c_tok_merge"}[path]
    sizes = Sizes(ng=3, hpg=2, ns=0)
    for tokens in (0, 3, 4, 5, 6, 40):
        history = layer(rng, sizes, tokens, (0, 2, 4), signed=True)
        q, k, v = chunk(rng, sizes, 1 if path == "token" else 2)
        out = reference.expected(history, q, k, v, path)[last]["out"]
        wanted = reference.attention(history, q, k, v)
        assert out.defined.mean() > 0.9
        np.testing.assert_allclose(out.values[out.defined], wanted[out.defined], rtol=1e-9, atol=1e-12)


def test_stored_sums_are_relative_to_the_largest_exponent(rng):
    sizes = Sizes(ng=1, hpg=1, m=2)
    history = layer(rng, sizes, 11)
    q, k, v = chunk(rng, sizes, 3)
    got = reference.expected(history, q, k, v, "chunk")
    mz, t_hat = (got["o1c_far_commit"][name].values[0] for name in ("mz", "t_hat"))
    evicted = 11 + 3 - sizes.w
    keys, values = history.keys[0, :evicted], history.values[0, :evicted]
    for b in range(2):
        exponents = history.scale * keys @ history.q_tilde[0, b]
        assert mz[b] == pytest.approx(exponents.max())
        assert mz[2 + b] * math.exp(mz[b]) == pytest.approx(np.exp(exponents).sum())
        np.testing.assert_allclose(t_hat[b] * math.exp(mz[b]), np.exp(exponents) @ values)


def test_the_far_part_of_a_row_is_relative_to_its_maximum(rng):
    sizes = Sizes(ns=2)
    history = layer(rng, sizes, 9)
    q, k, v = chunk(rng, sizes, 4)
    got = reference.expected(history, q, k, v, "chunk")
    hd, inv = got["o1c_far"]["hd"].values, got["o1c_soft"]["inv"].values
    for i in range(4):
        for gh in range(4):
            _, far, near = written_out(history, q, k, v, i, gh)
            c, denominator, counts, _ = hd[i, gh]
            assert counts == 1
            assert denominator * math.exp(c) == pytest.approx(far)
            assert math.exp(c) / inv[i, gh] == pytest.approx(near + far)


def test_gains_and_evicted_rows_weigh_what_they_stand_for(rng):
    sizes = Sizes(ng=1, hpg=1)
    history = layer(rng, sizes, 8)
    q, k, v = chunk(rng, sizes, 4)
    got = reference.expected(history, q, k, v, "chunk")
    hd, gn, cf = (got["o1c_far"][name] for name in ("hd", "gn", "cf"))
    # What is stored before the chunk: the same sums over the first 3 tokens, relative to their own maximum.
    exponents = history.scale * history.keys[0, : 8 - sizes.w] @ history.q_tilde[0].T
    stored = np.exp(exponents - exponents.max(0)).sum(0)
    for i in range(4):
        by_parts = gn.values[i, 0] @ stored + cf.values[i, 0, : i + 1].sum()
        assert by_parts == pytest.approx(hd.values[i, 0, 1])
        assert cf.defined[i, 0].tolist() == [j <= i for j in range(64)]


def test_elements_that_no_dispatch_writes_are_not_defined(rng):
    sizes = Sizes()
    history = layer(rng, sizes, 3)
    q, k, v = chunk(rng, sizes, 4)
    got = reference.expected(history, q, k, v, "chunk")
    assert got["o1c_score"]["sc"].defined.sum() == 4 * (4 * 1 + 4 + 5 + 5 + 5)  # heads x (sinks, windows)
    assert got["o1c_far_e"]["s"].defined.sum() == 12 * (4 + 4 + 1 + 1)
    assert got["o1c_far"]["cf"].defined.sum() == 4 * (1 + 2)  # the third and the fourth row evict
    assert got["o1c_far"]["gn"].defined[:, 0, 0].tolist() == [False, False, True, True]
    assert got["o1c_ring_commit"]["ring_k"].defined.all()
    token = reference.expected(history, q[:1], k[:1], v[:1], "token")
    assert not token["o1c_tok_near"]["part"].defined[..., 2:4].any()
    assert token["o1c_tok_far"]["fo"].defined.sum(1).tolist() == [4 + sizes.m] * 4
    assert token["o1c_tok_commit"]["ring_k"].defined[:, :, 0].tolist() == [[True] * 4 + [False]] * 2


def test_the_ring_holds_each_token_in_the_slot_it_came_into(rng):
    sizes = Sizes(w=5)
    history = layer(rng, sizes, 12, (0, 3))
    q, k, v = chunk(rng, sizes, 2)
    got = reference.expected(history, q, k, v, "chunk")
    assert got["o1c_meta"]["meta"].values.tolist() == [[5, 4, 9, 0], [3, 2, 11, 3]]
    keys = history.push(k, v).keys
    ring = got["o1c_ring_commit"]["ring_k"]
    assert np.array_equal(ring.values[0], keys[0, [10, 11, 12, 13, 9]])
    assert np.array_equal(ring.values[1, :3], keys[1, [12, 13, 11]])
    assert ring.defined[1, :, 0].tolist() == [True, True, True, False, False]
    assert not ring.magnitude.any()


def test_a_far_part_that_does_not_count_is_left_out_and_c_keeps_its_maximum(rng):
    sizes = Sizes()
    history = layer(rng, sizes, 9)
    q, k, v = chunk(rng, sizes, 2)
    counting = reference.expected(history, q, k, v, "chunk")["o1c_far"]["hd"]
    for value in (-1.0, np.nan):
        dropping = History(**{**vars(history), "mu": np.full_like(history.mu, value)})
        got = reference.expected(dropping, q, k, v, "chunk")
        assert np.array_equal(got["o1c_far"]["hd"].values[..., 0], counting.values[..., 0])
        assert not got["o1c_far"]["hd"].values[..., 1:].any()
        assert got["o1c_far"]["hd"].defined.all()
        assert not got["o1c_far"]["cf"].defined.any()
    zero = History(**{**vars(history), "mu": np.zeros_like(history.mu)})
    assert reference.expected(zero, q, k, v, "chunk")["o1c_far"]["hd"].values[..., 2].all()


def test_a_denominator_of_uncertain_sign_leaves_the_row_undefined(rng):
    sizes = Sizes(ng=1, hpg=1, m=2)
    history = layer(rng, sizes, 9)
    # Two landmarks that are one, mixed with opposite signs: the terms cancel.
    same = {name: np.repeat(getattr(history, name)[:, :1], 2, axis=1) for name in ("k_tilde", "q_tilde")}
    history = History(**{**vars(history), **same, "mu": np.array([[[1.0, 0.0], [0.0, -1.0]]])})
    got = reference.expected(history, *chunk(rng, sizes, 2), "chunk")
    assert got["o1c_far"]["hd"].defined[:, 0].tolist() == [[True, False, False, True]] * 2
    assert not got["o1c_far"]["cf"].defined.any()
    assert not got["o1c_add"]["out"].defined.any()


def test_full_attention_is_softmax_over_all_tokens(rng):
    sizes = Sizes()
    history = layer(rng, sizes, 17)
    q, k, v = chunk(rng, sizes, 3)
    out = reference.full_attention(history, q, k, v)
    for i in range(3):
        for gh in range(4):
            g = gh // 2
            keys = np.concatenate([history.sink_k[g], history.keys[g], k[: i + 1, g]])
            values = np.concatenate([history.sink_v[g], history.values[g], v[: i + 1, g]])
            weights = np.exp(history.scale * keys @ q[i, gh])
            np.testing.assert_allclose(out[i, gh], weights @ values / weights.sum(), rtol=1e-9, atol=1e-12)


def test_the_ideal_far_field_is_what_full_attention_has_beyond_the_window(rng):
    sizes = Sizes()
    history = layer(rng, sizes, 17, (0, 3))
    q, k, v = chunk(rng, sizes, 3)
    far = reference.ideal(history, q, k, v)
    near_only = History(**{**vars(history), "mu": -np.ones_like(history.mu)})
    near = reference.attention(near_only, q, k, v)
    share = far.share[..., None]
    assert ((far.share > 0) & (far.share < 1)).all()
    full = reference.full_attention(history, q, k, v)
    np.testing.assert_allclose((1 - share) * near + share * far.values, full, rtol=1e-9, atol=1e-12)
    nothing = reference.ideal(layer(rng, sizes, 0), q, k, v)
    assert not nothing.share.any() and not nothing.values.any()


def test_landmarks_that_are_the_evicted_keys_give_full_attention(rng):
    sizes = Sizes(ng=1, hpg=2, w=4, m=7, d=8)
    history = layer(rng, sizes, 10)
    k_tilde = history.keys[:, :7]  # with one more row, 7 of 11 tokens are evicted
    matrices = np.exp(history.scale * np.einsum("hbd,ad->hba", history.q_tilde, k_tilde[0]))
    history = History(**{**vars(history), "k_tilde": k_tilde, "mu": np.linalg.inv(matrices)})
    q, k, v = chunk(rng, sizes, 1)
    out, full = reference.attention(history, q, k, v), reference.full_attention(history, q, k, v)
    np.testing.assert_allclose(out, full, rtol=1e-6, atol=1e-8)


def test_exponents_beyond_float64_stay_finite(rng):
    sizes = Sizes(scale=400.0)
    history = layer(rng, sizes, 12)
    q, k, v = chunk(rng, sizes, 2)
    assert np.isfinite(reference.attention(history, q, k, v)).all()
    assert np.isfinite(reference.full_attention(history, q, k, v)).all()
    for buffers in reference.expected(history, q, k, v, "chunk").values():
        for wanted in buffers.values():
            assert np.isfinite(wanted.values[wanted.defined]).all()
            assert np.isfinite(wanted.magnitude[wanted.defined]).all()


def test_magnitudes_bound_the_rounding_of_inputs(rng):
    """Inputs off by half an ulp move nothing by more than a few roundings of its magnitude."""
    sizes = Sizes(d=16)
    history = layer(rng, sizes, 30, signed=True)
    q, k, v = chunk(rng, sizes, 4)
    wanted = reference.expected(history, q, k, v, "chunk")
    moved = [x * (1 + 2.0**-24 * rng.choice([-1, 1], x.shape)) for x in (q, k, v)]
    for kernel, buffers in reference.expected(history, *moved, "chunk").items():
        for name, got in buffers.items():
            if name in ("ring_k", "ring_v"):
                continue  # exact, and it is the inputs
            both = wanted[kernel][name].defined & got.defined
            off = np.abs(got.values - wanted[kernel][name].values)[both]
            assert (off <= 6 * 2.0**-24 * wanted[kernel][name].magnitude[both] + 1e-30).all(), (kernel, name)


def test_what_the_kernels_cannot_do_is_refused_with_the_numbers(rng):
    sizes = Sizes(w=5)
    history = layer(rng, sizes, 9, (0, 3))
    with pytest.raises(ValueError, match="4 rows do not fit group 1, whose window is 3"):
        reference.expected(history, *chunk(rng, sizes, 4), "chunk")
    with pytest.raises(ValueError, match="takes one row, not 2"):
        reference.expected(history, *chunk(rng, sizes, 2), "token")
    with pytest.raises(ValueError, match="'rows'"):
        reference.expected(history, *chunk(rng, sizes, 2), "rows")
    q, k, v = chunk(rng, sizes, 3)
    with pytest.raises(ValueError, match="q has 3 rows, k and v have 2"):
        reference.expected(history, q, k[:2], v[:2], "chunk")
