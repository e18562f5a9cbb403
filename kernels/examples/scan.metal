// Inclusive prefix sums of an array of any length, in three dispatches:
//
//   scan_tiles   each threadgroup scans a tile, one element per thread, and leaves the tile's total;
//   scan_totals  one threadgroup scans the totals in their place, tile after tile, however many there are;
//   scan_add     adds to each element the sum of the tiles before its own.
//
// All take threadgroups of a multiple of 32 threads, up to 1024; the first and the last the same size, in as
// many whole threadgroups as there are tiles.
#include <metal_stdlib>
using namespace metal;

constant constexpr uint MAX_SIMDGROUPS = 32;

// The sum of x over this thread and those before it in the threadgroup. `sums` holds one float per simdgroup
// and may be used again after the next barrier.
static inline float prefix_in_threadgroup(float x, threadgroup float* sums,
                                          uint simdgroups, uint simdgroup, uint lanes, uint lane)
{
    const float prefix = simd_prefix_inclusive_sum(x);
    if (lane == lanes - 1) {
        sums[simdgroup] = prefix;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == 0) {
        const float total = lane < simdgroups ? sums[lane] : 0.0f;
        const float before = simd_prefix_exclusive_sum(total);
        if (lane < simdgroups) {
            sums[lane] = before;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return sums[simdgroup] + prefix;
}

kernel void scan_tiles(device const float* x [[buffer(0)]],
                       device float* prefix [[buffer(1)]],
                       device float* totals [[buffer(2)]],
                       constant uint& count [[buffer(3)]],
                       uint i [[thread_position_in_grid]],
                       uint tile [[threadgroup_position_in_grid]],
                       uint threads [[threads_per_threadgroup]],
                       uint thread_index [[thread_index_in_threadgroup]],
                       uint simdgroups [[simdgroups_per_threadgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]],
                       uint lanes [[threads_per_simdgroup]],
                       uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float sums[MAX_SIMDGROUPS];
    // Threads past the end add nothing, but have to come to the barriers.
    const float mine = i < count ? x[i] : 0.0f;
    const float sum = prefix_in_threadgroup(mine, sums, simdgroups, simdgroup, lanes, lane);
    if (i < count) {
        prefix[i] = sum;
    }
    if (thread_index == threads - 1) {
        totals[tile] = sum;
    }
}

kernel void scan_totals(device float* totals [[buffer(0)]],
                        constant uint& count [[buffer(1)]],
                        uint threads [[threads_per_threadgroup]],
                        uint thread_index [[thread_index_in_threadgroup]],
                        uint simdgroups [[simdgroups_per_threadgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint lanes [[threads_per_simdgroup]],
                        uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float sums[MAX_SIMDGROUPS];
    threadgroup float last;

    float before = 0.0f;  // the sum of all tiles so far
    for (uint start = 0; start < count; start += threads) {
        const uint i = start + thread_index;
        const float total = i < count ? totals[i] : 0.0f;
        const float sum = prefix_in_threadgroup(total, sums, simdgroups, simdgroup, lanes, lane);
        if (i < count) {
            totals[i] = before + sum;
        }
        if (thread_index == threads - 1) {
            last = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        before += last;
    }
}

kernel void scan_add(device float* prefix [[buffer(0)]],
                     device const float* totals [[buffer(1)]],
                     constant uint& count [[buffer(2)]],
                     uint i [[thread_position_in_grid]],
                     uint tile [[threadgroup_position_in_grid]])
{
    if (tile > 0 && i < count) {
        prefix[i] += totals[tile - 1];
    }
}
