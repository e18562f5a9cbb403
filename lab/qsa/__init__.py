"""Sparse decode attention over an 8-bit cache: for each token the best blocks of four cells, up to a budget.

    sizes = lab.qsa.Sizes(max_cells=5000)
    cache, qfull, qcur, k, v = lab.qsa.example(sizes, cells=4500, tokens=2)
    xp = lab.qsa.run(cache, qfull, qcur, k, v, path="v2")

The functions here speak of one default session; ``session()`` gives another, with kernels of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..kernel import Kernel, Library
from ..systems import Compared, Replacement, Trace
from . import data, reference
from .cache import Cache
from .data import example
from .plans import CONTRACTS, plan, plans, system
from .reference import QuantisationError, Quantised
from .selection import Selection, selection
from .session import Session, load_trace, output, selections
from .sizes import PATHS, Sizes

__all__ = [
    "CONTRACTS",
    "PATHS",
    "Cache",
    "QuantisationError",
    "Quantised",
    "Selection",
    "Session",
    "Sizes",
    "attention",
    "compare",
    "data",
    "default_session",
    "example",
    "full_attention",
    "load_trace",
    "output",
    "panel",
    "plan",
    "plans",
    "quantisation_error",
    "replace",
    "restore",
    "run",
    "selection",
    "selections",
    "session",
    "system",
    "trace",
]


def session(engine: str = "auto", *, guarded: bool | None = None) -> Session:
    """A new session: the shipped kernels on ``engine``, to be replaced without touching anybody else's.

    Replaced kernels run guarded, shipped ones in place; ``guarded`` True or False says so for all of them.
    """
    return Session(engine, guarded=guarded)


@functools.cache
def default_session() -> Session:
    """The session that the functions of this module speak of."""
    return Session()


def run(cache: Cache, qfull: Any, qcur: Any, k: Any, v: Any, **how: Any) -> mx.array:
    """``Session.run`` of the default session: the output for new tokens, float32 [rows][qh][qd]."""
    return default_session().run(cache, qfull, qcur, k, v, **how)


def trace(cache: Cache, qfull: Any, qcur: Any, k: Any, v: Any, **how: Any) -> Trace:
    """``Session.trace`` of the default session: every dispatch for new tokens, on a copy of ``cache``."""
    return default_session().trace(cache, qfull, qcur, k, v, **how)


def compare(cache: Cache, qfull: Any, qcur: Any, k: Any, v: Any, **how: Any) -> list[Compared]:
    """``Session.compare`` of the default session: each replaced kernel beside the shipped one."""
    return default_session().compare(cache, qfull, qcur, k, v, **how)


def replace(source: str | Path | Library | Kernel, names: Any = None, **options: Any) -> Replacement:
    """``Session.replace`` of the default session: kernels of ``source`` in the place of those shipped."""
    return default_session().replace(source, names, **options)


def restore(*names: str) -> tuple[str, ...]:
    """``Session.restore`` of the default session: shipped kernels back, those named or all."""
    return default_session().restore(*names)


def panel(*given: Any, session: Session | None = None) -> Any:
    """A panel that steps through the dispatches of ``session``, by default the default one; show it with
    IPython's ``display`` or as the value of a cell.

    Without arguments it opens on random data; ``given`` are the user's own, as ``trace`` takes them (cache,
    qfull, qcur, k, v), or ``data.Needles``. Its form changes sizes, path and data. Raises LabError where the
    notebook packages are not installed.
    """
    from ..panels import qsa

    return qsa.panel(session or default_session(), *given)


# ---- exact attention for comparison --------------------------------------------------------------------


def attention(
    cache: Cache, qfull: Any, qcur: Any, k: Any, v: Any, ids: Sequence[Any] | None = None
) -> np.ndarray:
    """The system's own definition in float64, for tokens that follow ``cache``'s: [rows][qh][qd].

    Row ``i`` attends to the cells ``ids[i]``, as ``Selection.ids`` gives them, and without ``ids`` to those
    that its own float64 scores select. Keys and values are the 8-bit ones.
    """
    keys, values = _with(cache, k, v).quantised
    qfull, qcur = np.asarray(qfull), np.asarray(qcur)
    if ids is None:
        ids = reference.chosen_cells(qcur, keys, cache.sizes.qbudget)
    return reference.attention(qfull, qcur, keys, values, ids)


def full_attention(cache: Cache, qfull: Any, qcur: Any, k: Any, v: Any) -> np.ndarray:
    """Attention to every cell, keys and values as floats, for tokens that follow: float64 [rows][qh][qd].

    Raises ArgumentError where what is in the cache was never known as floats.
    """
    keys, values = _with(cache, k, v).floats
    return reference.full_attention(np.asarray(qfull), np.asarray(qcur), keys, values)


def quantisation_error(
    cache: Cache, qfull: Any, qcur: Any, k: Any, v: Any, ids: Sequence[Any] | None = None
) -> QuantisationError:
    """How far attention over the 8-bit cache is from that over the floats it is made of, both in float64.

    Row ``i`` attends to the cells ``ids[i]``, without ``ids`` to all that it sees. Raises ArgumentError where
    what is in the cache was never known as floats.
    """
    after = _with(cache, k, v)
    return reference.quantisation_error(
        np.asarray(qfull), np.asarray(qcur), after.quantised, after.floats, ids
    )


def _with(cache: Cache, k: Any, v: Any) -> Cache:
    after = cache.copy()
    after.append(k, v)
    return after
