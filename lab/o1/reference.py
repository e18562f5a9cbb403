"""Constant-memory attention in float64, from the formulas, for comparison with what kernels wrote.

Nothing here follows the kernels' way of computing: all tokens are kept, a token is known by its number in
the sequence, the far field is evaluated token by token, and a maximum is that of all it is defined over. With
``s`` the scale, an evicted token ``j`` has

    far(q, j) = sum_a sum_b exp(s q.k_tilde[a]) mu[a][b] exp(s q_tilde[b].k_j)

and ``w_b z_b``, ``w_b t_b`` of the definition are the terms of its sums over the evicted tokens.

``expected`` gives what every dispatch of a chunk should write, ``attention`` the output in one go, and
``full_attention`` and ``ideal`` what both approximate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

__all__ = ["Expected", "FarField", "History", "attention", "expected", "full_attention", "ideal"]

Array = np.ndarray

ROWS = 64  # columns of the planes e, zc and cf
PIECES = 8
SPLITS, STRIPES = 4, 8
FAR_WORDS = 36
# Constants of the definition, as float32 has them.
LEAST, LEAST_SUM, NOTHING_FAR = (float(np.float32(x)) for x in (-1e30, 1e-30, -3e38))

_EPS = 2.0**-24
# Below it float32 is denormal, and GPUs may take it for 0. As a magnitude: an error of 2**-126.
_UNDERFLOW = 2.0**-126 / _EPS
# A far denominator so close to 0, in roundings of its terms, may come out with either sign.
_UNDECIDED = 64 * _EPS


class SizesLike(Protocol):
    """What is read of ``lab.o1.Sizes``."""

    @property
    def ng(self) -> int: ...
    @property
    def hpg(self) -> int: ...
    @property
    def d(self) -> int: ...
    @property
    def w(self) -> int: ...
    @property
    def ns(self) -> int: ...
    @property
    def m(self) -> int: ...
    @property
    def scale(self) -> float | None: ...


@dataclass(frozen=True)
class History:
    """A layer and every token it has been given.

    ``k_tilde`` [ng][m][d], ``q_tilde`` [nh][m][d] and ``mu`` [nh][m][m] are the landmarks, ``sink_k`` and
    ``sink_v`` [ng][ns][d] the sinks, ``windows`` the groups' own windows as they stand in ``meta`` (0 for
    ``sizes.w``), ``keys`` and ``values`` [ng][n][d] all tokens pushed so far. Arrays keep the dtype they were
    given in: float32 is exact in float64.
    """

    sizes: SizesLike
    k_tilde: Array
    q_tilde: Array
    mu: Array
    sink_k: Array
    sink_v: Array
    windows: tuple[int, ...]
    keys: Array
    values: Array

    @classmethod
    def fresh(
        cls,
        sizes: SizesLike,
        k_tilde: Array,
        q_tilde: Array,
        mu: Array,
        sink_k: Array | None = None,
        sink_v: Array | None = None,
        windows: tuple[int, ...] | None = None,
    ) -> History:
        """A layer that has seen no token. Without ``windows`` every group uses all ``w`` slots."""
        none = np.zeros((sizes.ng, 0, sizes.d), np.float32)
        return cls(
            sizes,
            np.asarray(k_tilde).reshape(sizes.ng, sizes.m, sizes.d),
            np.asarray(q_tilde).reshape(sizes.ng * sizes.hpg, sizes.m, sizes.d),
            np.asarray(mu).reshape(sizes.ng * sizes.hpg, sizes.m, sizes.m),
            none if sink_k is None else np.asarray(sink_k).reshape(sizes.ng, sizes.ns, sizes.d),
            none if sink_v is None else np.asarray(sink_v).reshape(sizes.ng, sizes.ns, sizes.d),
            tuple(windows or (0,) * sizes.ng),
            none,
            none,
        )

    @property
    def pushed(self) -> int:
        """How many tokens the layer has been given."""
        return int(self.keys.shape[1])

    @property
    def scale(self) -> float:
        """The scale of scores, as the kernels get it: a float32."""
        scale = self.sizes.scale
        return float(np.float32(self.sizes.d**-0.5 if scale is None else scale))

    def window(self, group: int) -> int:
        """The slots that ``group`` uses."""
        return self.windows[group] or self.sizes.w

    def push(self, k: Array, v: Array) -> History:
        """The history with the rows of a chunk, ``k`` and ``v`` [rows][ng][d], added."""
        shape = (-1, self.sizes.ng, self.sizes.d)
        rows_k, rows_v = (np.asarray(x).reshape(shape).swapaxes(0, 1) for x in (k, v))
        keys = np.concatenate([self.keys, rows_k], axis=1)
        return replace(self, keys=keys, values=np.concatenate([self.values, rows_v], axis=1))


@dataclass(frozen=True)
class Expected:
    """What a buffer should hold: ``values``, float64 or int64, where ``defined``; elsewhere anything.

    ``magnitude`` is what the values are made of, its parts added up without their signs and each counted with
    the roundings behind it: a correct float32 computation is within a small multiple of
    ``2**-24 * magnitude``, also where large parts cancel. It is 0 where a value has to be met exactly. All
    three have the buffer's shape.
    """

    values: Array
    defined: Array
    magnitude: Array


@dataclass(frozen=True)
class FarField:
    """The evicted tokens' part in a row: ``share`` [k][nh] of its weight, ``values`` [k][nh][d] their mean.

    A row's output is ``(1 - share) * near + share * values``. Both are 0 where nothing has been evicted.
    """

    share: Array
    values: Array


# ---- one go --------------------------------------------------------------------------------------------


def attention(history: History, q: Array, k: Array, v: Array) -> Array:
    """The system's own output for the rows of a chunk that follows ``history``: [k][nh][d].

    ``q`` [k][nh][d], ``k`` and ``v`` [k][ng][d]. The far part is left out of a row where nothing has been
    evicted, or where its denominator is negative or NaN.
    """

    def row(group: int, head: int, query: Array, near: _Tokens, gone: _Tokens) -> Array:
        s = history.scale
        near_exponents = s * near.keys @ query
        landmarks = s * history.k_tilde[group].astype(float) @ query
        evicted = s * gone.keys @ history.q_tilde[head].astype(float).T  # [j][b]
        # A factor common to all terms of the quotient, so that float64 does not overflow either.
        common = near_exponents.max(initial=-np.inf)
        if len(evicted):
            common = max(common, landmarks.max() + evicted.max())
        near_weights = np.exp(near_exponents - common)
        over, under = near_weights @ near.values, near_weights.sum()
        if len(evicted):
            middle = 0.5 * (landmarks.max() - evicted.max() + common)  # shared out, and gone in the product
            mixing = history.mu[head].astype(float)
            weights = np.exp(evicted - (common - middle)) @ (np.exp(landmarks - middle) @ mixing)
            if weights.sum() >= 0:
                over, under = over + weights @ gone.values, under + weights.sum()
        return over / under

    return _rows(history, q, k, v, row)


def full_attention(history: History, q: Array, k: Array, v: Array) -> Array:
    """Softmax attention over the sinks, all of ``history`` and the chunk up to the row itself: [k][nh][d]."""

    def row(group: int, head: int, query: Array, near: _Tokens, gone: _Tokens) -> Array:
        near_weights, far_weights = _softmax(history.scale, query, near, gone)
        return near_weights @ near.values + far_weights @ gone.values

    return _rows(history, q, k, v, row)


def ideal(history: History, q: Array, k: Array, v: Array) -> FarField:
    """The far field as it would be with every evicted token kept: its part in ``full_attention``."""

    def row(group: int, head: int, query: Array, near: _Tokens, gone: _Tokens) -> Array:
        _, weights = _softmax(history.scale, query, near, gone)
        share = weights.sum()
        mean = weights @ gone.values / share if share > 0 else np.zeros(history.sizes.d)
        return np.append(mean, share)

    result = _rows(history, q, k, v, row)
    return FarField(result[..., -1], result[..., :-1])


@dataclass(frozen=True)
class _Tokens:
    keys: Array  # [n][d] float64
    values: Array


def _rows(
    history: History, q: Array, k: Array, v: Array, row: Callable[[int, int, Array, _Tokens, _Tokens], Array]
) -> Array:
    """``row(group, head, query, near, evicted)`` for every row and query head: [k][nh][...]."""
    sizes = history.sizes
    q = _queries(history, q)
    after = history.push(k, v)
    result = []
    for i, queries in enumerate(q):
        newest = history.pushed + i + 1
        heads = []
        for g in range(sizes.ng):
            out = max(0, newest - history.window(g))
            sinks = _Tokens(history.sink_k[g].astype(float), history.sink_v[g].astype(float))
            keys, values = after.keys[g, :newest].astype(float), after.values[g, :newest].astype(float)
            near = _Tokens(
                np.concatenate([sinks.keys, keys[out:]]), np.concatenate([sinks.values, values[out:]])
            )
            gone = _Tokens(keys[:out], values[:out])
            for head in range(g * sizes.hpg, (g + 1) * sizes.hpg):
                heads.append(row(g, head, queries[head], near, gone))
        result.append(heads)
    return np.array(result)


def _queries(history: History, q: Array) -> Array:
    sizes = history.sizes
    return np.asarray(q, float).reshape(-1, sizes.ng * sizes.hpg, sizes.d)


def _softmax(scale: float, query: Array, near: _Tokens, gone: _Tokens) -> tuple[Array, Array]:
    exponents = scale * np.concatenate([near.keys, gone.keys]) @ query
    weights = np.exp(exponents - exponents.max())
    weights /= weights.sum()
    return weights[: len(near.keys)], weights[len(near.keys) :]


# ---- values with what they are made of -----------------------------------------------------------------


@dataclass(frozen=True)
class _Sum:
    """Float64 values and their magnitudes (see ``Expected``). Operations add their own rounding."""

    value: Array
    magnitude: Array

    @classmethod
    def exact(cls, value: Any) -> _Sum:
        value = np.asarray(value, float)
        return cls(value, np.zeros(value.shape))

    def __getitem__(self, at: Any) -> _Sum:
        return _Sum(self.value[at], self.magnitude[at])

    def __add__(self, other: _Sum) -> _Sum:
        return self._rounded(self.value + other.value, self.magnitude + other.magnitude)

    def __sub__(self, other: _Sum) -> _Sum:
        return self._rounded(self.value - other.value, self.magnitude + other.magnitude)

    def __mul__(self, other: _Sum) -> _Sum:
        first = np.abs(self.value) * other.magnitude
        return self._rounded(self.value * other.value, first + self.magnitude * np.abs(other.value))

    def contract(self, subscripts: str, other: _Sum) -> _Sum:
        """``np.einsum`` over both."""
        product = functools.partial(np.einsum, subscripts, optimize=True)
        magnitude = product(np.abs(self.value), np.abs(other.value) + other.magnitude)
        magnitude += product(self.magnitude, np.abs(other.value))
        return _Sum(product(self.value, other.value), magnitude + _UNDERFLOW * (magnitude > 0))

    def sum(self, axis: int) -> _Sum:
        return self._rounded(self.value.sum(axis), self.magnitude.sum(axis))

    def max(self, axis: int) -> _Sum:
        """The largest; -infinity of none."""
        return _Sum(self.value.max(axis, initial=-np.inf), self.magnitude.max(axis, initial=0.0))

    def exp(self) -> _Sum:
        value = np.exp(self.value)
        return _Sum(value, value * (1 + self.magnitude) + _UNDERFLOW)

    def inverse(self) -> _Sum:
        value = 1 / self.value
        return self._rounded(value, self.magnitude * value**2)

    def where(self, condition: Array, other: _Sum) -> _Sum:
        """Itself where ``condition``, ``other`` elsewhere."""
        value = np.where(condition, self.value, other.value)
        return _Sum(value, np.where(condition, self.magnitude, other.magnitude))

    @staticmethod
    def _rounded(value: Array, magnitude: Array) -> _Sum:
        magnitude = magnitude + np.abs(value)
        magnitude = magnitude + _UNDERFLOW * (magnitude > 0)
        # An infinite maximum is exact: it stands for none.
        return _Sum(value, np.where(np.isfinite(value), magnitude, 0.0))


_ZERO = _Sum.exact(0.0)


def _largest(a: _Sum, b: _Sum) -> _Sum:
    return _Sum(np.maximum(a.value, b.value), np.maximum(a.magnitude, b.magnitude))


def _floor(least: float, x: _Sum) -> _Sum:
    return _Sum(np.maximum(least, x.value), x.magnitude)


# ---- every dispatch ------------------------------------------------------------------------------------


def expected(history: History, q: Array, k: Array, v: Array, path: str) -> dict[str, dict[str, Expected]]:
    """What each dispatch of a chunk that follows ``history`` should write: by kernel, then by buffer.

    ``q`` [k][nh][d], ``k`` and ``v`` [k][ng][d] are the rows of the chunk; ``path`` is "chunk", "matmul" or
    "token" (one row). The host's products stand under "matmul_scores" (``sc``) and "matmul_values" (``no``).
    Buffers have the shapes of the specification, ``s`` is flat, ``out`` holds the rows of the chunk only.

    Rows whose far denominator is too close to 0 for its sign to be sure count as undefined from there on.
    Raises ValueError for another path, or more rows than a group's window.
    """
    if path not in ("chunk", "matmul", "token"):
        raise ValueError(f'path is "chunk", "matmul" or "token", not {path!r}.')
    q = _queries(history, q)
    rows = len(q)
    for g in range(history.sizes.ng):
        if rows > history.window(g):
            raise ValueError(f"{rows} rows do not fit group {g}, whose window is {history.window(g)}.")
    after = history.push(k, v)
    if after.pushed != history.pushed + rows:
        raise ValueError(f"q has {rows} rows, k and v have {after.pushed - history.pushed}.")
    with np.errstate(invalid="ignore", over="ignore"):
        groups = [_Group.of(history, after, q, g) for g in range(history.sizes.ng)]
        if path == "token":
            return _token(after, groups)
        shared = _far_dispatches(history, groups)
        if path == "chunk":
            return _in_order(_CHUNK, shared | _chunk_near(history, groups) | _commits(after, groups))
        return _in_order(_MATMUL, shared | _matmul_near(history, after, groups) | _commits(after, groups))


_CHUNK = (
    "o1c_far_e", "o1c_score", "o1c_land", "o1c_max", "o1c_far", "o1c_soft", "o1c_sum", "o1c_add",
    "o1c_far_commit", "o1c_ring_commit", "o1c_meta",
)  # fmt: skip
_MATMUL = (
    "o1c_far_e", "o1c_gather", "matmul_scores", "o1c_land", "o1c_gmax", "o1c_far", "o1c_gsoft",
    "matmul_values", "o1c_gadd", "o1c_far_commit", "o1c_ring_commit", "o1c_meta",
)  # fmt: skip

_Dispatches = dict[str, dict[str, Expected]]


def _in_order(names: tuple[str, ...], dispatches: _Dispatches) -> _Dispatches:
    return {name: dispatches[name] for name in names}


@dataclass(frozen=True)
class _Group:
    """All quantities of one group and chunk.

    Indices: row i or j, head h of the group, landmarks a and b, token t. Tokens are numbered from the first
    ever pushed; the rows of the chunk are the last ones.
    """

    group: int
    window: int
    before: int  # tokens pushed before the chunk
    rows: int
    evicted_by: Array  # [j] the token that row j evicts, -1 for none
    evicted: Array  # [i] tokens evicted once row i is pushed
    sink_scores: _Sum  # [i][h][ns]
    oldest: int  # token in the ring before the chunk
    scores: _Sum  # [i][h][t - oldest]
    seen: Array  # [i][t - oldest] whether token t is in the window of row i
    landmark_scores: _Sum  # [i][h][a]
    largest: _Sum  # [i][h] of the near scores
    top_before: _Sum  # [h][b] M
    top: _Sum  # [h][b] M'
    weights: _Sum  # [h][b][t] of evicted tokens, relative to M'
    far_top: _Sum  # [i][h] max_b (f + M'_b)
    sink_values: Array  # [ns][d]
    values: Array  # [t][d]
    mu: Array  # [h][a][b]

    @classmethod
    def of(cls, history: History, after: History, q: Array, g: int) -> _Group:
        sizes, before, rows = history.sizes, history.pushed, len(q)
        heads = slice(g * sizes.hpg, (g + 1) * sizes.hpg)
        window = history.window(g)
        newest = before + np.arange(rows)
        evicted = np.maximum(0, newest + 1 - window)
        oldest = max(0, before - window)
        tokens = np.arange(oldest, after.pushed)
        seen = (tokens <= newest[:, None]) & (tokens > newest[:, None] - window)
        queries = _Sum.exact(q[:, heads])
        scale = _Sum.exact(history.scale)

        def scored(keys: Array) -> _Sum:
            return scale * queries.contract("ihd,td->iht", _Sum.exact(keys))

        scores, sink_scores = scored(after.keys[g, oldest:]), scored(history.sink_k[g])
        landmark_scores = scored(history.k_tilde[g])
        in_window = scores.where(seen[:, None], _Sum.exact(-np.inf))
        largest = _floor(LEAST, _largest(in_window.max(-1), sink_scores.max(-1)))

        q_tilde = _Sum.exact(history.q_tilde[heads])
        gone = int(evicted[-1])
        exponents = scale * q_tilde.contract("hbd,td->hbt", _Sum.exact(after.keys[g, :gone]))
        top_before = exponents[..., :oldest].max(-1)
        top = exponents.max(-1)
        return cls(
            group=g,
            window=window,
            before=before,
            rows=rows,
            evicted_by=np.where(newest >= window, newest - window, -1),
            evicted=evicted,
            sink_scores=sink_scores,
            oldest=oldest,
            scores=scores,
            seen=seen,
            landmark_scores=landmark_scores,
            largest=largest,
            top_before=top_before,
            top=top,
            weights=(exponents - top[..., None]).exp(),
            far_top=(landmark_scores.max(-1)[..., None] + top).max(-1),
            sink_values=np.asarray(history.sink_v[g], float),
            values=np.asarray(after.values[g], float),
            mu=np.asarray(history.mu[heads], float),
        )

    # -- the far field

    @property
    def any_far(self) -> Array:
        """Whether row i has tokens in its far field: [i][1]."""
        return self.evicted[:, None] > 0

    @functools.cached_property
    def c(self) -> _Sum:
        """What a row is relative to: [i][h]."""
        return _largest(self.largest, self.far_top).where(self.any_far, self.largest)

    def evicted_weights(self) -> _Sum:
        """e: the weight of the token that row j evicts, [h][b][j]; 0 where it evicts none."""
        if self.evicted[-1] == 0:
            return _Sum.exact(np.zeros((*self.top.value.shape, self.rows)))
        return self.weights[..., self.evicted_by].where(self.evicted_by >= 0, _ZERO)

    def masses(self) -> _Sum:
        """zc: the mass after row j, [h][b][j]."""
        rows = [self.weights[..., :n].sum(-1) for n in self.evicted]
        return _Sum(np.stack([r.value for r in rows], -1), np.stack([r.magnitude for r in rows], -1))

    def rescale(self) -> _Sum:
        """r, [h][b]."""
        same = self.top_before.value == self.top.value
        return (self.top_before - self.top).exp().where(~same, _Sum.exact(1.0))

    def gains(self, c: _Sum) -> _Sum:
        """Weights of sums relative to M'_b, relative to ``c``: [i][h][b]."""
        exponents = self.landmark_scores[..., None] + self.top[:, None] - c[..., None, None]
        return exponents.exp().contract("ihab,hab->ihb", _Sum.exact(self.mu))

    def far_weights(self, c: _Sum) -> _Sum:
        """far(q_i, t) relative to ``c``, [i][h][t], of the tokens evicted once row i is pushed; else 0."""
        gone = np.arange(self.weights.value.shape[-1]) < self.evicted[:, None]
        every = self.gains(c).contract("ihb,hbt->iht", self.weights)
        return every.where(gone[:, None], _ZERO)

    def far_counts(self, denominator: _Sum) -> tuple[Array, Array]:
        """Whether the far part counts, and whether that is sure: both [i][h]."""
        undecided = np.abs(denominator.value) <= _UNDECIDED * denominator.magnitude
        sure = ~(undecided & (denominator.magnitude > 0) & self.any_far)
        return (denominator.value >= 0) & self.any_far, sure | np.isnan(denominator.value)

    # -- the near window

    def columns(self, i: int) -> Array:
        """Tokens in the window of row i, from its oldest, as t - oldest."""
        return np.flatnonzero(self.seen[i])

    def near_scores(self, i: int) -> _Sum:
        """Scores of what row i sees, sinks first: [h][columns]."""
        return _concatenate(self.sink_scores[i], self.scores[i][:, self.columns(i)])

    def near_values(self, i: int) -> Array:
        """Values of what row i sees, sinks first: [columns][d]."""
        return np.concatenate([self.sink_values, self.values[self.oldest :][self.columns(i)]])

    def row(self, i: int, relative_to: _Sum) -> tuple[_Sum, _Sum]:
        """Near weights [h][columns], relative to ``relative_to`` [h], and the values they weigh, [h][d]."""
        weights = (self.near_scores(i) - relative_to[:, None]).exp()
        return weights, weights.contract("hc,cd->hd", _Sum.exact(self.near_values(i)))

    @functools.cached_property
    def outcome(self) -> _Outcome:
        """Far and near part together, relative to ``c``."""
        return self.outcome_relative_to(self.c)

    def outcome_relative_to(self, c: _Sum) -> _Outcome:
        """As ``outcome``."""
        far = self.far_weights(c)
        denominator = far.sum(-1)
        counts, sure = self.far_counts(denominator)
        far_sum = far.contract("iht,td->ihd", _Sum.exact(self.values[: far.value.shape[-1]]))
        rows = [self.row(i, c[i]) for i in range(self.rows)]
        near_mass = _stack([weights.sum(-1) for weights, _ in rows])
        near_sum = _stack([values for _, values in rows])
        mass = near_mass + denominator.where(counts, _ZERO)
        inverse = _floor(LEAST_SUM, mass).inverse()
        out = (near_sum + far_sum.where(counts[..., None], _ZERO)) * inverse[..., None]
        return _Outcome(far, denominator, counts, sure, inverse, out)


