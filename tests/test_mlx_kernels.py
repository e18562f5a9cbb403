"""MLX's own Metal kernels, unmodified, from the headers in its wheel: templates, operators, threadgroups."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import lab

KERNELS = "mlx/backend/metal/kernels"
INCLUDE = Path(mx.__file__).parent / "include"

pytestmark = pytest.mark.skipif(not (INCLUDE / KERNELS).is_dir(), reason="this MLX comes without its headers")


def source(headers: str, instance: str) -> str:
    """Source that includes some of MLX's headers and instantiates a template: its name and arguments."""
    lines = ["#include <metal_stdlib>", "#include <metal_math>", "#include <metal_simdgroup>"]
    lines += [f'#include "{KERNELS}/{header}.h"' for header in ("utils", *headers.split())]
    return "\n".join([*lines, f"instantiate_kernel({instance})\n"])


@pytest.fixture
def kernel(monkeypatch):
    """Instantiates a kernel template of MLX's: headers, template and its arguments."""
    monkeypatch.chdir(INCLUDE)  # where a source without a file finds its includes

    def instantiated(headers: str, template: str) -> lab.Kernel:
        return lab.compile(source(headers, f'"f", {template}')).f

    return instantiated


def test_exponentials(kernel, rng):
    x = rng.uniform(-3, 3, 1000).astype(np.float32)
    f = kernel("unary_ops unary", "unary_v, float, float, Exp, 1")
    out = np.asarray(f(x, lab.empty(1000), 1000, grid=1000))
    assert np.abs(out / np.exp(x.astype(np.float64)) - 1).max() < 1e-6


def test_a_unary_operation_in_bfloat(kernel, rng):
    x = mx.array(rng.standard_normal(100).astype(np.float32)).astype(mx.bfloat16)
    f = kernel("unary_ops unary", "unary_v, bfloat16_t, bfloat16_t, Negative, 1")
    assert mx.array_equal(f(x, lab.empty(100, mx.bfloat16), 100, grid=100), -x)


def test_a_binary_operation(kernel, rng):
    a, b = rng.integers(-50, 50, (2, 100)).astype(np.int32)
    f = kernel("binary_ops binary", "binary_vv, int, int, Maximum, 1")
    assert np.array_equal(f(a, b, lab.empty(100, mx.int32), 100, grid=100), np.maximum(a, b))


def test_a_copy_converts(kernel, rng):
    x = rng.standard_normal(100).astype(np.float32)
    f = kernel("copy", "copy_v, float, half, 1")
    assert np.array_equal(f(x, lab.empty(100, mx.float16), 100, grid=100), x.astype(np.float16))


def test_softmax_of_a_row(kernel, rng):
    x = rng.standard_normal((7, 300)).astype(np.float32)
    f = kernel("softmax", "softmax_single_row, float, float")
    out = np.asarray(f(x, lab.empty((7, 300)), 300, groups=7, threadgroup=96))
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    assert np.abs(out - e / e.sum(1, keepdims=True)).max() < 1e-6


def test_sort_within_a_threadgroup(kernel, rng):
    x = rng.permutation(512).astype(np.float32)
    f = kernel("sort", "block_sort, float, float, false, 128, 4")
    named = {p.name for p in f.signature.buffers}
    assert {"inp", "out", "size_sorted_axis"} <= named
    out = f(
        inp=x,
        out=lab.empty(512),
        size_sorted_axis=512,
        **dict.fromkeys(named & {"in_stride_sorted_axis", "out_stride_sorted_axis"}, 1),
        **dict.fromkeys(named & {"in_stride_segment_axis", "out_stride_segment_axis"}, 512),
        groups=1,
        threadgroup=128,
    )
    assert np.array_equal(out, np.arange(512))


# ---- with MLX's folder to include from, and function constants -------------------------------------------


@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 32), (70, 45, 37)])
def test_a_matrix_product_is_numpy_s(m, n, k, rng):
    text = source(
        "steel/gemm/gemm steel/gemm/kernels/steel_gemm_fused",
        '"product", gemm, float, 32, 32, 16, 2, 2, false, false',
    )
    aligned = {
        f"align_{axis}": size % tile == 0
        for axis, size, tile in zip("MNK", (m, n, k), (32, 32, 16), strict=True)
    }
    flags = {"has_batch": False, "use_out_source": False, "do_axpby": False}
    library = lab.compile(text, include=INCLUDE, constants={**aligned, **flags})
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    tiles = -(-n // 32), -(-m // 32)
    parameters = {
        "M": m, "N": n, "K": k, "lda": k, "ldb": n, "ldd": n, "tiles_n": tiles[0], "tiles_m": tiles[1],
        "batch_stride_a": 0, "batch_stride_b": 0, "batch_stride_d": 0, "swizzle_log": 0,
        "gemm_k_iterations_aligned": k // 16, "batch_ndim": 0,
    }  # fmt: skip
    product = library.product(a, b, lab.empty((m, n)), parameters, groups=(*tiles, 1), threadgroup=(32, 2, 2))
    np.testing.assert_allclose(np.array(product), a @ b, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_sorted_indices_are_numpy_s(dtype, rng):
    kind = {"float32": "float", "bfloat16": "bfloat16_t", "int32": "int"}[dtype]
    text = source("sort", f'"order", block_sort, {kind}, uint, true, 128, 4')
    library = lab.compile(text, include=INCLUDE)
    values = rng.permutation(300).astype(np.float32).reshape(2, 150)
    rows = mx.array(values).astype(getattr(mx, dtype))
    order = library.order(
        rows, lab.empty((2, 150), mx.uint32), 150, 1, 1, 150, 150, groups=(1, 2), threadgroup=128
    )
    assert np.array_equal(np.array(order), np.argsort(np.array(rows.astype(mx.float32)), 1, "stable"))
