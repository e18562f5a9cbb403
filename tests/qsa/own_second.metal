// A second file as somebody else has it: constants of its own, defined unconditionally, no include, other names, and
// nothing of the first file but QsaArgs, okey, qsa_write_prepared and the macros. Slow and simple.
#define QCH2 16
#define QHG 3

static inline int chunk_count(int n_kv) { return (min(n_kv, QBUDGET) + QCH2 - 1) / QCH2; }

kernel void qsa_topk2(device const float* block_scores [[buffer(0)]],
                      device int* out [[buffer(1)]],
                      constant QsaArgs& p [[buffer(2)]],
                      uint tok [[threadgroup_position_in_grid]],
                      uint tid [[thread_position_in_threadgroup]])
{
    const int n_kv = int(p.pos0 + tok) + 1;
    device int* mine = out + tok * QBUDGET;
    if (tid != 0) {
        return;
    }
    device const float* row = block_scores + tok * (p.max_cells / 4 + 2);
    int at = 0;
    for (int b = 0; b <= n_kv >> 2; b++) {
        const int cells = min(4, n_kv - 4 * b);
        int better = 0;  // cells of blocks that come first
        for (int other = 0; n_kv > QBUDGET && other <= n_kv >> 2; other++) {
            const uint theirs = okey(row[other]), ours = okey(row[b]);
            better += theirs > ours || (theirs == ours && other < b) ? min(4, n_kv - 4 * other) : 0;
        }
        for (int c = 0; c < min(cells, QBUDGET - better); c++) {
            mine[at++] = 4 * b + c;
        }
    }
}

kernel void qsa_attn2(device const float* query [[buffer(0)]],
                      device const char* keys [[buffer(1)]],
                      device const char* values [[buffer(2)]],
                      device const half* key_scales [[buffer(3)]],
                      device const half* value_scales [[buffer(4)]],
                      device const int* chosen [[buffer(5)]],
                      device float* partial [[buffer(6)]],
                      constant QsaArgs& p [[buffer(7)]],
                      uint3 where [[threadgroup_position_in_grid]],
                      uint tid [[thread_index_in_threadgroup]])
{
    const int heads = QH / QKV / QHG;
    threadgroup float s[QH / QKV / QHG][QCH2];
    const int tok = where.z, kv = where.y / QHG, first_head = where.y * heads;
    const int n = min(int(p.pos0) + tok + 1, QBUDGET);
    const int from = where.x * QCH2, count = min(QCH2, n - from);
    if (count <= 0) {
        return;
    }
    for (int job = tid; job < heads * count; job += 256) {
        const int h = job / count, c = job % count;
        const int cell = chosen[tok * QBUDGET + from + c];
        float sum = 0;
        for (int x = 0; x < QD; x++) {
            const float key = float(keys[(cell * QKV + kv) * QD + x]) * float(key_scales[(cell * QKV + kv) * 4 + x / 64]);
            sum += query[(tok * QH + first_head + h) * QD + x] * key;
        }
        s[h][c] = sum * 0.0625f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int h = 0; h < heads; h++) {
        float top = s[h][0], total = 0, value = 0;
        for (int c = 1; c < count; c++) {
            top = max(top, s[h][c]);
        }
        for (int c = 0; c < count; c++) {
            const int at = chosen[tok * QBUDGET + from + c] * QKV + kv;
            const float weight = exp(s[h][c] - top);
            total += weight;
            value += weight * float(values[at * QD + tid]) * float(value_scales[at * 4 + tid / 64]);
        }
        const int chunks = (QBUDGET + QCH2 - 1) / QCH2;
        device float* to = partial + ((tok * chunks + int(where.x)) * QH + first_head + h) * (QD + 2);
        to[tid] = value;
        if (tid == 0) {
            to[QD] = top;
            to[QD + 1] = total;
        }
    }
}

kernel void qsa_merge2(device const float2* partial [[buffer(0)]],
                       device const float* query_and_gate [[buffer(1)]],
                       device float* result [[buffer(2)]],
                       constant QsaArgs& p [[buffer(3)]],
                       uint2 where [[threadgroup_position_in_grid]],
                       uint tid [[thread_index_in_threadgroup]])
{
    const int h = where.x, tok = where.y, stride = QH * (QD + 2) / 2;
    const int n_kv = int(p.pos0) + tok + 1;
    device const float2* mine = partial + (tok * ((QBUDGET + QCH2 - 1) / QCH2) * QH + h) * (QD + 2) / 2;
    float top = -INFINITY;
    for (int c = 0; c < chunk_count(n_kv); c++) {
        top = max(top, mine[c * stride + QD / 2].x);
    }
    float total = 0, value = 0;
    for (int c = 0; c < chunk_count(n_kv); c++) {
        const float2 about = mine[c * stride + QD / 2];
        total += exp(about.x - top) * about.y;
        value += exp(about.x - top) * mine[c * stride + tid / 2][tid % 2];
    }
    const float gate = query_and_gate[(tok * QH + h) * 2 * QD + QD + tid];
    qsa_write_prepared(value / total / (1 + exp(-gate)), result, p, tok, h, tid);
}
