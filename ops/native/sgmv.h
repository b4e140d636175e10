// Segmented gather matrix-vector multiplication (Punica §4) over adapters that lie in pages of the arena.
//
//   shrink   h[t, i]  = scale · Σ_k x[t, k] · A_i[k]      dot products along the input, rank-rows as they lie
//   expand   y[t, n] += Σ_i h[t, i] · B_i[n]              few tokens: rank-rows are added up in registers;
//                                                         many: 32 columns are packed into a panel, then a product
// A rank-row is read once per step for a segment of few tokens: the bytes are the adapter's own, no padding.
#pragma once
#include <algorithm>
#include <vector>
#include "buffer.h"
#include "gemm.h"

namespace chorus {

constexpr int kModules = 7;
constexpr int kRankChunk = 16, kTokenChunk = 128, kColumnChunk = 2048;
constexpr int kAhead = 8;  // rank-rows of A that are worked on together, and fetched meanwhile
constexpr int kAddedRows = 16;  // the same of Bᵀ
constexpr int kLongSegment = 12;  // tokens from which a segment's expand is worth doing tile by tile

// A part of an adapter in pages of the arena: one slab for each rank-row of a layer, with that row of every module's A and Bᵀ.
// Mirrors AdapterDescriptor of ops/native_library.py.
struct Adapter {
    const int64_t* pages;  // of the arena, in order
    const int64_t* first_elem;  // [layers of the model]: where the layer's first slab begins, -1 where it has none
    int32_t rank;
    float scale;
    int64_t slab_elems;
    int32_t a_offset[kModules], b_offset[kModules];  // elements from a slab's beginning; -1 where a module has none

    bool in_layer(int layer) const { return first_elem[layer] >= 0; }
    bool has(int module) const { return b_offset[module] >= 0; }
};

// Rank-rows `first` … first+count-1 of a module's A or Bᵀ in a layer: `columns` elements of each, from `offset` of its slab on.
struct RankRows {
    const Adapter* adapter;  // null: no rows
    int layer, first, count, offset, columns;
};

// Memory of T in pages of `page_elems` elements, in which adapters lie.
template <class T>
struct Arena {
    T* data;
    int64_t page_elems;

    // Find where rows begin. A row that goes on in another page is put together elsewhere.
    //
    //   rows    the rows
    //   out     [rows.count]: their addresses
    //   spare   [rows.count, stride]: where rows are put together; null: they are not
    //   stride  elements, at least rows.columns
    void locate(const RankRows& rows, const T** out, T* spare, long stride) const {
        const Adapter& a = *rows.adapter;
        const int64_t elem = a.first_elem[rows.layer] + rows.first * a.slab_elems + rows.offset;
        int64_t index = elem / page_elems, at = elem % page_elems;
        for (int i = 0; i < rows.count; i++) {
            out[i] = data + a.pages[index] * page_elems + at;
            if (spare && at + rows.columns > page_elems) out[i] = join(a, index, at, rows.columns, spare + i * stride);
            for (at += a.slab_elems; at >= page_elems; at -= page_elems) index++;
        }
    }

   private:
    const T* join(const Adapter& a, int64_t index, int64_t at, int width, T* out) const {
        for (int done = 0; done < width; index++, at = 0) {
            const int count = (int)std::min<int64_t>(width - done, page_elems - at);
            memcpy(out + done, data + a.pages[index] * page_elems + at, count * sizeof(T));
            done += count;
        }
        return out;
    }
};

// Memory of a thread for shrinks and expands of adapters up to a rank.
template <class T>
struct LoraScratch {
    std::vector<const T*> rows;  // [rank + kAddedRows]
    std::vector<Act<T>> panel;  // [rank + 1, kPanel]
    std::vector<T> spare;  // rows of A or of Bᵀ that are put together from pages

    // rank: the largest. inputs: the most of a module.
    void reserve(int rank, int inputs) {
        grow(rows, rank + kAddedRows);
        grow(panel, (size_t)(rank + 1) * kPanel);
        grow(spare, std::max((size_t)kRankChunk * inputs, (size_t)rank * kColumnChunk));
    }
};

// A unit of work: of a segment's tokens, a module's rank-rows (shrink) or columns of outputs (expand) first … first+count-1.
struct LoraUnit {
    int segment, module, first, count, token, tokens;  // module: index in its group
};

// The step's segments: tokens begin[s] … end[s]-1 use *adapters[s]. Several may have the same tokens; if of one level,
// they have no module of a layer in common, so that their units never meet. Mirrors SegmentsDescriptor of ops/native_library.py.
struct Segments {
    int32_t count;
    const int32_t *begin, *end;  // [count]
    const Adapter* const* adapters;  // [count]
    const int32_t* level;  // [count]; null: all are 0

