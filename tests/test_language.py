"""Metal's language, construct by construct, as engines use it: each with the value it has to give."""

from __future__ import annotations

import mlx.core as mx
import pytest

# What it is about, what stands before the kernel, the kernel's body, and x[0] afterwards.
CASES = [
    (
        "constant tables of arrays, structs, matrices and text",
        'constant float2x2 M[2] = {float2x2(1), float2x2(2)}; constant int T[2][3] = {{1, 2, 3}, {4, 5, 6}};'
        " struct P { int a; float b[2]; }; constant P PS[2] = {{1, {2, 3}}, {4, {5, 6}}};"
        ' constexpr int sq(int x) { return x * x; } constant int Q = sq(5); constant char NAME[] = "ab";',
        "x[0] = M[1][1][1] + T[1][2] + PS[1].b[1] + Q + NAME[1];",
        2 + 6 + 6 + 25 + 98,
    ),
    (
        "structs copied out of and into device memory",
        "struct S { float4 at; int n; };",
        "device S* s = (device S*)x; S t = s[0]; t.at.xy = float2(3, 4); t.n = 5; s[0] = t; s[0].at.zw += "
        "1.0f;"
        " x[0] = s[0].at.x + s[0].at.z + s[0].n;",
        3 + 1 + 5,
    ),
    (
        "arrays by reference and a loop over one",
        "constant float C[1] = {2};"
        " void add(thread float (&a)[4], constant float* c) { for (thread float& v : a) v += c[0]; }",
        "float a[4] = {1, 2, 3, 4}; add(a, C); x[0] = a[0] + a[3];",
        3 + 6,
    ),
    (
        "overloads on the address space",
        "int f(device float*) { return 1; } int f(constant float*) { return 2; } int f(thread float*) { "
        "return 3; }"
        " int f(threadgroup float*) { return 4; } constant float C = 1;",
        "float l; x[0] = f(x) + 10 * f(&C) + 100 * f(&l);",
        321,
    ),
    (
        "templates over pointers, packs, conditions and values",
        "template <typename P> float first(P p) { return p[0]; }"
        " template <typename... A> float sum(A... a) { return (a + ...); }"
        " template <int N> constexpr int pick() { if constexpr (N > 2) return 7; else return 8; }",
        "x[1] = 5; float l[2] = {6, 7}; x[0] = first(x + 1) + first(l) + sum(1, 2.5f, 3) + pick<3>();",
        5 + 6 + 6.5 + 7,
    ),
    (
        "specialisations and operations as types",
        "template <class T> struct Lim; template <> struct Lim<float> { static constexpr constant float v = "
        "3.0f; };"
        " template <class T> struct Op { T operator()(T a, T b) { return a + b; } };"
        " template <class T, class O> T fold(T a, T b, O op = O()) { return op(a, b); }",
        "x[0] = Lim<float>::v + fold<float, Op<float>>(1, 2);",
        6,
    ),
    (
        "subscript operators on const and on thread objects",
        "struct V { float d[3]; float operator[](int i) const { return d[i]; }"
        " thread float& operator[](int i) thread { return d[i]; } };",
        "V v = {{1, 2, 3}}; v[1] = 9; const V w = v; x[0] = w[1] + v[0];",
        10,
    ),
    (
        "constructors, inheritance and static functions",
        "struct A { int x; A() = default; A(int v) : x(v) {} int get() const { return x; }"
        " static int twice(int v) { return 2 * v; } }; struct B : A { int y; B(int v) : A(v), y(v + 1) {} };",
        "B b(4); A a(1); x[0] = b.get() + b.y + A::twice(3) + a.get();",
        4 + 5 + 6 + 1,
    ),
    (
        "constructors and methods for each address space",
        "struct S { float v; S(float x) thread : v(x) {} S(float x) threadgroup : v(x) {}"
        " float get() const thread { return v; } float get() const device { return v + 100; } };",
        "S s(2); S t = S(3); device S* d = (device S*)x; d[1] = t; x[0] = s.get() + d[1].get();",
        2 + 103,
    ),
    (
        "enumerations, unions and switch",
        "enum class E { a = 3, b }; union U { float f; uint u; };",
        "U u; u.f = 1.0f; E e = E::b; switch (e) { case E::a: x[0] = 1; break;"
        " case E::b: x[0] = u.u == 0x3f800000u ? 42 : 0; break; }",
        42,
    ),
    (
        "bit-fields",
        "struct B { uint a : 4; uint b : 12; };",
        "B b; b.a = 7; b.b = 100; uint q = b.a > 3 ? b.b : b.a; x[0] = q + b.a;",
        107,
    ),
    (
        "names, types and constants of namespaces",
        "namespace n { constant float K = 4; struct S { float v; }; template <class T> T id(T x) { return "
        "x; } }",
        "using namespace n; n::S s = {n::K}; x[0] = n::id(s.v) + K;",
        8,
    ),
    (
        "aliases of types",
        "typedef struct { float a; } S; typedef float real; using real4 = float4; typedef S T;",
        "T t; t.a = 2; real4 r = real4(t.a); real q = r.z; x[0] = q;",
        2,
    ),
    (
        "helpers with attributes, defaults and declarations of their own",
        "METAL_FUNC float g(float a, float b = 2) { return a * b; } static inline float h(float x);"
        " inline float k(float x) __attribute__((always_inline)); inline float k(float x) { return h(x); }"
        " static inline float h(float x) { return x + 1; }",
        "x[0] = g(3) + h(1) + k(1);",
        6 + 2 + 2,
    ),
    (
        "bits of one type as another",
        "",
        "device uint* u = reinterpret_cast<device uint*>(x); u[0] = as_type<uint>(uchar4(0, 0, 128, 63));",
        1.0,
    ),
    (
        "volatile memory and references into it",
        "",
        "volatile device float* p = x; *p = 3; p[0] += 1; device float& r = x[0]; r *= 2;",
        8,
    ),
    (
        "pointers to rows of an array",
        "",
        "float a[2][2] = {{1, 2}, {3, 4}}; thread float (*p)[2] = a; thread float* q = &p[1][0]; x[0] = "
        "q[1] + (*p)[1];",
        6,
    ),
    ("swizzles", "", "float4 v = float4(1, 2, 3, 4); v.xyz = v.zyx; x[0] = v.r * 1000 + v.yw.x + v[2] * 10 "
                     "+ v.w;",
     3000 + 2 + 10 + 4),
    ("a constant vector's components", "constant uint3 SZ = uint3(1, 2, 3);", "x[0] = SZ.y + SZ.zx.x + "
                                                                              "SZ[0];", 6),
    ("packed vectors", "", "packed_float3 p = packed_float3(1, 2, 3); float3 q = p; q += float3(p); p = q; "
                           "x[0] = p.z + p[0];",
     8),
    (
        "vectors of bools, and what is any and all",
        "",
        "int3 i = int3(1, 2, 3); float3 f = float3(i) / 2; bool3 b = i > 1;"
        " x[0] = f.y + (any(b) ? 1 : 0) + all(b) + dot(f, f);",
        1 + 1 + 0 + 3.5,
    ),
    (
        "matrices and their columns",
        "",
        "float4x4 m = float4x4(1); m[2] = float4(1, 2, 3, 4); float4 v = m * float4(1, 1, 1, 1);"
        " x[0] = v.w + transpose(m)[3][2] + m[2].y;",
        5 + 4 + 2,
    ),
    ("arrays that know their size", "",
     "array<float, 3> a = {1, 2, 3}; float s = 0; for (uint i = 0; i < a.size(); i++) s += a[i];"
     " x[0] = s;", 6),
    ("half and bfloat", "",
     "half h = 0.5h; half2 v = half2(h, 2.0h); bfloat b = bfloat(1.5f); x[0] = h + v.y + float(b) + "
     "float(half(b));", 5.5),
    ("64-bit integers", "",
     "ulong a = 1ul << 40; long b = -5; x[0] = float(a >> 38) + float(b / 2) + mulhi(0x80000000u, 4u);",
     4 - 2 + 2),
    ("constants of the library", "",
     "x[0] = (INFINITY > 1e30f) + (isnan(NAN) ? 2 : 0) + (M_PI_F > 3.14f) + (FLT_MAX > 1e38f) + UINT_MAX / "
     "4294967295u;", 6),
    ("loops of every form, and goto", "",
     "uint i = 3; do { i--; } while (i > 1); while (true) { if (i++ > 5) break; else continue; } x[0] = i; "
     "goto end;"
     " x[0] = 0; end: ;", 7),
    ("a macro that makes loops", "#define EACH(n) for (int n = 0; n < 3; n++)\n",
     "float s = 0; EACH(i) EACH(j) s += i * j; x[0] = s;", 9),
    ("operators of integers and bools", "",
     "bool b = true; x[0] = b + !b + (b && 1) + ~0u / 4294967295u + (5 & 3) + (5 | 3) + (5 ^ 3) + (1 << 3) "
     "+ (-8 >> 1) + 7 % 4;",
     1 + 0 + 1 + 1 + 1 + 7 + 6 + 8 - 4 + 3),
    ("sizes", "struct alignas(16) A { float a; };",
     "x[0] = sizeof(A) + alignof(float4) + sizeof(float3) + sizeof(half3) + sizeof(packed_half3) + "
     "sizeof(bool4);",
     16 + 16 + 16 + 8 + 6 + 4),
    # In `c ? a : b` two address spaces of a class meet, which the language beneath takes for two types.
    ("a vector from memory or a new one", "", "float4 z = 5; x[4] = 2; float4 v = x[0] > 0 ? z : ((device "
                                              "float4*)x)[1];"
     " float4 w = x[0] > 0 ? z : float4(7); x[0] = v.x + w.y;", 2 + 7),
    ("a struct from constant memory or a local one", "struct S { float a; }; constant S C = {4};",
     "S s = {1}; S t = x[0] == 0 ? C : s; S u = x[0] == 0 ? s : S{9}; x[0] = t.a + u.a;", 5),
    ("conditions within conditions", "", "int a = 7; x[0] = a ? a > 5 ? 1 : 2 : 3; x[0] += a < 5 ? 10 : a < "
                                         "8 ? 20 : 30;", 21),
    ("a condition that chooses where to write", "",
     "float a = 1, b = 2; (x[0] > 0 ? a : b) = 9; thread float& r = x[0] > 0 ? b : a; r += 3; x[0] = a + 10 "
     "* b;", 4 + 90),
    ("a condition between pointers, and with null", "",
     "device float* p = x[0] > 0 ? x : x + 1; device float* q = x[0] > 0 ? p : nullptr; *p = 6; x[0] = x[1] "
     "+ (q ? 1 : 0);", 6),
    ("a condition between calls that give nothing", "void f(device float* x) { *x = 3; } void g(device "
                                                    "float* x) { *x = 4; }",
     "x[0] > 0 ? f(x) : g(x);", 4),
    ("a condition among constants", "constant constexpr int N = 3; enum { M = N > 2 ? N + 1 : 0 };",
     "int a[M > 3 ? M : 1] = {1, 2, 3, 4}; x[0] = a[N > 2 ? N - 1 : 0];", 3),
]  # fmt: skip


@pytest.mark.parametrize(("before", "body", "wanted"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_construct_gives_its_value(msl, before, body, wanted):
    kernel = msl(f"{before}\nkernel void entry(device float* x) {{ {body} }}").entry
    assert kernel(mx.zeros(64), grid=1)[0].item() == pytest.approx(wanted)
