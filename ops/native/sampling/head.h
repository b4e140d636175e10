// The head of a step: its last tokens' logits, the argmax of each row, and samples from them.
#pragma once
#include <cmath>
#include <vector>
#include "sampling/best.h"
#include "team/buffer.h"
#include "program/descriptors.h"
#include "elementwise/elementwise.h"
#include "lora/model_lora.h"
#include "gemm/gemm_units.h"
#include "team/shares.h"

namespace chorus {

template <class T>
class OutputHead {
    using X = Act<T>;

   public:
    OutputHead(const ModelDesc& model, Team& team)
        : weights_{model.lm_head, nullptr, model.vocab, model.hidden, model.lm_head_integers},
          bias_(model.head_bias),
          scale_(model.logits_scale),
          softcap_(model.logits_softcap),
          team_(team),
          lora_(model, team.most()),
          scratch_(team.most()) {}

    // Find which rows of the step's logits adapters change.
    void plan_adapters(const StepDesc& step) {
        width_ = step.logits_width;
        lora_.plan(step, width_ - weights_.outputs);
    }

    // Compute logits beside other ranks. vocab: of all of them.
    void join(int vocab) { lora_.join(vocab); }

    // The first half of what adapters add, before `run`. x: [rows of all logits, hidden], normalised.
    void shrink_adapters(Team::Member& me, Rows<const X> x) {
        if (lora_.units()) each_part(team_, me, lora_.units(), [&](int i, bool) { lora_.run_shrink(me.thread, i, x); });
    }

    // rows: of logits in the step. samples: whether any is sampled from.
    void plan(int rows, bool samples) {
        best_.resize((size_t)team_.size() * rows);
        const int tile_rows = std::clamp(rows, 1, kRowChunk);
        run_panels_ = 1;
        if (lora_.any()) {
            const int most = std::min(kColumnChunk, kRunLogits / tile_rows) / kPanel;
            run_panels_ = std::clamp(weights_.panels() / (kRunsOfThread * team_.size()), 1, most);
        }
        const int most = run_panels_ * kPanel + lora_.most_added();
        stride_ = most == kPanel ? kPanel : spread<float>(most);
        for (auto& s : scratch_) grow(s.logits, (size_t)tile_rows * stride_);
        if (!samples) return;
        panels_.plan(rows, weights_.outputs + lora_.most_added());
        if (lora_.most_added())
            for (int r = 0; r < rows; r++) panels_.narrow(r, weights_.outputs + lora_.added(r));
    }

    // Rows of logits, and where they go.
    //
    //   count   rows
    //   logits  [·, width of the step] float32, -inf behind a row's own columns; null: none is kept
    //   kept    [count]: which row of `logits` each goes to, below 0: none; null: one after the other
    //   samples   [count]: samples from them; null: none
    //   first     the first row's number among the step's
    struct Logits {
        int count;
        float* logits;
        const int32_t* kept;
        const SampleRow* samples;
        int first = 0;
    };

    // The product with x, and the best of each row while the logits are in the cache.
    //
    //   me   the thread; all threads of the team run the same
    //   x    [to.count, hidden], normalised
    //   to   the logits
    void run(Team::Member& me, Rows<const X> x, const Logits& to) {
        const int vocab = weights_.outputs;
        const bool direct = to.logits && !to.kept;
        Best* best = best_.data() + (long)me.thread * to.count;
        std::fill(best, best + to.count, Best{});
        const Gemm<T> head{x, to.count, weights_, {to.logits, width_}, scratch_[me.thread].fixed.begin()};
        const int panels = weights_.panels(), runs = (panels + run_panels_ - 1) / run_panels_;  // of a row chunk
        each_part(team_, me, head.chunks() * runs, [&](int i, bool more) {
            const int first = i % runs * run_panels_, last = std::min(panels, first + run_panels_);
            const int unit = i / runs * panels + first;
            const Tile t = head.tile_of(unit);
            const int columns = std::min(vocab, last * kPanel) - t.column;
            const Rows<float> y =
                direct ? head.y.from(t.row, t.column) : Rows<float>{scratch_[me.thread].logits.data(), stride_};
            for (int p = 0; p < last - first; p++)
                head.run(head.tile_of(unit + p), y.from(0, p * kPanel), nullptr, more || first + p + 1 < last);
            lora_.add(me.thread, to.first + t.row, t.rows, t.column, columns, x.from(-to.first), y);
            for (int r = 0; r < t.rows; r++) {
                const int row = t.row + r;
                if (bias_) add_scaled(bias_ + t.column, columns, 1, y[r]);
                finish(y[r], columns);
                best[row].see(y[r], columns, t.column);
                int own = columns;
                if (last == panels && lora_.most_added()) {
                    own += lora_.added(to.first + row);
                    add_beyond(me.thread, to.first + row, 0, own - columns, x[row], y[r] + columns);
                    best[row].see(y[r] + columns, own - columns, lora_.beyond());
                }
                if (to.samples && to.samples[row].inverse_temperature > 0)
                    for (int c = 0; c < own; c += kPanel)
                        panels_.see(row, y[r] + c, std::min(kPanel, own - c), t.column + c,
                                    to.samples[row].weighed(panels_.columns(row)));
                float* out = direct ? y[r] : nullptr;
                if (to.kept && to.kept[row] >= 0) {
                    out = to.logits + (long)to.kept[row] * width_ + t.column;
                    convert(y[r], own, out);
                }
                if (out && last == panels) std::fill(out + own, out + (width_ - t.column), -INFINITY);
            }
        });
    }

