"""Machine code in this process: from LLVM IR to object code, and from object code to addresses."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import threading
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
        raise EngineError(f"llvmlite is missing or broken ({problem}): `pip install 'llvmlite>=0.50,<0.51'`.") from None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


@functools.cache
def processor() -> tuple[str, str]:
    """Name and features of this machine's processor, as LLVM calls them."""
    llvm = _llvm()
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


@functools.cache
def _target_machine() -> Any:
    llvm = _llvm()
    cpu, features = processor()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small", jit=True)


def object_code(ir: str) -> bytes:
    """Object code of a module for this processor."""
    with _lock:
        llvm = _llvm()
        module = llvm.parse_assembly(ir)
        module.triple = llvm.get_process_triple()
        return _target_machine().emit_object(module)


class Loaded:
    """Object code in memory. Lives as long as this object does."""

    def __init__(self, code: bytes) -> None:
        with _lock:
            llvm = _llvm()
            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine_for_loading())
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Address of a function. Raises EngineError where there is none."""
        with _lock:
            found = self._engine.get_function_address(name)
        if not found:
            raise EngineError(f"The compiled kernel has no {name}.")
        return found


def _target_machine_for_loading() -> Any:
    # An execution engine takes its target machine for its own, so each gets one.
    llvm = _llvm()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)


class _Job(ctypes.Structure):
    """One dispatch, as runtime.c has it."""

    _fields_ = (
        ("run", ctypes.c_void_p),
        ("launch", ctypes.c_void_p),
        ("total", ctypes.c_uint64),
        ("chunk", ctypes.c_uint64),
        ("next", ctypes.c_uint64),
        ("state", ctypes.c_int32),
        ("wanted", ctypes.c_int32),
        ("active", ctypes.c_int32),
        ("signal", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("address", ctypes.c_uint64),
        ("group", ctypes.c_uint64),
        ("stack", ctypes.c_uint64),
    )


FAULTED = 1
_STEP = 50_000_000  # nanoseconds between two looks at the keyboard


class Runtime:
    """The runtime of this process: workers, and memory with guards around it."""

    def __init__(self) -> None:
        self._code = Loaded(_runtime_code())
        u64, i32, pointer = ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p
        self._start = self._function("lab_start", i32, i32)
        self._run = self._function("lab_run", i32, pointer, u64)
        self._wait = self._function("lab_wait", i32, pointer, u64, i32)
        self._cancel = self._function("lab_cancel", None, pointer)
        self.reserve = self._function("lab_reserve", u64, u64)
        self.commit = self._function("lab_commit", i32, u64, u64)
        self.decommit = self._function("lab_decommit", None, u64, u64)
        llvm = _llvm()
        if platform.machine().lower() in ("x86_64", "amd64"):
            for name in ("__extendhfsf2", "__truncsfhf2", "__truncsfbf2"):
                llvm.add_symbol(name, self._code.address(name))
        self._busy = threading.Lock()
        self.workers = 0
        self._begin()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_after_fork)

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        return ctypes.CFUNCTYPE(result, *arguments)(self._code.address(name))

    def _begin(self) -> None:
        self.workers = self._start(_cores())
        if self.workers < 1:
            raise EngineError("The CPU engine could not start a thread: the system gives this process no more.")

    def _begin_after_fork(self) -> None:
        self._busy = threading.Lock()
        self.workers = 0  # threads do not survive a fork; started anew when needed

    def dispatch(self, run: int, launch: ctypes.Structure, groups: int) -> _Job:
        """Run ``groups`` threadgroups with the function at address ``run``; the job tells how it ended.

        Interruptible: on KeyboardInterrupt the workers leave the kernel, then the exception goes on.
        """
        with self._busy:
            if not self.workers:
                self._begin()
            chunk = max(1, min(groups // (self.workers * 16), 1 << 20))
            job = _Job(run=run, launch=ctypes.addressof(launch), total=groups, chunk=chunk)
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
            return job


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _runtime_code() -> bytes:
    source = Path(__file__).with_name("runtime.c")
    target = compiler.host()
    name = cache.key("runtime", toolchain.version(), target.triple, source.read_bytes()) + ".o"
    store = cache.shared()
    code = store.get(name)
    if code is None:

        def make(path: Path) -> None:
            triple = target.triple.replace("arm64-apple-macosx13.0", "aarch64-macos").replace(
                "x86_64-apple-macosx13.0", "x86_64-macos"
            )
            flags = ["-target", triple, "-c", "-O2", "-fPIC", "-fno-sanitize=all", "-fno-stack-protector"]
            done = toolchain.zig_cc([*flags, str(source), "-o", str(path)], cache.folder() / "zig")
            if done.returncode:
                raise EngineError(f"The CPU engine's runtime does not compile: {done.stderr.strip()[:2000]}")

        code = store.path(name, make).read_bytes()
    return code


@functools.cache
def runtime() -> Runtime:
    """The one runtime of this process."""
    return Runtime()
