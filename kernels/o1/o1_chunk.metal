// Constant-memory attention of a chunk of 1 to 64 rows, in eleven dispatches:
//
//   far_e, score, land, max, far, soft, sum, add, far_commit, ring_commit, meta
//
// The first eight read the state as it was before the chunk; the three commits then bring it up to date.
// All exponentials are taken relative to a maximum, so that none overflows: stored masses and numerators
// relative to M_b, the largest exponent of landmark b so far, and the sums of a row relative to its own c.
#include "o1_common.h"

// A thread per (query head, landmark): the exponents of the tokens that the chunk evicts, and what they do
// to the landmark's maximum and mass.
kernel void o1c_far_e(device const uint* meta [[buffer(0)]],
                      device const float4* ring_k [[buffer(1)]],
                      device const float4* q_tilde [[buffer(2)]],
                      device const float* mz [[buffer(3)]],
                      device float* s [[buffer(4)]],
                      constant OC& u [[buffer(5)]],
                      uint t [[thread_position_in_grid]])
{
    if (t >= u.ghm) {
        return;
    }
    const uint gh = t / u.m;
    const uint b = t % u.m;
    const uint g = gh / u.hpg;
    const Ring ring = ring_of(meta, u, g);
    const uint d4 = u.d / 4;
    const uint j0 = ring.first_evicting();
    device const float4* landmark = q_tilde + t * d4;

    const float before = mz[gh * 2 * u.m + b];
    float top = before;
    for (uint j = j0; j < u.k; j++) {
        device const float4* key = ring_k + (g * u.w + ring.slot(j - j0)) * d4;
        const float exponent = u.scale * inner(landmark, key, d4);
        s[weight_at(t, j)] = exponent;  // made a weight below, once the maximum is known
        top = max(top, exponent);
    }

    const float r = rescale(before, top);
    float mass = mz[gh * 2 * u.m + u.m + b] * r;
    for (uint j = 0; j < u.k; j++) {
        const float weight = j < j0 ? 0.0f : exp(s[weight_at(t, j)] - top);
        mass += weight;
        s[weight_at(t, j)] = weight;
        s[mass_at(u, t, j)] = mass;
    }
    s[top_at(u, t)] = top;
    s[rescale_at(u, t)] = r;
}

// A thread per (column, group, row): the near scores of all query heads of the group, so that a key is read
// once. sc[k][ng][ns + w][hpg].
kernel void o1c_score(device const uint* meta [[buffer(0)]],
                      device const float4* q [[buffer(1)]],
                      device const float4* ring_k [[buffer(2)]],
                      device const float4* sink_k [[buffer(3)]],
                      device const float4* k [[buffer(4)]],
                      device float* sc [[buffer(5)]],
                      constant OC& u [[buffer(6)]],
                      uint3 p [[thread_position_in_grid]])
{
    const uint column = p.x;
    const uint g = p.y;
    const uint i = p.z;
    const Ring ring = ring_of(meta, u, g);
    if (column >= u.ns + ring.visible(i)) {
        return;
    }
    const uint d4 = u.d / 4;
    device const float4* key = near_row(column, i, g, ring, u, ring_k, sink_k, k);
    device const float4* query = q + ((u.r0 + i) * u.nh + g * u.hpg) * d4;
    device float* to = sc + ((i * u.ng + g) * (u.ns + u.w) + column) * u.hpg;
    for (uint h = 0; h < u.hpg; h++) {
        to[h] = u.scale * inner(query + h * d4, key, d4);
    }
}

// A thread per (landmark, group, row): scores of the landmark keys. fs[k][ng][m][hpg].
kernel void o1c_land(device const float4* q [[buffer(0)]],
                     device const float4* k_tilde [[buffer(1)]],
                     device float* fs [[buffer(2)]],
                     constant OC& u [[buffer(3)]],
                     uint3 p [[thread_position_in_grid]])
{
    const uint a = p.x;
    const uint g = p.y;
    const uint i = p.z;
    if (a >= u.m) {
        return;
    }
    const uint d4 = u.d / 4;
    device const float4* landmark = k_tilde + (g * u.m + a) * d4;
    device const float4* query = q + ((u.r0 + i) * u.nh + g * u.hpg) * d4;
    device float* to = fs + ((i * u.ng + g) * u.m + a) * u.hpg;
    for (uint h = 0; h < u.hpg; h++) {
        to[h] = u.scale * inner(query + h * d4, landmark, d4);
    }
}

