"""The threads that run a compiled program: their frames, and what moves them from block to block.

A frame's registers are a list: the thread first, then the function's constants, parameters and results, each
at an index fixed when the function is compiled. An instruction is a function of that list. It returns None,
or, where control goes elsewhere, what to do next: an edge, a call, a return, a meeting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ... import ir
from .collectives import Primitive
from .errors import ThreadPosition
from .meeting import Place, Position
from .memory import Memory, Object

__all__ = [
    "NO_RESULT",
    "CompiledBlock",
    "CompiledFunction",
    "Edge",
    "Invoke",
    "Leave",
    "Meet",
    "Meeting",
    "Operation",
    "Recursion",
    "Registers",
    "Shared",
    "Thread",
]

Registers = list[Any]
Operation = Callable[[Registers], Any]

NO_RESULT = -1
"""In place of a register, for what gives no value."""

_DEPTH_LIMIT = 200


class Host(Protocol):
    """Who runs the threads."""

    def report(self, what: str, thread: Thread, instruction: ir.Instruction) -> None:
        """Note something whose result is undefined; the run goes on."""
        ...


class Recursion(Exception):
    """Raised where calls are nested too deep."""


class Frame:
    """One activation of a function. ``pc`` is the next operation's index in ``block``."""

    __slots__ = ("block", "counts", "function", "objects", "pc", "registers", "result")

    def __init__(self, function: CompiledFunction, result: int) -> None:
        self.function = function
        self.registers: Registers = function.template.copy()
        self.counts = [0] * function.loops
        self.block = function.entry
        self.pc = 0
        self.objects: list[Object] = []
        self.result = result

    def place(self) -> Place:
        block, counts = self.block, self.counts
        return Place(
            self.function.flow, block.label, self.pc - 1, tuple([counts[loop] for loop in block.loops])
        )

    @property
    def instruction(self) -> ir.Instruction:
        """The instruction begun last."""
        return self.block.instructions[max(self.pc - 1, 0)]


@dataclass(frozen=True, slots=True)
class Meeting:
    """A thread's wait at an instance of a primitive."""

    instance: Position
    primitive: Primitive
    arguments: tuple[Any, ...]
    instruction: ir.Instruction
    result: int


class Shared:
    """What the threads of a group share: the variables in threadgroup memory, placed when first used."""

    def __init__(self, memory: Memory, fill: int) -> None:
        self.memory = memory
        self.fill = fill
        self.variables: dict[int, Object] = {}

    def variable(self, identity: int, size: int) -> int:
        """The address of variable ``identity``, ``size`` bytes long."""
        placed = self.variables.get(identity)
        if placed is None:
            name = f"the threadgroup variable {identity}"
            placed = self.variables[identity] = self.memory.add(name, bytearray([self.fill]) * size)
        return placed.address

    def leave(self) -> None:
        """Take the variables away."""
        for placed in self.variables.values():
            self.memory.remove(placed)


