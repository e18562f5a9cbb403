// Constant-memory attention of one token in four dispatches, for d 128 or 256 and up to 4 query heads a group:
//
//   tok_near    the sinks and the window, cut into stripes, one per simdgroup ("flash-decoding")
//   tok_far     what the far field has for the token
//   tok_merge   both together into `out`
//   tok_commit  the token into the state
//
// It adds up in another order than the other paths, so it agrees with them to rounding, not to the bit.
#include "o1_common.h"

constant constexpr uint SPLITS = 4;      // threadgroups that share the columns of a group
constant constexpr uint STRIPES = 8;     // simdgroups of such a threadgroup
constant constexpr uint TOKEN_HEADS = 4;
constant constexpr uint VECTORS = 2;     // float4 that a lane holds of a row: 1 for d = 128, 2 for d = 256
constant constexpr uint THREADS = 256;   // of a threadgroup of tok_commit
constant constexpr float EMPTY = -1e29f;       // a stripe whose maximum is no larger held nothing
constant constexpr float NOTHING_FAR = -3e38f;

// part[ng][4][8][hpg][d+4] and fo[nh][36], by word.
constant constexpr uint PART_MAX = 0, PART_SUM = 1, PART_VALUES = 4;
constant constexpr uint FAR_TOP = 0, FAR_MASS = 1, FAR_COUNTS = 2, FAR_EVICTED = 3, FAR_GAINS = 4, FAR_WORDS = 36;

// Threadgroup (group, split) of 8 simdgroups: simdgroup j takes the j-th column of the split, then every
// eighth. Once over them, with a running maximum; a lane holds its part of the queries of all heads.
kernel void o1c_tok_near(device const uint* meta [[buffer(0)]],
                         device const float4* q [[buffer(1)]],
                         device const float4* ring_k [[buffer(2)]],
                         device const float4* sink_k [[buffer(3)]],
                         device const float4* k [[buffer(4)]],
                         device const float4* ring_v [[buffer(5)]],
                         device const float4* sink_v [[buffer(6)]],
                         device const float4* v [[buffer(7)]],
                         device float* part [[buffer(8)]],
                         constant OC& u [[buffer(9)]],
                         uint2 group [[threadgroup_position_in_grid]],
                         uint stripe [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]])
{
    const uint g = group.x;
    const uint split = group.y;
    const Ring ring = ring_of(meta, u, g);
    const uint d4 = u.d / 4;
    const uint columns = u.ns + ring.visible(0);
    const uint length = (columns + SPLITS - 1) / SPLITS;
    const uint end = min(columns, (split + 1) * length);

    float4 query[TOKEN_HEADS][VECTORS];
    float4 acc[TOKEN_HEADS][VECTORS];
    float top[TOKEN_HEADS];
    float sum[TOKEN_HEADS];
    for (uint h = 0; h < u.hpg; h++) {
        for (uint x = lane, n = 0; x < d4; x += LANES, n++) {
            query[h][n] = u.scale * q[(u.r0 * u.nh + g * u.hpg + h) * d4 + x];
            acc[h][n] = 0.0f;
        }
        top[h] = LEAST;
        sum[h] = 0.0f;
    }

    for (uint c = split * length + stripe; c < end; c += STRIPES) {
        device const float4* key = near_row(c, 0, g, ring, u, ring_k, sink_k, k);
        device const float4* value = near_row(c, 0, g, ring, u, ring_v, sink_v, v);
        for (uint h = 0; h < u.hpg; h++) {
            float score = 0.0f;
            for (uint x = lane, n = 0; x < d4; x += LANES, n++) {
                score += dot(query[h][n], key[x]);
            }
            score = simd_sum(score);
            const float higher = max(top[h], score);
            const float keep = exp(top[h] - higher);
            const float weight = exp(score - higher);
            sum[h] = fma(sum[h], keep, weight);
            for (uint x = lane, n = 0; x < d4; x += LANES, n++) {
                acc[h][n] = fma(float4(weight), value[x], acc[h][n] * keep);
            }
            top[h] = higher;
        }
    }

    const uint stride = u.d + PART_VALUES;
    device float* to = part + ((g * SPLITS + split) * STRIPES + stripe) * u.hpg * stride;
    for (uint h = 0; h < u.hpg; h++, to += stride) {
        if (lane == 0) {
            to[PART_MAX] = top[h];
            to[PART_SUM] = sum[h];
        }
        device float4* values = (device float4*)(to + PART_VALUES);
        for (uint x = lane, n = 0; x < d4; x += LANES, n++) {
            values[x] = acc[h][n];
        }
    }
}

