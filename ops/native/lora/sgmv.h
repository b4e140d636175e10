// Segmented gather matrix-vector multiplication (Punica §4) over adapters that lie in pages of the arena.
//
//   shrink   h[t, i]  = scale · Σ_k x[t, k] · A_i[k]      dot products along the input, rank-rows as they lie
//   expand   y[t, n] += Σ_i h[t, i] · B_i[n]              few tokens: rank-rows are added up in registers;
//                                                         many: 32 columns are packed into a panel, then a product
// A rank-row is read once per step for a segment of few tokens: the bytes are the adapter's own, no padding.
#pragma once
#include "lora/adapters.h"
#include "units.h"

namespace chorus {

// h[t, i] = scale · Σ_k x[t, k] · rows[i][k] for TOKENS tokens and RANKS rank-rows.
//
//   x      [TOKENS, k]
//   rows   [RANKS], addresses
//   k      inputs
//   scale  of the adapter
//   h      [TOKENS, RANKS]
//   fetch  whether to fetch the RANKS rows that follow them in `rows`. With few tokens and products of pairs, into the
//          second-level cache: out-of-order execution alone looks far enough ahead for the first, which would lose by it
template <class T, int TOKENS, int RANKS>
CHORUS_INLINE void dots(Rows<const Act<T>> x, const T* const* rows, int k, float scale, Rows<Act<T>> h, bool fetch) {
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
            if (fetch && i % (64 / (int)sizeof(T)) == 0)
#pragma GCC unroll 8
                for (int r = 0; r < together; r++) {
                    const T* next = rows[RANKS + first + r] + i;
                    if (TOKENS > 2 || K::steps > 1) prefetch(next);
                    else prefetch_later(next);
                }
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

// `dots` of any number of rank-rows. at: the rows; rows: their addresses.
template <class T, int TOKENS>
CHORUS_INLINE void dots_ranks(Rows<const Act<T>> x, const RankRows& at, const T* const* rows, Rows<Act<T>> h,
                              bool fetch) {
    in_parts<TOKENS <= 2 ? 8 : 4>(at.count, [&](auto n, int r) {
        dots<T, TOKENS, n()>(x, rows + r, at.columns, at.adapter->scale, h.from(0, r), fetch);
    });
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
void shrink(const Arena<T>& arena, const RankRows& a, const LoraUnit& unit, Rows<const Act<T>> x, Rows<Act<T>> h,
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
// interleaved for that: of every eight columns the first four in one register, the others in another. The rows
// that follow are prefetched into the second-level cache: see `dots`.
template <int TOKENS, int RANKS>
inline void add_rows(const bf16* const* rows, Rows<const bf16> h, Rows<float> y, int columns, int ahead) {
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
    for (; c + K::width <= columns; c += K::width) {
#pragma GCC unroll 16
        for (int r = 0; r < RANKS; r++) prefetch_later(rows[RANKS + r] + std::min(c, ahead));
        add(
            y.data + c, [&](int r) { return (__m512i)K::load(rows[r] + c); },
            [&](const float* from, int) { return load16(from); }, [&](float* to, int, Floats v) { store16(to, v); });
    }
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
// looks ahead. Products of pairs fetch as many rows more: eight and eight stream as base weights do, with 16 it is slower.
//
//   at     the rows
//   rows   [at.count], their addresses
//   h      [TOKENS, rank + 1]
//   y      [TOKENS, at.columns]
//   ahead  elements to fetch of each of the rows behind them
template <class T, int TOKENS>
inline void add_ranks(const RankRows& at, const T* const* rows, Rows<const Act<T>> h, Rows<float> y, int ahead) {
    const int rank = at.count, columns = at.columns;
    constexpr int one = Kind<Act<T>>::pair > 1 ? kAddedRows / 2 : kAddedRows;
    in_parts<TOKENS == 1   ? one
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
void expand(const Arena<T>& arena, const RankRows& b, const LoraUnit& unit, Rows<const Act<T>> h, Rows<float> y,
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
        panel_gemm<Act<T>>(h, unit.tokens, panel, {y.from(0, c), columns, true, nullptr});
    }
}

CHORUS_UNIT_LIBRARY void shrink<float>(const Arena<float>&, const RankRows&, const LoraUnit&, Rows<const Act<float>>,
                                       Rows<Act<float>>, LoraScratch<float>&, const RankRows&);
CHORUS_UNIT_LIBRARY void expand<float>(const Arena<float>&, const RankRows&, const LoraUnit&, Rows<const Act<float>>,
                                       Rows<float>, LoraScratch<float>&, const RankRows&);
CHORUS_UNIT_LIBRARY void shrink<bf16>(const Arena<bf16>&, const RankRows&, const LoraUnit&, Rows<const Act<bf16>>,
                                      Rows<Act<bf16>>, LoraScratch<bf16>&, const RankRows&);
CHORUS_UNIT_LIBRARY void expand<bf16>(const Arena<bf16>&, const RankRows&, const LoraUnit&, Rows<const Act<bf16>>,
                                      Rows<float>, LoraScratch<bf16>&, const RankRows&);

}  // namespace chorus
