// Causal grouped-query attention over the paged KV cache: what decode and prefill share.
#pragma once
#include <algorithm>
#include <vector>
#include "gemm.h"

namespace chorus {

template <class T>
struct
    PagedCache {  // one layer: K or V of page p, token o, head h starts at data + p·page_elems + (o·kv_heads + h)·head_dim
    const T* k;
    const T* v;
    int64_t page_elems;
    int block_tokens, kv_heads, head_dim;
};

// Up to eight words (a word: a pair of bf16, or a float32) of sixteen keys, which lie `offset` elements after keys[i], as
// columns: out[w] is word w of all sixteen.
template <class T>
inline void key_columns(const T* const* keys, long offset, int words, __m512* out) {
    const __mmask8 mask = (__mmask8)head_mask(words);
    auto row = [&](int i) { return _mm256_maskz_loadu_ps(mask, (const float*)(keys[i] + offset)); };
    __m512 rows[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const int first = i / 4 * 8 + i % 4;
        rows[i] = _mm512_insertf32x8(_mm512_castps256_ps512(row(first)), row(first + 4), 1);
    }
    transpose16x8(rows, out);
}

// exp(scores · scale - the highest) over scores[0, visible), zero up to `padded`, as T in the same memory; returns 1 / their
// sum.
template <class T>
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
        store16((T*)scores + s, e);
        sum = _mm512_add_ps(sum, e);
    }
    return 1.0f / _mm512_reduce_add_ps(sum);
}

// Values of `Kind<T>::pair` keys, 32 columns of them, as two registers to multiply a pair of weights with: of float32 the
// columns in order; of bf16, whose second key may be null, the first four of every eight columns, and the others.
inline void join_values(const bf16* one, const bf16* other, int columns, Kind<bf16>::Reg* out) {
    using K = Kind<bf16>;
    const __m512i a = (__m512i)(columns < 32 ? K::load(one, columns) : K::load(one));
    const __m512i b =
        other ? (__m512i)(columns < 32 ? K::load(other, columns) : K::load(other)) : _mm512_setzero_si512();
    out[0] = (K::Reg)_mm512_unpacklo_epi16(a, b);
    out[1] = (K::Reg)_mm512_unpackhi_epi16(a, b);
}
inline void join_values(const float* one, const float*, int columns, __m512* out) {
    out[0] = load16(one, head_mask(columns));
    out[1] = load16(one + kLanes, head_mask(std::max(0, columns - kLanes)));
}

// Sums over values as `join_values` lays them out, times factor, in order of the columns.
inline void store_sums(__m512 low, __m512 high, float factor, int columns, bf16* out) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512 one = _mm512_permutex2var_ps(low, first, high), by = _mm512_set1_ps(factor);
    const __m512 other = _mm512_permutex2var_ps(low, _mm512_add_epi32(first, _mm512_set1_epi32(8)), high);
    store16(out, _mm512_mul_ps(one, by), head_mask(columns));
    store16(out + kLanes, _mm512_mul_ps(other, by), head_mask(std::max(0, columns - kLanes)));
}
inline void store_sums(__m512 low, __m512 high, float factor, int columns, float* out) {
    store16(out, _mm512_mul_ps(low, _mm512_set1_ps(factor)), head_mask(columns));
    store16(out + kLanes, _mm512_mul_ps(high, _mm512_set1_ps(factor)), head_mask(std::max(0, columns - kLanes)));
}

inline int whole_columns(int head_dim) { return (head_dim + 4 * kLanes - 1) / (4 * kLanes) * 4 * kLanes; }

struct AttentionScratch {
    std::vector<float> scores, sums, factors, values, keys;
    std::vector<const void*> places;
};

// Places of tokens 0 … count-1 of a row in the plane of K or of V.
template <class T>
inline void locate(const PagedCache<T>& cache, const T* plane, const int64_t* pages, int count, const T** out) {
    const long step = (long)cache.kv_heads * cache.head_dim;
    for (int s = 0, page = 0; s < count; page++) {
        const T* at = plane + pages[page] * cache.page_elems;
        for (const int end = std::min(count, s + cache.block_tokens); s < end; s++, at += step) out[s] = at;
    }
}

}  // namespace chorus