    int level_of(int s) const { return level ? level[s] : 0; }
    int tokens_of(int s) const { return end[s] - begin[s]; }
};

// A module of a group with outputs packed side by side: its id, its first column in y, its width.
struct Target {
    int module, column, width;

    struct Columns {
        int first, last;  // of the module's own, without the last
        bool any() const { return first < last; }
    };
    // The module's part of columns from … from+count-1 of y.
    Columns within(int from, int count) const {
        return {std::max(from, column) - column, std::min(from + count, column + width) - column};
    }
};

inline RankRows a_rows(const Adapter& adapter, int layer, int module, const LoraUnit& unit, int inputs) {
    return {&adapter, layer, unit.first, unit.count, adapter.a_offset[module], inputs};
}
inline RankRows b_rows(const Adapter& adapter, int layer, int module, const LoraUnit& unit) {
    return {&adapter, layer, 0, adapter.rank, adapter.b_offset[module] + unit.first, unit.count};
}

// Append the shrinks of some tokens. Units are the same for all layers; a segment without rows in a layer skips its units
// there.
//
//   segments    of the step
//   group       modules
//   begin, end  the tokens, without the last
//   units       appended to
inline void shrink_units(const Segments& segments, const std::vector<Target>& group, int begin, int end,
                         std::vector<LoraUnit>& units) {
    for (int s = 0; s < segments.count; s++) {
        const Adapter& adapter = *segments.adapters[s];
        const int last = std::min(end, segments.end[s]);
        // kTokenChunk tokens stay in the cache for all modules.
        for (int t = std::max(begin, segments.begin[s]); t < last; t += kTokenChunk)
            for (int g = 0; g < (int)group.size(); g++) {
                if (adapter.a_offset[group[g].module] < 0) continue;
                for (int r = 0; r < adapter.rank; r += kRankChunk)
                    units.push_back(
                        {s, g, r, std::min(kRankChunk, adapter.rank - r), t, std::min(kTokenChunk, last - t)});
            }
    }
}

// Make the expands of one level: the next level must not begin before they have ended.
//
//   segments  of the step
//   level     of the segments
//   group     modules
//   threads   that share them
//   units     written
inline void expand_units(const Segments& segments, int level, const std::vector<Target>& group, int threads,
                         std::vector<LoraUnit>& units) {
    units.clear();
    const int parts = segments.count >= 4 * threads ? 1 : threads;  // of a module, so that every thread has some
    for (int s = 0; s < segments.count; s++)
        for (int g = 0; g < (int)group.size(); g++) {
            if (segments.level_of(s) != level || !segments.adapters[s]->has(group[g].module)) continue;
            const int width = group[g].width, part = (width + parts * kPanel - 1) / (parts * kPanel) * kPanel;
            const int chunk = std::min(kColumnChunk, part);
            for (int c = 0; c < width; c += chunk)
                units.push_back({s, g, c, std::min(chunk, width - c), segments.begin[s], segments.tokens_of(s)});
        }
}

// h[t, i] = scale · Σ_k x[t, k] · rows[i][k] for TOKENS tokens and RANKS rank-rows.
//
//   x      [TOKENS, k]
//   rows   [RANKS], addresses
//   k      inputs
//   scale  of the adapter
//   h      [TOKENS, RANKS]
//   fetch  whether to fetch the RANKS rows that follow them in `rows`; with few tokens and products of pairs, out-of-order
//          execution alone looks as far ahead, and without instructions for it
template <class T, int TOKENS, int RANKS>
inline void dots(Rows<const Act<T>> x, const T* const* rows, int k, float scale, Rows<Act<T>> h, bool fetch) {
    using K = Kind<T>;
    using A = Kind<Act<T>>;
    constexpr int together = std::min(RANKS, std::max(1, kDotVectors / TOKENS));  // rows with their sums in registers
    Floats acc[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) acc[i] = floats(0);
#pragma GCC unroll 8
    for (int first = 0; first < RANKS; first += together) {
        auto sum = [&](int t, int r) -> Floats& { return acc[t * RANKS + first + r]; };
        int i = 0;
        for (; i + K::width <= k; i += K::width) {
            typename A::Reg a[together];
#pragma GCC unroll 8
            for (int r = 0; r < together; r++) a[r] = K::load(rows[first + r] + i);
            if ((TOKENS > 2 || K::steps > 1) && fetch && i % (64 / (int)sizeof(T)) == 0)
#pragma GCC unroll 8
                for (int r = 0; r < together; r++) prefetch(rows[RANKS + first + r] + i);
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; t++) {
                const auto b = A::load(x[t] + i);
#pragma GCC unroll 8
                for (int r = 0; r < together; r++) sum(t, r) = A::mac(sum(t, r), a[r], b);
            }
        }
        if (i < k)
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 8
                for (int r = 0; r < together; r++)
                    sum(t, r) = A::mac(sum(t, r), K::load(rows[first + r] + i, k - i), A::load(x[t] + i, k - i));
    }
    alignas(64) Act<T> sums[16];
    store16(sums, reduce16(acc) * floats(scale));
    for (int t = 0; t < TOKENS; t++) memcpy(h[t], sums + t * RANKS, RANKS * sizeof(Act<T>));
}

