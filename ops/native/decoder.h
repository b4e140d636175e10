// A Llama-architecture decoder step as one call: every thread walks the layers, meeting after each phase.
//
// No Python, allocation or dispatch between the products; the step's variable part (rows, block tables, segments) is
// read from a StepDesc, so that one function serves decode buckets and ragged prefill steps alike.
#pragma once
#include <chrono>
#include <cmath>
#include <vector>
#include "decode_attention.h"
#include "head.h"
#include "lend.h"
#include "merge.h"
#include "prefill_attention.h"
#include "projections.h"
#include "ranks.h"
#include "sampling.h"

namespace chorus {

template <class T>
class Decoder {
    using X = Act<T>;

   public:
    Decoder(const ModelDesc& model, Team& team)
        : m_(model),
          layers_(model.layer, model.layer + model.layers),
          team_(team),
          projections_(model, team),
          head_(model, team),
          merge_(team),
          lender_(model),
          attention_scratch_(team.most()) {}

    void forward(const StepDesc& step) {
        plan(step);
        patience_ = std::chrono::nanoseconds(step.max_stall_ns);
        logits_wanted_ = step.logits_wanted;
        team_.run([&](int thread) { walk(step, thread); });
    }

    // Compute a share of every layer and of the logits, beside other ranks with the other shares; `sample` is of rows of
    // all logits.
    void join(Ranks* ranks, int vocab) {
        ranks_ = ranks;
        vocab_ = vocab;
        projections_.join(ranks);
    }

    // Logits of some of the last step's score tokens, `[count, vocab]`.
    void score_logits(int first, int count, float* logits) {
        head_.plan(count, false);
        team_.run([&](int thread) {
            int phase = 0;
            const X* x = normed_.data() + (logits_wanted_ + first) * spread<X>(m_.hidden);
            head_.run(thread, phase, x, count, logits, nullptr, nullptr);
        });
    }

    // W + Σ scale·B·A of one matrix; how much longer the rows of W become by it, at most: see Merge.
    float merge(const MergeDesc& desc) {
        const Arena<T> arena{(T*)m_.arena, m_.page_elems};
        return merge_.run(desc, projections_.group(desc.group), arena);
    }

    // Tokens and log-probabilities of rows of logits.
    void sample(Draw* draws, int num_draws, Score* scores, int num_scores) {
        const bool few = (int64_t)(num_draws + num_scores) * vocab_ <= kFewLogits;
        sampling_.plan(draws, num_draws, scores, num_scores, vocab_, few ? 1 : team_.size());
        const auto finish = [&](int i, int thread) {
            if (i < num_draws) sampling_.draw(i, draws[i], thread);
            else sampling_.score(i, scores[i - num_draws], thread);
        };
        if (few) {
            for (int i = 0; i < sampling_.units(); i++) sampling_.see(i);
            for (int i = 0; i < sampling_.rows(); i++) finish(i, 0);
            return;
        }
        team_.run([&](int thread) {
            int phase = 0;
            team_.each(phase, sampling_.units(), [&](int i) { sampling_.see(i); });
            team_.each(phase, sampling_.rows(), [&](int i) { finish(i, thread); });
        });
    }

   private:
    static constexpr int64_t kFewLogits = 1 << 15;  // drawn from sooner than another thread wakes

