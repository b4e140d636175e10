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
constexpr int kRankChunk = 16, kTokenChunk = 96, kColumnChunk = 256;
constexpr int kLongSegment = 12;  // tokens from which a segment's expand is worth doing tile by tile

struct Adapter {  // mirrors ops/native.py
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
    // Elements elem … elem+width-1 of an adapter, which run over its pages; a row that goes on in another page is put
    // together in `spare` (room for `width` elements).
    const T* row(const Adapter& a, int64_t elem, int width, T* spare) const {
        int64_t index = elem / page_elems, at = elem % page_elems;
        if (at + width <= page_elems) return data + a.pages[index] * page_elems + at;
        for (int done = 0; done < width; index++, at = 0) {
            const int count = (int)std::min<int64_t>(width - done, page_elems - at);
            memcpy(spare + done, data + a.pages[index] * page_elems + at, count * sizeof(T));
            done += count;
        }
        return spare;
    }
};

struct LoraUnit { int segment, module, first, count, token, tokens; };

// The step's segments: tokens begin[s] … end[s]-1 use *adapters[s]. Several may have the same tokens, but then no module
// of a layer in common, so that units never meet.
struct Segments {
    int count;
    const int32_t *begin, *end;
    const Adapter* const* adapters;
};

// A module of a group whose outputs are packed side by side: its id, its first column in y, its width.
struct Target { int module, column, width; };

// Units are the same for all layers; those of a segment without rows in a layer are skipped there.
inline void shrink_units(const Segments& segments, const std::vector<Target>& group, std::vector<LoraUnit>& units) {
    units.clear();
    for (int s = 0; s < segments.count; s++) {
        const Adapter& adapter = *segments.adapters[s];
        for (int g = 0; g < (int)group.size(); g++) {
            if (adapter.a_offset[group[g].module] < 0) continue;
            for (int t = segments.begin[s]; t < segments.end[s]; t += kTokenChunk)
                for (int r = 0; r < adapter.rank; r += kRankChunk)
                    units.push_back({s, g, r, std::min(kRankChunk, adapter.rank - r), t,
                                     std::min(kTokenChunk, segments.end[s] - t)});
        }
    }
}

inline void expand_units(const Segments& segments, const std::vector<Target>& group, std::vector<LoraUnit>& units) {
    units.clear();
    for (int s = 0; s < segments.count; s++)
        for (int g = 0; g < (int)group.size(); g++) {
            if (segments.adapters[s]->b_offset[group[g].module] < 0) continue;
            for (int c = 0; c < group[g].width; c += kColumnChunk)
                units.push_back({s, g, c, std::min(kColumnChunk, group[g].width - c), segments.begin[s],
                                 segments.end[s] - segments.begin[s]});
        }
}

// h[t][i] for TOKENS tokens and RANKS rank-rows. next: the rows that come after them, null when there are none.
template <class T, int TOKENS, int RANKS>
inline void dots(const T* x, long ldx, const T* const* rows, const T* const* next, int k, float scale, T* h, long ldh) {
    using K = Kind<T>;
    __m512 acc[16];
    for (int i = 0; i < 16; i++) acc[i] = _mm512_setzero_ps();
    int i = 0;
    for (; i + K::width <= k; i += K::width) {
        typename K::Reg a[RANKS];
#pragma GCC unroll 8
        for (int r = 0; r < RANKS; r++) a[r] = K::load(rows[r] + i);
        if (next)
#pragma GCC unroll 8
            for (int r = 0; r < RANKS; r++) prefetch(next[r] + i);
#pragma GCC unroll 4
        for (int t = 0; t < TOKENS; t++) {
            const auto b = K::load(x + t * ldx + i);
#pragma GCC unroll 8
            for (int r = 0; r < RANKS; r++) acc[t * RANKS + r] = K::mac(acc[t * RANKS + r], a[r], b);
        }
    }
    if (i < k)
        for (int t = 0; t < TOKENS; t++)
            for (int r = 0; r < RANKS; r++)
                acc[t * RANKS + r] = K::mac(acc[t * RANKS + r], K::load(rows[r] + i, k - i), K::load(x + t * ldx + i, k - i));
    alignas(64) T sums[16];
    store16(sums, _mm512_mul_ps(reduce16(acc), _mm512_set1_ps(scale)));
    for (int t = 0; t < TOKENS; t++) memcpy(h + t * ldh, sums + t * RANKS, RANKS * sizeof(T));
}

