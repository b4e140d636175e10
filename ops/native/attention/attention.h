// Causal grouped-query attention over the paged KV cache: what decode and prefill share.
#pragma once
#include <algorithm>
#include <vector>
#include "elementwise/elementwise.h"
#include "simd/float8.h"
#include "gemm/gemm.h"

namespace chorus {

// Some keys of a row, in place of those that a query sees: at these places, which rise, or `count` from `first` on. None where
// `count` is 0.
struct KeyList {
    const int32_t* places;
    int first, count;
};

// One layer of the paged KV cache, and how its queries attend: K or V of page p, token o, head h starts at
// data + p·page_elems + (o·kv_heads + h)·head_stride.
//
//   k, v        the planes: data of either
//   head_stride elements from head to head: head_dim, unless something is kept behind each
//   page_elems  elements from page to page, of both of all layers in it
//   page_groups  entries of a block table from block to block
//   group       query heads that share a K/V head
//   scale       of a score
//   v_scale     of what is stored of values
//   softcap     scores s become softcap · tanh(s / softcap); 0: they stay
//   window      keys that a query sees, its own included; 0: all
//   chunked     a query sees those of its own chunk of so many, up to its own
//   sinks       [heads]: one more score of each query head, of a value of zeros; null: there is none
//   slopes      [heads]: a score loses so much for each token from the key to the query's own; null: nothing
template <class T>
struct PagedCache {
    T *k, *v;
    int64_t page_elems;
    int block_tokens, page_groups, kv_heads, head_dim, head_stride, group;
    float scale, v_scale, softcap;
    int window;
    bool chunked;
    const float *sinks, *slopes;

    // The first key that a query sees, of `visible` up to its own.
    int first(int visible) const {
        if (!window) return 0;
        return chunked ? (visible - 1) / window * window : std::max(0, visible - window);
    }

    // Elements from the beginning of a plane to a token's K/V head.
    int64_t at(int64_t page, int64_t offset, int kv_head) const {
        return page * page_elems + (offset * kv_heads + kv_head) * head_stride;
    }

