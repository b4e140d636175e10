// (W + Σ scale·B·A) · vector from packed panels to packed panels: an adapter in a copy of the weights; the vector has a scale
// for each output, where the adapter has any.
//
// Every element is one chain of fused multiply-adds in float32, from W on and in order of rank, scaled and rounded once. Some
// inputs are worked on at a time, for all 32 outputs of a panel or half of them; what the adapter has for them streams past.
#pragma once
#include <cmath>
#include <limits>
#include <vector>
#include "team/buffer.h"
#include "program/descriptors.h"
#include "team/pool.h"
#include "lora/vectors.h"
#include "units.h"

namespace chorus {

constexpr float kLeastScale = 1e-6f;  // of an output: with less, what is merged can't be taken off again
constexpr int kInputs = kTileVectors >= 16 ? 8 : 6;  // that are worked on together
constexpr int kHalves = kInputs * 2 <= kTileVectors ? 2 : 1;  // 16 outputs each, in registers at once

// Some inputs of a panel, the first `count` of them, as float32: v[i][h] holds input i's outputs 16h …, counted from p's.
inline void load_inputs(const float* p, int count, Floats (*v)[kHalves]) {
#pragma GCC unroll 8
    for (int i = 0; i < kInputs; i++)
        for (int h = 0; h < kHalves; h++) v[i][h] = i < count ? load16(p + i * kPanel + h * kLanes) : floats(0);
}
inline void load_inputs(const bf16* p, int count, Floats (*v)[kHalves]) {
#pragma GCC unroll 4
    for (int i = 0; i < kInputs; i += 2)
        for (int h = 0; h < kHalves; h++) {
            const Words both = i < count ? load_words(p + i * kPanel + 2 * h * kLanes) : words(0);
            v[i][h] = widen_first(both);
            v[i + 1][h] = widen_second(both);
        }
}
inline void store_inputs(float* p, int count, const Floats (*v)[kHalves]) {
#pragma GCC unroll 8
    for (int i = 0; i < kInputs; i++)
        for (int h = 0; h < kHalves; h++)
            if (i < count) store16(p + i * kPanel + h * kLanes, v[i][h]);
}
inline void store_inputs(bf16* p, int count, const Floats (*v)[kHalves]) {
#pragma GCC unroll 4
    for (int i = 0; i < kInputs; i += 2)
        for (int h = 0; h < kHalves; h++) {
            const Words low = rounded(as_words(v[i][h])) >> 16,
                        high = rounded(as_words(v[i + 1][h])) & words(0xFFFF0000);
            if (i < count) store((uint32_t*)(p + i * kPanel + 2 * h * kLanes), low | high);
        }
}

template <class T>
class Merge {
   public:
    explicit Merge(Team& team) : team_(team), scratch_(team.most()) {}

    // Write the merged form of one matrix.
    //
    //   desc      the matrix and its adapters
    //   products  of the model
    //   arena     with the adapters
    //   returns   the largest ratio of the norms of a row of the result and of the row of W that it comes from, 0 where nothing
    //             changes; infinite where a result is not finite. Rounding makes an error in proportion to the result.
    float run(const MergeDesc& desc, const GemmShapes& shapes, const Arena<T>& arena);

   private:
    struct Task {
        const MergeDesc& desc;
        const std::vector<Target>& group;
        const Arena<T>& arena;
        int inputs, outputs;
    };
    struct Part {  // of an adapter, for one module
        Buffer<float> a;  // [inputs / kInputs, rank, kInputs]
        std::vector<float> b;  // [rank, kPanel] of the panel, scaled
        bool ready = false;
    };
    struct Scratch {
        std::vector<Part> parts;
        std::vector<const T*> rows;
        std::vector<T> spare;
        Buffer<float> wide;  // a panel
        std::vector<int> used;  // parts that change the panel
        float scale[kPanel];  // of the panel's outputs
        bool scaled;  // some scale is not 1
        float growth = 0;
    };