    // Buffers and units of work of the step, the same for all layers.
    void plan(const StepDesc& step) {
        const int q = m_.heads * m_.head_dim, qkv = q + 2 * m_.kv_heads * m_.head_dim;
        const size_t tokens = std::max(step.tokens, step.logits_wanted + (int)step.scores_wanted);
        grow(x_, tokens * spread<float>(m_.hidden));
        projections_.plan(step);
        grow(y_, tokens * spread<float>(projections_.gated() ? qkv : std::max(qkv, 2 * m_.ffn)));
        grow(normed_, tokens * spread<X>(m_.hidden));
        grow(q_, tokens * spread<X>(q));
        grow(attended_, tokens * spread<X>(q));
        grow(act_, tokens * spread<X>(m_.ffn));
        decode_ = projections_.few() && step.tokens == step.rows;
        if (decode_) {
            decodes_ = decode_units(step.kv_lens, step.rows, m_.kv_heads, team_.size());
            split(decodes_, team_.size(), decode_split_,
                  [&](const DecodeUnit& u) { return step.kv_lens[u.row] * u.heads; });
        } else {
            attention_units(step.qo_indptr, step.rows, m_.heads, m_.kv_heads, attention_);
            split(attention_, team_.size(), attention_split_, [&](const AttentionUnit& u) {
                return u.tokens * (step.kv_lens[u.row] - step.qo_indptr[u.row + 1] + u.token + u.tokens);
            });
        }
        head_.plan(step.logits_wanted, step.draws);
    }

    void walk(const StepDesc& step, int thread) {
        int phase = 0;
        const int tokens = step.tokens, hidden = m_.hidden, head_dim = m_.head_dim;
        const int q = m_.heads * head_dim, kv = m_.kv_heads * head_dim, qkv = q + 2 * kv;
        const long ldx = spread<float>(hidden), ldn = spread<X>(hidden), ldq = spread<X>(q), lda = spread<X>(m_.ffn);
        const long ldqkv = spread<float>(qkv), ldgu = spread<float>(2 * m_.ffn);
        const int heads_per_kv = m_.heads / m_.kv_heads;
        const float scale = 1.0f / std::sqrt((float)head_dim);
        auto each_token = [&](auto work) { each_part(team_, phase, thread, tokens, [&](int t, bool) { work(t); }); };
        // Not by parts: a team's very first phase has the tag that untouched shares have.
        team_.each(phase, tokens, [&](int t) {
            convert((const T*)m_.embed + step.token_ids[t] * hidden, hidden, x_.data() + t * ldx);
        });
        const int64_t kv_plane = (int64_t)m_.block_tokens * kv;
        const LayerDesc* layers = step.layer ? step.layer : layers_.data();
        for (int l = 0; l < m_.layers; l++) {
            const LayerDesc& w = layers[l];
            if (step.segment_ready) team_.each(phase, 1, [&](int) { wait_for_layer(step, l); });
            T* k_plane = (T*)m_.arena + (2 * l) * kv_plane;
            T* v_plane = k_plane + kv_plane;
            normalise(thread, phase, tokens, w.input_norm);
            run_product(step, thread, phase, 0, l, normed_.data(), ldn, hidden, w.qkv, qkv, y_.data(), ldqkv, false,
                        w.qkv_bias);
            auto rotate = [&](int t, int first, int count) {
                for (int h = first; h < first + count; h++)
                    rotate_and_store(step, w, t, h, y_.data() + t * ldqkv, k_plane, v_plane);
            };
            const PagedCache<T> cache{k_plane, v_plane, m_.page_elems, m_.block_tokens, m_.kv_heads, head_dim};
            auto table = [&](int row) { return step.page_table + row * step.table_stride; };
            if (decode_) {
                each_split(team_, phase, thread, decodes_, decode_split_,
                           [&](const DecodeUnit& unit, const DecodeUnit* next) {
                               const long row = unit.row;
                               rotate(row, unit.first, unit.heads);
                               attend_decode<T>(cache, unit, q_.data() + row * ldq, attended_.data() + row * ldq,
                                                heads_per_kv, table(row), step.kv_lens[row], scale,
                                                attention_scratch_[thread], next ? table(next->row) : nullptr,
                                                next ? step.kv_lens[next->row] : 0, next ? next->first : 0);
                           });
            } else {
                each_token([&](int t) {
                    for (int i = 0; i < qkv; i += kLanes) prefetch(y_.data() + (t + 1) * ldqkv + i);
                    rotate(t, 0, m_.kv_heads);
                });
                each_split(team_, phase, thread, attention_, attention_split_,
                           [&](const AttentionUnit& unit, const AttentionUnit*) {
                               attend<T>(cache, unit, q_.data(), attended_.data(), ldq, heads_per_kv, table(unit.row),
                                         step.kv_lens[unit.row], step.qo_indptr[unit.row + 1], scale,
                                         attention_scratch_[thread]);
                           });
            }
            add_to_residual(step, thread, phase, 1, l, attended_.data(), ldq, q, w.o, w.o_bias);
            normalise(thread, phase, tokens, w.post_attention_norm);
            if (projections_.gated()) {
                projections_.run_gated(step, thread, phase, l, normed_.data(), w, act_.data());
            } else {
                run_product(step, thread, phase, 2, l, normed_.data(), ldn, hidden, w.gate_up, 2 * m_.ffn, y_.data(),
                            ldgu, false, w.gate_up_bias);
                each_token([&](int t) {
                    const float* gate = y_.data() + t * ldgu;
                    silu_and_mul(gate, gate + m_.ffn, m_.ffn, act_.data() + t * lda);
                });
            }
            add_to_residual(step, thread, phase, 3, l, act_.data(), lda, m_.ffn, w.down, w.down_bias);
        }
        team_.each(phase, step.logits_wanted + step.scores_wanted, [&](int r) {
            rms_norm(x_.data() + step.logit_tokens[r] * ldx, m_.norm, hidden, m_.eps, normed_.data() + r * ldn);
        });
        const int rows = step.logits_wanted;
        head_.run(thread, phase, normed_.data(), rows, step.logits, step.logit_rows, step.draws);
        if (ranks_) {
            if (!thread) agree(step);
        } else if (step.draws) {
            team_.each(phase, rows, [&](int r) { head_.choose(step, thread, normed_.data(), r); });
        } else if (!thread) {
            for (int r = 0; r < rows; r++) head_.choose(step, thread, normed_.data(), r);
        }
    }