    // Find where tokens first … first+count-1 of a row lie in a plane.
    //
    //   plane  k or v, or either from a head on
    //   pages  the row's block table, from the layer's page of the first block on
    //   out    [count]
    void locate(const T* plane, const int64_t* pages, int first, int count, const T** out) const {
        const long step = (long)kv_heads * head_stride;
        int offset = first % block_tokens;
        for (int s = 0, page = first / block_tokens; s < count; page++, offset = 0) {
            const T* at = plane + pages[(int64_t)page * page_groups] * page_elems + offset * step;
            for (const int end = std::min(count, s + block_tokens - offset); s < end; s++, at += step) out[s] = at;
        }
    }
    // The same of keys first … first+count-1 of a list.
    void locate(const T* plane, const int64_t* pages, const KeyList& list, int first, int count, const T** out) const {
        if (!list.places) return locate(plane, pages, list.first + first, count, out);
        const long step = (long)kv_heads * head_stride;
        for (int s = 0; s < count; s++) {
            const int place = list.places[first + s];
            const int64_t page = pages[(int64_t)(place / block_tokens) * page_groups];
            out[s] = plane + page * page_elems + place % block_tokens * step;
        }
    }
};

// A row's tokens with K and V.
struct KvRow {
    const int64_t* pages;  // block table, from the layer's page of the first block on
    int length;  // tokens
};

// Words of sixteen keys as columns: out[w] is word w of all sixteen; a word is a pair of bf16, or a float32, to which FP8 is
// widened.
//
//   keys    [16], addresses
//   offset  elements from there to the first word
//   words   at most eight
template <class T>
inline void key_columns(const T* const* keys, long offset, int words, Floats* out) {
    auto row = [&](int i) { return keys[i] + offset; };
    Floats rows[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const int first = i / 4 * 8 + i % 4;
        load_words_of_two(row(first), row(first + 4), words, rows[i]);
    }
    transpose16x8(rows, out);
}

// exp(scores · scale - the highest), as X in the same memory; returns 1 / their sum, to which a sink adds its own.
//
//   FROM     whether `first` is not 0
//   scores   [padded] float32
//   first    the first that counts; 0 before it, back to a multiple of 16
//   visible  the last that counts is before it; 0 beyond
//   padded   a multiple of 16
//   sink     one more score, with its scale; null: there is none
template <class X, bool FROM>
inline float softmax(float* scores, int first, int visible, int padded, float scale, const float* sink) {
    const Floats factor = floats(scale), low = floats(-INFINITY);
    const int begin = FROM ? first / kLanes * kLanes : 0;
    auto seen = [&](Floats v, int s, Floats other) { return FROM && s < first ? keep(other, head(first - s), v) : v; };
    Floats top = low;
    for (int s = begin; s < visible; s += kLanes)
        top = max(top, seen(keep(load16(scores + s) * factor, head(visible - s), low), s, low));
    if (sink) top = max(top, floats(*sink));
    const Floats highest = floats(largest(top));
    Floats all = floats(0);
    for (int s = begin; s < padded; s += kLanes) {
        Floats e = keep(exp16(fms(load16(scores + s), factor, highest)), head(std::max(0, visible - s)), floats(0));
        e = seen(e, s, floats(0));
        store16((X*)scores + s, e);
        all = all + e;
    }
    const float total = sum(all);
    return 1.0f / (sink ? total + sum(keep(exp16(floats(*sink) - highest), head(1), floats(0))) : total);
}

// scores = scale · scores + slope · (s - own), of scores s from begin on.
//
//   scores      [end], of keys in order
//   begin, end  multiples of 16
//   own         the query's own key
inline void lean(float* scores, int begin, int end, float scale, float slope, int own) {
    static const float steps[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Floats factor = floats(scale), by = floats(slope), first = load16(steps);
    for (int s = begin; s < end; s += kLanes) {
        const Floats bias = by * (first + floats((float)(s - own)));
        store16(scores + s, fma(load16(scores + s), factor, bias));
    }
}

// Weights of the keys that a query sees, before they are divided by their sum, as X in the memory of their scores; returns
// what their sum over stored values is multiplied by: the values' scale / the weights' sum.
//
//   cache    the layer
//   scores   see softmax
//   first    the first key that the query sees
//   visible  the last one is before it
//   padded   see softmax
//   query    the query head
template <class X, class T>
inline float weights_of(const PagedCache<T>& cache, float* scores, int first, int visible, int padded, int query) {
    float scale = cache.scale;
    if (cache.softcap != 0) {
        const int begin = first / kLanes * kLanes;
        cap(scores + begin, padded - begin, scale, cache.softcap);
        scale = 1;
    }
    if (cache.slopes) {
        lean(scores, first / kLanes * kLanes, padded, scale, cache.slopes[query], visible - 1);
        scale = 1;
    }
    const float* sink = cache.sinks ? cache.sinks + query : nullptr;
    const float factor = first ? softmax<X, true>(scores, first, visible, padded, scale, sink)
                               : softmax<X, false>(scores, 0, visible, padded, scale, sink);
    return factor * cache.v_scale;
}

// Values of `Kind<X>::pair` keys, 16·COUNT columns of them, as registers to multiply a weight of each key with: the columns in
// order; of pairs of bf16, of every 32 columns the first four of every eight, and the others.
//
//   one, other  [columns] of each key; other: null where it is not there
//   columns     that are there; 0 beyond
//   out         [COUNT]
template <int COUNT, class T>
inline void join_values(const T* one, const T*, int columns, Floats* out) {
#pragma GCC unroll 4
    for (int j = 0; j < COUNT; j++) out[j] = load16(one + j * kLanes, head(std::max(0, columns - j * kLanes)));
}
// Store sums over values as `join_values` lays them out, times factor, in order of the columns.
//
//   sums     [COUNT]
//   columns  to store, at most 16·COUNT
//   out      [columns]
template <int COUNT>
inline void store_sums(const Floats* sums, float factor, int columns, float* out) {
#pragma GCC unroll 4
    for (int j = 0; j < COUNT; j++)
        if (j * kLanes < columns) store16(out + j * kLanes, sums[j] * floats(factor), head(columns - j * kLanes));
}
#ifdef CHORUS_BF16
template <int COUNT, class T>
inline void join_values(const T* one, const T* other, int columns, Kind<bf16>::Reg* out) {
    using K = Kind<bf16>;
#pragma GCC unroll 2
    for (int j = 0; j < COUNT; j += 2, one += 32, other += other ? 32 : 0, columns -= 32) {
        const int count = std::max(0, columns);
        const __m512i a = (__m512i)load_pairs(one, count);
        const __m512i b = other ? (__m512i)load_pairs(other, count) : _mm512_setzero_si512();
        out[j] = (K::Reg)_mm512_unpacklo_epi16(a, b);
        out[j + 1] = (K::Reg)_mm512_unpackhi_epi16(a, b);
    }
}
template <int COUNT>
inline void store_sums(const Floats* sums, float factor, int columns, bf16* out) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const Floats by = floats(factor);
#pragma GCC unroll 2
    for (int j = 0; j < COUNT; j += 2) {
        if (j * kLanes >= columns) return;
        const Floats one = _mm512_permutex2var_ps(sums[j], first, sums[j + 1]);
        const Floats other =
            _mm512_permutex2var_ps(sums[j], _mm512_add_epi32(first, _mm512_set1_epi32(8)), sums[j + 1]);
        store16(out + j * kLanes, one * by, head(columns - j * kLanes));
        store16(out + (j + 1) * kLanes, other * by, head(std::max(0, columns - (j + 1) * kLanes)));
    }
}
#endif

inline int whole_columns(int head_dim) { return (head_dim + 4 * kLanes - 1) / (4 * kLanes) * 4 * kLanes; }

struct AttentionScratch {
    std::vector<float> scores, sums, factors, values, keys;
    std::vector<const void*> places;
    std::vector<float> head;  // a key or value, before it is stored
    std::vector<float> value;  // a normed value
    std::vector<int32_t> chosen;  // places of keys
};

}  // namespace chorus
