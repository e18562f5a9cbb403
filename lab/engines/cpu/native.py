"""Machine code in this process: from LLVM IR to object code, and from object code to addresses."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ... import cache
from ...errors import EngineError
from ...source import compiler, toolchain

_lock = threading.RLock()  # LLVM's globals are not for several threads at once


@functools.cache
def _llvm() -> Any:
    try:
        import llvmlite.binding as llvm
    except ImportError as problem:
        hint = "`pip install 'llvmlite>=0.50,<0.51'`"
        raise EngineError(f"llvmlite is missing or broken ({problem}): {hint}.") from None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


@functools.cache
def processor() -> tuple[str, str]:
    """Name and features of this machine's processor, as LLVM calls them."""
    llvm = _llvm()
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


@functools.cache
def pipeline_key() -> str:
    """A hash of the modules that make code out of IR, for keys of caches."""
    here = Path(__file__).parent
    files = [*sorted(here.glob("*.py")), *sorted((here.parents[1] / "ir").glob("*.py"))]
    return cache.key(metadata.version("llvmlite"), *(f.read_bytes() for f in files))


@functools.cache
def _target_machine() -> Any:
    llvm = _llvm()
    cpu, features = processor()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small", jit=True
    )


def object_code(text: str, *, optimise: bool = False) -> bytes:
    """Object code of a module for this processor, after LLVM's own passes where the text has seen none."""
    with _lock:
        module = _module(text)
        if optimise:
            _run(module, lambda builder: builder.getModulePassManager())
        return _target_machine().emit_object(module)


def inlined(text: str) -> str:
    """The module with ``alwaysinline`` functions inlined and variables in registers, loops as they were."""
    llvm = _llvm()

    def passes(_: Any) -> Any:
        manager = llvm.create_new_module_pass_manager()
        manager.add_always_inliner_pass()
        manager.add_sroa_pass()
        manager.add_global_dead_code_eliminate_pass()
        return manager

    with _lock:
        module = _module(text)
        _run(module, passes)
        return str(module)


def _module(text: str) -> Any:
    llvm = _llvm()
    module = llvm.parse_assembly(text)
    module.triple = llvm.get_process_triple()
    return module


def _run(module: Any, passes: Callable[[Any], Any]) -> None:
    llvm = _llvm()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = True
    builder = llvm.create_pass_builder(_target_machine(), options)
    passes(builder).run(module, builder)


@functools.cache
def _linker() -> Any:
    # JITLink: it keeps a library's parts together in memory, and answers with errors rather than an abort.
    return _llvm().create_lljit_compiler(use_jit_link=True, suppress_errors=True)


_numbers = itertools.count()


class Loaded:
    """Object code in memory, as long as this object lives.

    ``exports`` are the functions to be found in it, ``imports`` addresses of functions it may call besides
    those of the process. Raises EngineError where one is missing.
    """

    def __init__(self, parts: Sequence[bytes], exports: Sequence[str], imports: Mapping[str, int]) -> None:
        with _lock:
            builder = _llvm().JITLibraryBuilder().add_current_process()
            for code in parts:
                builder.add_object_img(code)
            for name in exports:
                builder.export_symbol(name)
            for name, address in imports.items():
                builder.import_symbol(name, address)
            try:
                self._tracker = builder.link(_linker(), f"lab-{next(_numbers)}")
            except RuntimeError as problem:
                raise EngineError(f"The compiled kernel cannot be loaded: {problem}.") from None

    def address(self, name: str) -> int:
        """Address of an exported function."""
        return self._tracker[name]


class Job(ctypes.Structure):
    """One dispatch, as runtime.h has it."""

    _fields_ = (
        ("run_groups", ctypes.c_void_p),
        ("run_thread", ctypes.c_void_p),
        ("launch", ctypes.c_void_p),
        ("total", ctypes.c_uint64),
        ("chunk", ctypes.c_uint64),
        ("storage", ctypes.c_uint64),
        ("shared", ctypes.c_uint64),
        ("shared_at", ctypes.c_uint64),
        ("next", ctypes.c_uint64),
        ("state", ctypes.c_int32),
        ("wanted", ctypes.c_int32),
        ("active", ctypes.c_int32),
        ("workers", ctypes.c_int32),
        ("signal", ctypes.c_int32),
        ("address", ctypes.c_uint64),
        ("group", ctypes.c_uint64),
        ("thread", ctypes.c_int64),
        ("region", ctypes.c_int32),
        ("threads", ctypes.c_int32 * 2),
        ("sites", ctypes.c_int32 * 2),
    )