    // `Projections::run`, beside which other processes compute what is lent to them.
    void run_product(const StepDesc& step, int thread, int& phase, int g, int layer, const X* x, long ldx, int k,
                     const void* w, int n, float* y, long ldy, bool accumulate, const float* bias) {
        if (step.lent) team_.each(phase, 1, [&](int) { lender_.lend(step, g, layer, x, ldx); });
        projections_.run(step, thread, phase, g, layer, x, ldx, k, w, n, y, ldy, accumulate, bias);
        if (!step.lent) return;
        team_.each(phase, 1, [&](int) { lender_.collect(step); });
        each_part(team_, phase, thread, step.tokens, [&](int t, bool) { lender_.add(step, g, t, y + t * ldy); });
    }

    // x += y · wᵀ and the step's LoRA products; of several ranks the sum of what each has of them.
    void add_to_residual(const StepDesc& step, int thread, int& phase, int g, int layer, const X* y, long ldy, int k,
                         const void* w, const float* bias) {
        const long ldx = spread<float>(m_.hidden);
        if (!ranks_)
            return run_product(step, thread, phase, g, layer, y, ldy, k, w, m_.hidden, x_.data(), ldx, true, bias);
        projections_.run(step, thread, phase, g, layer, y, ldy, k, w, m_.hidden, ranks_->mine(), ldx, false, bias);
        team_.each(phase, 1, [&](int) { ranks_->meet(); });
        each_part(team_, phase, thread, step.tokens,
                  [&](int t, bool) { ranks_->add(x_.data() + t * ldx, t * ldx, m_.hidden); });
    }

    // The likeliest token of each row over all ranks' shares of the vocabulary, on rank 0; the others want none.
    void agree(const StepDesc& step) {
        const int rows = step.logits_wanted, first = (int)((int64_t)vocab_ * ranks_->rank() / ranks_->size());
        auto* own = (Best*)ranks_->mine();
        for (int r = 0; r < rows; r++) {
            own[r] = head_.best(rows, r);
            if (own[r].token != INT_MAX) own[r].token += first;
        }
        if (ranks_->meet() != Ranks::kWell || ranks_->rank()) return;
        for (int r = 0; r < rows; r++) {
            Best all;
            for (int rank = 0; rank < ranks_->size(); rank++) all.join(((const Best*)ranks_->part(rank))[r]);
            step.best[r] = all.chosen();
        }
    }

