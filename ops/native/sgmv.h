// Segmented gather matrix-vector multiplication (Punica §4) over adapters that lie in pages of the arena.
//
//   shrink   h[t, i]  = scale · Σ_k x[t, k] · A_i[k]      dot products along the input, rank-rows as they lie
//   expand   y[t, n] += Σ_i h[t, i] · B_i[n]              few tokens: rank-rows are added up in registers;
//                                                         many: 32 columns are packed into a panel, then a product
// A rank-row is read once per step for a segment of few tokens: the bytes are the adapter's own, no padding.
#pragma once
#include <algorithm>
#include <vector>
#include "gemm.h"

namespace chorus {

constexpr int kModules = 7;
constexpr int kRankChunk = 16, kTokenChunk = 128, kColumnChunk = 2048;
constexpr int kAhead = 8;  // rank-rows of A that are worked on together, and fetched meanwhile
constexpr int kAddedRows = 16;  // the same of Bᵀ
constexpr int kLongSegment = 12;  // tokens from which a segment's expand is worth doing tile by tile

struct Adapter {  // mirrors ops/native_library.py
    const int64_t* pages;
    const int64_t* first_elem;  // per layer of the model: where its first slab begins, -1 where it has none
    int32_t rank;
    float scale;
    int64_t slab_elems;
    int32_t a_offset[kModules], b_offset[kModules];
};

template <class T>
struct Arena {
    T* data;
    int64_t page_elems;
    // Places of `count` rows of `width` elements that are `step` apart in an adapter, the first at `elem`. A row that
    // goes on in another page is put together in `spare` (rows `lds` apart); without, it is where it begins.
    void rows(const Adapter& a, int64_t elem, int64_t step, int count, int width, const T** out, T* spare,
              long lds) const {
        int64_t index = elem / page_elems, at = elem % page_elems;
        for (int i = 0; i < count; i++) {
            out[i] = data + a.pages[index] * page_elems + at;
            if (spare && at + width > page_elems) out[i] = join(a, index, at, width, spare + i * lds);
            for (at += step; at >= page_elems; at -= page_elems) index++;
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

struct LoraUnit {
    int segment, module, first, count, token, tokens;
};

// The step's segments: tokens begin[s] … end[s]-1 use *adapters[s]. Several may have the same tokens; if of one level,
// they have no module of a layer in common, so that their units never meet. level: null where all have level 0.
struct Segments {
    int count;
    const int32_t *begin, *end;
    const Adapter* const* adapters;
    const int32_t* level;

    int level_of(int s) const { return level ? level[s] : 0; }
};

// A module of a group with outputs packed side by side: its id, its first column in y, its width.
struct Target {
    int module, column, width;
};

// Rank-rows that a thread reads next, and fetches meanwhile: each begins at a row of memory of its own, which is too short for
// the processor to follow in time. adapter: null where none are known.
struct Upcoming {
    const Adapter* adapter;
    int rank, count, offset,
        columns;  // rank-rows rank … rank+count-1, so many elements of each from `offset` of its slab on
};

// Append the units of the tokens begin … end-1. Units are the same for all layers; a segment without rows in a layer
// skips its units there.
inline void shrink_units(const Segments& segments, const std::vector<Target>& group, int begin, int end,
                         std::vector<LoraUnit>& units) {
    for (int s = 0; s < segments.count; s++) {
        const Adapter& adapter = *segments.adapters[s];
        const int last = std::min(end, segments.end[s]);
        for (int t = std::max(begin, segments.begin[s]); t < last;
             t += kTokenChunk)  // which stay in the cache for all modules
            for (int g = 0; g < (int)group.size(); g++) {
                if (adapter.a_offset[group[g].module] < 0) continue;
                for (int r = 0; r < adapter.rank; r += kRankChunk)
                    units.push_back(
                        {s, g, r, std::min(kRankChunk, adapter.rank - r), t, std::min(kTokenChunk, last - t)});
            }
    }
}

// Units of one level: the next level must not begin before they have ended.
inline void expand_units(const Segments& segments, int level, const std::vector<Target>& group, int threads,
                         std::vector<LoraUnit>& units) {
    units.clear();
    const int parts = segments.count >= 4 * threads ? 1 : threads;  // of a module, so that every thread has some
    for (int s = 0; s < segments.count; s++)
        for (int g = 0; g < (int)group.size(); g++) {
            if (segments.level_of(s) != level || segments.adapters[s]->b_offset[group[g].module] < 0) continue;
            const int width = group[g].width, part = (width + parts * kPanel - 1) / (parts * kPanel) * kPanel;
            const int chunk = std::min(kColumnChunk, part);
            for (int c = 0; c < width; c += chunk)
                units.push_back(
                    {s, g, c, std::min(chunk, width - c), segments.begin[s], segments.end[s] - segments.begin[s]});
        }
}

// h[t][i] for TOKENS tokens and RANKS rank-rows. fetch: whether to fetch the RANKS rows that follow them in `rows`. With few
// tokens and products of pairs, out-of-order execution alone looks as far ahead, and without instructions for it.
template <class T, int TOKENS, int RANKS>
inline void dots(const Act<T>* x, long ldx, const T* const* rows, bool fetch, int k, float scale, Act<T>* h, long ldh) {
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
                const auto b = A::load(x + t * ldx + i);
#pragma GCC unroll 8
                for (int r = 0; r < together; r++) sum(t, r) = A::mac(sum(t, r), a[r], b);
            }
        }
        if (i < k)
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 8
                for (int r = 0; r < together; r++)
                    sum(t, r) = A::mac(sum(t, r), K::load(rows[first + r] + i, k - i), A::load(x + t * ldx + i, k - i));
    }
    alignas(64) Act<T> sums[16];
    store16(sums, reduce16(acc) * floats(scale));
    for (int t = 0; t < TOKENS; t++) memcpy(h + t * ldh, sums + t * RANKS, RANKS * sizeof(*h));
}

template <class T, int TOKENS>
inline void dots_ranks(const Act<T>* x, long ldx, const T* const* rows, int ranks, int k, float scale, Act<T>* h,
                       long ldh, bool fetch) {
    constexpr int most = TOKENS <= 2 ? 8 : 4;
    int r = 0;
    for (; r + most <= ranks; r += most) dots<T, TOKENS, most>(x, ldx, rows + r, fetch, k, scale, h + r, ldh);
    if (most == 8 && ranks - r >= 4) {
        dots<T, TOKENS, 4>(x, ldx, rows + r, fetch, k, scale, h + r, ldh);
        r += 4;
    }
    if (ranks - r >= 2) {
        dots<T, TOKENS, 2>(x, ldx, rows + r, fetch, k, scale, h + r, ldh);
        r += 2;
    }
    if (ranks - r) dots<T, TOKENS, 1>(x, ldx, rows + r, fetch, k, scale, h + r, ldh);
}

// First element of row `rank` of A or Bᵀ in the adapter.
inline int64_t first_row(const Adapter& adapter, int layer, int rank, int offset) {
    return adapter.first_elem[layer] + rank * adapter.slab_elems + offset;
}

// Where the first `most` rows of `next` begin; where there are fewer, the row before once more. Returns the elements that are
// read of each.
template <class T>
inline int upcoming_rows(const Arena<T>& arena, const Upcoming& next, int layer, int most, const T** rows) {
    const int count = next.adapter ? std::min(most, next.count) : 0;
    if (count)
        arena.rows(*next.adapter, first_row(*next.adapter, layer, next.rank, next.offset), next.adapter->slab_elems,
                   count, 0, rows, nullptr, 0);
    for (int i = count; i < most; i++) rows[i] = rows[i - 1];
    return next.columns;
}

// h: [tokens of the step, ldh], this module's part. Rows are padded with one zero so that a pair can be read.
// spare: room for kRankChunk rows of A.
template <class T>
inline void shrink(const Arena<T>& arena, const Adapter& adapter, int layer, int module, const LoraUnit& unit,
                   const Act<T>* x, long ldx, int k, Act<T>* h, long ldh, T* spare, const Upcoming& next) {
    const T* rows[kRankChunk + kAhead];
    arena.rows(adapter, first_row(adapter, layer, unit.first, adapter.a_offset[module]), adapter.slab_elems, unit.count,
               k, rows, spare, k);
    upcoming_rows(arena, next, layer, kAhead, rows + unit.count);
    const bool last = unit.first + unit.count == adapter.rank;
    int t = unit.token, end = t + unit.tokens;
    for (; t + 4 <= end; t += 4)
        dots_ranks<T, 4>(x + t * ldx, ldx, rows, unit.count, k, adapter.scale, h + t * ldh + unit.first, ldh,
                         t == unit.token);
    for (; t + 2 <= end; t += 2)
        dots_ranks<T, 2>(x + t * ldx, ldx, rows, unit.count, k, adapter.scale, h + t * ldh + unit.first, ldh,
                         t == unit.token);
    if (t < end)
        dots_ranks<T, 1>(x + t * ldx, ldx, rows, unit.count, k, adapter.scale, h + t * ldh + unit.first, ldh,
                         t == unit.token);
    if (last)
        for (t = unit.token; t < end; t++) h[t * ldh + adapter.rank] = 0;
}

// y[t] += Σ_r h[t, r] · rows[r] for TOKENS tokens and RANKS rank-rows. Fetches `ahead` columns of the RANKS rows that follow.
template <int TOKENS, int RANKS, class T>
inline void add_rows(const T* const* rows, const float* h, long ldh, float* y, long ldy, int columns, int ahead) {
    int c = 0;
    auto add = [&](auto vectors) {
        constexpr int n = vectors();
        Floats acc[TOKENS][n];
        for (int t = 0; t < TOKENS; t++)
            for (int j = 0; j < n; j++) acc[t][j] = load16(y + t * ldy + c + j * kLanes);
        const int later = std::min(c, ahead);
#pragma GCC unroll 16
        for (int r = 0; r < RANKS; r++) {
            for (int b = 0; b < n * kLanes * (int)sizeof(T); b += 64) prefetch(rows[RANKS + r] + later, b);
            Floats row[n];
#pragma GCC unroll 2
            for (int j = 0; j < n; j++) row[j] = load16(rows[r] + c + j * kLanes);
            for (int t = 0; t < TOKENS; t++) {
                const Floats factor = floats(h[t * ldh + r]);
#pragma GCC unroll 2
                for (int j = 0; j < n; j++) acc[t][j] = fma(factor, row[j], acc[t][j]);
            }
        }
        for (int t = 0; t < TOKENS; t++)
            for (int j = 0; j < n; j++) store16(y + t * ldy + c + j * kLanes, acc[t][j]);
        c += n * kLanes;
    };
    constexpr int wide = 2 * TOKENS <= kDotVectors ? 2 : 1;
    while (c + wide * kLanes <= columns) add(std::integral_constant<int, wide>{});
    if (c + kLanes <= columns) add(std::integral_constant<int, 1>{});
    if (c == columns) return;
    const Head rest = head(columns - c);
    for (int t = 0; t < TOKENS; t++) {
        Floats acc = load16(y + t * ldy + c, rest);
        for (int r = 0; r < RANKS; r++) acc = fma(floats(h[t * ldh + r]), load16(rows[r] + c, rest), acc);
        store16(y + t * ldy + c, acc, rest);
    }
}
#ifdef CHORUS_BF16
// The same with products of pairs: an odd number only at an adapter's end, where h has a zero after it.
//
// Ranks are added in pairs, 0 and 1, 2 and 3, …, by the instruction that `tile` takes for them, so that a token's sum has
// the same bits whichever of the two computes it: `dpbf16` fixes how the two products of a pair are added. Two rows are
// interleaved for that: of every eight columns the first four in one register, the others in another.
template <int TOKENS, int RANKS>
inline void add_rows(const bf16* const* rows, const bf16* h, long ldh, float* y, long ldy, int columns, int) {
    using K = Kind<bf16>;
    constexpr int pairs = (RANKS + 1) / 2;
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(4));
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    K::Reg factor[TOKENS][pairs];
    for (int t = 0; t < TOKENS; t++)
        for (int p = 0; p < pairs; p++) factor[t][p] = K::broadcast(h + t * ldh + 2 * p);
    auto add = [&](float* to, auto row, auto load, auto store) {  // 32 columns; load and store: of half 0 or 1
        Floats lows[TOKENS], highs[TOKENS];
        for (int t = 0; t < TOKENS; t++) {
            const Floats a = load(to + t * ldy, 0), b = load(to + t * ldy + kLanes, 1);
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
            store(to + t * ldy, 0, _mm512_permutex2var_ps(lows[t], first, highs[t]));
            store(to + t * ldy + kLanes, 1, _mm512_permutex2var_ps(lows[t], second, highs[t]));
        }
    };
    int c = 0;
    // No masks where whole registers are at hand: a masked store is not forwarded to the next rows' load.
    for (; c + K::width <= columns; c += K::width)
        add(
            y + c, [&](int r) { return (__m512i)K::load(rows[r] + c); },
            [&](const float* from, int) { return load16(from); }, [&](float* to, int, Floats v) { store16(to, v); });
    if (c == columns) return;
    const int rest = columns - c;
    const Head heads[2] = {head(rest), head(std::max(0, rest - kLanes))};
    add(
        y + c, [&](int r) { return (__m512i)K::load(rows[r] + c, rest); },
        [&](const float* from, int half) { return load16(from, heads[half]); },
        [&](float* to, int half, Floats v) { store16(to, v, heads[half]); });
}
#endif

