"""Kernels as Python callables: compiling, results, the in-place form, libraries."""

from __future__ import annotations

import concurrent.futures
import inspect
import os

import mlx.core as mx
import numpy as np
import pytest

import lab

AXPY = """
kernel void axpy(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
    constant float& a [[buffer(2)]],
                 uint i [[thread_position_in_grid]]) { y[i] = a * x[i] + y[i]; }
"""
SEVERAL = """
kernel void split(device const int* x, device int* low [[buffer(3)]], device int* high [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) { low[i] = x[i] % 10; high[i] = x[i] / 10; }
kernel void nothing(device const int* x) { }
"""


@pytest.fixture(scope="module")
def axpy(msl) -> lab.Kernel:
    return msl(AXPY).axpy


# ---- results -----------------------------------------------------------------------------------------------


def test_a_result_is_a_new_array_in_the_shape_given(axpy):
    y = mx.ones((2, 3))
    out = axpy(mx.ones((2, 3)), y, 2.0, grid=6)
    assert isinstance(out, mx.array)
    assert (out.shape, out.dtype) == ((2, 3), mx.float32)
    assert out.tolist() == [[3, 3, 3], [3, 3, 3]]


def test_arguments_are_left_as_they_were(axpy):
    x, y = mx.ones(5), np.ones(5, np.float32)
    axpy(x, y, 2.0, grid=5)
    assert (x.tolist(), y.tolist()) == ([1] * 5, [1] * 5)


def test_what_a_kernel_does_not_write_keeps_its_value(axpy):
    assert axpy(mx.ones(4), mx.array([5.0, 6, 7, 8]), 1.0, grid=2).tolist() == [6, 7, 7, 8]


def test_results_do_not_change_with_the_next_call(axpy):
    first = axpy(mx.ones(4), mx.ones(4), 1.0, grid=4)
    axpy(mx.ones(4), mx.ones(4), 5.0, grid=4)
    assert first.tolist() == [2] * 4


def test_several_results_come_as_a_named_tuple_in_buffer_order(msl):
    out = msl(SEVERAL).split([25, 37], lab.empty(2, mx.int32), lab.empty(2, mx.int32), grid=2)
    assert type(out).__name__ == "split_result"
    assert out._fields == ("high", "low")
    assert (out.high.tolist(), out.low.tolist()) == ([2, 3], [5, 7])


def test_a_kernel_that_writes_nothing_returns_none(msl):
    assert msl(SEVERAL).nothing([1], grid=1) is None


def test_results_are_ordinary_arrays(axpy):
    out = axpy(mx.ones(4), mx.ones(4), 1.0, grid=4)
    assert (mx.sum(out * 2) + out[0]).item() == 18


def test_a_number_for_a_written_reference_comes_back_as_one(msl):
    kernel = msl("kernel void f(device atomic_int& total, uint i [[thread_position_in_grid]]) {"
                 " atomic_fetch_add_explicit(&total, int(i), memory_order_relaxed); }").f  # fmt: skip
    out = kernel(5, grid=100)
    assert (out.shape, out.item()) == ((), 5 + 99 * 100 // 2)


def test_an_empty_grid_runs_nothing(axpy):
    assert axpy(mx.ones(4), mx.ones(4), 1.0, grid=0).tolist() == [1] * 4
    assert axpy(mx.ones(4), mx.ones(4), 1.0, grid=(4, 0)).tolist() == [1] * 4


# ---- the in-place form -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [np.array, mx.array], ids=["numpy", "mlx"])
def test_in_place_writes_into_the_array_given(axpy, make):
    y = make(np.ones(4, np.float32))
    out = axpy.run_(mx.ones(4), y, 2.0, grid=4)
    assert out is y
    assert y.tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("dtype", ["bool_", "int8", "uint16", "int64", "float16", "bfloat16"])
def test_in_place_works_for_every_size_of_scalar(msl, dtype):
    scalar = {"bool_": "bool", "int8": "char", "uint16": "ushort", "int64": "long", "float16": "half"}.get(
        dtype, "bfloat"
    )
    kernel = msl(
        f"kernel void f(device {scalar}* x, uint i [[thread_position_in_grid]]) {{ x[i] = {scalar}(1); }}"
    ).f
    x = mx.zeros(5, getattr(mx, dtype))
    mx.eval(x)
    kernel.run_(x, grid=4)
    assert x.tolist() == [1, 1, 1, 1, 0]


def test_in_place_changes_what_shares_the_memory(axpy):
    whole = np.zeros((3, 4), np.float32)
    axpy.run_(mx.ones(4), whole[1], 2.0, grid=4)
    assert whole.tolist() == [[0] * 4, [2] * 4, [0] * 4]


def test_in_place_changes_records(msl):
    source = (
        "struct S { uint n; float f; }; kernel void f(device S* s, uint i [[thread_position_in_grid]]) { "
        "s[i].n += i; }"
    )
    records = np.zeros(3, [("n", "u4"), ("f", "f4")])
    assert msl(source).f.run_(records, grid=3) is records
    assert records["n"].tolist() == [0, 1, 2]


def test_in_place_gives_a_named_tuple_of_several(msl):
    low, high = np.zeros(2, np.int32), mx.zeros(2, mx.int32)
    out = msl(SEVERAL).split.run_([25, 37], high, low, grid=2)
    assert out.high is high and out.low is low
    assert (high.tolist(), low.tolist()) == ([2, 3], [5, 7])


def read_only() -> np.ndarray:
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((4, 2), np.float32)[:, 0], "needs a contiguous array"),
        (mx.zeros((4, 2))[:, 0], "needs a contiguous array"),
        (read_only(), "that can be written"),
        ([0.0] * 4, "writes into MLX or NumPy arrays"),
        (lab.empty(4), "writes into arrays that exist"),
    ],
)
def test_in_place_refuses_what_it_cannot_write_into(axpy, array, words):
    with pytest.raises(lab.ArgumentError, match=words):
        axpy.run_(mx.ones(4), array, 1.0, grid=4)


