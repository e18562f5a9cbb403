// Transpose the last two axes of a batch of matrices whose rows may be padded, as a struct tells.
#include <metal_stdlib>
using namespace metal;

struct TransposeArgs {
    uint rows;
    uint columns;
    uint2 row_stride;    // elements from one row to the next: of the source, of the result
    uint2 batch_stride;  // elements from one matrix to the next: of the source, of the result
};

static inline uint source_index(constant TransposeArgs& args, uint3 p)
{
    return p.z * args.batch_stride.x + p.y * args.row_stride.x + p.x;
}

static inline uint result_index(constant TransposeArgs& args, uint3 p)
{
    return p.z * args.batch_stride.y + p.x * args.row_stride.y + p.y;
}

kernel void transpose(device const float* source [[buffer(0)]],
                      device float* result [[buffer(1)]],
                      constant TransposeArgs& args [[buffer(2)]],
                      uint3 p [[thread_position_in_grid]])
{
    if (p.x >= args.columns || p.y >= args.rows) {
        return;
    }
    result[result_index(args, p)] = source[source_index(args, p)];
}
