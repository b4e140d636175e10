// W + Σ scale·B·A from packed panels to packed panels: an adapter in a copy of the weights.
//
// Every element is one chain of fused multiply-adds in float32, from W on and in order of rank, rounded once. A panel's 32
// outputs lie in two registers, eight inputs are worked on at a time; what the adapter has for them streams past.
#pragma once
#include <cmath>
#include <limits>
#include <vector>
#include "buffer.h"
#include "shares.h"

namespace chorus {

constexpr int kInputs = 8;  // that are worked on together: 2 × 8 accumulators

// Eight inputs of a panel, the first `count` of them, as float32: v[i][h] holds input i's outputs 16h ….
inline void load_inputs(const float* p, int count, __m512 (*v)[2]) {
#pragma GCC unroll 8
    for (int i = 0; i < kInputs; i++)
        for (int h = 0; h < 2; h++)
            v[i][h] = i < count ? _mm512_loadu_ps(p + i * kPanel + h * kLanes) : _mm512_setzero_ps();
}
inline void load_inputs(const bf16* p, int count, __m512 (*v)[2]) {
#pragma GCC unroll 4
    for (int i = 0; i < kInputs; i += 2)
        for (int h = 0; h < 2; h++) {
            const __m512i both =
                i < count ? _mm512_loadu_si512(p + i * kPanel + 2 * h * kLanes) : _mm512_setzero_si512();
            v[i][h] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
            v[i + 1][h] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xFFFF0000)));
        }
}
inline void store_inputs(float* p, int count, const __m512 (*v)[2]) {
#pragma GCC unroll 8
    for (int i = 0; i < kInputs; i++)
        for (int h = 0; h < 2; h++)
            if (i < count) _mm512_storeu_ps(p + i * kPanel + h * kLanes, v[i][h]);
}
// The bits of x, rounded to the upper half: to the nearest, ties to even, subnormal numbers kept.
inline __m512i rounded(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
}
inline void store_inputs(bf16* p, int count, const __m512 (*v)[2]) {
#pragma GCC unroll 4
    for (int i = 0; i < kInputs; i += 2)
        for (int h = 0; h < 2; h++) {
            const __m512i low = _mm512_srli_epi32(rounded(v[i][h]), 16),
                          high = _mm512_and_si512(rounded(v[i + 1][h]), _mm512_set1_epi32((int)0xFFFF0000));
            if (i < count) _mm512_storeu_si512(p + i * kPanel + 2 * h * kLanes, _mm512_or_si512(low, high));
        }
}

template <class T>
class Merge {
   public:
    explicit Merge(Team& team) : team_(team), scratch_(team.most()) {}

    // The largest ratio of the norms of a row of the result and of the row of W that it comes from, 0 where nothing changes;
    // infinite where a result is not finite. Rounding makes an error in proportion to the result.
    float run(const MergeDesc& desc, const std::vector<Target>& group, const Arena<T>& arena) {
        for (auto& scratch : scratch_) {
            grow(scratch.parts, desc.count * group.size());
            for (Part& part : scratch.parts) part.ready = false;
            scratch.growth = 0;
        }
        const int panels = (desc.columns + kPanel - 1) / kPanel;
        team_.run([&](int thread) {
            int phase = 0;
            team_.each(phase, panels, [&](int p) { panel(desc, group, arena, scratch_[thread], p); });
        });
        float growth = 0;
        for (const auto& scratch : scratch_) growth = std::max(growth, scratch.growth);
        return std::sqrt(growth);
    }

   private:
    struct Part {  // of an adapter, for one module
        Buffer<float> a;  // [inputs / kInputs, rank, kInputs]
        std::vector<float> b;  // [rank, kPanel] of the panel, scaled
        bool ready = false;
    };
    struct Scratch {
        std::vector<Part> parts;
        std::vector<const T*> rows;
        std::vector<T> spare;
        std::vector<int> used;  // parts that change the panel
        float growth = 0;
    };