// A simdgroup per query head, a lane per landmark: `s` as o1c_far_e makes it for one row, and fo.
kernel void o1c_tok_far(device const uint* meta [[buffer(0)]],
                        device const float4* q [[buffer(1)]],
                        device const float4* k_tilde [[buffer(2)]],
                        device const float4* ring_k [[buffer(3)]],
                        device const float4* q_tilde [[buffer(4)]],
                        device const float* mz [[buffer(5)]],
                        device const float* mu [[buffer(6)]],
                        device float* s [[buffer(7)]],
                        device float* fo [[buffer(8)]],
                        constant OC& u [[buffer(9)]],
                        uint gh [[threadgroup_position_in_grid]],
                        uint lane [[thread_index_in_threadgroup]])
{
    const uint g = gh / u.hpg;
    const uint d4 = u.d / 4;
    const Ring ring = ring_of(meta, u, g);
    const bool evicts = ring.evicted(1) > 0;
    const bool landmark = lane < u.m;  // the other lanes come along for the sums, with nothing to add
    const uint t = gh * u.m + lane;

    float top = -INFINITY;
    float r = 1.0f;
    float weight = 0.0f;
    float mass = 0.0f;
    float score = -INFINITY;
    if (landmark) {
        const float before = mz[gh * 2 * u.m + lane];
        float exponent = -INFINITY;
        if (evicts) {
            exponent = u.scale * inner(q_tilde + t * d4, ring_k + (g * u.w + ring.slot(0)) * d4, d4);
        }
        top = max(before, exponent);
        r = rescale(before, top);
        weight = evicts ? exp(exponent - top) : 0.0f;
        mass = mz[gh * 2 * u.m + u.m + lane] * r + weight;
        s[weight_at(t, 0)] = weight;
        s[mass_at(u, t, 0)] = mass;
        s[top_at(u, t)] = top;
        s[rescale_at(u, t)] = r;
        score = u.scale * inner(q + (u.r0 * u.nh + gh) * d4, k_tilde + (g * u.m + lane) * d4, d4);
    }

    device float* to = fo + gh * FAR_WORDS;
    if (ring.far_of(0) == 0) {
        if (lane == 0) {
            to[FAR_TOP] = NOTHING_FAR;
            to[FAR_MASS] = 0.0f;
            to[FAR_COUNTS] = 0.0f;
            to[FAR_EVICTED] = 0.0f;
        }
        if (landmark) {
            to[FAR_GAINS + lane] = 0.0f;
        }
        return;  // all lanes
    }

    const float largest = simd_max(score);
    const float far_top = simd_max(largest + top);
    const float near_landmark = exp(score - largest);
    float mixed = 0.0f;
    for (uint a = 0; a < u.m; a++) {
        const float of_a = simd_shuffle(near_landmark, ushort(a));
        mixed = fma(of_a, landmark ? mu[(gh * u.m + a) * u.m + lane] : 0.0f, mixed);
    }
    const float gain = landmark ? mixed * exp(largest + top - far_top) : 0.0f;
    const float denominator = simd_sum(gain * mass);
    const float evicted = simd_sum(gain * weight);
    const bool counts = denominator >= 0.0f;  // NaN does not count either
    if (lane == 0) {
        to[FAR_TOP] = far_top;
        to[FAR_MASS] = counts ? denominator : 0.0f;
        to[FAR_COUNTS] = counts ? 1.0f : 0.0f;
        to[FAR_EVICTED] = evicted;
    }
    if (landmark) {
        to[FAR_GAINS + lane] = gain * r;
    }
}

