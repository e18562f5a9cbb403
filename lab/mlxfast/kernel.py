"""``metal_kernel``: MLX's custom kernels, with MLX's own rules for what they take and give."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from ..engines.protocol import MAX_THREADS, Argument, Executable, Geometry, Triple
from . import devices
from .signature import SMALL, Body, Generated, Input, TemplateValue, generate
from .source import executable

_theirs = mx.fast.metal_kernel  # taken before anything stands in its place
HAS_METAL = mx.metal.is_available()

_NO_METAL = "[metal_kernel] No Metal back-end."
_TRACED = "during function transformations"


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, str] | None = None,
) -> Callable[..., list[mx.array]]:
    """A custom Metal kernel from the body of a function, as ``mx.fast.metal_kernel`` makes it.

    Parameters, rules, results and errors are MLX's own; its documentation is this function's. The kernel
    that comes back is called with ``inputs``, ``output_shapes``, ``output_dtypes``, ``grid`` (threads),
    ``threadgroup`` and, where wanted, ``template``, ``init_value``, ``verbose`` and ``stream``, all by name;
    it gives a list of arrays. Where MLX has Metal this is MLX's kernel itself; elsewhere the lab runs it.

    Raises ValueError and TypeError as MLX does, CompileError with the line of ``source`` or ``header``, and
    KernelFault when the kernel goes wrong. Outputs hold no sensible values before the kernel writes them,
    unless ``init_value`` is given.
    """
    arguments = (
        name, input_names, output_names, source, header, ensure_row_contiguous, atomic_outputs,
        compile_options,
    )  # fmt: skip
    theirs: Any = _theirs(*arguments)  # refuses what MLX refuses
    if HAS_METAL:
        return theirs
    math = (compile_options or {}).get("math_mode", "safe")
    body = Body(name, tuple(input_names), tuple(output_names), source, header, bool(atomic_outputs))
    return MetalKernel(theirs, body, math, bool(ensure_row_contiguous))


@dataclass(frozen=True)
class _Variant:
    """A kernel for inputs and outputs of certain kinds."""

    generated: Generated
    inputs: tuple[tuple[int, str, tuple[str, ...]], ...]
    """Of each input: its buffer index, its name, and what follows it of shape, strides and ndim."""
    outputs: tuple[tuple[int, str, str], ...]
    """Of each output: its buffer index, its name, its dtype's name."""


