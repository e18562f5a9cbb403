"""Function constants: values given from Python when a source is compiled."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import lab
from lab.errors import ArgumentError, CompileError
from lab.source.constants import integer

SOURCE = """
#include <metal_stdlib>
using namespace metal;
#define BASE 100
enum { SEVEN = 7 };
namespace tuning { constant int width [[function_constant(BASE + 2)]]; }
constant bool masked [[function_constant(BASE)]];
constant int scale [[ function_constant(SEVEN) ]];
constant float4 weights [[function_constant(3)]];
constant bool twice = is_function_constant_defined(masked) ? masked : true;
constant int more = scale * 2 + 1;
constant uint2 pair = uint2(scale, 3);

kernel void scaled(device float* x) { x[0] = scale + tuning::width; }
kernel void guarded(device float* x) { x[0] = is_function_constant_defined(weights) ? weights.y : -1; }
kernel void default_is_true(device float* x) { x[0] = twice ? 2 : 1; }
kernel void made(device float* x) { x[0] = more; }
kernel void paired(device float* x) { x[0] = pair.x + pair.y; }
kernel void plain(device float* x) { x[0] = 42; }
kernel void meets(device float* x) { threadgroup_barrier(mem_flags::mem_none); x[0] = weights.z; }
kernel void optional(device float* x, device const float* y [[buffer(1)]] [[function_constant(masked)]],
                     device const int* z [[buffer(1), function_constant(unmasked_)]]) { x[0] = 0; }
""".replace("unmasked_", "unmasked").replace(
    "kernel void scaled", "constant bool unmasked = !masked;\nkernel void scaled", 1
)


@pytest.fixture(scope="module")
def library():
    return lab.compile(SOURCE)


def value(library, kernel: str, *more) -> float:
    return library[kernel](mx.zeros(1), *more, grid=1).item()


def test_a_source_reads_without_values_and_names_its_constants(library):
    assert library.function_constants == ("width", "masked", "scale", "weights")
    assert value(library, "plain") == 42


@pytest.mark.parametrize(
    ("kernel", "constants", "expected"),
    [
        ("scaled", {"scale": 5, "width": 2}, 7),
        ("scaled", {7: -5, 102: 2}, -3),
        ("guarded", {}, -1),
        ("guarded", {"weights": (1, 2, 3, 4)}, 2),
        ("guarded", {"weights": np.float32(0.5)}, 0.5),
        ("default_is_true", {}, 2),
        ("default_is_true", {"masked": False}, 1),
        ("default_is_true", {100: True}, 2),
        ("made", {"scale": 4}, 9),
        ("paired", {"scale": 4}, 7),
        ("meets", {"weights": mx.array([1.0, 2.0, 3.5, 4.0])}, 3.5),
    ],
)
def test_a_kernel_computes_with_the_values_given(library, kernel, constants, expected):
    assert value(library.with_constants(constants), kernel) == expected


@pytest.mark.parametrize(
    ("kernel", "names"),
    [
        ("scaled", ["'scaled' needs the function constant '", "constants={'"]),
        ("made", ["'made' needs the function constant 'scale' for 'more', which has no value"]),
        ("paired", ["'paired' needs the function constant 'scale' for 'pair'"]),
        ("meets", ["'meets' needs the function constant 'weights', which has no value: give it one with"]),
        ("optional", ["'optional' needs the function constant 'masked'"]),
    ],
)
def test_a_kernel_that_uses_a_constant_without_a_value_is_refused_when_it_is_compiled(library, kernel, names):
    with pytest.raises(CompileError) as caught:
        library[kernel].describe()
    assert all(name in str(caught.value) for name in names)
    assert "\n" not in str(caught.value)


def test_an_argument_is_there_only_if_its_constant_is_set(library):
    source = SOURCE.replace(
        "{ x[0] = 0; }", "{ x[0] = 0; if (masked) x[0] += y[0]; if (unmasked) x[0] += 2 * z[0]; }"
    )
    masked = lab.compile(source, constants={"masked": True})
    unmasked = lab.compile(source, constants={"masked": False})
    assert repr(masked.optional) == "<kernel optional(x: device float*, y: device const float*)>"
    assert value(masked, "optional", mx.array([3.0])) == 3
    assert value(unmasked, "optional", mx.array([4])) == 8
    with pytest.raises(ArgumentError, match="no buffer called 'y'"):
        unmasked.optional(mx.zeros(1), y=mx.zeros(1), grid=1)


def test_an_absent_reference_is_not_read(library):
    source = """
    constant bool on [[function_constant(0)]];
    struct P { float a[3]; };
    kernel void f(device float* x, constant P& p [[function_constant(on)]], constant float* q [[buffer(5)]],
                  threadgroup float* t [[threadgroup(0), function_constant(on)]]) {
        x[0] = q[0]; if (on) x[0] = p.a[2];
    }
    """
    off = lab.compile(source, constants={"on": False})
    assert off.f(mx.zeros(1), mx.array([7.0]), grid=1).item() == 7


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("bool", True, 1),
        ("bool", np.bool_(True), 1),
        ("bool", 0, 0),
        ("char", -128, -128),
        ("uchar", 255, 255),
        ("short", -32768, -32768),
        ("ushort", 65535, 65535),
        ("int", -(2**31), -(2.0**31)),
        ("uint", 2**32 - 1, 2.0**32),
        ("long", -(2**63), -(2.0**63)),
        ("ulong", 2**64 - 1, 2.0**64),
        ("half", 0.1, float(np.float16(0.1))),
        ("float", 0.1, float(np.float32(0.1))),
        ("float", 1e-30, 1e-30),
        ("float", 3, 3),
        ("float", float("inf"), float("inf")),
        ("bfloat", 1.5, 1.5),
        ("uint32_t", 5, 5),
        ("unsigned int", 5, 5),
        ("size_t", 5, 5),
    ],
)
def test_every_scalar_type_takes_its_values(kind, given, expected):
    source = (
        f"constant {kind} v [[function_constant(0)]]; kernel void f(device float* x) {{ x[0] = float(v); }}"
    )
    found = lab.compile(source, constants={"v": given}).f(mx.zeros(1), grid=1).item()
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("constants", "words"),
    [
        ({"scale": 1.5}, "'scale' is of type int: it takes an integer, not 1.5"),
        ({"scale": 2**31}, "an integer from -2147483648 to 2147483647"),
        ({"masked": 2}, "True or False"),
        ({"weights": (1, 2, 3)}, "it takes 4 numbers"),
        ({"weights": "a"}, "it takes a number"),
        ({"nothing": 1}, "has no function constant 'nothing': it has 'width' (102), 'masked' (100)"),
        ({55: 1}, "has no function constant 55"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(library, constants, words):
    with pytest.raises(ArgumentError) as caught:
        library.with_constants(constants)
    assert words in str(caught.value)


def test_values_are_compile_time_constants_for_the_optimiser():
    source = """
    constant int n [[function_constant(0)]];
    kernel void f(device float* x, device const float* never) {
        if (n == 3) x[0] = 1; else x[0] = never[1 << 30];
    }
    """
    library = lab.compile(source, constants={"n": 3})
    assert library.f(mx.zeros(1), mx.zeros(1), grid=1).item() == 1


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3", 3),
        ("100 + 2", 102),
        ("(1 << 4) | 1u", 17),
        ("0x1F", 31),
        ("-1", -1),
        ("SEVEN", None),
        ("f(1)", None),
        ("", None),
        ("1.5", None),
        ("7/2", 3),
    ],
)
def test_plain_indices_are_read_without_the_compiler(text, number):
    assert integer(text) == number
