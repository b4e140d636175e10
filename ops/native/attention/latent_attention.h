// Causal attention over pages of latents (MLA, DeepSeek-V2, arXiv 2405.04434 §2.1): all query heads share one key, and its
// first elements are its value.
//
// Many queries read the same latents, so a step computes here rather than streams: latents are laid out as panels some at a
// time, and the queries of a unit, which are of several heads and tokens, are multiplied with them. Prompts and single tokens
// go the same way, and a query takes its keys in the same parts whatever else is computed: a token's bits depend neither on
// chunks nor on the batch.
#pragma once
#include "attention/attention.h"
#include "lora/sgmv.h"
#include "gemm/tiles.h"

namespace chorus {

constexpr int kLatentKeys = 64;  // that are laid out at once: whole panels
constexpr int kLatentQueries = 64;  // query vectors (token, head) of a unit

// Latent attention of a layer.
struct LatentDesc {
    int32_t heads;
    int32_t kv_rank;  // of the latents that pages keep
    int32_t key, rotated, value;  // elements of a head's key that are not rotated, and that are; of its value
    int32_t rotary_dim, interleaved;  // see AttendOp, as of the three below
    int32_t page_group;
    int32_t module;  // kv_b_proj's id
    float eps, scale;  // of the norm of latents; of scores
    const float* k_norm;  // [kv_rank]; null: there is none
    const float *cos, *sin;  // [positions, rotary_dim]
    const float* query_factors;  // [positions]; null: queries have none
    int64_t plane;  // elements from a page's beginning to the layer's latents
    int32_t behind;  // elements that pages keep of a token behind its latent: an indexer's
    int32_t top_k;  // the most tokens that a query attends to; 0: all that it sees
    int32_t window;  // see AttendOp
    const float* sinks;  // likewise
    const void*
        kv_up;  // each head's keys as panels of kv_rank outputs, then each head's values as panels of kv_rank inputs
    const float* bias;  // [heads · (key + value)]: of kv_b_proj's outputs; null: there is none