// A simdgroup per (query head, row): the largest near score. nm[k][nh].
kernel void o1c_max(device const uint* meta [[buffer(0)]],
                    device const float* sc [[buffer(1)]],
                    device float* nm [[buffer(2)]],
                    constant OC& u [[buffer(3)]],
                    uint2 group [[threadgroup_position_in_grid]],
                    uint lane [[thread_index_in_threadgroup]])
{
    const uint gh = group.x;
    const uint i = group.y;
    const uint g = gh / u.hpg;
    const uint columns = u.ns + ring_of(meta, u, g).visible(i);
    device const float* from = sc + (i * u.ng + g) * (u.ns + u.w) * u.hpg + gh % u.hpg;

    float largest = LEAST;
    for (uint c = lane; c < columns; c += LANES) {
        largest = max(largest, from[c * u.hpg]);
    }
    largest = simd_max(largest);
    if (lane == 0) {
        nm[i * u.nh + gh] = largest;
    }
}

// A thread per (query head, row): what the far field has for the row, relative to c. hd[k][nh] is (c, far
// denominator, 1, 0), or (c, 0, 0, 0) where the far part does not count; gn[k][nh][m]; cf[k][nh][64].
kernel void o1c_far(device const uint* meta [[buffer(0)]],
                    device const float* fs [[buffer(1)]],
                    device const float* nm [[buffer(2)]],
                    device const float* mu [[buffer(3)]],
                    device const float* s [[buffer(4)]],
                    device float4* hd [[buffer(5)]],
                    device float* gn [[buffer(6)]],
                    device float* cf [[buffer(7)]],
                    constant OC& u [[buffer(8)]],
                    uint2 p [[thread_position_in_grid]])
{
    const uint gh = p.x;
    const uint i = p.y;
    if (gh >= u.nh) {
        return;
    }
    const uint g = gh / u.hpg;
    const uint row = i * u.nh + gh;
    const Ring ring = ring_of(meta, u, g);
    if (ring.far_of(i) == 0) {
        hd[row] = float4(nm[row], 0.0f, 0.0f, 0.0f);
        return;
    }

    device const float* score = fs + (i * u.ng + g) * u.m * u.hpg + gh % u.hpg;
    float largest = -INFINITY;
    for (uint a = 0; a < u.m; a++) {
        largest = max(largest, score[a * u.hpg]);
    }
    float near_landmark[MAX_LANDMARKS];
    for (uint a = 0; a < u.m; a++) {
        near_landmark[a] = exp(score[a * u.hpg] - largest);
    }
    const uint first = gh * u.m;  // the head's landmarks in the planes of s
    float c = nm[row];
    for (uint b = 0; b < u.m; b++) {
        c = max(c, largest + s[top_at(u, first + b)]);
    }

    device const float* mixing = mu + gh * u.m * u.m;
    float gain[MAX_LANDMARKS];  // weight of what is relative to M'_b
    float denominator = 0.0f;
    for (uint b = 0; b < u.m; b++) {
        float mixed = 0.0f;
        for (uint a = 0; a < u.m; a++) {
            mixed = fma(near_landmark[a], mixing[a * u.m + b], mixed);
        }
        gain[b] = mixed * exp(largest + s[top_at(u, first + b)] - c);
        denominator = fma(gain[b], s[mass_at(u, first + b, i)], denominator);
        gn[row * u.m + b] = gain[b] * s[rescale_at(u, first + b)];
    }

    if (!(denominator >= 0.0f)) {  // NaN does not count either
        hd[row] = float4(c, 0.0f, 0.0f, 0.0f);
        return;
    }
    hd[row] = float4(c, denominator, 1.0f, 0.0f);
    for (uint j = ring.first_evicting(); j <= i; j++) {
        float weight = 0.0f;
        for (uint b = 0; b < u.m; b++) {
            weight = fma(gain[b], s[weight_at(first + b, j)], weight);
        }
        cf[row * MAX_ROWS + j] = weight;
    }
}