@dataclass(frozen=True)
class _Outcome:
    far: _Sum  # [i][h][t]
    denominator: _Sum  # [i][h]
    counts: Array  # [i][h]
    sure: Array  # [i][h]
    inverse: _Sum  # [i][h]
    out: _Sum  # [i][h][d]


def _stack(parts: list[_Sum], axis: int = 0) -> _Sum:
    return _Sum(np.stack([p.value for p in parts], axis), np.stack([p.magnitude for p in parts], axis))


def _concatenate(*parts: _Sum) -> _Sum:
    value = np.concatenate([p.value for p in parts], -1)
    return _Sum(value, np.concatenate([p.magnitude for p in parts], -1))


class _Buffer:
    """A buffer in the making: nothing is defined until it is set."""

    def __init__(self, *shape: int) -> None:
        self._values = np.zeros(shape)
        self._magnitude = np.zeros(shape)
        self._defined = np.zeros(shape, bool)

    def set(self, at: Any, what: _Sum, defined: Any = True) -> None:
        self._values[at] = what.value
        self._magnitude[at] = what.magnitude
        self._defined[at] = defined & ~np.isnan(what.value)

    def done(self) -> Expected:
        return Expected(self._values, self._defined, self._magnitude)


def _head_slices(history: History, groups: list[_Group]) -> list[tuple[_Group, slice]]:
    hpg = history.sizes.hpg
    return [(group, slice(group.group * hpg, (group.group + 1) * hpg)) for group in groups]


