// Causal grouped-query attention of many tokens of a row: queries share what is read of the paged KV cache.
//
// Every score and every output is computed in the order in which `attend_decode` computes it, so that a token's bits are the
// same whichever of the two it meets: scores word by word in two chains; values one key, or one pair of keys in bf16, after the
// other.
#pragma once
#include "attention/attention.h"
#include "team/buffer.h"

namespace chorus {

constexpr int kQueryBlock = 48;  // query vectors (token, head) of a unit
constexpr int kQueryTile = 6;  // that share a pass over the values

// What a token sees of its block: tokens of a prompt that see each other, also those behind them, as an image's do.
enum BlockMask : int32_t { kCausal, kInWindow, kWholeBlock };

// The blocks of a step's tokens, in a layer.
//
//   before, behind  [tokens]: tokens of its block before and behind each; null: there are no blocks
//   mask            kInWindow: a token sees all of its block behind it, and what the window has before it; kWholeBlock: all of it
struct BlockSight {
    const int32_t *before, *behind;
    BlockMask mask;

    bool any() const { return behind && mask != kCausal; }
    // Keys from the row's first one on that a token sees, of `own` up to its own.
    int visible(int token, int own) const { return any() ? own + behind[token] : own; }
    // The first key that it sees; first: without blocks.
    int first(int token, int own, int first) const {
        return any() && mask == kWholeBlock ? std::min(first, own - 1 - before[token]) : first;
    }
};

// Some tokens of a row, for the query heads that share a K/V head.
struct AttentionUnit {
    int row, kv_head, token, tokens;
};

// Make units of about kQueryBlock query vectors.
//
//   qo_indptr        [rows + 1]: where each row's tokens begin
//   heads, kv_heads  of the model
//   units            written
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

// Sixteen keys as columns: word w of each, sixteen side by side; elements that are widened become a word each.
//
//   keys    [16], addresses
//   offset  elements from there to the first word
//   words   of a key
//   out     [words · steps, 16]
template <class T>
inline void transpose_keys(const T* const* keys, long offset, int words, float* out) {
    using K = Kind<T>;
    for (int first = 0; first < words; first += 8) {
        const int count = std::min(8, words - first);
        Floats columns[8];
        key_columns(keys, offset + first * K::pair, count, columns);
        for (int w = 0; w < count; w++)
            for (int s = 0; s < K::steps; s++, out += kLanes) {
                const auto word = K::step(as_words(columns[w]), s);
                memcpy(out, &word, sizeof word);
            }
    }
}

// scores[r] = q[r] · key for ROWS queries and 16·BLOCKS keys: the even-numbered words one after the other, the odd-numbered
// likewise, then the two sums.
//
//   q       [ROWS], addresses
//   keys    [BLOCKS, words, 16], as `transpose_keys` lays them out
//   words   of a key
//   scores  [ROWS, 16·BLOCKS]
template <class X, int ROWS, int BLOCKS>
inline void column_scores(const X* const* q, const float* keys, int words, Rows<float> scores) {
    using K = Kind<X>;
    Floats acc[2][ROWS][BLOCKS];
#pragma GCC unroll 24
    for (int i = 0; i < 2 * ROWS * BLOCKS; i++) acc[i / (ROWS * BLOCKS)][i / BLOCKS % ROWS][i % BLOCKS] = floats(0);
    auto word = [&](int w, Floats(*to)[BLOCKS]) {
        typename K::Reg key[BLOCKS];
#pragma GCC unroll 2
        for (int b = 0; b < BLOCKS; b++) key[b] = K::load((const X*)(keys + (long)(b * words + w) * kLanes));
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
        for (int b = 0; b < BLOCKS; b++) store16(scores[r] + b * kLanes, acc[0][r][b] + acc[1][r][b]);
}

// Query vectors that share a pass over the values.
template <class X>
struct QueryTile {
    const X* q[kQueryTile];  // [head_dim] of each
    X* out[kQueryTile];  // the same
    int head[kQueryTile];  // of each
    int first[kQueryTile], visible[kQueryTile];  // keys that each sees: first … visible-1; of the last the highest
};

// out[r] = factor[r] · Σ_s p[r][s] · v[s] over the keys that each of ROWS queries sees. Other keys stay out of its sum: what they
// hold may be NaN, which a weight of 0 does not undo.
//
//   tile      the queries
//   p         [ROWS, keys]: weights
//   v         [keys / pair, whole_columns(head_dim), pair], as `join_values` lays them out
//   factor    [ROWS]
//   head_dim  elements of a head
template <class X, int ROWS>
inline void weigh(const QueryTile<X>& tile, Rows<const X> p, const X* v, const float* factor, int head_dim) {
    using K = Kind<X>;
    const int columns = whole_columns(head_dim);
    const int *first = tile.first, *visible = tile.visible;
    const int begin = first[0] / K::pair * K::pair;
    constexpr int count = kTileVectors / kQueryTile;  // registers of columns
    for (int c = 0; c < head_dim; c += count * kLanes) {
        Floats acc[ROWS][count];
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < count; j++) acc[r][j] = floats(0);
        int s = begin;
        const X* from = v + (long)c * K::pair + (long)(begin / K::pair) * columns * K::pair;
        auto load = [&](int j) { return K::load(from + j * K::width); };
        auto add_some = [&] {  // of the word's keys, those that a query sees
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                if (visible[r] <= s || first[r] >= s + K::pair) continue;
                const auto weight = K::broadcast(p[r] + s);
                for (int j = 0; j < count; j++) {
                    auto values = load(j);
                    if (visible[r] == s + 1) values = K::first(values);
                    if (first[r] == s + 1) values = K::last(values);
                    acc[r][j] = K::mac(acc[r][j], values, weight);
                }
            }
        };
        for (; s < first[ROWS - 1]; s += K::pair, from += (long)columns * K::pair) add_some();
        for (; s + K::pair <= visible[0]; s += K::pair, from += (long)columns * K::pair) {
            typename K::Reg values[count];
#pragma GCC unroll 4
            for (int j = 0; j < count; j++) values[j] = load(j);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                const auto weight = K::broadcast(p[r] + s);
#pragma GCC unroll 4
                for (int j = 0; j < count; j++) acc[r][j] = K::mac(acc[r][j], values[j], weight);
            }
        }
        for (; s < visible[ROWS - 1]; s += K::pair, from += (long)columns * K::pair) add_some();
        for (int r = 0; r < ROWS; r++) store_sums<count>(acc[r], factor[r], head_dim - c, tile.out[r] + c);
    }
}

