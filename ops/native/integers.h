// Products of weights that are small whole numbers with a scale for each group of inputs:
//
//   y[m, n] (+)= bias[n] + Σ_g scale[g, n] · Σ_{k in g} (w[n, k] - center - zero[g, n]) · x[m, k]
//
// with w in panels of 32 output columns, as in gemm.h. A word holds what a column has for some inputs that follow each other: four of 8
// bits, or eight of 4. It is widened to pairs of 16 bits in registers: bits 0 … hold the first pair's first input, bits
// 16 … its second. x is in fixed point, so that a block's sum is exact; blocks are added in float32, in order.
#pragma once
#include <numeric>
#include "fixed_rows.h"
#include "gemm.h"

namespace chorus {

// How a matrix's weights are whole numbers. Mirrors IntegersDescriptor of ops/native_descriptors.py.
//
//   scales  [panels, groups, kPanel]
//   zeros   [panels, groups, kPanel] bf16: zero points less the center; null: all are the center
//   bits    of a weight, 4 or 8; 0: weights are no whole numbers
//   group   inputs that share a scale, a multiple of 8; the last group may be shorter
struct Integers {
    const float* scales;
    const bf16* zeros;
    int32_t bits, group;
};

// A panel of such weights.
//
//   data            [⌈k / 8⌉ · bits, kPanel] bytes: see above
//   scales, zeros   [groups, kPanel]
struct IntegerPanel {
    const uint8_t* data;
    int k;
    const float* scales;
    const bf16* zeros;
    int bits, group;

    // Inputs of a block: they have one scale.
    int block() const { return group >= k ? kFixedBlock : std::gcd(group, kFixedBlock); }
    IntegerPanel from(int column) const {
        return {data + 4 * column, k, scales + column, zeros ? zeros + column : nullptr, bits, group};
    }
};

inline size_t integer_panel_bytes(int k, int bits) { return (size_t)((k + 7) / 8) * bits * kPanel; }

// Weights of some bits: inputs of a word, and what a weight of 0 is stored as.
template <int BITS> struct WholeWord {
    static constexpr int inputs = 32 / BITS, pairs = inputs / 2, center = 1 << (BITS - 1);
    static constexpr uint32_t mask = (1u << BITS) - 1;
    // Both weights of pair P.
    template <int P> CHORUS_INLINE static Words pair(Words w) {
        if constexpr (P == pairs - 1) return down16<BITS * P>(w);
        else return (P ? w >> BITS * P : w) & words(mask << 16 | mask);
    }
    // The weight of input i alone, without the center.
    CHORUS_INLINE static int one(uint32_t word, int i) {
        return (int)(word >> (16 * (i % 2) + BITS * (i / 2)) & mask) - center;
    }
};

CHORUS_INLINE Words both_of(const int16_t* p) {
    uint32_t two;
    memcpy(&two, p, 4);
    return words(two);
}

// ROWS rows against HALVES times 16 columns of a panel; parameters as of `tile` in gemm.h.
//
//   x  its first row is the tile's
template <class T, int BITS, int ROWS, int HALVES>
__attribute__((noinline)) void integer_tile(const FixedRows& x, const IntegerPanel& w, const Outputs& out,
                                            Ahead ahead) {
    using S = WholeWord<BITS>;
    constexpr int parts = kParts<T>, tile = ROWS * HALVES, word = kPanel * 4;
    // Whole numbers may be added in any order: few rows have several sums each, as each waits for the one before.
    constexpr int chains = 3 * tile * parts * S::pairs < 2 * kTileVectors ? S::pairs : 1;
    Head heads[HALVES];
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; h++) heads[h] = head(std::max(0, out.columns - h * kLanes));
    alignas(64) float acc[tile * kLanes];
#pragma GCC unroll 24
    for (int i = 0; i < tile; i++) {
        const int r = i / HALVES, h = i % HALVES;
        Floats start = out.accumulate ? load16(out.y[r] + h * kLanes, heads[h]) : floats(0);
        if (out.bias) start = start + load16(out.bias + h * kLanes, heads[h]);
        store16(acc + i * kLanes, start);
    }
    const RowAddresses<ROWS> rows(x.values.stride * (long)sizeof(int16_t));
    const int block = w.block();
    const uint8_t* panel = w.data;
    for (int b = 0, first = 0; first < w.k; b++, first += block) {
        Words sums[parts][tile][chains];
#pragma GCC unroll 2
        for (int p = 0; p < parts; p++)
#pragma GCC unroll 24
            for (int i = 0; i < tile; i++) {
                sums[p][i][0] = words((uint32_t)(-S::center * x.sums[i / HALVES][p * x.blocks + b]));
#pragma GCC unroll 4
                for (int c = 1; c < chains; c++) sums[p][i][c] = words(0);
            }
        const int16_t *at = x.values.data + first, *end = at + std::min(block, w.k - first);
        for (; at < end; at += S::inputs, panel += word) {
            if constexpr (HALVES == 2) {
                prefetch(panel, kPrefetchBytes);
                prefetch(panel, kPrefetchBytes + 64);
            } else {
                prefetch_later(ahead.at);
                ahead.at += ahead.step;
            }
            Words weights[HALVES];
#pragma GCC unroll 2
            for (int h = 0; h < HALVES; h++) weights[h] = load_words(panel + h * kLanes * 4);
            const auto add_pair = [&](auto number) CHORUS_INLINED {
                constexpr int q = number();
                Words pair[HALVES];
#pragma GCC unroll 2
                for (int h = 0; h < HALVES; h++) pair[h] = S::template pair<q>(weights[h]);
#pragma GCC unroll 2
                for (int p = 0; p < parts; p++)
#pragma GCC unroll 12
                    for (int r = 0; r < ROWS; r++) {
                        const Words values = both_of(rows.of(at + p * x.plane, r) + 2 * q);
#pragma GCC unroll 2
                        for (int h = 0; h < HALVES; h++) {
                            Words& sum = sums[p][r * HALVES + h][q % chains];
                            sum = mac16(sum, pair[h], values);
                        }
                    }
            };
            add_pair(std::integral_constant<int, 0>{});
            add_pair(std::integral_constant<int, 1>{});
            if constexpr (S::pairs > 2) {
                add_pair(std::integral_constant<int, 2>{});
                add_pair(std::integral_constant<int, 3>{});
            }
        }
#pragma GCC unroll 2
        for (int p = 0; p < parts; p++)
#pragma GCC unroll 24
            for (int i = 0; i < tile; i++)
#pragma GCC unroll 4
                for (int c = 0; c < chains; c++) in_register(sums[p][i][c]);
        const long group = (long)(first / w.group) * kPanel;
        Floats scales[HALVES], zeros[HALVES];
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) {
            scales[h] = load16(w.scales + group + h * kLanes);
            zeros[h] = w.zeros ? load16(w.zeros + group + h * kLanes) : floats(0);
        }
#pragma GCC unroll 24
        for (int i = 0; i < tile; i++) {
            const int r = i / HALVES, h = i % HALVES;
            Floats all = floats(0), inputs = floats(0);
#pragma GCC unroll 2
            for (int p = 0; p < parts; p++) {
                Words sum = sums[p][i][0];
#pragma GCC unroll 4
                for (int c = 1; c < chains; c++) sum = sum + sums[p][i][c];
                const Floats own = from_ints(sum), x_own = floats((float)x.sums[r][p * x.blocks + b]);
                all = p ? fma(all, floats(1 << kPartBits), own) : own;
                inputs = p ? fma(inputs, floats(1 << kPartBits), x_own) : x_own;
            }
            if (w.zeros) all = fnma(zeros[h], inputs, all);
            store16(acc + i * kLanes, fma(all * floats(x.factors[r][b]), scales[h], load16(acc + i * kLanes)));
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < tile; i++) {
        const int r = i / HALVES, h = i % HALVES;
        if (!h || bits(heads[h])) store16(out.y[r] + h * kLanes, load16(acc + i * kLanes), heads[h]);
    }
}

