"""Kernels on the machine's cores: compile, bind, run."""

from __future__ import annotations

import functools
import json
import pickle
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from ... import cache
from ...errors import ArgumentError, EngineError, KernelFault
from ...source import compiler, toolchain
from ...source.program import Program, Signature
from ...source.unit import Unit
from ..launch import LaunchRecord
from ..protocol import MAX_THREADGROUP_MEMORY, Argument, Description, Geometry
from .isolated import helper
from .lowering import Site, guard_divisions, inline_what_meets, lower
from .memory import Block, Stray, arena
from .native import (
    FAULTED,
    NO_MEMORY,
    STACK_GUARD,
    THREADGROUP_MEMORY,
    UNMET_BARRIER,
    Job,
    Loaded,
    inlined,
    object_code,
    pipeline_key,
    processor,
    runtime,
)

T = TypeVar("T")

# Names by which threads of a group meet or share memory: what the plain loop cannot do.
_MEETING = re.compile(
    r"threadgroup|(threadgroup|simdgroup|quadgroup)_barrier|__msl_\w+|msl_threadgroup"
    r"|(simd|quad)_(sum|product|min|max|minimum|maximum|and|or|xor|all|any|ballot|vote|is_first|is_helper_thread)"
    r"|(simd|quad)_(prefix|shuffle|broadcast|active)\w*|simdgroup_(matrix|load|store|multiply|float|half|bfloat)\w*"
    r"|make_filled_simdgroup_matrix"
)


@dataclass(frozen=True)
class Code:
    """A compiled kernel: object code, and for fibers where they meet and the storage they share."""

    executor: str  # loop or fiber
    object_code: bytes
    sites: tuple[Site, ...] = ()
    storage: int = 0

    def packed(self) -> bytes:
        """As bytes for the cache."""
        about = {
            "executor": self.executor,
            "sites": [astuple(s) for s in self.sites],
            "storage": self.storage,
        }
        head = json.dumps(about).encode()
        return len(head).to_bytes(4, "little") + head + self.object_code

    @classmethod
    def unpacked(cls, data: bytes) -> Code:
        """Back from ``packed``."""
        end = 4 + int.from_bytes(data[:4], "little")
        about = json.loads(data[4:end])
        return cls(about["executor"], data[end:], tuple(Site(*s) for s in about["sites"]), about["storage"])


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

    def executor(self, program: Program, kernel: Signature) -> str:
        """``loop`` for a kernel whose threads never meet and share no memory, ``fiber`` for any other."""
        return "fiber" if any(map(_MEETING.fullmatch, program.uses(kernel))) else "loop"

    def compile(self, program: Program, kernel: Signature) -> CpuExecutable:
        """Machine code for ``kernel``, from the cache where it was compiled before."""
        started = time.perf_counter()
        executor = self.executor(program, kernel)
        unit = program.unit(kernel, groups=executor == "loop")
        flags = compiler.language_flags(compiler.host(), program.options.math)
        key = (*flags, executor, *processor(), toolchain.version(), compiler.headers_key(), pipeline_key())
        name = cache.key("kernel", *key, unit.text)
        data = cache.shared().get(name)
        if data is None:
            code = _compile(unit, program.options.math, executor)
            cache.shared().put(name, code.packed())
        else:
            code = Code.unpacked(data)
        if code.storage > MAX_THREADGROUP_MEMORY:
            raise EngineError(
                f"Kernel '{kernel.name}' declares {code.storage} bytes of threadgroup memory; "
                f"a threadgroup has at most {MAX_THREADGROUP_MEMORY}."
            )
        seconds = time.perf_counter() - started
        description = Description(self.name, executor, seconds, data is not None, code.storage)
        return CpuExecutable(kernel, unit, code, description)


def _compile(unit: Unit, math: str, executor: str) -> Code:
    target = compiler.host()
    if executor == "loop":
        text, _ = compiler.compile_ir(unit, target, math)
        return Code("loop", object_code(guard_divisions(text)))
    text, _ = compiler.compile_ir(unit, target, math, "-Xclang", "-disable-llvm-passes", "-gline-tables-only")
    lowered = lower(inlined(inline_what_meets(guard_divisions(text))))
    return Code("fiber", object_code(lowered.text, optimise=True), lowered.sites, lowered.storage)


