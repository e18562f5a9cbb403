// One step of heat flow on a grid: each cell moves towards the mean of its four neighbours.
// The border is insulated: a neighbour outside the grid counts as the cell itself.
#include <metal_stdlib>
using namespace metal;

kernel void heat_step(device const float* now [[buffer(0)]],
                      device float* next [[buffer(1)]],
                      constant float& rate [[buffer(2)]],
                      uint2 p [[thread_position_in_grid]],
                      uint2 size [[threads_per_grid]])
{
    const uint at = p.y * size.x + p.x;
    const float here = now[at];
    const float left = p.x > 0 ? now[at - 1] : here;
    const float right = p.x + 1 < size.x ? now[at + 1] : here;
    const float above = p.y > 0 ? now[at - size.x] : here;
    const float below = p.y + 1 < size.y ? now[at + size.x] : here;
    next[at] = here + rate * ((left + right) + (above + below) - 4.0f * here);
}
