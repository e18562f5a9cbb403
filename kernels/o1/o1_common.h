// Constant-memory attention of one layer: what its kernels share.
//
// A group is a head of keys and values with `hpg` query heads; head `h` of group `g` is query head
// gh = g*hpg + h. The layer keeps `ns` sink tokens, a ring of the newest tokens of each group, and for
// every query head `m` landmarks, which stand in for the tokens that have left the ring:
//
//   far(q, j) = sum_a sum_b exp(scale q.k_tilde[a]) mu[a][b] exp(scale q_tilde[b].k_j)
//
// A dispatch works on a chunk of `k` new rows. Row `i` attends to the sinks, to its window (the newest
// tokens, itself included) and to the far field of all tokens that have left, the one included that row
// `i` itself pushes out. The state changes only after the whole chunk has been attended to.
//
// Everything is float32 and row-major, `meta` uint32. Vectors of `d` components are read as d/4 float4.
// An element's index fits in 32 bits: no buffer has 2^32 elements. Infinities and NaN are values here, so
// this is not to be compiled with fast math (MLX does not).
#ifndef O1_COMMON_H
#define O1_COMMON_H

#include <metal_stdlib>
using namespace metal;

constant constexpr uint MAX_ROWS = 64;        // rows of a chunk
constant constexpr uint MAX_LANDMARKS = 32;   // m
constant constexpr uint MAX_HEADS = 8;        // query heads of a group, hpg
constant constexpr uint PIECES = 8;           // into which o1c_sum cuts the columns of a row
constant constexpr uint LANES = 32;           // of a simdgroup
constant constexpr float LEAST = -1e30f;      // a maximum of scores starts here: exp() of less is 0 anyway
constant constexpr float LEAST_SUM = 1e-30f;  // a row is divided by this at least

struct OC {
    uint hpg;     // query heads of a group
    uint m;       // landmarks
    uint w;       // ring slots of a group: the stride, whatever its own window
    uint ns;      // sink tokens
    uint d;       // head dimension, a multiple of 4
    uint nh;      // query heads
    uint ng;      // groups
    uint k;       // rows of the chunk
    uint r0;      // its first row in q, k, v and out
    uint ghm;     // nh*m
    float scale;  // of the scores
    uint pad;
};

// ---- a group's ring ------------------------------------------------------------------------------------

// The ring as it was before the chunk. Tokens have logical positions: 0 is the oldest in the ring, len-1
// the newest, and row j of the chunk is at len + j.
struct Ring {
    uint len;     // filled slots, at most window
    uint head;    // slot of the oldest
    uint far;     // tokens evicted so far
    uint window;  // slots in use

    // The slot of logical position x. For a row of the chunk: the slot that it will be put into.
    uint slot(uint x) const { return (head + x) % window; }

    // How many tokens the first `rows` rows evict: those at logical positions 0, 1, ...
    uint evicted(uint rows) const { return len + rows > window ? len + rows - window : 0; }

    // The first row that evicts: it evicts position 0, the next one position 1. May lie beyond the chunk.
    uint first_evicting() const { return window - len; }

    // The window of row i: so many tokens, from logical position evicted(i + 1) to len + i.
    uint visible(uint i) const { return min(window, len + i + 1); }

    // Tokens that row i knows through the far field only.
    uint far_of(uint i) const { return far + evicted(i + 1); }
};

inline Ring ring_of(device const uint* meta, constant OC& u, uint g)
{
    device const uint* at = meta + 4 * g;
    Ring ring;
    ring.len = at[0];
    ring.head = at[1];
    ring.far = at[2];
    ring.window = at[3] > 0 ? at[3] : u.w;
    return ring;
}

// ---- rows of keys or values ----------------------------------------------------------------------------

// The row of logical position x, which may lie in the ring or in the chunk. `store` is ring_k or ring_v,
// `rows` k or v.
inline device const float4* token_row(uint x, uint g, Ring ring, constant OC& u,
                                      device const float4* store, device const float4* rows)
{
    const uint d4 = u.d / 4;
    if (x < ring.len) {
        return store + (g * u.w + ring.slot(x)) * d4;
    }
    return rows + ((u.r0 + x - ring.len) * u.ng + g) * d4;
}

// The row in column `column` of what chunk row i sees: the sinks, then its window from the oldest.
inline device const float4* near_row(uint column, uint i, uint g, Ring ring, constant OC& u,
                                     device const float4* store, device const float4* sinks,
                                     device const float4* rows)
{
    if (column < u.ns) {
        return sinks + (g * u.ns + column) * (u.d / 4);
    }
    return token_row(ring.evicted(i + 1) + column - u.ns, g, ring, u, store, rows);
}

inline float inner(device const float4* a, device const float4* b, uint d4)
{
    float4 sum = 0.0f;
    for (uint x = 0; x < d4; x++) {
        sum = fma(a[x], b[x], sum);
    }
    return (sum.x + sum.y) + (sum.z + sum.w);
}

// ---- where things lie in the scratch `s` ---------------------------------------------------------------
//
// Four planes over t = gh*m + b, one after the other: e[ghm][64], zc[ghm][64], M'[ghm], r[ghm].

// Weight of the token that chunk row j evicts, relative to M'.
inline uint weight_at(uint t, uint j)
{
    return t * MAX_ROWS + j;
}

// Mass after row j, relative to M'.
inline uint mass_at(constant OC& u, uint t, uint j)
{
    return (u.ghm + t) * MAX_ROWS + j;
}

// M', the largest exponent after the chunk.
inline uint top_at(constant OC& u, uint t)
{
    return 2 * MAX_ROWS * u.ghm + t;
}

// exp(M - M'), by which stored masses and numerators become relative to M'.
inline uint rescale_at(constant OC& u, uint t)
{
    return (2 * MAX_ROWS + 1) * u.ghm + t;
}

// exp(before - after) for maxima. Both are -infinity as long as nothing was evicted, and their difference NaN.
inline float rescale(float before, float after)
{
    return before == after ? 1.0f : exp(before - after);
}

// ---- what paths share ----------------------------------------------------------------------------------

// Four components of a row's far value sum, relative to its c: the stored numerators and, one by one, the
// values that the chunk has evicted up to row i. Only for rows whose far part counts.
inline float4 far_values(uint x, uint gh, uint i, Ring ring, constant OC& u, device const float* gn,
                         device const float4* t_hat, device const float* cf, device const float4* ring_v)
{
    const uint d4 = u.d / 4;
    const uint row = i * u.nh + gh;
    float4 sum = 0.0f;
    for (uint b = 0; b < u.m; b++) {
        sum = fma(float4(gn[row * u.m + b]), t_hat[(gh * u.m + b) * d4 + x], sum);
    }
    const uint j0 = ring.first_evicting();
    for (uint j = j0; j <= i; j++) {
        const uint from = gh / u.hpg * u.w + ring.slot(j - j0);
        sum = fma(float4(cf[row * MAX_ROWS + j]), ring_v[from * d4 + x], sum);
    }
    return sum;
}

// `meta` of group g after the chunk, from the ring as it was.
inline void advance(device uint* meta, Ring ring, constant OC& u, uint g)
{
    device uint* at = meta + 4 * g;
    const uint evicted = ring.evicted(u.k);
    at[0] = min(ring.window, ring.len + u.k);
    if (evicted > 0) {
        at[1] = ring.slot(evicted);
        at[2] = ring.far + evicted;
    }
}

#endif
