// Causal grouped-query attention over the paged KV cache: what decode and prefill share, and decode.
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

// out[r] += Σ_s p[r][s] · v[s] for ROWS query vectors, 64 columns at a time as `join_values` lays them out; v[s] lies `offset`
// elements after values[s].
template <class T, int ROWS>
inline void weighted_values(const T* p, long ldp, const T* const* values, long offset, int keys, int head_dim,
                            float* out) {
    using K = Kind<T>;
    const int columns = whole_columns(head_dim);
    for (int c = 0; c < head_dim; c += 4 * kLanes) {
        __m512 acc[ROWS][4];
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < 4; j++) acc[r][j] = load16(out + (long)r * columns + c + j * kLanes);
        for (int s = 0; s < keys; s += K::pair) {
            typename K::Reg v[4];
            const T *one = values[s] + offset + c, *other = s + 1 < keys ? values[s + 1] + offset + c : nullptr;
            join_values(one, other, head_dim - c, v);
            join_values(one + 2 * kLanes, other ? other + 2 * kLanes : nullptr, std::max(0, head_dim - c - 2 * kLanes),
                        v + 2);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                const auto weight = K::broadcast(p + r * ldp + s);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) acc[r][j] = K::mac(acc[r][j], v[j], weight);
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < 4; j++) store16(out + (long)r * columns + c + j * kLanes, acc[r][j]);
    }
}

template <class T>
inline void weighted_values(int rows, const T* p, long ldp, const T* const* values, long offset, int keys, int head_dim,
                            float* out) {
    for (const int columns = whole_columns(head_dim); rows > 0; rows -= 4, p += 4 * ldp, out += 4 * columns)
        switch (rows) {
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

// One token of one row, for K/V heads first … first+heads-1: its K streams past once, then its V, whole tokens at a time.
struct DecodeUnit {
    int row, first, heads;
};

// Units of about the same size, enough of them that all threads have work.
inline std::vector<DecodeUnit> decode_units(const int32_t* kv_lens, int rows, int kv_heads, int threads) {
    std::vector<DecodeUnit> units;
    long total = 0;
    for (int row = 0; row < rows; row++) total += kv_lens[row];
    for (int row = 0; row < rows; row++) {
        const int parts =
            (int)std::min<long>(kv_heads, threads == 1 ? 1 : (2L * threads * kv_lens[row] + total - 1) / total);
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
inline void attend_decode(const PagedCache<T>& cache, const DecodeUnit& unit, const T* q, T* out, int group,
                          const int64_t* pages, int kv_len, float scale, AttentionScratch& scratch,
                          const int64_t* next_pages, int next_len, int next_first) {
    const int padded = (kv_len + kLanes - 1) / kLanes * kLanes, head_dim = cache.head_dim, queries = unit.heads * group;
    const int words = head_dim / Kind<T>::pair, columns = whole_columns(head_dim);
    const int token_bytes = unit.heads * head_dim * (int)sizeof(T);
    const int ahead = std::max(1, 2 * (int)kPrefetchBytes / token_bytes), upcoming = std::min(ahead, next_len);
    scratch.scores.resize((size_t)queries * padded);
    scratch.sums.assign((size_t)queries * columns, 0.0f);
    scratch.keys.resize((size_t)words * kLanes);
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
        for (int h = 0; h < unit.heads; h++) {
            const int count = std::min(kLanes, kv_len - s);
            fetch(keys + s, count, 2 * h, 2 * unit.heads);
            transpose_keys(keys + s, (long)h * head_dim, words, scratch.keys.data());
            fetch(keys + s, count, 2 * h + 1, 2 * unit.heads);
            for (int i = h * group; i < (h + 1) * group; i += 4) {
                const T* of[4];
                for (int j = 0; j < 4; j++) of[j] = q + (long)(i + j) * head_dim;
                float* to = scores + (long)i * padded + s;
                switch ((h + 1) * group - i) {
                    case 1: column_scores<T, 1, 1>(of, scratch.keys.data(), words, to, padded); break;
                    case 2: column_scores<T, 2, 1>(of, scratch.keys.data(), words, to, padded); break;
                    case 3: column_scores<T, 3, 1>(of, scratch.keys.data(), words, to, padded); break;
                    default: column_scores<T, 4, 1>(of, scratch.keys.data(), words, to, padded); break;
                }
            }
        }
    scratch.factors.resize(queries);
    float* factors = scratch.factors.data();
    for (int i = 0; i < queries; i++) factors[i] = softmax<T>(scores + (long)i * padded, kv_len, padded, scale);
    const T* weights = (const T*)scores;
    const long ldw = padded * (long)(sizeof(float) / sizeof(T));
    for (int s = 0; s < kv_len; s += kLanes)
        for (int h = 0; h < unit.heads; h++) {
            const int count = std::min(kLanes, kv_len - s);
            fetch(values + s, count, h, unit.heads);
            weighted_values(group, weights + h * group * ldw + s, ldw, values + s, (long)h * head_dim, count, head_dim,
                            sums + (long)h * group * columns);
        }
    for (int i = 0; i < queries; i++)
        for (int c = 0; c < head_dim; c += 2 * kLanes) {
            const float* sum = sums + (long)i * columns + c;
            store_sums(load16(sum), load16(sum + kLanes), factors[i], head_dim - c, out + (long)i * head_dim + c);
        }
}

}  // namespace chorus
