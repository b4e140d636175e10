// Products of weights that are small whole numbers with a scale for each group of inputs:
//
//   y[m, n] (+)= bias[n] + Σ_g scale[g, n] · Σ_{k in g} (w[n, k] - center - zero[g, n]) · x[m, k]
//
// with w in panels of 32 output columns, as in gemm.h. A word holds what a column has for some inputs that follow each other: four of 8
// bits, or eight of 4. It is widened to pairs of 16 bits in registers: bits 0 … hold the first pair's first input, bits
// 16 … its second. x is in fixed point, so that a block's sum is exact; blocks are added in float32, in order. Where x has 8
// bits and the level has products of bytes, a word's bytes, or the lower and the upper halves of them, are multiplied as they are.
#pragma once
#include <numeric>
#include "gemm/fixed_rows.h"
#include "gemm/gemm.h"
#include "units.h"

namespace chorus {

// How a matrix's weights are whole numbers. Described to Python by program/layout.h.
//
//   scales  [panels, groups, kPanel]
//   zeros   [panels, groups, kPanel] bf16: zero points less the center; null: all are the center
//   bits    of a weight, 4 or 8; 0: weights are no whole numbers
//   group   inputs that share a scale, a multiple of 8; the last group may be shorter
//   input_bits, input_block  of the activations: see FixedForm; a block is within a group
struct Integers {
    const float* scales;
    const bf16* zeros;
    int32_t bits, group, input_bits, input_block;
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
    int bits, group, input_bits, input_block;