template <class T, int TOKENS>
inline void dots_ranks(const T* x, long ldx, const T* const* rows, int ranks, int k, float scale, T* h, long ldh,
                       bool first) {
    constexpr int most = TOKENS <= 2 ? 8 : 4;
    int r = 0;
    for (; r + most <= ranks; r += most)
        dots<T, TOKENS, most>(x, ldx, rows + r, first && r + 2 * most <= ranks ? rows + r + most : nullptr, k, scale, h + r, ldh);
    if (most == 8 && ranks - r >= 4) { dots<T, TOKENS, 4>(x, ldx, rows + r, nullptr, k, scale, h + r, ldh); r += 4; }
    if (ranks - r >= 2) { dots<T, TOKENS, 2>(x, ldx, rows + r, nullptr, k, scale, h + r, ldh); r += 2; }
    if (ranks - r) dots<T, TOKENS, 1>(x, ldx, rows + r, nullptr, k, scale, h + r, ldh);
}

// h: [tokens of the step, ldh], this module's part. Rows are padded with one zero so that a pair can be read.
// spare: room for kRankChunk rows of A.
template <class T>
inline void shrink(const Arena<T>& arena, const Adapter& adapter, int layer, int module, const LoraUnit& unit,
                   const T* x, long ldx, int k, T* h, long ldh, T* spare) {
    const T* rows[kRankChunk];
    const int64_t first = adapter.first_elem[layer] + unit.first * adapter.slab_elems + adapter.a_offset[module];
    for (int i = 0; i < unit.count; i++) rows[i] = arena.row(adapter, first + i * adapter.slab_elems, k, spare + (long)i * k);
    const bool last = unit.first + unit.count == adapter.rank;
    int t = unit.token, end = t + unit.tokens;
    for (; t + 4 <= end; t += 4) dots_ranks<T, 4>(x + t * ldx, ldx, rows, unit.count, k, adapter.scale, h + t * ldh + unit.first, ldh, t == unit.token);
    for (; t + 2 <= end; t += 2) dots_ranks<T, 2>(x + t * ldx, ldx, rows, unit.count, k, adapter.scale, h + t * ldh + unit.first, ldh, t == unit.token);
    if (t < end) dots_ranks<T, 1>(x + t * ldx, ldx, rows, unit.count, k, adapter.scale, h + t * ldh + unit.first, ldh, t == unit.token);
    if (last)
        for (t = unit.token; t < end; t++) h[t * ldh + adapter.rank] = T(0);
}

// Few tokens: COLUMNS·16 columns of y for TOKENS tokens stay in registers while the rank-rows pass.
template <class T, int TOKENS, int COLUMNS>
inline void add_rows(const T* const* rows, int rank, const T* h, long ldh, float* y, long ldy, int columns) {
    __m512 acc[TOKENS][COLUMNS];
    for (int t = 0; t < TOKENS; t++)
        for (int c = 0; c < COLUMNS; c++) acc[t][c] = load16(y + t * ldy + c * kLanes, head_mask(std::max(0, columns - c * kLanes)));
    if (columns >= COLUMNS * kLanes) {
        for (int r = 0; r < rank; r++) {
            __m512 factor[TOKENS];
            for (int t = 0; t < TOKENS; t++) factor[t] = _mm512_set1_ps(widen(h[t * ldh + r]));
            if (r + 4 < rank)
#pragma GCC unroll 16
                for (int c = 0; c < COLUMNS; c += 64 / (int)sizeof(T) / kLanes) prefetch(rows[r + 4] + c * kLanes);
#pragma GCC unroll 16
            for (int c = 0; c < COLUMNS; c++) {
                const __m512 b = load16(rows[r] + c * kLanes);
#pragma GCC unroll 4
                for (int t = 0; t < TOKENS; t++) acc[t][c] = _mm512_fmadd_ps(factor[t], b, acc[t][c]);
            }
        }
    } else {
        for (int r = 0; r < rank; r++)
            for (int c = 0; c < COLUMNS && c * kLanes < columns; c++) {
                const __m512 b = load16(rows[r] + c * kLanes, head_mask(columns - c * kLanes));
                for (int t = 0; t < TOKENS; t++) acc[t][c] = _mm512_fmadd_ps(_mm512_set1_ps(widen(h[t * ldh + r])), b, acc[t][c]);
            }
    }
    for (int t = 0; t < TOKENS; t++)
        for (int c = 0; c < COLUMNS && c * kLanes < columns; c++) store16(y + t * ldy + c * kLanes, acc[t][c], head_mask(columns - c * kLanes));
}

