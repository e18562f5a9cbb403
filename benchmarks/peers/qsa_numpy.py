"""The QSA system in NumPy float32: the peer of its kernels, step for step.

Quantising, block scores, the exact selection and the gated attention over an 8-bit cache, on the kernels'
buffers. Attention multiplies the scales into the products of each group of 64 dimensions, which are fewer
numbers than keys and values. The work goes on piece by piece, in memory that is kept from call to call, so
that it stays in a core's cache; pieces are too small for BLAS to start threads, and threads here share them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import local

import numpy as np

Array = np.ndarray

BLOCK = 4  # cells
GROUPS = 4  # of dimensions that have one scale
PIECE = 320  # cells worked on at a time
SCORE_PIECE = 160  # the same, where block scores are made


def quantise(x: Array) -> tuple[Array, Array]:
    """float32 [n][qkv][qd] as int8 of the same shape and scales, float16 [n][qkv][4]."""
    groups = x.reshape(*x.shape[:2], GROUPS, -1)
    scales = (np.maximum(groups.max(-1), -groups.min(-1)) / np.float32(127)).astype(np.float16)
    steps = scales.astype(np.float32)
    steps[steps == 0] = np.inf
    values = np.rint(groups / steps[..., None])
    return np.clip(values, -127, 127, out=values).astype(np.int8).reshape(x.shape), scales


def selected(scores: Array, n_kv: int, budget: int) -> Array:
    """The cells that a token attends to, ascending, int64 [min(n_kv, budget)]; ``scores`` are its blocks'."""
    if n_kv <= budget:
        return np.arange(n_kv)
    whole, cells = divmod(n_kv, BLOCK)
    newest, scores = scores[whole], scores[:whole]
    if cells:  # what is left for the unfinished block by the blocks that come before it
        cells = min(cells, max(0, budget - BLOCK * np.count_nonzero(scores >= newest)))
    wanted = budget - cells
    count = -(-wanted // BLOCK)
    if count == 0:
        return np.arange(BLOCK * whole, BLOCK * whole + cells)
    cut = np.partition(scores, whole - count)[whole - count]
    taken = scores > cut
    ties = np.flatnonzero(scores == cut)[: count - np.count_nonzero(taken)]
    taken[ties] = True
    blocks = np.flatnonzero(taken)
    ids = np.empty(BLOCK * count + cells, np.intp)
    np.add(BLOCK * blocks[:, None], np.arange(BLOCK), out=ids[: BLOCK * count].reshape(count, BLOCK))
    ids[BLOCK * count :] = np.arange(BLOCK * whole, BLOCK * whole + cells)
    lacking = BLOCK * count - wanted
    if lacking == 0:
        return ids
    # The last of the ties is cut, and keeps its lowest cells.
    end = BLOCK * (int(np.searchsorted(blocks, ties[-1])) + 1)
    ids[end - lacking : -lacking] = ids[end:]
    return ids[:-lacking]


class NumpyPeer:
    """A cache in the kernels' layout: kq, vq int8 [cell][qkv][qd] and ksc, vsc float16 [cell][qkv][4]."""

    def __init__(self, kq: Array, ksc: Array, vq: Array, vsc: Array, threads: int | None = None) -> None:
        self.kq, self.ksc, self.vq, self.vsc = kq, ksc, vq, vsc
        self.threads = threads or os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(self.threads)
        self._kept = local()

    def score(self, qcur: Array, pos0: int) -> Array:
        """Block scores, float32 [n_tok][whole blocks of the last token + 1].

        Of each row entries up to the token's unfinished block are defined.
        """
        tokens, _, qd = qcur.shape
        qkv = self.kq.shape[1]
        last = (pos0 + tokens) // BLOCK  # blocks that are whole for the last token
        scores = np.empty((tokens, last + 1), np.float32)
        queries = qcur.reshape(tokens, qkv, -1, qd).transpose(1, 3, 0, 2).reshape(qkv, qd, -1)
        queries = np.ascontiguousarray(queries * np.float32(1 / BLOCK))
        step = SCORE_PIECE // BLOCK

        def share(start: int, stop: int) -> None:
            floats = self._memory("keys", (step, BLOCK, qkv * GROUPS, qd // GROUPS))
            sums = self._memory("sums", (step, qkv * GROUPS, 1, qd // GROUPS))
            for block in range(start, stop, step):
                n = min(step, stop - block)
                cells = slice(BLOCK * block, BLOCK * (block + n))
                np.copyto(floats[:n], self.kq[cells].reshape(floats[:n].shape))
                scales = self.ksc[cells].astype(np.float32).reshape(n, BLOCK, -1)
                # The four cells of a block, with their scales, are added up as a product.
                by_group = floats[:n].transpose(0, 2, 1, 3)
                np.matmul(scales.transpose(0, 2, 1)[:, :, None], by_group, out=sums[:n])
                products = sums[:n].reshape(n, qkv, qd).transpose(1, 0, 2) @ queries
                scores[:, block : block + n] = products.reshape(qkv, n, tokens, -1).max(axis=(0, 3)).T

        share_of = -(-last // self.threads)
        starts = range(0, last, max(1, share_of))
        self._all(share, starts, [min(last, start + share_of) for start in starts])
        for t in range(tokens):
            whole, cells = divmod(pos0 + t + 1, BLOCK)
            scores[t, whole] = np.inf if cells else -np.inf
        return scores

    def select(self, scores: Array, pos0: int, budget: int) -> list[Array]:
        """The cells of each token, as ``selected`` finds them."""
        return [selected(row, pos0 + t + 1, budget) for t, row in enumerate(scores)]

    def attend(self, qcur: Array, qfull: Array, ids: Sequence[Array]) -> Array:
        """The gated attention of each token over its cells, float32 [n_tok][qh][qd]."""
        out = np.empty_like(qcur)

        def token(t: int) -> None:
            self._attend(qcur[t], qfull[t, :, qcur.shape[-1] :], ids[t], out[t])

        self._all(token, range(len(qcur)))
        return out

    def _attend(self, query: Array, gate: Array, ids: Array, out: Array) -> None:
        (heads, qd), qkv, n = query.shape, self.kq.shape[1], len(ids)
        each, dims = heads // qkv, qd // GROUPS
        queries = (query * np.float32(qd**-0.5)).reshape(qkv, each, GROUPS, dims)
        queries = np.ascontiguousarray(queries.transpose(0, 2, 3, 1))
        scores = self._memory("scores", (qkv, n, each))
        weights = self._memory("weights", (qkv * GROUPS * PIECE * each,))
        pieces = [slice(start, start + PIECE) for start in range(0, n, PIECE)]
        key_scales, value_scales = self._scales(self.ksc, ids), self._scales(self.vsc, ids)
        for piece in pieces:
            keys = self._floats(self.kq, ids[piece])
            products = self._start(weights, (qkv, GROUPS, keys.shape[2], each))
            np.matmul(keys, queries, out=products)
            products *= key_scales[:, :, piece, None]
            np.add.reduce(products, axis=1, out=scores[:, piece])
        scores -= np.ascontiguousarray(scores.transpose(0, 2, 1)).max(-1)[:, None]
        np.exp(scores, out=scores)
        sums = np.zeros((qkv, GROUPS, each, dims), np.float32)
        for piece in pieces:
            values = self._floats(self.vq, ids[piece])
            products = self._start(weights, (qkv, GROUPS, values.shape[2], each))
            np.multiply(scores[:, None, piece], value_scales[:, :, piece, None], out=products)
            sums += products.transpose(0, 1, 3, 2) @ values
        masses = np.ones((1, n), np.float32) @ scores
        result = sums.transpose(0, 2, 1, 3).reshape(qkv, each, qd) / masses.transpose(0, 2, 1)
        np.divide(result.reshape(heads, qd), 1 + np.exp(-gate), out=out)

    def _floats(self, cached: Array, ids: Array) -> Array:
        """Cells of the cache as float32, without their scales: [qkv][4][cells][qd / 4]."""
        _, qkv, qd = cached.shape
        floats = self._memory("floats", (PIECE, qkv, GROUPS, qd // GROUPS))[: len(ids)]
        np.copyto(floats, cached.take(ids, axis=0).reshape(floats.shape))
        return floats.transpose(1, 2, 0, 3)

    @staticmethod
    def _scales(scales: Array, ids: Array) -> Array:
        """The scales of cells, float32 [qkv][4][cells]."""
        return scales.take(ids, axis=0).transpose(1, 2, 0).astype(np.float32, order="C")

    @staticmethod
    def _start(memory: Array, shape: tuple[int, ...]) -> Array:
        """The start of flat memory as an array without gaps, which NumPy goes through twice as fast."""
        return memory[: math.prod(shape)].reshape(shape)

    def _memory(self, name: str, shape: tuple[int, ...]) -> Array:
        """This thread's array for ``name``: new pages at every call would cost as much as the arithmetic."""
        kept = self._kept.__dict__
        if name not in kept or kept[name].shape != shape:
            kept[name] = np.empty(shape, np.float32)
        return kept[name]

    def _all(self, work: Callable[..., None], *arguments: Iterable[int]) -> None:
        for _ in self._pool.map(work, *arguments):
            pass
