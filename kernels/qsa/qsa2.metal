// Sparse decode attention, the second set of kernels. Compiled after qsa.metal, which brings the library, the
// macros, QsaArgs, okey and qsa_write_prepared.
//
//   qsa_topk2   the selection of qsa_topk by radix select
//   qsa_attn2   attention in smaller chunks and groups of heads: more threadgroups, each with less to do
//   qsa_merge2  the chunks of qsa_attn2 together, gated
//   qsa_attn3   attention in the chunks of qsa_attn, without sums across lanes for the scores

#ifndef QCH2
#define QCH2 32  // cells of a chunk of qsa_attn2: at most one per lane
#endif
#ifndef QHG
#define QHG 2  // groups of the query heads of a KV head: at most 8 heads each, one per simdgroup
#endif

static_assert(QCH2 <= 32, "qsa_attn2 has a lane for each cell of a chunk");

// ---- selection -----------------------------------------------------------------------------------------

// Adds up the cells of each digit. Digits that follow each other are often the same, above all the highest
// ones: they are added together, so that threads do not queue for one bin.
struct QsaTally {
    threadgroup atomic_uint* bins;
    uint digit;
    uint cells;

    void add(uint other, uint more)
    {
        if (other != digit) {
            flush();
            digit = other;
        }
        cells += more;
    }

    void flush()
    {
        if (cells > 0) {
            atomic_fetch_add_explicit(&bins[digit], cells, memory_order_relaxed);
            cells = 0;
        }
    }
};

// Where a thread stands in the list of chosen cells, in ascending order of blocks.
struct QsaCut {
    uint key;     // of the last block taken
    uint wanted;  // cells to be taken of blocks with this key: the lowest
    uint above;   // cells so far in blocks with a larger key, all taken
    uint level;   // cells so far in blocks with this key

    void pass(uint other, uint cells)
    {
        above += other > key ? cells : 0;
        level += other == key ? cells : 0;
    }

    void take(uint other, uint cells, uint block, device int* list)
    {
        const uint taken = other > key ? cells : other == key ? min(cells, wanted - min(level, wanted)) : 0;
        const uint at = above + min(level, wanted);
        for (uint c = 0; c < taken; c++) {
            list[at + c] = int(4 * block + c);
        }
        pass(other, cells);
    }
};

