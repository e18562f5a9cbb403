"""MLX with a Metal that it does not have: ``install``, ``uninstall``, ``installed``."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from . import devices
from .kernel import HAS_METAL, metal_kernel

_MISSING = object()
_compile = mx.compile
_rope = mx.fast.rope
_gather_mm = mx.gather_mm


class UncompiledWarning(UserWarning):
    """Functions given to ``mx.compile`` run as they are, because kernels evaluate their inputs."""


_replaced: list[tuple[Any, str, Any]] = []
_was_compiling = [False]
_warned = [False]


def install() -> bool:
    """Put ``lab.metal_kernel`` in the place of MLX's, and have MLX say that it has Metal.

    ``mx.metal.is_available()``, the default device, devices, streams and ``mx.device_info`` answer as on a
    Mac, so call it before packages that ask are imported. Functions given to ``mx.compile`` then run
    uncompiled, with one warning. Whether it was done: False where it was before, and where MLX has Metal.
    """
    if _replaced or HAS_METAL:
        return False
    devices.begin()
    for owner, name, value in _replacements():
        _replaced.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)
    _warned[0] = False
    _was_compiling[0] = _compiles()
    mx.disable_compile()  # functions that were compiled before, too
    return True


def uninstall() -> None:
    """Take ``install`` back: MLX is as it was."""
    if not _replaced:
        return
    while _replaced:
        owner, name, value = _replaced.pop()
        if value is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    if _was_compiling[0]:
        mx.enable_compile()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """``with lab.installed():`` installs for its length; nested in an installation it changes nothing."""
    mine = install()
    try:
        yield
    finally:
        if mine:
            uninstall()


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """What stands where in MLX while installed: owner, name, value."""
    yield mx.fast, "metal_kernel", metal_kernel
    yield mx.fast, "rope", _rope_of_a_gpu
    yield mx, "gather_mm", _gather_mm_of_a_gpu
    yield mx.metal, "is_available", lambda: True
    yield mx.metal, "device_info", devices.gpu_info
    yield mx, "compile", _uncompiled
    for name in (
        "clear_streams", "default_device", "default_stream", "device_count", "device_info", "is_available",
        "new_stream", "new_thread_local_stream", "new_thread_unsafe_stream", "set_default_device",
        "set_default_stream", "stream", "synchronize",
    ):  # fmt: skip
        yield mx, name, getattr(devices, name)
    yield mx, "StreamContext", devices.StreamContext
    for kind in (mx.Stream, mx.ThreadLocalStream):
        yield kind, "device", property(devices.device)
    done = {
        "default_stream",
        "set_default_stream",
        "synchronize",
        "stream",
        "metal_kernel",
        "rope",
        "gather_mm",
    }
    for owner in (mx, mx.fast, mx.fft, mx.linalg, mx.random, mx.array):
        for name, value in list(vars(owner).items()):
            if name not in done and _takes_a_stream(value):
                yield owner, name, devices.taking_streams(value)


def _takes_a_stream(value: Any) -> bool:
    """Whether ``value`` is a function of MLX with a parameter ``stream``."""
    head = (getattr(value, "__doc__", None) or "").strip().split("\n", 1)[0]
    return type(value).__name__ in ("nb_func", "nb_method") and "stream: " in head


def _compiles() -> bool:
    """Whether MLX compiles functions now: then a function sees arrays that it cannot evaluate."""
    seen = [False]

    def probe(x: mx.array) -> mx.array:
        try:
            mx.eval(x)
        except ValueError:
            seen[0] = True
        return x

    _compile(probe)(mx.array(0))
    return seen[0]


def _rope_of_a_gpu(a: mx.array, *args: Any, stream: Any = None, **named: Any) -> mx.array:
    """``mx.fast.rope`` as the GPU computes it: in float32 for every dtype; the CPU rounds the angles."""
    if not _on_the_gpu(stream):
        return _rope(a, *args, stream=stream, **named)
    return _rope(a.astype(mx.float32), *args, stream=devices.theirs(stream), **named).astype(a.dtype)


def _gather_mm_of_a_gpu(a: mx.array, b: mx.array, *args: Any, stream: Any = None, **named: Any) -> mx.array:
    """``mx.gather_mm`` for every dtype, as on the GPU; the CPU has it for float32 only."""
    dtype = mx.result_type(a, b)
    if dtype not in (mx.float16, mx.bfloat16) or not _on_the_gpu(stream):
        return _gather_mm(a, b, *args, stream=devices.theirs(stream), **named)
    wide = (x.astype(mx.float32) for x in (a, b))
    return _gather_mm(*wide, *args, stream=devices.theirs(stream), **named).astype(dtype)


def _on_the_gpu(stream: Any) -> bool:
    return devices.is_gpu(devices.default_device() if stream is None else stream)


def _uncompiled(
    fun: Callable[..., Any],
    inputs: object | None = None,
    outputs: object | None = None,
    shapeless: bool = False,
) -> Callable[..., Any]:
    """``mx.compile`` while installed."""

    @functools.wraps(fun)
    def as_it_is(*args: Any, **named: Any) -> Any:
        if not _warned[0]:
            _warned[0] = True
            warnings.warn(
                "functions given to mx.compile run uncompiled while lab.install() is in effect: kernels "
                "evaluate their inputs, which MLX forbids in compiled functions",
                UncompiledWarning,
                stacklevel=2,
            )
        return fun(*args, **named)

    return as_it_is
