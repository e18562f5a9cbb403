"""Kernels of MLX's own headers, a family at a time, beside MLX's result on the CPU; every header compiles."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import lab

KERNELS = "mlx/backend/metal/kernels"
INCLUDE = Path(mx.__file__).parent / "include"

pytestmark = pytest.mark.skipif(not (INCLUDE / KERNELS).is_dir(), reason="this MLX comes without its headers")

# What MLX's own sources include before a header that cannot stand alone.
BEFORE = {
    "fp_quantized": "steel/gemm/gemm quantized_utils",
    "quantized": "steel/gemm/gemm quantized_utils",
    "indexing/scatter": "atomic",
    "indexing/scatter_axis": "atomic",
    "reduce": "atomic reduction/ops",
    "reduction/ops": "atomic",
    "reduction/reduce_all": "atomic reduction/ops",
    "reduction/reduce_col": "atomic reduction/ops",
    "reduction/reduce_row": "atomic reduction/ops",
    "searchsorted": "sort",
    "steel/conv/loader": "steel/gemm/mma steel/conv/params",
    "steel/conv/loaders/loader_channel_l": "steel/gemm/mma steel/conv/params",
    "steel/conv/loaders/loader_channel_n": "steel/gemm/mma steel/conv/params",
    "steel/conv/loaders/loader_general": "steel/gemm/mma steel/conv/params",
    "steel/conv/kernels/steel_conv": "steel/gemm/mma steel/conv/conv steel/conv/params",
    "steel/conv/kernels/steel_conv_3d": "steel/gemm/mma steel/conv/conv steel/conv/params",
    "steel/conv/kernels/steel_conv_general": "steel/gemm/mma steel/conv/conv steel/conv/params",
    "steel/gemm/kernels/steel_gemm_fused": "steel/gemm/gemm",
    "steel/gemm/kernels/steel_gemm_gather": "steel/gemm/gemm",
    "steel/gemm/kernels/steel_gemm_masked": "steel/gemm/gemm steel/defines",
    "steel/gemm/kernels/steel_gemm_segmented": "steel/gemm/gemm",
    "steel/gemm/kernels/steel_gemm_splitk": "steel/gemm/gemm",
}


def includes(*headers: str) -> str:
    names = [name for header in headers for name in (*BEFORE.get(header, "").split(), header)]
    return "".join(f'#include "{KERNELS}/{name}.h"\n' for name in names)


def headers() -> list[str]:
    root = INCLUDE / KERNELS
    found = (str(p.relative_to(root).with_suffix("")) for p in sorted(root.rglob("*.h")))
    return [name for name in found if "nax" not in name]  # those need Metal 4's tensors


@pytest.mark.slow
@pytest.mark.parametrize("header", headers() if INCLUDE.is_dir() else [])
def test_header_compiles(header):
    kernel = lab.metal_kernel(
        name="empty", input_names=[], output_names=["out"], header=includes(header), source="out[0] = 1;"
    )
    size = dict(grid=(1, 1, 1), threadgroup=(1, 1, 1))
    assert kernel(inputs=[], output_shapes=[()], output_dtypes=[mx.float32], **size)[0].item() == 1


@pytest.fixture
def kernel():
    """Instantiates a kernel template of MLX's: headers, template and its arguments."""

    def instantiated(headers: str, template: str, **constants: int | bool) -> lab.Kernel:
        text = includes("utils", *headers.split()) + f'instantiate_kernel("f", {template})\n'
        return lab.compile(text, include=[INCLUDE], constants=constants).f

    return instantiated


def test_reduction_of_everything(kernel, rng):
    x = rng.standard_normal(5000).astype(np.float32)
    f = kernel("reduce", "all_reduce, float, float, Sum<float>")
    out = f(x, lab.empty(1), 5000, 5000, groups=1, threadgroup=256)
    assert np.abs(out - mx.sum(mx.array(x))).item() < 1e-2


def test_reduction_of_rows(kernel, rng):
    x = rng.standard_normal((6, 700)).astype(np.float32)
    f = kernel("reduce", "row_reduce_simple, float, float, Max<float>")
    out = f(x, lab.empty(6), 700, 6, groups=(1, 6), threadgroup=128)
    assert mx.array_equal(out, mx.array(x).max(axis=1))


@pytest.mark.parametrize("reverse", (False, True))
def test_scan_along_the_last_axis(kernel, rng, reverse):
    x = rng.standard_normal((3, 1000)).astype(np.float32)
    f = kernel("scan", f"contiguous_scan, float, float, CumSum<float>, 4, true, {str(reverse).lower()}")
    out = f(x, lab.empty((3, 1000)), 1000, groups=(1, 3), threadgroup=256)
    assert mx.allclose(out, mx.cumsum(mx.array(x), axis=1, reverse=reverse), atol=1e-3)


def test_fft_of_a_power_of_two(kernel, rng):
    x = (rng.standard_normal(64) + 1j * rng.standard_normal(64)).astype(np.complex64)
    steps = {
        f"{who}_{radix}_steps_": 0 for who in ("radix", "rader") for radix in (13, 11, 8, 7, 6, 5, 4, 3, 2)
    }
    more = dict(inv_=False, is_power_of_2_=True, elems_per_thread_=8, rader_m_=1)
    f = kernel(
        "fft", "fft, 256, float2, float2", **more, **{**steps, "radix_8_steps_": 2},
        use_bluestein_twiddle_table_=False,
    )  # fmt: skip
    out = f(x.view(np.float32), lab.empty(128), 64, 1, grid=(1, 1, 8), threadgroup=(1, 1, 8))
    assert np.abs(np.asarray(out).view(np.complex64) - np.asarray(mx.fft.fft(mx.array(x)))).max() < 1e-4


