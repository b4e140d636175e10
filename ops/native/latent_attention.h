// Causal attention over pages of latents (MLA, DeepSeek-V2, arXiv 2405.04434 §2.1): all query heads share one key, and its
// first elements are its value.
//
// Many queries read the same latents, so a step computes here rather than streams: latents are laid out some at a time, and
// the queries of a unit, which are of several heads and tokens, pass over them. Prompts and single tokens go the same way,
// and every score and output is computed in one order: a token's bits depend neither on chunks nor on the batch.
#pragma once
#include "prefill_attention.h"

namespace chorus {

constexpr int kLatentKeys = 64;  // that are laid out at once: a multiple of 2 · kLanes

// Latent attention of a layer. Mirrors LatentDescriptor of ops/native_descriptors.py.
struct LatentDesc {
    int32_t heads;  // 0: the layer has no latents
    int32_t q_rank;  // of the queries' latents; 0: there are none
    int32_t kv_rank;  // of the latents that pages keep
    int32_t key, rotated, value;  // elements of a head's key that are not rotated, and that are; of its value
    int32_t rotary_dim, interleaved;  // see LayerDesc, as of the three below
    int32_t page_group;
    int32_t module;  // kv_b_proj's id
    float eps, scale;  // of the norms of latents; of scores
    const float *q_norm, *k_norm;  // [q_rank], [kv_rank]; null: there is none
    const float *cos, *sin;  // [positions, rotary_dim]
    const float* query_factors;  // [positions]; null: queries have none
    int64_t plane;  // elements from a page's beginning to the layer's latents
    const void*
        kv_up;  // each head's keys as panels of kv_rank outputs, then each head's values as panels of kv_rank inputs
    const float* bias;  // [heads · (key + value)]: of kv_b_proj's outputs; null: there is none

