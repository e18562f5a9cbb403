"""What the scanner finds in a source, and how it rewrites it."""

from __future__ import annotations

import pytest

from lab.source.declarations import THREAD_ATTRIBUTES, Declarations, KernelDeclaration
from lab.source.scan import scan


def only_kernel(source: str) -> KernelDeclaration:
    (kernel,) = scan(source).kernels
    return kernel


def parameters(source: str) -> list[tuple[str, str, str, int | None]]:
    """Name, type, role and index of each parameter of the only kernel."""
    return [(p.name, p.type, p.role, p.index) for p in only_kernel(source).parameters]


def indices(source: str) -> dict[str, int | None]:
    return {p.name: p.index for p in only_kernel(source).parameters}


def rewritten(source: str, found: Declarations | None = None) -> str:
    """``source`` with the scanner's edits as a unit applies them, one space wherever there was any."""
    out, at = [], 0
    for edit in sorted((found or scan(source)).edits, key=lambda e: (e.start, e.end)):
        if edit.start >= at:  # not inside something already replaced
            out += [source[at : edit.start], edit.text]
            at = edit.end
    return " ".join("".join([*out, source[at:]]).split())


# ---- kernels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        "kernel void f",
        "[[kernel]] void f",
        "kernel\nvoid\nf",
        "[[max_total_threads_per_threadgroup(64)]] kernel void f",
        "kernel __attribute__((max_total_threads_per_threadgroup(64))) void f",
        "static kernel void f",
        "void kernel f",
    ],
)
def test_every_form_of_a_kernel_s_head_is_found(head):
    assert only_kernel(f"{head}(device float* x) {{ x[0] = 1; }}").name == "f"


def test_other_functions_are_no_kernels():
    assert (
        scan(
            "static inline float f(float x) { return x; } void g(); float h(int kernel_size) { return 1; }"
        ).kernels
        == []
    )


def test_a_declaration_without_a_body_is_no_kernel():
    assert [
        k.name for k in scan("kernel void f(device float* x); kernel void f(device float* x) { }").kernels
    ] == ["f"]


def test_kernels_come_in_the_order_of_the_source():
    found = scan("kernel void b() {} struct S { int kernel_count; }; kernel void a() {} kernel void c() {}")
    assert [k.name for k in found.kernels] == ["b", "a", "c"]


def test_a_kernel_knows_the_place_of_its_name_and_the_span_of_its_definition():
    kernel = only_kernel("\n  kernel void\n    f(device int* x)\n{\n  if (1) { }\n}\n")
    assert (kernel.token.line, kernel.token.column) == (3, 5)
    assert (kernel.first.line, kernel.last.line) == (2, 6)


def test_a_kernel_in_namespaces_is_named_by_its_path():
    kernel = only_kernel("namespace a { namespace b::c { kernel void f() {} } }")
    assert (kernel.name, kernel.expression) == ("f", "::a::b::c::f")


def test_a_host_name_is_the_kernel_s_name():
    kernel = only_kernel('[[host_name("step_1")]] kernel void step() {}')
    assert (kernel.name, kernel.expression) == ("step_1", "::step")


def test_a_template_is_no_kernel_until_it_is_instantiated():
    assert scan("template <typename T> kernel void f(device T* x) { }").kernels == []


@pytest.mark.parametrize(
    "instantiation",
    [
        'template [[host_name("f4")]] kernel void f<float, 4>(device float*, uint);',
        'template [[host_name("f4")]] [[kernel]] void f<float, 4>(device float* x [[buffer(0)]], uint i);',
        'template [[host_name("f4")]] [[kernel]] decltype(f<float, 4>) f<float, 4>;',
        'template\n[[host_name("f" "4")]]\nkernel void f<float,\n 4>(device float*, uint);',
    ],
)
def test_an_instantiation_is_a_kernel_with_its_host_name(instantiation):
    template = (
        "template <typename T, int N>\nkernel void f(device T* x, uint i [[thread_position_in_grid]]) { }\n"
    )
    source = template + instantiation
    kernel = only_kernel(source)
    assert (kernel.name, "".join(kernel.expression.split())) == ("f4", "::f<float,4>")
    assert [(p.name, p.role) for p in kernel.parameters] == [("x", "buffer"), ("i", "thread")]
    assert rewritten(source).endswith("{ } ;") or rewritten(source).endswith(
        "{ }"
    )  # the compiler needs none of it


