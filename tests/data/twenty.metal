// Twenty kernels as engines write them: what a Mac accepts, as it is.
// QD, the head dimension, comes from the command line.
#include <metal_stdlib>
#include "shapes.h"
using namespace metal;

#ifndef QD
#error "QD, the head dimension, is not defined"
#endif
#define QD4 (QD / 4)
#define NEG_INF (-INFINITY)

static_assert(QD % 4 == 0, "rows are read as float4");

// ---- program scope ---------------------------------------------------------------------------------

constant float CODES[16] = {
    -1.0f, -0.75f, -0.5f, -0.375f, -0.25f, -0.1875f, -0.125f, -0.0625f,
    0.0f, 0.0625f, 0.125f, 0.1875f, 0.25f, 0.5f, 0.75f, 1.0f,
};
constant constexpr uint LANES = 8, MASK = LANES - 1;
static constant uint2 OFFSETS[] = {uint2(0, 1), uint2(2, 3)};
constexpr constant float EPS = 1e-6f;

enum class Activation : uint { none, relu, square = 4 };

struct Activate {
    Activation kind;
    float operator()(float x) const {
        switch (kind) {
            case Activation::relu:
                return x > 0 ? x : 0.0f;
            case Activation::square: {
                return x * x;
            }
            default:
                break;
        }
        return x;
    }
};

struct Dual {  // a value and its derivative
    float value, slope;
};
static inline Dual operator*(Dual a, Dual b) { return {a.value * b.value, a.slope * b.value + a.value * b.slope}; }
static inline Dual operator+(Dual a, float b) { return {a.value + b, a.slope}; }

typedef struct {
    uint n;
    uint stride;
    float gain;
    float bias[4];
    packed_float3 origin;
    float3 size;
    half low;
    bool flip;
    ushort step;
} Frame;

struct Tile {
    Frame frame;
    Span spans[2];
    float4x4 basis;
    uchar4 tag;
};

// ---- helpers in every address space -------------------------------------------------------------------

inline float dot4(device const float4* a, thread const float4* b, uint n) {
    float4 acc = 0.0f;
#pragma clang loop unroll(full)
    for (uint i = 0; i < n; ++i) acc += a[i] * b[i];
    return (acc.x + acc.y) + (acc.z + acc.w);
}

inline float gain_of(constant Frame& u, uint i) { return u.gain * u.bias[i & 3]; }

inline void advance(thread uint& at, thread float& best, float x, uint i) {
    if (x > best) {
        best = x;
        at = i;
    }
}

inline uint first_above(device const uint* v, uint n, uint limit) {
    uint i = 0;
    while (i < n && v[i] <= limit) i++;
    return i;
}

template <typename T> inline T total(device const T* x, uint n) {
    T sum = T(0);
    for (uint i = 0; i < n; i++) sum += x[i];
    return sum;
}

template <typename T, int N> struct Block {
    T items[N];
    T sum() const thread {
        T s = items[0];
        for (int i = 1; i < N; i++) s += items[i];
        return s;
    }
};

namespace ring {

struct Ring {
    uint head, length, capacity;
    uint slot(uint age) const constant { return (head + capacity - length + age) % capacity; }
};

inline uint slot_of(constant Ring& r, uint age) { return r.slot(age); }

kernel void unroll_ring(device const float* cells [[buffer(0)]],
                        device float* out [[buffer(1)]],
                        constant Ring& r [[buffer(2)]],
                        uint i [[thread_position_in_grid]])
{
    out[i] = i < r.length ? cells[slot_of(r, i)] : NEG_INF;
}

}  // namespace ring

// ---- 2: a parameter struct, far down in the table of buffers ------------------------------------------

kernel void affine(device const float* x [[buffer(0)]],
                   device float* y [[buffer(3)]],
                   constant Frame& u [[buffer(5)]],
                   uint i [[thread_position_in_grid]])
{
    if (i >= u.n) return;
    const float v = x[i * u.stride];
    y[i] = (u.flip ? -v : v) * gain_of(u, i) + float(u.low) + u.origin[i % 3] * u.size.y + float(u.step);
}

// ---- 3: nested structs and arrays in structs -----------------------------------------------------------