// `dots` of any number of rank-rows. at: the rows, whose addresses `rows` are.
template <class T, int TOKENS>
inline void dots_ranks(Rows<const Act<T>> x, const RankRows& at, const T* const* rows, Rows<Act<T>> h, bool fetch) {
    in_parts<TOKENS <= 2 ? 8 : 4>(at.count, [&](auto n, int r) {
        dots<T, TOKENS, n()>(x, rows + r, at.columns, at.adapter->scale, h.from(0, r), fetch);
    });
}

// Find where the first rows of `next` begin, to fetch them meanwhile: each is in memory of its own, too short for the processor
// to follow in time. Where there are fewer than `most`, the row before once more.
//
//   arena    with the rows
//   next     rows that the thread reads next
//   most     rows that are wanted
//   rows     [most], after at least one other: their addresses
//   returns  the elements that are read of each
template <class T>
inline int upcoming_rows(const Arena<T>& arena, RankRows next, int most, const T** rows) {
    next.count = next.adapter ? std::min(most, next.count) : 0;
    if (next.count) arena.locate(next, rows, nullptr, 0);
    for (int i = next.count; i < most; i++) rows[i] = rows[i - 1];
    return next.columns;
}

// h[t, i] = scale · Σ_k x[t, k] · A_i[k]. Rows of h are padded with one zero, so that a pair can be read.
//
//   arena  with the adapter
//   a      the unit's rows of A
//   unit   tokens and rank-rows
//   x      [tokens of the step, inputs]
//   h      [tokens of the step, rank + 1]
//   own    memory of the thread
//   next   rows of A that the thread reads next
template <class T>
inline void shrink(const Arena<T>& arena, const RankRows& a, const LoraUnit& unit, Rows<const Act<T>> x, Rows<Act<T>> h,
                   LoraScratch<T>& own, const RankRows& next) {
    const T* rows[kRankChunk + kAhead];
    arena.locate(a, rows, own.spare.data(), a.columns);
    upcoming_rows(arena, next, kAhead, rows + a.count);
    in_parts<4>(unit.tokens, [&](auto tokens, int first) {
        const int t = unit.token + first;
        dots_ranks<T, tokens()>(x.from(t), a, rows, h.from(t, unit.first), !first);
    });
    const int rank = a.adapter->rank, end = unit.token + unit.tokens;
    if (unit.first + unit.count == rank)
        for (int t = unit.token; t < end; t++) h[t][rank] = 0;
}

