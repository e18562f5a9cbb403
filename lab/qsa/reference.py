"""Sparse attention over an 8-bit cache in float64, from the definition, to hold what kernels wrote against.

``expected`` gives what a dispatch should write, from what its buffers held before it: the selection that
follows from the very scores that are there, the attention over the very cells that are listed. ``attention``
is the output in one go over given cells, ``full_attention`` over all of them, and ``quantisation_error`` is
what the 8 bits cost.

Token ``i`` of ``rows`` that follow ``pos0`` cells sees cells ``0 .. pos0 + i``, its own included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import ArgumentError
from ..systems.deviation import EPS, Expected
from .selection import BLOCK, chosen

__all__ = [
    "QuantisationError",
    "Quantised",
    "SizesLike",
    "attention",
    "block_scores",
    "chosen_cells",
    "expected",
    "full_attention",
    "quantisation_error",
]

Array = np.ndarray

GROUP = 64  # dimensions that share a scale
LEVELS = 127

# Below it float32 is denormal, and GPUs may take it for 0. As a magnitude: an error of 2**-126.
_UNDERFLOW = 2.0**-126 / EPS
# What float32 holds, with room for sums that are scaled down only later.
_LARGEST = float(np.finfo(np.float32).max) / 64
# By how many roundings a kernel's quotient may differ from ours: of a fast division, or of a reciprocal.
_QUOTIENT = 8 * EPS
_PIECE = 1024  # blocks that are dequantised at a time
_SILENTLY = functools.partial(np.errstate, all="ignore")  # what comes of rubbish is dealt with


class SizesLike(Protocol):
    """What is read of ``lab.qsa.Sizes``."""

    @property
    def qh(self) -> int: ...
    @property
    def qkv(self) -> int: ...
    @property
    def qd(self) -> int: ...
    @property
    def qbudget(self) -> int: ...
    @property
    def qch(self) -> int: ...
    @property
    def qch2(self) -> int: ...


# ---- the 8-bit cache -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantised:
    """Keys or values as the cache holds them: ``q`` int8 [cells][qkv][qd], ``scale`` f16 [cells][qkv][qd/64].

    A number is the product of its integer and the scale of its group of 64 dimensions.
    """

    q: Array
    scale: Array

    @classmethod
    def of(cls, x: Any) -> Quantised:
        """Float numbers [cells][qkv][qd], quantised: the scale is their largest / 127 rounded to half, and
        they are rounded to nearest against that. Numbers too small for a scale in half become 0."""
        with _SILENTLY():
            groups = _groups(np.asarray(x))
            scale = _scale(groups)
            steps = np.nan_to_num(_steps(groups, scale))
        return cls(steps.reshape(np.shape(x)).astype(np.int8), scale.astype(np.float16))

    def __len__(self) -> int:
        return len(self.q)

    def floats(self, cells: Any = slice(None)) -> Array:
        """The numbers of ``cells``: float64 [cells][qkv][qd]."""
        return self._exact(cells).astype(float)

    def _exact(self, cells: Any) -> Array:
        # 8 times 11 bits: float32 holds the product exactly.
        q, scale = self.q[cells].astype(np.float32), self.scale[cells].astype(np.float32)
        with _SILENTLY():
            return (q.reshape(*scale.shape, GROUP) * scale[..., None]).reshape(q.shape)


def _groups(x: Array) -> Array:
    """``x`` [cells][qkv][qd] by groups of a scale: float64 [cells][qkv][qd/64][64]."""
    return x.astype(float).reshape(*x.shape[:2], x.shape[2] // GROUP, GROUP)


def _scale(groups: Array, by: float = 0.0) -> Array:
    """The scales of ``groups``, from a quotient that is off by the share ``by``."""
    return (np.abs(groups).max(-1) / LEVELS * (1 + by)).astype(np.float16).astype(float)


def _steps(groups: Array, scale: Array, by: float = 0.0) -> Array:
    """``groups`` in steps of their scale, from a quotient that is off by the share ``by``."""
    quotient = np.where(scale[..., None] > 0, groups / scale[..., None], 0.0) * (1 + by)
    return np.clip(np.rint(quotient), -LEVELS, LEVELS)


# ---- one go --------------------------------------------------------------------------------------------

Cells = Any
"""Keys or values [cells][qkv][qd]: ``Quantised``, or an array of floats."""


def attention(qfull: Array, qcur: Array, keys: Cells, values: Cells, ids: Sequence[Any]) -> Array:
    """The output over the cells ``ids[i]`` of each row: float64 [rows][qh][qd].

    ``qfull`` [rows][qh][2 * qd] has the gates behind the queries, which are not used; ``qcur`` [rows][qh][qd]
    are the queries that count. An entry of ``ids`` is anything that indexes cells.
    """
    queries = np.asarray(qcur, float)
    out = [
        _softmax(query, _floats(keys, cells), _floats(values, cells))
        for query, cells in zip(queries, ids, strict=True)
    ]
    return np.stack(out) * _sigmoid(_gates(qfull))


def full_attention(qfull: Array, qcur: Array, keys: Cells, values: Cells) -> Array:
    """The output over every cell that a row sees, the last row all of ``keys``: float64 [rows][qh][qd]."""
    rows, cells = len(qcur), len(keys)
    seen = [slice(0, cells - rows + i + 1) for i in range(rows)]
    return attention(qfull, qcur, _floats(keys, slice(None)), _floats(values, slice(None)), seen)


def block_scores(qcur: Array, keys: Quantised) -> Array:
    """The score of each block of four cells for each row: float64 [rows][blocks].

    Blocks are those of the last row, which sees all of ``keys``. What a row sees of is scored: the maximum
    over heads of ``q.mean(k)`` where it sees the whole block, infinity where it sees a part; all others have
    -infinity.
    """
    rows, cells = len(qcur), len(keys)
    scores = np.full((rows, cells // BLOCK + 1), -np.inf)
    whole, _ = _whole_blocks(np.asarray(qcur, float), keys, cells // BLOCK)
    for i, n_kv in enumerate(_cells_seen(cells - rows, rows)):
        scores[i, : n_kv // BLOCK] = whole[i, : n_kv // BLOCK]
        if n_kv % BLOCK:
            scores[i, n_kv // BLOCK] = np.inf
    return scores


def chosen_cells(qcur: Array, keys: Quantised, budget: int) -> list[Array]:
    """The cells that each row attends to by its own float64 scores, rounded to float32: int32, ascending."""
    rows, cells = len(qcur), len(keys)
    scores = block_scores(qcur, keys).astype(np.float32)
    return [
        chosen(row, n_kv, budget) for row, n_kv in zip(scores, _cells_seen(cells - rows, rows), strict=True)
    ]


@dataclass(frozen=True)
class QuantisationError:
    """How far attention over the 8-bit cache is from that over the float numbers, over the same cells.

    ``largest`` is the largest output of the latter; ``max_relative`` and ``mean_relative`` are the absolute
    errors as a share of it.
    """

    max_absolute: float
    mean_absolute: float
    largest: float

    @property
    def max_relative(self) -> float:
        """The largest error as a share of the largest output; 0 where all is 0."""
        return self.max_absolute / self.largest if self.largest else 0.0

    @property
    def mean_relative(self) -> float:
        """The mean error as a share of the largest output; 0 where all is 0."""
        return self.mean_absolute / self.largest if self.largest else 0.0


def quantisation_error(
    qfull: Array,
    qcur: Array,
    cache: tuple[Quantised, Quantised],
    floats: tuple[Array, Array],
    ids: Sequence[Any] | None = None,
) -> QuantisationError:
    """The error of attention over the ``cache``, keys and values, against that over the ``floats`` it is of.

    Both attend to the cells ``ids[i]`` of each row; without ``ids`` to all that the row sees.
    """

    def output(keys: Cells, values: Cells) -> Array:
        if ids is None:
            return full_attention(qfull, qcur, keys, values)
        return attention(qfull, qcur, keys, values, ids)

    found, exact = output(*cache), output(*floats)
    error = np.abs(found - exact)
    return QuantisationError(float(error.max()), float(error.mean()), float(np.abs(exact).max()))


def _softmax(query: Array, keys: Array, values: Array) -> Array:
    """Attention of the heads [qh][qd] of one row to cells [n][qkv][qd]: [qh][qd]."""
    heads, kv = len(query), keys.shape[1]
    out = np.empty(query.shape)
    for g in range(kv):
        mine = slice(g * heads // kv, (g + 1) * heads // kv)
        exponents = query[mine] @ keys[:, g].T * query.shape[1] ** -0.5
        weights = np.exp(exponents - exponents.max(-1, keepdims=True))
        out[mine] = weights @ values[:, g] / weights.sum(-1, keepdims=True)
    return out


def _floats(x: Cells, cells: Any) -> Array:
    return x.floats(cells) if isinstance(x, Quantised) else np.asarray(x)[cells].astype(float, copy=False)


def _gates(qfull: Array) -> Array:
    return np.asarray(qfull)[..., np.shape(qfull)[-1] // 2 :].astype(float)


def _sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0, -x))


def _cells_seen(pos0: int, rows: int) -> range:
    """``n_kv`` of each row."""
    return range(pos0 + 1, pos0 + rows + 1)


def _whole_blocks(queries: Array, keys: Quantised, blocks: int) -> tuple[Array, Array]:
    """``max over heads of q.mean(k)`` of each whole block, and its magnitude: both [rows][blocks]."""
    rows, d, kv = len(queries), queries.shape[-1], keys.q.shape[1]
    scores, magnitude = np.empty((2, rows, blocks))
    for piece in _pieces(blocks):
        cells = slice(BLOCK * piece.start, BLOCK * piece.stop)
        four = keys._exact(cells).reshape(-1, BLOCK, kv, d)
        means = (four.sum(1, dtype=float) / BLOCK, np.abs(four).sum(1, dtype=float) / BLOCK)
        for of, all_queries, mean in zip((scores, magnitude), (queries, np.abs(queries)), means, strict=True):
            products = [
                all_queries.reshape(rows, kv, -1, d)[:, g] @ mean[:, g].T  # [rows][heads of g][blocks]
                for g in range(kv)
            ]
            of[:, piece] = np.concatenate(products, 1).max(1)
    return scores, magnitude


def _pieces(blocks: int) -> Iterator[slice]:
    for start in range(0, blocks, _PIECE):
        yield slice(start, min(start + _PIECE, blocks))


# ---- every dispatch ------------------------------------------------------------------------------------


def expected(
    inputs: Mapping[str, Array], sizes: SizesLike, pos0: int, n_tok: int, kernel: str
) -> dict[str, Expected]:
    """What ``kernel`` should write in a call of ``n_tok`` tokens after ``pos0`` cells, by buffer.

    ``inputs`` are the buffers as they were before the dispatch, by name, in the shapes of the specification;
    those that the kernel reads, and the cache for ``qsa_quant``, which of keys (``k``, ``kq``, ``ksc``) and
    values (``v``, ``vq``, ``vsc``) gives what is there. Cells of the cache that it does not write are
    expected to stay as they were.

    What nothing can be said of is not defined: what no kernel writes, and all that follows from scores that
    are NaN, cells that are not in the cache or numbers that float32 does not hold. Magnitudes count the
    parts of a value with the roundings behind them. Where rounding to 8 bits or to half is undecided, the
    value is halfway between both neighbours and the magnitude that of one rounding to either. Selected cells
    are exact. Raises ValueError for another kernel.
    """
    if kernel not in _KERNELS:
        raise ValueError(f"There is no kernel {kernel!r} in QSA: it has {', '.join(_KERNELS)}.")
    with _SILENTLY():
        return _KERNELS[kernel](inputs, sizes, pos0, n_tok)


def _quant(inputs: Mapping[str, Array], sizes: SizesLike, pos0: int, n_tok: int) -> dict[str, Expected]:
    found = {}
    for of, quantised, scale in (("k", "kq", "ksc"), ("v", "vq", "vsc")):
        if of in inputs and quantised in inputs:
            groups = _groups(np.asarray(inputs[of]).reshape(n_tok, sizes.qkv, sizes.qd))
            scales = [_scale(groups, by) for by in (-_QUOTIENT, _QUOTIENT)]
            steps = [_steps(groups, s, by) for s in scales for by in (-_QUOTIENT, _QUOTIENT)]
            defined = np.isfinite(scales[1])
            found[scale] = _cells(inputs[scale], pos0, scales, defined)
            found[quantised] = _cells(inputs[quantised], pos0, steps, defined[..., None])
    return found


def _cells(before: Array, pos0: int, candidates: Sequence[Array], defined: Array) -> Expected:
    """The cells from ``pos0`` on as any of ``candidates`` has them, all others as they were ``before``."""
    low, high = np.min(candidates, 0), np.max(candidates, 0)
    undecided = (defined & (low < high)).any()
    # Integers take much less room, and there may be many cells.
    whole = before.astype(before.dtype if before.dtype.kind == "i" and not undecided else float)
    sure, magnitude = np.ones(before.shape, bool), np.zeros(before.shape)
    written, shape = slice(pos0, pos0 + len(low)), (len(low), *before.shape[1:])
    # Halfway between, so that of all numbers only these are as near as the magnitude allows.
    whole[written] = np.where(defined, (low + high) / 2, 0).reshape(shape)
    magnitude[written] = np.where(defined, (high - low) / 2 / EPS, 0).reshape(shape)
    sure[written] = np.broadcast_to(defined, low.shape).reshape(shape)
    return Expected(whole, sure, magnitude)


def _score(inputs: Mapping[str, Array], sizes: SizesLike, pos0: int, n_tok: int) -> dict[str, Expected]:
    queries = np.asarray(inputs["qcur"], float).reshape(n_tok, sizes.qh, sizes.qd)
    keys = Quantised(inputs["kq"], inputs["ksc"])
    whole, magnitude = _whole_blocks(queries, keys, (pos0 + n_tok) // BLOCK)
    scores = _Buffer(np.shape(inputs["scores"]))
    for i, n_kv in enumerate(_cells_seen(pos0, n_tok)):
        blocks = n_kv // BLOCK
        scores.set((i, slice(blocks)), whole[i, :blocks], magnitude[i, :blocks] + _UNDERFLOW)
        scores.set_exactly((i, blocks), np.inf if n_kv % BLOCK else -np.inf)
    return {"scores": scores.done()}


def _topk(inputs: Mapping[str, Array], sizes: SizesLike, pos0: int, n_tok: int) -> dict[str, Expected]:
    shape = n_tok, sizes.qbudget
    ids, defined = np.zeros(shape, np.int64), np.zeros(shape, bool)
    for i, n_kv in enumerate(_cells_seen(pos0, n_tok)):
        try:
            cells = chosen(inputs["scores"][i], n_kv, sizes.qbudget)
        except ArgumentError:  # NaN among the scores
            continue
        ids[i, : len(cells)] = cells
        defined[i, : len(cells)] = True
    return {"ids": Expected(ids, defined, np.zeros(shape))}


def _attend(
    inputs: Mapping[str, Array], sizes: SizesLike, pos0: int, n_tok: int, length: int
) -> dict[str, Expected]:
    """Chunks of ``length`` cells."""
    queries = np.asarray(inputs["qcur"], float).reshape(n_tok, sizes.qkv, -1, sizes.qd)
    keys, values = (Quantised(inputs[q], inputs[s]) for q, s in (("kq", "ksc"), ("vq", "vsc")))
    chunks = -(-sizes.qbudget // length)
    part = _Buffer((n_tok, chunks, sizes.qh, sizes.qd + 2))
    for i, n_kv in enumerate(_cells_seen(pos0, n_tok)):
        ids = np.asarray(inputs["ids"])[i, : min(n_kv, sizes.qbudget)]
        if not ((ids >= 0) & (ids < len(keys))).all():
            continue
        value, magnitude = _partials(queries[i], keys.floats(ids), values.floats(ids), length)
        part.set((i, slice(len(value))), value, magnitude)
    return {"part": part.done()}


def _partials(queries: Array, keys: Array, values: Array, length: int) -> tuple[Array, Array]:
    """What the chunks of one token hold, and the magnitudes: both [chunks][qh][qd + 2].

    ``queries`` [qkv][heads][qd], ``keys`` and ``values`` [n][qkv][qd].
    """
    chunks, d = -(-len(keys) // length), queries.shape[-1]
    room = ((0, chunks * length - len(keys)), (0, 0), (0, 0))
    # [qkv][chunks][length][qd]; what is beyond the last cell has no weight
    k, v = (np.pad(x, room).reshape(chunks, length, -1, d).transpose(2, 0, 1, 3) for x in (keys, values))
    q = queries[:, None]  # [qkv][1][heads][qd]
    exponents = q @ k.swapaxes(2, 3) * d**-0.5  # [qkv][chunks][heads][length]
    made_of = np.abs(q) @ np.abs(k).swapaxes(2, 3) * d**-0.5 + _UNDERFLOW
    there = (np.arange(chunks * length) < len(keys)).reshape(chunks, 1, length)
    exponents = np.where(there, exponents, -np.inf)
    made_of = np.where(there, made_of, 0.0)
    largest, largest_made_of = exponents.max(-1, keepdims=True), made_of.max(-1, keepdims=True)
    weights = np.exp(exponents - largest)
    off = np.where(there, weights * (1 + made_of + largest_made_of) + _UNDERFLOW, 0.0)
    value = np.concatenate([weights @ v, largest, weights.sum(-1, keepdims=True)], -1)
    magnitude = np.concatenate(
        [off @ np.abs(v) + _UNDERFLOW, largest_made_of, off.sum(-1, keepdims=True)], -1
    )
    value, magnitude = (x.transpose(1, 0, 2, 3).reshape(chunks, -1, d + 2) for x in (value, magnitude))
    return value, magnitude


def _merge(
    inputs: Mapping[str, Array], sizes: SizesLike, pos0: int, n_tok: int, length: int
) -> dict[str, Expected]:
    gate = _gates(inputs["qfull"]).reshape(n_tok, sizes.qh, sizes.qd)
    xp = _Buffer((n_tok, sizes.qh, sizes.qd))
    for i, n_kv in enumerate(_cells_seen(pos0, n_tok)):
        chunks = -(-min(n_kv, sizes.qbudget) // length)
        part = np.asarray(inputs["part"])[i, :chunks].astype(float)  # [chunks][qh][qd + 2]
        sums, tops, masses = part[..., : sizes.qd], part[..., -2, None], part[..., -1, None]
        top = tops.max(0)
        weights = np.exp(tops - top)
        off = np.where(tops == top, 1.0, weights * (2 + np.abs(tops) + np.abs(top)) + _UNDERFLOW)
        over, under = (weights * sums).sum(0), (weights * masses).sum(0)
        over_off, under_off = (off * np.abs(sums)).sum(0), (off * np.abs(masses)).sum(0)
        mean = over / under
        mean_off = (over_off + np.abs(mean) * under_off) / np.abs(under) + np.abs(mean)
        mean_off = np.where(over_off <= _LARGEST, mean_off, np.inf)
        share = _sigmoid(gate[i])
        # exp(-gate) is off by as many roundings as the gate is large; it matters where it is not small.
        share_off = share * (2 + (1 - share) * np.abs(gate[i])) + _UNDERFLOW
        xp.set(i, mean * share, np.abs(mean) * share_off + share * mean_off + _UNDERFLOW)
    return {"xp": xp.done()}


class _Buffer:
    """A buffer in the making: nothing is defined until it is set."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._values = np.zeros(shape)
        self._magnitude = np.zeros(shape)
        self._defined = np.zeros(shape, bool)

    def set(self, at: Any, values: Array, magnitude: Array) -> None:
        """Values are defined where float32 can hold all that they are made of."""
        defined = magnitude <= _LARGEST
        self._values[at] = np.where(defined, values, 0.0)
        self._magnitude[at] = np.where(defined, magnitude, 0.0)
        self._defined[at] = defined

    def set_exactly(self, at: Any, value: float) -> None:
        self._values[at], self._defined[at] = value, True

    def done(self) -> Expected:
        return Expected(self._values, self._defined, self._magnitude)


_Kernel = Callable[[Mapping[str, Array], SizesLike, int, int], dict[str, Expected]]

_KERNELS: Mapping[str, _Kernel] = {
    "qsa_quant": _quant,
    "qsa_score": _score,
    "qsa_topk": _topk,
    "qsa_topk2": _topk,
    "qsa_attn": lambda inputs, z, pos0, n: _attend(inputs, z, pos0, n, z.qch),
    "qsa_attn2": lambda inputs, z, pos0, n: _attend(inputs, z, pos0, n, z.qch2),
    "qsa_attn3": lambda inputs, z, pos0, n: _attend(inputs, z, pos0, n, z.qch),
    "qsa_merge": lambda inputs, z, pos0, n: _merge(inputs, z, pos0, n, z.qch),
    "qsa_merge2": lambda inputs, z, pos0, n: _merge(inputs, z, pos0, n, z.qch2),
}
