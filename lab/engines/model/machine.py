"""One dispatch on the model: threadgroups one after the other, their threads in turn between meetings."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ... import ir
from ...errors import ArgumentError
from ..launch import GroupRecord, LaunchRecord
from ..protocol import MAX_THREADGROUP_MEMORY, MAX_THREADS
from .collectives import QUAD, THREADGROUP
from .errors import (
    AccessError,
    BarrierError,
    MemoryFault,
    RecursionLimitError,
    StepLimitError,
    ThreadPosition,
    Trap,
    TrapError,
    Unmodelled,
    Waiting,
)
from .meeting import Position, can_reach
from .memory import Memory
from .program import Program
from .threads import CompiledFunction, Meeting, Recursion, Shared, Thread

__all__ = ["Launch", "Met", "Outcome", "Report", "run"]

Triple = tuple[int, int, int]

_SLICE = 20_000  # steps that a thread takes before the next one's turn
_STEP_LIMIT = 200_000_000


@dataclass(frozen=True)
class Launch:
    """A dispatch. ``buffers`` are the bound buffers by index; the kernel writes into them.

    ``grid`` counts threads and ``size`` threads per threadgroup; the last threadgroups of an axis can be
    partial. ``threadgroup_bytes`` are the sizes of ``[[threadgroup(n)]]`` arguments by index, and
    ``threadgroup_memory`` that of the whole block which a group gets, filled with the byte ``fill``.
    ``read_only`` lists buffers that must not be written. A buffer's address lies ``skew`` bytes past a
    multiple of 16, as MLX's arrays do.
    """

    buffers: Mapping[int, bytearray]
    grid: Triple
    size: Triple
    threadgroup_bytes: Mapping[int, int] = field(default_factory=dict)
    threadgroup_memory: int = MAX_THREADGROUP_MEMORY
    read_only: frozenset[int] = frozenset()
    fill: int = 0
    skew: int = 8

    @classmethod
    def of_groups(cls, buffers: Mapping[int, bytearray], groups: Triple, size: Triple, **rest: Any) -> Launch:
        """A dispatch of whole threadgroups, ``groups`` along each axis."""
        x, y, z = (g * s for g, s in zip(groups, size, strict=True))
        return cls(buffers, (x, y, z), size, **rest)

    def __post_init__(self) -> None:
        if len(self.grid) != 3 or len(self.size) != 3 or min(*self.grid, *self.size) < 1:
            raise ArgumentError(f"A grid of {self.grid} by threadgroups of {self.size} is no dispatch.")
        if math.prod(self.size) > MAX_THREADS:
            raise ArgumentError(f"A threadgroup of {self.size} has more than {MAX_THREADS} threads.")
        if self.threadgroup_memory > MAX_THREADGROUP_MEMORY:
            raise ArgumentError(
                f"{self.threadgroup_memory} bytes of threadgroup memory exceed {MAX_THREADGROUP_MEMORY}."
            )
        if any(not 0 <= index < 32 for index in (*self.buffers, *self.threadgroup_bytes)):
            raise ArgumentError("The index of a buffer or threadgroup argument is between 0 and 31.")

    @property
    def groups(self) -> Triple:
        """Threadgroups along each axis."""
        x, y, z = (-(-g // s) for g, s in zip(self.grid, self.size, strict=True))
        return x, y, z


@dataclass(frozen=True)
class Report:
    """Something that is allowed to happen but has no defined result; the model went on with zero.

    ``thread`` is the first it happened to, ``count`` how often it happened at this instruction.
    """

    what: str
    thread: ThreadPosition
    location: ir.DebugLocation | None
    instruction: str
    count: int = 1

    def __str__(self) -> str:
        where = f"`{self.instruction}`" if self.location is None else str(self.location)
        return f"{self.what}, first by {self.thread}, at {where} ({self.count} times)"


@dataclass(frozen=True)
class Met:
    """A meeting that took place: ``threads`` are linear indices in the threadgroup ``group``."""

    group: Triple
    name: str
    location: ir.DebugLocation | None
    iterations: tuple[int, ...]
    threads: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """What a dispatch did besides writing its buffers; ``meetings`` is empty unless they were asked for."""

    reports: tuple[Report, ...]
    meetings: tuple[Met, ...]
    steps: int


def run(module: ir.Module, launch: Launch, *, trace: bool = False, step_limit: int = _STEP_LIMIT) -> Outcome:
    """Run the dispatch ``launch`` of ``module``'s ``msl_thread``. ``trace`` records every meeting.

    Who takes part in a collective is laid down in ``meeting``. A shuffle from a lane that does not take part
    gives 0, and so does everything else that is undefined; the outcome's reports list it.

    Raises a ModelError for what a kernel must not do (MemoryFault, BarrierError, Trap, RecursionLimitError,
    StepLimitError after ``step_limit`` instructions in all) and Unmodelled for what the model does not know;
    the buffers then hold what was written until then.
    """
    return _Machine(module, launch, trace, step_limit).run()


class _Machine:
    def __init__(self, module: ir.Module, launch: Launch, trace: bool, step_limit: int) -> None:
        self.module = module
        self.launch = launch
        self.trace = trace
        self.step_limit = step_limit
        self.steps = 0
        self.memory = Memory()
        self.program = Program(module, self.memory)
        self.reports: dict[tuple[str, int], list[Any]] = {}
        self.meetings: list[Met] = []

    def report(self, what: str, thread: Thread, instruction: ir.Instruction) -> None:
        entry = self.reports.setdefault((what, id(instruction)), [thread.position, instruction, 0])
        entry[2] += 1

    def run(self) -> Outcome:
        entry = self.program.prepare("msl_thread")
        for name in self.program.constructors():
            self._construct(self.program.prepare(name))
        self.program.seal()
        record = self._launch_record()
        x, y, z = self.launch.groups
        for group in ((i, j, k) for k in range(z) for j in range(y) for i in range(x)):
            self._run_group(entry, record, group)
        reports = tuple(
            Report(what, thread, self.module.location(instruction), str(instruction), count)
            for (what, _), (thread, instruction, count) in self.reports.items()
        )
        return Outcome(reports, tuple(self.meetings), self.steps)

    def _construct(self, function: CompiledFunction) -> None:
        """Run a constructor of globals."""
        nobody = ThreadPosition((0, 0, 0), (0, 0, 0), 0)
        thread = Thread(0, nobody, self, self.memory, Shared(self.memory, 0))
        thread.enter(function, [])
        while not thread.done:
            self.advance(thread)
            if thread.waiting is not None:
                raise Unmodelled("a meeting of lanes while a program's variable is initialised")

    def _launch_record(self) -> int:
        launch = self.launch
        record = LaunchRecord(grid=launch.grid, groups=launch.groups, size=launch.size)
        for index, data in launch.buffers.items():
            placed = self.memory.add(
                f"buffer {index}", data, skew=launch.skew, read_only=index in launch.read_only, buffer=index
            )
            record.buffer[index] = placed.address
        for index, size in launch.threadgroup_bytes.items():
            record.threadgroup_bytes[index] = size
        return self._place("the launch record", record)

    def _place(self, name: str, record: ctypes.Structure) -> int:
        return self.memory.add(name, bytearray(record), read_only=True).address

    def _run_group(self, entry: CompiledFunction, record: int, group: Triple) -> None:
        launch = self.launch
        x, y, z = (
            min(size, grid - at * size)
            for size, grid, at in zip(launch.size, launch.grid, group, strict=True)
        )
        shared = self.memory.add(
            "the threadgroup memory", bytearray([launch.fill]) * launch.threadgroup_memory
        )
        content = bytearray(
            GroupRecord(launch=record, threadgroup_memory=shared.address, position=group, size=(x, y, z))
        )
        variables = Shared(self.memory, launch.fill)
        described = self.memory.add("the group record", content, read_only=True)
        threads = []
        for index in range(x * y * z):
            local = index % x, index // x % y, index // (x * y)
            i, j, k = (g * s + p for g, s, p in zip(group, launch.size, local, strict=True))
            thread = Thread(index, ThreadPosition((i, j, k), group, index), self, self.memory, variables)
            thread.enter(entry, [described.address, index])
            threads.append(thread)
        _Group(self, group, threads).run()
        self.memory.remove(described)
        self.memory.remove(shared)
        variables.leave()

    def advance(self, thread: Thread) -> None:
        """Run a thread for a slice, and give what stops it its place."""
        before = thread.steps
        try:
            thread.run(_SLICE)
        except AccessError as problem:
            raise MemoryFault(problem.access, thread.position, self._location(thread)) from None
        except TrapError as problem:
            raise Trap(f"Executed {problem}", thread.position, self._location(thread)) from None
        except Recursion:
            raise RecursionLimitError(
                "Calls are nested too deep", thread.position, self._location(thread)
            ) from None
        self.steps += thread.steps - before
        if self.steps > self.step_limit:
            raise StepLimitError(
                f"The dispatch did not end in {self.step_limit} steps",
                thread.position,
                self._location(thread),
            )

    def _location(self, thread: Thread) -> ir.DebugLocation | None:
        return self.module.location(thread.frames[-1].instruction) if thread.frames else None


class _Group:
    """The threads of one threadgroup, until all have returned."""

    def __init__(self, machine: _Machine, group: Triple, threads: list[Thread]) -> None:
        self.machine = machine
        self.group = group
        self.threads = threads
        self.simdgroups = [threads[i : i + 32] for i in range(0, len(threads), 32)]

    def run(self) -> None:
        alive = self.threads
        while alive:
            ready = [thread for thread in alive if thread.waiting is None]
            for thread in ready:
                self.machine.advance(thread)
            alive = [thread for thread in alive if not thread.done]
            released = [self._release(simdgroup) for simdgroup in self.simdgroups]
            if not ready and not any(released) and not self._pass_barrier(alive):
                raise BarrierError(self.group, self._waiting(alive))

    def _release(self, simdgroup: list[Thread]) -> bool:
        """Hold every meeting of a simdgroup that no lane can join any more; True if there was one."""
        alive = [thread for thread in simdgroup if not thread.done]
        sets: dict[tuple[Position, int], list[tuple[Thread, Meeting]]] = {}
        for thread in alive:
            meeting = thread.waiting
            if meeting is not None and meeting.primitive.scope != THREADGROUP:
                quad = thread.lane // 4 if meeting.primitive.scope == QUAD else -1
                sets.setdefault((meeting.instance, quad), []).append((thread, meeting))
        if not sets:
            return False
        positions = [(thread, thread.place()) for thread in alive]
        complete = []
        for (instance, quad), members in sets.items():
            inside = {thread.index for thread, _ in members}
            others = [
                position
                for thread, position in positions
                if thread.index not in inside and quad in (-1, thread.lane // 4)
            ]
            if not any(can_reach(position, instance) for position in others):
                complete.append((members, len(others)))
        for members, others_count in complete:
            self._hold(members, others_count)
        return bool(complete)

    def _hold(self, members: list[tuple[Thread, Meeting]], others: int) -> None:
        """A meeting of ``members``; ``others`` lanes of their scope have not returned and stay away."""
        first, meeting = members[0]
        primitive = meeting.primitive
        base = 4 if primitive.scope == QUAD else 32
        results = primitive.evaluate({thread.index % base: m.arguments for thread, m in members})
        if primitive.is_barrier and others:
            self.machine.report("a simdgroup barrier that not all lanes reach", first, meeting.instruction)
        for thread, wait in members:
            value = results[thread.index % base]
            if value is None and not primitive.is_barrier:
                self.machine.report("a value from a lane that does not take part", thread, wait.instruction)
                value = 0
            thread.resume(value)
        self._trace(meeting, [thread for thread, _ in members])

    def _pass_barrier(self, alive: list[Thread]) -> bool:
        """Let all threads pass if they wait at one threadgroup barrier."""
        first = alive[0].waiting if alive else None
        if first is None or first.primitive.scope != THREADGROUP:
            return not alive
        if any(thread.waiting is None or thread.waiting.instance != first.instance for thread in alive):
            return False
        for thread in alive:
            thread.resume(None)
        self._trace(first, alive)
        return True

    def _trace(self, meeting: Meeting, threads: Iterable[Thread]) -> None:
        if self.machine.trace:
            name, location, iterations = self._describe(meeting)
            indices = tuple(thread.index for thread in threads)
            self.machine.meetings.append(Met(self.group, name, location, iterations, indices))

    def _describe(self, meeting: Meeting) -> tuple[str, ir.DebugLocation | None, tuple[int, ...]]:
        iterations = tuple(count for place in meeting.instance for count in place.counts)
        return meeting.primitive.name, self.machine.module.location(meeting.instruction), iterations

    def _waiting(self, alive: list[Thread]) -> tuple[Waiting, ...]:
        """Who waits where, barriers first."""
        sets: dict[Position, tuple[Meeting, list[int]]] = {}
        for thread in alive:
            if thread.waiting is not None:
                sets.setdefault(thread.waiting.instance, (thread.waiting, []))[1].append(thread.index)
        ordered = sorted(sets.values(), key=lambda entry: entry[0].primitive.scope != THREADGROUP)
        return tuple(Waiting(*self._describe(meeting), tuple(indices)) for meeting, indices in ordered)
