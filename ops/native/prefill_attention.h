// Causal grouped-query attention of many tokens of a row: queries share what is read of the paged KV cache.
//
// Every score and every output is computed in the order in which `attend_decode` computes it, so that a token's bits are the
// same whichever of the two it meets: dot products lane by lane, then `reduce16`; values one key after the other in float32.
#pragma once
#include "attention.h"

namespace chorus {

constexpr int kQueryBlock = 48;  // query vectors (token, head) of a unit
constexpr int kQueryTile = 6;    // that share a pass over the values: 6 × 4 accumulators

struct AttentionUnit { int row, kv_head, token, tokens; };

inline void attention_units(const int32_t* qo_indptr, int rows, int heads, int kv_heads, std::vector<AttentionUnit>& units) {
    units.clear();
    const int block = std::max(1, kQueryBlock / (heads / kv_heads));
    for (int row = 0; row < rows; row++) {
        const int begin = qo_indptr[row], end = qo_indptr[row + 1];
        for (int t = begin; t < end; t += block)
            for (int h = 0; h < kv_heads; h++) units.push_back({row, h, t, std::min(block, end - t)});
    }
}

// Two queries' scores for eight keys: a[i] of key i and query 0, a[8 + i] of query 1.
template <class T>
inline __m512 pair_scores(const T* q0, const T* q1, const T* const* keys, long offset, int head_dim) {
    using K = Kind<T>;
    __m512 acc[16];
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) acc[j] = _mm512_setzero_ps();
    int c = 0;
    for (; c + K::width <= head_dim; c += K::width) {
        const auto b0 = K::load(q0 + c), b1 = K::load(q1 + c);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            const auto key = K::load(keys[j] + offset + c);
            acc[j] = K::mac(acc[j], key, b0);
            acc[8 + j] = K::mac(acc[8 + j], key, b1);
        }
    }
    if (c < head_dim) {
        const auto b0 = K::load(q0 + c, head_dim - c), b1 = K::load(q1 + c, head_dim - c);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            const auto key = K::load(keys[j] + offset + c, head_dim - c);
            acc[j] = K::mac(acc[j], key, b0);
            acc[8 + j] = K::mac(acc[8 + j], key, b1);
        }
    }
    return reduce16(acc);
}

// out[r] = Σ_s p[r][s] · v[s] for ROWS queries; v: [keys, columns] in float32, whole registers wide.
template <int ROWS>
inline void weigh(const float* p, long ldp, const float* v, int columns, int keys, float* out) {
    for (int c = 0; c < columns; c += 4 * kLanes) {
        __m512 acc[ROWS][4];
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < 4; j++) acc[r][j] = _mm512_setzero_ps();
        const float* from = v + c;
        for (int s = 0; s < keys; s++, from += columns) {
            const __m512 v0 = load16(from), v1 = load16(from + kLanes), v2 = load16(from + 2 * kLanes), v3 = load16(from + 3 * kLanes);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                const __m512 weight = _mm512_set1_ps(p[r * ldp + s]);
                acc[r][0] = _mm512_fmadd_ps(weight, v0, acc[r][0]);
                acc[r][1] = _mm512_fmadd_ps(weight, v1, acc[r][1]);
                acc[r][2] = _mm512_fmadd_ps(weight, v2, acc[r][2]);
                acc[r][3] = _mm512_fmadd_ps(weight, v3, acc[r][3]);
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < 4; j++) store16(out + (long)r * columns + c + j * kLanes, acc[r][j]);
    }
}

// q, out: [tokens, heads, head_dim] with row stride ld. pages: the row's block table.
template <class T>
inline void attend(const PagedCache<T>& cache, const AttentionUnit& unit, const T* q, T* out, long ld, int group,
                   const int64_t* pages, int kv_len, int row_end, float scale, AttentionScratch& scratch) {
    const int seen = kv_len - (row_end - (unit.token + unit.tokens));  // keys that the unit's last token sees
    const int padded = (seen + kLanes - 1) / kLanes * kLanes, head_dim = cache.head_dim;
    const int columns = (head_dim + 4 * kLanes - 1) / (4 * kLanes) * 4 * kLanes;
    auto grow = [](auto& v, size_t n) { if (v.size() < n) v.resize(n); };
    grow(scratch.scores, (size_t)kQueryTile * padded);
    grow(scratch.sums, (size_t)kQueryTile * columns);
    grow(scratch.values, (size_t)seen * columns);
    grow(scratch.places, 2 * padded);
    const T** keys = (const T**)scratch.places.data();
    const T** values = keys + padded;
    locate(cache, cache.k, pages, seen, keys);
    locate(cache, cache.v, pages, seen, values);
    for (int s = seen; s < padded; s++) keys[s] = keys[seen - 1];
    const long offset = (long)unit.kv_head * head_dim;
    for (int s = 0; s < seen; s++)
        for (int c = 0; c < columns; c += kLanes)
            store16(scratch.values.data() + (long)s * columns + c, load16(values[s] + offset + c, head_mask(std::max(0, head_dim - c))));
    float *scores = scratch.scores.data(), *sums = scratch.sums.data();
    for (int first = 0, total = unit.tokens * group; first < total; first += kQueryTile) {
        const int count = std::min(kQueryTile, total - first);
        long at[kQueryTile + 1] = {};
        int visible[kQueryTile + 1] = {};
        for (int i = 0; i < count; i++) {
            const int token = unit.token + (first + i) / group;
            at[i] = token * ld + (long)(unit.kv_head * group + (first + i) % group) * head_dim;
            visible[i] = kv_len - (row_end - 1 - token);
        }
        at[count] = at[count - 1], visible[count] = visible[count - 1];
        for (int i = 0; i < count; i += 2)
            for (int s = 0; s < visible[i + 1]; s += 8) {
                const __m512 both = pair_scores<T>(q + at[i], q + at[i + 1], keys + s, offset, head_dim);
                _mm256_storeu_ps(scores + (long)i * padded + s, _mm512_castps512_ps256(both));
                if (i + 1 < count) _mm256_storeu_ps(scores + (long)(i + 1) * padded + s, _mm512_extractf32x8_ps(both, 1));
            }
        float factor[kQueryTile];
        const int most = visible[count - 1];
        for (int i = 0; i < count; i++) factor[i] = softmax(scores + (long)i * padded, visible[i], (most + kLanes - 1) / kLanes * kLanes, scale);
        const float* v = scratch.values.data();
        switch (count) {
            case 1: weigh<1>(scores, padded, v, columns, most, sums); break;
            case 2: weigh<2>(scores, padded, v, columns, most, sums); break;
            case 3: weigh<3>(scores, padded, v, columns, most, sums); break;
            case 4: weigh<4>(scores, padded, v, columns, most, sums); break;
            case 5: weigh<5>(scores, padded, v, columns, most, sums); break;
            default: weigh<6>(scores, padded, v, columns, most, sums); break;
        }
        for (int i = 0; i < count; i++) scale_to(sums + (long)i * columns, head_dim, factor[i], out + at[i]);
    }
}

}  // namespace chorus