    int dim() const { return kv_rank + rotated; }  // elements of a token's latent and key
    int query() const { return key + rotated; }  // of a head's query
    int width() const { return key + value; }  // kv_b_proj's outputs of a head
    int out_size() const { return heads * value; }
};

// Some heads of some tokens of a row.
struct LatentUnit {
    int row, token, tokens, head, heads;
};

// Make units of about kLatentQueries query vectors, and so many that all threads have work: one each where a single row has all
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
    const int block = std::max(1, kLatentQueries / heads), least = (heads + kLatentQueries - 1) / kLatentQueries;
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

// Memory of a thread for `attend_latents`.
template <class X>
struct LatentScratch {
    Buffer<X> keys, values;  // of a block
    Buffer<float> scores, sums;
    std::vector<float> factors;
    std::vector<const void*> places;
};

// y (+)= x · wᵀ of one panel: in bf16 by tiles where the level has them.
template <class X>
inline void multiply_panel(Rows<const X> x, int rows, Panel<X> w, const Outputs& out) {
#ifdef CHORUS_AMX
    if constexpr (std::is_same_v<X, bf16>) return tiles_gemm<AmxTiles>(x, rows, w, out, 0);
#endif
    panel_gemm<X>(x, rows, w, out);
}

// Lay keys out as a panel, one in each column.
//
//   keys   [kPanel], addresses
//   words  of a key in memory
//   panel  [words · steps, kPanel], a word each: written
template <class T>
inline void pack_keys(const T* const* keys, int words, float* panel) {
    using K = Kind<T>;
    for (int half = 0; half < 2; half++)
        for (int first = 0; first < words; first += 8) {
            const int count = std::min(8, words - first);
            Floats columns[8];
            key_columns(keys + half * kLanes, first * K::pair, count, columns);
            for (int w = 0; w < count; w++)
                for (int s = 0; s < K::steps; s++) {
                    const auto word = K::step(as_words(columns[w]), s);
                    memcpy(panel + ((first + w) * K::steps + s) * kPanel + half * kLanes, &word, sizeof word);
                }
        }
}

// sums += p · values, of rows that see the first `keys` keys of a block. What lies behind them may be NaN.
//
//   p       [rows, keys]: weights
//   values  a panel of the block's values, one in each row of it
//   sums    [rows, columns]
template <class X>
inline void add_values(Rows<const X> p, int rows, const X* values, int keys, const Outputs& sums) {
    constexpr int pair = Kind<X>::pair;
    const int whole = keys / pair * pair;
    if (whole) multiply_panel<X>(p, rows, {values, whole}, sums);
    if (whole == keys) return;
    X last[pair * kPanel];
    for (int i = 0; i < pair * kPanel; i++) last[i] = i % pair ? X(0) : values[(long)whole * kPanel + i];
    multiply_panel<X>(p.from(0, whole), rows, {last, pair}, sums);
}

// out = softmax(q · Kᵀ · scale) · V of a unit.
//
//   cache    the layer: its key is a latent and a rotated key
//   columns  leading elements of a key that are its value
//   unit     tokens of a row, and query heads
//   q, out   [tokens of the step · heads, head_dim] and [tokens of the step · heads, columns]
//   row      its tokens, the unit's included
//   row_end  the step's token behind the row's last
//   own      memory of the thread
//   list     the keys that they attend to; then the unit is of one token
template <class T>
inline void attend_latents(const PagedCache<T>& cache, int columns, const LatentUnit& unit, Rows<const Act<T>> q,
                           Rows<Act<T>> out, KvRow row, int row_end, LatentScratch<Act<T>>& own,
                           const KeyList& list = {}) {
    using X = Act<T>;
    const int heads = cache.group, head_dim = cache.head_dim, queries = unit.tokens * unit.heads;
    const auto visible = [&](int t) {  // keys up to its own
        return list.count ? list.count : row.length - (row_end - 1 - (unit.token + t));
    };
    const auto row_of = [&](int t) { return (long)(unit.token + t) * heads + unit.head; };
    const int seen = visible(unit.tokens - 1), padded = (seen + kPanel - 1) / kPanel * kPanel;
    const int words = head_dim / Kind<X>::pair, panels = (columns + kPanel - 1) / kPanel;
    // Rows of tokens with all heads lie one after the other.
    const int together = unit.heads == heads ? unit.tokens : 1, rows = together * unit.heads;
    grow(own.keys, (size_t)kLatentKeys * head_dim);
    grow(own.values, (size_t)kLatentKeys * panels * kPanel);
    grow(own.places, kLatentKeys);
    grow(own.factors, queries);
    grow_rows(own.scores, queries, padded);
    grow_rows(own.sums, queries, columns);
    const T** places = (const T**)own.places.data();
    const Rows<float> scores = rows_of(own.scores, padded), sums = rows_of(own.sums, columns);
    for (int begin = 0; begin < seen; begin += kLatentKeys) {
        const int count = std::min(kLatentKeys, seen - begin);
        cache.locate(cache.k, row.pages, list, begin, count, places);
        std::fill(places + count, places + kLatentKeys, places[count - 1]);
        for (int s = 0; s < count; s += kPanel) {
            float* panel = (float*)own.keys.data() + (long)s * words;
            pack_keys(places + s, head_dim / Kind<T>::pair, panel);
            for (int t = 0; t < unit.tokens; t += together)
                if (visible(t + together - 1) > begin + s)
                    multiply_panel<X>(q.from(row_of(t)), rows, {(const X*)panel, head_dim},
                                      {scores.from(t * unit.heads, begin + s), kPanel, false, nullptr});
        }
    }
    for (int i = 0; i < queries; i++) {
        const int last = visible(i / unit.heads);
        const int head = unit.head + i % unit.heads;
        own.factors[i] = weights_of<X>(cache, scores[i], 0, last, (last + kLanes - 1) / kLanes * kLanes, head);
        std::fill_n(sums[i], columns, 0.0f);
    }
    const Rows<const X> weights{(const X*)scores.data, scores.stride * (long)(sizeof(float) / sizeof(X))};
    for (int begin = 0; begin < seen; begin += kLatentKeys) {
        const int count = std::min(kLatentKeys, seen - begin);
        cache.locate(cache.v, row.pages, list, begin, count, places);
        for (int p = 0; p < panels; p++) {
            const int c = p * kPanel, width = std::min(kPanel, columns - c);
            X* panel = own.values.data() + (long)c * kLatentKeys;
            pack_rows(places, count, c, width, panel);
            const auto add = [&](int t, int tokens, int keys) {
                const int i = t * unit.heads;
                add_values<X>(weights.from(i, begin), tokens * unit.heads, panel, keys,
                              {sums.from(i, c), width, true, nullptr});
            };
            for (int t = 0; t < unit.tokens; t++) {
                if (visible(t) >= begin + kLatentKeys) {  // as do those behind it
                    add(t, unit.tokens - t, kLatentKeys);
                    break;
                }
                if (visible(t) > begin) add(t, 1, visible(t) - begin);
            }
        }
    }
    for (int i = 0; i < queries; i++) {
        X* to = out[row_of(i / unit.heads) + i % unit.heads];
        for (int c = 0; c < columns; c += kLanes) {
            const Head here = head(columns - c);
            store16(to + c, load16(sums[i] + c, here) * floats(own.factors[i]), here);
        }
    }
}

}  // namespace chorus