class Thread:
    """A thread of a threadgroup and its frames. It is done when it has none."""

    __slots__ = ("frames", "host", "index", "memory", "position", "shared", "steps", "waiting")

    def __init__(
        self, index: int, position: ThreadPosition, host: Host, memory: Memory, shared: Shared
    ) -> None:
        self.index = index
        self.position = position
        self.host = host
        self.memory = memory
        self.shared = shared
        self.frames: list[Frame] = []
        self.waiting: Meeting | None = None
        self.steps = 0

    @property
    def done(self) -> bool:
        return not self.frames

    @property
    def lane(self) -> int:
        return self.index % 32

    def place(self) -> Position:
        return tuple([frame.place() for frame in self.frames])

    def enter(self, function: CompiledFunction, arguments: Sequence[Any], result: int = NO_RESULT) -> Frame:
        """Begin a call."""
        if len(self.frames) >= _DEPTH_LIMIT:
            raise Recursion
        frame = Frame(function, result)
        frame.registers[0] = self
        for register, value in zip(function.parameters, arguments, strict=True):
            frame.registers[register] = value
        for register, size in function.copied:
            content = self.memory.read(frame.registers[register], size)
            placed = self.memory.add(f"an argument of {function.name}", bytearray(content))
            frame.objects.append(placed)
            frame.registers[register] = placed.address
        self.frames.append(frame)
        return frame

    def leave(self, value: Any) -> Frame | None:
        """End the innermost call; the frame that goes on, if there is one."""
        frame = self.frames.pop()
        for placed in frame.objects:
            self.memory.remove(placed)
        if not self.frames:
            return None
        caller = self.frames[-1]
        if frame.result != NO_RESULT:
            caller.registers[frame.result] = value
        return caller

    def resume(self, value: Any) -> None:
        """End a wait with the primitive's result."""
        assert self.waiting is not None
        if self.waiting.result != NO_RESULT:
            self.frames[-1].registers[self.waiting.result] = value
        self.waiting = None

    def run(self, steps: int) -> None:
        """Run until the thread waits, is done, or has taken ``steps`` steps (a block is not cut)."""
        frame: Frame | None = self.frames[-1]
        end = self.steps + steps
        while frame is not None and self.steps < end:
            operations, registers, pc = frame.block.operations, frame.registers, frame.pc
            begun, action = pc, None
            try:
                while action is None:
                    action = operations[pc](registers)
                    pc += 1
            except BaseException:
                pc += 1
                raise
            finally:
                frame.pc = pc
                self.steps += pc - begun
            frame = action.perform(self, frame)


@dataclass(eq=False, slots=True)
class CompiledBlock:
    """``instructions`` are those behind ``operations``, phis not among them; ``loops`` are indices of the
    loops around the block, outermost first."""

    label: str
    loops: tuple[int, ...]
    operations: list[Operation]
    instructions: list[ir.Instruction]


@dataclass(eq=False, slots=True)
class CompiledFunction:
    """``flow`` is None where no primitive can be called; then no loop is counted either.

    ``copied``: registers of ``byval`` parameters, with their size.
    """

    name: str
    flow: ir.ControlFlow | None
    loops: int
    entry: CompiledBlock
    template: Registers
    parameters: list[int]
    copied: list[tuple[int, int]]


@dataclass(eq=False, slots=True)
class Edge:
    """To another block: phis take their values, all at once, and loops are counted."""

    target: CompiledBlock
    destinations: list[int]
    sources: list[int]
    turns: int | None
    enters: int | None

    def perform(self, thread: Thread, frame: Frame) -> Frame:
        if self.sources:
            registers = frame.registers
            values = [registers[source] for source in self.sources]
            for destination, value in zip(self.destinations, values, strict=True):
                registers[destination] = value
        if self.turns is not None:
            frame.counts[self.turns] += 1
        elif self.enters is not None:
            frame.counts[self.enters] = 0
        frame.block = self.target
        frame.pc = 0
        return frame


@dataclass(eq=False, slots=True)
class Leave:
    """The end of a call; ``value`` is the result's register."""

    value: int | None

    def perform(self, thread: Thread, frame: Frame) -> Frame | None:
        return thread.leave(None if self.value is None else frame.registers[self.value])


@dataclass(eq=False, slots=True)
class Invoke:
    """A call of a function by its name, which ``find`` knows."""

    find: Callable[[str], CompiledFunction]
    name: str
    arguments: list[int]
    result: int

    def perform(self, thread: Thread, frame: Frame) -> Frame:
        return thread.enter(self.find(self.name), [frame.registers[a] for a in self.arguments], self.result)


@dataclass(eq=False, slots=True)
class Meet:
    """A call of a primitive at which lanes meet."""

    primitive: Primitive
    arguments: list[int]
    result: int
    instruction: ir.Instruction

    def perform(self, thread: Thread, frame: Frame) -> None:
        arguments = tuple(frame.registers[a] for a in self.arguments)
        thread.waiting = Meeting(thread.place(), self.primitive, arguments, self.instruction, self.result)
