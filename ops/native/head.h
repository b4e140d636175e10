// The head of a step: its last tokens' logits, the likeliest of each row, and draws from them.
#pragma once
#include <cmath>
#include <vector>
#include "best.h"
#include "buffer.h"
#include "descriptors.h"
#include "elementwise.h"
#include "shares.h"

namespace chorus {

template <class T>
class OutputHead {
    using X = Act<T>;

   public:
    OutputHead(const ModelDesc& model, Team& team) : m_(model), team_(team), scratch_(team.most()) {
        none_split_.assign(team.most() + 1, 0);
    }

    // draws: whether rows are drawn from.
    void plan(int rows, bool draws) {
        best_.resize((size_t)team_.size() * rows);
        for (auto& s : scratch_) grow(s.logits, (size_t)std::min(rows, kRowChunk) * kPanel);
        if (draws) panels_.plan(rows, m_.vocab);
    }

    // The product with x, normalised rows `spread` apart, and the best of each while they are in the cache. logits: null when
    // none are kept. kept: which of its rows each row's logits go to, below 0 where they are not kept; null: one after the
    // other. draws: null when none are drawn from.
    void run(int thread, int& phase, const X* x, int rows, float* logits, const int32_t* kept, const Draw* draws) {
        const int panel = panel_elems<T>(m_.hidden), vocab = m_.vocab;
        Best* best = best_.data() + (long)thread * rows;
        std::fill(best, best + rows, Best{});
        const long ldn = spread<X>(m_.hidden);
        Product<T> head{x, ldn, rows, (const T*)m_.lm_head, vocab, m_.hidden, logits, vocab, false, nullptr};
        run_units(
            team_, phase, thread, head, none_, none_split_,
            [&](int i, bool more) {
                const Tile t = head.tile_of(i);
                const bool direct = logits && !kept;
                float* y = direct ? logits + (long)t.row * vocab + t.column : scratch_[thread].logits.data();
                const int ldy = direct ? vocab : kPanel;
                weights_product<T>(head.x + t.row * head.ldx, head.ldx, t.rows,
                                   head.w + (long)t.column / kPanel * panel, head.k, y, ldy, t.columns, false, nullptr,
                                   nullptr, more);
                for (int r = 0; r < t.rows; r++) {
                    const float* row = y + (long)r * ldy;
                    best[t.row + r].see(row, t.columns, t.column);
                    if (draws && draws[t.row + r].inverse_temperature > 0)
                        panels_.see(t.row + r, row, t.columns, t.column, draws[t.row + r].weighed(vocab));
                    if (kept && kept[t.row + r] >= 0)
                        convert(row, t.columns, logits + (long)kept[t.row + r] * vocab + t.column);
                }
            },
            [](const LoraUnit&, const LoraUnit*) {});
    }

    // Once `run` has been: the best of a row of `rows`.
    Best best(int rows, int row) const {
        Best all = best_[row];
        for (int t = 1; t < team_.size(); t++) all.join(best_[(long)t * rows + row]);
        return all;
    }

    // The likeliest token of a row of x, or the one that is drawn.
    void choose(const StepDesc& step, int thread, const X* x, int row) {
        step.best[row] = best(step.logits_wanted, row).chosen();
        if (step.best[row] < 0 || !step.draws || !(step.draws[row].inverse_temperature > 0)) return;
        const int kept = !step.logits ? -1 : step.logit_rows ? step.logit_rows[row] : row;
        step.best[row] =
            panels_.draw(row, step.draws[row], scratch_[thread].candidates, [&](int panel) -> const float* {
                if (kept >= 0) return step.logits + (long)kept * m_.vocab + panel * kPanel;
                const long ldn = spread<X>(m_.hidden);
                float* y = scratch_[thread].logits.data();
                weights_product<T>(x + row * ldn, ldn, 1, (const T*)m_.lm_head + panel * panel_elems<T>(m_.hidden),
                                   m_.hidden, y, kPanel, std::min(kPanel, m_.vocab - panel * kPanel), false, nullptr);
                return y;
            });
    }

   private:
    struct Scratch {
        std::vector<float> logits;  // of one panel
        Candidates candidates;
    };

    const ModelDesc m_;
    Team& team_;
    std::vector<Scratch> scratch_;
    std::vector<Best> best_;
    Panels panels_;
    std::vector<LoraUnit> none_;
    std::vector<int> none_split_;
};

}  // namespace chorus
