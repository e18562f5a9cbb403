"""Examples whose threads work together: barriers, simdgroups and threadgroup memory."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..arguments import empty
from ..kernel import Kernel
from .example import Example, Inputs

# ---- matmul ----------------------------------------------------------------------------------------------


def _matmul_inputs(rng: np.random.Generator) -> Inputs:
    rows, inner, columns = (int(n) for n in rng.integers(1, 70, 3))
    a = rng.standard_normal((rows, inner)).astype(np.float32)
    return {"a": a, "b": rng.standard_normal((inner, columns)).astype(np.float32)}


def _matmul(kernel: Kernel, v: Inputs) -> mx.array:
    (rows, inner), columns = v["a"].shape, v["b"].shape[1]
    args = {"rows": rows, "inner": inner, "columns": columns}
    groups = (-(-columns // 16), -(-rows // 16))
    out = empty((rows, columns), mx.float32)
    return kernel(mx.array(v["a"]), mx.array(v["b"]), out, args, groups=groups, threadgroup=(16, 16))


def _matmul_reference(v: Inputs) -> np.ndarray:
    return v["a"].astype(np.float64) @ v["b"].astype(np.float64)


# ---- softmax ---------------------------------------------------------------------------------------------


def _softmax_inputs(rng: np.random.Generator) -> Inputs:
    rows, columns = int(rng.integers(1, 30)), int(rng.integers(1, 300))
    x = rng.standard_normal((rows, columns)) * rng.choice([0.1, 1.0, 30.0]) + rng.uniform(-200, 200)
    masked = rng.random((rows, columns)) < rng.choice([0.0, 0.3, 0.9, 1.0])
    masked[np.arange(rows), rng.integers(0, columns, rows)] = False  # one of each row stays finite
    return {"x": np.where(masked, -np.inf, x).astype(np.float32)}


def _softmax(kernel: Kernel, v: Inputs) -> mx.array:
    rows, columns = v["x"].shape
    args = {"rows": rows, "columns": columns}
    groups = -(-rows // 4)  # of four simdgroups, so four rows
    return kernel(mx.array(v["x"]), empty((rows, columns)), args, groups=groups, threadgroup=128)


def _softmax_reference(v: Inputs) -> np.ndarray:
    x = v["x"].astype(np.float64)
    weights = np.exp(x - x.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


# ---- scan ------------------------------------------------------------------------------------------------


def _scan_inputs(rng: np.random.Generator) -> Inputs:
    threads = int(rng.choice([32, 96, 1024]))
    tiles = int(rng.choice([1, 3, 4000 // threads]))  # 125 of 32: more than one threadgroup scans at once
    missing = int(rng.choice([0, 1, int(rng.integers(threads))]))  # of the last tile
    return {"x": rng.standard_normal(tiles * threads - missing).astype(np.float32), "threads": threads}


def _scan(kernel: Kernel, v: Inputs) -> mx.array:
    x, threads = mx.array(v["x"]), v["threads"]
    tiles = -(-x.size // threads)
    size = {"groups": tiles, "threadgroup": threads}
    prefix, totals = kernel(x, empty(x.size), empty(tiles), x.size, **size)
    totals = kernel.library["scan_totals"](totals, tiles, groups=1, threadgroup=threads)
    return kernel.library["scan_add"](prefix, totals, x.size, **size)


def _scan_reference(v: Inputs) -> np.ndarray:
    return np.cumsum(v["x"].astype(np.float64))


# ---- radix_histogram -------------------------------------------------------------------------------------


def _radix_inputs(rng: np.random.Generator) -> Inputs:
    count, bits = int(rng.integers(1, 20000)), int(rng.integers(1, 33))
    keys = rng.integers(0, 1 << bits, count, dtype=np.uint32, endpoint=False)
    keys[rng.integers(0, count)] = 0xFFFFFFFF
    return {"keys": keys, "threads": int(rng.choice([64, 200, 1024]))}


def _radix(kernel: Kernel, v: Inputs) -> mx.array:
    keys, threads = mx.array(v["keys"]), v["threads"]
    groups = min(4, -(-keys.size // threads))
    digits = [
        kernel(
            keys, mx.zeros(256, mx.uint32), {"count": keys.size, "shift": shift},
            groups=groups, threadgroup=threads,
        )
        for shift in (0, 8, 16, 24)
    ]  # fmt: skip
    return mx.stack(digits)


def _radix_reference(v: Inputs) -> np.ndarray:
    digits = v["keys"].astype("<u4").view(np.uint8).reshape(-1, 4)
    return np.stack([np.bincount(digit, minlength=256) for digit in digits.T])


# ---- reduction -------------------------------------------------------------------------------------------


def _reduction_inputs(rng: np.random.Generator) -> Inputs:
    # Positive, so that an error relative to the sum says something.
    return {"x": rng.exponential(size=int(rng.integers(1, 50000))).astype(np.float32)}


def _reduction(kernel: Kernel, v: Inputs) -> mx.array:
    x = mx.array(v["x"])
    groups = min(8, -(-x.size // 1024))
    partials = kernel(x, empty(groups), x.size, groups=groups, threadgroup=1024)
    return kernel(partials, empty(1), groups, groups=1, threadgroup=1024)


def _reduction_reference(v: Inputs) -> np.ndarray:
    return v["x"].astype(np.float64).sum(keepdims=True)


# ---- flash_decode ----------------------------------------------------------------------------------------

_HEAD_DIM = 128
_GROUP = 4  # query heads that share a key head


def _decode_inputs(rng: np.random.Generator) -> Inputs:
    # With few keys some stripes are empty.
    heads, keys, stripes = (int(n) for n in rng.integers(1, (4, rng.choice([10, 200]), 12)))
    shape = (heads, keys, _HEAD_DIM)
    return {
        "queries": rng.standard_normal((heads, _GROUP, _HEAD_DIM)).astype(np.float32),
        "keys": rng.standard_normal(shape).astype(np.float16),
        "values": rng.standard_normal(shape).astype(np.float16),
        "stripes": stripes,
        "scale": float(np.float32(_HEAD_DIM**-0.5)),
    }


def _decode(kernel: Kernel, v: Inputs) -> mx.array:
    stripes = v["stripes"]
    heads, keys, _ = v["keys"].shape
    args = {"keys": keys, "stripes": stripes, "stripe_length": -(-keys // stripes), "scale": v["scale"]}
    query_heads = heads * _GROUP
    largest, sums, partials = kernel(
        *(mx.array(v[name]) for name in ("queries", "keys", "values")),
        empty((query_heads, stripes)),
        empty((query_heads, stripes)),
        empty((query_heads, stripes, _HEAD_DIM)),
        args,
        groups=(-(-stripes // 4), heads),
        threadgroup=128,
    )
    merge = kernel.library["flash_decode_merge"]
    out = empty((query_heads, _HEAD_DIM))
    return merge(largest, sums, partials, out, stripes, groups=query_heads, threadgroup=32)


def _decode_reference(v: Inputs) -> np.ndarray:
    queries, keys, values = (v[name].astype(np.float64) for name in ("queries", "keys", "values"))
    scores = v["scale"] * np.einsum("hgd,hkd->hgk", queries, keys)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hgk,hkd->hgd", weights, values).reshape(-1, _HEAD_DIM)


THREADGROUPS: tuple[Example, ...] = (
    Example(
        "matmul", "matmul.metal", "matmul", "matrix product, tiles in threadgroup memory",
        _matmul_inputs, _matmul, _matmul_reference, 1e-6,
    ),
    Example(
        "softmax", "softmax.metal", "softmax", "a simdgroup per row, simd_max and simd_sum",
        _softmax_inputs, _softmax, _softmax_reference, 1e-6,
    ),
    Example(
        "scan", "scan.metal", "scan_tiles", "prefix sums, longer than a threadgroup",
        _scan_inputs, _scan, _scan_reference, 1e-6,
    ),
    Example(
        "radix", "radix_histogram.metal", "radix_histogram", "8-bit digits, atomics in threadgroup memory",
        _radix_inputs, _radix, _radix_reference, 0.0,
    ),
    Example(
        "reduction", "reduction.metal", "reduce_sum", "a sum on two levels, 1024 threads",
        _reduction_inputs, _reduction, _reduction_reference, 1e-6,
    ),
    Example(
        "decode", "flash_decode.metal", "flash_decode", "attention of one token, stripes and their merge",
        _decode_inputs, _decode, _decode_reference, 2e-6,
    ),
)  # fmt: skip