def test_an_instantiation_without_a_host_name_is_named_as_it_is_written():
    source = (
        "template <typename T> kernel void f(device T* x) { }\ntemplate kernel void f<half>(device half*);"
    )
    assert only_kernel(source).name == "f<half>"


def test_lines_stay_where_they_were_after_an_instantiation_is_removed():
    source = (
        'template <class T> kernel void f(device T* x) { }\ntemplate [[host_name("a")]]\nkernel void '
        "f<int>(device int*);\nint last;"
    )
    out, at = [], 0
    for edit in sorted(scan(source).edits, key=lambda e: e.start):
        out += [source[at : edit.start], edit.text]
        at = edit.end
    text = "".join([*out, source[at:]])
    assert text.index("last") == source.index("last")
    assert text.count("\n") == source.count("\n")


# ---- parameters ------------------------------------------------------------------------------------------


def test_buffers_are_device_and_constant_pointers_and_references():
    source = (
        "kernel void f(device float* a [[buffer(0)]], device const uint* b [[buffer(1)]], const device half "
        "*c [[buffer(2)]],"
        " constant S& d [[buffer(3)]], device atomic_uint& e [[buffer(4)]], constant uint (&g)[4] "
        "[[buffer(5)]]) { }"
    )
    assert parameters(source) == [
        ("a", "device float*", "buffer", 0),
        ("b", "device const uint*", "buffer", 1),
        ("c", "const device half *", "buffer", 2),
        ("d", "constant S&", "buffer", 3),
        ("e", "device atomic_uint&", "buffer", 4),
        ("g", "constant uint (&)[4]", "buffer", 5),
    ]


def test_buffers_without_an_index_are_numbered_in_order():
    assert indices("kernel void f(device int* a, constant int& b, device int* c) { }") == {
        "a": 0,
        "b": 1,
        "c": 2,
    }


def test_a_buffer_without_an_index_gets_the_lowest_that_is_free():
    source = (
        "kernel void f(device int* a, device int* b [[buffer(0)]], device int* c, device int* d "
        "[[buffer(2)]]) { }"
    )
    assert indices(source) == {"a": 1, "b": 0, "c": 3, "d": 2}


def test_threadgroup_arguments_are_numbered_apart_from_buffers():
    source = (
        "kernel void f(device int* a, threadgroup int* t, threadgroup half* u [[threadgroup(2)]], "
        "threadgroup int* v) { }"
    )
    assert [(p[0], p[2], p[3]) for p in parameters(source)] == [
        ("a", "buffer", 0),
        ("t", "threadgroup", 0),
        ("u", "threadgroup", 2),
        ("v", "threadgroup", 1),
    ]


def test_an_index_that_is_no_number_is_left_to_the_compiler():
    source = "kernel void f(device int* a [[buffer(Data)]], device int* b [[buffer(1)]]) { }"
    a, b = only_kernel(source).parameters
    assert a.index_at is not None
    assert (a.index, source[slice(*a.index_at)]) == (None, "Data")
    assert (b.index, b.index_at) == (1, None)


@pytest.mark.parametrize("attribute", sorted(THREAD_ATTRIBUTES))
def test_every_thread_attribute_is_one(attribute):
    (parameter,) = only_kernel(f"kernel void f(uint i [[{attribute}]]) {{ }}").parameters
    assert (parameter.role, parameter.attribute, parameter.index) == ("thread", attribute, None)


def test_a_parameter_may_be_called_like_an_attribute():
    source = "kernel void f(uint3 thread_position_in_grid [[thread_position_in_grid]]) { }"
    assert parameters(source) == [("thread_position_in_grid", "uint3", "thread", None)]


