"""A source as a whole: the kernels it has, what they take, and what is refused, at which place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab import resources
from lab.errors import CompileError, MslError
from lab.source.program import Options, Program, Signature, include_files, read

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"  # so a test's own first line is line 3


def program(source: str, **options) -> Program:
    return read(HEAD + source, options=Options(**options))


def only_kernel(source: str) -> Signature:
    (kernel,) = program(source).kernels.values()
    return kernel


def refusal(source: str) -> CompileError:
    with pytest.raises(CompileError) as caught:
        program(source)
    return caught.value


# ---- what kernels take -------------------------------------------------------------------------------------


def test_buffers_come_in_the_order_of_their_index():
    kernel = only_kernel(
        "kernel void f(device int* a [[buffer(2)]], constant int& b [[buffer(0)]], device int* c) { }"
    )
    assert [(p.name, p.index) for p in kernel.buffers] == [("b", 0), ("c", 1), ("a", 2)]


def test_device_pointers_and_references_that_are_not_const_are_written():
    kernel = only_kernel(
        "using In = const float; kernel void f(device float* a, device const float* b, device float& c,"
        " constant float* d, const device int& e, device In* g, device float* const h, device atomic_int* i)"
        " { }"
    )
    written = {p.name for p in kernel.buffers if kernel.writes(p)}
    assert written == {"a", "c", "h", "i"}


def test_an_index_may_be_a_constant_expression():
    source = """
enum Buffers { DATA = 4, SIZES };
namespace mine {
constant constexpr int OUT = 1;
kernel void f(device int* a [[buffer(DATA)]], device int* b, constant int& c [[buffer(SIZES + 2)]],
              device int* d [[buffer(OUT)]], threadgroup int* t [[threadgroup(0x1)]]) { }
}"""
    kernel = only_kernel(source)
    assert {p.name: p.index for p in kernel.parameters} == {"a": 4, "b": 0, "c": 7, "d": 1, "t": 1}


def test_threadgroup_arguments_are_no_buffers():
    kernel = only_kernel(
        "kernel void f(device float* x, threadgroup float* a, threadgroup half2* b [[threadgroup(0)]]) { }"
    )
    assert [p.name for p in kernel.buffers] == ["x"]
    assert [(p.name, p.index) for p in kernel.threadgroup_arguments] == [("b", 0), ("a", 1)]


def test_attributes_are_told_in_the_order_of_the_source():
    kernel = only_kernel(
        "kernel void f(uint i [[thread_index_in_simdgroup]], uint3 p [[thread_position_in_grid]]) { }"
    )
    assert kernel.attributes == ("thread_index_in_simdgroup", "thread_position_in_grid")


def test_a_kernel_knows_its_place():
    place = only_kernel("\n\nkernel void\n  f() { }").place
    assert place is not None
    assert (place.line, place.column) == (6, 3)


def test_only_structs_that_parameters_use_are_described():
    source = """struct Unused { int a; }; struct In { int b; }; struct S { In in; };
