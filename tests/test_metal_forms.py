"""Forms that Metal takes and C++ for OpenCL does not, as public sources use them: each with its value."""

from __future__ import annotations

import mlx.core as mx
import pytest

import lab
from lab.errors import ArgumentError, CompileError, MslError

# What it is about, what stands before the kernel, the kernel's body, and x[0] afterwards.
CASES = [
    ("members handed to thread pointers", "void set(thread float* p) { p[1] = 3; }"
     " struct S { float b[2]; void run() { set(b); } };", "S s; s.run(); x[0] = s.b[1];", 3),
    ("references to members", "struct S { float b[4]; thread float& at(short i) { return b[i]; }"
     " const thread float& at(short i) const { return b[i]; } };",
     "S s; s.at(2) = 4; const S t = s; x[0] = t.at(2);", 4),
    ("methods of temporaries", "void set(thread float* p) { *p = 1; }"
     " struct S { float v; void put() { set(&v); } float get() const { return v; }"
     " float operator()(float a) const { return a + v; } operator int() const { return 7; }"
     " float named() const thread { return 10 * v; } }; S make(float v) { return S{v}; }",
     "x[0] = make(2).get() + make(3)(1.5) + int(make(0)) + make(4).named() +"
     " S{1}.get();", 2 + 4.5 + 7 + 40 + 1),
    ("a method beside its twin for other arguments", "void set(thread float* p) { *p = 1; }"
     " struct S { float v; void put() { set(&v); } float f(float a) const { return a; }"
     " float f(float2 a) const { return a.y; } };", "S s; s.put(); x[0] = s.v + s.f(3) + s.f(float2(1,"
     " 5));", 9),
    ("methods that are templates, and such as are defined outside",
     "void set(thread float* p, float v) { *p = v; } template <class T> struct M { T v[2];"
     " template <int N> void fill(T a = T(4)) { for (int i = 0; i < N; ++i) set(&v[i], a); } void"
     " later(short, T);"
     " template <class Op> void apply(Op op) { v[0] = op(v[0]); } };"
     " template <class T> void M<T>::later(short i, T a) { set(&v[i], a); }"
     " struct Twice { template <class T> T operator()(T a) { return 2 * a; } };",
     "M<float> m; m.fill<2>(); m.apply(Twice()); m.later(1, 3); x[0] = m.v[0] + m.v[1];", 11),
    ("numbers for constant references to a thread's own",
     "float f(const thread short& a, thread const int& b) { return a + b; }", "int i = 3; x[0] = f(i,"
     " 2);", 5),
    ("temporaries for constant references to a thread's own",
     "struct S { float v; }; template <class T> T f(const thread T& a) { return a; } S make() { return"
     " S{6}; }",
     "x[0] = f(make()).v + f(2.5);", 8.5),
    ("classes that stand for a number added to pointers",
     "template <int N> struct I { constexpr operator int() const { return N; } };",
     "device float* p = x; I<2> two; p += two; p -= I<1>(); for (int i = 0; i < 1; i += I<1>()) p += i;"
     " x[1] = 3; x[0] = p[0];", 3),
    ("functions as template arguments",
     "template <class T> using Step = void (*)(thread T*); typedef float (*Map)(float);"
     " template <class T> void one(thread T* a) { *a += 1; } float two(float a) { return 2 * a; }"
     " template <class T, Step<T> step> void run(thread T* a) { step(a); }"
     " template <Map map> float through(float a) { return map(a); }"
     " template <short n, void (*step)(thread float*)> void again(thread float* a) { for (short i = 0; i <"
     " n; i++)"
     " step(a); } typedef decltype(again<2, one>) kind;",
     "float a = 0; run<float, one<float>>(&a); again<2, one>(&a); kind* k = again<2, one>; k(&a);"
     " x[0] = a + through<two>(4) + through<&two>(1);", 5 + 8 + 2),
    ("address spaces of a pointer and of what it points to", "",
     "thread const device float* p[2]; p[0] = x; p[1] = x + 1; x[1] = 5; device float* thread q = x;"
     " x[0] = p[1][0] + q[1];", 10),
    ("coherent and volatile memory",
     "float f(coherent device float* a) { return a[1]; } float g(volatile coherent(system) device float* a)"
     " { return a[1]; } float h(const device coherent(device) float* a) { return a[1]; }",
     "x[1] = 2; float coherent = 1; x[0] = f(x) + g(x) + h(x) + coherent;", 7),
    ("fences of a scope", "", "atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst,"
     " thread_scope_device);"
     " atomic_thread_fence(mem_flags::mem_threadgroup, memory_order_acquire, thread_scope_threadgroup);"
     " threadgroup_barrier(mem_flags::mem_device, memory_scope::memory_scope_device); x[0] = 1;", 1),
    ("a scope that the source adds", "namespace metal { constexpr constant metal::thread_scope"
     " thread_scope_system ="
     " static_cast<thread_scope>(__METAL_MEMORY_SCOPE_SYSTEM__); }",
     "atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_system); x[0] = 2;", 2),
    ("literals of bfloat", "", "bfloat b = 1.5bf; x[0] = float(b + 2.BF) + 1e1bf;", 13.5),
    ("literals that stay float in templates", "template <class T> T inverse(T a) { return"
     " static_cast<T>(1.0 / a); }"
     " template <class T> T tiny(T a) { return a > 0 ? a : T(-1e9); }",
     "x[0] = float(inverse(bfloat(4))) + inverse(0.5) + tiny(2.0h) + 0x1p3 + .5 +"
     " 1.;", 0.25 + 2 + 2 + 8 + 0.5 + 1),
    ("bfloat as any other number", "", "bfloat b = 2.5bf; int i = b; uint u; u = b; half h = b; long l ="
     " b; float f = b;"
     " f += b; i *= b; x[1] = 1; x[1] += b; x[0] = i + u + h + l + f + x[1];", 5 + 2 + 2.5 + 2 + 5 + 3.5),
    ("bfloat and other numbers in conditions", "", "bfloat b = 2.5bf; bool c = x[0] == 0; bfloat d = c ? b"
     " : 0;"
     " float e = c ? b : 0.25f; auto z = c ? 1u : b; auto w = c ? b : d; bfloat n = c ? (c ? b : 1) : b;"
     " x[0] = float(d) + e + sizeof(z) + sizeof(w) + float(z) + (c ? b : d) * n;", 2.5 + 2.5 + 4 + 1 + 6.25),
    ("bfloat from classes that convert to a number",
     "struct One { char c; operator bool() thread { return true; } operator bool() const device { return"
     " true; } };",
     "bfloat b = bfloat(One()); b += 0; device One* p = (device One*)x; bfloat d; d = *p; x[0] = float(b)"
     " + float(d);",
     2),
    ("vectors with fewer values than components", "", "uint4 a = {1u, 2u, 3u}; float3 b = {4, 5}; float4 c"
     " = {6, 7};"
     " x[0] = a.z + 10 * a.w + b.y + b.z + c.y + c.z + c.w;", 3 + 5 + 7),
    ("threadgroup memory with an initialiser of nothing", "",
     "threadgroup float t[4] = {0}; t[1] = 2; threadgroup_barrier(mem_flags::mem_threadgroup); x[0] ="
     " t[1];", 2),
    ("names that the library leaves to the source",
     "constant bool forward = true; template <class T> void swap(thread T& a, thread T& b) { T c = a; a ="
     " b; b = c; }"
     " float move(float a) { return a; }", "float a = 1, b = 2; swap(a, b); x[0] = forward ? a + move(b) :"
     " 0;", 3),
    ("inner names of Metal's library", "struct P { float v; }; namespace metal { template <> struct"
     " _numeric_limits_impl<P> { static constexpr P max() { return P{9}; } }; }",
     "x[0] = numeric_limits<P>::max().v + vec_elements<float3>::value + vec_elements<float>::value"
     " + __is_valid_simdgroup_type<half2>::value + 10 * __is_valid_simdgroup_type<long>::value;", 9 + 3 + 1),
    ("constructors of the specialisations of a struct",
     "template <int N> struct L { L<N - 1> inner; int n; L(int d) thread : inner(d - 1), n(d) {} };"
     " template <> struct L<0> { int n; L(int d) thread : n(d) {} };",
     "L<2> l(5); x[0] = l.n * 10 + l.inner.inner.n;", 53),
    ("static members given room outside their struct", "template <int N> struct T { static constant"
     " constexpr const float"
     " v[2] = {1, 2}; }; template <> struct T<3> { static constant constexpr const float v[2] = {3, 4}; };"
     " constant constexpr const float T<3>::v[2];", "x[0] = T<3>::v[1] + T<2>::v[1];", 6),
    ("headers and names that no kernel here uses",
     "#include <metal_texture>\n#include <metal_raytracing>\nusing namespace raytracing;\n"
     "struct V { float4 position [[position]]; float2 uv [[user(locn0)]]; }; constexpr sampler"
     " s(filter::linear);"
     " vertex V at(uint i [[vertex_id]]) { return V(); } [[fragment]] float4 color(V v [[stage_in]],"
     " texture2d<float> t [[texture(0)]]) { return t.sample(s, v.uv); }", "x[0] = 1;", 1),
]  # fmt: skip


