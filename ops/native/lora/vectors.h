// Vectors of adapters: a scale and an offset for each output of a module, in pages of the arena, in float32.
//
//   y[t, n] = scale[n] · y[t, n] + offset[n]     after a segment's expand
//   y[t, n] = (y[t, n] - offset[n]) / scale[n]   before it, of an adapter in the weights that is taken off
#pragma once
#include <algorithm>
#include <vector>
#include "lora/adapters.h"
#include "simd/simd.h"

namespace chorus {

// Where vectors of a module in a layer begin, as elements of its adapter; below 0 where there are none.
//
//   scale   of the scales
//   offset  of the offsets
struct VectorPlace {
    int64_t scale, offset;
};

template <class T>
inline VectorPlace vector_place(const Adapter& adapter, int layer, const Target& target) {
    constexpr int64_t bytes = 16;  // a vector takes whole ones
    const int64_t first = adapter.vectors ? adapter.vectors[(int64_t)layer * adapter.modules + target.module] : -1;
    return {first, first + (target.width * (int64_t)sizeof(float) + bytes - 1) / bytes * bytes / (int64_t)sizeof(T)};
}

// Run work(scales, offsets, first, count) for columns first … last-1 of a module, in pieces that each lie in one page.
template <class T, class Work>
inline void each_piece(const Arena<T>& arena, const Adapter& adapter, VectorPlace place, Target::Columns part,
                       Work work) {
    constexpr int64_t ratio = sizeof(float) / sizeof(T);
    int left = 0;  // columns to the nearer page's end
    auto at = [&](int64_t elem) {
        const int64_t within = elem % arena.page_elems;
        left = (int)std::min<int64_t>(left, (arena.page_elems - within) / ratio);
        return (const float*)(arena.data + adapter.pages[elem / arena.page_elems] * arena.page_elems + within);
    };
    for (int c = part.first; c < part.last; c += left) {
        left = part.last - c;
        const float *scales = at(place.scale + c * ratio), *offsets = at(place.offset + c * ratio);
        work(scales, offsets, c, left);
    }
}

// y = scale · y + offset
inline void scale_and_shift(float* y, int n, const float* scale, const float* offset) {
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        store16(y + i, fma(load16(y + i, here), load16(scale + i, here), load16(offset + i, here)), here);
    }
}

// y = (y - offset) / scale
inline void undo_scale_and_shift(float* y, int n, const float* scale, const float* offset) {
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        store16(y + i, (load16(y + i, here) - load16(offset + i, here)) / load16(scale + i, here), here);
    }
}

// The segments of a step whose adapters have vectors, by token.
class VectorSegments {
   public:
    void plan(const Segments& segments, int tokens) {
        is_any_ = segments.vectors != 0;
        if (!is_any_) return;
        first_.assign(tokens + 1, 0);
        auto each = [&](auto work) {
            for (int s = 0; s < segments.count; s++)
                for (int t = segments.begin[s]; segments.adapters[s]->vectors && t < segments.end[s]; t++) work(s, t);
        };
        each([&](int, int t) { first_[t + 1]++; });
        for (int t = 0; t < tokens; t++) first_[t + 1] += first_[t];
        of_token_.resize(first_[tokens]);
        std::vector<int> next(first_.begin(), first_.end() - 1);
        each([&](int s, int t) { of_token_[next[t]++] = s; });
    }

    // True if any segment has vectors.
    bool is_any() const { return is_any_; }

    // Run work(segment) for the segments of a token.
    template <class Work>
    void each(int token, Work work) const {
        for (int i = first_[token]; i < first_[token + 1]; i++) work(of_token_[i]);
    }

   private:
    bool is_any_ = false;
    std::vector<int> first_, of_token_;  // [tokens + 1]: where each token's segments begin
};

}  // namespace chorus
