// Tokens and log-probabilities of rows of logits in memory.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>
#include "sampling/panels.h"

namespace chorus {

// Described to Python by program/layout.h.
struct LogprobRow {
    const float* logits;
    int64_t token, count;
    int64_t* ids;   // out, [count]: the most likely tokens, best first, of equal ones the first
    double* values; // out, [count]: their log-probabilities
    double own;     // out: the token's; NaN: a logit is not finite
};

constexpr int kBlock = 8192;  // logits of a unit of work

// Draws and logprobs of a step, in two phases that threads share: blocks of panels are seen, then each row.
class Sampling {
    struct Row {
        const float* logits;
        double inverse;
        const float* operator()(int panel) const { return logits + panel * kPanel; }
    };

   public:
    // Make room for samples and logprobs.
    //
    //   samples    [num_samples]
    //   logprobs   [num_logprobs]
    //   vocab    logits of a row
    //   threads  that share them
    void plan(const SampleRow* samples, int num_samples, const LogprobRow* logprobs, int num_logprobs, int vocab,
              int threads) {
        vocab_ = vocab;
        blocks_ = (vocab + kBlock - 1) / kBlock;
        rows_.clear();
        for (int i = 0; i < num_samples; i++) rows_.push_back({samples[i].logits, samples[i].weighed(vocab)});
        for (int i = 0; i < num_logprobs; i++) rows_.push_back({logprobs[i].logits, 1.0});
        panels_.plan(rows(), vocab);
        candidates_.resize(threads);
    }
    int rows() const { return (int)rows_.size(); }
    int units() const { return rows() * blocks_; }

    // Look at a unit of a row, in the first phase.
    void see(int unit) {
        const int r = unit / blocks_, begin = unit % blocks_ * kBlock, end = std::min(vocab_, begin + kBlock);
        for (int i = begin; i < end; i += kPanel)
            panels_.see(r, rows_[r].logits + i, std::min(kPanel, end - i), i, rows_[r].inverse);
    }
    // Finish row r, in the second phase, on a thread: write a draw's token, or what a score asks for.
    void sample(int r, SampleRow& d, int thread) { d.token = panels_.sample(r, d, candidates_[thread], rows_[r]); }
    void logprobs(int r, LogprobRow& s, int thread) {
        const float most = panels_.most(r);
        s.own = NAN;
        if (!std::isfinite(most)) return;
        const double norm = most + std::log(panels_.weigh(r, most, 1.0));
        s.own = s.logits[s.token] - norm;
        const int count = (int)std::min<int64_t>(s.count, vocab_);
        if (!count) return;
        Candidates& c = candidates_[thread];
        panels_.gather(r, panels_.threshold(r, count, c.ordered), c, rows_[r]);
        c.live.resize(c.count);
        for (int i = 0; i < c.count; i++) c.live[i] = i;
        auto better = [&](int a, int b) { return c.values[a] > c.values[b] || (c.values[a] == c.values[b] && a < b); };
        std::partial_sort(c.live.begin(), c.live.begin() + count, c.live.end(), better);
        for (int i = 0; i < count; i++) s.ids[i] = c.ids[c.live[i]], s.values[i] = c.values[c.live[i]] - norm;
    }

   private:
    int vocab_ = 0, blocks_ = 0;
    std::vector<Row> rows_;
    Panels panels_;
    std::vector<Candidates> candidates_;  // of each thread
};

}  // namespace chorus