// y[t] += Σ_r h[t, r] · rows[r] for TOKENS tokens and RANKS rank-rows.
//
//   rows     [RANKS], addresses
//   h        [TOKENS, RANKS]
//   y        [TOKENS, columns]
//   columns  of each row
//   ahead    how many columns of the RANKS rows that follow are fetched
template <int TOKENS, int RANKS, class T>
inline void add_rows(const T* const* rows, Rows<const float> h, Rows<float> y, int columns, int ahead) {
    int c = 0;
    auto add = [&](auto vectors) {
        constexpr int n = vectors();
        Floats acc[TOKENS][n];
        for (int t = 0; t < TOKENS; t++)
            for (int j = 0; j < n; j++) acc[t][j] = load16(y[t] + c + j * kLanes);
        const int later = std::min(c, ahead);
#pragma GCC unroll 16
        for (int r = 0; r < RANKS; r++) {
            for (int b = 0; b < n * kLanes * (int)sizeof(T); b += 64) prefetch(rows[RANKS + r] + later, b);
            Floats row[n];
#pragma GCC unroll 2
            for (int j = 0; j < n; j++) row[j] = load16(rows[r] + c + j * kLanes);
            for (int t = 0; t < TOKENS; t++) {
                const Floats factor = floats(h[t][r]);
#pragma GCC unroll 2
                for (int j = 0; j < n; j++) acc[t][j] = fma(factor, row[j], acc[t][j]);
            }
        }
        for (int t = 0; t < TOKENS; t++)
            for (int j = 0; j < n; j++) store16(y[t] + c + j * kLanes, acc[t][j]);
        c += n * kLanes;
    };
    constexpr int wide = 2 * TOKENS <= kDotVectors ? 2 : 1;
    while (c + wide * kLanes <= columns) add(std::integral_constant<int, wide>{});
    if (c + kLanes <= columns) add(std::integral_constant<int, 1>{});
    if (c == columns) return;
    const Head rest = head(columns - c);
    for (int t = 0; t < TOKENS; t++) {
        Floats acc = load16(y[t] + c, rest);
        for (int r = 0; r < RANKS; r++) acc = fma(floats(h[t][r]), load16(rows[r] + c, rest), acc);
        store16(y[t] + c, acc, rest);
    }
}
#ifdef CHORUS_BF16
// The same with products of pairs: an odd number only at an adapter's end, where h has a zero after it.
//
// Ranks are added in pairs, 0 and 1, 2 and 3, …, by the instruction that `tile` takes for them, so that a token's sum has
// the same bits whichever of the two computes it: `dpbf16` fixes how the two products of a pair are added. Two rows are
// interleaved for that: of every eight columns the first four in one register, the others in another.
template <int TOKENS, int RANKS>
inline void add_rows(const bf16* const* rows, Rows<const bf16> h, Rows<float> y, int columns, int) {
    using K = Kind<bf16>;
    constexpr int pairs = (RANKS + 1) / 2;
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(4));
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    K::Reg factor[TOKENS][pairs];
    for (int t = 0; t < TOKENS; t++)
        for (int p = 0; p < pairs; p++) factor[t][p] = K::broadcast(h[t] + 2 * p);
    auto add = [&](float* to, auto row, auto load, auto store) {  // 32 columns; load and store: of half 0 or 1
        Floats lows[TOKENS], highs[TOKENS];
        for (int t = 0; t < TOKENS; t++) {
            const Floats a = load(to + t * y.stride, 0), b = load(to + t * y.stride + kLanes, 1);
            lows[t] = _mm512_permutex2var_ps(a, low, b);
            highs[t] = _mm512_permutex2var_ps(a, high, b);
        }
#pragma GCC unroll 8
        for (int p = 0; p < pairs; p++) {
            const __m512i one = row(2 * p), other = 2 * p + 1 < RANKS ? row(2 * p + 1) : _mm512_setzero_si512();
            const auto at_low = (K::Reg)_mm512_unpacklo_epi16(one, other),
                       at_high = (K::Reg)_mm512_unpackhi_epi16(one, other);
            for (int t = 0; t < TOKENS; t++) {
                lows[t] = K::mac(lows[t], at_low, factor[t][p]);
                highs[t] = K::mac(highs[t], at_high, factor[t][p]);
            }
        }
        for (int t = 0; t < TOKENS; t++) {
            store(to + t * y.stride, 0, _mm512_permutex2var_ps(lows[t], first, highs[t]));
            store(to + t * y.stride + kLanes, 1, _mm512_permutex2var_ps(lows[t], second, highs[t]));
        }
    };
    int c = 0;
    // No masks where whole registers are at hand: a masked store is not forwarded to the next rows' load.
    for (; c + K::width <= columns; c += K::width)
        add(
            y.data + c, [&](int r) { return (__m512i)K::load(rows[r] + c); },
            [&](const float* from, int) { return load16(from); }, [&](float* to, int, Floats v) { store16(to, v); });
    if (c == columns) return;
    const int rest = columns - c;
    const Head heads[2] = {head(rest), head(std::max(0, rest - kLanes))};
    add(
        y.data + c, [&](int r) { return (__m512i)K::load(rows[r] + c, rest); },
        [&](const float* from, int half) { return load16(from, heads[half]); },
        [&](float* to, int half, Floats v) { store16(to, v, heads[half]); });
}
#endif

// y[t] += Σ_r h[t, r] · rows[r] for all rank-rows, some at a time: y's columns stay in the first-level cache, the rows stream
// past. The more together, the fewer instructions between two lines from memory, and the farther out-of-order execution
// looks ahead.
//
//   at     the rows
//   rows   [at.count], their addresses
//   h      [TOKENS, rank + 1]
//   y      [TOKENS, at.columns]
//   ahead  elements to fetch of each of the rows behind them
template <class T, int TOKENS>
inline void add_ranks(const RankRows& at, const T* const* rows, Rows<const Act<T>> h, Rows<float> y, int ahead) {
    const int rank = at.count, columns = at.columns;
    in_parts<TOKENS == 1   ? kAddedRows
             : TOKENS == 2 ? 8
                           : 4>(rank, [&](auto n, int r) {
        add_rows<TOKENS, n()>(rows + r, h.from(0, r), y, columns, r + n < rank ? columns : ahead);
    });
}