class CpuExecutable:
    """A kernel in memory, ready to run."""

    def __init__(self, kernel: Signature, unit: Unit, code: Code, description: Description) -> None:
        self.kernel = kernel
        self.unit = unit
        self.code = code
        self._description = description
        entry = "msl_groups" if code.executor == "loop" else "msl_thread"
        self._loaded = Loaded([code.object_code], [entry], runtime().imports)
        self._entry = self._loaded.address(entry)

    def __reduce__(self) -> tuple[Any, ...]:
        return CpuExecutable, (self.kernel, self.unit, self.code, self._description)

    def job(self, shared: int) -> Job:
        """A dispatch of this kernel; ``shared`` are the bytes of its ``[[threadgroup(n)]]`` arguments."""
        if self.code.executor == "loop":
            return Job(run_groups=self._entry)
        return Job(run_thread=self._entry, storage=self.code.storage, shared=self.code.storage + shared)

    @functools.cached_property
    def pickled(self) -> bytes:
        """What another process needs to run it."""
        return pickle.dumps(self)

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

    def run(
        self, geometry: Geometry, threadgroup_memory: Mapping[int, int], *, isolate: bool = False
    ) -> list[mx.array]:
        """One dispatch. Raises KernelFault; arguments are then as they were, but in the in-place form."""
        if not isolate:
            return self.launch(geometry, threadgroup_memory, lambda a, block: _result(a, block.data))
        kernel = self._executable.kernel.name
        data = helper().run(kernel, self._executable.pickled, self._arguments, geometry, threadgroup_memory)
        written = [a for a in self._arguments if a.written]
        return [_result(a, x) for a, x in zip(written, data, strict=True)]

    def launch(
        self, geometry: Geometry, threadgroup_memory: Mapping[int, int], take: Callable[[Argument, Block], T]
    ) -> list[T]:
        """One dispatch in this process; ``take`` copies each written buffer out of guarded memory."""
        launch = LaunchRecord()
        launch.grid[:] = geometry.grid
        launch.groups[:] = geometry.groups
        launch.size[:] = geometry.threadgroup
        shared = 0
        for index, size in threadgroup_memory.items():
            launch.threadgroup_bytes[index] = size
            shared += -(-size // 16) * 16
        job = self._executable.job(shared)
        if job.shared > MAX_THREADGROUP_MEMORY:
            raise ArgumentError(
                f"Kernel '{self._executable.kernel.name}' would use {job.shared} bytes of threadgroup memory "
                f"({job.storage} of its own, {shared} given); a threadgroup has at most "
                f"{MAX_THREADGROUP_MEMORY}."
            )
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
            runtime().dispatch(job, launch, geometry.group_count)
            if job.state == FAULTED:
                raise KernelFault(self._fault(job, launch, blocks))
            for a in self._arguments:
                stray = blocks[a.index].stray() if a.index in blocks else None
                if stray is not None:
                    raise KernelFault(self._stray(a, stray))
            return [take(a, blocks[a.index]) for a in self._arguments if a.index in blocks]
        finally:
            for block in blocks.values():
                arena().give(block)

    def _fault(self, job: Job, launch: LaunchRecord, blocks: Mapping[int, Block]) -> str:
        kernel = self._executable.kernel.name
        if job.signal == NO_MEMORY:
            return f"There is no memory for the threads of kernel '{kernel}'."
        where = f"threadgroup {_position(job.group, launch)}"
        if job.signal == UNMET_BARRIER:
            return self._unmet(job, where)
        if job.thread >= 0:
            where = f"thread {job.thread} of {where}"
        if job.signal in (signal.SIGILL, signal.SIGTRAP):
            return f"Kernel '{kernel}' stopped at a trap, or at code that cannot be reached, in {where}."
        if job.region == STACK_GUARD:
            return (
                f"Kernel '{kernel}' ran out of stack in {where}: a function calls itself without end, "
                "or its private arrays are too large."
            )
        if job.region == THREADGROUP_MEMORY:
            offset = job.address - job.shared_at
            return (
                f"Kernel '{kernel}' touched threadgroup memory outside the {job.shared} bytes it has, "
                f"at byte {offset}, in {where}."
            )
        nearest = self._nearest(job.address, launch, blocks)
        return f"Kernel '{kernel}' touched memory that is not its own, {nearest}, in {where}."

    def _unmet(self, job: Job, where: str) -> str:
        kernel = self._executable.kernel.name
        first, second = (self._site(index) for index in job.sites)
        a, b = job.threads
        if job.sites[0] == job.sites[1]:
            how = f"threads {a} and {b} wait at {first} in different iterations of a loop"
        else:
            how = f"thread {a} waits at {first}, thread {b} at {second}"
        return (
            f"Kernel '{kernel}' has a barrier that not all threads of {where} reach: {how}. "
            "All threads that have not returned must come to the same barrier."
        )

    def _site(self, index: int) -> str:
        site = self._executable.code.sites[index]
        name = site.primitive.removeprefix("__msl_")
        place = self._executable.unit.locate(site.line, site.column) if site.line else None
        return f"{name} in {place.file} line {place.line}" if place else f"a {name}"

    def _nearest(self, address: int, launch: LaunchRecord, blocks: Mapping[int, Block]) -> str:
        if address < 4096:
            return "through a null pointer"
        best: tuple[int, str] = (_FAR, f"at {_shown(address)}, far from all of its buffers")
        for a in self._arguments:
            start = launch.buffer[a.index]
            if not start:
                continue
            distance = start - address if address < start else address - (start + a.nbytes)
            inside_range = a.index in blocks and address in blocks[a.index].range
            if inside_range or distance < best[0]:
                best = (-1 if inside_range else distance, _outside(a, address - start))
                if inside_range:
                    break
        return best[1]

    def _stray(self, argument: Argument, stray: Stray) -> str:
        kernel = self._executable.kernel.name
        return f"Kernel '{kernel}' wrote to memory that is not its own, {_outside(argument, stray.offset)}."


_NOWHERE = (1 << 64) - 1  # what the runtime notes where the processor names no address
_FAR = 64 << 30  # bytes beyond which an address has nothing to do with a buffer


def _shown(address: int) -> str:
    return "an address that no memory can have" if address == _NOWHERE else f"address {address:#x}"


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


def _result(a: Argument, data: np.ndarray) -> Any:
    """The bytes of a written buffer as an array of the argument's shape and dtype."""
    if isinstance(a.dtype, np.dtype):  # records stay NumPy's: MLX has none
        return data.view(a.dtype).reshape(a.shape).copy()
    if a.nbytes == 0:
        return mx.zeros(a.shape, getattr(mx, "bool_" if a.dtype == "bool" else a.dtype))
    if a.dtype == "bfloat16":
        return mx.array(data.view(np.uint16).reshape(a.shape)).view(mx.bfloat16)
    return mx.array(data.view(a.dtype).reshape(a.shape))
