// How often each value of one 8-bit digit occurs among keys: the count that a radix sort's pass begins with.
// A threadgroup counts in its own memory, where atomics are cheap, and adds its bins to the device's once.
// Threads stride over the keys, so any number of threadgroups of any size will do.
#include <metal_stdlib>
using namespace metal;

constant constexpr uint BINS = 256;

struct RadixArgs {
    uint count;
    uint shift;  // of the digit: 0, 8, 16 or 24
};

kernel void radix_histogram(device const uint* keys [[buffer(0)]],
                            device atomic_uint* counts [[buffer(1)]],
                            constant RadixArgs& args [[buffer(2)]],
                            uint i [[thread_position_in_grid]],
                            uint stride [[threads_per_grid]],
                            uint thread_index [[thread_index_in_threadgroup]],
                            uint threads [[threads_per_threadgroup]])
{
    threadgroup atomic_uint bins[BINS];

    for (uint bin = thread_index; bin < BINS; bin += threads) {
        atomic_store_explicit(&bins[bin], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (uint at = i; at < args.count; at += stride) {
        const uint digit = (keys[at] >> args.shift) & (BINS - 1u);
        atomic_fetch_add_explicit(&bins[digit], 1u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (uint bin = thread_index; bin < BINS; bin += threads) {
        const uint found = atomic_load_explicit(&bins[bin], memory_order_relaxed);
        if (found > 0) {
            atomic_fetch_add_explicit(&counts[bin], found, memory_order_relaxed);
        }
    }
}