def test_in_place_takes_values_for_what_is_only_read(axpy):
    y = np.zeros(2, np.float32)
    axpy.run_([1.0, 2.0], y, 3, grid=2)
    assert y.tolist() == [3, 6]


# ---- what a kernel knows about itself ----------------------------------------------------------------------


def test_stats_tell_of_the_last_call(msl):
    kernel = msl(AXPY + "// stats\n").axpy
    assert kernel.stats is None
    kernel(mx.ones(100), mx.ones(100), 1.0, grid=100, threadgroup=32)
    first = kernel.stats
    assert (first.engine, first.threads, first.threadgroups) == ("cpu", 100, 4)
    assert first.compile_seconds > 0 and first.run_seconds > 0
    kernel(mx.ones(10), mx.ones(10), 1.0, grid=10)
    assert (kernel.stats.compile_seconds, kernel.stats.threads) == (0, 10)


def test_a_kernel_is_compiled_when_it_is_first_called(msl):
    library = msl(AXPY + "// first call\n" + SEVERAL)
    assert library.axpy.description is None
    library.axpy(mx.ones(1), mx.ones(1), 1.0, grid=1)
    assert library.axpy.description.engine == "cpu"
    assert library.split.description is None


def test_a_kernel_describes_itself_in_python_s_terms(axpy):
    assert axpy.name == axpy.__name__ == "axpy"
    assert repr(axpy) == "<kernel axpy(x: device const float*, y: device float*, a: constant float&)>"
    manual = inspect.getdoc(axpy)
    for line in ("buffer(0) x: device const float*, read", "buffer(1) y: device float*, written",
                 "thread attributes: thread_position_in_grid"):  # fmt: skip
        assert line in manual


def test_a_kernel_has_its_own_lines_of_the_source(axpy):
    assert axpy.source.startswith("kernel void axpy(") and axpy.source.endswith("}")


# ---- libraries ---------------------------------------------------------------------------------------------


def test_a_library_finds_its_kernels_by_attribute_and_by_name(msl):
    library = msl(SEVERAL)
    assert library.split is library["split"] is library.kernels["split"]
    assert list(library) == ["split", "nothing"]
    assert len(library) == 2 and "nothing" in library
    assert {"split", "nothing"} <= set(dir(library))


def test_a_kernel_the_library_does_not_have_is_told_by_name(msl):
    library = msl(SEVERAL)
    with pytest.raises(AttributeError, match=r"no kernel called 'spilt': it has split, nothing"):
        _ = library.spilt
    with pytest.raises(KeyError, match="no kernel called 'spilt'"):
        library["spilt"]


def test_two_kernels_of_one_library_run(msl):
    source = "kernel void a(device int* x) { x[0] = 1; } kernel void b(device int* x) { x[0] = 2; }"
    library = msl(source)
    assert (library.a([0], grid=1).item(), library.b([0], grid=1).item()) == (1, 2)


def test_kernels_of_the_same_name_in_two_libraries_are_two(msl):
    one, two = (msl(f"kernel void f(device int* x) {{ x[0] = {n}; }}") for n in (1, 2))
    assert (one.f([0], grid=1).item(), two.f([0], grid=1).item()) == (1, 2)


# ---- lab.compile -------------------------------------------------------------------------------------------


def test_a_source_is_a_text_or_a_path(tmp_path):
    path = tmp_path / "axpy.metal"
    path.write_text(AXPY)
    for source in (AXPY, path, str(path)):
        assert list(lab.compile(source)) == ["axpy"]


def test_one_line_of_text_is_no_path():
    assert list(lab.compile("kernel void f() {}")) == ["f"]
    with pytest.raises(lab.CompileError):
        lab.compile("int " * 300)