// All rank-rows, some at a time: y's columns stay in the first-level cache, the rows stream past. The more together, the
// fewer instructions between two lines from memory, and the farther out-of-order execution looks ahead.
template <class T, int TOKENS>
inline void add_ranks(const T* const* rows, int rank, const Act<T>* h, long ldh, float* y, long ldy, int columns,
                      int ahead) {
    constexpr int most = TOKENS == 1 ? kAddedRows : TOKENS == 2 ? 8 : 4;
    int r = 0;
    auto add = [&](auto ranks) {
        constexpr int n = ranks();
        add_rows<TOKENS, n>(rows + r, h + r, ldh, y, ldy, columns, r + n < rank ? columns : ahead);
        r += n;
    };
    while (r + most <= rank) add(std::integral_constant<int, most>{});
    if (most > 8 && rank - r >= 8) add(std::integral_constant<int, 8>{});
    if (most > 4 && rank - r >= 4) add(std::integral_constant<int, 4>{});
    if (rank - r >= 2) add(std::integral_constant<int, 2>{});
    if (rank - r) add(std::integral_constant<int, 1>{});
}

// Lay rank-rows out as one panel [rank/pair][32][pair] for `columns` columns starting at each row's pointer. Meanwhile fetches
// what two panels on lies in the rows: too many, and too far apart, for the processor to follow by itself.
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