kernel void tiles(constant Tile& t [[buffer(0)]],
                  device float4* out [[buffer(1)]],
                  uint i [[thread_position_in_grid]])
{
    float4 v = float4(t.frame.origin, 1.0f);
    if (t.spans[i % 2].holds(i)) v = t.basis * v;
    v.xy += float2(t.spans[0].length(), t.spans[1].length());
    v.w = t.tag.z;
    out[i] = v;
}

// ---- 4: scores of a chunk of rows against every key, float4 at a time ----------------------------------

kernel void scores(device const float* q [[buffer(0)]],
                   device const float* k [[buffer(1)]],
                   device float* out [[buffer(2)]],
                   constant Shape& s [[buffer(5)]],
                   device const Span* visible [[buffer(4)]],
                   uint3 p [[thread_position_in_grid]])
{
    const uint key = p.x, row = p.y, head = p.z;
    float4 mine[QD4];
    device const float4* from = (device const float4*)(q + (row * s.heads + head) * QD);
    for (int i = 0; i < QD4; ++i) mine[i] = from[i];
    const float d = dot4((device const float4*)(k + key * QD), mine, QD4);
    out[(row * s.keys + key) * s.heads + head] = visible[row].holds(key) ? d * s.scale : -INFINITY;
}

// ---- 5: 8-bit weights, scales in half, four at a time --------------------------------------------------

kernel void dequantise(device const char* w [[buffer(0)]],
                       device const half* scales [[buffer(1)]],
                       device float* out [[buffer(2)]],
                       uint i [[thread_position_in_grid]])
{
    device const char* p = w + 16 * i;
    const float scale = scales[i];
#pragma clang loop unroll(full)
    for (int j = 0; j < 16; j += 4) {
        const char4 c = *(device const char4*)(p + j);
        *(device float4*)(out + 16 * i + j) = scale * float4(c);
    }
}

// ---- 6: rotary positions, pairs read as float2 ---------------------------------------------------------

kernel void rotate_pairs(device float* x [[buffer(0)]],
                         device const float* angles [[buffer(1)]],
                         uint2 p [[thread_position_in_grid]],
                         uint2 size [[threads_per_grid]])
{
    device float* at = x + (p.y * size.x + p.x) * 2;
    const float2 v = *(device const float2*)at;
    const float c = cos(angles[p.x]), s = sin(angles[p.x]);
    *(device float2*)at = float2(v.x * c - v.y * s, v.x * s + v.y * c);
}

// ---- 7: one row a thread, and what it holds at its largest ---------------------------------------------

kernel void largest(device const float* x [[buffer(0)]],
                    device float* value [[buffer(1)]],
                    device uint* where [[buffer(2)]],
                    constant Shape& s,
                    uint row [[thread_position_in_grid]])
{
    float best = -INFINITY;
    uint at = 0;
    for (uint i = 0; i < s.keys; ++i) advance(at, best, x[row * s.keys + i], i);
    value[row] = best;
    where[row] = at;
}

// ---- 8: thread attributes in every width, side by side -------------------------------------------------

struct Where {
    uint3 grid;
    ushort3 group;
    uint flat;
    ushort3 size;
    uint lanes;
};

kernel void positions(device Where* out [[buffer(0)]],
                      uint3 p [[thread_position_in_grid]],
                      ushort3 g [[threadgroup_position_in_grid]],
                      uint t [[thread_index_in_threadgroup]],
                      ushort3 n [[threads_per_threadgroup]],
                      uint3 all [[threads_per_grid]],
                      ushort width [[threads_per_simdgroup]])
{
    device Where& w = out[(p.z * all.y + p.y) * all.x + p.x];
    w.grid = p;
    w.group = g;
    w.flat = t;
    w.size = n;
    w.lanes = width;
}

// ---- 9, 10, 11: kernels that a macro defines -----------------------------------------------------------

#define BINARY(name, op)                                        \
    kernel void name(device const float* a [[buffer(0)]],       \
                     device const float* b [[buffer(1)]],       \
                     device float* c [[buffer(2)]],             \
                     uint i [[thread_position_in_grid]])        \
    {                                                           \
        c[i] = a[i] op b[i];                                    \
    }
BINARY(added, +)
BINARY(less, -)
BINARY(times, *)
#undef BINARY

// ---- 12, 13, 14: a template and its instantiations -----------------------------------------------------