    // A late segment is computed with what lies in its pages: its rows are to be run again, the others don't see them.
    void wait_for_layer(const StepDesc& step, int layer) {
        using Clock = std::chrono::steady_clock;
        if (step.lent) lender_.begin_layer(step, layer);
        for (int s = 0; s < step.segments; s++) {
            const auto* ready = step.segment_ready[s];
            if (!ready || step.segment_late[s] || ready->load(std::memory_order_acquire) > layer) continue;
            if (step.lent && lender_.has(step, s)) continue;
            const auto began = Clock::now();
            for (int i = 0;; i++) {
                const int32_t layers = ready->load(std::memory_order_acquire);
                if (layers > layer) break;
                if (layers < 0 || Clock::now() - began > patience_) {
                    step.segment_late[s] = 1;
                    break;
                }
                if (i < 200) relax();
                else std::this_thread::sleep_for(std::chrono::microseconds(20));  // the reader may need this core
            }
            patience_ -= Clock::now() - began;  // time that is spent computing is not waited for
        }
    }

    void normalise(int thread, int& phase, int tokens, const float* weight) {
        const int hidden = m_.hidden;
        each_part(team_, phase, thread, tokens, [&](int t, bool) {
            rms_norm(x_.data() + t * spread<float>(hidden), weight, hidden, m_.eps,
                     normed_.data() + t * spread<X>(hidden));
        });
    }

    // Of one K/V head and the query heads that share it: norm (where the architecture has it) and rotate q and k, then
    // write q to its buffer, k and v to their page.
    void rotate_and_store(const StepDesc& step, const LayerDesc& w, int t, int kv_head, float* y, T* k_plane,
                          T* v_plane) {
        const int head_dim = m_.head_dim, q = m_.heads * head_dim, kv = m_.kv_heads * head_dim,
                  group = m_.heads / m_.kv_heads;
        const float *cos = m_.cos + step.positions[t] * head_dim, *sin = m_.sin + step.positions[t] * head_dim;
        const int64_t place = step.page[t] * m_.page_elems + step.offset[t] * kv + kv_head * head_dim;
        for (int i = 0; i <= group; i++) {
            const bool key = i == group;
            const int head = key ? m_.heads + kv_head : kv_head * group + i;
            float* x = y + head * head_dim;
            if (const float* norm = key ? w.k_norm : w.q_norm) rms_norm(x, norm, head_dim, m_.eps, x);
            if (key) rotate(x, cos, sin, head_dim, k_plane + place);
            else rotate(x, cos, sin, head_dim, q_.data() + t * spread<X>(q) + head * head_dim);
        }
        convert(y + q + kv + kv_head * head_dim, head_dim, v_plane + place);
    }

    ModelDesc m_;
    std::vector<LayerDesc> layers_;
    Team& team_;
    Projections<T> projections_;
    OutputHead<T> head_;
    Merge<T> merge_;
    Lender<T> lender_;
    Sampling sampling_;
    std::vector<AttentionScratch> attention_scratch_;
    std::vector<AttentionUnit> attention_;
    std::vector<DecodeUnit> decodes_;
    std::vector<int> decode_split_, attention_split_;
    int logits_wanted_ = 0;  // of the last step: behind them come the rows to score
    Buffer<float> x_, y_;
    Buffer<X> normed_, q_, attended_, act_;
    Ranks* ranks_ = nullptr;
    int vocab_ = m_.vocab;
    bool decode_ = false;  // the step has few tokens and each is a row of its own
    std::chrono::nanoseconds patience_{};  // that is left in the step
};

}  // namespace chorus