// A threadgroup of 1024 per token: radix select. Four passes find the key of the last block taken, eight bits
// each, from the highest. A pass counts, in threadgroup memory, the cells of each digit among the blocks that
// agree with what is known of the key; a suffix scan of the 256 bins then says in which of them the budget
// runs out. A thread has a run of neighbouring blocks and keeps the keys of the first four: all, up to 4096
// blocks.
[[max_total_threads_per_threadgroup(1024)]]
kernel void qsa_topk2(device const float* scores [[buffer(0)]],
                      device int* ids [[buffer(1)]],
                      constant QsaArgs& args [[buffer(2)]],
                      uint t [[threadgroup_position_in_grid]],
                      uint i [[thread_index_in_threadgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]])
{
    constexpr uint THREADS = 1024;
    constexpr uint HELD = 4;
    constexpr uint BUDGET = QBUDGET;
    threadgroup atomic_uint bins[256];
    threadgroup uint found[2];       // the digit of the pass, and the cells still wanted of it
    threadgroup uint before[2][32];  // cells above the cut and at it, in earlier simdgroups

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
    const uint length = (blocks + THREADS - 1) / THREADS;
    const uint first = min(i * length, blocks);
    const uint end = min(first + length, blocks);
    const uint held = min(HELD, end - first);
    uint keys[HELD];
#pragma unroll
    for (uint j = 0; j < HELD; j++) {
        keys[j] = j < held ? okey(row[first + j]) : 0;
    }
    if (i < 256) {
        atomic_store_explicit(&bins[i], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    uint known = 0;  // mask of the bits found so far
    QsaCut cut = {0, BUDGET, 0, 0};
    for (uint pass = 0; pass < 4; pass++) {
        const uint shift = 24 - 8 * pass;
        QsaTally tally = {bins, 0, 0};
#pragma unroll
        for (uint j = 0; j < HELD; j++) {
            if (j < held && (keys[j] & known) == cut.key) {
                tally.add(keys[j] >> shift & 255, min(4u, n_kv - 4 * (first + j)));
            }
        }
        for (uint b = first + HELD; b < end; b++) {
            const uint key = okey(row[b]);
            if ((key & known) == cut.key) {
                tally.add(key >> shift & 255, min(4u, n_kv - 4 * b));
            }
        }
        tally.flush();
        threadgroup_barrier(mem_flags::mem_threadgroup);

        if (simdgroup == 0) {  // a lane has eight bins, the first lane the highest
            uint cells[8];
            uint own = 0;
            for (uint j = 0; j < 8; j++) {
                threadgroup atomic_uint* bin = &bins[255 - (lane * 8 + j)];
                cells[j] = atomic_load_explicit(bin, memory_order_relaxed);
                atomic_store_explicit(bin, 0u, memory_order_relaxed);  // for the next pass
                own += cells[j];
            }
            uint higher = simd_prefix_exclusive_sum(own);  // cells of higher digits
            for (uint j = 0; j < 8; j++) {
                if (higher < cut.wanted && cut.wanted <= higher + cells[j]) {
                    found[0] = 255 - (lane * 8 + j);
                    found[1] = cut.wanted - higher;
                }
                higher += cells[j];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        cut.key |= found[0] << shift;
        cut.wanted = found[1];
        known |= 255u << shift;
    }

    // What lies before the thread's blocks: within the simdgroup, then over the simdgroups.
    QsaCut mine = cut;
#pragma unroll
    for (uint j = 0; j < HELD; j++) {
        if (j < held) {
            mine.pass(keys[j], min(4u, n_kv - 4 * (first + j)));
        }
    }
    for (uint b = first + HELD; b < end; b++) {
        mine.pass(okey(row[b]), min(4u, n_kv - 4 * b));
    }
    cut.above = simd_prefix_exclusive_sum(mine.above);
    cut.level = simd_prefix_exclusive_sum(mine.level);
    if (lane == 31) {
        before[0][simdgroup] = cut.above + mine.above;
        before[1][simdgroup] = cut.level + mine.level;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup < 2) {
        before[simdgroup][lane] = simd_prefix_exclusive_sum(before[simdgroup][lane]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    cut.above += before[0][simdgroup];
    cut.level += before[1][simdgroup];

#pragma unroll
    for (uint j = 0; j < HELD; j++) {
        if (j < held) {
            cut.take(keys[j], min(4u, n_kv - 4 * (first + j)), first + j, list);
        }
    }
    for (uint b = first + HELD; b < end; b++) {
        cut.take(okey(row[b]), min(4u, n_kv - 4 * b), b, list);
    }
}

// ---- attention -----------------------------------------------------------------------------------------

// A threadgroup of 256 per (chunk of QCH2 cells, group of query heads, token); y is KV head * QHG + head
// group. Scores: a lane per cell, a simdgroup per 32 dimensions, so that all lanes read the same part of a
// query. Then simdgroup h adds up what the eight have for head h, and the softmax of the chunk stays in its
// registers. Value sums: a thread per dimension. part as in qsa_attn.
kernel void qsa_attn2(device const float4* qcur [[buffer(0)]],
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
    constexpr uint HEADS = QH / QKV / QHG;
    constexpr uint CHUNKS = (QBUDGET + QCH2 - 1) / QCH2;
    threadgroup float products[8][HEADS][32];
    threadgroup float weights[QCH2][HEADS];

    const uint chunk = group.x;
    const uint kv = group.y / QHG;
    const uint t = group.z;
    const uint chosen = min(args.pos0 + t + 1, uint(QBUDGET));
    if (chunk * QCH2 >= chosen) {
        return;  // the whole threadgroup
    }
    const uint cells = min(uint(QCH2), chosen - chunk * QCH2);
    device const int* list = ids + t * QBUDGET + chunk * QCH2;
    device float* to = part + ((t * CHUNKS + chunk) * QH + group.y * HEADS) * (QD + 2);

    if (lane < cells) {
        const uint at = (uint(list[lane]) * QKV + kv) * 8 + simdgroup;
        device const char4* key = kq + at * 8;
        device const float4* queries = qcur + (t * QH + group.y * HEADS) * 64 + simdgroup * 8;
        const float scale = float(ksc[at / 2]) * (1.0f / 16.0f);  // and 1/sqrt(QD)
        float4 sums[HEADS];
        for (uint h = 0; h < HEADS; h++) {
            sums[h] = 0.0f;
        }
        for (uint x = 0; x < 8; x++) {
            const float4 four = float4(key[x]);
            for (uint h = 0; h < HEADS; h++) {
                sums[h] = fma(four, queries[h * 64 + x], sums[h]);
            }
        }
        for (uint h = 0; h < HEADS; h++) {
            products[simdgroup][h][lane] = scale * ((sums[h].x + sums[h].y) + (sums[h].z + sums[h].w));
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (simdgroup < HEADS) {
        float score = -INFINITY;
        if (lane < cells) {
            score = 0.0f;
            for (uint s = 0; s < 8; s++) {
                score += products[s][simdgroup][lane];
            }
        }
        const float top = simd_max(score);
        const float weight = exp(score - top);
        const float sum = simd_sum(weight);
        if (lane < cells) {
            weights[lane][simdgroup] = weight;
        }
        if (lane == 0) {
            to[simdgroup * (QD + 2) + QD] = top;
            to[simdgroup * (QD + 2) + QD + 1] = sum;
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

// A threadgroup of 256 per (query head, token): as qsa_merge, for the more numerous chunks of qsa_attn2. A
// thread has two dimensions of every second chunk, and the two halves are added at the end.
kernel void qsa_merge2(device const float* part [[buffer(0)]],
                       device const float* qfull [[buffer(1)]],
                       device float* xp [[buffer(2)]],
                       constant QsaArgs& args [[buffer(3)]],
                       uint2 group [[threadgroup_position_in_grid]],
                       uint i [[thread_index_in_threadgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]])
{
    constexpr uint CHUNKS = (QBUDGET + QCH2 - 1) / QCH2;
    constexpr uint STRIDE = QH * (QD + 2);
    constexpr uint PAIRS = QD / 2;
    threadgroup float weights[CHUNKS];
    threadgroup float2 halves[2][PAIRS];

    const uint h = group.x;
    const uint t = group.y;
    const uint chosen = min(args.pos0 + t + 1, uint(QBUDGET));
    const uint chunks = (chosen + QCH2 - 1) / QCH2;
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

    const uint pair = i % PAIRS;
    float2 y = 0.0f;
    for (uint c = i / PAIRS; c < chunks; c += 2) {
        y = fma(float2(weights[c]), ((device const float2*)(from + c * STRIDE))[pair], y);
    }
    halves[i / PAIRS][pair] = y;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float2 both = halves[0][i / 2] + halves[1][i / 2];
    const float gate = qfull[(t * QH + h) * 2 * QD + QD + i];
    qsa_write_prepared(both[i % 2] / (1.0f + exp(-gate)), xp, args, int(t), int(h), i);
}

// A threadgroup of 256 per (chunk of QCH <= 64 cells, head of keys and values, token), for its 12 query
// heads. Scores: a lane has a cell and multiplies its key with three queries, so that no sum crosses lanes;
// simdgroup s has half s % 2 of the cells and triple s / 2 of the heads. The halves agree on a head's largest
// score and sum through threadgroup memory. Value sums: a thread has a dimension and the weights of four
// heads per vector.
kernel void qsa_attn3(device const float4* qcur [[buffer(0)]],
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
    constexpr uint HEADS = 12;
    constexpr uint CHUNKS = (QBUDGET + QCH - 1) / QCH;
    threadgroup float4 weights[64][HEADS / 4];
    threadgroup float tops[2][HEADS];
    threadgroup float sums[2][HEADS];

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

    const uint side = simdgroup % 2;
    const uint cell = side * 32 + lane;
    const uint head = simdgroup / 2 * 3;
    float3 score = -INFINITY;
    if (cell < cells) {
        const uint at = uint(list[cell]) * QKV + kv;
        device const char4* key = kq + at * 64;
        device const float4* query = qcur + (t * QH + kv * HEADS + head) * 64;
        score = 0.0f;
        for (uint quarter = 0; quarter < 4; quarter++) {
            float4 sum[3] = {0.0f, 0.0f, 0.0f};
            for (uint x = quarter * 16; x < quarter * 16 + 16; x++) {
                const float4 four = float4(key[x]);
                sum[0] = fma(four, query[x], sum[0]);
                sum[1] = fma(four, query[64 + x], sum[1]);
                sum[2] = fma(four, query[128 + x], sum[2]);
            }
            const float scale = float(ksc[at * 4 + quarter]) * (1.0f / 16.0f);  // and 1/sqrt(QD)
            score.x = fma(scale, (sum[0].x + sum[0].y) + (sum[0].z + sum[0].w), score.x);
            score.y = fma(scale, (sum[1].x + sum[1].y) + (sum[1].z + sum[1].w), score.y);
            score.z = fma(scale, (sum[2].x + sum[2].y) + (sum[2].z + sum[2].w), score.z);
        }
    }
    const float3 top = simd_max(score);
    if (lane < 3) {
        tops[side][head + lane] = top[lane];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float3 weight;
    for (uint j = 0; j < 3; j++) {
        weight[j] = exp(score[j] - max(tops[0][head + j], tops[1][head + j]));
        ((threadgroup float*)weights[cell])[head + j] = weight[j];
    }
    const float3 sum = simd_sum(weight);
    if (lane < 3) {
        sums[side][head + lane] = sum[lane];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (i < HEADS) {
        to[i * (QD + 2) + QD] = max(tops[0][i], tops[1][i]);
        to[i * (QD + 2) + QD + 1] = sums[0][i] + sums[1][i];
    }
    float4 values[HEADS / 4] = {0.0f, 0.0f, 0.0f};
    for (uint c = 0; c < cells; c++) {
        const uint at = (uint(list[c]) * QKV + kv) * QD + i;
        const float4 value = float(vq[at]) * float(vsc[at / 64]);
        for (uint j = 0; j < HEADS / 4; j++) {
            values[j] = fma(weights[c][j], value, values[j]);
        }
    }
    for (uint h = 0; h < HEADS; h++) {
        to[h * (QD + 2) + i] = values[h / 4][h % 4];
    }
}