// A thread per (query head, four components): stripes and far part brought to a common maximum.
kernel void o1c_tok_merge(device const uint* meta [[buffer(0)]],
                          device const float* part [[buffer(1)]],
                          device const float* fo [[buffer(2)]],
                          device const float4* t_hat [[buffer(3)]],
                          device const float4* ring_v [[buffer(4)]],
                          device float4* out [[buffer(5)]],
                          constant OC& u [[buffer(6)]],
                          uint p [[thread_position_in_grid]])
{
    const uint d4 = u.d / 4;
    if (p >= u.nh * d4) {
        return;
    }
    const uint gh = p / d4;
    const uint x = p % d4;
    const uint g = gh / u.hpg;
    const uint stride = u.d + PART_VALUES;
    // Stripe after stripe of this head.
    device const float* first = part + (g * SPLITS * STRIPES * u.hpg + gh % u.hpg) * stride;
    device const float* far = fo + gh * FAR_WORDS;
    const bool far_counts = far[FAR_COUNTS] == 1.0f;

    float top = far_counts ? far[FAR_TOP] : LEAST;
    for (uint n = 0; n < SPLITS * STRIPES; n++) {
        top = max(top, first[n * u.hpg * stride + PART_MAX]);
    }

    float sum = 0.0f;
    float4 values = 0.0f;
    for (uint n = 0; n < SPLITS * STRIPES; n++) {
        device const float* stripe = first + n * u.hpg * stride;
        if (stripe[PART_MAX] <= EMPTY) {
            continue;
        }
        const float weight = exp(stripe[PART_MAX] - top);
        sum = fma(weight, stripe[PART_SUM], sum);
        values = fma(float4(weight), ((device const float4*)(stripe + PART_VALUES))[x], values);
    }
    if (far_counts) {
        const float weight = exp(far[FAR_TOP] - top);
        float4 behind = 0.0f;
        for (uint b = 0; b < u.m; b++) {
            behind = fma(float4(far[FAR_GAINS + b]), t_hat[(gh * u.m + b) * d4 + x], behind);
        }
        const Ring ring = ring_of(meta, u, g);
        if (ring.evicted(1) > 0) {  // otherwise the slot may never have been written
            const float4 value = ring_v[(g * u.w + ring.slot(0)) * d4 + x];
            behind = fma(float4(far[FAR_EVICTED]), value, behind);
        }
        sum = fma(weight, far[FAR_MASS], sum);
        values = fma(float4(weight), behind, values);
    }
    out[(u.r0 * u.nh + gh) * d4 + x] = values / max(sum, LEAST_SUM);
}

// A threadgroup per group: far field, ring and meta, in this order.
kernel void o1c_tok_commit(device uint* meta [[buffer(0)]],
                           device float4* ring_k [[buffer(1)]],
                           device float4* ring_v [[buffer(2)]],
                           device const float4* k [[buffer(3)]],
                           device const float4* v [[buffer(4)]],
                           device float* mz [[buffer(5)]],
                           device float4* t_hat [[buffer(6)]],
                           device const float* s [[buffer(7)]],
                           constant OC& u [[buffer(8)]],
                           uint g [[threadgroup_position_in_grid]],
                           uint thread_index [[thread_index_in_threadgroup]])
{
    const uint d4 = u.d / 4;
    const Ring ring = ring_of(meta, u, g);
    if (ring.evicted(1) > 0) {
        for (uint n = thread_index; n < u.hpg * u.m * d4; n += THREADS) {
            const uint t = g * u.hpg * u.m + n / d4;
            const uint x = n % d4;
            const float4 value = ring_v[(g * u.w + ring.slot(0)) * d4 + x];
            t_hat[t * d4 + x] = fma(float4(s[weight_at(t, 0)]), value, t_hat[t * d4 + x] * s[rescale_at(u, t)]);
            if (x == 0) {
                const uint at = t / u.m * 2 * u.m + t % u.m;
                mz[at] = s[top_at(u, t)];
                mz[at + u.m] = s[mass_at(u, t, 0)];
            }
        }
    }
    // The token takes the slot of the one that was just read, and `meta` changes when all have read it.
    threadgroup_barrier(mem_flags::mem_device);
    for (uint x = thread_index; x < d4; x += THREADS) {
        const uint from = (u.r0 * u.ng + g) * d4 + x;
        const uint to = (g * u.w + ring.slot(ring.len)) * d4 + x;
        ring_k[to] = k[from];
        ring_v[to] = v[from];
    }
    if (thread_index == 0) {
        advance(meta, ring, u, g);
    }
}
