"""The QSA system in MLX operations: the peer of its kernels, step for step.

The products are made in the way that MLX's CPU back end does fastest: keys times queries as a product of
float matrices, weights times values as MLX's own quantised product, for which the values lie in its 8-bit
layout. Two streams share the work, and functions are compiled for the sizes of the call when they are first
called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx

BLOCK = 4  # cells
GROUPS = 4  # of dimensions that have one scale
NO_CELL = 2**31 - 1


def quantise(x: mx.array) -> tuple[mx.array, mx.array]:
    """float32 [n][qkv][qd] as int8 of the same shape and scales, float16 [n][qkv][4]."""
    groups = x.reshape(*x.shape[:2], GROUPS, -1)
    scales = (mx.abs(groups).max(-1) / 127).astype(mx.float16)
    steps = scales.astype(mx.float32)[..., None]
    values = mx.clip(mx.round(groups / mx.where(steps == 0, mx.inf, steps)), -127, 127)
    return values.astype(mx.int8).reshape(x.shape), scales


def selected(scores: mx.array, n_kv: int, budget: int) -> mx.array:
    """The cells that a token attends to, ascending, int32 [min(n_kv, budget)]; ``scores`` are its blocks'.

    A block's key is its score, as an integer of the same order, and below that its index, the lowest the
    greatest: no two are alike, so that a partition chooses exactly.
    """
    if n_kv <= budget:
        return mx.arange(n_kv, dtype=mx.int32)
    whole, cells = divmod(n_kv, BLOCK)
    blocks = whole + (cells > 0)
    enough = -(-(budget - cells) // BLOCK) + (cells > 0)
    bits = mx.view(scores[:blocks] + 0.0, mx.int32)  # -0.0 + 0.0 is 0.0
    order = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(mx.int64)
    keys = (order << 32) | mx.arange(blocks - 1, -1, -1, dtype=mx.int64)
    best = mx.sort(mx.partition(keys, blocks - enough)[blocks - enough :])[::-1]
    block = blocks - 1 - (best & 0xFFFFFFFF).astype(mx.int32)
    held = mx.where(block == whole, cells, BLOCK).astype(mx.int32)
    kept = mx.clip(budget - (mx.cumsum(held) - held), 0, held)[:, None]
    lane = mx.arange(BLOCK, dtype=mx.int32)
    ids = mx.where(lane < kept, BLOCK * block[:, None] + lane, NO_CELL)
    return mx.sort(ids.reshape(-1))[:budget]


class MlxPeer:
    """A cache in the kernels' layout: kq, vq int8 [cell][qkv][qd] and ksc, vsc float16 [cell][qkv][4].

    Every method evaluates what it returns.
    """

    def __init__(self, kq: Any, ksc: Any, vq: Any, vsc: Any) -> None:
        self.kq, self.ksc = mx.array(kq), mx.array(ksc).astype(mx.float32)  # halves are slow to read
        # MLX's layout has uint8 steps, four to a word, and a bias: steps and scales stay what they are.
        steps = mx.bitwise_xor(mx.view(mx.array(vq), mx.uint8), mx.array(128, mx.uint8))
        scales = mx.array(vsc).astype(mx.float32)
        self.values = mx.view(steps, mx.uint32), scales, -128 * scales
        mx.eval(self.kq, self.ksc, *self.values)
        self._streams = [mx.new_stream(mx.default_device()) for _ in range(2)]
        self._compiled = cache(self._compile)

    def quantise(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """As the function of this name."""
        return self._all(quantise, [(x,)])[0]

    def score(self, qcur: mx.array, pos0: int) -> mx.array:
        """Block scores, float32 [n_tok][whole blocks of the last token + 1].

        Of each row entries up to the token's unfinished block are defined.
        """
        tokens, last = len(qcur), (pos0 + len(qcur)) // BLOCK
        half = -(-last // 2)
        parts = []
        for start in range(0, last, half):
            cells = slice(BLOCK * start, BLOCK * min(last, start + half))
            parts.append((qcur, self.kq[cells], self.ksc[cells]))
        scores = mx.concatenate([*self._all(_block_scores, parts), mx.zeros((tokens, 1))], axis=1)
        for t in range(tokens):
            whole, cells = divmod(pos0 + t + 1, BLOCK)
            scores[t, whole] = mx.inf if cells else -mx.inf
        mx.eval(scores)
        return scores

    def select(self, scores: mx.array, pos0: int, budget: int) -> list[mx.array]:
        """The cells of each token, as ``selected`` finds them."""
        rows = [(row, pos0 + t + 1, budget) for t, row in enumerate(scores)]
        return self._all(selected, rows)

    def attend(self, qcur: mx.array, qfull: mx.array, ids: Sequence[mx.array]) -> mx.array:
        """The gated attention of each token over its cells, float32 [n_tok][qh][qd]."""
        cached = self.kq, self.ksc, *self.values
        tokens = [(qcur[t], qfull[t], chosen, *cached) for t, chosen in enumerate(ids)]
        out = mx.stack(self._all(_attention, tokens))
        mx.eval(out)
        return out

    def _all(self, work: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The results of the calls, evaluated together, each on the next stream."""
        results = []
        for i, arguments in enumerate(calls):
            arrays = [x for x in arguments if isinstance(x, mx.array)]
            numbers = tuple(x for x in arguments if not isinstance(x, mx.array))
            on = i % len(self._streams)
            with mx.stream(self._streams[on]):
                results.append(self._compiled(work, numbers, on)(*arrays))
        mx.eval(results)
        return results

    @staticmethod
    def _compile(work: Callable[..., Any], numbers: tuple[int, ...], on: int) -> Callable[..., Any]:
        # For each stream by itself: a compiled function stays on the one it was compiled on.
        del on
        return mx.compile(lambda *arrays: work(*arrays, *numbers))