// out = softmax(q · Kᵀ · scale) · V for ROWS queries.
//
//   cache    the layer
//   tile     the queries
//   padded   keys for which scratch has room, a multiple of 32
//   scratch  memory of the thread, with the keys and values
template <class T, int ROWS>
inline void attend_tile(const PagedCache<T>& cache, const QueryTile<Act<T>>& tile, int padded,
                        AttentionScratch& scratch) {
    using X = Act<T>;
    const int head_dim = cache.head_dim;
    constexpr int blocks = kTileVectors >= 24 ? 2 : 1, rows = std::min(ROWS, kTileVectors / (2 * blocks));
    const int most = tile.visible[ROWS - 1], words = head_dim / Kind<X>::pair;
    const Rows<float> scores{scratch.scores.data(), padded};
    for (int s = tile.first[0] / (blocks * kLanes) * blocks * kLanes; s < most; s += blocks * kLanes) {
        const float* keys = scratch.keys.data() + (long)s * words;
        int r = 0;
        for (; r + rows <= ROWS; r += rows) column_scores<X, rows, blocks>(tile.q + r, keys, words, scores.from(r, s));
        if constexpr (ROWS % rows) column_scores<X, ROWS % rows, blocks>(tile.q + r, keys, words, scores.from(r, s));
    }
    float factor[ROWS];
    for (int r = 0; r < ROWS; r++)
        factor[r] = weights_of<X>(cache, scores[r], tile.first[r], tile.visible[r],
                                  (most + kLanes - 1) / kLanes * kLanes, tile.head[r]);
    const Rows<const X> weights{(const X*)scores.data, padded * (long)(sizeof(float) / sizeof(X))};
    weigh<X, ROWS>(tile, weights, (const X*)scratch.values.data(), factor, head_dim);
}

