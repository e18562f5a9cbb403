// The sum of an array on two levels: simd_sum over the lanes of each simdgroup, then over the simdgroups of
// the threadgroup, 32 x 32 = 1024 threads at most. Each threadgroup leaves one partial sum; the same kernel
// in one threadgroup then adds up the partial sums. Threadgroups are of a multiple of 32 threads.
#include <metal_stdlib>
using namespace metal;

constant constexpr uint MAX_SIMDGROUPS = 32;

kernel void reduce_sum(device const float* x [[buffer(0)]],
                       device float* partials [[buffer(1)]],
                       constant uint& count [[buffer(2)]],
                       uint i [[thread_position_in_grid]],
                       uint stride [[threads_per_grid]],
                       uint group [[threadgroup_position_in_grid]],
                       uint simdgroups [[simdgroups_per_threadgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float sums[MAX_SIMDGROUPS];

    float sum = 0.0f;
    for (uint at = i; at < count; at += stride) {
        sum += x[at];
    }
    sum = simd_sum(sum);
    if (lane == 0) {
        sums[simdgroup] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (simdgroup == 0) {
        sum = simd_sum(lane < simdgroups ? sums[lane] : 0.0f);
        if (lane == 0) {
            partials[group] = sum;
        }
    }
}