@dataclass
class MetalKernel:
    """A custom kernel that runs without Metal. Made by ``metal_kernel``; called as MLX's own."""

    theirs: Callable[..., list[mx.array]]
    body: Body
    math: str
    ensure_row_contiguous: bool
    _variants: dict[Any, _Variant] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, *args: Any, **named: Any) -> list[mx.array]:
        """Run the kernel: the arguments, the list of arrays and the errors are MLX's."""
        where = named.get("stream")
        if where is not None:
            named["stream"] = devices.theirs_for_kernels(where)
        try:
            return self.theirs(*args, **named)  # refuses what MLX refuses; gives a result where MLX exports
        except RuntimeError as problem:
            if str(problem) != _NO_METAL:
                raise
        if where is not None and not devices.is_gpu(where):
            raise ValueError("[metal_kernel] Only supports the GPU.")
        return self._call(**named)

    def _call(
        self,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        template: Sequence[tuple[str, TemplateValue]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        kinds = tuple((x.dtype, x.ndim == 0, x.size < SMALL) for x in arrays)
        values = tuple((n, v) for n, v in template or ())
        key = (kinds, tuple(output_dtypes), values, tuple(type(v) for _, v in values))
        variant = self._variants.get(key)
        if variant is None:
            variant = self._variants[key] = self._variant(kinds, output_dtypes, values)
        if verbose:
            called = self.body.name
            print(f"Generated source code for `{called}`:\n```\n{variant.generated.text}\n```", flush=True)
        if any(x.dtype == mx.float64 for x in arrays) or mx.float64 in output_dtypes:
            raise ValueError("float64 is not supported on the GPU")
        _evaluate(arrays, self.body.name)
        geometry = _geometry(tuple(grid), tuple(threadgroup))
        bound = self._bind(variant, arrays, [tuple(map(int, s)) for s in output_shapes], init_value)
        run = executable(self.body.name, variant.generated, self.body.header, self.math)
        results = _run(run, bound, geometry)
        return list(_derived(arrays, results))

    def _variant(
        self,
        kinds: Sequence[tuple[mx.Dtype, bool, bool]],
        dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, TemplateValue]],
    ) -> _Variant:
        generated = generate(self.body, [Input(*k) for k in kinds], dtypes, template)
        index = 0
        inputs, outputs = [], []
        for name, (_, scalar, _), extras in zip(self.body.inputs, kinds, self.body.extras, strict=True):
            inputs.append((index, name, () if scalar else extras))
            index += 1 + (0 if scalar else len(extras))
        for name, dtype in zip(self.body.outputs, dtypes, strict=True):
            outputs.append((index, name, str(dtype).rsplit(".", 1)[-1]))
            index += 1
        return _Variant(generated, tuple(inputs), tuple(outputs))

    def _bind(
        self,
        variant: _Variant,
        arrays: Sequence[mx.array],
        shapes: Sequence[tuple[int, ...]],
        init_value: float | None,
    ) -> list[Argument]:
        bound: list[Argument] = []
        for (index, name, extras), x in zip(variant.inputs, arrays, strict=True):
            view = _memory(x)
            if self.ensure_row_contiguous and not view.flags.c_contiguous:
                view = np.ascontiguousarray(view)
            size = view.itemsize
            bound.append(Argument(index, name, False, view.nbytes, view, (x, view), element_size=size))
            for extra in extras:
                index += 1
                if extra == "shape":
                    about = np.array(view.shape, np.int32)
                elif extra == "strides":
                    about = np.array([s // size for s in view.strides], np.int64)
                else:
                    about = np.array([view.ndim], np.int32)
                bound.append(Argument(index, f"{name}_{extra}", False, about.nbytes, about, about))
        for (index, name, dtype), shape in zip(variant.outputs, shapes, strict=True):
            start = _start(dtype, shape, init_value)
            size = _SIZES[dtype]
            bound.append(
                Argument(index, name, True, start.size, start, None, shape, dtype, element_size=size)
            )
        return bound


# ---- memory ---------------------------------------------------------------------------------------------

_SIZES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8,
    "uint64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "complex64": 8,
}  # fmt: skip


def _memory(x: mx.array) -> np.ndarray:
    """An evaluated array's own memory, in its shape and strides; bfloat16 as its bits."""
    if x.dtype != mx.bfloat16:
        return np.asarray(x)
    buffer: Any = x
    view = memoryview(buffer)  # whose format NumPy does not know
    if view.c_contiguous and x.size:
        return np.frombuffer(view.cast("B"), np.uint16).reshape(x.shape)
    return np.asarray(x.view(mx.uint16))


@functools.lru_cache(maxsize=256, typed=True)
def _start(dtype: str, shape: tuple[int, ...], init_value: float | None) -> np.ndarray:
    """The bytes an output holds before the kernel runs: ``init_value``, or what no one takes for a result."""
    count = int(np.prod(shape, dtype=np.int64))
    if init_value is None:  # all bits set: NaN in a float, -1 in an int
        return np.broadcast_to(np.uint8(1 if dtype == "bool" else 0xFF), count * _SIZES[dtype])
    value = mx.array(init_value, mx.float32).astype(getattr(mx, "bool_" if dtype == "bool" else dtype))
    element = np.asarray(value.view(mx.uint16) if dtype == "bfloat16" else value)
    data = element.reshape(1).view(np.uint8)
    if not data.any():
        return np.broadcast_to(np.uint8(0), count * data.size)
    return np.broadcast_to(data, (count, data.size)).reshape(-1)


# ---- one dispatch ---------------------------------------------------------------------------------------


def _evaluate(arrays: Sequence[mx.array], called: str) -> None:
    try:
        mx.eval(*arrays)
    except ValueError as problem:
        if _TRACED not in str(problem):
            raise
        raise ValueError(
            f"[metal_kernel] Kernel '{called}' was called under mx.vmap or mx.compile, where MLX does not "
            "let its inputs be evaluated: give the kernel the batch as an axis of its inputs, and call it "
            "from a function that is not compiled (lab.install() has compiled functions run as they are)."
        ) from None


@functools.lru_cache(maxsize=256)
def _geometry(grid: tuple[int, ...], threadgroup: tuple[int, ...]) -> Geometry | None:
    """The dispatch that MLX makes of grid and threadgroup; None where it has no threads."""
    x, y, z = map(int, threadgroup)
    if x * y * z > MAX_THREADS:
        raise ValueError(
            f"Thread group size ({x * y * z}) is greater than  the maximum allowed threads per threadgroup "
            f"({MAX_THREADS})."
        )
    if min(*grid, x, y, z) < 0:
        raise ValueError(f"[metal_kernel] An extent below 0: grid={grid}, threadgroup={threadgroup}.")
    if 0 in grid:
        return None
    if 0 in threadgroup:
        raise ValueError(f"[metal_kernel] threadgroup={threadgroup} has an extent of 0.")
    gx, gy, gz = map(int, grid)
    clipped: Triple = (min(x, gx), min(y, gy), min(z, gz))
    return Geometry((gx, gy, gz), clipped)


_NOTHING = Geometry((0, 0, 0), (1, 1, 1))


def _run(run: Executable, bound: Sequence[Argument], geometry: Geometry | None) -> list[mx.array]:
    return run.bind(bound).run(geometry or _NOTHING, {})


# ---- transformations ------------------------------------------------------------------------------------


def _derived(arrays: Sequence[mx.array], results: list[mx.array]) -> Sequence[mx.array]:
    """``results`` as arrays that MLX knows to come from ``arrays``: gradients through them are refused.

    Without it they would be constants to MLX, and their gradients silently zero.
    """
    if not arrays:
        return results
    derived: Any = mx.custom_function(lambda *_: results)
    derived.vjp(_no_vjp)
    derived.jvp(_no_jvp)
    derived.vmap(_no_vmap)
    return derived(*arrays)


def _no_vjp(*_: Any) -> Any:
    raise ValueError("[Primitive::vjp] Not implemented for CustomKernel.")


def _no_jvp(*_: Any) -> Any:
    raise ValueError("[Primitive::jvp] Not implemented for CustomKernel.")


def _no_vmap(*_: Any) -> Any:
    raise ValueError("[Primitive::vmap] Not implemented for CustomKernel.")
