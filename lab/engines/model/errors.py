"""What a dispatch on the model can end with."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import KernelFault, LabError
from ...ir import DebugLocation

__all__ = [
    "BarrierError",
    "MemoryFault",
    "ModelError",
    "RecursionLimitError",
    "StepLimitError",
    "ThreadPosition",
    "Trap",
    "Unmodelled",
    "Waiting",
]

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class ThreadPosition:
    """One thread of a dispatch: position in the grid, its threadgroup's, linear index in the threadgroup."""

    grid: Triple
    group: Triple
    index: int

    def __str__(self) -> str:
        return f"thread {self.grid} (threadgroup {self.group}, index {self.index})"


class ModelError(KernelFault):
    """The kernel did what it must not. ``thread`` and ``location`` are None where they are not known."""

    def __init__(
        self, what: str, thread: ThreadPosition | None = None, location: DebugLocation | None = None
    ) -> None:
        where = "" if location is None else f", at {location}"
        who = "" if thread is None else f", by {thread}"
        super().__init__(f"{what}{who}{where}.")
        self.thread = thread
        self.location = location


class MemoryFault(ModelError):
    """An access outside of what it may touch.

    ``target`` names the object nearest to the address and ``buffer`` is its index if it is a buffer.
    ``offset`` counts bytes from the object's start, ``size`` is the access's, and ``outside`` says by how
    many bytes the access lies beyond the object's end or before its start: 0 for one that is inside but not
    allowed. All are None for an address that is near no object.
    """

    def __init__(
        self,
        access: Access,
        thread: ThreadPosition | None = None,
        location: DebugLocation | None = None,
    ) -> None:
        super().__init__(str(access), thread, location)
        self.access = access
        self.write = access.write
        self.size = access.size
        self.target = access.target
        self.buffer = access.buffer
        self.offset = access.offset
        self.outside = access.outside


@dataclass(frozen=True)
class Access:
    """An access that is not allowed; what ``MemoryFault`` tells, before the thread is known."""

    address: int
    size: int
    write: bool
    target: str | None = None
    length: int = 0
    offset: int | None = None
    buffer: int | None = None
    read_only: bool = False

    @property
    def outside(self) -> int | None:
        if self.offset is None:
            return None
        if self.offset < 0:
            return -self.offset
        return max(0, self.offset + self.size - self.length)

    def __str__(self) -> str:
        what = f"{'write' if self.write else 'read'} of {self.size} bytes"
        if self.target is None:
            where = "through a null pointer" if self.address < 4096 else "near no object"
            return f"{what} at address {self.address:#x}, {where}"
        where = f"{what} at byte {self.offset} of {self.target}, which has {self.length}"
        if self.outside:
            return f"{where}: {self.outside} outside it"
        return f"{where} and is read only" if self.read_only else where


class AccessError(Exception):
    """Raised inside an instruction; the scheduler turns it into a MemoryFault that names the thread."""

    def __init__(self, access: Access) -> None:
        super().__init__(str(access))
        self.access = access


class TrapError(Exception):
    """Raised inside an instruction that must not be reached."""


class Trap(ModelError):
    """The thread executed a trap or code that must not be reached."""


class StepLimitError(ModelError):
    """The threads took more steps than they were given, as in an endless loop."""


class RecursionLimitError(ModelError):
    """Calls are nested too deep; Metal has no recursion."""


@dataclass(frozen=True)
class Waiting:
    """Threads of a group that wait at one place: ``threads`` are their linear indices in the group."""

    name: str
    location: DebugLocation | None
    iterations: tuple[int, ...]
    threads: tuple[int, ...]

    def __str__(self) -> str:
        place = f"{self.name}" if self.location is None else f"{self.name} at {self.location}"
        turns = f" in iteration {', '.join(map(str, self.iterations))}" if self.iterations else ""
        return f"{place}{turns}: threads {ranges(self.threads)}"


class BarrierError(ModelError):
    """A barrier that some threads of a group never reach. ``waiting`` says who waits where."""

    def __init__(self, group: Triple, waiting: tuple[Waiting, ...]) -> None:
        listed = "; ".join(map(str, waiting))
        super().__init__(
            f"Threads of threadgroup {group} wait at barriers that the others never reach: {listed}"
        )
        self.group = group
        self.waiting = waiting


class Unmodelled(LabError):
    """Something the model has no meaning for, named: a function, an intrinsic, irreducible control flow."""

    def __init__(self, what: str, location: DebugLocation | None = None) -> None:
        where = "" if location is None else f" (at {location})"
        super().__init__(f"The model does not execute {what}{where}.")
        self.what = what
        self.location = location


def ranges(numbers: tuple[int, ...]) -> str:
    """``0-3, 7`` for 0, 1, 2, 3, 7; numbers are in increasing order."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
