"""Constant-memory attention of a sealed layer: sinks, a ring of the newest tokens, a far field on landmarks.

    sizes = lab.o1.Sizes(ng=2, hpg=4, d=128, w=128, ns=4, m=16)
    state, q, k, v = lab.o1.example(sizes, rows=300)
    out = lab.o1.run(state, q, k, v, chunks=16)

The functions here speak of one default session; ``session()`` gives another, with kernels of its own.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..kernel import Kernel, Library
from ..systems import Compared, Replacement, Trace
from . import data, readings, reference
from .plans import CONTRACTS, plan, plans, system
from .reference import FarField, History
from .session import Session, load_trace
from .sizes import PATHS, Sizes
from .state import State, mixing, segment_means

__all__ = [
    "CONTRACTS",
    "PATHS",
    "FarField",
    "History",
    "Session",
    "Sizes",
    "State",
    "attention",
    "compare",
    "data",
    "default_session",
    "example",
    "full_attention",
    "ideal",
    "load_trace",
    "mixing",
    "panel",
    "plan",
    "plans",
    "readings",
    "replace",
    "restore",
    "run",
    "seal",
    "segment_means",
    "session",
    "system",
    "trace",
]

seal = State.sealed


def session(engine: str = "auto", *, guarded: bool | None = None) -> Session:
    """A new session: the shipped kernels on ``engine``, to be replaced without touching anybody else's.

    Replaced kernels run guarded, shipped ones in place; ``guarded`` True or False says so for all of them.
    """
    return Session(engine, guarded=guarded)


@functools.cache
def default_session() -> Session:
    """The session that the functions of this module speak of."""
    return Session()


def run(state: State, q: Any, k: Any, v: Any, **how: Any) -> mx.array:
    """``Session.run`` of the default session: attention to a sequence, float32 [rows][nh][d]."""
    return default_session().run(state, q, k, v, **how)


def trace(state: State, q: Any, k: Any, v: Any, **how: Any) -> Trace:
    """``Session.trace`` of the default session: every dispatch of a sequence, on a copy of ``state``."""
    return default_session().trace(state, q, k, v, **how)


def compare(state: State, q: Any, k: Any, v: Any, **how: Any) -> list[Compared]:
    """``Session.compare`` of the default session: each replaced kernel beside the shipped one."""
    return default_session().compare(state, q, k, v, **how)


def replace(source: str | Path | Library | Kernel, names: Any = None, **options: Any) -> Replacement:
    """``Session.replace`` of the default session: kernels of ``source`` in the place of those shipped."""
    return default_session().replace(source, names, **options)


def restore(*names: str) -> tuple[str, ...]:
    """``Session.restore`` of the default session: shipped kernels back, those named or all."""
    return default_session().restore(*names)


def panel(
    state: State | None = None,
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *,
    session: Session | None = None,
    sizes: Sizes | None = None,
    rows: int | None = None,
    chunks: int | None = None,
    path: str = "chunk",
    seed: int = 0,
) -> Any:
    """A panel that steps through the dispatches of ``session``, by default the default one; show it with
    IPython's ``display`` or as the value of a cell.

    Without ``state`` it opens on random data, as ``example`` makes them: of ``sizes``, ``rows`` of them, from
    ``seed``. ``state``, ``q``, ``k`` and ``v`` are the user's own, as ``trace`` takes them; ``chunks`` is how
    many rows a chunk has. Its form changes all of this, and has a layer's data on a text as well. Raises
    ArgumentError for a path that there is not and for incomplete data, and LabError where the notebook
    packages are not installed; impossible sizes are told of in the panel.
    """
    from ..panels import o1

    how: dict[str, Any] = {"sizes": sizes, "rows": rows, "chunks": chunks, "path": path, "seed": seed}
    return o1.panel(session or default_session(), state, q, k, v, **how)


# ---- exact attention for comparison --------------------------------------------------------------------


def attention(layer: State | History, q: Any, k: Any, v: Any) -> np.ndarray:
    """The system's own definition in float64, for rows that follow ``layer``'s tokens: [rows][nh][d]."""
    return reference.attention(_history(layer), *_arrays(q, k, v))


def full_attention(layer: State | History, q: Any, k: Any, v: Any) -> np.ndarray:
    """Softmax attention over sinks and all tokens, for rows after ``layer``'s: float64 [rows][nh][d]."""
    return reference.full_attention(_history(layer), *_arrays(q, k, v))


def ideal(layer: State | History, q: Any, k: Any, v: Any) -> FarField:
    """The far field with every evicted token kept exactly, for rows that follow ``layer``'s tokens."""
    return reference.ideal(_history(layer), *_arrays(q, k, v))


def _history(layer: State | History) -> History:
    return layer.history if isinstance(layer, State) else layer


def _arrays(*values: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in values]


# ---- data ----------------------------------------------------------------------------------------------


def example(sizes: Sizes, rows: int, seed: int = 0) -> tuple[State, mx.array, mx.array, mx.array]:
    """A fresh layer and ``rows`` rows of normal random data: state, q [rows][nh][d], k and v [rows][ng][d].

    Its mixing matrix has positive entries, so that no far denominator comes close to 0.
    """
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32)

    z = sizes
    state = State.fresh(
        sizes,
        normal(z.ng, z.m, z.d),
        normal(z.nh, z.m, z.d),
        random.uniform(0.0, 1.0 / z.m, (z.nh, z.m, z.m)).astype(np.float32),
        normal(z.ng, z.ns, z.d),
        normal(z.ng, z.ns, z.d),
    )
    q, k, v = normal(rows, z.nh, z.d), normal(rows, z.ng, z.d), normal(rows, z.ng, z.d)
    return state, mx.array(q), mx.array(k), mx.array(v)
