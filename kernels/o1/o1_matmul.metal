// The near window as two matrix products, for chunks of some length. All that the rows of a chunk may see is
// gathered into panels of ncap = ns + w + k columns: the sinks, the ring from its oldest, the rows of the
// chunk from column ns + len on, and zeros. The host multiplies:
//
//   far_e, gather, Q K^T, land, gmax, far, gsoft, P V, gadd, far_commit, ring_commit, meta
//
// Row i may read the sinks and its window, columns [ns + first, ns + len + i + 1) with first the logical
// position of the oldest token in its window.
#include "o1_common.h"

inline uint panel_columns(constant OC& u)
{
    return u.ns + u.w + u.k;
}

// A thread per (four components, column, group). kp, vp[ng][ncap][d].
kernel void o1c_gather(device const uint* meta [[buffer(0)]],
                       device const float4* ring_k [[buffer(1)]],
                       device const float4* ring_v [[buffer(2)]],
                       device const float4* sink_k [[buffer(3)]],
                       device const float4* sink_v [[buffer(4)]],
                       device const float4* k [[buffer(5)]],
                       device const float4* v [[buffer(6)]],
                       device float4* kp [[buffer(7)]],
                       device float4* vp [[buffer(8)]],
                       constant OC& u [[buffer(9)]],
                       uint3 p [[thread_position_in_grid]])
{
    const uint d4 = u.d / 4;
    const uint x = p.x;
    const uint column = p.y;
    const uint g = p.z;
    if (x >= d4 || column >= panel_columns(u) || g >= u.ng) {
        return;
    }
    const Ring ring = ring_of(meta, u, g);
    float4 key = 0.0f;
    float4 value = 0.0f;
    if (column < u.ns) {
        const uint from = (g * u.ns + column) * d4 + x;
        key = sink_k[from];
        value = sink_v[from];
    } else if (column - u.ns < ring.len + u.k) {
        key = token_row(column - u.ns, g, ring, u, ring_k, k)[x];
        value = token_row(column - u.ns, g, ring, u, ring_v, v)[x];
    }
    const uint to = (g * panel_columns(u) + column) * d4 + x;
    kp[to] = key;
    vp[to] = value;
}

// A simdgroup per (query head, row): the largest score among the columns that the row may read. nm[k][nh].
kernel void o1c_gmax(device const uint* meta [[buffer(0)]],
                     device const float* sc [[buffer(1)]],
                     device float* nm [[buffer(2)]],
                     constant OC& u [[buffer(3)]],
                     uint2 group [[threadgroup_position_in_grid]],
                     uint lane [[thread_index_in_threadgroup]])
{
    const uint gh = group.x;
    const uint i = group.y;
    const Ring ring = ring_of(meta, u, gh / u.hpg);
    const uint first = u.ns + ring.evicted(i + 1);
    const uint end = u.ns + ring.len + i + 1;
    device const float* from = sc + (gh * u.k + i) * panel_columns(u);

    float largest = LEAST;
    for (uint c = lane; c < u.ns; c += LANES) {
        largest = max(largest, from[c]);
    }
    for (uint c = first + lane; c < end; c += LANES) {
        largest = max(largest, from[c]);
    }
    largest = simd_max(largest);
    if (lane == 0) {
        nm[i * u.nh + gh] = largest;
    }
}

// A simdgroup per (query head, row): scores become weights relative to c, in place; 0 where the row may not
// read. inv[k][nh].
kernel void o1c_gsoft(device const uint* meta [[buffer(0)]],
                      device float* sc [[buffer(1)]],
                      device const float4* hd [[buffer(2)]],
                      device float* inv [[buffer(3)]],
                      constant OC& u [[buffer(4)]],
                      uint2 group [[threadgroup_position_in_grid]],
                      uint lane [[thread_index_in_threadgroup]])
{
    const uint gh = group.x;
    const uint i = group.y;
    const Ring ring = ring_of(meta, u, gh / u.hpg);
    const uint first = u.ns + ring.evicted(i + 1);
    const uint end = u.ns + ring.len + i + 1;
    device float* at = sc + (gh * u.k + i) * panel_columns(u);
    const float4 far = hd[i * u.nh + gh];

    float sum = 0.0f;
    for (uint c = lane; c < panel_columns(u); c += LANES) {
        const bool seen = c < u.ns || (c >= first && c < end);
        const float weight = seen ? exp(at[c] - far.x) : 0.0f;
        at[c] = weight;
        sum += weight;
    }
    sum = simd_sum(sum);
    if (lane == 0) {
        inv[i * u.nh + gh] = 1.0f / max(sum + far.y, LEAST_SUM);
    }
}

// A thread per (query head, four components) and row: near sum no[nh][k][d] and far part into `out`.
kernel void o1c_gadd(device const uint* meta [[buffer(0)]],
                     device const float4* no [[buffer(1)]],
                     device const float4* hd [[buffer(2)]],
                     device const float* gn [[buffer(3)]],
                     device const float4* t_hat [[buffer(4)]],
                     device const float* inv [[buffer(5)]],
                     device const float* cf [[buffer(6)]],
                     device const float4* ring_v [[buffer(7)]],
                     device float4* out [[buffer(8)]],
                     constant OC& u [[buffer(9)]],
                     uint2 p [[thread_position_in_grid]])
{
    const uint d4 = u.d / 4;
    if (p.x >= u.nh * d4) {
        return;
    }
    const uint gh = p.x / d4;
    const uint x = p.x % d4;
    const uint i = p.y;
    const uint row = i * u.nh + gh;

    float4 sum = no[(gh * u.k + i) * d4 + x];
    if (hd[row].z == 1.0f) {
        sum += far_values(x, gh, i, ring_of(meta, u, gh / u.hpg), u, gn, t_hat, cf, ring_v);
    }
    out[((u.r0 + i) * u.nh + gh) * d4 + x] = sum * inv[row];
}