// The unit's columns, at most kPanel, as a panel: what the expand adds to a product of its tokens.
template <class T>
inline Extra<Act<T>> expand_panel(const Arena<T>& arena, const Adapter& adapter, int layer, int module,
                                  const LoraUnit& unit, const Act<T>* h, long ldh, const T** rows, Act<T>* panel,
                                  T* spare) {
    arena.rows(adapter, first_row(adapter, layer, 0, adapter.b_offset[module] + unit.first), adapter.slab_elems,
               adapter.rank, unit.count, rows, spare, kPanel);
    pack_rows(rows, adapter.rank, 0, unit.count, panel);
    return {h + unit.token * ldh, ldh, panel, panel_rows<Act<T>>(adapter.rank)};
}

// rows: room for rank + kAddedRows row pointers; panel: one panel of `rank + 1` rows; spare: `rank` rows of kColumnChunk
// columns.
template <class T>
inline void expand(const Arena<T>& arena, const Adapter& adapter, int layer, int module, const LoraUnit& unit,
                   const Act<T>* h, long ldh, float* y, long ldy, const T** rows, Act<T>* panel, T* spare,
                   const Upcoming& next) {
    const int rank = adapter.rank;
    arena.rows(adapter, first_row(adapter, layer, 0, adapter.b_offset[module] + unit.first), adapter.slab_elems, rank,
               unit.count, rows, spare, kColumnChunk);
    h += unit.token * ldh;
    y += unit.token * ldy + unit.first;
    const int ahead = upcoming_rows(arena, next, layer, kAddedRows, rows + rank);
    switch (unit.tokens) {
        case 1: add_ranks<T, 1>(rows, rank, h, ldh, y, ldy, unit.count, ahead); return;
        case 2: add_ranks<T, 2>(rows, rank, h, ldh, y, ldy, unit.count, ahead); return;
        case 3: add_ranks<T, 3>(rows, rank, h, ldh, y, ldy, unit.count, ahead); return;
        default: break;
    }
    for (int c = 0; c < unit.count; c += kPanel) {
        const int columns = std::min(kPanel, unit.count - c);
        pack_rows(rows, rank, c, columns, panel);
        panel_product<Act<T>>(h, ldh, unit.tokens, panel, panel_rows<Act<T>>(rank), y + c, ldy, columns, true, nullptr);
    }
}

}  // namespace chorus
