"""What the bodies and headers of custom kernels are made of."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import lab


def run(source, *inputs, header="", threads=32, shape=(32,), dtype=mx.float32, **more):
    names = "abcdef"[: len(inputs)]
    options = {k: more.pop(k) for k in ("atomic_outputs",) if k in more}
    kernel = lab.metal_kernel(
        name="f", input_names=list(names), output_names=["out"], source=source, header=header, **options
    )
    size = dict(grid=(threads, 1, 1), threadgroup=(min(threads, 256), 1, 1))
    return kernel(inputs=list(inputs), **size, output_shapes=[shape], output_dtypes=[dtype], **more)[0]


X = mx.arange(32, dtype=mx.float32)


def test_templates_specialisations_and_macros():
    header = """
        #define SQUARE(x) ((x) * (x))
        #define FOR_EACH(i, n) for (int i = 0; i < (n); ++i)
        template <typename T, int N> struct Sum {
            static T of(const device T* p) { T s = 0; FOR_EACH(i, N) s += SQUARE(p[i]); return s; }
        };
        template <typename T> struct Sum<T, 0> { static T of(const device T*) { return T(-1); } };
        template <typename T> T twice(T x) { return x + x; }
        template <> float twice<float>(float x) { return 2.0f * x + 0.5f; }
    """
    source = """
        uint i = thread_position_in_grid.x;
        out[i] = Sum<T, N>::of(a);
        if constexpr (N > 0) { out[i] += twice(int(i)); }
        if (i == 0) { out[i] = N > 0 ? twice(1.0f) : -1.0f; }
    """
    out = run(source, X, header=header, template=[("T", mx.float32), ("N", 3)])
    assert out.tolist() == [2.5, *(5 + 2 * i for i in range(1, 32))]
    assert run(source, X, header=header, template=[("T", mx.float32), ("N", 0)]).tolist() == [-1] * 32


def test_lambdas_see_what_is_around_them():
    source = """
        uint i = thread_position_in_grid.x;
        threadgroup float shared[32];
        auto put = [&](float x) { shared[i] = x; };
        put(a[i]);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        auto at = [&](uint j) -> float { return shared[j % 32]; };
        out[i] = at(i + 1) - at(i);
    """
    assert run(source, X).tolist() == [1] * 31 + [-31]


@pytest.mark.parametrize(
    "kind", ("char", "uchar", "short", "ushort", "int", "uint", "half", "float", "bfloat")
)
def test_shuffles_of_every_type(kind):
    source = f"""
        uint lane = thread_index_in_simdgroup;
        {kind} x = {kind}(int(lane));
        out[lane] = float(simd_shuffle_xor(x, ushort(5))) + 100 * float(simd_shuffle_down(x, ushort(1)))
            + 10000 * float(simd_broadcast(x, ushort(7)));
    """
    lanes = np.arange(32)
    out = np.asarray(run(source, X))[:31]
    assert np.array_equal(out, ((lanes ^ 5) + 100 * (lanes + 1) + 70000)[:31])


def test_shuffles_of_vectors():
    source = """
        uint lane = thread_index_in_simdgroup;
        float4 x = simd_shuffle_xor(float4(lane, lane + 1, lane + 2, lane + 3), ushort(1));
        half2 y = simd_shuffle_up(half2(lane, 1), ushort(1));
        out[lane] = x.x + 100 * x.w + (lane > 0 ? 10000 * float(y.x) : 0);
    """
    lanes = np.arange(32)
    expected = (lanes ^ 1) + 100 * ((lanes ^ 1) + 3) + 10000 * np.maximum(lanes - 1, 0)
    assert np.array_equal(run(source, X), expected)


@pytest.mark.parametrize("dtype", (mx.int32, mx.uint32, mx.float32), ids=str)
def test_device_atomics_with_compare_exchange(dtype):
    source = """
        uint i = thread_position_in_grid.x;
        T old = atomic_load_explicit(&out[0], memory_order_relaxed);
        while (!atomic_compare_exchange_weak_explicit(
            &out[0], &old, T(old + T(i)), memory_order_relaxed, memory_order_relaxed)) {}
        atomic_fetch_add_explicit(&out[1], T(1), memory_order_relaxed);
        if (i == 5) atomic_store_explicit(&out[2], T(7), memory_order_relaxed);
    """
    template = [("T", dtype)]
    more = dict(atomic_outputs=True, init_value=0, template=template, shape=(3,), dtype=dtype)
    assert run(source, X, threads=1000, **more).tolist() == [499500, 1000, 7]


def test_matrices_of_a_simdgroup(rng):
    source = """
        simdgroup_matrix<float, 8, 8> x, y, z = simdgroup_matrix<float, 8, 8>(0);
        simdgroup_load(x, a, 8);
        simdgroup_load(y, b, 8);
        simdgroup_multiply_accumulate(z, x, y, z);
        z.thread_elements()[0] *= 2;
        z.thread_elements()[1] *= 2;
        simdgroup_store(z, out, 8);
    """
    header = "#include <metal_simdgroup_matrix>\n"
    a, b = rng.standard_normal((2, 8, 8)).astype(np.float32)
    out = run(source, mx.array(a), mx.array(b), header=header, shape=(8, 8))
    assert np.abs(np.asarray(out) - 2 * a @ b).max() < 1e-5


def test_reading_shared_memory_past_a_collective():
    """Simdgroups go side by side: kernels for Apple's GPUs have no barrier before the second write."""
    source = """
        threadgroup float shared[8];
        uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
        float most = simd_max(a[thread_position_in_grid.x]);
        if (lane == 0) shared[group] = most;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        most = simd_max(shared[lane % 8]);
        float sum = simd_sum(a[thread_position_in_grid.x] - most);
        if (lane == 0) shared[group] = sum;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = simd_sum(lane < 8 ? shared[lane] : 0);
    """
    x = mx.arange(256, dtype=mx.float32)
    assert set(run(source, x, threads=256, shape=(256,)).tolist()) == {float(sum(range(256)) - 255 * 256)}


def test_sums_of_a_simdgroup_are_an_ascending_butterfly(rng):
    x = rng.standard_normal(32).astype(np.float32)
    expected = x
    for step in (1, 2, 4, 8, 16):
        expected = expected + expected[np.arange(32) ^ step]
    out = run("out[thread_position_in_grid.x] = simd_sum(a[thread_position_in_grid.x]);", mx.array(x))
    assert np.array_equal(out, expected)


def test_no_math_in_a_choice_between_bfloat_and_float():
    header = "using bf = bfloat16_t;\n"
    with pytest.raises(lab.CompileError, match=r"f source:2:"):
        run("bf x = bf(a[0]);\nx = a[1] > 0 ? x : -INFINITY;\nout[0] = x;", X, header=header)
    source = "bf x = bf(a[1]); out[thread_position_in_grid.x] = a[1] > 0 ? float(x) : -INFINITY;"
    assert run(source, X, header=header)[0].item() == 1