def _scratch(history: History, groups: list[_Group]) -> Expected:
    """``s``: e[ghm][64], zc[ghm][64], M'[ghm], r[ghm]."""
    sizes, rows = history.sizes, groups[0].rows
    ghm = sizes.ng * sizes.hpg * sizes.m
    planes = [_Buffer(ghm, ROWS), _Buffer(ghm, ROWS), _Buffer(ghm), _Buffer(ghm)]
    for group in groups:
        each = sizes.hpg * sizes.m
        at = slice(group.group * each, (group.group + 1) * each)
        for plane, what in zip(planes[:2], (group.evicted_weights(), group.masses()), strict=True):
            plane.set((at, slice(rows)), _reshaped(what, each, rows))
        planes[2].set(at, _reshaped(group.top, each))
        planes[3].set(at, _reshaped(group.rescale(), each))
    done = [plane.done() for plane in planes]
    return Expected(
        np.concatenate([p.values.ravel() for p in done]),
        np.concatenate([p.defined.ravel() for p in done]),
        np.concatenate([p.magnitude.ravel() for p in done]),
    )


def _reshaped(what: _Sum, *shape: int) -> _Sum:
    return _Sum(what.value.reshape(shape), what.magnitude.reshape(shape))


def _far_dispatches(history: History, groups: list[_Group]) -> _Dispatches:
    """``o1c_far_e``, ``o1c_land`` and ``o1c_far``, which chunk and matrix-product path share."""
    sizes, rows = history.sizes, groups[0].rows
    nh = sizes.ng * sizes.hpg
    fs = _Buffer(rows, sizes.ng, sizes.m, sizes.hpg)
    hd, gn, cf = _Buffer(rows, nh, 4), _Buffer(rows, nh, sizes.m), _Buffer(rows, nh, ROWS)
    for group, heads in _head_slices(history, groups):
        scores = group.landmark_scores
        fs.set(
            (slice(None), group.group),
            _Sum(scores.value.swapaxes(1, 2), scores.magnitude.swapaxes(1, 2)),
        )
        c, far = group.c, group.outcome
        hd.set((slice(None), heads, 0), c)
        hd.set((slice(None), heads, 1), far.denominator.where(far.counts, _ZERO), far.sure)
        hd.set((slice(None), heads, 2), _Sum.exact(far.counts), far.sure)
        hd.set((slice(None), heads, 3), _ZERO)
        gn.set((slice(None), heads), group.gains(c) * group.rescale(), group.any_far[..., None])
        for j, token in enumerate(group.evicted_by):
            if token >= 0:
                later = slice(j, None)
                cf.set((later, heads, j), far.far[later, :, token], (far.counts & far.sure)[later])
    return {
        "o1c_far_e": {"s": _scratch(history, groups)},
        "o1c_land": {"fs": fs.done()},
        "o1c_far": {"hd": hd.done(), "gn": gn.done(), "cf": cf.done()},
    }


