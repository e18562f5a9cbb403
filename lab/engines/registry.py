"""The engines there are, by name."""

from __future__ import annotations

import functools

from ..errors import ArgumentError, EngineError
from .cpu import CpuEngine
from .protocol import Engine

NAMES = ("auto", "cpu")


@functools.cache
def engine(name: str) -> Engine:
    """The engine called ``name``; ``auto`` takes the best one that works here.

    Raises ArgumentError for a name there is none of, EngineError where the engine does not work here.
    """
    if name not in NAMES:
        raise ArgumentError(f"There is no engine called {name!r}: the engines are {', '.join(NAMES)}.")
    found: Engine = CpuEngine()
    missing = found.missing()
    if missing:
        raise EngineError(missing)
    return found
