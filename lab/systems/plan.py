"""Plans as data: the buffers of a system, the dispatches of one chunk, and what they are called with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

Triple = tuple[int, int, int]
Number = int | float

STATE = "state"  # lives on from chunk to chunk
INPUT = "input"
OUTPUT = "output"
SCRATCH = "scratch"  # holds anything when a chunk starts


@dataclass(frozen=True)
class Field:
    """A part of a buffer whose elements mean one thing, so that they are compared and named together.

    It is ``[start, stop)`` along the buffer's last axis. ``terms`` are the names and sizes of what counts
    its elements, outermost first; their product is the number of elements. ``tolerance`` is the largest
    deviation that is still right, in roundings: units of ``2**-24`` times what a value is made of, its parts
    without their signs (0: exact). ``why`` says where so many come from.
    """

    name: str
    start: int
    stop: int
    terms: tuple[tuple[str, int], ...]
    tolerance: float = 0.0
    why: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of ``terms``."""
        return tuple(size for _, size in self.terms)


@dataclass(frozen=True)
class Buffer:
    """A buffer as the system describes it: NumPy's name of its dtype, its shape, what its elements are.

    ``role`` is ``state``, ``input``, ``output`` or ``scratch``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        rows = math.prod(self.shape[:-1])
        for part in self.fields:
            if math.prod(part.shape) != rows * (part.stop - part.start):
                raise ValueError(f"{self.name} {self.shape}: {part} does not count its elements.")

    @classmethod
    def whole(
        cls,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        role: str,
        terms: tuple[tuple[str, int], ...],
        tolerance: float = 0.0,
        why: str = "",
    ) -> Buffer:
        """A buffer whose elements all mean one thing: a single field without a name."""
        return cls(name, dtype, shape, role, (Field("", 0, shape[-1], terms, tolerance, why),))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Dispatch:
    """One dispatch of a plan.

    ``buffers`` are names in the order of their index, ``writes`` those it defines elements of. The size is
    ``grid`` (threads) or ``groups`` (threadgroups). ``constants`` are the values of the buffers that no
    array stands behind: numbers, or the fields of a block. Where no kernel runs, ``host`` names the
    system's operation that does.
    """

    kernel: str
    buffers: tuple[str, ...]
    writes: tuple[str, ...]
    groups: Triple | None = None
    grid: Triple | None = None
    threadgroup: Triple = (1, 1, 1)
    constants: Mapping[str, Number | Mapping[str, Number]] = field(default_factory=dict)
    host: str = ""

    def as_record(self) -> dict[str, Any]:
        """The dispatch in JSON's types."""
        plain = {k: dict(v) if isinstance(v, Mapping) else v for k, v in self.constants.items()}
        return {
            "kernel": self.kernel,
            "buffers": list(self.buffers),
            "writes": list(self.writes),
            "groups": self.groups and list(self.groups),
            "grid": self.grid and list(self.grid),
            "threadgroup": list(self.threadgroup),
            "constants": plain,
            "host": self.host,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Dispatch:
        """The dispatch that ``as_record`` told of."""
        values = dict(record)
        for name in ("buffers", "writes", "groups", "grid", "threadgroup"):
            values[name] = values[name] and tuple(values[name])
        return cls(**values)


@dataclass(frozen=True)
class Plan:
    """The dispatches of one chunk in their order, and the buffers they speak of.

    ``path`` names the way the system takes; the chunk is rows ``first .. first + rows - 1`` of the inputs.
    ``defines`` are the macros that its kernels are compiled with.
    """

    path: str
    first: int
    rows: int
    dispatches: tuple[Dispatch, ...]
    buffers: Mapping[str, Buffer]
    defines: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffers", MappingProxyType(dict(self.buffers)))
        object.__setattr__(self, "defines", MappingProxyType(dict(self.defines)))

    def __str__(self) -> str:
        """One line for each dispatch: kernel, buffers, size."""
        lines = [f"{self.path}: rows {self.first} to {self.first + self.rows - 1}"]
        for d in self.dispatches:
            size = f"grid {d.grid}" if d.grid else f"groups {d.groups}"
            where = "on the host" if d.host else f"{size} x {d.threadgroup}"
            lines.append(f"  {d.kernel:16} {' '.join(d.buffers):60} {where}")
        return "\n".join(lines)