def test_steel_matrix_product(kernel, rng):
    m, n, k = 64, 96, 80
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    flags = dict(has_batch=False, use_out_source=False, do_axpby=False)
    f = kernel(
        "steel/gemm/kernels/steel_gemm_fused", "gemm, float, 32, 32, 16, 2, 2, false, false",
        **flags, align_M=True, align_N=True, align_K=True,
    )  # fmt: skip
    params = dict(
        M=m, N=n, K=k, lda=k, ldb=n, ldd=n, tiles_n=n // 32, tiles_m=m // 32, batch_stride_a=0,
        batch_stride_b=0, batch_stride_d=0, swizzle_log=0, gemm_k_iterations_aligned=k // 16, batch_ndim=1,
    )  # fmt: skip
    named = dict(A=a, B=b, D=lab.empty((m, n)), params=[params])
    out = f(**named, groups=(n // 32, m // 32), threadgroup=(32, 2, 2))
    assert mx.allclose(out, mx.array(a) @ mx.array(b), atol=1e-4)


def test_matrix_times_vector(kernel, rng):
    m, k = 70, 130
    a, v = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal(k).astype(np.float32)
    f = kernel("gemv", "gemv, float, 1, 8, 1, 32, 4, 4, false, false")
    out = f(
        mat=a, in_vec=v, bias=v, out_vec=lab.empty(m), in_vec_size=k, out_vec_size=m, marix_ld=k, alpha=1.0,
        beta=0.0, batch_ndim=1, batch_shape=[1], vector_batch_stride=[0], matrix_batch_stride=[0],
        bias_batch_stride=[0], bias_stride=1, groups=-(-m // 4), threadgroup=(32, 8),
    )  # fmt: skip
    assert mx.allclose(out, mx.array(a) @ mx.array(v), atol=1e-4)


@pytest.mark.parametrize("bits", (2, 4, 8))
def test_quantized_matrix_times_vector(kernel, rng, bits):
    n, k = 32, 512
    w = mx.array(rng.standard_normal((n, k)).astype(np.float32))
    x = mx.array(rng.standard_normal(k).astype(np.float32))
    quantized, scales, biases = mx.quantize(w, group_size=64, bits=bits)
    f = kernel("quantized", f"affine_qmv, float, 64, {bits}, false")
    ones, strides = [1], [0]
    out = f(
        w=quantized, scales=scales, biases=biases, x=x, y=lab.empty(n), in_vec_size=k, out_vec_size=n,
        x_batch_ndims=1, x_shape=ones, x_strides=strides, w_batch_ndims=1, w_shape=ones, w_strides=strides,
        s_strides=strides, b_strides=strides, groups=(1, -(-n // 8)), threadgroup=(32, 2),
    )  # fmt: skip
    expected = mx.quantized_matmul(x[None], quantized, scales, biases, group_size=64, bits=bits)[0]
    assert mx.allclose(out, expected, atol=1e-3)


def test_attention_of_one_query(kernel, rng):
    heads, length, d = 4, 75, 64
    q = mx.array(rng.standard_normal((1, heads, 1, d)).astype(np.float32))
    k, v = (mx.array(rng.standard_normal((1, 2, length, d)).astype(np.float32)) for _ in range(2))
    off = dict.fromkeys(
        ("has_mask", "query_transposed", "do_causal", "bool_mask", "float_mask", "has_sinks"), 0
    )
    f = kernel("sdpa_vector", "sdpa_vector, float, 64, 64", **off, blocks=32)
    out = f(
        queries=q, keys=k, values=v, out=lab.empty((1, heads, 1, d)), gqa_factor=2, N=length,
        k_head_stride=length * d, k_seq_stride=d, v_head_stride=length * d, v_seq_stride=d, scale=0.125,
        groups=(heads, 1), threadgroup=1024,
    )  # fmt: skip
    assert mx.allclose(out, mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125), atol=1e-5)


def test_attention_of_many_queries(kernel, rng):
    heads, length, d = 2, 64, 64
    q, k, v = (mx.array(rng.standard_normal((1, heads, length, d)).astype(np.float32)) for _ in range(3))
    flags = dict(align_Q=1, align_K=1, has_mask=0, do_causal=0, has_sinks=0, save_lse=0)
    f = kernel(
        "steel/attn/kernels/steel_attention", "attention, float, 32, 32, 64, 64, 4, 1, float, float", **flags
    )
    strides = [heads * length * d, length * d, d]
    params = dict(
        B=1, H=heads, D=d, qL=length, kL=length, gqa_factor=1, scale=0.125, NQ=2, NK=2, NQ_aligned=2,
        NK_aligned=2, qL_rem=0, kL_rem=0, qL_off=0, Q_strides=strides, K_strides=strides, V_strides=strides,
        O_strides=strides,
    )  # fmt: skip
    named = dict(Q=q, K=k, V=v, O=lab.empty(q.shape), params=[params])
    out = f(**named, groups=(2, heads, 1), threadgroup=(32, 4))
    assert mx.allclose(out, mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125), atol=1e-5)


def test_log_of_a_sum_of_exponentials(kernel, rng):
    x = mx.array(rng.standard_normal((5, 300)).astype(np.float32))
    f = kernel("logsumexp", "logsumexp, float")
    assert mx.allclose(f(x, lab.empty(5), 300, groups=5, threadgroup=96), mx.logsumexp(x, axis=1), atol=1e-5)


def test_hadamard_transform(kernel, rng):
    x = mx.array(rng.standard_normal(64).astype(np.float32))
    f = kernel("hadamard", "hadamard_n, float, 64, 4, 2")
    out = f(x, lab.empty(64), 0.125, grid=16, threadgroup=16)
    assert mx.allclose(out, mx.hadamard_transform(x), atol=1e-5)
