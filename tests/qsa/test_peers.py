"""The peers of the QSA benchmark: they select exactly and attend as the definition says."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.peers import qsa_mlx, qsa_numpy

SIZES = {"tokens": 3, "qh": 6, "qkv": 2, "qd": 256}


@pytest.fixture(autouse=True)
def _uncompiled():
    """MLX's peer without a compiler, which the machine need not have."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def by_definition(scores, n_kv: int, budget: int) -> list[int]:
    """Blocks by score, equal ones by index, until the budget is spent."""
    order = sorted(range(-(-n_kv // 4)), key=lambda block: (-scores[block], block))
    cells = [cell for block in order for cell in range(4 * block, min(n_kv, 4 * block + 4))]
    return sorted(cells[:budget]) if n_kv > budget else list(range(n_kv))


def scores_of(rng: np.random.Generator, blocks: int) -> dict[str, np.ndarray]:
    tiny = np.float32(1e-45)
    found = {
        "random": rng.standard_normal(blocks),
        "few values": rng.integers(-2, 3, blocks),
        "all equal": np.full(blocks, 3.0),
        "all but one equal": np.where(np.arange(blocks) == blocks // 2, -1.0, 3.0),
        "zeros of both signs": np.where(rng.random(blocks) < 0.5, 0.0, -0.0),
        "denormals": tiny * rng.integers(-3, 4, blocks),
        "infinities": rng.choice([-np.inf, -1, 1, np.inf], blocks),
    }
    return {name: scores.astype(np.float32) for name, scores in found.items()}


@pytest.mark.parametrize("newest", [np.inf, 0.0, -np.inf, None])
@pytest.mark.parametrize("budget", [1, 3, 4, 35, 64, 67])
def test_the_peers_select_the_cells_of_the_definition(budget, newest):
    seed = budget
    rng = np.random.default_rng(seed)
    for n_kv in [*range(max(1, budget - 2), budget + 9), 200, 201, 202, 203]:
        for kind, scores in scores_of(rng, n_kv // 4 + 1).items():
            if newest is not None:
                scores[-1] = newest
            wanted = by_definition(scores.tolist(), n_kv, budget)
            told = f"{kind}, n_kv {n_kv}, seed {seed}"
            assert qsa_numpy.selected(scores, n_kv, budget).tolist() == wanted, told
            assert qsa_mlx.selected(mx.array(scores), n_kv, budget).tolist() == wanted, told


def layer(cells: int, seed: int):
    """Keys and values as floats, and qfull, qcur."""
    rng, z = np.random.default_rng(seed), SIZES
    keys, values = rng.standard_normal((2, cells, z["qkv"], z["qd"]), dtype=np.float32)
    qfull = rng.standard_normal((z["tokens"], z["qh"], 2 * z["qd"]), dtype=np.float32)
    return keys, values, qfull, rng.standard_normal((z["tokens"], z["qh"], z["qd"]), dtype=np.float32)


def dequantised(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return values * np.repeat(scales.astype(np.float64), 64, axis=-1)


@pytest.mark.parametrize("cells", [11, 700, 1301])
def test_the_peers_score_and_attend_as_float64_does(cells):
    keys, values, qfull, qcur = layer(cells, seed=cells)
    (kq, ksc), (vq, vsc) = qsa_numpy.quantise(keys), qsa_numpy.quantise(values)
    float_keys, float_values = dequantised(kq, ksc), dequantised(vq, vsc)
    pos0, each = cells - SIZES["tokens"], SIZES["qh"] // SIZES["qkv"]
    rng = np.random.default_rng(cells)
    ids = [np.sort(rng.choice(pos0, min(pos0, 650 + t), replace=False)) for t in range(SIZES["tokens"])]

    peers = {
        "NumPy": (qsa_numpy.NumpyPeer(kq, ksc, vq, vsc, threads=2), lambda x: x),
        "MLX": (qsa_mlx.MlxPeer(kq, ksc, vq, vsc), mx.array),
    }
    for name, (peer, given) in peers.items():
        scores = np.asarray(peer.score(given(qcur), pos0))
        out = np.asarray(peer.attend(given(qcur), given(qfull), [given(i) for i in ids]))
        for t, query in enumerate(qcur.astype(np.float64)):
            queries = query.reshape(SIZES["qkv"], each, -1)
            blocks, unfinished = divmod(pos0 + t + 1, 4)
            means = float_keys[: 4 * blocks].reshape(blocks, 4, *float_keys.shape[1:]).mean(axis=1)
            wanted = np.einsum("ghd,bgd->bgh", queries, means).max(axis=(1, 2))
            assert np.abs(scores[t, :blocks] - wanted).max() <= 4e-6 * np.abs(wanted).max(), (name, t)
            assert scores[t, blocks] == (np.inf if unfinished else -np.inf), (name, t)

            weights = np.exp(np.einsum("ghd,cgd->ghc", queries, float_keys[ids[t]]) / 16)
            weights /= weights.sum(axis=-1, keepdims=True)
            wanted = np.einsum("ghc,cgd->ghd", weights, float_values[ids[t]]).reshape(query.shape)
            wanted /= 1 + np.exp(-qfull[t, :, SIZES["qd"] :].astype(np.float64))
            assert np.abs(out[t] - wanted).max() <= 4e-6 * np.abs(wanted).max(), (name, t)


def test_the_peers_quantise_to_the_nearest_step_of_a_half_scale():
    x, _, _, _ = layer(50, seed=5)
    x[3, 1, 64:128] = 0
    groups = x.reshape(50, 2, 4, 64).astype(np.float64)
    exact = np.abs(groups).max(axis=-1) / 127
    for name, (values, scales) in {
        "NumPy": qsa_numpy.quantise(x),
        "MLX": map(np.asarray, qsa_mlx.quantise(mx.array(x))),
    }.items():
        assert (values.dtype, scales.dtype) == (np.int8, np.float16), name
        assert np.abs(scales - exact).max() <= 2**-11 * exact.max(), name
        steps = np.repeat(scales.astype(np.float64), 64, axis=-1).reshape(groups.shape)
        away = np.abs(groups - steps * values.reshape(groups.shape))
        clamped = np.abs(values.reshape(groups.shape)) == 127
        assert (away <= steps * np.where(clamped, 0.6, 0.500001)).all(), name
        assert not values[3, 1, 64:128].any() and scales[3, 1, 1] == 0, name