@pytest.mark.parametrize(("before", "body", "wanted"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_form_gives_its_value(msl, before, body, wanted):
    kernel = msl(f"{before}\nkernel void entry(device float* x) {{ {body} }}").entry
    assert kernel(mx.zeros(64), grid=1)[0].item() == pytest.approx(wanted)


def test_thread_attributes_may_stand_outside_of_kernels(msl):
    library = msl(
        "uint at [[thread_position_in_grid]];\nushort2 lane [[thread_position_in_threadgroup]];\n"
        "kernel void f(device float* x) { x[at] = at + 10 * lane.x; }\n"
        "kernel void g(device float* x, uint at [[thread_position_in_threadgroup]]) { x[at] = at; }\n"
        "kernel void h() { }\n"
        "struct S { uint i; S(uint i_ [[thread_index_in_simdgroup]]) : i(i_) { } };\n"
        "kernel void k(device float* x, uint i [[thread_position_in_grid]]) { S s(i); x[s.i] = 1; }"
    )
    assert library.k(mx.zeros(2), grid=2).tolist() == [1, 1]
    assert library.f(mx.zeros(4), grid=4, threadgroup=2).tolist() == [0, 11, 2, 13]
    assert library.g(mx.zeros(4), grid=4, threadgroup=2).tolist() == [0, 1, 0, 0]


def test_a_barrier_is_found_through_its_argument():
    source = "kernel void f(device float* x) { threadgroup_barrier(metal::mem_flags::mem_device); x[0] = 1; }"
    assert lab.compile(f"#include <metal_stdlib>\n{source}").f(mx.zeros(1), grid=1).item() == 1


def test_a_matrix_of_a_simdgroup_needs_one_extent(msl):
    source = "kernel void f(device float* x) { auto m = make_filled_simdgroup_matrix<float, 8>(2.0f);"
    kernel = msl(f"{source} simdgroup_matrix<float, 8> n = m; simdgroup_store(n, x, 8); }}").f
    assert kernel(mx.zeros(64), grid=32).tolist() == [2.0] * 64


def test_an_instance_may_leave_its_arguments_to_its_parameters(msl):
    library = msl(
        "template <int N> struct P { int v[N]; };\n"
        "template <class T, int N> [[kernel]] void f(device T* x [[buffer(0)]], constant P<N>& p"
        " [[buffer(1)]],"
        " uint i [[thread_position_in_grid]]) { x[i] = T(p.v[N - 1]) + T(N); }\n"
        'template [[host_name("a")]] [[kernel]] void f(device float*, constant P<2>& p, uint);\n'
        'template [[host_name("b")]] [[kernel]] void f(device int* x [[buffer(0)]], constant P<3>& p'
        " [[buffer(1)]],"
        " uint i [[thread_position_in_grid]]);"
    )
    assert list(library) == ["a", "b"]
    assert library.a(mx.zeros(1), mx.array([5, 6]).view(mx.uint8), grid=1).item() == 8
    assert library.b(mx.zeros(1, mx.int32), mx.array([5, 6, 7]).view(mx.uint8), grid=1).item() == 10


@pytest.mark.parametrize(
    ("before", "body", "words"),
    [
        ("", "bfloat b = x[0] > 0 ? x[0] : -INFINITY;", "no viable conversion from 'float'"),
        ("int counter = 0;", "x[0] = counter++;", "'counter' must be in constant memory"),
        ("static float table[4];", "x[0] = table[1];", "'table' must be in constant memory"),
        ("", "threadgroup float t[2] = {1, 2}; x[0] = t[0];", "cannot have an initialiser"),
        (
            "struct S { float v; float f() thread { return v; } };",
            "x[0] = ((device S*)x)->f();",
            "'device S'",
        ),
        ("void g(thread float* p);", "g(x);", "no matching function for call to 'g'"),
    ],
)
def test_what_metal_refuses_stays_refused(msl, before, body, words):
    with pytest.raises(CompileError) as caught:
        msl(f"{before}\nkernel void entry(device float* x) {{ {body} }}").entry.describe()
    assert words in str(caught.value)


def test_the_first_attempt_s_error_is_the_one_told(msl):
    with pytest.raises(CompileError) as caught:
        msl(
            "struct S { float v; float f() const { return v; } };\nkernel void f(device float* x) { x[0] ="
            " nothing; }"
        )
    assert "'nothing'" in str(caught.value)


RENDERING = """
#include <metal_stdlib>
using namespace metal;
struct Images { texture2d<float> a; };
float4 pick(texture2d<float> t, uint2 i) { return t.read(i); }
kernel void shade(texture2d<float, access::write> t [[texture(0)]], uint2 i [[thread_position_in_grid]]) { }
kernel void nested(constant Images& images [[buffer(0)]]) { }
template <class T> kernel void typed(texture2d<T> t [[texture(0)]]) { }
template [[host_name("typed_float")]] kernel void typed<float>(texture2d<float>);
kernel void plain(device float* x) { x[0] = 1; }
"""


def test_kernels_beside_textures_run():
    library = lab.compile(RENDERING)
    assert list(library) == ["plain"]
    assert library.plain(mx.zeros(1), grid=1).item() == 1


@pytest.mark.parametrize("name", ["shade", "nested", "typed_float"])
def test_a_kernel_with_textures_is_refused_where_it_is_asked_for(name):
    library = lab.compile(RENDERING)
    with pytest.raises(MslError, match=f"kernel '{name}': textures.* out of scope"):
        library[name]
    with pytest.raises(MslError, match="out of scope"):
        getattr(library, name)


def test_a_source_with_nothing_else_is_refused_at_once():
    with pytest.raises(MslError, match="textures are out of scope"):
        lab.compile("kernel void f(texture2d<float> t [[texture(0)]]) { }")


def test_a_folder_is_searched_for_what_a_source_includes(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "a.h").write_text('#pragma once\n#include "deep/b.h"\n')
    (tmp_path / "deep" / "b.h").write_text("#pragma once\nconstant float B = 4;\n")
    source = '#include "deep/er/a.h"\n#include <deep/b.h>\nkernel void f(device float* x) { x[0] = B; }'
    assert lab.compile(source, include=tmp_path).f(mx.zeros(1), grid=1).item() == 4
    assert lab.compile(source, include=[str(tmp_path)]).f(mx.zeros(1), grid=1).item() == 4
    with pytest.raises(CompileError, match="file not found"):
        lab.compile(source)
    with pytest.raises((CompileError, ArgumentError), match="does not exist"):
        lab.compile(source, include=tmp_path / "nowhere")
