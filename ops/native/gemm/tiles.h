// Products of bf16 by tile registers (AMX): y[m, n] (+)= Σ_k x[m, k] · w[n, k], with w in the panels of gemm.h.
//
// A tile's product takes 32 of the reduction dimension: it adds up the products of their even elements and of their odd
// ones, and both to the output. So a row's bits do not depend on the rows beside it, and other levels have other bits.
// All rows of a step are multiplied so, also one alone.
#pragma once
#include <algorithm>
#ifdef CHORUS_AMX
#include <immintrin.h>
#endif
#include "gemm/operands.h"

namespace chorus {

constexpr int kTileRows = 16, kTileColumns = 16, kTileDepth = 32;
constexpr int kTilePanel = 2 * kTileColumns;  // columns of a panel

// Tile registers: 0 to 3 hold sums (two of the upper rows, two of the lower), 4 and 5 rows of x, 6 and 7 halves of a panel.
#ifdef CHORUS_AMX
struct AmxTiles {
    // Give the tiles their shapes. upper, lower: rows, from 1 to 16; lower may be 0, and its tiles are then not to be used.
    static void configure(int upper, int lower) {
        alignas(64) struct {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        static_assert(sizeof shape == 64);
        const int rows[8] = {upper, upper, lower, lower, upper, lower, kTileDepth / 2, kTileDepth / 2};
        for (int tile = 0; tile < 8; tile++)
            if (rows[tile]) shape.rows[tile] = (uint8_t)rows[tile], shape.row_bytes[tile] = 64;
        _tile_loadconfig(&shape);
    }
    static void release() { _tile_release(); }
    // By asm: the intrinsics are macros that take a register's number as they are written.
    template <int TILE> static void zero() { asm volatile("tilezero %%tmm%c0" : : "i"(TILE)); }
    template <int TILE> static void load(const void* from, long row_bytes) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(row_bytes), "i"(TILE) : "memory");
    }
    template <int TILE> static void store(void* to, long row_bytes) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(row_bytes), "i"(TILE) : "memory");
    }
    template <int SUMS, int ROWS, int COLUMNS> static void multiply() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(ROWS), "i"(COLUMNS));
    }
};
#endif

// Sums of up to 32 rows, as tiles are configured, over `depth` of 32 from x and from the panel.
//
//   x      [rows, 32]
//   panel  [16, kTilePanel, 2]
//   two    there are more than 16 rows
template <class Tiles>
CHORUS_INLINE void multiply_tiles(Rows<const bf16> x, const bf16* panel, bool two) {
    constexpr long word = 2 * kTilePanel * sizeof(bf16);
    const long row_bytes = x.stride * (long)sizeof(bf16);
    Tiles::template load<6>(panel, word);
    Tiles::template load<7>(panel + 2 * kTileColumns, word);
    Tiles::template load<4>(x.data, row_bytes);
    Tiles::template multiply<0, 4, 6>();
    Tiles::template multiply<1, 4, 7>();
    if (!two) return;
    Tiles::template load<5>(x[kTileRows], row_bytes);
    Tiles::template multiply<2, 5, 6>();
    Tiles::template multiply<3, 5, 7>();
}

// The sums of up to 32 rows from memory, or to it. two: there are more than 16 rows.
template <class Tiles>
CHORUS_INLINE void load_tiles(Rows<const float> from, bool two) {
    const long row_bytes = from.stride * (long)sizeof(float);
    Tiles::template load<0>(from.data, row_bytes);
    Tiles::template load<1>(from.data + kTileColumns, row_bytes);
    if (!two) return;
    Tiles::template load<2>(from[kTileRows], row_bytes);
    Tiles::template load<3>(from[kTileRows] + kTileColumns, row_bytes);
}
template <class Tiles>
CHORUS_INLINE void store_tiles(Rows<float> to, bool two) {
    const long row_bytes = to.stride * (long)sizeof(float);
    Tiles::template store<0>(to.data, row_bytes);
    Tiles::template store<1>(to.data + kTileColumns, row_bytes);
    if (!two) return;
    Tiles::template store<2>(to[kTileRows], row_bytes);
    Tiles::template store<3>(to[kTileRows] + kTileColumns, row_bytes);
}

