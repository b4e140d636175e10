// y[m, n] (+)= bias[n] + Σ_k x[m, k] · w[n, k] with w packed in panels of 32 output columns: [N/32][K/pair][32][pair].
//
// One packed copy serves decode (a few rows: the panel streams from memory once) and prefill (many rows: the panel
// stays in L2 while tiles of rows pass by).
#pragma once
#include <algorithm>
#include <vector>
#include "simd.h"
#include "tiles.h"

namespace chorus {

constexpr int kPanel = 32;    // output columns of a panel
constexpr long kPrefetchBytes = 8192;
constexpr int kSegmentChunk = 300;  // the same where every chunk has an adapter's rows to pack
constexpr int kShortChunk = kSegmentChunk / 4;  // fewer rows are not worth a pass over the weights
constexpr int kRowChunk = 192;  // rows: their activations stay in L2 while panels pass

template <class T> inline size_t panel_elems(int k) { return (size_t)k * kPanel; }

// More of the reduction dimension for the same outputs, from other memory: y += Σ_k x[m, k] · w[n, k].
template <class X>
struct Extra {
    const X* x;
    long ldx;
    const X* panel;
    int k;
};

// Weights that a pass over half a panel fetches for the passes over the next panel: a part of them each, so that memory is
// read all the while. step: bytes for each word of the reduction dimension.
struct Ahead {
    const char* at;
    long step;
};

// Addresses of a tile's rows: an address is a pointer and 1, 2, 4 or 8 times a register, so that the addresses of all
// rows take one register for each odd number below ROWS and no instruction. Left to itself, the compiler takes a
// pointer for each row, keeps what it has no register for in memory, and loads it once for every step.
template <int ROWS>
struct RowAddresses {
    long odd[(ROWS + 1) / 2];  // bytes to rows 1, 3, 5 …

    explicit RowAddresses(long row_bytes) {
#pragma GCC unroll 6
        for (int i = 0; i < (ROWS + 1) / 2; i++) {
            odd[i] = (2 * i + 1) * row_bytes;
            asm("" : "+r"(odd[i]));
        }
    }
    template <class X>
    CHORUS_INLINE const X* of(const X* x, int row) const {
        if (!row) return x;
        const int twos = __builtin_ctz(row);
        return (const X*)((const char*)x + (odd[(row >> twos) / 2] << twos));
    }
};

// acc[r][h] += Σ_k x[r, k] · w[16·h …, k] over WORDS words of the reduction dimension.
template <class T, int ROWS, int HALVES, bool FETCH, int WORDS>
CHORUS_INLINE void multiply_words(const Act<T>* x, const RowAddresses<ROWS>& rows, const T* w, Floats (*acc)[HALVES],
                                  Ahead& ahead) {
    using K = Kind<T>;
    using A = Kind<Act<T>>;
    if constexpr (FETCH && HALVES == 2) {
#pragma GCC unroll 4
        for (int i = 0; i < 2 * WORDS; i++) prefetch(w, kPrefetchBytes + 64 * i);
    } else if constexpr (FETCH) {
#pragma GCC unroll 2
        for (int i = 0; i < WORDS; i++) prefetch_later(ahead.at + i * ahead.step);
        ahead.at += WORDS * ahead.step;
    }
#pragma GCC unroll 4
    for (int s = 0; s < WORDS * K::steps; s++) {
        typename A::Reg weights[HALVES];
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++)
            weights[h] = K::step(load_words(w + (s / K::steps * kPanel + h * kLanes) * K::pair), s % K::steps);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            const auto b = A::broadcast(rows.of(x, r) + s * (K::pair / K::steps));
#pragma GCC unroll 2
            for (int h = 0; h < HALVES; h++) acc[r][h] = A::mac(acc[r][h], weights[h], b);
        }
    }
}

// acc[r][h] += Σ_k x[r, k] · w[16·h …, k], from the first k to the last.
template <class T, int ROWS, int HALVES, bool FETCH>
inline void multiply(const Act<T>* x, long ldx, const T* w, int k, Floats (*acc)[HALVES], Ahead ahead = {}) {
    constexpr int step = kWords * Kind<T>::pair;
    const RowAddresses<ROWS> rows(ldx * (long)sizeof(Act<T>));
    for (const Act<T>* end = x + k / step * step; x < end; x += step, w += step * kPanel)
        multiply_words<T, ROWS, HALVES, FETCH, kWords>(x, rows, w, acc, ahead);
    if (kWords > 1 && k % step) multiply_words<T, ROWS, HALVES, FETCH, 1>(x, rows, w, acc, ahead);
}

// ROWS rows against HALVES times 16 columns of a panel, as `panel` and `y` begin with them. Not inline: heights beside each
// other in one function leave the compiler too few registers for each.
template <class T, int ROWS, int HALVES>
__attribute__((noinline)) void tile(const Act<T>* x, long ldx, const T* panel, int k, float* y, long ldy, int columns,
                                    bool accumulate, const float* bias, const Extra<Act<T>>* extra, int half,
                                    Ahead ahead) {
    Head heads[HALVES];
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; h++) heads[h] = head(std::max(0, columns - h * kLanes));
    Floats acc[ROWS][HALVES];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) {
            acc[r][h] = accumulate ? load16(y + r * ldy + h * kLanes, heads[h]) : floats(0);
            if (bias) acc[r][h] = acc[r][h] + load16(bias + h * kLanes, heads[h]);
        }
    multiply<T, ROWS, HALVES, true>(x, ldx, panel, k, acc, ahead);
    if (extra)
        multiply<Act<T>, ROWS, HALVES, false>(extra->x, extra->ldx, extra->panel + half * Kind<Act<T>>::pair, extra->k,
                                              acc);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++)
            if (!h || bits(heads[h])) store16(y + r * ldy + h * kLanes, acc[r][h], heads[h]);
}