    void panel(const MergeDesc& desc, const std::vector<Target>& group, const Arena<T>& arena, Scratch& own, int p) {
        const int inputs = desc.inputs, column = p * kPanel, columns = std::min(kPanel, desc.columns - column);
        own.used.clear();
        for (int i = 0; i < desc.count; i++)
            for (int g = 0; g < (int)group.size(); g++) {
                const Target& target = group[g];
                const int first = std::max(column, target.column),
                          last = std::min(column + columns, target.column + target.width);
                const Adapter& adapter = *desc.parts[i];
                if (first >= last || adapter.b_offset[target.module] < 0 || adapter.first_elem[desc.layer] < 0)
                    continue;
                const int index = i * (int)group.size() + g;
                Part& part = own.parts[index];
                if (!part.ready) read_a(desc, adapter, target.module, arena, own, part);
                read_b(desc, adapter, target, first, last, column, arena, own, part);
                own.used.push_back(index);
            }
        const T* from = (const T*)desc.from + (long)p * panel_elems<T>(inputs);
        T* to = (T*)desc.to + (long)p * panel_elems<T>(inputs);
        if (own.used.empty()) return (void)memcpy(to, from, panel_elems<T>(inputs) * sizeof(T));
        __m512 before[2] = {}, after[2] = {};  // squares
        for (int k = 0; k < inputs; k += kInputs) {
            const int count = std::min(kInputs, inputs - k);
            __m512 v[kInputs][2];
            load_inputs(from + (long)k * kPanel, count, v);
            for (int h = 0; h < 2; h++)
#pragma GCC unroll 8
                for (int i = 0; i < kInputs; i++) before[h] = _mm512_fmadd_ps(v[i][h], v[i][h], before[h]);
            for (const int index : own.used) {
                const Part& part = own.parts[index];
                const int rank = desc.parts[index / (int)group.size()]->rank;
                const float *a = part.a.data() + (long)k * rank, *b = part.b.data();
                for (int r = 0; r < rank; r++, a += kInputs, b += kPanel) {
                    const __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + kLanes);
#pragma GCC unroll 8
                    for (int i = 0; i < kInputs; i++) {
                        const __m512 x = _mm512_set1_ps(a[i]);
                        v[i][0] = _mm512_fmadd_ps(b0, x, v[i][0]);
                        v[i][1] = _mm512_fmadd_ps(b1, x, v[i][1]);
                    }
                }
            }
            for (int h = 0; h < 2; h++)
#pragma GCC unroll 8
                for (int i = 0; i < kInputs; i++) after[h] = _mm512_fmadd_ps(v[i][h], v[i][h], after[h]);
            store_inputs(to + (long)k * kPanel, count, v);
        }
        for (int h = 0; h < 2; h++) {
            const __mmask16 valid = head_mask(std::max(0, columns - h * kLanes)),
                            finite = _mm512_cmp_ps_mask(after[h], _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
            // 0 / 0 is NaN, which the maximum passes over
            const __m512 ratio = _mm512_max_ps(_mm512_div_ps(after[h], before[h]), _mm512_setzero_ps());
            own.growth = std::max(own.growth, (valid & ~finite) ? INFINITY : _mm512_mask_reduce_max_ps(valid, ratio));
        }
    }

    // Once for each thread and matrix.
    void read_a(const MergeDesc& desc, const Adapter& adapter, int module, const Arena<T>& arena, Scratch& own,
                Part& part) {
        const int inputs = desc.inputs, rank = adapter.rank, blocks = (inputs + kInputs - 1) / kInputs;
        rows(desc, adapter, adapter.a_offset[module], inputs, arena, own);
        grow(part.a, (size_t)blocks * rank * kInputs);
        for (int r = 0; r < rank; r++)
            for (int k = 0; k < blocks * kInputs; k++)
                part.a[((long)(k / kInputs) * rank + r) * kInputs + k % kInputs] =
                    k < inputs ? widen(own.rows[r][k]) : 0.0f;
        part.ready = true;
    }

    void read_b(const MergeDesc& desc, const Adapter& adapter, const Target& target, int first, int last, int column,
                const Arena<T>& arena, Scratch& own, Part& part) {
        rows(desc, adapter, adapter.b_offset[target.module] + first - target.column, last - first, arena, own);
        part.b.assign((size_t)adapter.rank * kPanel, 0.0f);
        for (int r = 0; r < adapter.rank; r++)
            for (int c = first; c < last; c++)
                part.b[r * kPanel + c - column] = adapter.scale * widen(own.rows[r][c - first]);
    }

    // `width` elements of each rank-row, from `offset` of its slab on.
    void rows(const MergeDesc& desc, const Adapter& adapter, int offset, int width, const Arena<T>& arena,
              Scratch& own) {
        grow(own.rows, adapter.rank);
        grow(own.spare, (size_t)adapter.rank * width);
        arena.rows(adapter, first_row(adapter, desc.layer, 0, offset), adapter.slab_elems, adapter.rank, width,
                   own.rows.data(), own.spare.data(), width);
    }

    Team& team_;
    std::vector<Scratch> scratch_;
};

}  // namespace chorus