// Lay rank-rows out as one panel. Meanwhile fetches what two panels on lies in the rows: too many, and too far apart, for
// the processor to follow by itself.
//
//   rows     [rank], addresses
//   rank     number of rows
//   offset   elements to the first column
//   columns  at most kPanel
//   panel    [rank / pair, kPanel, pair]
template <class T>
inline void pack_rows(const T* const* rows, int rank, int offset, int columns, float* panel) {
    for (int r = 0; r < rank; r++, panel += kPanel) {
        prefetch(rows[r] + offset + 2 * kPanel);
        store16(panel, load16(rows[r] + offset, head(columns)));
        store16(panel + kLanes, load16(rows[r] + offset + kLanes, head(std::max(0, columns - kLanes))));
    }
}
#ifdef CHORUS_BF16
inline void pack_rows(const bf16* const* rows, int rank, int offset, int columns, bf16* panel) {
    const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                           37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i half = _mm512_set1_epi16(16);
    for (int r = 0; r < rank; r += 2, panel += 64) {
        for (int i = r; i < std::min(r + 2, rank); i++) prefetch(rows[i] + offset + 2 * kPanel);
        const __m512i a = (__m512i)Kind<bf16>::load(rows[r] + offset, columns);
        const __m512i b =
            r + 1 < rank ? (__m512i)Kind<bf16>::load(rows[r + 1] + offset, columns) : _mm512_setzero_si512();
        _mm512_storeu_si512(panel, _mm512_permutex2var_epi16(a, order, b));
        _mm512_storeu_si512(panel + 32, _mm512_permutex2var_epi16(a, _mm512_add_epi16(order, half), b));
    }
}
#endif

// Rows of a panel of so many rank-rows: whole pairs.
template <class X> inline int panel_rows(int rank) {
    return (rank + Kind<X>::pair - 1) / Kind<X>::pair * Kind<X>::pair;
}

// What an expand adds to a product of its tokens.
//
//   arena  with the adapter
//   b      the unit's rows of Bᵀ, at most kPanel columns
//   unit   tokens
//   h      [tokens of the step, rank + 1]
//   own    memory of the thread, which holds the panel
template <class T>
inline Extra<Act<T>> expand_panel(const Arena<T>& arena, const RankRows& b, const LoraUnit& unit, Rows<const Act<T>> h,
                                  LoraScratch<T>& own) {
    arena.locate(b, own.rows.data(), own.spare.data(), kPanel);
    pack_rows(own.rows.data(), b.count, 0, b.columns, own.panel.data());
    return {h.from(unit.token), {own.panel.data(), panel_rows<Act<T>>(b.count)}};
}

// y[t, n] += Σ_i h[t, i] · B_i[n] of a unit's tokens and columns.
//
//   arena  with the adapter
//   b      the unit's rows of Bᵀ
//   unit   tokens and columns
//   h      [tokens of the step, rank + 1]
//   y      [tokens of the step, columns of the module]
//   own    memory of the thread
//   next   rows of Bᵀ that the thread reads next
template <class T>
inline void expand(const Arena<T>& arena, const RankRows& b, const LoraUnit& unit, Rows<const Act<T>> h, Rows<float> y,
                   LoraScratch<T>& own, const RankRows& next) {
    const int rank = b.count;
    const T** rows = own.rows.data();
    arena.locate(b, rows, own.spare.data(), kColumnChunk);
    h = h.from(unit.token);
    y = y.from(unit.token, unit.first);
    const int ahead = upcoming_rows(arena, next, kAddedRows, rows + rank);
    switch (unit.tokens) {
        case 1: return add_ranks<T, 1>(b, rows, h, y, ahead);
        case 2: return add_ranks<T, 2>(b, rows, h, y, ahead);
        case 3: return add_ranks<T, 3>(b, rows, h, y, ahead);
        default: break;
    }
    const Panel<Act<T>> panel{own.panel.data(), panel_rows<Act<T>>(rank)};
    for (int c = 0; c < unit.count; c += kPanel) {
        const int columns = std::min(kPanel, unit.count - c);
        pack_rows(rows, rank, c, columns, own.panel.data());
        panel_product<Act<T>>(h, unit.tokens, panel, {y.from(0, c), columns, true, nullptr});
    }
}

}  // namespace chorus
