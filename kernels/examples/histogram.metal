// How many values fall into each of a number of equal bins, counted with atomics on device memory.
// Values outside [low, high) are left out.
#include <metal_stdlib>
using namespace metal;

struct HistogramArgs {
    uint count;
    uint bins;
    float low;
    float high;
};

kernel void histogram(device const float* values [[buffer(0)]],
                      device atomic_uint* counts [[buffer(1)]],
                      constant HistogramArgs& args [[buffer(2)]],
                      uint i [[thread_position_in_grid]])
{
    if (i >= args.count) {
        return;
    }
    const float x = values[i];
    if (!(x >= args.low && x < args.high)) {
        return;
    }
    const float t = (x - args.low) / (args.high - args.low);
    const uint bin = min(uint(t * float(args.bins)), args.bins - 1u);
    atomic_fetch_add_explicit(&counts[bin], 1u, memory_order_relaxed);
}
