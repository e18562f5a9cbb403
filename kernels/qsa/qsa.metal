// Sparse decode attention over an 8-bit cache: constants, what the kernels share, and the first kernels.
//
//   qsa_quant   new keys or values into the cache
//   qsa_score   a score for every block of four cells
//   qsa_topk    the best cells of every token, up to the budget
//   qsa_attn    attention over them, chunk by chunk
//   qsa_merge   the chunks together, gated
//
// qsa2.metal has other versions of the last three and is compiled after this file. Whatever stands there
// instead relies on the macros, QsaArgs, okey and qsa_write_prepared and on nothing else of this file, so
// these are the only names that it declares besides its kernels.
//
// A call brings n_tok new tokens, the last cells of the cache. Token t sees n_kv = pos0 + t + 1 cells.
// Infinities are values here, so this is not to be compiled with fast math (MLX does not).
#include <metal_stdlib>
using namespace metal;

#ifndef QH
#define QH 24  // query heads
#endif
#ifndef QKV
#define QKV 2  // heads of keys and values: query head h uses head h / (QH / QKV)
#endif
#ifndef QD
#define QD 256  // dimensions of a head: one per thread of a threadgroup
#endif
#ifndef QBUDGET
#define QBUDGET 2051  // cells that a token may attend to
#endif
#ifndef QCH
#define QCH 64  // cells of a chunk
#endif

static_assert(QD == 256, "the kernels give each of 256 threads a dimension");
static_assert(QH % QKV == 0, "every head of keys and values has the same number of query heads");

struct QsaArgs {
    uint pos0;       // cells before the call
    uint max_cells;  // for which there is room
};

// A larger float has a larger key, and both zeros have the same. By bits: as numbers, denormals may be 0.
inline uint okey(float x)
{
    const uint bits = as_type<uint>(x);
    if (bits == 0x80000000u) {
        return bits;  // -0.0, which gets the key of 0.0
    }
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Component `dim` of head h of token t to where the next matrix product wants it: xp[n_tok][QH][QD].
inline void qsa_write_prepared(float y, device float* xp, constant QsaArgs& a, int t, int h, uint dim)
{
    (void)a;  // for layouts that depend on the call
    xp[(uint(t) * QH + uint(h)) * QD + dim] = y;
}

// A thread per (cell, head, group of 64 dimensions), exactly: the values as 8 bits and their common scale.
// x[n][QKV][QD], of which row 0 is cell `first` of q[cell][QKV][QD] and sc[cell][QKV][4].
kernel void qsa_quant(device const float4* x [[buffer(0)]],
                      device char4* q [[buffer(1)]],
                      device half* sc [[buffer(2)]],
                      constant uint& first [[buffer(3)]],
                      uint i [[thread_position_in_grid]])
{
    device const float4* from = x + i * 16;
    float4 most = 0.0f;
    for (uint j = 0; j < 16; j++) {
        most = max(most, abs(from[j]));
    }
    const half scale = half(max(max(most.x, most.y), max(most.z, most.w)) / 127.0f);

    const uint group = first * QKV * 4 + i;
    sc[group] = scale;
    const float step = float(scale);  // the rounded scale, because that is what readers multiply by
    for (uint j = 0; j < 16; j++) {
        const float4 steps = step > 0.0f ? rint(from[j] / step) : float4(0.0f);
        q[group * 16 + j] = char4(clamp(steps, -127.0f, 127.0f));
    }
}

// A simdgroup per (block, token), 8 blocks to a threadgroup: the largest product of a query with the mean of
// the block's keys. The lanes share out the dimensions to make the mean, then the query heads to multiply
// with it. Blocks past the unfinished one are left alone. scores[n_tok][max_cells / 4 + 2].
kernel void qsa_score(device const float4* qcur [[buffer(0)]],
                      device const char4* kq [[buffer(1)]],
                      device const half* ksc [[buffer(2)]],
                      device float* scores [[buffer(3)]],
                      constant QsaArgs& args [[buffer(4)]],
                      uint2 group [[threadgroup_position_in_grid]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]])
{
    constexpr uint HEADS = QH / QKV;            // of queries, to a head of keys
    constexpr uint TOGETHER = QKV < 2 ? 1 : 2;  // heads of keys whose means are in memory at a time
    threadgroup float4 means[8][TOGETHER * 64];

    const uint block = group.x * 8 + simdgroup;
    const uint t = group.y;
    const uint n_kv = args.pos0 + t + 1;
    device float* score = scores + t * (args.max_cells / 4 + 2) + block;
    if (block >= n_kv / 4) {
        if (block == n_kv / 4 && lane == 0) {
            *score = n_kv % 4 > 0 ? INFINITY : -INFINITY;  // the newest cells are always seen
        }
        return;  // the whole simdgroup
    }

    threadgroup float4* mean = means[simdgroup];
    float best = -INFINITY;
    for (uint kv = 0; kv < QKV; kv += TOGETHER) {
        const uint held = min(TOGETHER, QKV - kv);
        if (kv > 0) {
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }
        for (uint x = lane; x < held * 64; x += 32) {
            float4 sum = 0.0f;
            for (uint c = 0; c < 4; c++) {
                const uint at = ((block * 4 + c) * QKV + kv) * 64 + x;
                sum = fma(float4(float(ksc[at / 16])), float4(kq[at]), sum);
            }
            mean[x] = 0.25f * sum;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint h = lane; h < held * HEADS; h += 32) {
            device const float4* query = qcur + (t * QH + kv * HEADS + h) * 64;
            threadgroup const float4* key = mean + h / HEADS * 64;
            float4 sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            for (uint x = 0; x < 64; x += 4) {
                for (uint j = 0; j < 4; j++) {
                    sum[j] = fma(query[x + j], key[x + j], sum[j]);
                }
            }
            const float4 all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
            best = max(best, (all.x + all.y) + (all.z + all.w));
        }
    }
    best = simd_max(best);
    if (lane == 0) {
        *score = best;
    }
}