def test_the_attribute_that_counts_is_found_among_several():
    assert indices("kernel void f(device int* a [[buffer(3), raster_order_group(1)]]) { }") == {"a": 3}


def test_types_with_template_arguments_keep_them():
    source = "kernel void f(device vec<float, 4>* a, constant array<uint, 2>& b) { }"
    assert [(p[0], p[1]) for p in parameters(source)] == [
        ("a", "device vec<float, 4>*"),
        ("b", "constant array<uint, 2>&"),
    ]


def test_parameters_without_a_name_get_one():
    source = "kernel void f(device int* [[buffer(1)]], uint [[thread_position_in_grid]]) { }"
    assert parameters(source) == [
        ("argument0", "device int*", "buffer", 1),
        ("argument1", "uint", "thread", None),
    ]


def test_an_attribute_kernels_do_not_have_is_unknown():
    (parameter,) = only_kernel("kernel void f(uint i [[thread_position]]) { }").parameters
    assert (parameter.role, parameter.attribute) == ("unknown", "thread_position")


@pytest.mark.parametrize("parameters_", ["", "void", " void "])
def test_a_kernel_may_take_nothing(parameters_):
    assert only_kernel(f"kernel void f({parameters_}) {{ }}").parameters == ()


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("fragment float4 f() { return 1; }", "fragment functions"),
        ("vertex float4 f() { return 1; }", "vertex functions"),
        ("kernel void f(texture2d<float, access::read> t [[texture(0)]]) { }", "textures"),
        ("kernel void f(depth2d_array<float> t) { }", "textures"),
        ("kernel void f(sampler s [[sampler(0)]]) { }", "samplers"),
        ("kernel void f(V v [[stage_in]]) { }", "render functions"),
    ],
)
def test_what_is_not_for_compute_is_told(source, what):
    assert [words for _, words in scan(source).out_of_scope] == [what]


def test_a_struct_may_be_called_like_a_texture():
    found = scan("kernel void f(constant texture_info& t, device sampler_state* s) { }")
    assert found.out_of_scope == []


# ---- structs ---------------------------------------------------------------------------------------------


def fields(source: str, name: str = "S") -> tuple[str, ...]:
    return scan(source).structs[name].fields


def test_members_are_listed_in_order():
    assert fields("struct S { uint n; float a, b; half c[4]; float4x4 m; device float* p; vec<float, 2> v = "
                  "{1, 2}; };") == (
        "n", "a", "b", "c", "m", "p", "v",
    )  # fmt: skip


def test_what_is_no_data_member_is_left_out():
    source = """struct S {
        static constant int N = 3; using T = int; typedef float F; enum Kind { A, B };
        S() : a(1) {} S(int x) : a{x}, b{x} {}
        int get() const { return a; } void set(int x); int operator()(int x) const { return x; }
        int a; T b; int bits : 3;
    };"""
    assert fields(source) == ("a", "b")


def test_members_of_an_anonymous_union_belong_to_the_struct():
    assert fields("struct S { int kind; union { uint u; float f; struct { half x, y; }; }; int last; };") == (
        "kind", "u", "f", "x", "y", "last",
    )  # fmt: skip


def test_a_member_declared_with_its_type_is_one_member():
    found = scan("struct S { struct Inner { int z; } inner, many[2]; enum E { A } e; int last; };")
    assert found.structs["S"].fields == ("inner", "many", "e", "last")
    assert found.structs["Inner"].qualified == "::S::Inner"
    assert found.structs["Inner"].fields == ("z",)


def test_members_of_a_base_come_first():
    assert fields("struct A { int a; }; struct S : A { int b; };") == ("a", "b")


@pytest.mark.parametrize(
    "source", ["struct S : Base<int> { int b; };", "template <class T> struct S { T b; };"]
)
def test_a_struct_with_members_we_cannot_name_is_left_out(source):
    assert "S" not in scan(source).structs