// out (+)= x · wᵀ + bias: rows against one panel; see panel_product.
template <class T, int BITS>
inline void integers_product_of(FixedRows x, int rows, const IntegerPanel& w, Outputs out, bool more) {
    constexpr int most = kRows / kParts<T>, wide = std::max(1, kWideRows / kParts<T>);
    int tiles = (rows + most - 1) / most;
    const long words = (w.k + WholeWord<BITS>::inputs - 1) / WholeWord<BITS>::inputs;
    const long step = more ? kPanel * 4 / (2 * tiles) : 0;
    const auto* next = (const char*)w.data;
    Ahead ahead{more ? next + integer_panel_bytes(w.k, BITS) : next, step};
    for (; tiles > 0; tiles--) {
        const int height = (rows + tiles - 1) / tiles;
        if (out.accumulate) fetch_outputs(out.y.from(height), std::min(height, rows - height));
        with_number<most>(height, [&](auto n) {
            constexpr int halves = n() <= wide ? 2 : 1;
            for (int c = 0; c < out.columns; c += halves * kLanes, ahead.at += step * words)
                integer_tile<T, BITS, n(), halves>(x, w.from(c), out.from(0, c), ahead);
        });
        rows -= height, x = x.from(height), out = out.from(height);
    }
}

template <class T>
inline void integers_product(const FixedRows& x, int rows, const IntegerPanel& w, const Outputs& out, bool more) {
    if (w.bits == 4) integers_product_of<T, 4>(x, rows, w, out, more);
    else integers_product_of<T, 8>(x, rows, w, out, more);
}

// The weights of a panel as float32: [k, kPanel].
template <int BITS>
inline void widen_panel_of(const IntegerPanel& w, float* out) {
    using S = WholeWord<BITS>;
    for (int k = 0; k < w.k; k++) {
        const auto* word = (const uint32_t*)w.data + (long)(k / S::inputs) * kPanel;
        const long group = (long)(k / w.group) * kPanel;
        for (int c = 0; c < kPanel; c++) {
            const float zero = w.zeros ? widen(w.zeros[group + c]) : 0;
            out[(long)k * kPanel + c] = (S::one(word[c], k % S::inputs) - zero) * w.scales[group + c];
        }
    }
}
inline void widen_panel(const IntegerPanel& w, float* out) {
    if (w.bits == 4) widen_panel_of<4>(w, out);
    else widen_panel_of<8>(w, out);
}

}  // namespace chorus
