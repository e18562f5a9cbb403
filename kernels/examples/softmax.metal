// Softmax of every row of a matrix, a simdgroup per row: its lanes stride over the row, however long it is.
// Entries may be -infinity and get 0; at least one of each row has to be finite.
#include <metal_stdlib>
using namespace metal;

struct SoftmaxArgs {
    uint rows;
    uint columns;
};

kernel void softmax(device const float* x [[buffer(0)]],
                    device float* y [[buffer(1)]],
                    constant SoftmaxArgs& args [[buffer(2)]],
                    uint group [[threadgroup_position_in_grid]],
                    uint simdgroups [[simdgroups_per_threadgroup]],
                    uint simdgroup [[simdgroup_index_in_threadgroup]],
                    uint lanes [[threads_per_simdgroup]],
                    uint lane [[thread_index_in_simdgroup]])
{
    const uint row = group * simdgroups + simdgroup;
    if (row >= args.rows) {
        return;  // the whole simdgroup leaves, and no other waits for it
    }
    device const float* from = x + row * args.columns;
    device float* to = y + row * args.columns;

    float largest = -INFINITY;
    for (uint i = lane; i < args.columns; i += lanes) {
        largest = max(largest, from[i]);
    }
    largest = simd_max(largest);

    float sum = 0.0f;
    for (uint i = lane; i < args.columns; i += lanes) {
        const float e = exp(from[i] - largest);  // at most 1, so that nothing overflows
        to[i] = e;
        sum += e;
    }
    sum = simd_sum(sum);

    for (uint i = lane; i < args.columns; i += lanes) {
        to[i] /= sum;  // each lane finds what it wrote itself
    }
}
