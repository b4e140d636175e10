// Tokens sampled from rows of logits by inverse transform in vocabulary order; nothing is sorted.
//
// A row is seen panel by panel, by the head while it computes them or from memory. Of each panel there remain the largest
// logit and the mass of all, relative to it; they say which panels hold what may be sampled, and only these panels are
// read again. Nothing but the row's own logits, in a fixed order, goes into its draw, so that it is the same bits
// whichever threads saw the panels and whatever else is sampled. Masses are float64: implementations that differ in the
// last bit of a mass still draw the same token.
#pragma once
#include <cmath>
#include "sampling/candidates.h"
#include "gemm/gemm.h"

namespace chorus {

// Described to Python by program/layout.h.
struct SampleRow {
    double inverse_temperature;  // 0: the largest
    double u, top_p, min_p;
    int64_t top_k;  // 0: all
    const float* logits;
    int64_t token;  // out; -1: no logit is above -inf, or one is not finite

    bool is_few(int vocab) const { return top_k > 0 && top_k < vocab; }
    // Of what the masses are wanted, 0 where the panels' largest logits are enough.
    double weighed(int vocab) const { return is_few(vocab) || min_p > 0 ? 0 : inverse_temperature; }
};

class Panels {
   public:
    // Make room for rows of at most `most` logits; each has as many unless `narrow` says otherwise.
    void plan(int rows, int most) {
        stride_ = panels_of(most);
        columns_.assign(rows, most);
        most_.resize(std::max(most_.size(), (size_t)rows * stride_));
        mass_.resize(most_.size());
        peak_.resize(most_.size());
    }
    void narrow(int row, int columns) { columns_[row] = columns; }
    // Logits of a row.
    int columns(int row) const { return columns_[row]; }

    // Look at a panel: at every one of a row once, on any thread.
    //
    //   row      number of the row
    //   logits   [columns]
    //   columns  of the panel
    //   first    token of the first
    //   inverse  the inverse temperature, 0 where no masses are wanted
    void see(int row, const float* logits, int columns, int first, double inverse) {
        const Floats x[2] = {load_or_none(logits, columns), load_or_none(logits + kLanes, columns - kLanes)};
        const bool nan = (equal(x[0], x[0]) & equal(x[1], x[1])) != 0xFFFF;
        const float most = nan ? INFINITY : largest(max(x[0], x[1]));
        const long at = (long)row * stride_ + first / kPanel;
        most_[at] = most;
        if (!(inverse > 0)) return;
        const Masses masses(most, inverse);
        Doubles low[2], high[2];
        masses.of(x[0], low);
        masses.of(x[1], high);
        mass_[at] = sum((low[0] + low[1]) + (high[0] + high[1]));
    }

    // Once all of a row's panels have been seen: its largest logit, +inf if one is NaN.
    float most(int row) const {
        const float* most = most_.data() + (long)row * stride_;
        const int panels = panels_of(columns_[row]);
        Floats above = floats(-INFINITY);
        for (int p = 0; p < panels; p += kLanes) above = max(above, load_or_none(most + p, panels - p));
        return largest(above);
    }

    // Make a row's masses relative to its largest logit, once; returns their sum.
    //
    //   row      number of the row
    //   most     its largest logit
    //   inverse  the inverse temperature
    double weigh(int row, float most, double inverse) {
        const Masses masses(most, inverse);
        const float* mosts = most_.data() + (long)row * stride_;
        double *mass = mass_.data() + (long)row * stride_, *peak = peak_.data() + (long)row * stride_;
        const int panels = panels_of(columns_[row]);
        Doubles all = doubles(0);
        for (int p = 0; p < panels; p += kLanes) {
            Doubles top[2];
            masses.of(load_or_none(mosts + p, panels - p), top);
            for (int i = 0, at = p; i < 2 && at < panels; i++, at += 8) {
                const Head here = head(panels - at);
                const Doubles scaled = top[i] * load8(mass + at, here);
                store(peak + at, top[i], here);
                store(mass + at, scaled, here);
                all = all + scaled;
            }
        }
        return sum(all);
    }

    // A logit that at least k logits of a row are not below: as many panels have one. scratch: any memory.
    float threshold(int row, int64_t k, std::vector<float>& scratch) const {
        const int panels = panels_of(columns_[row]);
        if (k > panels) return -INFINITY;
        const float* most = most_.data() + (long)row * stride_;
        scratch.assign(most, most + panels);
        std::nth_element(scratch.begin(), scratch.begin() + k - 1, scratch.end(), std::greater<float>());
        return scratch[k - 1];
    }