    int dim() const { return kv_rank + rotated; }  // elements of what is kept of a token
    int query() const { return key + rotated; }  // of a head's query
    int width() const { return key + value; }  // kv_b_proj's outputs of a head
    int out_size() const { return heads * value; }
    // Columns of the layer's input product before those of the latent.
    int queries_in() const { return q_rank ? q_rank : heads * query(); }
};

// Some heads of some tokens of a row.
struct LatentUnit {
    int row, token, tokens, head, heads;
};

// Make units of about kQueryBlock query vectors, and so many that all threads have work: one each where a single row has all
// of it, as every unit lays the row's latents out anew.
//
//   qo_indptr   [rows + 1]: where each row's tokens begin
//   kv_lens     [rows]
//   begin, end  tokens of the step, without the last
//   heads       of queries
//   threads     that share the units
//   units       written
inline void latent_units(const int32_t* qo_indptr, const int32_t* kv_lens, int rows, int begin, int end, int heads,
                         int threads, std::vector<LatentUnit>& units) {
    units.clear();
    const auto first_of = [&](int row) { return std::max(begin, qo_indptr[row]); };
    const auto work_of = [&](int row) {
        return (int64_t)kv_lens[row] * std::max(0, std::min(end, qo_indptr[row + 1]) - first_of(row));
    };
    int64_t total = 0;
    for (int row = 0; row < rows; row++) total += work_of(row);
    const int block = std::max(1, kQueryBlock / heads), least = (heads + kQueryBlock - 1) / kQueryBlock;
    for (int row = 0; row < rows; row++) {
        const int64_t work = work_of(row);
        if (!work) continue;
        const int first = first_of(row), last = std::min(end, qo_indptr[row + 1]);
        const int of_tokens = (last - first + block - 1) / block;
        const int64_t share = threads == 1 ? 0 : (work == total ? 1 : 2) * threads * work;
        const int parts = std::min(heads, std::max(least, (int)((share + total - 1) / total / of_tokens)));
        for (int t = first; t < last; t += block)
            for (int p = 0; p < parts; p++) {
                const int head = heads * p / parts;
                units.push_back({row, t, std::min(block, last - t), head, heads * (p + 1) / parts - head});
            }
    }
}

// sums[r] += Σ_s p[r][s] · v[s] over the keys of a block that each of ROWS queries sees. Other keys stay out of its sum: what
// they hold may be NaN.
//
//   p        [ROWS, keys]: weights
//   v        [keys / pair, whole_columns(columns), pair], as `join_values` lays them out
//   visible  [ROWS] keys that each sees; of the last the most
//   columns  elements of a value
//   sums     [ROWS, whole_columns(columns)], in the order of `join_values`
template <class X, int ROWS>
inline void add_values(Rows<const X> p, const X* v, const int* visible, int columns, Rows<float> sums) {
    using K = Kind<X>;
    constexpr int count = kTileVectors / kQueryTile;  // registers of columns
    const long step = (long)whole_columns(columns) * K::pair;
    for (int c = 0; c < columns; c += count * kLanes) {
        Floats acc[ROWS][count];
#pragma GCC unroll 24
        for (int i = 0; i < ROWS * count; i++)
            acc[i / count][i % count] = load16(sums[i / count] + c + i % count * kLanes);
        const X* from = v + (long)c * K::pair;
        int s = 0;
        for (; s + K::pair <= visible[0]; s += K::pair, from += step) {
            typename K::Reg values[count];
#pragma GCC unroll 4
            for (int j = 0; j < count; j++) values[j] = K::load(from + j * K::width);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                const auto weight = K::broadcast(p[r] + s);
#pragma GCC unroll 4
                for (int j = 0; j < count; j++) acc[r][j] = K::mac(acc[r][j], values[j], weight);
            }
        }
        for (; s < visible[ROWS - 1]; s += K::pair, from += step)
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                if (visible[r] <= s) continue;
                const auto weight = K::broadcast(p[r] + s);
#pragma GCC unroll 4
                for (int j = 0; j < count; j++) {
                    auto values = K::load(from + j * K::width);
                    if (visible[r] == s + 1) values = K::first(values);
                    acc[r][j] = K::mac(acc[r][j], values, weight);
                }
            }
#pragma GCC unroll 24
        for (int i = 0; i < ROWS * count; i++)
            store16(sums[i / count] + c + i % count * kLanes, acc[i / count][i % count]);
    }
}

// scores[r] = q[r] · key of ROWS queries and `keys` keys of a block, a multiple of 2 · kLanes; other parameters as of
// `column_scores`.
template <class X, int ROWS>
inline void block_scores(const X* const* q, const float* columns, int words, int keys, Rows<float> scores) {
    constexpr int blocks = kTileVectors >= 24 ? 2 : 1, rows = std::min(ROWS, kTileVectors / (2 * blocks));
    for (int s = 0; s < keys; s += blocks * kLanes) {
        const float* own = columns + (long)s * words;
        int r = 0;
        for (; r + rows <= ROWS; r += rows) column_scores<X, rows, blocks>(q + r, own, words, scores.from(r, s));
        if constexpr (ROWS % rows) column_scores<X, ROWS % rows, blocks>(q + r, own, words, scores.from(r, s));
    }
}