// out = softmax(q · Kᵀ · scale) · V of a unit.
//
//   cache    the layer
//   unit     tokens of a row, and a K/V head
//   q, out   [tokens of the step, heads · head_dim]
//   row      its tokens, the unit's included
//   row_end  the step's token behind the row's last
//   blocks   of the step's tokens; of two tokens the later one sees no key before the first that the other sees, and its last
//            one is no earlier
//   scratch  memory of the thread
template <class T>
inline void attend(const PagedCache<T>& cache, const AttentionUnit& unit, Rows<const Act<T>> q, Rows<Act<T>> out,
                   KvRow row, int row_end, const BlockSight& blocks, AttentionScratch& scratch) {
    auto own = [&](int token) { return row.length - (row_end - 1 - token); };  // keys up to the token's own
    auto visible = [&](int token) { return blocks.visible(token, own(token)); };
    auto first_of = [&](int token) { return blocks.first(token, own(token), cache.first(own(token))); };
    const int begin = first_of(unit.token) / (2 * kLanes) * 2 * kLanes;
    const int seen = visible(unit.token + unit.tokens - 1) - begin;  // from there on, by the unit's last token
    const int padded = (seen + 2 * kLanes - 1) / (2 * kLanes) * 2 * kLanes, head_dim = cache.head_dim;
    using A = Kind<Act<T>>;
    constexpr int pair = A::pair;
    const int columns = whole_columns(head_dim), pairs = (seen + pair - 1) / pair, group = cache.group;
    grow(scratch.scores, (size_t)kQueryTile * padded);
    grow(scratch.values, (size_t)pairs * columns);  // a pair of bf16 is as large as a float32
    grow(scratch.places, padded);
    grow(scratch.keys, (size_t)padded * (head_dim / pair));
    const T** places = (const T**)scratch.places.data();
    const long offset = (long)unit.kv_head * cache.head_stride;
    cache.locate(cache.k, row.pages, begin, seen, places);
    for (int s = seen; s < padded; s++) places[s] = places[seen - 1];
    for (int s = 0; s < padded; s += kLanes)
        transpose_keys(places + s, offset, head_dim / Kind<T>::pair, scratch.keys.data() + (long)s * (head_dim / pair));
    cache.locate(cache.v, row.pages, begin, seen, places);
    for (int s = 0; s < pairs; s++) {
        const T *one = places[s * pair] + offset,
                *other = (s + 1) * pair <= seen ? places[(s + 1) * pair - 1] + offset : nullptr;
        float* to = scratch.values.data() + (long)s * columns;
        for (int c = 0; c < columns; c += 2 * kLanes) {
            typename A::Reg joined[2];
            join_values<2>(one + c, other ? other + c : nullptr, head_dim - c, joined);
            memcpy(to + c, joined, sizeof joined);
        }
    }
    for (int first = 0, total = unit.tokens * group; first < total; first += kQueryTile) {
        const int count = std::min(kQueryTile, total - first);
        QueryTile<Act<T>> tile{};
        for (int i = 0; i < count; i++) {
            const int token = unit.token + (first + i) / group;
            tile.head[i] = unit.kv_head * group + (first + i) % group;
            const long at = (long)tile.head[i] * head_dim;
            tile.q[i] = q[token] + at, tile.out[i] = out[token] + at;
            tile.visible[i] = visible(token) - begin;
            tile.first[i] = first_of(token) - begin;
        }
        with_number<kQueryTile>(count, [&](auto n) { attend_tile<T, n()>(cache, tile, padded, scratch); });
    }
}

}  // namespace chorus