    // Gather all of a row's logits that are at least `least`.
    //
    //   row     number of the row
    //   least   a logit
    //   c       written
    //   logits  logits(panel): a panel's logits
    template <class Logits>
    void gather(int row, float least, Candidates& c, Logits logits) const {
        const float* most = most_.data() + (long)row * stride_;
        const int columns = columns_[row], panels = panels_of(columns);
        c.clear(columns);
        for (int p = 0; p < panels; p += kLanes) {
            const Head here = head(panels - p);
            unsigned some = bits(here) & not_above(floats(least), load16(most + p, here));
            for (; some; some &= some - 1) {
                const int panel = p + __builtin_ctz(some);
                c.gather(logits(panel), width(row, panel), panel * kPanel, least);
            }
        }
    }

    // The token that is sampled, once all of a row's panels have been seen.
    //
    //   row     number of the row
    //   d       how to draw
    //   c       memory of the thread
    //   logits  logits(panel): a panel's logits
    template <class Logits>
    int64_t sample(int row, const SampleRow& d, Candidates& c, Logits logits) {
        const double inverse = d.inverse_temperature;
        const float most = this->most(row);
        if (!std::isfinite(most)) return -1;
        if (inverse <= 0) {
            const float* mosts = most_.data() + (long)row * stride_;
            const int panel = (int)(std::find(mosts, mosts + panels_of(columns_[row]), most) - mosts);
            const float* x = logits(panel);
            return panel * kPanel + (std::find(x, x + width(row, panel), most) - x);
        }
        const bool few = d.is_few(columns_[row]), whole = d.weighed(columns_[row]) > 0;
        const double total = whole ? weigh(row, most, inverse) : 0;
        if (whole && d.top_p >= 1) return draw_of_all(row, most, inverse, d.u * total, logits);
        // Everything that may be kept lies above a threshold that is cheap to know.
        double floor = -INFINITY;
        if (d.min_p > 0) floor = most + std::log(d.min_p) / inverse;
        if (few) floor = std::max(floor, (double)threshold(row, d.top_k, c.ordered));
        if (whole) floor = most + nucleus_floor(row, (1 - d.top_p) * total, total) / inverse;
        float least = (float)floor;
        if (least > floor || !few) least = std::nextafterf(least, -INFINITY);
        gather(row, std::max(least, -3.4028234e38f), c, logits);
        c.weigh(most, inverse);
        if (d.min_p > 0) {
            const double limit = std::log(d.min_p);
            c.filter([&](int i) { return ((double)c.values[i] - most) * inverse >= limit; });
        }
        if (few) c.keep_largest((int)d.top_k);
        if (d.top_p < 1) c.keep_nucleus(d.top_p * (whole ? total : c.mass()));
        return c.sample(d.u);
    }

   private:
    static int panels_of(int columns) { return (columns + kPanel - 1) / kPanel; }
    int width(int row, int panel) const { return std::min(kPanel, columns_[row] - panel * kPanel); }

    template <class Logits>
    int64_t draw_of_all(int row, float most, double inverse, double target, Logits logits) const {
        const double* mass = mass_.data() + (long)row * stride_;
        const int panels = panels_of(columns_[row]);
        const Found found = first_above(panels, target, [&](int p, Doubles* out) {
            out[0] = load8(mass + p, head(panels - p));
            out[1] = load8(mass + p + 8, head(std::max(0, panels - p - 8)));
        });
        const Masses masses(most, inverse);
        const float* x = logits(found.at);
        const int n = width(row, found.at);
        return found.at * kPanel + first_above(n, target - found.before, [&](int i, Doubles* out) {
                                       masses.of(load_or_none(x + i, n - i), out);
                                   }).at;
    }

    // A tempered logit, relative to the largest, below which the whole row holds less than `rest`: of a panel no more than its
    // mass without the largest logit's, where that is not below, nor than as many such logits as it has.
    double nucleus_floor(int row, double rest, double total) const {
        const double *mass = mass_.data() + (long)row * stride_, *peak = peak_.data() + (long)row * stride_;
        const int panels = panels_of(columns_[row]);
        rest -= 1e-12 * total;  // sums are rounded
        if (rest <= 0) return -INFINITY;
        auto below = [&](double each) {
            const Doubles least = doubles(each), most = doubles(each * kPanel);
            Doubles bound = doubles(0);
            for (int p = 0; p < panels; p += 8) {
                const Head here = head(panels - p);
                const Doubles all = load8(mass + p, here), top = load8(peak + p, here);
                bound = bound + min(where_not_below(top, least, all - top, all), most);
            }
            return sum(bound);
        };
        double low = std::log(rest / panels / kPanel), high = 0;
        for (int i = 0; i < kHalvings; i++) {
            const double middle = (low + high) / 2;
            (below(std::exp(middle)) < rest ? low : high) = middle;
        }
        return low - 1e-9;
    }

    static constexpr int kHalvings = 12;
    int stride_ = 0;  // panels from row to row
    std::vector<int> columns_;  // of each row
    std::vector<float> most_;
    std::vector<double> mass_, peak_;  // peak: the largest logit's
};

}  // namespace chorus
