"""Types and struct layouts, as the compiler lays them out."""

from __future__ import annotations

import pytest

from lab.source.layout import Element, ParameterType, numbers, scalar_size
from lab.source.program import Program, read

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def program(source: str) -> Program:
    return read(HEAD + source)


def parameter(declaration: str, before: str = "") -> ParameterType:
    (kernel,) = program(f"{before}\nkernel void f({declaration}) {{ }}").kernels.values()
    (found,) = kernel.types.values()
    return found


def layout(body: str, before: str = "") -> tuple[int, dict[str, int]]:
    """Size of a struct with this body, and the offset of each member."""
    found = (
        program(f"{before}\nstruct S {{ {body} }};\nkernel void f(constant S& s) {{ }}")
        .kernels["f"]
        .structs["S"]
    )
    return found.size, {field.name: field.offset for field in found.fields}


# ---- parameters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scalar", "dtype", "size"),
    [
        ("bool", "bool", 1), ("char", "int8", 1), ("uchar", "uint8", 1), ("short", "int16", 2),
        ("ushort", "uint16", 2), ("int", "int32", 4), ("uint", "uint32", 4), ("long", "int64", 8),
        ("ulong", "uint64", 8), ("half", "float16", 2), ("bfloat", "bfloat16", 2), ("float", "float32", 4),
    ],
)  # fmt: skip
def test_scalars_have_the_dtype_of_their_size(scalar, dtype, size):
    element = parameter(f"device {scalar}* x").element
    assert (element.scalar, element.dtype, element.size, element.components) == (scalar, dtype, size, 1)


@pytest.mark.parametrize(
    "spelling", ["uint8_t", "unsigned char", "int32_t", "size_t", "unsigned", "signed char"]
)
def test_other_spellings_are_the_same_scalars(spelling):
    scalar = {
        "uint8_t": "uchar",
        "unsigned char": "uchar",
        "int32_t": "int",
        "size_t": "ulong",
        "unsigned": "uint",
    }
    assert parameter(f"device {spelling}* x").element.scalar == scalar.get(spelling, "char")


@pytest.mark.parametrize("scalar", ["char", "ushort", "uint", "half", "bfloat", "float", "bool", "long"])
@pytest.mark.parametrize(("n", "lanes"), [(2, 2), (3, 4), (4, 4)])
def test_vectors_of_three_take_the_room_of_four(scalar, n, lanes):
    element = parameter(f"device {scalar}{n}* x").element
    assert (element.components, element.lanes) == (n, lanes)
    assert element.size == lanes * scalar_size(element.dtype)
    assert str(element) == f"{scalar}{n}"


@pytest.mark.parametrize("n", [2, 3, 4])
def test_packed_vectors_take_no_more_room_than_they_hold(n):
    element = parameter(f"device packed_half{n}* x").element
    assert (element.components, element.lanes, element.size) == (n, n, 2 * n)


@pytest.mark.parametrize(
    ("columns", "rows", "size"), [(2, 2, 16), (3, 3, 48), (4, 4, 64), (2, 4, 32), (4, 3, 64), (3, 2, 24)]
)
def test_columns_of_a_matrix_are_laid_out_as_vectors(columns, rows, size):
    element = parameter(f"constant float{columns}x{rows}& m").element
    assert (element.columns, element.components, element.size) == (columns, rows, size)
    assert str(element) == f"float{columns}x{rows}"


@pytest.mark.parametrize(
    ("declaration", "shown"),
    [
        ("device float* x", "device float*"),
        ("device const float4* x", "device const float4*"),
        ("const device float* x", "device const float*"),
        ("device float const* x", "device const float*"),
        ("constant uint& x", "constant uint&"),
        ("const constant uint& x", "constant uint&"),
        ("device volatile atomic_uint* x", "device uint*"),
        ("threadgroup half2* x", "threadgroup half2*"),
        ("constant uint (&x)[4]", "constant uint (&)[4]"),
        ("device void* x", "device void*"),
        ("device packed_float3* x", "device packed_float3*"),
        ("constant vec<int, 2>& x", "constant int2&"),
    ],
)
def test_a_type_is_shown_as_it_would_be_written(declaration, shown):
    assert str(parameter(declaration)) == shown