def _ends(history: History, groups: list[_Group]) -> dict[str, Expected]:
    """``nm``, ``inv`` and ``out``, alike on all paths that have them."""
    sizes, rows = history.sizes, groups[0].rows
    nh = sizes.ng * sizes.hpg
    nm, inv, out = _Buffer(rows, nh), _Buffer(rows, nh), _Buffer(rows, nh, sizes.d)
    for group, heads in _head_slices(history, groups):
        outcome = group.outcome
        nm.set((slice(None), heads), group.largest)
        inv.set((slice(None), heads), outcome.inverse, outcome.sure)
        out.set((slice(None), heads), outcome.out, outcome.sure[..., None])
    return {"nm": nm.done(), "inv": inv.done(), "out": out.done()}


def _chunk_near(history: History, groups: list[_Group]) -> _Dispatches:
    sizes, rows = history.sizes, groups[0].rows
    shape = (rows, sizes.ng, sizes.w + sizes.ns, sizes.hpg)
    scores, weights = _Buffer(*shape), _Buffer(*shape)
    pieces = _Buffer(rows, sizes.ng, PIECES, sizes.hpg, sizes.d)
    for group in groups:
        c = group.c
        for i in range(rows):
            near = group.near_scores(i)
            columns = near.value.shape[-1]
            at = (i, group.group, slice(columns))
            weight, _ = group.row(i, c[i])
            scores.set(at, _Sum(near.value.T, near.magnitude.T))
            weights.set(at, _Sum(weight.value.T, weight.magnitude.T))
            length = -(-columns // PIECES)
            values = _Sum.exact(group.near_values(i))
            for piece in range(PIECES):
                part = slice(piece * length, (piece + 1) * length)
                pieces.set((i, group.group, piece), weight[:, part].contract("hc,cd->hd", values[part]))
    ends = _ends(history, groups)
    return {
        "o1c_score": {"sc": scores.done()},
        "o1c_max": {"nm": ends["nm"]},
        "o1c_soft": {"sc": weights.done(), "inv": ends["inv"]},
        "o1c_sum": {"pz": pieces.done()},
        "o1c_add": {"out": ends["out"]},
    }


def _matmul_near(history: History, after: History, groups: list[_Group]) -> _Dispatches:
    sizes, rows, nh = history.sizes, groups[0].rows, history.sizes.ng * history.sizes.hpg
    columns = sizes.ns + sizes.w + rows
    kp, vp = _Buffer(sizes.ng, columns, sizes.d), _Buffer(sizes.ng, columns, sizes.d)
    scores, weights = _Buffer(nh, rows, columns), _Buffer(nh, rows, columns)
    near = _Buffer(nh, rows, sizes.d)
    for group, heads in _head_slices(history, groups):
        g, c, oldest = group.group, group.c, group.oldest
        panel = slice(sizes.ns, sizes.ns + after.pushed - oldest)
        for buffer, sinks, tokens in ((kp, history.sink_k, after.keys), (vp, history.sink_v, after.values)):
            buffer.set(g, _ZERO)
            buffer.set((g, slice(sizes.ns)), _Sum.exact(sinks[g]))
            buffer.set((g, panel), _Sum.exact(tokens[g, oldest:]))
        scores.set(heads, _ZERO)
        weights.set(heads, _ZERO)
        for i in range(rows):
            every = _concatenate(group.sink_scores[i], group.scores[i])
            scores.set((heads, i, slice(panel.stop)), every)
            weight, total = group.row(i, c[i])
            seen = np.append(np.arange(sizes.ns), sizes.ns + group.columns(i))
            for h in range(sizes.hpg):
                weights.set((heads.start + h, i, seen), weight[h])
            near.set((heads, i), total)
    ends = _ends(history, groups)
    return {
        "o1c_gather": {"kp": kp.done(), "vp": vp.done()},
        "matmul_scores": {"sc": scores.done()},
        "o1c_gmax": {"nm": ends["nm"]},
        "o1c_gsoft": {"sc": weights.done(), "inv": ends["inv"]},
        "matmul_values": {"no": near.done()},
        "o1c_gadd": {"out": ends["out"]},
    }


def _commits(after: History, groups: list[_Group]) -> _Dispatches:
    sizes, nh = after.sizes, after.sizes.ng * after.sizes.hpg
    mz, t_hat = _Buffer(nh, 2 * sizes.m), _Buffer(nh, sizes.m, sizes.d)
    ring_k, ring_v = (_Buffer(sizes.ng, sizes.w, sizes.d) for _ in range(2))
    meta = np.zeros((sizes.ng, 4), np.int64)
    for group, heads in _head_slices(after, groups):
        gone = int(group.evicted[-1])
        mz.set((heads, slice(sizes.m)), group.top)
        mz.set((heads, slice(sizes.m, None)), group.masses()[..., -1])
        t_hat.set(heads, group.weights.contract("hbt,td->hbd", _Sum.exact(group.values[:gone])))
        # A token stays in the slot it came into, and slots are handed out in turn.
        kept = np.arange(gone, after.pushed)
        for ring, tokens in ((ring_k, after.keys), (ring_v, after.values)):
            ring.set((group.group, kept % group.window), _Sum.exact(tokens[group.group, kept]))
        meta[group.group] = (len(kept), gone % group.window, gone, after.windows[group.group])
    always = np.ones(meta.shape, bool)
    return {
        "o1c_far_commit": {"mz": mz.done(), "t_hat": t_hat.done()},
        "o1c_ring_commit": {"ring_k": ring_k.done(), "ring_v": ring_v.done()},
        "o1c_meta": {"meta": Expected(meta, always, np.zeros(meta.shape))},
    }


def _token(after: History, groups: list[_Group]) -> _Dispatches:
    if groups[0].rows != 1:
        raise ValueError(f'The path "token" takes one row, not {groups[0].rows}.')
    sizes, nh = after.sizes, after.sizes.ng * after.sizes.hpg
    part = _Buffer(sizes.ng, SPLITS, STRIPES, sizes.hpg, sizes.d + 4)
    fo, out = _Buffer(nh, FAR_WORDS), _Buffer(1, nh, sizes.d)
    for group, heads in _head_slices(after, groups):
        _stripes(part, group)

        far = group.outcome_relative_to(group.far_top)
        counts, sure = far.counts[0], far.sure[0]
        if group.evicted[0] == 0:
            fo.set((heads, slice(1, 4 + sizes.m)), _ZERO)
            fo.set((heads, 0), _Sum.exact(NOTHING_FAR))
        else:
            fo.set((heads, 0), group.far_top[0])
            fo.set((heads, 1), far.denominator[0].where(counts, _ZERO), sure)
            fo.set((heads, 2), _Sum.exact(counts), sure)
            fo.set((heads, 3), _ZERO)
            if group.evicted_by[0] >= 0:
                fo.set((heads, 3), far.far[0, :, group.evicted_by[0]])
            gains = group.gains(group.far_top) * group.rescale()
            fo.set((heads, slice(4, 4 + sizes.m)), gains[0])

        result = group.outcome_relative_to(group.c.where(far.counts, group.largest))
        out.set((0, heads), result.out[0], sure[:, None])
    commits = _commits(after, groups)
    merged: Mapping[str, Expected] = {k: v for d in commits.values() for k, v in d.items()}
    return {
        "o1c_tok_near": {"part": part.done()},
        "o1c_tok_far": {"s": _scratch(after, groups), "fo": fo.done()},
        "o1c_tok_merge": {"out": out.done()},
        "o1c_tok_commit": {n: merged[n] for n in ("meta", "ring_k", "ring_v", "mz", "t_hat")},
    }


def _stripes(part: _Buffer, group: _Group) -> None:
    scores = group.near_scores(0)
    values = group.near_values(0)
    columns = len(values)
    length = -(-columns // SPLITS)
    for split in range(SPLITS):
        end = min(columns, (split + 1) * length)
        for stripe in range(STRIPES):
            mine = slice(split * length + stripe, end, STRIPES)
            own = scores[:, mine]
            largest = _floor(LEAST, own.max(-1))
            weights = (own - largest[:, None]).exp()
            at = (group.group, split, stripe)
            part.set((*at, slice(None), 0), largest)
            part.set((*at, slice(None), 1), weights.sum(-1))
            total = weights.contract("hc,cd->hd", _Sum.exact(values[mine]))
            part.set((*at, slice(None), slice(4, None)), total)