// A threadgroup of 1024 per token. Finds the key of the last block taken bit by bit, from the highest: a bit
// is set if blocks of at least the key so far still make up the budget. Then every thread counts what its own
// run of neighbouring blocks gives, and a prefix sum over the threads says where in the list that goes.
[[max_total_threads_per_threadgroup(1024)]]
kernel void qsa_topk(device const float* scores [[buffer(0)]],
                     device int* ids [[buffer(1)]],
                     constant QsaArgs& args [[buffer(2)]],
                     uint t [[threadgroup_position_in_grid]],
                     uint i [[thread_index_in_threadgroup]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]])
{
    constexpr uint THREADS = 1024;
    constexpr uint BUDGET = QBUDGET;
    threadgroup atomic_uint at_least[32];  // cells of blocks that pass with this bit
    threadgroup uint above_before[33];     // cells in earlier simdgroups: of blocks above the cut,
    threadgroup uint level_before[33];     // and of blocks right at it

    const uint n_kv = args.pos0 + t + 1;
    device int* list = ids + t * BUDGET;
    if (n_kv <= BUDGET) {
        for (uint cell = i; cell < n_kv; cell += THREADS) {
            list[cell] = int(cell);
        }
        return;  // the whole threadgroup
    }
    device const float* row = scores + t * (args.max_cells / 4 + 2);
    const uint blocks = (n_kv + 3) / 4;  // the unfinished one among them if it has cells

    if (i < 32) {
        atomic_store_explicit(&at_least[i], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint cut = 0;
    for (uint bit = 32; bit-- > 0;) {
        const uint higher = cut | 1u << bit;
        uint cells = 0;
        for (uint b = i; b < blocks; b += THREADS) {
            cells += okey(row[b]) >= higher ? min(4u, n_kv - 4 * b) : 0;
        }
        cells = simd_sum(cells);
        if (lane == 0) {
            atomic_fetch_add_explicit(&at_least[bit], cells, memory_order_relaxed);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (atomic_load_explicit(&at_least[bit], memory_order_relaxed) >= BUDGET) {
            cut = higher;
        }
    }

    const uint length = (blocks + THREADS - 1) / THREADS;
    const uint first = min(i * length, blocks);
    const uint end = min(first + length, blocks);
    uint above = 0;
    uint level = 0;
    for (uint b = first; b < end; b++) {
        const uint key = okey(row[b]);
        const uint cells = min(4u, n_kv - 4 * b);
        above += key > cut ? cells : 0;
        level += key == cut ? cells : 0;
    }
    const uint own_above = above;
    const uint own_level = level;
    above = simd_prefix_exclusive_sum(above);
    level = simd_prefix_exclusive_sum(level);
    if (lane == 31) {
        above_before[simdgroup + 1] = above + own_above;
        level_before[simdgroup + 1] = level + own_level;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == 0) {
        const uint all_above = simd_prefix_inclusive_sum(above_before[lane + 1]);
        const uint all_level = simd_prefix_inclusive_sum(level_before[lane + 1]);
        above_before[lane + 1] = all_above;
        level_before[lane + 1] = all_level;
        if (lane == 0) {
            above_before[0] = 0;
            level_before[0] = 0;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    above += above_before[simdgroup];
    level += level_before[simdgroup];

    const uint wanted = BUDGET - above_before[32];  // cells to be taken of blocks at the cut: the lowest
    for (uint b = first; b < end; b++) {
        const uint key = okey(row[b]);
        const uint cells = min(4u, n_kv - 4 * b);
        const uint taken = key > cut ? cells : key == cut ? min(cells, wanted - min(level, wanted)) : 0;
        const uint at = above + min(level, wanted);
        for (uint c = 0; c < taken; c++) {
            list[at + c] = int(4 * b + c);
        }
        above += key > cut ? cells : 0;
        level += key == cut ? cells : 0;
    }
}

// A threadgroup of 256 per (chunk of QCH cells, head of keys and values, token), for all query heads of it.
// Scores: four lanes per cell, each with the 64 dimensions that have a scale in common. Softmax within the
// chunk: a simdgroup per query head, which first adds up the four. Value sums: a thread per dimension.
// part[n_tok][chunks][QH][QD + 2]: value sum, largest score, sum of exp(score - largest).
kernel void qsa_attn(device const float4* qcur [[buffer(0)]],
                     device const char4* kq [[buffer(1)]],
                     device const char* vq [[buffer(2)]],
                     device const half* ksc [[buffer(3)]],
                     device const half* vsc [[buffer(4)]],
                     device const int* ids [[buffer(5)]],
                     device float* part [[buffer(6)]],
                     constant QsaArgs& args [[buffer(7)]],
                     uint3 group [[threadgroup_position_in_grid]],
                     uint i [[thread_index_in_threadgroup]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]])
{
    constexpr uint HEADS = QH / QKV;
    constexpr uint CHUNKS = (QBUDGET + QCH - 1) / QCH;
    threadgroup float products[HEADS][QCH][4];  // with the four quarters of a key
    threadgroup float weights[QCH][HEADS];

    const uint chunk = group.x;
    const uint kv = group.y;
    const uint t = group.z;
    const uint chosen = min(args.pos0 + t + 1, uint(QBUDGET));
    if (chunk * QCH >= chosen) {
        return;  // the whole threadgroup
    }
    const uint cells = min(uint(QCH), chosen - chunk * QCH);
    device const int* list = ids + t * QBUDGET + chunk * QCH;
    device float* to = part + ((t * CHUNKS + chunk) * QH + kv * HEADS) * (QD + 2);

    const uint quarter = i % 4;
    device const float4* queries = qcur + (t * QH + kv * HEADS) * 64 + quarter * 16;
    for (uint c = i / 4; c < cells; c += 64) {
        const uint at = (uint(list[c]) * QKV + kv) * 4 + quarter;
        device const char4* key = kq + at * 16;
        const float scale = float(ksc[at]) * (1.0f / 16.0f);  // and 1/sqrt(QD)
        float4 sums[HEADS];
        for (uint h = 0; h < HEADS; h++) {
            sums[h] = 0.0f;
        }
        for (uint x = 0; x < 16; x++) {
            const float4 four = float4(key[x]);
            for (uint h = 0; h < HEADS; h++) {
                sums[h] = fma(four, queries[h * 64 + x], sums[h]);
            }
        }
        for (uint h = 0; h < HEADS; h++) {
            products[h][c][quarter] = scale * ((sums[h].x + sums[h].y) + (sums[h].z + sums[h].w));
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (uint h = simdgroup; h < HEADS; h += 8) {
        float top = -INFINITY;
        for (uint c = lane; c < cells; c += 32) {
            threadgroup const float* four = products[h][c];
            const float score = (four[0] + four[1]) + (four[2] + four[3]);
            weights[c][h] = score;
            top = max(top, score);
        }
        top = simd_max(top);
        float sum = 0.0f;
        for (uint c = lane; c < cells; c += 32) {
            const float weight = exp(weights[c][h] - top);
            weights[c][h] = weight;
            sum += weight;
        }
        sum = simd_sum(sum);
        if (lane == 0) {
            to[h * (QD + 2) + QD] = top;
            to[h * (QD + 2) + QD + 1] = sum;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float values[HEADS];
    for (uint h = 0; h < HEADS; h++) {
        values[h] = 0.0f;
    }
    for (uint c = 0; c < cells; c++) {
        const uint at = (uint(list[c]) * QKV + kv) * QD + i;
        const float value = float(vq[at]) * float(vsc[at / 64]);
        for (uint h = 0; h < HEADS; h++) {
            values[h] = fma(weights[c][h], value, values[h]);
        }
    }
    for (uint h = 0; h < HEADS; h++) {
        to[h * (QD + 2) + i] = values[h];
    }
}

// A threadgroup of 256 per (query head, token), a thread per dimension: the chunks of QCH cells brought to
// their common maximum and added up, normalised, and let through by the gate.
kernel void qsa_merge(device const float* part [[buffer(0)]],
                      device const float* qfull [[buffer(1)]],
                      device float* xp [[buffer(2)]],
                      constant QsaArgs& args [[buffer(3)]],
                      uint2 group [[threadgroup_position_in_grid]],
                      uint i [[thread_index_in_threadgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]])
{
    constexpr uint CHUNKS = (QBUDGET + QCH - 1) / QCH;
    constexpr uint STRIDE = QH * (QD + 2);  // from a chunk to the next
    threadgroup float weights[CHUNKS];      // of a chunk in the output

    const uint h = group.x;
    const uint t = group.y;
    const uint chosen = min(args.pos0 + t + 1, uint(QBUDGET));
    const uint chunks = (chosen + QCH - 1) / QCH;
    device const float* from = part + (t * CHUNKS * QH + h) * (QD + 2);

    if (simdgroup == 0) {
        float top = -INFINITY;
        for (uint c = lane; c < chunks; c += 32) {
            top = max(top, from[c * STRIDE + QD]);
        }
        top = simd_max(top);
        float sum = 0.0f;
        for (uint c = lane; c < chunks; c += 32) {
            const float weight = exp(from[c * STRIDE + QD] - top);
            weights[c] = weight;
            sum = fma(weight, from[c * STRIDE + QD + 1], sum);
        }
        sum = simd_sum(sum);
        for (uint c = lane; c < chunks; c += 32) {
            weights[c] /= sum;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float y = 0.0f;
    for (uint c = 0; c < chunks; c++) {
        y = fma(weights[c], from[c * STRIDE + i], y);
    }
    const float gate = qfull[(t * QH + h) * 2 * QD + QD + i];
    qsa_write_prepared(y / (1.0f + exp(-gate)), xp, args, int(t), int(h), i);
}
