// Causal grouped-query attention of many tokens of a row: queries share what is read of the paged KV cache.
//
// Every score and every output is computed in the order in which `attend_decode` computes it, so that a token's bits are the
// same whichever of the two it meets: scores word by word in two chains; values one key, or one pair of keys in bf16, after the
// other.
#pragma once
#include "attention.h"
#include "buffer.h"

namespace chorus {

constexpr int kQueryBlock = 48;  // query vectors (token, head) of a unit
constexpr int kQueryTile = 6;  // that share a pass over the values: 6 × 4 accumulators

struct AttentionUnit {
    int row, kv_head, token, tokens;
};

inline void attention_units(const int32_t* qo_indptr, int rows, int heads, int kv_heads,
                            std::vector<AttentionUnit>& units) {
    units.clear();
    const int block = std::max(1, kQueryBlock / (heads / kv_heads));
    for (int row = 0; row < rows; row++) {
        const int begin = qo_indptr[row], end = qo_indptr[row + 1];
        for (int t = begin; t < end; t += block)
            for (int h = 0; h < kv_heads; h++) units.push_back({row, h, t, std::min(block, end - t)});
    }
}

// Sixteen keys as columns: word w of each, sixteen side by side, for w < words.
template <class T>
inline void transpose_keys(const T* const* keys, long offset, int words, float* out) {
    for (int first = 0; first < words; first += 8) {
        const int count = std::min(8, words - first);
        __m512 columns[8];
        key_columns(keys, offset + first * Kind<T>::pair, count, columns);
        for (int w = 0; w < count; w++) store16(out + (long)(first + w) * kLanes, columns[w]);
    }
}

// scores[r][0 … 16·BLOCKS-1] = q[r] · key for ROWS queries and the keys of as many `transpose_keys`: the words with an even
// number one after the other, those with an odd one likewise, and the two together.
template <class T, int ROWS, int BLOCKS>
inline void column_scores(const T* const* q, const float* keys, int words, float* scores, long lds) {
    using K = Kind<T>;
    __m512 acc[2][ROWS][BLOCKS];
#pragma GCC unroll 24
    for (int i = 0; i < 2 * ROWS * BLOCKS; i++)
        acc[i / (ROWS * BLOCKS)][i / BLOCKS % ROWS][i % BLOCKS] = _mm512_setzero_ps();
    auto word = [&](int w, __m512(*to)[BLOCKS]) {
        typename K::Reg key[BLOCKS];
#pragma GCC unroll 2
        for (int b = 0; b < BLOCKS; b++) key[b] = K::load((const T*)(keys + (long)(b * words + w) * kLanes));
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            const auto query = K::broadcast(q[r] + w * K::pair);
#pragma GCC unroll 2
            for (int b = 0; b < BLOCKS; b++) to[r][b] = K::mac(to[r][b], key[b], query);
        }
    };
    int w = 0;
    for (; w + 2 <= words; w += 2) word(w, acc[0]), word(w + 1, acc[1]);
    if (w < words) word(w, acc[0]);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int b = 0; b < BLOCKS; b++)
            store16(scores + r * lds + b * kLanes, _mm512_add_ps(acc[0][r][b], acc[1][r][b]));
}

// out[r] = factor[r] · Σ_s p[r][s] · v[s] over the visible[r] keys that each of ROWS queries sees, the last the most; v: pairs of
// keys, [columns] of each as `join_values` lays them out. Keys that a query doesn't see stay out of its sum: what they hold
// may be NaN, which a weight of 0 does not undo.
template <class T, int ROWS>
inline void weigh(const T* p, long ldp, const T* v, int columns, const int* visible, const float* factor, int head_dim,
                  T* const* out) {
    using K = Kind<T>;
    for (int c = 0; c < columns; c += 4 * kLanes) {
        __m512 acc[ROWS][4];
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < 4; j++) acc[r][j] = _mm512_setzero_ps();
        int s = 0;
        const T* from = v + (long)c * K::pair;
        auto load = [&](int j) { return K::load(from + j * K::width); };
        for (; s + K::pair <= visible[0]; s += K::pair, from += (long)columns * K::pair) {
            const auto v0 = load(0), v1 = load(1), v2 = load(2), v3 = load(3);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                const auto weight = K::broadcast(p + r * ldp + s);
                acc[r][0] = K::mac(acc[r][0], v0, weight);
                acc[r][1] = K::mac(acc[r][1], v1, weight);
                acc[r][2] = K::mac(acc[r][2], v2, weight);
                acc[r][3] = K::mac(acc[r][3], v3, weight);
            }
        }
        for (; s < visible[ROWS - 1]; s += K::pair, from += (long)columns * K::pair)
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                if (visible[r] <= s) continue;
                const auto weight = K::broadcast(p + r * ldp + s);
                for (int j = 0; j < 4; j++)
                    acc[r][j] = K::mac(acc[r][j], visible[r] == s + 1 ? K::first(load(j)) : load(j), weight);
            }
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < 4 && c + j * kLanes < head_dim; j += 2)
                store_sums(acc[r][j], acc[r][j + 1], factor[r], head_dim - c - j * kLanes, out[r] + c + j * kLanes);
    }
}

