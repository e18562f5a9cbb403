// Rows of a table of 8-bit weights, picked by index and brought back to float: each group of 64 weights
// of a row shares one half scale. A thread makes four values.
#include <metal_stdlib>
using namespace metal;

constant uint GROUP = 64;

kernel void gather_rows(device const char* weights [[buffer(0)]],
                        device const half* scales [[buffer(1)]],
                        device const uint* rows [[buffer(2)]],
                        device float4* out [[buffer(3)]],
                        constant uint& width [[buffer(4)]],
                        uint2 p [[thread_position_in_grid]])
{
    const uint column = 4 * p.x;
    const uint row = rows[p.y];
    const char4 w = *(device const char4*)(weights + row * width + column);
    const float scale = scales[row * (width / GROUP) + column / GROUP];
    out[p.y * (width / 4) + p.x] = scale * float4(w);
}