def test_an_alias_is_seen_through():
    assert str(parameter("device T* x", "using T = half4;")) == "device half4*"


def test_a_macro_is_seen_through():
    assert (
        str(parameter("CONST_BUFFER(x)", "#define CONST_BUFFER(name) device const uint* name"))
        == "device const uint*"
    )


def test_an_enumeration_is_its_underlying_type():
    assert parameter("constant E& e", "enum class E : ushort { a, b };").element.dtype == "uint16"


def test_an_instance_of_a_template_is_known_by_its_name_and_size():
    element = parameter("constant Args<float>& a", "template <class T> struct Args { T x[3]; };").element
    assert (str(element), element.size) == ("Args<float>", 12)


# ---- structs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "size", "offsets"),
    [
        ("float a; float b;", 8, [0, 4]),
        ("uchar a; float b; uchar c;", 12, [0, 4, 8]),
        ("float a; float3 b; float c;", 48, [0, 16, 32]),
        ("packed_float3 a; float b;", 16, [0, 12]),
        ("half a; half3 b; bool c; long d;", 32, [0, 8, 16, 24]),
        ("float4x4 m; uint n;", 80, [0, 64]),
        ("float3x3 m; float f;", 64, [0, 48]),
        ("uint2 a[3]; uint b;", 32, [0, 24]),
        ("float a[2][3]; uchar b;", 28, [0, 24]),
        ("device float* p; uint n;", 16, [0, 8]),
        ("alignas(16) float a; alignas(16) float b;", 32, [0, 16]),
        ("bfloat a; uchar3 b; ushort c;", 12, [0, 4, 8]),
    ],
)
def test_members_lie_where_metal_puts_them(body, size, offsets):
    found_size, found = layout(body)
    assert (found_size, list(found.values())) == (size, offsets)


def test_a_struct_within_a_struct_is_laid_out_too():
    source = "struct In { float3 v; uchar n; };"
    found_size, offsets = layout("uint a; In in; In many[2]; uint b;", source)
    assert (found_size, offsets) == (128, {"a": 0, "in": 16, "many": 48, "b": 112})


def test_members_of_a_union_share_their_place():
    assert layout("uint kind; union { uint u; float f; };") == (8, {"kind": 0, "u": 4, "f": 4})


def test_a_base_s_members_are_laid_out_before_the_struct_s_own():
    source = "struct B { float a; uint b; };\nstruct S : B { float c; };\nkernel void f(constant S& s) { }"
    found = program(source).kernels["f"].structs["S"]
    assert (found.size, [(f.name, f.offset) for f in found.fields]) == (12, [("a", 0), ("b", 4), ("c", 8)])


def test_an_array_member_has_a_length():
    source = "struct S { half2 a[5]; float m[2][3]; };\nkernel void f(constant S& s) { }"
    a, m = program(source).kernels["f"].structs["S"].fields
    assert (a.element.count, a.element.components, m.element.count) == (5, 2, 6)


def test_structs_of_one_name_in_two_namespaces_are_the_ones_the_kernel_names():
    source = "namespace n { struct S { float4 v; uint i; }; kernel void f(constant S& s) { } }"
    kernel = program(source).kernels["f"]
    assert kernel.types["s"].element.size == kernel.structs["S"].size == 32


# ---- the numbers a unit describes itself with --------------------------------------------------------------


def test_numbers_are_read_from_the_constants_of_a_module():
    ir = """
@msl_kernel_0 = dso_local local_unnamed_addr addrspace(2) constant [3 x i32] [i32 1, i32 -1, i32 0], align 4
@msl_struct_1 = constant [2 x i32] zeroinitializer, align 4
@msl_index_2 = constant [1 x i32] [i32 7], align 4
@other = constant [1 x i32] [i32 9]
"""
    assert numbers(ir) == {"msl_kernel_0": [1, 0xFFFFFFFF, 0], "msl_struct_1": [0, 0], "msl_index_2": [7]}


def test_an_element_counts_the_scalars_of_its_padding():
    assert Element("float", "float32", 3, 1, 16).lanes == 4
    assert Element("float", "float32", 3, 3, 48).lanes == 12