def _block_scores(qcur: mx.array, kq: mx.array, ksc: mx.array) -> mx.array:
    """Scores of whole blocks, float32 [n_tok][blocks], from their cells."""
    tokens, _, qd = qcur.shape
    qkv, blocks = kq.shape[1], len(kq) // BLOCK
    keys = kq.reshape(blocks, BLOCK, qkv, GROUPS, -1)
    scales = ksc.reshape(blocks, BLOCK, qkv, GROUPS, 1)
    a, b, c, d = (keys[:, i].astype(mx.float32) * scales[:, i] for i in range(BLOCK))
    sums = ((a + b) + (c + d)).reshape(blocks, qkv, qd).transpose(1, 0, 2)
    queries = (qcur * (1 / BLOCK)).reshape(tokens, qkv, -1, qd).transpose(1, 3, 0, 2)
    products = sums @ mx.contiguous(queries.reshape(qkv, qd, -1))
    return products.reshape(qkv, blocks, tokens, -1).max((0, 3)).T


def _attention(
    query: mx.array, full: mx.array, ids: mx.array, kq: mx.array, ksc: mx.array, *values: mx.array
) -> mx.array:
    """The gated attention of one token, float32 [qh][qd]."""
    heads, qd = query.shape
    qkv, n = kq.shape[1], len(ids)
    groups = kq[ids].reshape(n, qkv, GROUPS, -1).astype(mx.float32)
    keys = (groups * ksc[ids][..., None]).reshape(n, qkv, qd).transpose(1, 0, 2)
    queries = mx.contiguous((query * qd**-0.5).reshape(qkv, -1, qd).transpose(0, 2, 1))
    scores = mx.contiguous((keys @ queries).transpose(0, 2, 1))
    weights = mx.softmax(scores, axis=-1, precise=True)
    chosen = [x[ids].transpose(1, 0, 2) for x in values]
    out = mx.quantized_matmul(weights, *chosen, transpose=False, group_size=qd // GROUPS, bits=8)
    return out.reshape(heads, qd) * mx.sigmoid(full[:, qd:])
