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

// Sixteen keys as columns: word w (a pair of bf16, or a float32) of each, sixteen side by side, for w < words.
template <class T>
inline void transpose_keys(const T* const* keys, long offset, int words, float* out) {
    for (int first = 0; first < words; first += kLanes) {
        const int count = std::min(kLanes, words - first);
        __m512 a[16], b[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) a[i] = load16((const float*)(keys[i] + offset) + first, head_mask(count));
        transpose16(a, b);
        for (int i = 0; i < count; i++) store16(out + (long)(first + i) * kLanes, b[i]);
    }
}

// scores[r][0..15] = q[r] · key for ROWS queries and the keys of `transpose_keys`: the sums of `key_scores`, without its
// shuffles. Word w belongs to lane w % 16 there, and the lanes are added in the order of `reduce16`.
template <class T, int ROWS>
inline void column_scores(const T* const* q, const float* keys, int words, float* scores, long lds) {
    using K = Kind<T>;
    auto add = [](__m512* to, const __m512* from) {
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) to[r] = _mm512_add_ps(to[r], from[r]);
    };
    auto lane = [&](int l, __m512* acc) {
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) acc[r] = _mm512_setzero_ps();
        for (int w = l; w < words; w += kLanes) {
            const auto key = K::load((const T*)(keys + (long)w * kLanes));
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) acc[r] = K::mac(acc[r], key, K::broadcast(q[r] + w * K::pair));
        }
    };
    auto four = [&](int l, __m512* sum) {
        __m512 one[ROWS], other[ROWS];
        lane(l, sum), lane(l + 2, other), add(sum, other);
        lane(l + 1, one), lane(l + 3, other), add(one, other);
        add(sum, one);
    };
    __m512 half[ROWS], sum[ROWS], other[ROWS];
    four(0, half), four(4, other), add(half, other);
    four(8, sum), four(12, other), add(sum, other);
    add(half, sum);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) store16(scores + r * lds, half[r]);
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

// ROWS queries, of which the last sees the most keys.
template <class T, int ROWS>
inline void attend_tile(const T* const* q, T* const* out, const int* visible, int head_dim, int columns, int padded, float scale,
                        AttentionScratch& scratch) {
    const int most = visible[ROWS - 1], words = head_dim / Kind<T>::pair;
    float *scores = scratch.scores.data(), *sums = scratch.sums.data();
    for (int s = 0; s < most; s += kLanes)
        column_scores<T, ROWS>(q, scratch.keys.data() + (long)s * words, words, scores + s, padded);
    float factor[ROWS];
    for (int r = 0; r < ROWS; r++)
        factor[r] = softmax(scores + (long)r * padded, visible[r], (most + kLanes - 1) / kLanes * kLanes, scale);
    weigh<ROWS>(scores, padded, scratch.values.data(), columns, most, sums);
    for (int r = 0; r < ROWS; r++) scale_to(sums + (long)r * columns, head_dim, factor[r], out[r]);
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
    grow(scratch.places, padded);
    const int words = head_dim / Kind<T>::pair;
    grow(scratch.keys, (size_t)padded * words);
    const T** places = (const T**)scratch.places.data();
    const long offset = (long)unit.kv_head * head_dim;
    locate(cache, cache.k, pages, seen, places);
    for (int s = seen; s < padded; s++) places[s] = places[seen - 1];
    for (int s = 0; s < padded; s += kLanes) transpose_keys(places + s, offset, words, scratch.keys.data() + (long)s * words);
    locate(cache, cache.v, pages, seen, places);
    for (int s = 0; s < seen; s++)
        for (int c = 0; c < columns; c += kLanes)
            store16(scratch.values.data() + (long)s * columns + c, load16(places[s] + offset + c, head_mask(std::max(0, head_dim - c))));
    for (int first = 0, total = unit.tokens * group; first < total; first += kQueryTile) {
        const int count = std::min(kQueryTile, total - first);
        const T* queries[kQueryTile];
        T* outs[kQueryTile];
        int visible[kQueryTile];
        for (int i = 0; i < count; i++) {
            const int token = unit.token + (first + i) / group;
            const long at = token * ld + (long)(unit.kv_head * group + (first + i) % group) * head_dim;
            queries[i] = q + at, outs[i] = out + at;
            visible[i] = kv_len - (row_end - 1 - token);
        }
        switch (count) {
#define CHORUS_TILE(n) case n: attend_tile<T, n>(queries, outs, visible, head_dim, columns, padded, scale, scratch); break;
            CHORUS_TILE(1) CHORUS_TILE(2) CHORUS_TILE(3) CHORUS_TILE(4) CHORUS_TILE(5) CHORUS_TILE(6)
#undef CHORUS_TILE
            default: break;
        }
    }
}

}  // namespace chorus
