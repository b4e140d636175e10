// Causal grouped-query attention over the paged KV cache: what decode and prefill share, and decode.
#pragma once
#include <algorithm>
#include <vector>
#include "gemm.h"

namespace chorus {

template <class T>
struct PagedCache {  // one layer: K or V of page p, token o, head h starts at data + p·page_elems + (o·kv_heads + h)·head_dim
    const T* k;
    const T* v;
    int64_t page_elems;
    int block_tokens, kv_heads, head_dim;
};

// scores[0..15] = q · k[j] for sixteen keys, which lie `offset` elements after keys[j].
template <class T>
inline __m512 key_scores(const T* q, const T* const* keys, long offset, int head_dim) {
    using K = Kind<T>;
    __m512 acc[16];
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) acc[j] = _mm512_setzero_ps();
    int c = 0;
    for (; c + K::width <= head_dim; c += K::width) {
        const auto b = K::load(q + c);
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) acc[j] = K::mac(acc[j], K::load(keys[j] + offset + c), b);
    }
    if (c < head_dim) {
        const auto b = K::load(q + c, head_dim - c);
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) acc[j] = K::mac(acc[j], K::load(keys[j] + offset + c, head_dim - c), b);
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

// out[r] += Σ_s p[r][s] · v[s] for ROWS query vectors, 64 columns at a time; v[s] lies `offset` elements after values[s].
template <class T, int ROWS>
inline void weighted_values(const float* p, long ldp, const T* const* values, long offset, int keys, int head_dim, float* out) {
    for (int c = 0; c < head_dim; c += 4 * kLanes) {
        __mmask16 mask[4];
        for (int j = 0; j < 4; j++) mask[j] = head_mask(std::max(0, head_dim - c - j * kLanes));
        const bool whole = head_dim - c >= 4 * kLanes;
        __m512 acc[ROWS][4];
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < 4; j++) acc[r][j] = load16(out + (long)r * head_dim + c + j * kLanes, mask[j]);
        for (int s = 0; s < keys; s++) {
            const T* from = values[s] + offset + c;
            __m512 v[4];
            if (whole)
                for (int j = 0; j < 4; j++) v[j] = load16(from + j * kLanes);
            else
                for (int j = 0; j < 4; j++) v[j] = load16(from + j * kLanes, mask[j]);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                const __m512 weight = _mm512_set1_ps(p[r * ldp + s]);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) acc[r][j] = _mm512_fmadd_ps(weight, v[j], acc[r][j]);
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < 4; j++) store16(out + (long)r * head_dim + c + j * kLanes, acc[r][j], mask[j]);
    }
}

template <class T>
inline void weighted_values(int rows, const float* p, long ldp, const T* const* values, long offset, int keys, int head_dim,
                            float* out) {
    for (int r = 0; r < rows; r += 4, p += 4 * ldp, out += 4 * head_dim) switch (rows - r) {
        case 1: weighted_values<T, 1>(p, ldp, values, offset, keys, head_dim, out); break;
        case 2: weighted_values<T, 2>(p, ldp, values, offset, keys, head_dim, out); break;
        case 3: weighted_values<T, 3>(p, ldp, values, offset, keys, head_dim, out); break;
        default: weighted_values<T, 4>(p, ldp, values, offset, keys, head_dim, out); break;
    }
}

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

template <class T>
inline void scale_to(const float* x, int n, float factor, T* out) {
    for (int i = 0; i < n; i += kLanes) {
        const __mmask16 mask = head_mask(n - i);
        store16(out + i, _mm512_mul_ps(load16(x + i, mask), _mm512_set1_ps(factor)), mask);
    }
}

// One token of one row, for K/V heads first … first+heads-1: its K streams past once, then its V, whole tokens at a time.
struct DecodeUnit { int row, first, heads; };

// Units of about the same size, enough of them that all threads have work.
inline std::vector<DecodeUnit> decode_units(const int32_t* kv_lens, int rows, int kv_heads, int threads) {
    std::vector<DecodeUnit> units;
    long total = 0;
    for (int row = 0; row < rows; row++) total += kv_lens[row];
    for (int row = 0; row < rows; row++) {
        const int parts = (int)std::min<long>(kv_heads, threads == 1 ? 1 : (2L * threads * kv_lens[row] + total - 1) / total);
        for (int i = 0; i < parts; i++) {
            const int first = kv_heads * i / parts;
            units.push_back({row, first, kv_heads * (i + 1) / parts - first});
        }
    }
    return units;
}

// q, out: [heads, head_dim] of the row's token. next_pages: the block table of the `next_len` tokens, from head next_first
// on, that this thread reads afterwards.
template <class T>
inline void attend_decode(const PagedCache<T>& cache, const DecodeUnit& unit, const T* q, T* out, int group, const int64_t* pages,
                          int kv_len, float scale, AttentionScratch& scratch, const int64_t* next_pages, int next_len, int next_first) {
    const int padded = (kv_len + kLanes - 1) / kLanes * kLanes, head_dim = cache.head_dim, queries = unit.heads * group;
    const int token_bytes = unit.heads * head_dim * (int)sizeof(T);
    const int ahead = std::max(1, 2 * (int)kPrefetchBytes / token_bytes), upcoming = std::min(ahead, next_len);
    scratch.scores.resize((size_t)queries * padded);
    scratch.sums.assign((size_t)queries * head_dim, 0.0f);
    scratch.places.resize(2 * kv_len + ahead + kLanes);
    const T** keys = (const T**)scratch.places.data();  // and V after them, then what comes next: the order of reading
    const T** values = keys + kv_len;
    const long offset = (long)unit.first * head_dim;
    locate(cache, cache.k + offset, pages, kv_len, keys);
    locate(cache, cache.v + offset, pages, kv_len, values);
    locate(cache, cache.k + (long)next_first * head_dim, next_pages, upcoming, values + kv_len);
    for (int s = upcoming; s < ahead + kLanes; s++) values[kv_len + s] = values[kv_len - 1];
    // Fetch what is read `ahead` tokens after the `count` from `tokens` on, in `parts` between the work: all at once they
    // would be in its way.
    auto fetch = [&](const T* const* tokens, int count, int part, int parts) {
        for (int s = count * part / parts; s < count * (part + 1) / parts; s++)
            for (int b = 0; b < token_bytes; b += 64) prefetch(tokens[ahead + s], b);
    };
    q += offset * group;
    out += offset * group;
    float *scores = scratch.scores.data(), *sums = scratch.sums.data();
    for (int s = 0; s < kv_len; s += kLanes)
        for (int i = 0; i < queries; i++) {
            fetch(keys + s, std::min(kLanes, kv_len - s), i, queries);
            store16(scores + (long)i * padded + s, key_scores<T>(q + i * head_dim, keys + s, (long)(i / group) * head_dim, head_dim));
        }
    scratch.factors.resize(queries);
    float* factors = scratch.factors.data();
    for (int i = 0; i < queries; i++) factors[i] = softmax(scores + (long)i * padded, kv_len, padded, scale);
    for (int s = 0; s < kv_len; s += kLanes)
        for (int h = 0; h < unit.heads; h++) {
            const int count = std::min(kLanes, kv_len - s);
            fetch(values + s, count, h, unit.heads);
            weighted_values(group, scores + (long)h * group * padded + s, padded, values + s, (long)h * head_dim, count, head_dim,
                            sums + (long)h * group * head_dim);
        }
    for (int i = 0; i < queries; i++) scale_to(sums + (long)i * head_dim, head_dim, factors[i], out + i * head_dim);
}

}  // namespace chorus