// A simdgroup per (query head, row): scores become weights relative to c, in place, and what the row is to
// be multiplied with. inv[k][nh].
kernel void o1c_soft(device const uint* meta [[buffer(0)]],
                     device float* sc [[buffer(1)]],
                     device const float4* hd [[buffer(2)]],
                     device float* inv [[buffer(3)]],
                     constant OC& u [[buffer(4)]],
                     uint2 group [[threadgroup_position_in_grid]],
                     uint lane [[thread_index_in_threadgroup]])
{
    const uint gh = group.x;
    const uint i = group.y;
    const uint g = gh / u.hpg;
    const uint columns = u.ns + ring_of(meta, u, g).visible(i);
    device float* at = sc + (i * u.ng + g) * (u.ns + u.w) * u.hpg + gh % u.hpg;
    const float4 far = hd[i * u.nh + gh];

    float sum = 0.0f;
    for (uint c = lane; c < columns; c += LANES) {
        const float weight = exp(at[c * u.hpg] - far.x);
        at[c * u.hpg] = weight;
        sum += weight;
    }
    sum = simd_sum(sum);
    if (lane == 0) {
        inv[i * u.nh + gh] = 1.0f / max(sum + far.y, LEAST_SUM);
    }
}

// acc[h] += weight[h] * value for the query heads of a group. The loop has a constant end, so that it can be
// unrolled and `acc` stay in registers.
inline void accumulate(thread float4* acc, device const float* weight, float4 value, uint hpg)
{
#pragma unroll
    for (uint h = 0; h < MAX_HEADS; h++) {
        if (h < hpg) {
            acc[h] = fma(float4(weight[h]), value, acc[h]);
        }
    }
}

// A thread per (group, piece, four components) and row: the weighted sum of the values in one eighth of the
// row's columns, for all query heads of the group, so that a value is read once. pz[k][ng][8][hpg][d].
kernel void o1c_sum(device const uint* meta [[buffer(0)]],
                    device const float* sc [[buffer(1)]],
                    device const float4* ring_v [[buffer(2)]],
                    device const float4* sink_v [[buffer(3)]],
                    device const float4* v [[buffer(4)]],
                    device float4* pz [[buffer(5)]],
                    constant OC& u [[buffer(6)]],
                    uint2 p [[thread_position_in_grid]])
{
    const uint d4 = u.d / 4;
    if (p.x >= u.ng * PIECES * d4) {
        return;
    }
    const uint x = p.x % d4;
    const uint piece = p.x / d4 % PIECES;
    const uint g = p.x / (d4 * PIECES);
    const uint i = p.y;
    const Ring ring = ring_of(meta, u, g);
    const uint oldest = ring.evicted(i + 1);
    const uint columns = u.ns + ring.visible(i);
    const uint length = (columns + PIECES - 1) / PIECES;
    const uint end = min((piece + 1) * length, columns);
    // The columns lie in up to three places, in this order: sinks, ring, chunk.
    const uint end_of_ring = u.ns + ring.len - oldest;

    float4 acc[MAX_HEADS];
#pragma unroll
    for (uint h = 0; h < MAX_HEADS; h++) {
        acc[h] = 0.0f;
    }
    device const float* weight = sc + (i * u.ng + g) * (u.ns + u.w) * u.hpg;
    uint c = piece * length;
    for (; c < min(end, u.ns); c++) {
        accumulate(acc, weight + c * u.hpg, sink_v[(g * u.ns + c) * d4 + x], u.hpg);
    }
    if (c < min(end, end_of_ring)) {
        uint slot = ring.slot(oldest + c - u.ns);
        for (; c < min(end, end_of_ring); c++) {
            accumulate(acc, weight + c * u.hpg, ring_v[(g * u.w + slot) * d4 + x], u.hpg);
            slot = slot + 1 < ring.window ? slot + 1 : 0;
        }
    }
    for (; c < end; c++) {
        const uint row = u.r0 + c - end_of_ring;
        accumulate(acc, weight + c * u.hpg, v[(row * u.ng + g) * d4 + x], u.hpg);
    }

    device float4* to = pz + ((i * u.ng + g) * PIECES + piece) * u.hpg * d4 + x;
#pragma unroll
    for (uint h = 0; h < MAX_HEADS; h++) {
        if (h < u.hpg) {
            to[h * d4] = acc[h];
        }
    }
}

