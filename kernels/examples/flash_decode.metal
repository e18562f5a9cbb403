// Attention of one new token over a cache of keys and values, in two dispatches ("flash-decoding"):
//
//   flash_decode        the keys are cut into stripes of equal length, one per simdgroup. It runs over its
//                       stripe once, with a running maximum, and leaves what puts softmax together again:
//                       the largest score, the sum of exp(score - largest), and the values so weighted;
//   flash_decode_merge  a simdgroup per query head brings the stripes to a common maximum and adds them up.
//
// GROUP query heads share one head of keys and values; their queries stay in registers while a key passes.
// A lane holds 4 of the 128 components of every vector.
#include <metal_stdlib>
using namespace metal;

#ifndef GROUP
#define GROUP 4
#endif

constant constexpr uint LANES = 32;

struct DecodeArgs {
    uint keys;           // keys in the cache
    uint stripes;        // simdgroups per key head
    uint stripe_length;  // keys in a stripe: the last ones may have fewer, or none
    float scale;         // of the scores, 1/sqrt(128) as a rule
};

// queries [key head][GROUP][128], keys and values [key head][key][128];
// largest and sums [query head][stripe], partials [query head][stripe][128].
// Threadgroups: along x as many as hold all stripes, along y one per key head.
kernel void flash_decode(device const float4* queries [[buffer(0)]],
                         device const half4* keys [[buffer(1)]],
                         device const half4* values [[buffer(2)]],
                         device float* largest [[buffer(3)]],
                         device float* sums [[buffer(4)]],
                         device float4* partials [[buffer(5)]],
                         constant DecodeArgs& args [[buffer(6)]],
                         uint2 group [[threadgroup_position_in_grid]],
                         uint simdgroups [[simdgroups_per_threadgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]])
{
    const uint stripe = group.x * simdgroups + simdgroup;
    const uint key_head = group.y;
    if (stripe >= args.stripes) {
        return;
    }

    float4 query[GROUP];
    float top[GROUP];
    float sum[GROUP];
    float4 acc[GROUP];
    for (uint h = 0; h < GROUP; h++) {
        query[h] = args.scale * queries[(key_head * GROUP + h) * LANES + lane];
        top[h] = -INFINITY;
        sum[h] = 0.0f;
        acc[h] = 0.0f;
    }

    const uint first = stripe * args.stripe_length;
    const uint end = min(first + args.stripe_length, args.keys);
    for (uint at = first; at < end; at++) {
        const uint here = (key_head * args.keys + at) * LANES + lane;
        const float4 key = float4(keys[here]);
        const float4 value = float4(values[here]);
        for (uint h = 0; h < GROUP; h++) {
            const float score = simd_sum(dot(query[h], key));
            const float higher = max(top[h], score);
            const float keep = exp(top[h] - higher);  // 0 at the first key: nothing was there to keep
            const float weight = exp(score - higher);
            sum[h] = sum[h] * keep + weight;
            acc[h] = acc[h] * keep + weight * value;
            top[h] = higher;
        }
    }

    for (uint h = 0; h < GROUP; h++) {
        const uint to = (key_head * GROUP + h) * args.stripes + stripe;
        if (lane == 0) {
            largest[to] = top[h];
            sums[to] = sum[h];
        }
        partials[to * LANES + lane] = acc[h];
    }
}

// out [query head][128]. A threadgroup per query head, of one simdgroup.
kernel void flash_decode_merge(device const float* largest [[buffer(0)]],
                               device const float* sums [[buffer(1)]],
                               device const float4* partials [[buffer(2)]],
                               device float4* out [[buffer(3)]],
                               constant uint& stripes [[buffer(4)]],
                               uint head [[threadgroup_position_in_grid]],
                               uint lane [[thread_index_in_simdgroup]])
{
    const uint first = head * stripes;

    float top = -INFINITY;
    for (uint s = lane; s < stripes; s += LANES) {
        top = max(top, largest[first + s]);
    }
    top = simd_max(top);

    float sum = 0.0f;
    for (uint s = lane; s < stripes; s += LANES) {
        sum += sums[first + s] * exp(largest[first + s] - top);
    }
    sum = simd_sum(sum);

    float4 acc = 0.0f;
    for (uint s = 0; s < stripes; s++) {
        acc += exp(largest[first + s] - top) * partials[(first + s) * LANES + lane];
    }
    out[head * LANES + lane] = acc / sum;
}