// Another thread may have written them: the product would wait for them before its first step.
inline void fetch_outputs(const float* y, long ldy, int rows) {
    for (int r = 0; r < rows; r++) {
        prefetch(y + r * ldy);
        prefetch(y + r * ldy + kLanes);
    }
}

// All `rows` rows against one panel, in tiles of about equal height: a tile of few rows takes as long as one of some more.
// more: the panel behind this one comes next.
template <class T>
inline void panel_product(const Act<T>* x, long ldx, int rows, const T* panel, int k, float* y, long ldy, int columns,
                          bool accumulate, const float* bias, const Extra<Act<T>>* extra = nullptr, bool more = false) {
    Extra<Act<T>> here{};
    if (extra) here = *extra, extra = &here;
    constexpr long word = kPanel * Kind<T>::pair * sizeof(T);
    const long step = more ? word / (2 * ((rows + kRows - 1) / kRows)) : 0;
    Ahead ahead{(const char*)(more ? panel + panel_elems<T>(k) : panel), step};
    for (int tiles = (rows + kRows - 1) / kRows; tiles > 0; tiles--) {
        const int height = (rows + tiles - 1) / tiles;
        if (accumulate) fetch_outputs(y + height * ldy, ldy, std::min(height, rows - height));
        with_number<kRows>(height, [&](auto n) {
            constexpr int halves = n() <= kWideRows ? 2 : 1;  // of the panel in registers at once
            for (int c = 0; c < columns; c += halves * kLanes, ahead.at += step * (k / Kind<T>::pair))
                tile<T, n(), halves>(x, ldx, panel + c * Kind<T>::pair, k, y + c, ldy, columns - c, accumulate,
                                     bias ? bias + c : nullptr, extra, c, ahead);
        });
        rows -= height, x += height * ldx, y += height * ldy, here.x += height * here.ldx;
    }
}

// The same against a panel of the model's weights, in bf16 by tiles where the level has them. What is `extra`, an adapter's,
// is added as where it comes by itself.
template <class T>
inline void weights_product(const Act<T>* x, long ldx, int rows, const T* panel, int k, float* y, long ldy, int columns,
                            bool accumulate, const float* bias, const Extra<Act<T>>* extra = nullptr,
                            bool more = false) {
#ifdef CHORUS_AMX
    if constexpr (std::is_same_v<T, bf16>) {
        tiles_product<AmxTiles>(x, ldx, rows, panel, k, y, ldy, columns, accumulate, bias, kPrefetchBytes);
        if (extra)
            panel_product<bf16>(extra->x, extra->ldx, rows, extra->panel, extra->k, y, ldy, columns, true, nullptr);
        return;
    }
#endif
    panel_product<T>(x, ldx, rows, panel, k, y, ldy, columns, accumulate, bias, extra, more);
}

struct Tile {
    int row, rows, column, columns;
};

// A product as units of work for the team: (row chunk, panel), panels fastest so that the rows stay in L2.
template <class T>
struct Product {
    const Act<T>* x;
    long ldx;
    int rows;
    const T* w;
    int n, k;
    float* y;
    long ldy;
    bool accumulate;
    const float* bias;
    const std::vector<int>* cuts = nullptr;  // where the row chunks begin and the last ends; else every kRowChunk rows

    int chunks() const { return cuts ? (int)cuts->size() - 1 : (rows + kRowChunk - 1) / kRowChunk; }
    int panels() const { return (n + kPanel - 1) / kPanel; }
    int units() const { return chunks() * panels(); }
    Tile tile_of(int unit) const {
        const int chunk = unit / panels(), column = unit % panels() * kPanel;
        const int row = cuts ? (*cuts)[chunk] : chunk * kRowChunk,
                  end = cuts ? (*cuts)[chunk + 1] : std::min(rows, row + kRowChunk);
        return {row, end - row, column, n - column < kPanel ? n - column : kPanel};
    }
    // more: the next unit runs on the same thread.
    void run(int unit, bool more = false) const {
        const Tile t = tile_of(unit);
        float* out = y + t.row * ldy + t.column;
        if (accumulate && more) fetch_outputs(out + kPanel, ldy, std::min(t.rows, kRows));
        run(t, t.row, t.rows, out, ldy, nullptr, more);
    }
    // Some rows of a tile, to `out`.
    void run(const Tile& t, int row, int rows, float* out, long ldo, const Extra<Act<T>>* extra,
             bool more = false) const {
        weights_product<T>(x + row * ldx, ldx, rows, w + (long)t.column / kPanel * panel_elems<T>(k), k, out, ldo,
                           t.columns, accumulate, bias ? bias + t.column : nullptr, extra, more);
    }
};

}  // namespace chorus