// out = softmax(q · Kᵀ · scale) · V of a unit.
//
//   cache    the layer: its key is a latent and a rotated key
//   columns  leading elements of a key that are its value
//   unit     tokens of a row, and query heads
//   q        [tokens of the step, heads · head_dim]
//   out      [tokens of the step, heads · columns]
//   row      its tokens, the unit's included
//   row_end  the step's token behind the row's last
//   scratch  memory of the thread
template <class T>
inline void attend_latents(const PagedCache<T>& cache, int columns, const LatentUnit& unit, Rows<const Act<T>> q,
                           Rows<Act<T>> out, KvRow row, int row_end, AttentionScratch& scratch) {
    using X = Act<T>;
    constexpr int pair = Kind<X>::pair, twice = 2 * kLanes;
    const int queries = unit.tokens * unit.heads, head_dim = cache.head_dim, words = head_dim / pair;
    const auto token_of = [&](int i) { return unit.token + i / unit.heads; };
    const auto head_of = [&](int i) { return unit.head + i % unit.heads; };
    const auto visible = [&](int i) { return row.length - (row_end - 1 - token_of(i)); };  // keys up to its own
    const auto whole = [](int count) { return (count + twice - 1) / twice * twice; };
    const int seen = visible(queries - 1), padded = whole(seen), wide = whole_columns(columns);
    grow(scratch.scores, (size_t)queries * padded);
    grow(scratch.keys, (size_t)kLatentKeys * words);
    grow(scratch.values, (size_t)kLatentKeys / pair * wide);  // a pair of bf16 is as large as a float32
    grow(scratch.places, kLatentKeys);
    grow(scratch.factors, queries);
    scratch.sums.assign((size_t)queries * wide, 0.0f);
    const T** places = (const T**)scratch.places.data();
    const Rows<float> scores{scratch.scores.data(), padded}, sums{scratch.sums.data(), wide};
    // run(rows, i, block's keys that the last of queries i … sees)
    const auto each_tile = [&](int begin, auto run) {
        for (int i = 0; i < queries; i += kQueryTile) {
            const int count = std::min(kQueryTile, queries - i), most = visible(i + count - 1) - begin;
            if (most > 0) with_number<kQueryTile>(count, [&](auto rows) { run(rows, i, std::min(most, kLatentKeys)); });
        }
    };
    for (int begin = 0; begin < seen; begin += kLatentKeys) {
        const int count = std::min(kLatentKeys, seen - begin), room = whole(count);
        cache.locate(cache.k, row.pages, begin, count, places);
        for (int s = count; s < room; s++) places[s] = places[count - 1];
        for (int s = 0; s < room; s += kLanes)
            transpose_keys(places + s, 0, head_dim / Kind<T>::pair, scratch.keys.data() + (long)s * words);
        each_tile(begin, [&](auto rows, int i, int most) {
            const X* of[kQueryTile];
            for (int r = 0; r < rows(); r++) of[r] = q[token_of(i + r)] + (long)head_of(i + r) * head_dim;
            block_scores<X, rows()>(of, scratch.keys.data(), words, whole(most), scores.from(i, begin));
        });
    }
    for (int i = 0; i < queries; i++) {
        const int own = visible(i);
        scratch.factors[i] = weights_of<X>(cache, scores[i], 0, own, (own + kLanes - 1) / kLanes * kLanes, head_of(i));
    }
    const Rows<const X> weights{(const X*)scores.data, padded * (long)(sizeof(float) / sizeof(X))};
    for (int begin = 0; begin < seen; begin += kLatentKeys) {
        const int count = std::min(kLatentKeys, seen - begin);
        cache.locate(cache.v, row.pages, begin, count, places);
        for (int s = 0; s < count; s += pair) {
            const T *one = places[s], *other = s + pair <= count ? places[s + pair - 1] : nullptr;
            float* to = scratch.values.data() + (long)(s / pair) * wide;
            for (int c = 0; c < wide; c += twice) {
                typename Kind<X>::Reg joined[2];
                join_values<2>(one + c, other ? other + c : nullptr, columns - c, joined);
                memcpy(to + c, joined, sizeof joined);
            }
        }
        each_tile(begin, [&](auto rows, int i, int) {
            int own[kQueryTile];
            for (int r = 0; r < rows(); r++) own[r] = std::clamp(visible(i + r) - begin, 0, count);
            add_values<X, rows()>(weights.from(i, begin), (const X*)scratch.values.data(), own, columns, sums.from(i));
        });
    }
    for (int i = 0; i < queries; i++) {
        X* to = out[token_of(i)] + (long)head_of(i) * columns;
        for (int c = 0; c < columns; c += twice) {
            const float* from = sums[i] + c;
            const Floats both[2] = {load16(from), load16(from + kLanes)};
            store_sums<2>(both, scratch.factors[i], columns - c, to + c);
        }
    }
}

}  // namespace chorus