// out (+)= x · wᵀ + bias: rows against one panel.
//
//   x               [rows, k]
//   w               a panel
//   out             [rows, columns]
//   prefetch_bytes  how far ahead of the panel memory is fetched while the first rows pass
template <class Tiles>
inline void tiles_gemm(Rows<const bf16> x, int rows, Panel<bf16> w, Outputs out, long prefetch_bytes) {
    alignas(64) float memory[2 * kTileRows * kTilePanel];
    const Rows<float> sums{memory, kTilePanel};
    const bool direct = out.columns == kTilePanel;
    int upper = 0, lower = 0;  // rows that the tiles are configured for
    for (bool first = true; rows > 0; first = false) {
        const int height = std::min(rows, 2 * kTileRows);
        const bool two = height > kTileRows;
        if (upper != std::min(height, kTileRows) || lower != height - upper) {
            upper = std::min(height, kTileRows), lower = height - upper;
            Tiles::configure(upper, lower);
        }
        if (out.accumulate && direct && !out.bias) {
            load_tiles<Tiles>(out.y, two);
        } else if (out.accumulate || out.bias) {
            for (int r = 0; r < height; r++)
                for (int c = 0; c < kTilePanel; c++)
                    sums[r][c] =
                        c < out.columns ? (out.accumulate ? out.y[r][c] : 0) + (out.bias ? out.bias[c] : 0) : 0;
            load_tiles<Tiles>(sums, two);
        } else {
            Tiles::template zero<0>(), Tiles::template zero<1>();
            if (two) Tiles::template zero<2>(), Tiles::template zero<3>();
        }
        const int whole = w.k / kTileDepth * kTileDepth, rest = w.k - whole;
        for (int at = 0; at < whole; at += kTileDepth) {
            const bf16* here = w.data + (long)at * kTilePanel;
            if (first)
                for (int i = 0; i < kTileDepth; i++) prefetch(here, prefetch_bytes + 64 * i);
            multiply_tiles<Tiles>(x.from(0, at), here, two);
        }
        if (rest) {  // with zeros beyond it
            alignas(64) bf16 last[2 * kTileRows * kTileDepth] = {}, weights[kTileDepth * kTilePanel] = {};
            for (int r = 0; r < height; r++) memcpy(last + r * kTileDepth, x[r] + whole, rest * sizeof(bf16));
            memcpy(weights, w.data + (long)whole * kTilePanel, (size_t)rest * kTilePanel * sizeof(bf16));
            multiply_tiles<Tiles>({last, kTileDepth}, weights, two);
        }
        store_tiles<Tiles>(direct ? out.y : sums, two);
        if (!direct)
            for (int r = 0; r < height; r++) memcpy(out.y[r], sums[r], out.columns * sizeof(float));
        rows -= height, x = x.from(height), out.y = out.y.from(height);
    }
    Tiles::release();  // a thread that goes to other work leaves the system no tiles to save
}

// True if tiles give a product of small whole numbers, with exact sums: of one, of some and of more rows than a pair of
// tiles has, an odd number of words, some of a panel's columns, and every start.
template <class Tiles>
inline bool tiles_are_exact() {
    constexpr int most = 50, k = 2 * kTileDepth + 6, ld = k + 2;
    const auto number = [](int i) { return (float)(i * 7 % 13 - 6); };
    const auto narrow = [](float v) {
        uint32_t bits;
        memcpy(&bits, &v, 4);
        return (bf16)(bits >> 16);
    };
    bf16 x[most * ld], panel[k * kTilePanel];
    float bias[kTilePanel], y[most * kTilePanel];
    for (int i = 0; i < most * ld; i++) x[i] = narrow(number(i));
    for (int i = 0; i < k * kTilePanel; i++) panel[i] = narrow(number(3 * i + 1));
    for (int c = 0; c < kTilePanel; c++) bias[c] = number(c + 5);
    for (const int rows : {1, 5, 16, 17, 32, most})
        for (const int columns : {kTilePanel, 11})
            for (int start = 0; start < 4; start++) {
                const bool accumulate = start & 1;
                const float* added = start & 2 ? bias : nullptr;
                for (int i = 0; i < most * kTilePanel; i++) y[i] = number(i + 2);
                tiles_gemm<Tiles>({x, ld}, rows, {panel, k}, {{y, kTilePanel}, columns, accumulate, added}, 0);
                for (int r = 0; r < most; r++)
                    for (int c = 0; c < kTilePanel; c++) {
                        float wanted = number(r * kTilePanel + c + 2);
                        if (r < rows && c < columns) {
                            wanted = (accumulate ? wanted : 0) + (added ? added[c] : 0);
                            for (int i = 0; i < k; i++)
                                wanted += widen(x[r * ld + i]) * widen(panel[(i / 2 * kTilePanel + c) * 2 + i % 2]);
                        }
                        if (y[r * kTilePanel + c] != wanted) return false;
                    }
            }
    return true;
}

}  // namespace chorus