// A thread per (query head, four components) and row: near pieces and far part together into `out`.
kernel void o1c_add(device const uint* meta [[buffer(0)]],
                    device const float4* pz [[buffer(1)]],
                    device const float4* hd [[buffer(2)]],
                    device const float* gn [[buffer(3)]],
                    device const float4* t_hat [[buffer(4)]],
                    device const float* inv [[buffer(5)]],
                    device const float* cf [[buffer(6)]],
                    device const float4* ring_v [[buffer(7)]],
                    device float4* out [[buffer(8)]],
                    constant OC& u [[buffer(9)]],
                    uint2 p [[thread_position_in_grid]])
{
    const uint d4 = u.d / 4;
    if (p.x >= u.nh * d4) {
        return;
    }
    const uint gh = p.x / d4;
    const uint x = p.x % d4;
    const uint g = gh / u.hpg;
    const uint i = p.y;
    const uint row = i * u.nh + gh;

    float4 sum = 0.0f;
    for (uint piece = 0; piece < PIECES; piece++) {
        sum += pz[(((i * u.ng + g) * PIECES + piece) * u.hpg + gh % u.hpg) * d4 + x];
    }
    if (hd[row].z == 1.0f) {
        sum += far_values(x, gh, i, ring_of(meta, u, g), u, gn, t_hat, cf, ring_v);
    }
    out[((u.r0 + i) * u.nh + gh) * d4 + x] = sum * inv[row];
}

// A thread per (four components, query head and landmark): maximum, mass and numerator after the chunk.
kernel void o1c_far_commit(device const uint* meta [[buffer(0)]],
                           device const float4* ring_v [[buffer(1)]],
                           device float* mz [[buffer(2)]],
                           device float4* t_hat [[buffer(3)]],
                           device const float* s [[buffer(4)]],
                           constant OC& u [[buffer(5)]],
                           uint2 p [[thread_position_in_grid]])
{
    const uint d4 = u.d / 4;
    const uint x = p.x;
    const uint t = p.y;
    if (x >= d4 || t >= u.ghm) {
        return;
    }
    const uint gh = t / u.m;
    const uint b = t % u.m;
    const uint g = gh / u.hpg;
    const Ring ring = ring_of(meta, u, g);
    const uint j0 = ring.first_evicting();
    if (j0 >= u.k) {
        return;  // the chunk evicts nothing
    }

    float4 sum = t_hat[t * d4 + x] * s[rescale_at(u, t)];
    for (uint j = j0; j < u.k; j++) {
        const float weight = s[weight_at(t, j)];
        sum = fma(float4(weight), ring_v[(g * u.w + ring.slot(j - j0)) * d4 + x], sum);
    }
    t_hat[t * d4 + x] = sum;
    if (x == 0) {
        mz[gh * 2 * u.m + b] = s[top_at(u, t)];
        mz[gh * 2 * u.m + u.m + b] = s[mass_at(u, t, u.k - 1)];
    }
}

// A thread per (four components, group, row): the chunk's keys and values into the ring. No two rows share
// a slot, because a chunk is no longer than the window.
kernel void o1c_ring_commit(device const uint* meta [[buffer(0)]],
                            device float4* ring_k [[buffer(1)]],
                            device float4* ring_v [[buffer(2)]],
                            device const float4* k [[buffer(3)]],
                            device const float4* v [[buffer(4)]],
                            constant OC& u [[buffer(5)]],
                            uint3 p [[thread_position_in_grid]])
{
    const uint d4 = u.d / 4;
    const uint x = p.x;
    const uint g = p.y;
    const uint j = p.z;
    if (x >= d4) {
        return;
    }
    const Ring ring = ring_of(meta, u, g);
    const uint from = ((u.r0 + j) * u.ng + g) * d4 + x;
    const uint to = (g * u.w + ring.slot(ring.len + j)) * d4 + x;
    ring_k[to] = k[from];
    ring_v[to] = v[from];
}

// A thread per group: `meta` after the chunk.
kernel void o1c_meta(device uint* meta [[buffer(0)]],
                     constant OC& u [[buffer(1)]],
                     uint g [[thread_position_in_grid]])
{
    if (g < u.ng) {
        advance(meta, ring_of(meta, u, g), u, g);
    }
}

// A thread per float4, exactly: the start of one buffer into another.
kernel void o1c_copy(device const float4* src [[buffer(0)]],
                     device float4* dst [[buffer(1)]],
                     uint i [[thread_position_in_grid]])
{
    dst[i] = src[i];
}