@pytest.mark.parametrize(
    "source",
    ["typedef struct { int a; } S;", "typedef struct S_ { int a; } S;", "typedef struct { int a; } S, T;"],
)
def test_a_typedef_names_a_struct(source):
    assert fields(source) == ("a",)


def test_a_struct_in_a_namespace_is_qualified():
    assert scan("namespace n { struct S { int a; }; }").structs["S"].qualified == "::n::S"


def test_attributes_and_alignment_of_a_struct_are_no_part_of_its_name():
    assert fields("struct alignas(16) S { int a; };") == ("a",)


def test_constructors_for_several_address_spaces_become_one():
    source = (
        "struct S { int a; S(int x) thread : a(x) {} S(int x) threadgroup : a(x) {} S(int x) device : a(x) {}"
        " S() threadgroup {} template <class T> S(T x) thread {} template <class T> S(T x) constant {} };"
    )
    assert rewritten(source) == "struct S { int a; S(int x) : a(x) {} S() {} template <class T> S(T x) {} };"


def test_constructors_that_differ_in_a_template_s_condition_both_stay():
    source = (
        "struct S { template <class T, enable_if<a<T> && b> = 0> S(T x) thread {}"
        " template <class T, enable_if<c<T> || b> = 0> S(T x) thread {} };"
    )
    assert rewritten(source) == source.replace(" thread", " ").replace("  {}", " {}")


def test_methods_for_several_address_spaces_stay():
    source = "struct S { int f() const thread { return 1; } int f() const device { return 2; } };"
    assert rewritten(source) == source


@pytest.mark.parametrize("space", ["device", ""])
def test_a_method_for_constant_memory_steps_aside_for_one_that_serves_it(space):
    source = f"struct S {{ int f() const {space} {{ return 1; }} int f() const constant {{ return 2; }} }};"
    assert "const __constant {" in rewritten(source)


def test_a_struct_after_conditions_in_a_template_s_parameters_is_found():
    source = (
        "template <class T, enable_if<sizeof(T) < 8 && a<T>, int> = 0> void f(T x) { } struct S { int a; };"
    )
    assert fields(source) == ("a",)


# ---- program-scope and threadgroup storage -----------------------------------------------------------------


def test_a_constant_table_becomes_storage_and_a_view_of_it_in_constant_memory():
    assert rewritten("constant float tab[2] = {1, 2};") == (
        "static const __global float tab__msl[2] = {1, 2}; static constant auto& tab = "
        "msl_constant(tab__msl);"
    )


def test_a_constant_may_be_used_by_the_next_of_its_declaration():
    assert rewritten("constant constexpr int N = 4, M = N + 1;") == (
        "static const __global constexpr int N__msl = 4; static constexpr constant auto& N = "
        "msl_constant(N__msl); "
        "static const __global constexpr int M__msl = N + 1; static constexpr constant auto& M = "
        "msl_constant(M__msl);"
    )


@pytest.mark.parametrize(
    "source",
    [
        "static constant int x = 1;",
        "constexpr constant int x = 1;",
        "const constant int x = 1;",
        "int constant x = 1;",
        "constant float2 x(1, 2);",
        "constant array<int, 2> x = {1, 2};",
        "constant struct { int a; } x = {1};",
    ],
)
def test_every_spelling_of_a_constant_is_found(source):
    assert " auto& x = msl_constant(x__msl);" in rewritten(source)


@pytest.mark.parametrize(
    "source",
    [
        "void f(constant int* p) { constant int* q = p; constant S& r = *p; }",
        "constant int* f();",
        "constant int (*f)(int);",
        "void f() { constant int (&a)[2] = t; }",
        "void f() { threadgroup float* p; threadgroup float (*q)[4]; threadgroup const float& r = *p; }",
    ],
)
def test_pointers_and_references_are_left_as_they_are(source):
    assert scan(source).edits == []


def test_threadgroup_storage_becomes_a_struct_of_the_group_s_memory():
    assert rewritten("void f() { threadgroup float a[4], b; }") == (
        "void f() { struct msl_storage_0 { float a[4], b; }; "
        "auto& msl_storage_0_ = msl_threadgroup<msl_storage_0, 0>(); "
        "auto& a = msl_storage_0_.a; auto& b = msl_storage_0_.b; }"
    )