// ROWS queries, of which the last sees the most keys.
template <class T, int ROWS>
inline void attend_tile(const T* const* q, T* const* out, const int* visible, int head_dim, int columns, int padded,
                        float scale, AttentionScratch& scratch) {
    const int most = visible[ROWS - 1], words = head_dim / Kind<T>::pair;
    float* scores = scratch.scores.data();
    for (int s = 0; s < most; s += 2 * kLanes)
        column_scores<T, ROWS, 2>(q, scratch.keys.data() + (long)s * words, words, scores + s, padded);
    float factor[ROWS];
    for (int r = 0; r < ROWS; r++)
        factor[r] = softmax<T>(scores + (long)r * padded, visible[r], (most + kLanes - 1) / kLanes * kLanes, scale);
    weigh<T, ROWS>((const T*)scores, padded * (long)(sizeof(float) / sizeof(T)), (const T*)scratch.values.data(),
                   columns, visible, factor, head_dim, out);
}

// q, out: [tokens, heads, head_dim] with row stride ld. pages: the row's block table.
template <class T>
inline void attend(const PagedCache<T>& cache, const AttentionUnit& unit, const T* q, T* out, long ld, int group,
                   const int64_t* pages, int kv_len, int row_end, float scale, AttentionScratch& scratch) {
    const int seen = kv_len - (row_end - (unit.token + unit.tokens));  // keys that the unit's last token sees
    const int padded = (seen + 2 * kLanes - 1) / (2 * kLanes) * 2 * kLanes, head_dim = cache.head_dim;
    constexpr int pair = Kind<T>::pair;
    const int columns = whole_columns(head_dim), pairs = (seen + pair - 1) / pair;
    grow(scratch.scores, (size_t)kQueryTile * padded);
    grow(scratch.values, (size_t)pairs * columns);  // a pair of bf16 is as large as a float32
    grow(scratch.places, padded);
    const int words = head_dim / Kind<T>::pair;
    grow(scratch.keys, (size_t)padded * words);
    const T** places = (const T**)scratch.places.data();
    const long offset = (long)unit.kv_head * head_dim;
    locate(cache, cache.k, pages, seen, places);
    for (int s = seen; s < padded; s++) places[s] = places[seen - 1];
    for (int s = 0; s < padded; s += kLanes)
        transpose_keys(places + s, offset, words, scratch.keys.data() + (long)s * words);
    locate(cache, cache.v, pages, seen, places);
    for (int s = 0; s < pairs; s++) {
        const T *one = places[s * pair] + offset,
                *other = (s + 1) * pair <= seen ? places[(s + 1) * pair - 1] + offset : nullptr;
        float* to = scratch.values.data() + (long)s * columns;
        for (int c = 0; c < columns; c += 2 * kLanes) {
            typename Kind<T>::Reg joined[2];
            join_values(one + c, other ? other + c : nullptr, std::max(0, head_dim - c), joined);
            memcpy(to + c, joined, sizeof joined);
        }
    }
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
#define CHORUS_TILE(n) \
    case n: attend_tile<T, n>(queries, outs, visible, head_dim, columns, padded, scale, scratch); break;
            // clang-format off
            CHORUS_TILE(1) CHORUS_TILE(2) CHORUS_TILE(3) CHORUS_TILE(4) CHORUS_TILE(5) CHORUS_TILE(6)
            // clang-format on
#undef CHORUS_TILE
                default : break;
        }
    }
}

}  // namespace chorus
