"""Calls of ``lab.metal_kernel``: what goes in, what comes out, what MLX refuses."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import lab


def kernel(source, inputs=("a",), outputs=("out",), **more):
    return lab.metal_kernel(
        name="f", input_names=list(inputs), output_names=list(outputs), source=source, **more
    )


def call(kernel, *inputs, grid=(1, 1, 1), threadgroup=(1, 1, 1), shape=(1,), dtype=mx.float32, **more):
    """The one output of a kernel."""
    given = {"output_shapes": [shape], "output_dtypes": [dtype], **more}
    return kernel(inputs=list(inputs), grid=grid, threadgroup=threadgroup, **given)[0]


def elementwise(kernel, x, **more):
    size = dict(grid=(x.size, 1, 1), threadgroup=(64, 1, 1))
    return call(kernel, x, **size, shape=x.shape, **{"dtype": x.dtype, **more})


COPY = "uint i = thread_position_in_grid.x; out[i] = a[i];"
STRIDED = """
    uint i = thread_position_in_grid.x;
    long at = elem_to_loc(int64_t(i), a_shape, a_strides, a_ndim);
    out[i] = a[at];
"""


@pytest.mark.parametrize(
    "dtype",
    (mx.bool_, mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int32, mx.uint32, mx.int64, mx.uint64, mx.float16,
     mx.bfloat16, mx.float32, mx.complex64),
    ids=str,
)  # fmt: skip
def test_every_dtype_passes_through(dtype, rng):
    for shape in ((5,), (3, 40), (2, 2, 2)):
        x = mx.array(rng.integers(0, 2, shape)).astype(dtype)
        out = elementwise(kernel(COPY), x)
        assert out.dtype == dtype and out.shape == shape and mx.array_equal(out, x)


@pytest.mark.parametrize("dtype", (mx.float32, mx.bfloat16, mx.int64), ids=str)
def test_strided_inputs_are_copied_unless_told_not_to(dtype, rng):
    x = mx.array(rng.integers(-9, 9, (6, 8))).astype(dtype)
    views = (x.T, x[::2], x[:, 1::3], x[::-1, ::-2], mx.broadcast_to(x[0], (4, 8)), x[2], x[:, 3])
    for view in views:
        assert mx.array_equal(elementwise(kernel(COPY), view), view)
        assert mx.array_equal(elementwise(kernel(STRIDED, ensure_row_contiguous=False), view), view)


def test_without_a_copy_the_kernel_sees_the_memory_as_it_lies():
    x = mx.arange(12).reshape(3, 4)
    out = elementwise(kernel(COPY, ensure_row_contiguous=False), x.T)
    assert out.reshape(-1).tolist() == list(range(12))


def test_strides_are_64_bits_wide():
    x = mx.broadcast_to(mx.array([[1.0]]), (3, 5))
    k = kernel("out[0] = a_strides[0]; out[1] = a_strides[1]; out[2] = sizeof(a_strides[0]);",
               ensure_row_contiguous=False)  # fmt: skip
    assert call(k, x, shape=(3,), dtype=mx.int64).tolist() == [0, 0, 8]


def test_numbers_and_numpy_arrays_are_inputs():
    k = kernel("out[0] = a + b + c + d[2] + (e ? 100 : 0);", inputs="abcde")
    assert call(k, 1, 2.5, np.float64(3), np.array([1.0, 2.0, 4.0]), True).item() == 110.5


def test_numpy_float64_becomes_float32_and_mlx_float64_is_refused():
    assert call(kernel("out[0] = a[0];"), np.ones(3)).item() == 1
    with pytest.raises(ValueError, match=r"^float64 is not supported on the GPU$"):
        call(kernel("out[0] = a[0];"), mx.ones(3, mx.float64))


def test_outputs_start_with_the_value_given(rng):
    for dtype in (mx.float32, mx.bfloat16, mx.float16, mx.int32, mx.uint8, mx.bool_, mx.complex64):
        for value in (0, 1, 2.75, -3.0):
            if value < 0 and dtype in (mx.uint8,):
                continue
            out = call(
                kernel("if (a[0] > 1) out[0] = 0;"), mx.zeros(1), shape=(7,), dtype=dtype, init_value=value
            )
            assert mx.array_equal(out, mx.full((7,), value).astype(dtype)), (dtype, value)


def test_outputs_that_are_not_written_show_it():
    out = call(kernel("out[1] = 1;"), mx.zeros(1), shape=(3,))
    assert np.isnan(out[0].item()) and out[1].item() == 1 and np.isnan(out[2].item())


def test_several_outputs_come_in_a_list():
    k = kernel("p[0] = a[0]; q[0] = 2; r[1] = true;", outputs="pqr")
    out = k(
        inputs=[mx.array([5])], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(), (1,), (2,)],
        output_dtypes=[mx.int32, mx.float16, mx.bool_], init_value=0,
    )  # fmt: skip
    assert type(out) is list and [x.tolist() for x in out] == [5, [2.0], [False, True]]


def test_atomic_outputs(rng):
    source = """
        uint i = thread_position_in_grid.x;
        atomic_fetch_add_explicit(&out[i % 3], a[i], memory_order_relaxed);
    """
    x = mx.array(rng.integers(0, 100, 999))
    for dtype in (mx.int32, mx.uint32, mx.float32):
        k = kernel(source, atomic_outputs=True)
        out = call(
            k,
            x.astype(dtype),
            grid=(999, 1, 1),
            threadgroup=(64, 1, 1),
            shape=(3,),
            dtype=dtype,
            init_value=0,
        )
        assert out.tolist() == x.reshape(-1, 3).sum(0).tolist()


def test_the_threadgroup_is_clipped_to_the_grid():
    k = kernel("out[0] = threads_per_threadgroup.x; out[1] = threads_per_threadgroup.y;")
    for group in ((256, 1, 1), (32, 8, 1)):
        out = call(k, mx.zeros(1), grid=(5, 3, 1), threadgroup=group, shape=(2,), dtype=mx.uint32)
        assert out.tolist() == [min(5, group[0]), min(3, group[1])]


def test_the_grid_counts_threads():
    k = kernel("atomic_fetch_add_explicit(&out[0], 1, memory_order_relaxed);", atomic_outputs=True)
    size = dict(grid=(70, 3, 2), threadgroup=(32, 2, 1))
    assert call(k, mx.zeros(1), **size, dtype=mx.int32, init_value=0).item() == 420


def test_an_empty_grid_runs_nothing():
    assert call(kernel("out[0] = 1;"), mx.zeros(1), grid=(0, 1, 1), init_value=7).item() == 7


def test_templates_of_each_kind():
    k = kernel("T x = a[0]; if constexpr (B) { x += N; } out[0] = x + sizeof(T);")
    template = [("T", mx.float16), ("B", True), ("N", -3)]
    assert call(k, mx.array([1.0]), template=template).item() == 0
    assert call(k, mx.array([1.0]), template=[("T", mx.float32), ("B", False), ("N", 1)]).item() == 5


def test_two_kernels_of_one_name_do_not_mix():
    x = mx.arange(32, dtype=mx.float32)
    double = elementwise(kernel("uint i = thread_position_in_grid.x; out[i] = a[i] * 2;"), x)
    more = elementwise(kernel("uint i = thread_position_in_grid.x; out[i] = a[i] + 100;"), x)
    assert mx.array_equal(double, x * 2) and mx.array_equal(more, x + 100)


def test_one_kernel_takes_inputs_of_different_dtypes_and_sizes():
    k = kernel("uint i = thread_position_in_grid.x; out[i] = a[i] + a[i];")
    for x in (mx.full((32,), 1.5, mx.float16), mx.full((4,), 2.5), mx.full((32,), 3, mx.int8)):
        assert mx.array_equal(elementwise(k, x), x + x)


def test_math_modes():
    source = """
        #if defined(__FAST_MATH__) && __FAST_MATH__
        out[0] = 1;
        #else
        out[0] = 0;
        #endif
    """
    for mode, expected in (("safe", 0), ("fast", 1)):
        k = kernel(source, compile_options={"math_mode": mode})
        assert call(k, mx.zeros(1)).item() == expected


def test_mlx_utilities_are_there():
    source = """
        bfloat16_t b = static_cast<bfloat16_t>(a[0]);
        complex64_t z = complex64_t(1.0f, 2.0f) * complex64_t(0.0f, 1.0f);
        out[0] = b; out[1] = z.real; out[2] = z.imag; out[3] = Limits<int8_t>::max;
        out[4] = ceildiv(7, 2); out[5] = Limits<float>::min; out[6] = simd_sum(a[0]);
    """
    out = call(kernel(source), mx.array([1.5]), grid=(32, 1, 1), threadgroup=(32, 1, 1), shape=(7,))
    assert out.tolist() == [1.5, -2.0, 1.0, 127.0, 4.0, -np.inf, 48.0]


def test_results_are_ordinary_arrays():
    out = elementwise(kernel(COPY), mx.arange(10))
    assert mx.array_equal(out + 1, mx.arange(1, 11))


# ---- what MLX refuses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, kind, message",
    (
        (dict(output_names=[]), ValueError, r"^\[metal_kernel\] Must specify at least one output\.$"),
        (dict(compile_options=3), ValueError, r"Expected `compile_options` to be a dict\.$"),
        (dict(compile_options={"math_mode": "x"}), ValueError, "'safe', 'relaxed', or 'fast'"),
        (dict(compile_options={"x": "y"}), ValueError, "Unknown compile option `x`"),
        (dict(input_names="ab"), TypeError, "incompatible function arguments"),
        (dict(source=3), TypeError, "incompatible function arguments"),
    ),
)
def test_kernels_that_mlx_refuses(wrong, kind, message):
    arguments = dict(name="f", input_names=["a"], output_names=["out"], source="out[0] = 1;")
    with pytest.raises(kind, match=message):
        lab.metal_kernel(**{**arguments, **wrong})
    with pytest.raises(kind, match=message):
        mx.fast.metal_kernel(**{**arguments, **wrong})


@pytest.mark.parametrize(
    "wrong, kind, message",
    (
        (dict(inputs=[]), ValueError, "Expected `inputs` to have size 1 but got size 0"),
        (dict(output_shapes=[]), ValueError, "Expected `output_shapes` to have size 1 but got size 0"),
        (dict(output_dtypes=[]), ValueError, "Expected `output_dtypes` to have size 1 but got size 0"),
        (dict(template=[("T", 1.0)]), ValueError, "Must be `mlx.core.Dtype`, `int` or `bool`"),
        (dict(grid=(1, 1)), TypeError, "incompatible function arguments"),
        (dict(threadgroup=1), TypeError, "incompatible function arguments"),
        (dict(output_dtypes=[np.float32]), TypeError, "incompatible function arguments"),
        (dict(inputs=["a"]), ValueError, "Invalid type str received in array initialization"),
        (
            dict(threadgroup=(1025, 1, 1)),
            ValueError,
            r"Thread group size \(1025\) is greater than  the",
        ),
        (dict(stream=mx.cpu), ValueError, r"^\[metal_kernel\] Only supports the GPU\.$"),
    ),
)
def test_calls_that_mlx_refuses(wrong, kind, message):
    arguments = dict(
        inputs=[mx.zeros(3)], output_shapes=[(3,)], output_dtypes=[mx.float32], grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )  # fmt: skip
    with pytest.raises(kind, match=message):
        kernel("out[0] = 1;")(**{**arguments, **wrong})


def test_arguments_are_given_by_name():
    with pytest.raises(TypeError, match="incompatible function arguments"):
        kernel("out[0] = 1;")([mx.zeros(3)])


# ---- what a compiler refuses ----------------------------------------------------------------------------


def refused(source, header="", **more):
    with pytest.raises(lab.CompileError) as caught:
        call(kernel(source, header=header), mx.zeros(9), **more)
    return str(caught.value)


def test_errors_are_placed_in_the_source():
    text = refused("int i = 0;\n  out[i] = nowhere;")
    assert text.startswith("f source:2:12: error: use of undeclared identifier 'nowhere'")
    assert "    2 |   out[i] = nowhere;" in text


def test_errors_are_placed_in_the_header():
    text = refused("out[0] = 1;", "// helpers\ninline float g(float x) {\n  return x\n}\n")
    assert text.startswith("f header:3:11: error: expected ';'")


def test_errors_of_the_preprocessor_are_placed_too():
    assert refused("out[0] = 1;\n#error no").startswith("f source:2:2: error: no")
    assert refused("out[0] = 1;", '\n#include "none.h"\n').startswith("f header:2:10: error: 'none.h'")


def test_errors_in_templates_are_placed_in_the_source():
    text = refused("T x = a[0];\nx.nothing();\nout[0] = x;", template=[("T", mx.float32)])
    assert text.startswith("f source:2:")


def test_errors_speak_of_no_generated_line():
    for source in ("out[0] = 1; }", "out[0] = (1;", "int a = 1; out[0] = a;", "out[0] = half4(1);"):
        for line in refused(source).splitlines():
            assert "generated" not in line and "/tmp" not in line and "<kernel>" not in line


def test_bfloat_takes_no_float_without_a_cast():
    text = refused("bfloat16_t b = a[0] > 0 ? a[0] : -INFINITY; out[0] = b;")
    assert "bfloat" in text and text.startswith("f source:1:")


def test_a_fault_names_the_buffer():
    with pytest.raises(lab.KernelFault, match="buffer\\(1\\) 'out'"):
        call(kernel("out[1 << 24] = 1;"), mx.zeros(9))


# ---- what is kept ---------------------------------------------------------------------------------------


def test_a_kernel_that_was_read_before_is_the_same_kernel(monkeypatch):
    from lab.mlxfast import source

    k = kernel("out[0] = nothing;", header="#define nothing 41 + 1\n")
    first = call(k, mx.zeros(1)).item()
    source.executable.cache_clear()
    monkeypatch.setattr(source, "read", None)  # it is in the cache
    assert call(k, mx.zeros(1)).item() == first == 42


def test_numpy_integers_are_sizes():
    k = kernel("out[0] = threads_per_threadgroup.x;")
    size = dict(grid=(np.int64(64), 1, 1), threadgroup=(np.int32(32), np.int64(1), 1))
    assert call(k, mx.zeros(1), **size, shape=(np.int64(1),)).item() == 32