def test_each_threadgroup_declaration_has_storage_of_its_own():
    out = rewritten(
        "void f() { threadgroup float a; } void g() { if (1) { threadgroup int b[2][3]; } threadgroup S s; }"
    )
    for n, name in enumerate("abs"):
        assert f"auto& {name} = msl_storage_{n}_.{name};" in out


def test_threadgroup_storage_of_a_type_defined_there_is_found():
    assert "auto& s = msl_storage_0_.s;" in rewritten("void f() { threadgroup struct { float a[4]; } s; }")


def test_a_cast_to_threadgroup_memory_declares_nothing():
    assert (
        scan(
            "void f(thread char* p) { auto q = (threadgroup float*)p; g((threadgroup int*)q, sizeof(int)); }"
        ).edits
        == []
    )


def test_a_static_member_in_constant_memory_becomes_storage():
    assert (
        rewritten("struct S { static constant int N = 3; };")
        == "struct S { static const __global int N = 3; };"
    )


def test_a_method_on_constant_memory_serves_objects_anywhere():
    assert rewritten("struct S { int f() constant { return 1; } };") == "struct S { int f() { return 1; } };"


def test_an_initialiser_of_threadgroup_storage_is_refused():
    ((token, message),) = scan("void f() { threadgroup float a[2] = {1, 2}; }").refused
    assert (token.text, message) == ("=", "a threadgroup variable cannot have an initialiser")


@pytest.mark.parametrize("place", ["case 1:", "else", "do", "if (x)", "for (;;)", "}", "label:"])
def test_storage_is_found_wherever_a_statement_may_stand(place):
    assert "msl_threadgroup<" in rewritten(f"void f() {{ {{ {place} threadgroup int a; }} }}")


def test_a_kernel_with_a_result_is_refused():
    ((token, message),) = scan("kernel int f() { return 1; }").refused
    assert (token.text, message) == ("f", "kernel 'f' has a result: a kernel is a void function")


def test_function_constants_and_what_is_made_from_them_are_found():
    found = scan(
        "constant bool flag [[function_constant(2 + 1)]]; constant uint N[[function_constant(4)]];"
        " constant bool other = is_function_constant_defined(flag) ? flag : true; constant int plain = 3;"
    ).function_constants
    assert list(found) == ["flag", "N", "other"]
    assert [c.type for c in found.values()] == ["bool", "uint", "bool"]
    assert [c.index_at is None for c in found.values()] == [False, False, True]
    assert found["other"].uses == {"flag"}


@pytest.mark.parametrize(
    "source",
    [
        "vertex V f(uint i [[vertex_id]]) { return V(); }",
        "[[fragment]] float4 f(V v [[stage_in]]) { return 1; }",
        "float4 g(texture2d<float> t, sampler s) { return t.sample(s, 0); }",
        "constexpr sampler linear(filter::linear);",
        "struct A { texture2d<float> t; }; float4 g(constant A& a) { return 0; }",
        "using namespace raytracing;",
        "kernel void f(texture2d<float> t) { }",
        "template <class T> kernel void f(texture2d<T> t) { }"
        ' template [[host_name("h")]] kernel void f<float>(texture2d<float>);',
    ],
)
def test_kernels_beside_what_is_out_of_scope_stay(source):
    text = source + " kernel void k(device int* x) { }"
    found = scan(text)
    assert [kernel.name for kernel in found.kernels] == ["k"]
    for edit in sorted(found.edits, key=lambda e: -e.start):
        text = text[: edit.start] + edit.text + text[edit.end :]
    assert text.strip("; ") == "kernel void k(device int* x) { }"


def test_a_kernel_beyond_the_scope_is_known_by_its_name():
    source = "kernel void f(texture2d<float> t) { } kernel void k(device int* x) { }"
    assert {name: what for name, (_, what) in scan(source).beyond.items()} == {"f": "textures"}