    void panel(const Task& task, Scratch& own, int p) {
        const MergeDesc& desc = task.desc;
        const int modules = (int)task.group.size();
        const int inputs = task.inputs, column = p * kPanel, columns = std::min(kPanel, task.outputs - column);
        own.used.clear();
        own.scaled = false;
        std::fill_n(own.scale, kPanel, 1.0f);
        for (int i = 0; i < desc.count; i++)
            for (int g = 0; g < modules; g++) {
                const Target& target = task.group[g];
                const Adapter& adapter = *desc.parts[i];
                const auto here = target.within(column, columns);
                if (here.any() && adapter.vectors) read_scales(task, adapter, target, column, own);
                if (!here.any() || !adapter.has(target.module) || !adapter.in_layer(desc.layer)) continue;
                const int index = i * modules + g;
                Part& part = own.parts[index];
                if (!part.ready) read_a(task, adapter, target.module, own, part);
                read_b(task,
                       {&adapter, desc.layer, 0, adapter.rank, adapter.b_offset[target.module] + here.first,
                        here.last - here.first},
                       target.column + here.first - column, own, part);
                own.used.push_back(index);
            }
        const Weights<T> origin{desc.origin, nullptr, task.outputs, inputs, desc.integers};
        T* to = (T*)desc.to + (long)p * panel_elems<T>(inputs);
        if (desc.integers.bits) {
            grow(own.wide, (size_t)inputs * kPanel);
            widen_panel(origin.integer_panel(column), own.wide.data());
            return add(task, own, (const float*)own.wide.data(), to, columns);
        }
        const T* from = origin.panel(column).data;
        if (own.used.empty() && !own.scaled) return (void)memcpy(to, from, panel_elems<T>(inputs) * sizeof(T));
        add(task, own, from, to, columns);
    }

    // Write a panel with the used parts in it.
    //
    //   task     the matrix
    //   own      the thread's, with the parts
    //   from     the panel's weights, as T or float32
    //   to       written
    //   columns  of the panel
    template <class F>
    void add(const Task& task, Scratch& own, const F* from, T* to, int columns) {
        const MergeDesc& desc = task.desc;
        const int modules = (int)task.group.size(), inputs = task.inputs;
        for (int half = 0; half < 2; half += kHalves) {
            Floats before[kHalves], after[kHalves];  // squares
            for (int h = 0; h < kHalves; h++) before[h] = after[h] = floats(0);
            for (int k = 0; k < inputs; k += kInputs) {
                const int count = std::min(kInputs, inputs - k);
                const long at = (long)k * kPanel;
                Floats v[kInputs][kHalves];
                load_inputs(from + at + half * kLanes * Kind<F>::pair, count, v);
                for (int h = 0; h < kHalves; h++)
#pragma GCC unroll 8
                    for (int i = 0; i < kInputs; i++) before[h] = fma(v[i][h], v[i][h], before[h]);
                for (const int index : own.used) {
                    const Part& part = own.parts[index];
                    const int rank = desc.parts[index / modules]->rank;
                    const float *a = part.a.data() + (long)k * rank, *b = part.b.data() + half * kLanes;
                    for (int r = 0; r < rank; r++, a += kInputs, b += kPanel) {
                        Floats outputs[kHalves];
#pragma GCC unroll 2
                        for (int h = 0; h < kHalves; h++) outputs[h] = load16(b + h * kLanes);
#pragma GCC unroll 8
                        for (int i = 0; i < kInputs; i++) {
                            const Floats x = floats(a[i]);
#pragma GCC unroll 2
                            for (int h = 0; h < kHalves; h++) v[i][h] = fma(outputs[h], x, v[i][h]);
                        }
                    }
                }
                if (own.scaled)
                    for (int h = 0; h < kHalves; h++) {
                        const Floats scale = load16(own.scale + (half + h) * kLanes);
#pragma GCC unroll 8
                        for (int i = 0; i < kInputs; i++) v[i][h] = v[i][h] * scale;
                    }
                for (int h = 0; h < kHalves; h++)
#pragma GCC unroll 8
                    for (int i = 0; i < kInputs; i++) after[h] = fma(v[i][h], v[i][h], after[h]);
                store_inputs(to + at + half * kLanes * Kind<T>::pair, count, v);
            }
            for (int h = 0; h < kHalves; h++) {
                const Head here = head(std::max(0, columns - (half + h) * kLanes));
                // 0 / 0 is NaN, which the maximum passes over
                const Floats ratio = keep(max(after[h] / before[h], floats(0)), here, floats(0));
                const bool finite = !(bits(here) & ~below(after[h], floats(INFINITY)));
                own.growth = std::max(own.growth, finite ? largest(ratio) : INFINITY);
            }
        }
    }

