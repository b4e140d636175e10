// Causal grouped-query attention of rows of one token each: its K/V heads stream past once, whole tokens at a time.
#pragma once
#include <type_traits>
#include "attention/attention.h"

namespace chorus {

// One token of one row, for K/V heads first … first+heads-1: its K streams past once, then its V, whole tokens at a time.
struct DecodeUnit {
    int row, first, heads;
};

// Make units of about the same size, enough of them that all threads have work.
//
//   kv_lens   [rows]: tokens of each
//   kv_heads  of the model
//   threads   that share the units
//   units     written
inline void decode_units(const int32_t* kv_lens, int rows, int kv_heads, int threads, std::vector<DecodeUnit>& units) {
    units.clear();
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

// scores[r] = q[r] · key for sixteen keys, HEADS K/V heads side by side and ROWS queries of each: the even-numbered products
// one after the other, the odd-numbered likewise, then the two sums. A product is one of `Kind<X>`: of an element, or of a
// pair of bf16.
//
//   q       [HEADS · ROWS, head_dim], one right after the other
//   keys    [16], addresses
//   offset  elements from there to the first K/V head
//   scores  [HEADS · ROWS, 16]
template <class T, int HEADS, int ROWS>
inline void key_scores(Rows<const Act<T>> q, const T* const* keys, long offset, Rows<float> scores) {
    using K = Kind<T>;
    using A = Kind<Act<T>>;
    constexpr int queries = HEADS * ROWS;
    const int head_dim = (int)q.stride, words = head_dim / K::pair;
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
                    const auto query = A::broadcast(q[r] + (first + w) * K::pair + s);
                    Floats& to = acc[r][(w * K::steps + s) % 2];
                    to = A::mac(to, K::step(as_words(columns[r / ROWS][w]), s), query);
                }
        }
    };
    int w = 0;
    for (; w + 8 <= words; w += 8) block(w, std::true_type{});
    if (w < words) block(w, std::false_type{});
#pragma GCC unroll 4
    for (int r = 0; r < queries; r++) store16(scores[r], acc[r][0] + acc[r][1]);
}

// out[r] += Σ_s p[r][s] · v[s] for HEADS K/V heads side by side and ROWS query vectors of each.
//
//   p         [HEADS · ROWS, keys]: weights
//   values    [keys], addresses
//   offset    elements from there to the first K/V head
//   keys      tokens
//   head_dim  elements of a head
//   out       [HEADS · ROWS, whole_columns(head_dim)], some columns at a time as `join_values` lays them out
template <class T, int HEADS, int ROWS>
inline void weighted_values(Rows<const Act<T>> p, const T* const* values, long offset, int keys, int head_dim,
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
                    const auto weight = A::broadcast(p[r] + s);
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

// K that a thread reads next: of a row's tokens, from a K/V head on. Of length 0: none.
struct NextRead {
    KvRow row;
    int kv_head;
};

// out = softmax(q · Kᵀ · scale) · V of a unit, over the keys that it sees. The first of them may be any of a vector's sixteen: the
// others of the vector have no weight, and stand for it in memory, as what they hold may be NaN.
//
//   cache    the layer
//   unit     row and K/V heads
//   q, out   [heads, head_dim] of the row's token
//   row      its tokens
//   scratch  memory of the thread
//   next     what this thread reads afterwards
//   list     the keys that it sees; then the unit is of one K/V head
template <class T>
inline void attend_decode(const PagedCache<T>& cache, const DecodeUnit& unit, const Act<T>* q, Act<T>* out, KvRow row,
                          AttentionScratch& scratch, const NextRead& next, const KeyList& list = {}) {
    const int seen = list.count ? 0 : cache.first(row.length), begin = seen / kLanes * kLanes, first = seen - begin;
    const int kv_len = list.count ? list.count : row.length - begin, group = cache.group;
    const int next_begin = cache.first(next.row.length) / kLanes * kLanes;
    const int padded = (kv_len + kLanes - 1) / kLanes * kLanes, head_dim = cache.head_dim, queries = unit.heads * group;
    const int columns = whole_columns(head_dim);
    const int together = cache.head_stride == head_dim ? std::min(kHeads, std::max(1, kQueries / group)) : 1;
    const int token_bytes = unit.heads * head_dim * (int)sizeof(T);
    const int ahead = std::max(1, 2 * (int)kPrefetchBytes / token_bytes),
              upcoming = std::min(ahead, next.row.length - next_begin);
    scratch.scores.resize((size_t)queries * padded);
    scratch.sums.assign((size_t)queries * columns, 0.0f);
    scratch.places.resize(2 * kv_len + ahead + kLanes);
    const T** keys = (const T**)scratch.places.data();  // and V after them, then what comes next: the order of reading
    const T** values = keys + kv_len;
    const long offset = (long)unit.first * cache.head_stride;
    const KeyList own = list.count ? list : KeyList{nullptr, begin, kv_len};
    cache.locate(cache.k + offset, row.pages, own, 0, kv_len, keys);
    cache.locate(cache.v + offset, row.pages, own, 0, kv_len, values);
    cache.locate(cache.k + (long)next.kv_head * cache.head_stride, next.row.pages, next_begin, upcoming,
                 values + kv_len);
    std::fill_n(keys, first, keys[first]);
    std::fill_n(values, first, values[first]);
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
    const long query = (long)unit.first * group * head_dim;
    const Rows<const Act<T>> queries_of{q + query, head_dim};
    const Rows<Act<T>> outs{out + query, head_dim};
    const Rows<float> scores{scratch.scores.data(), padded}, sums{scratch.sums.data(), columns};
    each(keys, [&](auto heads, auto rows, int s, int, int h, int i) {
        key_scores<T, heads(), rows()>(queries_of.from(i), keys + s, (long)h * cache.head_stride, scores.from(i, s));
    });
    scratch.factors.resize(queries);
    float* factors = scratch.factors.data();
    for (int i = 0; i < queries; i++)
        factors[i] = weights_of<Act<T>>(cache, scores[i], first, kv_len, padded, unit.first * group + i);
    const Rows<const Act<T>> weights{(const Act<T>*)scores.data, padded * (long)(sizeof(float) / sizeof(Act<T>))};
    each(values, [&](auto heads, auto rows, int s, int count, int h, int i) {
        weighted_values<T, heads(), rows()>(weights.from(i, s), values + s, (long)h * cache.head_stride, count,
                                            head_dim, sums[i]);
    });
    for (int i = 0; i < queries; i++)
        for (int c = 0; c < head_dim; c += 2 * kLanes) {
            const float* from = sums[i] + c;
            const Floats both[2] = {load16(from), load16(from + kLanes)};
            store_sums<2>(both, factors[i], head_dim - c, outs[i] + c);
        }
}

}  // namespace chorus