    // Once `run` has been: the best of a row of `rows`.
    Best best(int rows, int row) const {
        Best all = best_[row];
        for (int t = 1; t < team_.size(); t++) all.join(best_[(long)t * rows + row]);
        return all;
    }

    // Write the argmax of a row of x, or the one that is sampled, to the step's `best`.
    //
    //   step    the step
    //   thread  that computes
    //   x       [logits_wanted, hidden], normalised
    //   row     of x
    void choose(const StepDesc& step, int thread, Rows<const X> x, int row) {
        step.best[row] = best(step.logits_wanted, row).chosen();
        if (step.best[row] < 0 || !step.samples || !(step.samples[row].inverse_temperature > 0)) return;
        const int kept = !step.logits ? -1 : step.logit_rows ? step.logit_rows[row] : row;
        step.best[row] =
            panels_.sample(row, step.samples[row], scratch_[thread].candidates, [&](int panel) -> const float* {
                const int column = panel * kPanel;
                if (kept >= 0) return step.logits + (long)kept * width_ + column;
                float* y = scratch_[thread].logits.data();
                const int vocab = weights_.outputs, columns = std::clamp(vocab - column, 0, kPanel);
                if (columns) {
                    weights_gemm<T>({x, row, 1, row, 1}, weights_, column, {{y, kPanel}, columns, false, nullptr},
                                    scratch_[thread].fixed);
                    lora_.add(thread, row, 1, column, columns, x, {y, kPanel});
                    if (bias_) add_scaled(bias_ + column, columns, 1, y);
                    finish(y, columns);
                }
                const int end = std::min(column + kPanel, panels_.columns(row));
                if (end > vocab) add_beyond(thread, row, column + columns - vocab, end - vocab, x[row], y + columns);
                return y;
            });
    }

   private:
    static constexpr int kRunLogits = 1 << 15;  // of a run of panels: they stay in L2 while adapters' terms are added
    static constexpr int kRunsOfThread = 4;  // at least, where they are long: threads end at about the same time

    struct Scratch {
        std::vector<float> logits;  // of a run of panels
        FixedScratch<T> fixed;
        Candidates candidates;
    };

    // Logits from the product and its bias.
    void finish(float* y, int columns) const {
        if (softcap_ != 0) cap(y, columns, scale_, softcap_);
        else if (scale_ != 1) scale_by(y, columns, scale_);
    }

    // Logits of tokens beyond the vocabulary; see HeadLora.
    void add_beyond(int thread, int row, int begin, int end, const X* x, float* y) {
        lora_.add_beyond(thread, row, begin, end, x, y, [&](float* logit) { finish(logit, 1); });
    }

    const Weights<T> weights_;
    const float* const bias_;  // [outputs]; null: there is none
    const float scale_, softcap_;
    Team& team_;
    HeadLora<T> lora_;
    int width_ = weights_.outputs;  // of a row of the step's logits, and of prompt logits after it
    int run_panels_ = 1;  // computed one after the other, before adapters' terms: rank-rows are read in runs that long
    long stride_ = kPanel;  // of `logits` of a thread
    std::vector<Scratch> scratch_;
    std::vector<Best> best_;
    Panels panels_;
};

}  // namespace chorus
