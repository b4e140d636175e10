// Causal grouped-query attention of rows of one token each: its K/V heads stream past once, whole tokens at a time.
#pragma once
#include <type_traits>
#include "attention.h"

namespace chorus {

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

// Query vectors with scores and sums computed together: of two K/V heads where each has few, else of one. A score is
// the sum of two chains of products, and the two of one query alone would leave the multipliers waiting for each other.
constexpr int kQueries = std::min(4, kTileVectors / 2), kHeads = 2;

// run(heads, rows) with numbers that the compiler knows: so many K/V heads, and query vectors of each.
template <class Run>
inline void with_shape(int heads, int rows, Run run) {
    if (heads == 2) with_number<kQueries / 2>(rows, [&](auto rows) { run(std::integral_constant<int, 2>{}, rows); });
    else with_number<kQueries>(rows, [&](auto rows) { run(std::integral_constant<int, 1>{}, rows); });
}

// scores[r] = q[r] · key for sixteen keys, which lie `offset` elements after keys[i], HEADS K/V heads side by side and ROWS
// queries of each: the even-numbered products one after the other, the odd-numbered likewise, then the two sums.
// A product is one of `Kind<X>`: of an element, or of a pair of bf16.
template <class T, int HEADS, int ROWS>
inline void key_scores(const Act<T>* q, int head_dim, const T* const* keys, long offset, float* scores, long lds) {
    using K = Kind<T>;
    using A = Kind<Act<T>>;
    constexpr int queries = HEADS * ROWS;
    const int words = head_dim / K::pair;
    Floats acc[queries][2];
#pragma GCC unroll 4
    for (int r = 0; r < queries; r++) acc[r][0] = acc[r][1] = floats(0);
    auto block = [&](int first, auto whole) {
        const int count = whole() ? 8 : words - first;
        Floats columns[HEADS][8];
#pragma GCC unroll 2
        for (int h = 0; h < HEADS; h++) key_columns(keys, offset + h * head_dim + first * K::pair, count, columns[h]);
#pragma GCC unroll 8
        for (int w = 0; w < 8; w++) {
            if (w >= count) break;
#pragma GCC unroll 2
            for (int s = 0; s < K::steps; s++)
#pragma GCC unroll 4
                for (int r = 0; r < queries; r++) {
                    const auto query = A::broadcast(q + (long)r * head_dim + (first + w) * K::pair + s);
                    Floats& to = acc[r][(w * K::steps + s) % 2];
                    to = A::mac(to, K::step(as_words(columns[r / ROWS][w]), s), query);
                }
        }
    };
    int w = 0;
    for (; w + 8 <= words; w += 8) block(w, std::true_type{});
    if (w < words) block(w, std::false_type{});
#pragma GCC unroll 4
    for (int r = 0; r < queries; r++) store16(scores + r * lds, acc[r][0] + acc[r][1]);
}

// out[r] += Σ_s p[r][s] · v[s] for HEADS K/V heads side by side and ROWS query vectors of each, some columns at a time as
// `join_values` lays them out; v[s] lies `offset` elements after values[s].
template <class T, int HEADS, int ROWS>
inline void weighted_values(const Act<T>* p, long ldp, const T* const* values, long offset, int keys, int head_dim,
                            float* out) {
    using A = Kind<Act<T>>;
    constexpr int queries = HEADS * ROWS;
    constexpr int count = kStreamVectors >= 4 * kQueries ? 4 : 2;  // registers of columns
    constexpr int together = kStreamVectors >= 4 * kQueries ? 4 : 1;  // of them, with their values in registers
    const int columns = whole_columns(head_dim);
    for (int c = 0; c < head_dim; c += count * kLanes) {
        Floats acc[queries][count];
#pragma GCC unroll 4
        for (int r = 0; r < queries; r++)
#pragma GCC unroll 4
            for (int j = 0; j < count; j++) acc[r][j] = load16(out + (long)r * columns + c + j * kLanes);
        auto add = [&](int s, auto whole) {  // whole: both keys of a pair are there, and all columns
#pragma GCC unroll 2
            for (int first = 0; first < count; first += together) {
                typename A::Reg v[HEADS][together];
#pragma GCC unroll 2
                for (int h = 0; h < HEADS; h++) {
                    const long at = offset + h * head_dim + c + first * kLanes;
                    const T *one = values[s] + at,
                            *other = whole() || s + 1 < keys ? values[s + A::pair - 1] + at : nullptr;
                    join_values<together>(one, other, (whole() ? count * kLanes : head_dim - c) - first * kLanes, v[h]);
                }
#pragma GCC unroll 4
                for (int r = 0; r < queries; r++) {
                    const auto weight = A::broadcast(p + r * ldp + s);
#pragma GCC unroll 4
                    for (int j = 0; j < together; j++)
                        acc[r][first + j] = A::mac(acc[r][first + j], v[r / ROWS][j], weight);
                }
            }
        };
        int s = 0;
        if (head_dim - c >= count * kLanes)
            for (; s + A::pair <= keys; s += A::pair) add(s, std::true_type{});
        for (; s < keys; s += A::pair) add(s, std::false_type{});
#pragma GCC unroll 4
        for (int r = 0; r < queries; r++)
#pragma GCC unroll 4
            for (int j = 0; j < count; j++) store16(out + (long)r * columns + c + j * kLanes, acc[r][j]);
    }
}

// q, out: [heads, head_dim] of the row's token. next_pages: the block table of the `next_len` tokens, from head next_first
// on, that this thread reads afterwards.
template <class T>
inline void attend_decode(const PagedCache<T>& cache, const DecodeUnit& unit, const Act<T>* q, Act<T>* out, int group,
                          const int64_t* pages, int kv_len, float scale, AttentionScratch& scratch,
                          const int64_t* next_pages, int next_len, int next_first) {
    const int padded = (kv_len + kLanes - 1) / kLanes * kLanes, head_dim = cache.head_dim, queries = unit.heads * group;
    const int columns = whole_columns(head_dim), together = std::min(kHeads, std::max(1, kQueries / group));
    const int token_bytes = unit.heads * head_dim * (int)sizeof(T);
    const int ahead = std::max(1, 2 * (int)kPrefetchBytes / token_bytes), upcoming = std::min(ahead, next_len);
    scratch.scores.resize((size_t)queries * padded);
    scratch.sums.assign((size_t)queries * columns, 0.0f);
    scratch.places.resize(2 * kv_len + ahead + kLanes);
    const T** keys = (const T**)scratch.places.data();  // and V after them, then what comes next: the order of reading
    const T** values = keys + kv_len;
    const long offset = (long)unit.first * head_dim;
    locate(cache, cache.k + offset, pages, kv_len, keys);
    locate(cache, cache.v + offset, pages, kv_len, values);
    locate(cache, cache.k + (long)next_first * head_dim, next_pages, upcoming, values + kv_len);
    for (int s = upcoming; s < ahead + kLanes; s++) values[kv_len + s] = values[kv_len - 1];
    // run(heads, rows, s, count, h, i): the work of `count` tokens from s on for K/V heads from h on and query vectors from i
    // on. What is read `ahead` tokens later is fetched half before it and half after it: more at once would be in its way.
    auto each = [&](const T* const* tokens, auto run) {
        for (int s = 0; s < kv_len; s += kLanes) {
            const int count = std::min(kLanes, kv_len - s);
            auto fetch = [&](int begin, int end) {  // of twice as many parts as there are heads
                for (int t = count * begin / (2 * unit.heads); t < count * end / (2 * unit.heads); t++)
                    for (int b = 0; b < token_bytes; b += 64) prefetch(tokens[s + ahead + t], b);
            };
            for (int h = 0, heads; h < unit.heads; h += heads) {
                heads = std::min(together, unit.heads - h);
                fetch(2 * h, 2 * h + heads);
                for (int r = 0; r < group; r += kQueries)
                    with_shape(heads, std::min(kQueries, group - r),
                               [&](auto heads, auto rows) { run(heads, rows, s, count, h, h * group + r); });
                fetch(2 * h + heads, 2 * (h + heads));
            }
        }
    };
    q += offset * group;
    out += offset * group;
    float *scores = scratch.scores.data(), *sums = scratch.sums.data();
    each(keys, [&](auto heads, auto rows, int s, int, int h, int i) {
        key_scores<T, heads(), rows()>(q + (long)i * head_dim, head_dim, keys + s, (long)h * head_dim,
                                       scores + (long)i * padded + s, padded);
    });
    scratch.factors.resize(queries);
    float* factors = scratch.factors.data();
    for (int i = 0; i < queries; i++) factors[i] = softmax<Act<T>>(scores + (long)i * padded, kv_len, padded, scale);
    const auto* weights = (const Act<T>*)scores;
    const long ldw = padded * (long)(sizeof(float) / sizeof(Act<T>));
    each(values, [&](auto heads, auto rows, int s, int count, int h, int i) {
        weighted_values<T, heads(), rows()>(weights + (long)i * ldw + s, ldw, values + s, (long)h * head_dim, count,
                                            head_dim, sums + (long)i * columns);
    });
    for (int i = 0; i < queries; i++)
        for (int c = 0; c < head_dim; c += 2 * kLanes) {
            const float* from = sums + (long)i * columns + c;
            const Floats both[2] = {load16(from), load16(from + kLanes)};
            store_sums<2>(both, factors[i], head_dim - c, out + (long)i * head_dim + c);
        }
}

}  // namespace chorus
