"""Caches and queries to run the system on: random ones, and some with needles that a selection has to find.

needles = lab.qsa.data.needles(lab.qsa.Sizes(max_cells=5000), cells=4500, tokens=2, needles=3)
trace = lab.qsa.trace(needles.cache, *needles.inputs)
needles.found(trace)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..errors import ArgumentError
from ..systems import Trace
from .cache import Cache
from .plans import cells_before, check_room
from .sizes import BLOCK, Sizes

__all__ = ["Needles", "example", "needles"]


def example(
    sizes: Sizes, cells: int, tokens: int, seed: int = 0
) -> tuple[Cache, mx.array, mx.array, mx.array, mx.array]:
    """A cache of ``cells`` cells and ``tokens`` tokens of normal random data: cache, qfull, qcur, k, v.

    ``qfull`` float32 [tokens][qh][2*qd] begins with the query, before positions, and ends with the gate;
    ``qcur`` [tokens][qh][qd], ``k`` and ``v`` [tokens][qkv][qd].
    """
    random = np.random.default_rng(seed)
    keys, values, *inputs = _normal(random, sizes, cells, tokens)
    qfull, qcur, k, v = map(mx.array, inputs)
    return Cache.of(sizes, keys, values), qfull, qcur, k, v


@dataclass(frozen=True)
class Needles:
    """A cache in which some old cells have what the tokens look for.

    ``positions`` are the cells, ascending; the key of each is near the direction of every token's queries,
    and its value has ``mark`` in all dimensions, so that the output of a token that finds the needles is near
    ``mark * sigmoid(gate)``. ``inputs`` are qfull, qcur, k, v.
    """

    cache: Cache
    inputs: tuple[mx.array, mx.array, mx.array, mx.array] = field(repr=False)
    positions: tuple[int, ...]
    mark: float

    def found(self, trace: Trace) -> list[dict[int, bool]]:
        """Which needles each token of ``trace`` attends to, by position: from the ``ids`` that are there."""
        budget, found = self.cache.sizes.qbudget, []
        for step in trace:
            if "ids" in step.dispatch.writes and not step.fault:
                pos0 = cells_before(step.plan)
                for t, ids in enumerate(step.value("ids")):
                    mine = set(ids[: min(pos0 + t + 1, budget)].tolist())
                    found.append({cell: cell in mine for cell in self.positions})
        return found


def needles(
    sizes: Sizes, cells: int, tokens: int, needles: int = 3, seed: int = 0, mark: float = 4.0
) -> Needles:
    """A random cache of ``cells`` cells with ``needles`` of them planted, and ``tokens`` tokens that look for
    them.

    The queries of all tokens and of the query heads of a KV head are near one direction, in which the keys of
    the needles lie; all other keys are random. Needles lie in blocks of their own among the older half of the
    cells. Raises ArgumentError where there are too few for so many.
    """
    blocks = cells // 2 // BLOCK
    if not 1 <= needles <= blocks:
        raise ArgumentError(
            f"The older half of {cells} cells has {blocks} blocks for needles: 1 to {blocks} can be planted, "
            f"not {needles}."
        )
    check_room(sizes, cells, tokens)
    random = np.random.default_rng(seed)
    keys, values, qfull, qcur, k, v = _normal(random, sizes, cells, tokens)
    chosen = np.sort(random.choice(blocks, needles, replace=False))
    positions = BLOCK * chosen + random.integers(0, BLOCK, needles)

    direction = random.standard_normal((sizes.qkv, sizes.qd), dtype=np.float32)
    of_heads = np.repeat(direction, sizes.heads_per_kv, axis=0)
    qcur = of_heads + np.float32(0.3) * qcur
    qfull[..., : sizes.qd] = qcur
    keys[positions] = direction + np.float32(0.1) * keys[positions]
    values[positions] = mark
    inputs = mx.array(qfull), mx.array(qcur), mx.array(k), mx.array(v)
    return Needles(Cache.of(sizes, keys, values), inputs, tuple(positions.tolist()), mark)


def _normal(random: np.random.Generator, z: Sizes, cells: int, tokens: int) -> list[np.ndarray]:
    """Keys and values of the cells, qfull, qcur, k, v."""
    if min(cells, tokens) < 0:
        raise ArgumentError(f"There are no {cells} cells and {tokens} tokens: both are 0 or more.")
    cache, new = (cells, z.qkv, z.qd), (tokens, z.qkv, z.qd)
    shapes = cache, cache, (tokens, z.qh, 2 * z.qd), (tokens, z.qh, z.qd), new, new
    return [random.standard_normal(shape, dtype=np.float32) for shape in shapes]
