"""Launches in a process of their own, for kernels that nothing else may be exposed to.

A helper process is started once. For every launch it forks a child, which runs the kernel and sends back
what it wrote; whatever the kernel does, it does to that child.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np

from ...errors import EngineError, KernelFault, LabError
from ..protocol import Argument, Geometry
from .native import runtime


@dataclass(frozen=True)
class Request:
    """One launch: everything the child needs, with no array but its own."""

    executable: bytes  # a pickled CpuExecutable without its machine code in memory
    arguments: tuple[Argument, ...]
    geometry: Geometry
    threadgroup_memory: Mapping[int, int]


class Helper:
    """The helper process of this one. Started at the first launch, and again when it was lost."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._busy = threading.Lock()
        atexit.register(self.stop)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_after_fork)

    def _begin_after_fork(self) -> None:
        self._busy = threading.Lock()
        self._process = None  # the parent's, which serves the parent

    def run(
        self,
        kernel: str,
        executable: bytes,
        arguments: Sequence[Argument],
        geometry: Geometry,
        threadgroup_memory: Mapping[int, int],
    ) -> list[np.ndarray]:
        """The bytes of each written buffer. Raises what the launch raises, KernelFault if it died."""
        own = tuple(replace(a, owner=None) for a in arguments)
        with self._busy:
            try:
                answer = self._ask(Request(executable, own, geometry, dict(threadgroup_memory)))
            except (EOFError, OSError):
                self.stop()
                raise KernelFault(f"Kernel '{kernel}' took its helper process with it.") from None
            except BaseException:
                self.stop()
                raise
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, str):
            raise KernelFault(
                f"Kernel '{kernel}' brought down the process it was isolated in ({answer}); "
                "this one is untouched."
            )
        return answer

    def _ask(self, request: Request) -> Any:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                    env=_environment(),
                )
            except OSError as problem:
                text = f"The process to isolate kernels in could not be started: {problem}."
                raise EngineError(text) from None
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        _send(process.stdin, pickle.dumps(request))
        return pickle.loads(_receive(process.stdout))

    def stop(self) -> None:
        """End the helper and its child, if there is one."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:  # not waited for: its group is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@functools.cache
def helper() -> Helper:
    """The one helper of this process."""
    return Helper()


def _environment() -> dict[str, str]:
    # The helper imports the lab from where this process has it.
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _send(stream: IO[bytes], data: bytes) -> None:
    stream.write(struct.pack("<Q", len(data)))
    stream.write(data)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    size = struct.unpack("<Q", head)[0]
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


# ---- in the helper ---------------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests on standard input until it ends: the helper's main function."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write where answers go
    runtime()  # the children have it from here, before they load a kernel
    while True:
        try:
            request = pickle.loads(_receive(source))
        except EOFError:
            return
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            os.close(sink.fileno())  # answers end with the helper
            with os.fdopen(writing, "wb") as stream:
                stream.write(pickle.dumps(_launch(request)))
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb", buffering=0) as stream:
            answer = _await(stream, source)
        if answer is None:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if answer is None:
            return
        if status:
            answer = pickle.dumps(_ending(status))
        _send(sink, answer)


def _await(stream: IO[bytes], source: IO[bytes]) -> bytes | None:
    """All of ``stream``; None when ``source`` ends first, because the process that asked is gone."""
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([stream, source], [], [])
        if stream not in ready:  # nobody asks before the last answer is there
            return None
        part = stream.read(1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _ending(status: int) -> str:
    """How a process ended, in words."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _launch(request: Request) -> Any:
    try:
        executable = pickle.loads(request.executable)
        binding = executable.bind(request.arguments)
        memory = request.threadgroup_memory
        return binding.launch(request.geometry, memory, lambda _, block: block.data.copy())
    except LabError as problem:
        return problem
    except Exception as problem:
        return EngineError(f"The launch in a process of its own failed: {problem!r}.")