def test_the_same_source_gives_the_same_library(msl):
    assert msl(AXPY) is msl(AXPY)
    assert msl(AXPY) is not msl(AXPY, math="fast")
    assert msl(AXPY) is not msl(AXPY, defines={"UNUSED": 1})


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "f.metal"
    path.write_text("kernel void f(device int* x) { x[0] = 1; }")
    assert lab.compile(path).f([0], grid=1).item() == 1
    path.write_text("kernel void f(device int* x) { x[0] = 2; }")
    assert lab.compile(path).f([0], grid=1).item() == 2


def test_a_changed_include_is_read_again(tmp_path):
    (tmp_path / "n.h").write_text("#define N 1\n")
    path = tmp_path / "f.metal"
    path.write_text('#include "n.h"\nkernel void f(device int* x) { x[0] = N; }')
    assert lab.compile(path).f([0], grid=1).item() == 1
    (tmp_path / "n.h").write_text("#define N 2\n")
    assert lab.compile(path).f([0], grid=1).item() == 2


@pytest.mark.parametrize("value", [7, "7", "(3 + 4)", 7.0, "3 +\n4"])
def test_a_define_is_a_value_or_a_text(msl, value):
    kernel = msl("kernel void f(device int* x) { x[0] = N; }", defines={"N": value}).f
    assert kernel([0], grid=1).item() == 7


def test_defines_are_true_false_and_empty(msl):
    source = "kernel void f(device int* x) { x[0] = T; x[1] = F; x[2] = E 5; }"
    assert msl(source, defines={"T": True, "F": False, "E": None}).f([9, 9, 9], grid=1).tolist() == [1, 0, 5]


def test_include_files_are_read_first(tmp_path, msl):
    (tmp_path / "a.h").write_text("inline int seven() { return 7; }\n")
    source = "kernel void f(device int* x) { x[0] = seven(); }"
    for include in (tmp_path / "a.h", str(tmp_path / "a.h"), [tmp_path / "a.h"]):
        assert msl(source, include=include).f([0], grid=1).item() == 7


@pytest.mark.parametrize("math", ["safe", "relaxed", "fast"])
def test_every_kind_of_math_computes(msl, math):
    out = msl(AXPY, math=math).axpy(mx.ones(4), mx.ones(4), 2.0, grid=4)
    assert out.tolist() == [3] * 4


def test_safe_math_keeps_the_order_of_operations(msl):
    source = "kernel void f(device float* x) { x[0] = (x[1] + x[2]) - x[1]; x[3] = x[1] * x[1] - x[4]; }"
    product = np.float32(1.0001) * np.float32(1.0001)
    x = np.array([0, 1.0001, 1e-8, 0, product], np.float32)
    out = np.asarray(msl(source).f(x, grid=1))
    assert out[0] == (x[1] + x[2]) - x[1]
    assert out[3] == 0  # a contracted multiply-add would leave the rounding error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"math": "quick"}, "math= takes safe, relaxed, fast, not 'quick'."),
        ({"engine": "abacus"}, "There is no engine called 'abacus': the engines are "),
        ({"defines": {"a b": 1}}, "A define needs a name of letters, digits and underscores, not 'a b'."),
        ({"defines": {"1a": 1}}, "A define needs a name"),
    ],
)
def test_a_wrong_option_is_told_the_right_ones(options, words):
    with pytest.raises(lab.ArgumentError) as caught:
        lab.compile("kernel void f() {}", **options)
    assert words in str(caught.value)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(lab.ArgumentError, match=r"There is no file missing\.metal"):
        lab.compile("missing.metal")


def test_the_name_of_a_library_is_used_in_messages(msl):
    assert repr(lab.compile("kernel void f() {}", name="step")) == "<Metal library step: it has f>"
    with pytest.raises(lab.CompileError, match=r"^step:1:20: error"):
        lab.compile("kernel void f() {  y; }", name="step")


def test_warnings_are_kept_with_the_library(msl):
    (warning,) = msl("kernel void f(device int* x) { if (x[0] = 1) return; }").warnings
    assert warning.place.line == 3


# ---- from many threads -------------------------------------------------------------------------------------


def test_python_threads_may_call_kernels_at_once(axpy, seed):
    def call(n: int) -> bool:
        x = np.random.default_rng([seed, n]).standard_normal(1000 + n).astype(np.float32)
        return np.array_equal(axpy(x, np.zeros_like(x), float(n), grid=x.size), np.float32(n) * x)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(64)))


def test_python_threads_may_compile_at_once(msl):
    def call(n: int) -> int:
        return msl(f"kernel void f(device int* x) {{ x[0] = {n}; }}").f([0], grid=1).item()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, range(16))) == list(range(16))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_runs_kernels(axpy):
    axpy(mx.ones(4), mx.ones(4), 1.0, grid=4)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            x = np.ones(4, np.float32)
            status = 0 if axpy.run_(x, x, 1.0, grid=4).tolist() == [2] * 4 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
