// Scores of every key for the query heads of its group: a thread per key, group and row.
// HPG (query heads per group) and D (head dimension, a multiple of 4) are constants of the build.
#include <metal_stdlib>
using namespace metal;

struct NearArgs {
    uint keys;
    uint groups;
    float scale;
};

kernel void near_scores(device const float4* q [[buffer(0)]],
                        device const float4* k [[buffer(1)]],
                        device float* scores [[buffer(2)]],
                        constant NearArgs& u [[buffer(3)]],
                        uint3 p [[thread_position_in_grid]])
{
    if (p.x >= u.keys) {
        return;
    }
    device const float4* key = k + (p.y * u.keys + p.x) * (D / 4);
    device const float4* query = q + (p.z * u.groups + p.y) * HPG * (D / 4);
    float4 acc[HPG];
    for (uint h = 0; h < HPG; h++) {
        acc[h] = 0.0f;
    }
    for (uint i = 0; i < D / 4; i++) {
        const float4 x = key[i];
        for (uint h = 0; h < HPG; h++) {
            acc[h] += query[h * (D / 4) + i] * x;
        }
    }
    device float* out = scores + ((p.z * u.groups + p.y) * u.keys + p.x) * HPG;
    for (uint h = 0; h < HPG; h++) {
        const float4 a = acc[h];
        out[h] = ((a.x + a.y) + (a.z + a.w)) * u.scale;
    }
}
