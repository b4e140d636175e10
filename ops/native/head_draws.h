// Tokens drawn from all of the vocabulary while the head computes its logits, which nobody keeps.
//
// Of each panel of a row there are the largest logit and the mass of all, relative to it; the panel that the draw falls
// into is computed again. Nothing but the row's own logits, in a fixed order, goes into its draw.
#pragma once
#include <algorithm>
#include <vector>
#include "gemm.h"
#include "sampling.h"

namespace chorus {

class HeadDraws {
   public:
    // inverse: [rows] inverse temperatures, 0 for rows that are not drawn here; null: none is.
    void plan(const double* inverse, int rows, int vocab) {
        inverse_ = inverse;
        if (!inverse) return;
        panels_ = (vocab + kPanel - 1) / kPanel;
        most_.resize(std::max(most_.size(), (size_t)rows * panels_));
        mass_.resize(most_.size());
    }
    bool any() const { return inverse_; }

    // Every panel of every row once, by whichever thread computed it.
    void see(int row, const float* logits, int columns, int first) {
        if (!(inverse_[row] > 0)) return;
        const __m512 x[2] = {load_or_none(logits, columns), load_or_none(logits + kLanes, std::max(0, columns - kLanes))};
        const float most = _mm512_reduce_max_ps(_mm512_max_ps(x[0], x[1]));
        const Masses masses(most, inverse_[row]);
        __m512d low[2], high[2];
        masses.of(x[0], low);
        masses.of(x[1], high);
        const long at = (long)row * panels_ + first / kPanel;
        most_[at] = most;
        mass_[at] = _mm512_reduce_add_pd(_mm512_add_pd(_mm512_add_pd(low[0], low[1]), _mm512_add_pd(high[0], high[1])));
    }

    // Once all panels have been seen. most: the row's largest logit, finite. logits(panel): those of one, and how many.
    template <class Logits>
    int draw(int row, float most, double u, Logits logits) {
        const double inverse = inverse_[row];
        if (!(inverse > 0)) return -1;
        const Masses masses(most, inverse);
        const float* mosts = most_.data() + (long)row * panels_;
        double* mass = mass_.data() + (long)row * panels_;
        __m512d sum = _mm512_setzero_pd();
        for (int p = 0; p < panels_; p += 8) {
            const __mmask8 valid = (__mmask8)head_mask(panels_ - p);
            const __m512d scaled = _mm512_mul_pd(masses.of(_mm256_maskz_loadu_ps(valid, mosts + p)), _mm512_maskz_loadu_pd(valid, mass + p));
            _mm512_mask_storeu_pd(mass + p, valid, scaled);
            sum = _mm512_mask_add_pd(sum, valid, sum, scaled);
        }
        const double target = u * _mm512_reduce_add_pd(sum);
        const Found found = first_above(panels_, target, [&](int p, __m512d* out) {
            out[0] = _mm512_maskz_loadu_pd((__mmask8)head_mask(panels_ - p), mass + p);
            out[1] = _mm512_maskz_loadu_pd((__mmask8)head_mask(std::max(0, panels_ - p - 8)), mass + p + 8);
        });
        const auto [x, columns] = logits(found.at);
        return found.at * kPanel + find_in_block(x, columns, most, inverse, target - found.before);
    }

   private:
    const double* inverse_ = nullptr;
    int panels_ = 0;
    std::vector<float> most_;
    std::vector<double> mass_;
};

}  // namespace chorus
