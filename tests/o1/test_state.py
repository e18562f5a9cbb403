"""States: fresh, sealed from a prefix, copied, and what they remember."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import lab
import lab.o1
from lab.o1 import Sizes, State

SIZES = Sizes(ng=2, hpg=2, d=8, w=6, ns=2, m=3, windows=(0, 4))
SHAPES = {
    "meta": (2, 4), "ring_k": (2, 6, 8), "ring_v": (2, 6, 8), "sink_k": (2, 2, 8), "sink_v": (2, 2, 8),
    "k_tilde": (2, 3, 8), "q_tilde": (4, 3, 8), "mu": (4, 3, 3), "mz": (4, 6), "t_hat": (4, 3, 8),
}  # fmt: skip


def landmarks(sizes: Sizes, rng: np.random.Generator) -> dict[str, np.ndarray]:
    z = sizes
    shapes = {
        "k_tilde": (z.ng, z.m, z.d), "q_tilde": (z.nh, z.m, z.d), "mu": (z.nh, z.m, z.m),
        "sink_k": (z.ng, z.ns, z.d), "sink_v": (z.ng, z.ns, z.d),
    }  # fmt: skip
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def test_a_fresh_layer_has_seen_nothing(rng: np.random.Generator) -> None:
    given = landmarks(SIZES, rng)
    state = State.fresh(SIZES, **given)
    assert {name: a.shape for name, a in state.arrays.items()} == SHAPES
    np.testing.assert_array_equal(state.meta, [[0, 0, 0, 0], [0, 0, 0, 4]])
    np.testing.assert_array_equal(state.mz[:, :3], np.full((4, 3), -np.inf))
    np.testing.assert_array_equal(state.mz[:, 3:], np.zeros((4, 3)))
    assert not np.asarray(state.t_hat).any()
    for name, array in given.items():
        np.testing.assert_array_equal(state.arrays[name], array.astype(np.float32))
    assert state.tokens == 0 and state.history.pushed == 0
    assert state.meta.dtype == mx.uint32 and state.ring_k.dtype == mx.float32


def test_sinks_may_be_none_at_all(rng: np.random.Generator) -> None:
    sizes = Sizes(ng=1, hpg=1, d=4, w=2, ns=0, m=1)
    given = landmarks(sizes, rng)
    state = State.fresh(sizes, given["k_tilde"], given["q_tilde"], given["mu"])
    assert state.sink_k.shape == (1, 0, 4)
    with pytest.raises(lab.ArgumentError, match=r"ns = 2 sink tokens need sink_k, float32 \(2, 2, 8\)"):
        State.fresh(SIZES, **{n: a for n, a in landmarks(SIZES, rng).items() if "sink" not in n})


def test_another_shape_is_refused_with_both_shapes(rng: np.random.Generator) -> None:
    given = landmarks(SIZES, rng)
    with pytest.raises(lab.ArgumentError, match=r"mu has the shape \(4, 3, 2\); it takes \(4, 3, 3\)"):
        State.fresh(SIZES, **{**given, "mu": given["mu"][:, :, :2]})
    with pytest.raises(AttributeError, match="no 'ring': its buffers are meta, ring_k"):
        _ = State.fresh(SIZES, **given).ring


def test_a_state_needs_every_buffer(rng: np.random.Generator) -> None:
    arrays = dict(State.fresh(SIZES, **landmarks(SIZES, rng)).arrays)
    again = State(SIZES, arrays)
    assert not again.knows_tokens
    with pytest.raises(lab.ArgumentError, match="is not known"):
        _ = again.history
    del arrays["mz"]
    with pytest.raises(lab.ArgumentError, match=r"needs the buffer 'mz', float32 \(4, 6\)"):
        State(SIZES, arrays)


def test_windows_of_meta_and_sizes_must_agree(rng: np.random.Generator) -> None:
    state = State.fresh(SIZES, **landmarks(SIZES, rng))
    with pytest.raises(lab.ArgumentError, match="meta gives group 1 a window of 4 slots, the sizes 5"):
        State(Sizes(ng=2, hpg=2, d=8, w=6, ns=2, m=3, windows=(6, 5)), state.arrays)


def test_a_copy_lives_on_its_own() -> None:
    state, q, k, v = lab.o1.example(SIZES, 9)
    lab.o1.run(state, q[:4], k[:4], v[:4])
    kept = state.copy()
    before = {name: np.asarray(a).copy() for name, a in kept.arrays.items()}
    lab.o1.run(state, q[4:], k[4:], v[4:])
    for name, array in before.items():
        np.testing.assert_array_equal(kept.arrays[name], array)
    assert (kept.tokens, kept.history.pushed) == (4, 4)
    assert (state.tokens, state.history.pushed) == (9, 9)


def test_a_state_made_from_arrays_leaves_them_alone() -> None:
    state, q, k, v = lab.o1.example(SIZES, 9)
    before = {name: np.asarray(a).copy() for name, a in state.arrays.items()}
    lab.o1.run(State(SIZES, state.arrays), q, k, v)
    for name, array in before.items():
        np.testing.assert_array_equal(state.arrays[name], array)


def test_a_state_remembers_its_tokens_in_order() -> None:
    state, q, k, v = lab.o1.example(SIZES, 9)
    for rows in (slice(0, 4), slice(4, 5), slice(5, 9)):
        lab.o1.run(state, q[rows], k[rows], v[rows])
    np.testing.assert_array_equal(state.history.keys, np.asarray(k).transpose(1, 0, 2))
    np.testing.assert_array_equal(state.history.values, np.asarray(v).transpose(1, 0, 2))


def test_a_state_changed_by_other_means_is_told() -> None:
    state, q, k, v = lab.o1.example(SIZES, 4)
    lab.o1.run(state, q, k, v)
    state.arrays["meta"] = state.meta + mx.array([0, 0, 7, 0], dtype=mx.uint32)
    with pytest.raises(lab.ArgumentError, match="meta counts 11 tokens and 4 were given"):
        _ = state.history


def test_the_ring_holds_the_newest_tokens_where_meta_says() -> None:
    state, q, k, v = lab.o1.example(SIZES, 21)
    lab.o1.run(state, q, k, v, chunks=[4, 3, 4, 1, 4, 4, 1])
    for g in range(SIZES.ng):
        length, head, far, _ = np.asarray(state.meta)[g].tolist()
        window = SIZES.window(g)
        assert (length, far) == (window, 21 - window)
        slots = (head + np.arange(length)) % window
        np.testing.assert_array_equal(np.asarray(state.ring_k)[g, slots], np.asarray(k)[21 - window :, g])
        np.testing.assert_array_equal(np.asarray(state.ring_v)[g, slots], np.asarray(v)[21 - window :, g])


# ---- sealing -------------------------------------------------------------------------------------------


def test_landmarks_are_the_means_of_segments(rng: np.random.Generator) -> None:
    keys, queries = rng.standard_normal((7, 2, 8)), rng.standard_normal((7, 4, 8))
    sinks = landmarks(SIZES, rng)
    state = State.sealed(SIZES, keys, queries, sinks["sink_k"], sinks["sink_v"])
    cuts = (slice(0, 3), slice(3, 5), slice(5, 7))  # as equal as can be
    for a, rows in enumerate(cuts):
        np.testing.assert_allclose(np.asarray(state.k_tilde)[:, a], keys[rows].mean(0), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(
            np.asarray(state.q_tilde)[:, a], queries[rows].mean(0), rtol=1e-6, atol=1e-7
        )


def test_the_mixing_matrix_is_the_pseudo_inverse(rng: np.random.Generator) -> None:
    keys, queries = rng.standard_normal((9, 2, 8)), rng.standard_normal((9, 4, 8))
    sinks = landmarks(SIZES, rng)
    state = lab.o1.seal(SIZES, keys, queries, sinks["sink_k"], sinks["sink_v"])
    assert SIZES.scale is not None
    for head in range(SIZES.nh):
        k_tilde = np.asarray(state.k_tilde, np.float64)[head // SIZES.hpg]
        kernel = np.exp(SIZES.scale * np.asarray(state.q_tilde, np.float64)[head] @ k_tilde.T)  # [b][a]
        np.testing.assert_allclose(np.asarray(state.mu)[head] @ kernel, np.eye(SIZES.m), atol=1e-3)


def test_a_prefix_shorter_than_the_landmarks_is_refused(rng: np.random.Generator) -> None:
    sinks = landmarks(SIZES, rng)
    keys, queries = np.zeros((2, 2, 8)), np.zeros((2, 4, 8))
    with pytest.raises(lab.ArgumentError, match="prefix of 2 tokens makes at most 2 landmarks, not m = 3"):
        State.sealed(SIZES, keys, queries, sinks["sink_k"], sinks["sink_v"])
    with pytest.raises(lab.ArgumentError, match=r"queries has the shape \(2, 4, 7\)"):
        State.sealed(SIZES, keys, queries[..., :7], sinks["sink_k"], sinks["sink_v"])


def test_exponents_beyond_float32_are_refused_and_large_ones_are_not(rng: np.random.Generator) -> None:
    sizes = Sizes(ng=1, hpg=1, d=8, w=4, ns=0, m=2, scale=1.0)
    rows = np.zeros((2, 1, 8))
    rows[0, 0, 0] = rows[1, 0, 1] = 8.0
    mu = np.asarray(State.sealed(sizes, rows, rows).mu)[0]  # of exp(64) on the diagonal
    np.testing.assert_allclose(np.diag(mu), np.exp(-64.0), rtol=1e-5)
    one = Sizes(ng=1, hpg=1, d=8, w=4, ns=0, m=1, scale=1.0)
    with pytest.raises(
        lab.ArgumentError, match="exponents reach -128: their mixing matrix is beyond float32"
    ):
        State.sealed(one, rows[:1], -2 * rows[:1])


def orthogonal_prefix(sizes: Sizes, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """m keys and queries, so that exp(s q_b.k_a) has a strong diagonal."""
    keys = np.stack([np.linalg.qr(rng.standard_normal((sizes.d, sizes.m)))[0].T for _ in range(sizes.ng)], 1)
    assert sizes.scale is not None
    keys *= (2.0 / sizes.scale) ** 0.5
    noise = rng.standard_normal((sizes.m, sizes.nh, sizes.d)) * 0.3
    return keys, np.repeat(keys, sizes.hpg, axis=1) + noise


@pytest.mark.parametrize("how", [{"path": "chunk"}, {"path": "matmul"}, {"path": "token"}])
def test_with_as_many_landmarks_as_prefix_tokens_attention_is_exact(
    rng: np.random.Generator, how: dict[str, Any]
) -> None:
    sizes = Sizes(ng=2, hpg=2, d=128, w=10, ns=2, m=16, windows=(0, 7))
    keys, queries = orthogonal_prefix(sizes, rng)
    sinks = {n: a for n, a in landmarks(sizes, rng).items() if "sink" in n}
    state = lab.o1.seal(sizes, keys, queries, **sinks)
    # The prefix is pushed and evicted token by token; what comes after it stays in the smaller window.
    rows = sizes.m + 7
    q = rng.standard_normal((rows, sizes.nh, sizes.d)).astype(np.float32)
    k = np.concatenate([keys, rng.standard_normal((7, sizes.ng, sizes.d))]).astype(np.float32)
    v = rng.standard_normal((rows, sizes.ng, sizes.d)).astype(np.float32)
    exact = lab.o1.full_attention(state, q, k, v)
    out = np.asarray(lab.o1.run(state, q, k, v, **how))
    assert np.asarray(state.meta)[:, 2].tolist() == [13, 16]
    assert np.abs(out - exact).max() <= 2e-4 * np.abs(exact).max()
