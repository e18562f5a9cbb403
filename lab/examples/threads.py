"""Examples whose threads work each on its own: at most they count in the same atomics."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..arguments import empty
from ..kernel import Kernel
from .example import Example, Inputs

# ---- axpy ------------------------------------------------------------------------------------------------


def _axpy_inputs(rng: np.random.Generator) -> Inputs:
    n = int(rng.integers(1, 5000))
    x, y = rng.standard_normal((2, n)).astype(np.float32)
    return {"x": x, "y": y, "a": float(np.float32(rng.standard_normal()))}


def _axpy(kernel: Kernel, v: Inputs) -> mx.array:
    return kernel(mx.array(v["x"]), mx.array(v["y"]), v["a"], grid=v["x"].size, threadgroup=256)


def _axpy_reference(v: Inputs) -> np.ndarray:
    return v["a"] * v["x"].astype(np.float64) + v["y"]


# ---- heat_step -------------------------------------------------------------------------------------------


def _heat_inputs(rng: np.random.Generator) -> Inputs:
    rows, columns = (int(n) for n in rng.integers(1, 70, 2))
    return {"now": rng.standard_normal((rows, columns)).astype(np.float32), "rate": 0.2}


def _heat(kernel: Kernel, v: Inputs) -> mx.array:
    rows, columns = v["now"].shape
    out = empty((rows, columns), mx.float32)
    return kernel(mx.array(v["now"]), out, v["rate"], grid=(columns, rows), threadgroup=(8, 8))


def _heat_reference(v: Inputs) -> np.ndarray:
    now = v["now"].astype(np.float64)
    wide = np.pad(now, 1, mode="edge")
    around = wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:]
    return now + np.float64(np.float32(v["rate"])) * (around - 4 * now)


# ---- transpose -------------------------------------------------------------------------------------------


def _transpose_inputs(rng: np.random.Generator) -> Inputs:
    batch, rows, columns, pad = (int(n) for n in rng.integers((1, 1, 1, 0), (4, 40, 40, 5)))
    stored = rng.standard_normal((batch, rows, columns + pad)).astype(np.float32)
    return {"stored": stored, "columns": columns}


def _transpose(kernel: Kernel, v: Inputs) -> mx.array:
    batch, rows, stride = v["stored"].shape
    columns = v["columns"]
    args = {
        "rows": rows,
        "columns": columns,
        "row_stride": (stride, rows),
        "batch_stride": (rows * stride, columns * rows),
    }
    grid = (-(-columns // 16) * 16, -(-rows // 16) * 16, batch)  # whole threadgroups, so the kernel checks
    out = empty((batch, columns, rows), mx.float32)
    return kernel(mx.array(v["stored"]), out, args, grid=grid, threadgroup=(16, 16))


def _transpose_reference(v: Inputs) -> np.ndarray:
    return v["stored"][:, :, : v["columns"]].transpose(0, 2, 1).astype(np.float64)


# ---- gather_rows -----------------------------------------------------------------------------------------


def _gather_inputs(rng: np.random.Generator) -> Inputs:
    table, picked, groups = (int(n) for n in rng.integers(1, (30, 20, 4)))
    return {
        "weights": rng.integers(-127, 128, (table, groups * 64)).astype(np.int8),
        "scales": rng.uniform(0.001, 0.02, (table, groups)).astype(np.float16),
        "rows": rng.integers(0, table, picked).astype(np.uint32),
    }


def _gather(kernel: Kernel, v: Inputs) -> mx.array:
    width, picked = v["weights"].shape[1], v["rows"].size
    inputs = (mx.array(v[name]) for name in ("weights", "scales", "rows"))
    return kernel(*inputs, empty((picked, width), mx.float32), width, grid=(width // 4, picked))


def _gather_reference(v: Inputs) -> np.ndarray:
    scales = np.repeat(v["scales"].astype(np.float64), 64, axis=1)
    return (v["weights"] * scales)[v["rows"]]


# ---- histogram -------------------------------------------------------------------------------------------


def _histogram_inputs(rng: np.random.Generator) -> Inputs:
    count, bins = int(rng.integers(1, 20000)), int(rng.integers(1, 64))
    # Multiples of 1/1024 over a power of two: the kernel's float arithmetic finds the bin exactly.
    values = rng.integers(-1500, 1500, count).astype(np.float32) / 1024
    return {"values": values, "bins": 1 << (bins % 7), "low": -1.0, "high": 1.0}


def _histogram(kernel: Kernel, v: Inputs) -> mx.array:
    args = {"count": v["values"].size, "bins": v["bins"], "low": v["low"], "high": v["high"]}
    counts = mx.zeros(v["bins"], mx.uint32)
    return kernel(mx.array(v["values"]), counts, args, grid=-(-v["values"].size // 64) * 64, threadgroup=64)


def _histogram_reference(v: Inputs) -> np.ndarray:
    x = v["values"].astype(np.float64)
    x = x[(x >= v["low"]) & (x < v["high"])]
    bins = np.floor((x - v["low"]) / (v["high"] - v["low"]) * v["bins"]).astype(int)
    return np.bincount(bins, minlength=v["bins"])


THREADS: tuple[Example, ...] = (
    Example("axpy", "axpy.metal", "axpy", "y = a x + y", _axpy_inputs, _axpy, _axpy_reference, 1e-6),
    Example(
        "stencil", "stencil.metal", "heat_step", "heat flow, a five-point stencil",
        _heat_inputs, _heat, _heat_reference, 1e-6,
    ),
    Example(
        "transpose", "transpose.metal", "transpose", "padded batches, driven by a struct",
        _transpose_inputs, _transpose, _transpose_reference, 0.0,
    ),
    Example(
        "gather", "gather.metal", "gather_rows", "8-bit weights, half scales",
        _gather_inputs, _gather, _gather_reference, 1e-6,
    ),
    Example(
        "histogram", "histogram.metal", "histogram", "atomics on device memory",
        _histogram_inputs, _histogram, _histogram_reference, 0.0,
    ),
)  # fmt: skip
