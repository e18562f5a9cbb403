"""What every engine answers: compile a kernel, bind arguments, run a dispatch, describe itself.

An engine turns a kernel of a program into an ``Executable``. Binding arguments to it gives a ``Binding``,
and running that with a geometry gives the written buffers. Adding an engine touches a folder of its own
and the table in ``lab/engines/registry.py``; nothing above this layer knows how one works.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..source.program import Program, Signature

Triple = tuple[int, int, int]

MAX_THREADS = 1024  # per threadgroup, as on Apple GPUs
MAX_THREADGROUP_MEMORY = 32 << 10  # bytes per threadgroup


@dataclass(frozen=True)
class Geometry:
    """Size of a dispatch: threads in all, threads per threadgroup, threadgroups (the last may be partial)."""

    grid: Triple
    threadgroup: Triple

    @functools.cached_property
    def groups(self) -> Triple:
        """Threadgroups along each axis."""
        x, y, z = (-(-g // t) for g, t in zip(self.grid, self.threadgroup, strict=True))
        return x, y, z

    @functools.cached_property
    def threads_per_group(self) -> int:
        x, y, z = self.threadgroup
        return x * y * z

    @functools.cached_property
    def threads(self) -> int:
        x, y, z = self.grid
        return x * y * z

    @functools.cached_property
    def group_count(self) -> int:
        x, y, z = self.groups
        return x * y * z


@dataclass(frozen=True)
class Argument:
    """One bound buffer: checked, contiguous, evaluated.

    ``memory`` is a flat view of its bytes (uint8), or None for a buffer that is only written; ``owner``
    is what that memory belongs to (an MLX or NumPy array, or nothing for scalars and structs). ``shape``
    and ``dtype`` (MLX's name of it, or a NumPy record type) are what a result takes over.
    """

    index: int
    name: str
    written: bool
    nbytes: int
    memory: np.ndarray | None
    owner: Any = None
    shape: tuple[int, ...] = ()
    dtype: str | np.dtype = "uint8"
    element_size: int = 1


@dataclass(frozen=True)
class Description:
    """How a kernel is run: for the card and ``kernel.stats``."""

    engine: str
    executor: str
    compile_seconds: float
    from_cache: bool
    threadgroup_memory: int = 0
    notes: tuple[str, ...] = field(default=())


class Binding(Protocol):
    """An executable with its arguments."""

    def run(
        self, geometry: Geometry, threadgroup_memory: Mapping[int, int], *, isolate: bool = False
    ) -> list[Any]:
        """Run one dispatch; the written buffers as MLX arrays, in buffer order (none where in place).

        ``isolate``: in a process of its own, as far as the engine can.
        """
        ...


class Executable(Protocol):
    """A compiled kernel."""

    def bind(self, arguments: Sequence[Argument], *, in_place: bool = False) -> Binding:
        """Bind ``arguments``. ``in_place``: write into the arguments' own memory."""
        ...

    def describe(self) -> Description: ...


class Engine(Protocol):
    """A way to run kernels."""

    name: str

    def missing(self) -> str | None:
        """None where the engine works here; otherwise what is missing and how to install it."""
        ...

    def compile(self, program: Program, kernel: Signature) -> Executable:
        """Compile ``kernel``. Raises CompileError or EngineError."""
        ...
