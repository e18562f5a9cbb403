"""The state of a constant-memory attention layer, on MLX arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import ArgumentError
from ..systems.arrays import as_array
from ..systems.plan import STATE
from .plans import buffers
from .reference import History
from .sizes import Sizes

LANDMARKS = ("k_tilde", "q_tilde", "mu")
SINKS = ("sink_k", "sink_v")

# Singular values below this share of the largest are left out of the mixing matrix. Landmarks of a condition
# up to 10000 keep theirs, and float32 kernels then still reproduce full attention to 1e-5 (random keys).
RCOND = 1e-4


class State:
    """A layer: its sizes, its buffers by name, and the tokens it has been given.

    ``state.ring_k``, ``state.meta``, ... are the arrays of the specification, float32 but for ``meta``
    (uint32). Running a sequence writes into these arrays; copy a state to keep it. The keys and values given
    are remembered (by reference), so that the state can be compared with attention over all of them.
    """

    def __init__(self, sizes: Sizes, arrays: Mapping[str, Any], *, history: History | None = None) -> None:
        """A layer from arrays for all state buffers, which are copied: a run writes into the copies.

        ``history`` is what has been pushed; None if unknown.
        """
        self.sizes = sizes
        self.arrays: dict[str, mx.array] = {}
        for name, buffer in buffers(sizes, "chunk", 1, 1).items():
            if buffer.role == STATE:
                if name not in arrays:
                    raise ArgumentError(
                        f"The state needs the buffer '{name}', {buffer.dtype} {buffer.shape}."
                    )
                given = as_array(name, arrays[name], buffer.shape, buffer.dtype)
                self.arrays[name] = mx.array(np.asarray(given))
        for g, window in enumerate(np.asarray(self.arrays["meta"])[:, 3].tolist()):
            own = window or sizes.w
            if own != sizes.window(g):
                raise ArgumentError(
                    f"meta gives group {g} a window of {own} slots, the sizes {sizes.window(g)}."
                )
        self._history = history
        self._pending: list[tuple[mx.array, mx.array]] = []

    @classmethod
    def fresh(
        cls, sizes: Sizes, k_tilde: Any, q_tilde: Any, mu: Any, sink_k: Any = None, sink_v: Any = None
    ) -> State:
        """A layer that has seen no token.

        ``k_tilde`` [ng][m][d], ``q_tilde`` [nh][m][d] and ``mu`` [nh][m][m] are its landmarks, ``sink_k`` and
        ``sink_v`` [ng][ns][d] its sinks; MLX or NumPy arrays, taken as float32.
        """
        z = sizes
        given = {"k_tilde": k_tilde, "q_tilde": q_tilde, "mu": mu}
        for name, sink in (("sink_k", sink_k), ("sink_v", sink_v)):
            if sink is None and z.ns:
                raise ArgumentError(f"ns = {z.ns} sink tokens need {name}, float32 {(z.ng, z.ns, z.d)}.")
            given[name] = np.zeros((z.ng, 0, z.d), np.float32) if sink is None else sink
        meta = np.zeros((z.ng, 4), np.uint32)
        meta[:, 3] = z.windows or 0
        masses = np.zeros((z.nh, 2 * z.m), np.float32)
        masses[:, : z.m] = -np.inf
        ring = (z.ng, z.w, z.d)
        arrays = {
            **given,
            "meta": meta,
            "mz": masses,
            "ring_k": np.zeros(ring, np.float32),
            "ring_v": np.zeros(ring, np.float32),
            "t_hat": np.zeros((z.nh, z.m, z.d), np.float32),
        }
        state = cls(sizes, arrays)
        fixed = {name: np.asarray(state.arrays[name]).copy() for name in (*LANDMARKS, *SINKS)}
        state._history = History.fresh(sizes, **fixed, windows=tuple(int(x) for x in meta[:, 3]))
        return state

    @classmethod
    def sealed(
        cls,
        sizes: Sizes,
        keys: Any,
        queries: Any,
        sink_k: Any = None,
        sink_v: Any = None,
        *,
        rcond: float = RCOND,
    ) -> State:
        """A fresh layer whose landmarks are made from a prefix.

        ``keys`` [n][ng][d] and ``queries`` [n][nh][d] of its ``n >= m`` tokens are averaged over ``m``
        segments of the prefix; ``mu`` is the pseudo-inverse of ``exp(s q_tilde[b].k_tilde[a])``
        (Nyströmformer, arXiv:2102.03902), without singular values below ``rcond`` of the largest: real keys
        come closer to full attention with fewer of them (0.01). The prefix itself is not pushed.
        """
        z = sizes
        rows = np.shape(keys)[0] if np.ndim(keys) else 0
        wide = {
            "keys": np.asarray(as_array("keys", keys, (rows, z.ng, z.d)), np.float64),
            "queries": np.asarray(as_array("queries", queries, (rows, z.nh, z.d)), np.float64),
        }
        if rows < z.m:
            raise ArgumentError(f"A prefix of {rows} tokens makes at most {rows} landmarks, not m = {z.m}.")
        k_tilde, q_tilde = segment_means(wide["keys"], z.m), segment_means(wide["queries"], z.m)
        # The kernels see rounded landmarks, so the mixing matrix is made for these.
        k_tilde, q_tilde = k_tilde.astype(np.float32), q_tilde.astype(np.float32)
        return cls.fresh(sizes, k_tilde, q_tilde, mixing(sizes, k_tilde, q_tilde, rcond), sink_k, sink_v)

    def __getattr__(self, name: str) -> mx.array:
        arrays = self.__dict__.get("arrays", {})
        if name not in arrays:
            raise AttributeError(f"A state has no {name!r}: its buffers are {', '.join(arrays)}.")
        return arrays[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.arrays]

    def copy(self) -> State:
        """The same layer in memory of its own."""
        other = State(self.sizes, self.arrays, history=self._history)
        other._pending = list(self._pending)
        return other

    # ---- the tokens it has been given ------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """How many tokens it has been given, from ``meta``: those in the ring and those evicted."""
        meta = np.asarray(self.meta)
        return int(meta[0, 0]) + int(meta[0, 2])

    def remember(self, k: mx.array, v: mx.array) -> None:
        """Note that rows ``k``, ``v`` [rows][ng][d] have been pushed."""
        if self._history is not None and k.shape[0]:
            self._pending.append((k, v))

    @property
    def knows_tokens(self) -> bool:
        """Whether the tokens it has been given are known."""
        return self._history is not None

    @property
    def history(self) -> History:
        """The layer's tokens from the first on. Raises ArgumentError where they are not known."""
        if self._history is None:
            raise ArgumentError(
                f"This state was made from buffers of a layer that has seen {self.tokens} tokens: what they "
                "were is not known, so it cannot be compared with attention over all of them."
            )
        if self._pending:
            sides = zip(*self._pending, strict=True)
            self._history = self._history.push(*(np.concatenate([np.asarray(x) for x in s]) for s in sides))
            self._pending = []
        if self._history.pushed != self.tokens:
            raise ArgumentError(
                f"meta counts {self.tokens} tokens and {self._history.pushed} were given: the state was "
                "changed by other means, or by a kernel that went wrong."
            )
        return self._history

    def __repr__(self) -> str:
        z = self.sizes
        return (
            f"<o1 state: {self.tokens} tokens, ng {z.ng}, hpg {z.hpg}, d {z.d}, w {z.w}, ns {z.ns}, m {z.m}>"
        )


def segment_means(rows: np.ndarray, m: int) -> np.ndarray:
    """Means over ``m`` segments, as equal as can be: rows [n][heads][d] to [heads][m][d], n >= m."""
    parts = np.array_split(rows, m)
    return np.stack([part.mean(axis=0) for part in parts], axis=1)


def mixing(sizes: Sizes, k_tilde: Any, q_tilde: Any, rcond: float = RCOND) -> np.ndarray:
    """``mu`` float32 [nh][m][m], row = key landmark, for landmarks [ng][m][d] and [nh][m][d]."""
    assert sizes.scale is not None
    keys = np.repeat(np.asarray(k_tilde, np.float64), sizes.hpg, axis=0)
    exponents = float(np.float32(sizes.scale)) * np.asarray(q_tilde, np.float64) @ keys.transpose(0, 2, 1)
    top = exponents.max(axis=(1, 2), keepdims=True)
    with np.errstate(over="ignore", under="ignore"):
        mu = (np.linalg.pinv(np.exp(exponents - top), rcond=rcond) * np.exp(-top)).astype(np.float32)
    if not np.isfinite(mu).all():
        raise ArgumentError(
            f"The landmarks' exponents reach {exponents.max():.3g}: their mixing matrix is beyond float32."
        )
    return mu