struct Hidden { private: int c; };
kernel void f(constant S& s, device Hidden* h) { }"""
    assert set(only_kernel(source).structs) == {"S", "In"}


def test_the_source_of_a_kernel_is_its_own_lines():
    own = "[[kernel]]\nvoid g(device int* x) // of x\n{\n    x[0] = 1;\n}"
    read_ = program(f"kernel void f() {{\n}}\n// between\n{own}\nconstant int h = 1;")
    assert read_.source_of(read_.kernels["g"]) == own


def test_the_source_of_an_instance_is_its_template():
    template = "template <class T>\nkernel void f(device T* x) { }"
    read_ = program(f'{template}\ntemplate [[host_name("g")]] kernel void f<int>(device int*);')
    assert read_.source_of(read_.kernels["g"]) == template


def test_defines_and_math_are_options(tmp_path):
    (tmp_path / "types.h").write_text("typedef float4 Row;\n")
    source = "kernel void f(device Row* x, constant T& n) { }"
    found = program(source, defines={"T": "uint"}, include=(tmp_path / "types.h",), math="fast")
    assert [str(found.kernels["f"].types[name]) for name in "xn"] == ["device float4*", "constant uint&"]


# ---- which functions may run -------------------------------------------------------------------------------


def test_uses_follows_calls_through_helpers():
    read_ = program(
        "inline float a(float x) { return sqrt(x); } inline float b(float x) { return a(x); }"
        " inline float c(float x) { return exp(x); }"
        " kernel void f(device float* x) { x[0] = b(x[1]); } kernel void g(device float* x) { x[0] = c(1); }"
    )
    assert {"sqrt", "a", "b"} <= read_.uses(read_.kernels["f"])
    assert "exp" not in read_.uses(read_.kernels["f"])
    assert "sqrt" not in read_.uses(read_.kernels["g"])


@pytest.mark.parametrize(
    "call",
    [
        "struct S { float v; float m() { return sqrt(v); } };"
        " inline float g(float x) { S s = {x}; return s.m(); }",
        "struct S { float v; S(float x) : v(sqrt(x)) {} }; inline float g(float x) { S s(x); return s.v; }",
        "struct S { float v; S operator+(S o) { return {sqrt(v + o.v)}; } };"
        " inline float g(float x) { S a = {x}; a = a + a; return a.v; }",
        "struct S { float v; operator float() const { return sqrt(v); } };"
        " inline float g(float x) { S s = {x}; return s; }",
        "template <class T> T t(T x) { return sqrt(x); } inline float g(float x) { return t<float>(x); }",
        "#define CALL(x) sqrt(x)\ninline float g(float x) { return CALL(x); }",
        "inline float r(float x) { return sqrt(x); }"
        " namespace n { inline float q(float x) { return ::r(x); } }"
        " inline float g(float x) { return n::q(x); }",
    ],
)
def test_uses_misses_no_way_to_call(call):
    read_ = program(f"{call}\nkernel void f(device float* x) {{ x[0] = g(x[1]); }}")
    assert "sqrt" in read_.uses(read_.kernels["f"])


def test_uses_leaves_out_what_a_helper_is_merely_handed():
    read_ = program(
        "inline float a(threadgroup float* p) { return p[0]; }"
        " struct S { float v; S operator+(S o) threadgroup { return o; } S operator+(S o) { return o; } };"
        " kernel void f(device S* x) { x[0] = x[0] + x[1]; }"
        " kernel void g(device float* x, threadgroup float* t) { x[0] = a(t); }"
        " kernel void h(device float* x) { threadgroup float t[4]; x[0] = a(t); }"
    )
    shares = {name for name, kernel in read_.kernels.items() if "threadgroup" in read_.uses(kernel)}
    assert shares == {"g", "h"}


def test_uses_of_an_instance_follows_its_template():
    source = (
        "template <class T> kernel void f(device T* x) { x[0] = sqrt(x[0]); }"
        'template [[host_name("g")]] kernel void f<float>(device float*);'
    )
    read_ = program(source)
    assert "sqrt" in read_.uses(read_.kernels["g"])


# ---- refusals ----------------------------------------------------------------------------------------------

KERNEL = """kernel void f(device float* x, device float4* v, constant float& c,
    uint i [[thread_position_in_grid]]) {
"""

# What stands in the kernel's body, from line 5 on; line, column, and what the message has to say.
BODIES = [
    ("  x[i] = y;\n}", 5, 10, "undeclared identifier 'y'"),
    ("  x[i] = 1.0f\n}", 5, 14, "expected ';'"),
    ("\tx[i] = y;\n}", 5, 9, "undeclared identifier 'y'"),
    ("  int a = 1; /* ä */ x[i] = y;\n}", 5, 29, "undeclared identifier 'y'"),
    ("  x[i] = c ? x[0] : y;\n}", 5, 21, "undeclared identifier 'y'"),
    ("  x[i] =\n      1 +\n      y;\n}", 7, 7, "undeclared identifier 'y'"),
    ("  threadgroup float t[4]; t[0] = y;\n}", 5, 34, "undeclared identifier 'y'"),
    ("  v[i] = float3(1);\n}", 5, 8, "no conversion from 'float3' to 'float4'"),
    ("  v[i].q = 1;\n}", 5, 8, "no member named 'q' in 'float4'"),
    ("  c = 1;\n}", 5, 5, "cannot assign to variable 'c'"),
    ("  x[i] = sin(x);\n}", 5, 10, "no matching function for call to 'sin' with T = device float *"),
    ("  double d = 1;\n}", 5, 3, "'double' is not supported in Metal"),
    ("  thread float* p = x;\n}", 5, 17, "device float *"),
    ("  device bfloat* b; *b = 1.0f;\n}", 5, 24, "no conversion from 'float' to 'bfloat'"),
    ("  x[i] = as_type<float>(half(1));\n}", 5, 10, "as_type: the two types must have the same size"),
    ("  for (int j = 0; j < 3; j++ { }\n}", 5, 30, "expected ')'"),
    ("  return 1;\n}", 5, 3, "void function 'f' should not return a value"),
    ("  threadgroup float t = 1;\n}", 5, 23, "cannot have an initialiser"),
    ("", 4, 41, "expected '}' to match this '{'"),
]


@pytest.mark.parametrize(
    ("body", "line", "column", "words"), BODIES, ids=[b[3][:40] + f"@{b[1]}:{b[2]}" for b in BODIES]
)
def test_an_error_points_at_the_user_s_own_text(body, line, column, words):
    source = HEAD + KERNEL + body
    found = refusal(KERNEL + body)
    first = found.diagnostics[0]
    assert first.place is not None
    assert (first.place.file, first.place.line, first.place.column) == ("cell", line, column)
    assert words in first.text
    head, shown, marks, *_ = str(found).split("\n")
    assert head.startswith(f"cell:{line}:{column}: error: ")
    gutter = shown.index("|") + 2
    assert shown[gutter:] == source.split("\n")[line - 1].replace("\t", " ")
    assert marks[gutter:].index("^") == column - 1


# Whole sources, from line 3 on.
SOURCES = [
    ("kernel void f(device float* x [[buffer(31)]]) { }", 3, 29, "buffer(0) to buffer(30)"),
    ("kernel void f(device float* x [[buffer(N)]]) { }", 3, 40, "undeclared identifier 'N'"),
    (
        "kernel void f(device int* a [[buffer(1)]],\n    device int* b [[buffer(1)]]) { }",
        4,
        17,
        "'a' and 'b' of kernel 'f' both have buffer(1)",
    ),
    (
        "kernel void f() { }\n\nkernel void f() { }",
        5,
        13,
        "two kernels are called 'f' (the first is in line 3)",
    ),
    ("kernel void f(float y) { }", 3, 21, "parameter 'y' of kernel 'f' is neither a buffer"),
    ("kernel void f(float* y) { }", 3, 22, "parameter 'y' of kernel 'f' is neither a buffer"),
    (
        "kernel void f(uint i [[thread_position_in_gird]]) { }",
        3,
        20,
        "did you mean [[thread_position_in_grid]]?",
    ),
    (
        "kernel void f(float i [[thread_position_in_grid]]) { }",
        3,
        21,
        "is a uint or ushort, or a vector of 2 or 3",
    ),
    ("kernel void f(uint2 i [[thread_index_in_threadgroup]]) { }", 3, 21, "is a uint or ushort"),
    ("kernel int f() { return 1; }", 3, 12, "a kernel is a void function"),
    ("kernel void f(texture2d<float> t [[texture(0)]]) { }", 3, 32, "textures are out of scope"),
    ("constant int N [[function_constant(65536)]];", 3, 14, "Metal has 0 to 65535"),
    ("constant int N;", 3, 14, "a constant needs a value where it is declared: 'int'"),
    ("threadgroup float t[4];", 3, 19, "must be in constant memory"),
    ('template [[host_name("g")]] kernel void f<int>(device int*);', 3, 41, "does not refer to a function"),
    ("struct S { float a }\nkernel void f(constant S& s) { }", 3, 19, "expected ';'"),
    ("kernel void f(constant S& s) { }", 3, 24, "unknown type name 'S'"),
    ("#define SQUARE(x) ((x) * missing)\nfloat g(float a) { return 1 + SQUARE(a); }", 4, 31, "'missing'"),
]


@pytest.mark.parametrize(("source", "line", "column", "words"), SOURCES, ids=[s[0][:50] for s in SOURCES])
def test_a_source_is_refused_where_it_is_wrong(source, line, column, words):
    first = refusal(source).diagnostics[0]
    assert first.place is not None
    assert words in first.text
    assert (first.place.line, first.place.column) == (line, column)


@pytest.mark.parametrize("source", [s[0] for s in SOURCES] + [KERNEL + b[0] for b in BODIES])
def test_no_word_of_ours_is_in_a_message(source):
    text = str(refusal(source))
    assert not re.search(r"msl_|__\w|OpenCL|generic|<stdin>|addrspace|/tmp|/lab/|\.h:\d", text)


def test_every_error_of_a_source_is_told():
    found = refusal("kernel void f(device float* x) {\n x[0] = a;\n x[1] = b;\n}")
    assert [d.place.line for d in found.diagnostics if d.place] == [4, 5]


def test_an_error_in_a_template_is_told_when_it_is_instantiated():
    source = (
        "template <class T> kernel void f(device T* x) {\n x[0] = x[0].y;\n}\n"
        'template [[host_name("g")]] kernel void f<float>(device float*);'
    )
    found = refusal(source)
    assert found.diagnostics[0].place is not None
    assert found.diagnostics[0].place.line == 4


def test_what_is_out_of_scope_is_a_kind_of_compile_error():
    assert isinstance(refusal("kernel void f(sampler s) { }"), MslError)


def test_a_note_shows_the_helper_that_does_not_fit():
    found = refusal("void g(threadgroup float* p) { }\nkernel void f(device float* x) { g(x); }")
    (note,) = found.diagnostics[0].notes
    assert note.place is not None and note.place.line == 3
    assert "'device'" in note.text and "'threadgroup'" in note.text


def test_warnings_come_with_the_program():
    (warning,) = program("kernel void f(device float* x) {\n if (x[0] = 1) return;\n}").warnings
    assert (warning.level, warning.place.line) == ("warning", 4)


def test_warnings_come_again_when_the_source_is_read_again():
    source = "kernel void f(device float* x) {\n if (x[1] = 1) return;\n}"
    assert program(source).warnings == program(source).warnings != ()


def test_a_label_names_the_source_in_messages():
    with pytest.raises(CompileError, match=r"^step:1:27: error: "):
        read("kernel void f() { int a = b; }", label="step")


def test_a_file_is_named_in_messages(tmp_path):
    with pytest.raises(CompileError, match=r"^step\.metal:1:27: error: "):
        read("kernel void f() { int a = b; }", tmp_path / "step.metal")


def test_a_missing_include_file_is_named():
    with pytest.raises(CompileError, match=r"include file /no/such\.h does not exist"):
        include_files([Path("/no/such.h")])


def test_shipped_kernels_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = resources.kernels() / "examples" / "axpy.metal"
    assert include_files(["kernels/examples/axpy.metal"]) == (shipped,)
    for path in ("kernels/no.metal", "examples/axpy.metal", "pyproject.toml"):
        with pytest.raises(CompileError, match="does not exist"):
            include_files([path])
    own = tmp_path / "kernels" / "examples" / "axpy.metal"
    own.parent.mkdir(parents=True)
    own.touch()
    assert include_files(["kernels/examples/axpy.metal"]) == (own,)


# ---- odd sources -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source", ["", "\n\n", "// nothing here", "int main() { return 0; }", "struct S { int a; };"]
)
def test_a_source_without_kernels_has_none(source):
    assert dict(read(source).kernels) == {}


def test_a_source_needs_no_include():
    assert list(read("kernel void f(device metal::float4* x) { x[0] = metal::sqrt(x[1]); }").kernels) == ["f"]


def test_user_macros_may_be_called_like_our_own_names():
    source = (
        "#define vec 3\n#define T int\n#define device_count 2\n#define element x\n"
        "kernel void f(device T* element) { x[0] = vec; }"
    )
    assert [p.name for p in only_kernel(source).buffers] == ["x"]


@pytest.mark.parametrize(
    "name",
    [
        "local",
        "global",
        "generic",
        "read_only",
        "pipe",
        "queue_t",
        "image2d_t",
        "uniform",
        "event_t",
        "vec_step",
    ],
)
def test_words_of_the_language_beneath_are_free_for_names(name):
    source = (
        f"struct {name}_s {{ float {name}; }};\n"
        f"kernel void f(constant {name}_s& s, device float* {name}) {{ {name}[0] = s.{name}; }}"
    )
    assert [p.name for p in only_kernel(source).buffers] == ["s", name]


@pytest.mark.parametrize("text", ["kernel void\n", "kernel void f\n", "constant\n"])
def test_a_source_that_ends_in_a_declaration_is_told_without_a_word_of_ours(text):
    with pytest.raises(CompileError) as caught:
        read(text)
    assert "pragma" not in str(caught.value)