    // Of the activations. Inputs of a block have one scale.
    FixedForm inputs() const { return {input_bits, group >= k ? input_block : std::gcd(group, input_block), bits}; }
    IntegerPanel from(int column) const {
        IntegerPanel found = *this;
        found.data += 4 * column, found.scales += column;
        if (zeros) found.zeros += column;
        return found;
    }
};

inline size_t integer_panel_bytes(int k, int bits) { return (size_t)((k + 7) / 8) * bits * kPanel; }

// Weights of some bits: inputs of a word, and what a weight of 0 is stored as.
template <int BITS> struct WholeWord {
    static constexpr int inputs = 32 / BITS, center = 1 << (BITS - 1);
    static constexpr uint32_t mask = (1u << BITS) - 1;
    // Both weights of pair P.
    template <int P> CHORUS_INLINE static Words pair(Words w) {
        if constexpr (P == inputs / 2 - 1) return down16<BITS * P>(w);
        else return (P ? w >> BITS * P : w) & words(mask << 16 | mask);
    }
    // Four weights as bytes: those in lower halves of bytes, or in upper ones.
    template <int P> CHORUS_INLINE static Words four(Words w) {
        if constexpr (BITS == 8) return w;
        else return (P ? w >> 4 : w) & words(0x0F0F0F0F);
    }
    // The weight of input i alone, without the center.
    CHORUS_INLINE static int one(uint32_t word, int i) {
        return (int)(word >> (16 * (i % 2) + BITS * (i / 2)) & mask) - center;
    }
};

CHORUS_INLINE Words broadcast_word(const char* p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return words(word);
}

// Products of words in steps: in each, four bytes of a row are multiplied.
template <class F, int BITS> struct WordSteps {
    static constexpr bool bytes = sizeof(typename F::Part) == 1;
    static constexpr int count = WholeWord<BITS>::inputs / (bytes ? 4 : 2);
    template <int Q> CHORUS_INLINE static Words weights(Words w) {
        if constexpr (bytes) return WholeWord<BITS>::template four<Q>(w);
        else return WholeWord<BITS>::template pair<Q>(w);
    }
    CHORUS_INLINE static Words add(Words acc, Words weights, Words values) {
#ifdef CHORUS_MAC8
        if constexpr (bytes) return mac8(acc, weights, values);
#endif
        return mac16(acc, weights, values);
    }
};

// ROWS rows against HALVES times 16 columns of a panel; parameters as of `tile` in gemm.h.
//
//   x  its first row is the tile's, stored as F
template <class F, int BITS, int ROWS, int HALVES>
__attribute__((noinline)) void integer_tile(const FixedRows& x, const IntegerPanel& w, const Outputs& out,
                                            Ahead ahead) {
    using S = WholeWord<BITS>;
    using Steps = WordSteps<F, BITS>;
    constexpr int parts = F::parts, tile = ROWS * HALVES, word = kPanel * 4, part_bytes = sizeof(typename F::Part);
    // Whole numbers may be added in any order: few rows have several sums each, as each waits for the one before.
    constexpr int chains = 3 * tile * parts * Steps::count < 2 * kTileVectors ? Steps::count : 1;
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
    const RowAddresses<ROWS> rows(x.values.stride);
    const int block = w.inputs().block;
    const uint8_t* panel = w.data;
    for (int b = 0, first = 0; first < w.k; b++, first += block) {
        Words sums[parts * tile * chains];  // of a part, a row and half a panel: `chains` each
        each<parts * tile * chains>([&](int number) CHORUS_INLINED {
            const int c = number % chains, i = number / chains % tile, p = number / (chains * tile);
            sums[number] = c ? words(0) : words((uint32_t)x.starts[i / HALVES][p * x.blocks + b]);
        });
        const char *at = x.values.data + first * part_bytes, *end = at + std::min(block, w.k - first) * part_bytes;
        for (; at < end; at += S::inputs * part_bytes, panel += word) {
            if constexpr (HALVES == 2) {
                prefetch(panel, kPrefetchBytes);
                prefetch(panel, kPrefetchBytes + 64);
            } else {
                prefetch_later(ahead.at);
                ahead.at += ahead.step;
            }
            Words weights[HALVES];
            each<HALVES>([&](int h) CHORUS_INLINED { weights[h] = load_words(panel + h * kLanes * 4); });
            each<Steps::count>([&](auto q) CHORUS_INLINED {
                Words some[HALVES];
                each<HALVES>([&](int h) CHORUS_INLINED { some[h] = Steps::template weights<q()>(weights[h]); });
                each<parts * ROWS>([&](int number) CHORUS_INLINED {
                    const int r = number % ROWS, p = number / ROWS;
                    const Words values = broadcast_word(rows.of(at + p * x.plane, r) + 4 * q());
                    each<HALVES>([&](int h) CHORUS_INLINED {
                        Words& sum = sums[(p * tile + r * HALVES + h) * chains + q() % chains];
                        sum = Steps::add(sum, some[h], values);
                    });
                });
            });
        }
        each<parts * tile * chains>([&](int i) CHORUS_INLINED { in_register(sums[i]); });
        const long group = (long)(first / w.group) * kPanel;
        Floats scales[HALVES];
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) scales[h] = load16(w.scales + group + h * kLanes);
        const auto add_block = [&](auto has_zeros) CHORUS_INLINED {
            each<tile>([&](int i) CHORUS_INLINED {
                const int r = i / HALVES, h = i % HALVES;
                Floats all = floats(0), inputs = floats(0);
                each<parts>([&](int p) CHORUS_INLINED {
                    Words sum = sums[(p * tile + i) * chains];
                    each<chains - 1>([&](int c) CHORUS_INLINED { sum = sum + sums[(p * tile + i) * chains + c + 1]; });
                    const Floats own = from_ints(sum);
                    all = p ? fma(all, floats(1 << kPartBits), own) : own;
                    if constexpr (has_zeros()) {
                        const Floats x_own = floats((float)x.sums[r][p * x.blocks + b]);
                        inputs = p ? fma(inputs, floats(1 << kPartBits), x_own) : x_own;
                    }
                });
                if constexpr (has_zeros()) all = fnma(load16(w.zeros + group + h * kLanes), inputs, all);
                float* to = acc + i * kLanes;
                store16(to, fma(all * floats(x.factors[r][b]), scales[h], load16(to)));
            });
        };
        if (w.zeros) add_block(std::true_type{});
        else add_block(std::false_type{});
    }
#pragma GCC unroll 24
    for (int i = 0; i < tile; i++) {
        const int r = i / HALVES, h = i % HALVES;
        if (!h || bits(heads[h])) store16(out.y[r] + h * kLanes, load16(acc + i * kLanes), heads[h]);
    }
}

// out (+)= x · wᵀ + bias: rows against one panel; see panel_gemm.
template <class F, int BITS>
inline void integers_gemm_of(FixedRows x, int rows, const IntegerPanel& w, Outputs out, bool more) {
    constexpr int most = kRows / F::parts, wide = std::max(1, kWideRows / F::parts);
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
                integer_tile<F, BITS, n(), halves>(x, w.from(c), out.from(0, c), ahead);
        });
        rows -= height, x = x.from(height), out = out.from(height);
    }
}

template <class F>
void integers_gemm_as(const FixedRows& x, int rows, const IntegerPanel& w, const Outputs& out, bool more) {
    if (w.bits == 4) integers_gemm_of<F, 4>(x, rows, w, out, more);
    else integers_gemm_of<F, 8>(x, rows, w, out, more);
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

#ifdef CHORUS_MAC8
CHORUS_UNIT_PRODUCTS void integers_gemm_as<Whole8>(const FixedRows&, int, const IntegerPanel&, const Outputs&, bool);
#endif
CHORUS_UNIT_PRODUCTS void integers_gemm_as<Whole16>(const FixedRows&, int, const IntegerPanel&, const Outputs&, bool);
CHORUS_UNIT_PRODUCTS void integers_gemm_as<Whole31>(const FixedRows&, int, const IntegerPanel&, const Outputs&, bool);

}  // namespace chorus