    // The scales of a module's outputs in the panel that begins at `column`.
    void read_scales(const Task& task, const Adapter& adapter, const Target& target, int column, Scratch& own) {
        const VectorPlace place = vector_place<T>(adapter, task.desc.layer, target);
        if (place.scale < 0) return;
        own.scaled = true;
        float* scale = own.scale + target.column - column;
        each_piece(task.arena, adapter, place, target.within(column, kPanel),
                   [&](const float* scales, const float*, int first, int count) {
                       for (int c = 0; c < count; c++) {
                           scale[first + c] = scales[c];
                           if (std::abs(scales[c]) < kLeastScale) own.growth = INFINITY;
                       }
                   });
    }

    // A of a module, once for each thread and matrix.
    void read_a(const Task& task, const Adapter& adapter, int module, Scratch& own, Part& part) {
        const int inputs = task.inputs, rank = adapter.rank, blocks = (inputs + kInputs - 1) / kInputs;
        locate(task, {&adapter, task.desc.layer, 0, rank, adapter.a_offset[module], inputs}, own);
        grow(part.a, (size_t)blocks * rank * kInputs);
        for (int r = 0; r < rank; r++)
            for (int k = 0; k < blocks * kInputs; k++)
                part.a[((long)(k / kInputs) * rank + r) * kInputs + k % kInputs] =
                    k < inputs ? widen(own.rows[r][k]) : 0.0f;
        part.ready = true;
    }

    // Bᵀ of a module for a panel, scaled. b: the rows. column: of the panel, where they begin.
    void read_b(const Task& task, const RankRows& b, int column, Scratch& own, Part& part) {
        locate(task, b, own);
        part.b.assign((size_t)b.count * kPanel, 0.0f);
        for (int r = 0; r < b.count; r++)
            for (int c = 0; c < b.columns; c++)
                part.b[r * kPanel + column + c] = b.adapter->scale * widen(own.rows[r][c]);
    }

    void locate(const Task& task, const RankRows& rows, Scratch& own) {
        grow(own.rows, rows.count);
        grow(own.spare, (size_t)rows.count * rows.columns);
        task.arena.locate(rows, own.rows.data(), own.spare.data(), rows.columns);
    }

    Team& team_;
    std::vector<Scratch> scratch_;
};

template <class T>
float Merge<T>::run(const MergeDesc& desc, const GemmShapes& shapes, const Arena<T>& arena) {
    const Task task{desc, shapes.targets(desc.shape), arena, shapes.inputs(desc.shape), shapes.outputs(desc.shape)};
    for (auto& scratch : scratch_) {
        grow(scratch.parts, desc.count * task.group.size());
        for (Part& part : scratch.parts) part.ready = false;
        scratch.growth = 0;
    }
    const int panels = (task.outputs + kPanel - 1) / kPanel;
    team_.run([&](Team::Member& me) { team_.each(me, panels, [&](int p) { panel(task, scratch_[me.thread], p); }); });
    float growth = 0;
    for (const auto& scratch : scratch_) growth = std::max(growth, scratch.growth);
    return std::sqrt(growth);
}

CHORUS_UNIT_LIBRARY float Merge<float>::run(const MergeDesc&, const GemmShapes&, const Arena<float>&);
CHORUS_UNIT_LIBRARY float Merge<bf16>::run(const MergeDesc&, const GemmShapes&, const Arena<bf16>&);

}  // namespace chorus
