"""Kernels on the machine's cores: compile, bind, run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ... import cache
from ...errors import EngineError, KernelFault
from ...source import compiler, toolchain
from ...source.program import Program, Signature
from ..launch import LaunchRecord
from ..protocol import Argument, Description, Geometry
from .memory import Block, Stray, arena
from .native import FAULTED, Loaded, object_code, processor, runtime

# Where threads of a group meet, or need to know who else is there: not for the plain loop.
_MEETING = ("simd_", "quad_", "simdgroup_", "quadgroup_", "threadgroup_barrier", "msl_threadgroup")

class CpuEngine:
    """Compiles with clang to the processor's own code; runs threadgroups on all cores."""

    name = "cpu"

    def missing(self) -> str | None:
        """What keeps this engine from working here, or None."""
        try:
            toolchain.zig()
            runtime()
        except EngineError as problem:
            return str(problem)
        return None

    def compile(self, program: Program, kernel: Signature) -> CpuExecutable:
        """Machine code for ``kernel``, from the cache where it was compiled before."""
        started = time.perf_counter()
        if any(word.startswith(_MEETING) for word in program.uses(kernel)):
            raise EngineError(
                f"Kernel '{kernel.name}' uses simdgroup operations, barriers or threadgroup memory, which this "
                "version of the CPU engine does not run yet."
            )
        target, math = compiler.host(), program.options.math
        unit = program.unit(kernel, groups=True)
        flags = compiler.language_flags(target, math)
        name = cache.key("object", toolchain.version(), compiler.headers_key(), *processor(), *flags, unit.text) + ".o"
        code = cache.shared().get(name)
        kept = code is not None
        if code is None:
            ir, _ = compiler.compile_ir(unit, target, math)
            code = object_code(ir)
            cache.shared().put(name, code)
        loaded = Loaded(code)
        description = Description(self.name, "loop", time.perf_counter() - started, kept)
        return CpuExecutable(kernel, loaded, loaded.address("msl_groups"), description)


class CpuExecutable:
    """A kernel in memory, ready to run."""

    def __init__(self, kernel: Signature, code: Loaded, entry: int, description: Description) -> None:
        self.kernel = kernel
        self.entry = entry
        self._code = code
        self._description = description

    def describe(self) -> Description:
        """How it runs."""
        return self._description

    def bind(self, arguments: Sequence[Argument], *, in_place: bool = False) -> CpuBinding:
        """Bind ``arguments``: results go to new arrays, or in place into the arguments' own memory."""
        return CpuBinding(self, arguments, in_place)


class CpuBinding:
    """An executable with its arguments."""

    def __init__(self, executable: CpuExecutable, arguments: Sequence[Argument], in_place: bool) -> None:
        self._executable = executable
        self._arguments = arguments
        self._in_place = in_place

    def run(self, geometry: Geometry, threadgroup_memory: Mapping[int, int]) -> list[mx.array]:
        """One dispatch. Raises KernelFault; arguments are then as they were, but in the in-place form."""
        launch = LaunchRecord()
        launch.grid[:] = geometry.grid
        launch.groups[:] = geometry.groups
        launch.size[:] = geometry.threadgroup
        for index, size in threadgroup_memory.items():
            launch.threadgroup_bytes[index] = size
        blocks: dict[int, Block] = {}
        try:
            for a in self._arguments:
                if a.written and not self._in_place:
                    block = blocks[a.index] = arena().take(a.nbytes)
                    if a.memory is not None:
                        block.data[:] = a.memory
                    launch.buffer[a.index] = block.address
                elif a.memory is not None:
                    launch.buffer[a.index] = a.memory.__array_interface__["data"][0]
            job = runtime().dispatch(self._executable.entry, launch, geometry.group_count)
            if job.state == FAULTED:
                raise KernelFault(self._fault(job, launch, blocks))
            for a in self._arguments:
                stray = blocks[a.index].stray() if a.index in blocks else None
                if stray is not None:
                    raise KernelFault(self._stray(a, stray))
            return [_result(a, blocks[a.index]) for a in self._arguments if a.index in blocks]
        finally:
            for block in blocks.values():
                arena().give(block)

    def _fault(self, job: Any, launch: LaunchRecord, blocks: Mapping[int, Block]) -> str:
        kernel = self._executable.kernel.name
        where = f"threadgroup {_position(job.group, launch)} or one soon after it"
        if job.stack:
            return f"Kernel '{kernel}' ran out of stack in {where}: a function calls itself without end, or private arrays are too large."
        if job.signal == _SIGFPE:
            return f"Kernel '{kernel}' divided an integer by zero in {where}."
        nearest = self._nearest(job.address, launch, blocks)
        return f"Kernel '{kernel}' touched memory that is not its own, {nearest}, in {where}."

    def _nearest(self, address: int, launch: LaunchRecord, blocks: Mapping[int, Block]) -> str:
        if address < 4096:
            return "through a null pointer"
        best: tuple[int, str] | None = None
        for a in self._arguments:
            start = launch.buffer[a.index]
            if not start:
                continue
            distance = start - address if address < start else address - (start + a.nbytes)
            inside_range = a.index in blocks and address in blocks[a.index].range
            if best is None or inside_range or distance < best[0]:
                best = (-1 if inside_range else distance, _outside(a, address - start))
                if inside_range:
                    break
        return best[1] if best else f"at address {address:#x}"

    def _stray(self, argument: Argument, stray: Stray) -> str:
        kernel = self._executable.kernel.name
        return f"Kernel '{kernel}' wrote to memory that is not its own, {_outside(argument, stray.offset)}."


_SIGFPE = 8


def _outside(a: Argument, offset: int) -> str:
    """Where byte ``offset`` lies, seen from buffer ``a``."""
    count = a.nbytes // a.element_size
    element = offset // a.element_size
    distance = -offset if offset < 0 else offset - a.nbytes
    side = "before its start" if offset < 0 else "after its end"
    far = f"{distance} byte{'s' if distance > 1 else ''} {side}" if distance else f"just {side}"
    return f"nearest to buffer({a.index}) '{a.name}': {far} (element {element}; it has {count})"


def _position(group: int, launch: LaunchRecord) -> str:
    x, y = launch.groups[0], launch.groups[1]
    position = (group % x, group // x % y, group // (x * y))
    if launch.groups[2] > 1:
        return str(position)
    return str(position[:2]) if y > 1 else str(position[0])


def _result(a: Argument, block: Block) -> mx.array:
    if a.nbytes == 0:
        return mx.zeros(a.shape, getattr(mx, a.dtype))
    if a.dtype == "bfloat16":
        return mx.array(block.data.view(np.uint16).reshape(a.shape)).view(mx.bfloat16)
    return mx.array(block.data.view("bool" if a.dtype == "bool" else a.dtype).reshape(a.shape))



