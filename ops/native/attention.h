// Causal grouped-query attention over the paged KV cache, one unit per (row, KV head, block of query tokens).
#pragma once
#include <algorithm>
#include <vector>
#include "simd.h"

namespace chorus {

constexpr int kQueries = 12;  // query vectors (token, head) that share a pass over the keys

struct AttentionUnit { int row, kv_head, token, tokens; };

template <class T>
struct PagedCache {  // one layer: K or V of page p, token o, head h starts at data + p·page_elems + (o·kv_heads + h)·head_dim
    const T* k;
    const T* v;
    int64_t page_elems;
    int block_tokens, kv_heads, head_dim;
};

inline std::vector<AttentionUnit> attention_units(const int32_t* qo_indptr, int rows, int heads, int kv_heads) {
    std::vector<AttentionUnit> units;
    const int block = std::max(1, kQueries / (heads / kv_heads));
    for (int row = 0; row < rows; row++)
        for (int t = qo_indptr[row]; t < qo_indptr[row + 1]; t += block)
            for (int h = 0; h < kv_heads; h++)
                units.push_back({row, h, t, std::min(block, qo_indptr[row + 1] - t)});
    return units;
}

// scores[0..15] = q · k[j] for sixteen keys.
template <class T>
inline __m512 key_scores(const T* q, const T* const* keys, int head_dim) {
    using K = Kind<T>;
    __m512 acc[16];
    for (int j = 0; j < 16; j++) acc[j] = _mm512_setzero_ps();
    int c = 0;
    for (; c + K::width <= head_dim; c += K::width) {
        const auto b = K::load(q + c);
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) acc[j] = K::mac(acc[j], K::load(keys[j] + c), b);
    }
    if (c < head_dim) {
        const auto b = K::load(q + c, head_dim - c);
        for (int j = 0; j < 16; j++) acc[j] = K::mac(acc[j], K::load(keys[j] + c, head_dim - c), b);
    }
    return reduce16(acc);
}

// Softmax in place over scores[0, visible), zero up to `padded`; returns 1 / sum of the exponentials.
inline float softmax(float* scores, int visible, int padded, float scale) {
    const __m512 factor = _mm512_set1_ps(scale), low = _mm512_set1_ps(-INFINITY);
    __m512 top = low;
    for (int s = 0; s < visible; s += kLanes)
        top = _mm512_max_ps(top, _mm512_mask_mul_ps(low, head_mask(visible - s), load16(scores + s), factor));
    const __m512 highest = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    __m512 sum = _mm512_setzero_ps();
    for (int s = 0; s < padded; s += kLanes) {
        const __mmask16 mask = s < visible ? head_mask(visible - s) : (__mmask16)0;
        const __m512 e = _mm512_maskz_mov_ps(mask, exp16(_mm512_fmsub_ps(load16(scores + s), factor, highest)));
        store16(scores + s, e);
        sum = _mm512_add_ps(sum, e);
    }
    return 1.0f / _mm512_reduce_add_ps(sum);
}

// out[r] = factor[r] · Σ_s p[r][s] · v[s] for ROWS query vectors, 64 columns at a time.
template <class T, int ROWS>
inline void weighted_values(const float* p, long ldp, const T* const* values, int keys, int head_dim, const float* factor,
                            T* const* out) {
    for (int c = 0; c < head_dim; c += 4 * kLanes) {
        __mmask16 mask[4];
        for (int j = 0; j < 4; j++) mask[j] = head_mask(std::max(0, head_dim - c - j * kLanes));
        const bool whole = head_dim - c >= 4 * kLanes;
        __m512 acc[ROWS][4];
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < 4; j++) acc[r][j] = _mm512_setzero_ps();
        for (int s = 0; s < keys; s++) {
            __m512 v[4];
            if (whole)
                for (int j = 0; j < 4; j++) v[j] = load16(values[s] + c + j * kLanes);
            else
                for (int j = 0; j < 4; j++) v[j] = load16(values[s] + c + j * kLanes, mask[j]);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                const __m512 weight = _mm512_set1_ps(p[r * ldp + s]);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) acc[r][j] = _mm512_fmadd_ps(weight, v[j], acc[r][j]);
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < 4; j++)
                if (mask[j]) store16(out[r] + c + j * kLanes, _mm512_mul_ps(acc[r][j], _mm512_set1_ps(factor[r])), mask[j]);
    }
}

struct AttentionScratch {
    std::vector<float> scores;
    std::vector<const void*> keys, values;
};

// q, out: [tokens, heads, head_dim] with row stride ld. pages: the row's block table. kv_len counts the row's tokens.
template <class T>
inline void attend(const PagedCache<T>& cache, const AttentionUnit& unit, const T* q, T* out, long ld, int group,
                   const int64_t* pages, int kv_len, int row_end, float scale, AttentionScratch& scratch) {
    const int last_visible = kv_len - (row_end - (unit.token + unit.tokens));  // of the unit's last token
    const int padded = (last_visible + kLanes - 1) / kLanes * kLanes;
    scratch.scores.resize((size_t)kQueries * padded);
    scratch.keys.resize(padded);
    scratch.values.resize(last_visible);
    const T** keys = (const T**)scratch.keys.data();
    const T** values = (const T**)scratch.values.data();
    for (int s = 0; s < padded; s++) {
        const int at = std::min(s, last_visible - 1);
        const long place = pages[at / cache.block_tokens] * cache.page_elems +
                           ((long)(at % cache.block_tokens) * cache.kv_heads + unit.kv_head) * cache.head_dim;
        keys[s] = cache.k + place;
        if (s < last_visible) values[s] = cache.v + place;
    }
    const int total = unit.tokens * group;
    for (int first = 0; first < total; first += kQueries) {
        const int count = std::min(kQueries, total - first);
        float factor[kQueries];
        T* to[kQueries];
        for (int i = 0; i < count; i++) {
            const int token = unit.token + (first + i) / group, head = unit.kv_head * group + (first + i) % group;
            const long at = token * ld + (long)head * cache.head_dim;
            const int visible = kv_len - (row_end - 1 - token);
            float* scores = scratch.scores.data() + (long)i * padded;
            for (int s = 0; s < visible; s += kLanes) store16(scores + s, key_scores<T>(q + at, keys + s, cache.head_dim));
            factor[i] = softmax(scores, visible, padded, scale);
            to[i] = out + at;
        }
        const float* p = scratch.scores.data();
        int i = 0;
        for (; i + 4 <= count; i += 4)
            weighted_values<T, 4>(p + (long)i * padded, padded, values, last_visible, cache.head_dim, factor + i, to + i);
        switch (count - i) {
            case 3: weighted_values<T, 3>(p + (long)i * padded, padded, values, last_visible, cache.head_dim, factor + i, to + i); break;
            case 2: weighted_values<T, 2>(p + (long)i * padded, padded, values, last_visible, cache.head_dim, factor + i, to + i); break;
            case 1: weighted_values<T, 1>(p + (long)i * padded, padded, values, last_visible, cache.head_dim, factor + i, to + i); break;
            default: break;
        }
    }
}

}  // namespace chorus