FAULTED = 1
UNMET_BARRIER, NO_MEMORY = -1, -2  # in place of a signal
STACK_GUARD, THREADGROUP_MEMORY = 1, 2  # regions
_STEP = 50_000_000  # nanoseconds between two looks at the keyboard


_FUNCTIONS = ("lab_start", "lab_run", "lab_wait", "lab_cancel", "lab_reserve", "lab_commit", "lab_decommit")
_MEETINGS = ("lab_enter", "lab_meet", "lab_meet64", "lab_shuffle", "lab_barrier")
_HALVES = ("__extendhfsf2", "__truncsfhf2", "__truncsfbf2")  # for processors without half precision


class Runtime:
    """The runtime of this process: workers, and memory with guards around it."""

    def __init__(self) -> None:
        halves = _HALVES if platform.machine().lower() in ("x86_64", "amd64") else ()
        for_kernels = (*_MEETINGS, *halves)
        parts = [_runtime_code(part) for part in ("runtime.c", "fibers.c")]
        self._code = Loaded(parts, (*_FUNCTIONS, *for_kernels), {})
        self.imports = {name: self._code.address(name) for name in for_kernels}
        """What kernels may call, by name."""
        u64, i32, pointer = ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p
        self._start = self._function("lab_start", i32, i32)
        self._run = self._function("lab_run", i32, pointer, u64)
        self._wait = self._function("lab_wait", i32, pointer, u64, i32)
        self._cancel = self._function("lab_cancel", None, pointer)
        self.reserve = self._function("lab_reserve", u64, u64)
        self.commit = self._function("lab_commit", i32, u64, u64)
        self.decommit = self._function("lab_decommit", None, u64, u64)
        self._busy = threading.Lock()
        self.workers = 0  # started with the first dispatch
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_after_fork)

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        return ctypes.CFUNCTYPE(result, *arguments)(self._code.address(name))

    def _begin(self) -> None:
        self.workers = self._start(_cores())
        if self.workers < 1:
            raise EngineError("The CPU engine could not start a thread: the system gives no more of them.")

    def _begin_after_fork(self) -> None:
        self._busy = threading.Lock()
        self.workers = 0  # threads do not survive a fork; started anew when needed

    def dispatch(self, job: Job, launch: ctypes.Structure, groups: int) -> None:
        """Run ``groups`` threadgroups of ``job``, which then tells how it ended.

        Interruptible: on KeyboardInterrupt the workers leave the kernel, then the exception goes on.
        """
        with self._busy:
            if not self.workers:
                self._begin()
            job.launch, job.total = ctypes.addressof(launch), groups
            job.workers = self.workers
            job.chunk = max(1, min(groups // (self.workers * 16), 1 << 20))
            address = ctypes.addressof(job)
            try:
                ended = self._run(address, _STEP)
                while not ended:
                    ended = self._wait(address, _STEP, 0)
            except BaseException:
                self._cancel(address)
                while not self._wait(address, _STEP, 0):
                    self._cancel(address)
                raise


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _runtime_code(part: str) -> bytes:
    source = Path(__file__).with_name(part)
    header = Path(__file__).with_name("runtime.h")
    triple = compiler.host().triple
    triple = triple.replace("arm64-apple-macosx13.0", "aarch64-macos")
    triple = triple.replace("x86_64-apple-macosx13.0", "x86_64-macos")
    flags = ("-target", triple, "-c", "-O2", "-fPIC", "-fno-sanitize=all", "-fno-stack-protector")
    name = cache.key("runtime", toolchain.version(), *flags, header.read_bytes(), source.read_bytes()) + ".o"

    def make(path: Path) -> None:
        done = toolchain.zig_cc([*flags, str(source), "-o", str(path)], cache.folder() / "zig")
        if done.returncode:
            raise EngineError(f"The CPU engine's runtime does not compile: {done.stderr.strip()[:2000]}")

    return cache.shared().path(name, make).read_bytes()


@functools.cache
def runtime() -> Runtime:
    """The one runtime of this process."""
    return Runtime()
