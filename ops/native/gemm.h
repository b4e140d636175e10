// y[m, n] (+)= bias[n] + Σ_k x[m, k] · w[n, k] with w packed in panels of 32 output columns: [N/32][K/pair][32][pair].
//
// One packed copy serves decode (a few rows: the panel streams from memory once) and prefill (many rows: the panel
// stays in L2 while tiles of 12 rows pass by).
#pragma once
#include <algorithm>
#include <vector>
#include "simd.h"

namespace chorus {

constexpr int kPanel = 32;    // output columns of a panel
constexpr int kRows = 12;     // rows of the largest register tile: 12 × 2 accumulators
constexpr long kPrefetchBytes = 8192;
constexpr int kSegmentChunk = 300;  // the same where every chunk has an adapter's rows to pack
constexpr int kShortChunk = kSegmentChunk / 4;  // fewer rows are not worth a pass over the weights
constexpr int kRowChunk = 192;  // rows whose activations stay in L2 while panels pass

template <class T> inline size_t panel_elems(int k) { return (size_t)k * kPanel; }

// More of the reduction dimension for the same outputs, from other memory: y += Σ_k x[m, k] · w[n, k].
template <class T>
struct Extra {
    const T* x;
    long ldx;
    const T* panel;
    int k;
};

template <class T, int ROWS>
inline void tile(const T* x, long ldx, const T* panel, int k, float* y, long ldy, int columns, bool accumulate,
                 const float* bias, const Extra<T>* extra) {
    using K = Kind<T>;
    const __mmask16 m0 = head_mask(columns), m1 = head_mask(columns > kLanes ? columns - kLanes : 0);
    __m512 acc[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
        acc[r][0] = accumulate ? load16(y + r * ldy, m0) : _mm512_setzero_ps();
        acc[r][1] = accumulate ? load16(y + r * ldy + kLanes, m1) : _mm512_setzero_ps();
        if (bias) {
            acc[r][0] = _mm512_add_ps(acc[r][0], load16(bias, m0));
            acc[r][1] = _mm512_add_ps(acc[r][1], load16(bias + kLanes, m1));
        }
    }
    const T* w = panel;
    for (int i = 0; i < k; i += K::pair, w += kPanel * K::pair) {
        prefetch(w, kPrefetchBytes);
        prefetch(w, kPrefetchBytes + 64);
        const auto w0 = K::load(w), w1 = K::load(w + kLanes * K::pair);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            const auto b = K::broadcast(x + r * ldx + i);
            acc[r][0] = K::mac(acc[r][0], w0, b);
            acc[r][1] = K::mac(acc[r][1], w1, b);
        }
    }
    if (extra) {
        x = extra->x;
        w = extra->panel;
        for (int i = 0; i < extra->k; i += K::pair, w += kPanel * K::pair) {
            const auto w0 = K::load(w), w1 = K::load(w + kLanes * K::pair);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                const auto b = K::broadcast(x + r * extra->ldx + i);
                acc[r][0] = K::mac(acc[r][0], w0, b);
                acc[r][1] = K::mac(acc[r][1], w1, b);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
        store16(y + r * ldy, acc[r][0], m0);
        if (m1) store16(y + r * ldy + kLanes, acc[r][1], m1);
    }
}

// Another thread may have written them: the product would wait for them before its first step.
inline void fetch_outputs(const float* y, long ldy, int rows) {
    for (int r = 0; r < rows; r++) {
        prefetch(y + r * ldy);
        prefetch(y + r * ldy + kLanes);
    }
}

// All `rows` rows against one panel, in tiles of about equal height: a tile of few rows takes as long as one of some more.
template <class T>
inline void panel_product(const T* x, long ldx, int rows, const T* panel, int k, float* y, long ldy, int columns,
                          bool accumulate, const float* bias, const Extra<T>* extra = nullptr) {
    Extra<T> here{};
    if (extra) here = *extra, extra = &here;
    for (int tiles = (rows + kRows - 1) / kRows; tiles > 0; tiles--) {
        const int height = (rows + tiles - 1) / tiles;
        if (accumulate) fetch_outputs(y + height * ldy, ldy, std::min(height, rows - height));
        switch (height) {
#define CHORUS_TILE(n) \
    case n: tile<T, n>(x, ldx, panel, k, y, ldy, columns, accumulate, bias, extra); break;
            // clang-format off
            CHORUS_TILE(1) CHORUS_TILE(2) CHORUS_TILE(3) CHORUS_TILE(4) CHORUS_TILE(5) CHORUS_TILE(6)
            CHORUS_TILE(7) CHORUS_TILE(8) CHORUS_TILE(9) CHORUS_TILE(10) CHORUS_TILE(11) CHORUS_TILE(12)
            // clang-format on
#undef CHORUS_TILE
                    default : break;
        }
        rows -= height, x += height * ldx, y += height * ldy, here.x += height * here.ldx;
    }
}

struct Tile {
    int row, rows, column, columns;
};

// A product as units of work for the team: (row chunk, panel), panels fastest so that the rows stay in L2.
template <class T>
struct Product {
    const T* x;
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
        run(t, t.row, t.rows, out, ldy, nullptr);
    }
    // Some rows of a tile, to `out`.
    void run(const Tile& t, int row, int rows, float* out, long ldo, const Extra<T>* extra) const {
        panel_product<T>(x + row * ldx, ldx, rows, w + (long)t.column / kPanel * panel_elems<T>(k), k, out, ldo,
                         t.columns, accumulate, bias ? bias + t.column : nullptr, extra);
    }
};

}  // namespace chorus