# ---- conditional expressions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("x = c ? a : f(b, 1);", "x = (k c ? (b a) : (b f(b, 1)));"),
        ("f(c ? a : b, d);", "f((k c ? (b a) : (b b)), d);"),
        ("x = c ? a : d ? e : g;", "x = (k c ? (b a) : (b (k d ? (b e) : (b g))));"),
        ("x = c ? d ? e : g : a;", "x = (k c ? (b (k d ? (b e) : (b g))) : (b a));"),
        ("x = c ? a : b = 3;", "x = (k c ? (b a) : (b b = 3));"),
        ("x[c ? i : j] = v;", "x[(k c ? (b i) : (b j))] = v;"),
        ("x = i < n ? v : w;", "x = (k i < n ? (b v) : (b w));"),
        ("x = c ? 1 : 2;", "x = c ? 1 : 2;"),
        ("x = c ? N::a : N::b;", "x = (k c ? (b N::a) : (b N::b));"),
        ("switch (c ? a : b) { case 1: x = 2; }", "switch ((k c ? (b a) : (b b))) { case 1: x = 2; }"),
        ("if (d) return c ? a : b;", "if (d) return (k c ? (b a) : (b b));"),
        ("g(); f(a) > b[1] ? h() : k();", "g(); (k f(a) > b[1] ? (b h()) : (b k()));"),
        ("if (d) c ? a : b; else e ? a : b;", "if (d) (k c ? (b a) : (b b)); else (k e ? (b a) : (b b));"),
        ("x = c ? p : 0;", "x = (k c ? (b p) : 0);"),
    ],
)
def test_branches_of_a_conditional_are_marked(source, wanted):
    spelled = wanted.replace("(b ", "(msl_branch(), ").replace("(k ", "(msl_chosen(), ")
    assert rewritten(f"void f() {{ {source} }}") == f"void f() {{ {spelled} }}"


def test_a_branch_with_a_bit_field_is_left_alone():
    source = "struct S { uint a : 4; uint b; }; void f() { x = c ? s.a : s.b; }"
    marked = source.replace("c ? s.a : s.b", "(msl_chosen(), c ? s.a : (msl_branch(), s.b))")
    assert rewritten(source) == marked


@pytest.mark.parametrize(
    "source", ["x = c ? a;", "x = c ? a }", "f(c ? a)", "x = c ?", "a<c ? 1 + N : 2> b;"]
)
def test_what_may_be_no_conditional_is_left_alone(source):
    assert scan(f"void f() {{ {source} }}").edits == []


# ---- robustness --------------------------------------------------------------------------------------------


def test_half_typed_source_is_passed_over():
    found = scan("kernel void done(device float* x) { x[0] = 1; }\nkernel void half_typed(device float* x, ")
    assert [k.name for k in found.kernels] == ["done"]


def test_no_text_makes_the_scanner_fail(rng):
    pieces = """kernel void f g device constant threadgroup thread float int struct union enum template
        typedef namespace static constexpr const using operator class public ( ) { } [ ] [[ ]] < > , ; : :: =
        * & + . ? 1 4u "s" host_name buffer if for return S T alignas inline extern auto [[kernel]]
        thread_position_in_grid""".split()  # noqa: SIM905
    for _ in range(400):
        source = " ".join(rng.choice(pieces, rng.integers(1, 40)))
        print(source)
        found = scan(source)
        assert all(0 <= e.start <= e.end <= len(source) for e in found.edits)


def test_a_source_cut_anywhere_is_read():
    source = (
        "constant float t[2] = {1, 2}; struct S { int a; union { int b; }; }; namespace n { template <class "
        "T> struct V { T x; }; }"
        " template <class T> kernel void f(device T* x [[buffer(0)]], constant S& s) { threadgroup float "
        "g[4], h; x[0] = s.a; }"
        ' template [[host_name("ff")]] kernel void f<float>(device float*, constant S&); kernel void k() {}'
    )
    for end in range(len(source)):
        scan(source[:end])
    assert [k.name for k in scan(source).kernels] == ["ff", "k"]
