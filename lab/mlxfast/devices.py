"""The GPU of a machine that has none: devices and streams as MLX has them where Metal is available.

MLX here knows only the CPU. A GPU device is therefore a device in name whose work MLX does on the CPU, and a
GPU stream one of MLX's CPU streams that is remembered as one. Every function takes and gives what MLX's
function of the same name does.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import mlx.core as mx

GPU = mx.Device(mx.gpu, 0)
CPU = mx.Device(mx.cpu, 0)

# MLX's own, taken before anything stands in their place.
_stream = mx.stream
_new_stream = mx.new_stream
_new_thread_local_stream = mx.new_thread_local_stream
_new_thread_unsafe_stream = mx.new_thread_unsafe_stream
_default_stream = mx.default_stream
_set_default_stream = mx.set_default_stream
_device_info = mx.device_info
_device_count = mx.device_count
_is_available = mx.is_available
_synchronize = mx.synchronize
_clear_streams = mx.clear_streams
_device_of = {kind: kind.device for kind in (mx.Stream, mx.ThreadLocalStream)}


class _State(threading.local):
    """A thread's GPU streams, by how MLX prints the CPU streams they are."""

    default: Any = None


_state = _State()
_gpu_streams: set[tuple[type, str]] = set()
_default = [GPU]


def is_gpu(where: Any) -> bool:
    """Whether a device or stream is the GPU's; None, which is no choice, is."""
    if where is None or where == mx.gpu:
        return True
    if isinstance(where, mx.Device):
        return where.type == mx.gpu
    if isinstance(where, mx.Stream | mx.ThreadLocalStream):
        return (type(where), repr(where)) in _gpu_streams
    return False


def theirs(where: Any) -> Any:
    """What MLX takes for a device or stream: the CPU for the GPU's devices, all else as it is."""
    if isinstance(where, mx.Device | mx.DeviceType) and is_gpu(where):
        return mx.cpu
    return where


def theirs_for_kernels(where: Any) -> Any:
    """What MLX's custom kernels take for a device or stream: the GPU for what is the GPU's."""
    return mx.gpu if is_gpu(where) else where


def device(stream: Any) -> mx.Device:
    """The device of a stream."""
    if (type(stream), repr(stream)) in _gpu_streams:
        return GPU
    return _device_of[type(stream)].__get__(stream)


def taking_streams(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of MLX, whose ``stream`` may be the GPU."""

    @functools.wraps(function)
    def on_the_cpu(*args: Any, **named: Any) -> Any:
        if "stream" in named:
            named["stream"] = theirs(named["stream"])
        elif args and isinstance(args[-1], mx.Device | mx.DeviceType):
            args = (*args[:-1], theirs(args[-1]))
        return function(*args, **named)

    return on_the_cpu


# ---- MLX's functions ------------------------------------------------------------------------------------


def default_device() -> mx.Device:
    return _default[0]


def set_default_device(device: mx.Device | mx.DeviceType) -> None:
    if not isinstance(device, mx.Device | mx.DeviceType):
        raise TypeError(f"set_default_device takes a Device or a DeviceType, not {type(device).__name__}.")
    _default[0] = _device(device)


def _device(where: Any) -> mx.Device:
    return mx.Device(where, 0) if isinstance(where, mx.DeviceType) else where


def is_available(device: Any) -> bool:
    return _device(device) == GPU if is_gpu(device) else _is_available(device)


def device_count(device_type: Any) -> int:
    return 1 if is_gpu(device_type) else _device_count(device_type)


def device_info(d: Any = None) -> dict[str, str | int]:
    where = default_device() if d is None else d
    return gpu_info() if is_gpu(where) else _device_info(where)


def gpu_info() -> dict[str, str | int]:
    """What MLX says about a GPU of the first family that runs all this: an M1 with this machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "architecture": "applegpu_g13s",
        "device_name": "Apple M1 (Metal kernel lab on the CPU)",
        "max_buffer_length": memory * 3 // 4,
        "max_recommended_working_set_size": memory * 3 // 4,
        "memory_size": memory,
        "resource_limit": 499000,
    }


def new_stream(device: Any) -> Any:
    return _made(_new_stream, device)


def new_thread_local_stream(device: Any) -> Any:
    return _made(_new_thread_local_stream, device)


def new_thread_unsafe_stream(device: Any) -> Any:
    return _made(_new_thread_unsafe_stream, device)


def _made(make: Callable[[Any], Any], where: Any) -> Any:
    made = make(theirs(where))
    if is_gpu(where):
        _gpu_streams.add((type(made), repr(made)))
    return made


def default_stream(device: Any) -> Any:
    if not is_gpu(device):
        return _default_stream(device)
    if _state.default is None:
        _state.default = new_stream(mx.gpu)
    return _state.default


def set_default_stream(stream: Any) -> None:
    if isinstance(stream, mx.Stream) and is_gpu(stream):
        _state.default = stream
    else:
        _set_default_stream(stream)


def clear_streams() -> None:
    _state.default = None
    _clear_streams()


def synchronize(stream: Any = None) -> None:
    _synchronize(theirs(stream))


class StreamContext:
    """``mx.stream``: the default device and stream within a ``with``."""

    def __init__(self, where: Any) -> None:
        self._where = GPU if is_gpu(where) else CPU
        self._theirs = _stream(theirs(where))

    def __enter__(self) -> None:
        self._before = default_device()
        _default[0] = self._where
        self._theirs.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        problem: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        _default[0] = self._before
        self._theirs.__exit__(kind, problem, trace)


def stream(s: Any) -> StreamContext:
    return StreamContext(s)


def begin() -> None:
    """The state in which MLX starts where it has a GPU."""
    _default[0] = GPU