template <typename T, typename U, int N>
[[kernel]] void convert(device const T* in [[buffer(0)]],
                        device U* out [[buffer(1)]],
                        uint i [[thread_position_in_grid]])
{
    Block<T, N> block;
    for (int j = 0; j < N; ++j) block.items[j] = in[i * N + j];
    out[i] = static_cast<U>(block.sum());
}

template [[host_name("sum2_half")]] [[kernel]] void convert<half, float, 2>(
    device const half* in [[buffer(0)]], device float* out [[buffer(1)]], uint i [[thread_position_in_grid]]);
template [[host_name("sum3_int")]] [[kernel]] void convert<int, long, 3>(device const int*, device long*, uint);
#define INSTANTIATE(name, ...) \
    template [[host_name(#name)]] [[kernel]] decltype(convert<__VA_ARGS__>) convert<__VA_ARGS__>;
INSTANTIATE(sum4_uchar, uchar, ushort, 4)

// ---- 15: the other form, buffers numbered by their order -----------------------------------------------

[[kernel]] void activate(device float* x, constant Activation& kind, constant float& floor_value,
                         uint i [[thread_position_in_grid]])
{
    const Activate f{kind};
    x[i] = max(f(x[i]), floor_value + EPS * 0.0f);
}

// ---- 16: a table at program scope, indexed by 4-bit codes ----------------------------------------------

kernel void lookup(device const uchar* packed [[buffer(0)]],
                   device float2* out [[buffer(1)]],
                   uint i [[thread_position_in_grid]])
{
    const uchar b = packed[i];
    out[i] = float2(CODES[b & 0xf], CODES[b >> 4]);
}

// ---- 17: counted in device memory ----------------------------------------------------------------------

kernel void tally(device const uint* v [[buffer(0)]],
                  device atomic_uint* counts [[buffer(1)]],
                  device atomic_int& signed_sum [[buffer(2)]],
                  uint i [[thread_position_in_grid]])
{
    atomic_fetch_add_explicit(&counts[v[i] & MASK], 1u, memory_order_relaxed);
    atomic_fetch_sub_explicit(&signed_sum, int(v[i]), memory_order_relaxed);
}

// ---- 18: constant arrays, by reference and by pointer --------------------------------------------------

kernel void strided(device const float* x [[buffer(0)]],
                    device float* out [[buffer(1)]],
                    constant uint (&shape)[3] [[buffer(2)]],
                    constant uint* strides [[buffer(3)]],
                    uint3 p [[thread_position_in_grid]])
{
    uint at = 0;
    const uint q[3] = {p.z, p.y, p.x};
    for (int i = 0; i < 3; ++i) at += q[i] * strides[i];
    out[(p.z * shape[1] + p.y) * shape[2] + p.x] = x[at];
}

// ---- 19: bits, swizzles, 64-bit integers, bfloat -------------------------------------------------------

kernel void mixed(device const uint* a [[buffer(0)]],
                  device ulong* wide [[buffer(1)]],
                  device float4* turned [[buffer(2)]],
                  device bfloat* short_floats [[buffer(3)]],
                  device const uint* limits [[buffer(4)]],
                  uint i [[thread_position_in_grid]])
{
    const uint x = a[i];
    wide[i] = (ulong(x) << 32) | popcount(x) | ulong(first_above(limits, 4, x)) << 8;
    const float f = as_type<float>((x & 0x007fffffu) | 0x3f800000u);  // 1 to 2
    float4 v = float4(f, 2.0f * f, float2(OFFSETS[i & 1]));
    v.zw = v.wz;
    v.rgb *= 2.0f;
    const bool odd = x & 1u;
    turned[i] = odd ? v : v.wzyx;
    short_floats[i] = bfloat(select(f, -f, odd));
}

// ---- 20: operators of the user's own, and one result by reference --------------------------------------

kernel void horner(device const float* coefficients [[buffer(0)]],
                   device float* slopes [[buffer(1)]],
                   device float& norm [[buffer(2)]],
                   constant uint& degree [[buffer(3)]],
                   device const float* at [[buffer(4)]],
                   uint i [[thread_position_in_grid]])
{
    const Dual x = {at[i], 1.0f};
    Dual p = {coefficients[degree], 0.0f};
    for (int j = int(degree) - 1; j >= 0; --j) p = p * x + coefficients[j];
    slopes[i] = p.slope;
    if (i == 0) norm = total(coefficients, degree + 1) / CEIL_DIV(float(degree), 1.0f);
}
