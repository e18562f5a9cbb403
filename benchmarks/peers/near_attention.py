"""Attention of a chunk over its near window in NumPy and MLX, the peers of the o1 system's benchmark.

    out[i][g*hpg + h] = softmax(scale q[i][g*hpg + h] . keys[g]) values[g], over what row i sees

Both take the panels that the window makes: all columns of the chunk, and a mask where rows differ in what
they see. They do nothing for the far field and keep no state.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np


def columns_seen(sinks: int, ring: int, window: int, rows: int) -> np.ndarray | None:
    """Which of the columns (sinks, ring, chunk) each row sees, bool [rows][columns]; None where it is all."""
    place = np.arange(ring + rows)
    newest = ring + np.arange(rows)[:, None]
    near = (place <= newest) & (place > newest - window)
    seen = np.concatenate([np.ones((rows, sinks), bool), near], axis=1)
    return None if seen.all() else seen


def numpy_attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, seen: np.ndarray | None
) -> np.ndarray:
    """[rows][nh][d] for q [rows][nh][d], keys and values [ng][columns][d], in their dtype."""
    rows, nh, d = q.shape
    ng = keys.shape[0]
    by_group = (q * q.dtype.type(scale)).reshape(rows, ng, -1, d).transpose(1, 2, 0, 3).reshape(ng, -1, d)
    scores = by_group @ keys.transpose(0, 2, 1)
    if seen is not None:
        by_row = scores.reshape(ng, -1, rows, scores.shape[-1])
        np.copyto(by_row, -np.inf, where=~seen)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    sums = scores.sum(axis=-1, keepdims=True)
    out = (scores @ values) / sums
    return out.reshape(nh, rows, d).transpose(1, 0, 2)


def mlx_attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, seen: np.ndarray | None
) -> Callable[[], mx.array]:
    """MLX's fused attention for the same arrays: a callable that computes and evaluates [1][nh][rows][d]."""
    arrays = mx.array(q.transpose(1, 0, 2)[None]), mx.array(keys[None]), mx.array(values[None])
    mask = None if seen is None else mx.array(seen)
    mx.eval(*arrays)

    def run() -> mx.array:
        out = mx.fast.scaled_dot_product_attention(*arrays, scale=scale, mask=mask)
        mx.eval(out)
        return out

    return run
