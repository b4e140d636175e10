// Products of a model's weights in any form, as units of work for the team.
#pragma once
#include <algorithm>
#include <vector>
#include "gemm/gemm.h"
#include "gemm/integers.h"
#include "gemm/tiles.h"

namespace chorus {

// All weights that rows are multiplied with at once: of a projection, or of some side by side.
//
//   w                [⌈outputs / kPanel⌉] panels
//   bias             [outputs] float32; null: none
//   outputs, inputs  columns of y, and of x
//   integers         how w is whole numbers; without bits where it is of T
template <class T>
struct Weights {
    const void* w;
    const float* bias;
    int outputs, inputs;
    Integers integers;

    int panels() const { return (outputs + kPanel - 1) / kPanel; }
    // Columns of y that a panel gives. column: its first, a multiple of kPanel.
    int columns(int column) const { return outputs - column < kPanel ? outputs - column : kPanel; }
    // The panel of weights of T, and of whole numbers.
    Panel<T> panel(int column) const { return {(const T*)w + (long)column / kPanel * panel_elems<T>(inputs), inputs}; }
    IntegerPanel integer_panel(int column) const {
        const int index = column / kPanel, groups = (inputs + integers.group - 1) / integers.group;
        const long scales = (long)index * groups * kPanel;
        return {(const uint8_t*)w + index * integer_panel_bytes(inputs, integers.bits),
                inputs,
                integers.scales + scales,
                integers.zeros ? integers.zeros + scales : nullptr,
                integers.bits,
                integers.group,
                integers.input_bits,
                integers.input_block};
    }
};

// Rows of a step that are multiplied.
//
//   x             [·, inputs]
//   first, count  the chunk that the rows are of
//   row, rows     the rows
template <class T>
struct ChunkRows {
    Rows<const Act<T>> x;
    int first, count, row, rows;
};

// out (+)= x · wᵀ + bias (+ extra) of one panel. In bf16 by tiles where the level has them; whole numbers by themselves. What
// is `extra`, an adapter's, is added as where it comes by itself.
//
//   column  the panel's first
//   fixed   the thread's, of this product
//   other parameters as of panel_gemm
template <class T>
inline void weights_gemm(const ChunkRows<T>& chunk, const Weights<T>& w, int column, const Outputs& out,
                         FixedScratch<T>& fixed, const Extra<Act<T>>* extra = nullptr, bool more = false) {
    const Rows<const Act<T>> x = chunk.x.from(chunk.row);
    const auto add_extra = [&] {
        if (extra) panel_gemm<Act<T>>(extra->x, chunk.rows, extra->w, {out.y, out.columns, true, nullptr});
    };
    if (w.integers.bits) {
        const IntegerPanel panel = w.integer_panel(column);
        const auto multiply_as = [&](auto form) {
            using F = decltype(form);
            const FixedRows rows = fixed.template of<F>(chunk.x, chunk.first, chunk.count, w.inputs, panel.inputs());
            integers_gemm_as<F>(rows.from(chunk.row - chunk.first), chunk.rows, panel, out, more);
        };
        if (panel.input_bits == 8) multiply_as(Whole8{});
        else multiply_as(Fine<T>{});
        return add_extra();
    }
#ifdef CHORUS_AMX
    if constexpr (std::is_same_v<T, bf16>) {
        tiles_gemm<AmxTiles>(x, chunk.rows, w.panel(column), out, kPrefetchBytes);
        return add_extra();
    }
#endif
    panel_gemm<T>(x, chunk.rows, w.panel(column), out, extra, more);
}

struct Tile {
    int row, rows, column, columns;
};

// y (+)= x · wᵀ + bias as units of work for the team: (row chunk, panel), panels fastest so that the rows stay in L2.
//
//   x           [rows, inputs]
//   y           [rows, outputs]
//   fixed       the thread's that runs the units
//   accumulate  true: it is added to y
//   cuts        where the row chunks begin and the last ends; null: every kRowChunk rows
template <class T>
struct Gemm {
    Rows<const Act<T>> x;
    int rows;
    Weights<T> w;
    Rows<float> y;
    FixedScratch<T>* fixed;
    bool accumulate = false;
    const std::vector<int>* cuts = nullptr;

    int chunks() const { return cuts ? (int)cuts->size() - 1 : (rows + kRowChunk - 1) / kRowChunk; }
    int units() const { return chunks() * w.panels(); }
    int begin(int chunk) const { return cuts ? (*cuts)[chunk] : chunk * kRowChunk; }
    int end(int chunk) const { return cuts ? (*cuts)[chunk + 1] : std::min(rows, begin(chunk) + kRowChunk); }
    Tile tile_of(int unit) const {
        const int chunk = unit / w.panels(), column = unit % w.panels() * kPanel;
        return {begin(chunk), end(chunk) - begin(chunk), column, w.columns(column)};
    }
    // A unit, to y. more: the next unit runs on the same thread.
    void run(int unit, bool more = false) const {
        const Tile t = tile_of(unit);
        const Rows<float> out = y.from(t.row, t.column);
        if (accumulate && more) fetch_outputs(out.from(0, kPanel), std::min(t.rows, kRows));
        run(t, out, nullptr, more);
    }
    // A tile, or some of one's rows, to `out`. extra, more: see panel_gemm.
    void run(const Tile& t, Rows<float> out, const Extra<Act<T>>* extra = nullptr, bool more = false) const {
        const int chunk =
            cuts ? int(std::upper_bound(cuts->begin(), cuts->end() - 1, t.row) - cuts->begin()) - 1 : t.row / kRowChunk;
        weights_gemm<T>({x, begin(chunk), end(chunk) - begin(chunk), t.row, t.rows}, w, t.column,
                        {out, t.columns, accumulate, w.bias ? w.bias + t.column : nullptr}, *fixed, extra, more);
    }
};

}  // namespace chorus