template <class T, int TOKENS, int COLUMNS>
inline void add_rows_chunk(const T** rows, int rank, const T* h, long ldh, float* y, long ldy, int columns) {
    for (int c = 0; c < columns; c += COLUMNS * kLanes) {
        add_rows<T, TOKENS, COLUMNS>(rows, rank, h, ldh, y + c, ldy, columns - c);
        for (int r = 0; r < rank; r++) rows[r] += COLUMNS * kLanes;
    }
}

// Interleave rank-rows into one panel [rank/pair][32][pair] for `columns` columns starting at each row's pointer.
inline void pack_rows(const bf16* const* rows, int rank, int offset, int columns, bf16* panel) {
    const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                           36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i half = _mm512_set1_epi16(16);
    for (int r = 0; r < rank; r += 2, panel += 64) {
        const __m512i a = (__m512i)Kind<bf16>::load(rows[r] + offset, columns);
        const __m512i b = r + 1 < rank ? (__m512i)Kind<bf16>::load(rows[r + 1] + offset, columns) : _mm512_setzero_si512();
        _mm512_storeu_si512(panel, _mm512_permutex2var_epi16(a, order, b));
        _mm512_storeu_si512(panel + 32, _mm512_permutex2var_epi16(a, _mm512_add_epi16(order, half), b));
    }
}
inline void pack_rows(const float* const* rows, int rank, int offset, int columns, float* panel) {
    for (int r = 0; r < rank; r++, panel += kPanel) {
        _mm512_storeu_ps(panel, load16(rows[r] + offset, head_mask(columns)));
        _mm512_storeu_ps(panel + kLanes, load16(rows[r] + offset + kLanes, head_mask(std::max(0, columns - kLanes))));
    }
}

// rows, panel, spare: room for `rank` row pointers, one panel of `rank + 1` rows, and `rank` rows of kColumnChunk columns.
template <class T>
inline void expand(const Arena<T>& arena, const Adapter& adapter, int layer, int module, const LoraUnit& unit,
                   const T* h, long ldh, float* y, long ldy, const T** rows, T* panel, T* spare) {
    const int rank = adapter.rank;
    const int64_t first = adapter.first_elem[layer] + adapter.b_offset[module] + unit.first;
    for (int i = 0; i < rank; i++)
        rows[i] = arena.row(adapter, first + i * adapter.slab_elems, unit.count, spare + (long)i * kColumnChunk);
    h += unit.token * ldh;
    y += unit.token * ldy + unit.first;
    switch (unit.tokens) {
        case 1: add_rows_chunk<T, 1, 16>(rows, rank, h, ldh, y, ldy, unit.count); return;
        case 2: add_rows_chunk<T, 2, 8>(rows, rank, h, ldh, y, ldy, unit.count); return;
        case 3: add_rows_chunk<T, 3, 8>(rows, rank, h, ldh, y, ldy, unit.count); return;
        default: break;
    }
    const int k = (rank + Kind<T>::pair - 1) / Kind<T>::pair * Kind<T>::pair;
    for (int c = 0; c < unit.count; c += kPanel) {
        const int columns = std::min(kPanel, unit.count - c);
        pack_rows(rows, rank, c, columns, panel);
        panel_product<T>(h, ldh, unit.tokens, panel, k, y + c, ldy, columns, true, nullptr);
    }
}

}  // namespace chorus
