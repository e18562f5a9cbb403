// C = A B, row by row in memory. A threadgroup makes one tile of C: for each pair of tiles along the inner
// dimension its threads fetch one element of A and of B each, and all of them read both tiles from
// threadgroup memory. Where a tile sticks out of a matrix it is filled up with zeros, so sizes need not be
// multiples of TILE. To be dispatched in whole threadgroups of TILE x TILE threads.
#include <metal_stdlib>
using namespace metal;

constant constexpr uint TILE = 16;

struct MatmulArgs {
    uint rows;     // of A and C
    uint inner;    // columns of A, rows of B
    uint columns;  // of B and C
};

kernel void matmul(device const float* a [[buffer(0)]],
                   device const float* b [[buffer(1)]],
                   device float* c [[buffer(2)]],
                   constant MatmulArgs& args [[buffer(3)]],
                   uint2 p [[thread_position_in_grid]],
                   uint2 local [[thread_position_in_threadgroup]])
{
    threadgroup float a_tile[TILE][TILE];
    threadgroup float b_tile[TILE][TILE];

    float sum = 0.0f;
    for (uint start = 0; start < args.inner; start += TILE) {
        const uint a_column = start + local.x;
        const uint b_row = start + local.y;
        const bool in_a = p.y < args.rows && a_column < args.inner;
        const bool in_b = b_row < args.inner && p.x < args.columns;
        a_tile[local.y][local.x] = in_a ? a[p.y * args.inner + a_column] : 0.0f;
        b_tile[local.y][local.x] = in_b ? b[b_row * args.columns + p.x] : 0.0f;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint k = 0; k < TILE; k++) {
            sum = fma(a_tile[local.y][k], b_tile[k][local.x], sum);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);  // read by all before the next pair replaces them
    }
    // Only here may threads leave: until now the whole threadgroup had to come to the barriers.
    if (p.x < args.columns && p.y < args.rows) {
        c[p.y * args.columns + p.x] = sum;
    }
}
