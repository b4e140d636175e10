// A step of a decoder as one call: every thread runs the ops of all layers, meeting after each phase.
//
// No Python, allocation or dispatch between the shapes; the step's variable part (rows, block tables, segments) is
// read from a StepDesc, so that one function serves decode buckets and ragged prefill steps alike.
#pragma once
#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>
#include "attention/attend_op.h"
#include "sampling/head.h"
#include "attention/latents.h"
#include "lora/merge.h"
#include "mixers/mixers.h"
#include "lora/model_lora.h"
#include "lora/offload.h"
#include "gemm/projections.h"
#include "ranks/ranks.h"
#include "program/row_ops.h"
#include "sampling/sampling.h"
#include "units.h"

namespace chorus {

// A decoder of any element type.
struct AnyDecoder {
    virtual ~AnyDecoder() = default;

    // Compute a step, write its K and V to their pages, and what the descriptor asks for.
    virtual void forward(const StepDesc& step) = 0;

    // Compute a share of every layer and of the logits, beside other ranks with the other shares.
    //
    //   ranks  with this rank's number; the caller's
    //   vocab  of all shares
    virtual void join(Ranks* ranks, int vocab) = 0;

    // Compute logits of some of the last step's kept tokens.
    //
    //   first, count  of the tokens
    //   logits        [count, logits_width of the step]: written
    virtual void prompt_logits(int first, int count, float* logits) = 0;

    // Copy final hidden states of some of the last step's tokens: those with logits, and behind them the kept ones.
    //
    //   first, count  of these tokens
    //   states        [count, hidden]: written
    virtual void hidden_states(int first, int count, float* states) = 0;

    // Write W + Σ scale·B·A of one matrix; returns how much longer the rows of W become by it, at most: see Merge.
    virtual float merge(const MergeDesc& desc) = 0;

    // Sample tokens, and compute log-probabilities, of rows of logits.
    //
    //   samples   [num_samples]: the tokens are written
    //   logprobs  [num_logprobs]: the same of what they ask for
    //   columns   logits of a row
    virtual void sample(SampleRow* samples, int num_samples, LogprobRow* logprobs, int num_logprobs, int columns) = 0;

    // Threads of the next step.
    virtual int threads() const = 0;
};

template <class T>
class Decoder final : public AnyDecoder {
    using X = Act<T>;

   public:
    // model: the ops are copied, what they point to is not. threads: the caller's included.
    Decoder(const ModelDesc& model, int threads)
        : m_(model),
          ops_(model.ops, model.ops + model.num_ops),
          team_(threads),
          registers_(model),
          projections_(model, team_),
          attention_(model, team_, registers_),
          embedding_lora_(model, team_.most()),
          product_lora_(model, team_.most()),
          fixed_(team_.most()),
          head_(model, team_),
          experts_(model, team_),
          latents_(model, team_, registers_),
          chooser_(model, team_, registers_),
          row_ops_(registers_, experts_, latents_, chooser_),
          merge_(team_),
          offloader_(model),
          mixers_(model, team_, registers_) {}

    void forward(const StepDesc& step) override {
        plan(step);
        patience_ = std::chrono::nanoseconds(step.max_stall_ns);
        logits_wanted_ = step.logits_wanted;
        team_.run([&](Team::Member& me) { walk(step, me); });
    }

    void join(Ranks* ranks, int vocab) override {
        ranks_ = ranks;
        vocab_ = vocab;
        registers_.join(ranks);
        projections_.join(ranks);
        attention_.join(ranks);
        mixers_.join(ranks);
        row_ops_.join(ranks);
        head_.join(vocab);
    }

    void prompt_logits(int first, int count, float* logits) override {
        head_.plan(count, false);
        team_.run([&](Team::Member& me) {
            const int row = logits_wanted_ + first;
            head_.run(me, rows_of(normed_, m_.hidden).from(row), {count, logits, nullptr, nullptr, row});
        });
    }

    void hidden_states(int first, int count, float* states) override {
        const Rows<X> kept = rows_of(normed_, m_.hidden).from(first);
        for (int r = 0; r < count; r++) convert(kept[r], m_.hidden, states + (long)r * m_.hidden);
    }

    float merge(const MergeDesc& desc) override {
        const Arena<T> arena{(T*)m_.arena, m_.page_elems};
        return merge_.run(desc, projections_.shapes(), arena);
    }

    void sample(SampleRow* samples, int num_samples, LogprobRow* logprobs, int num_logprobs, int columns) override {
        const bool few = (int64_t)(num_samples + num_logprobs) * columns <= kFewLogits;
        sampling_.plan(samples, num_samples, logprobs, num_logprobs, columns, few ? 1 : team_.size());
        const auto finish = [&](int i, int thread) {
            if (i < num_samples) sampling_.sample(i, samples[i], thread);
            else sampling_.logprobs(i, logprobs[i - num_samples], thread);
        };
        if (few) {
            for (int i = 0; i < sampling_.units(); i++) sampling_.see(i);
            for (int i = 0; i < sampling_.rows(); i++) finish(i, 0);
            return;
        }
        team_.run([&](Team::Member& me) {
            team_.each(me, sampling_.units(), [&](int i) { sampling_.see(i); });
            team_.each(me, sampling_.rows(), [&](int i) { finish(i, me.thread); });
        });
    }

    int threads() const override { return team_.size(); }

   private:
    static constexpr int64_t kFewLogits = 1 << 15;  // sampled from sooner than another thread wakes

    // Buffers and units of work of the step, the same for all layers.
    void plan(const StepDesc& step) {
        projections_.plan(step);
        const auto keeps_gates = [&](const OpDesc& op) { return op.kind == OpKind::kGateUp && !fuses(op); };
        registers_.plan(step.tokens, std::any_of(ops_.begin(), ops_.end(), keeps_gates));
        grow_rows(normed_, step.logits_wanted + step.states_wanted, m_.hidden);
        if (m_.delta.v_heads) mixers_.plan(step);
        attention_.plan(step, projections_.few() && step.tokens == step.rows);
        experts_.plan(step);
        latents_.plan(step);
        chooser_.plan(step);
        embedding_lora_.plan(step.model_segments);
        head_.plan_adapters(step);
        head_.plan(step.logits_wanted, step.samples);
    }

    // A thread's part of a step.
    void walk(const StepDesc& step, Team::Member& me) {
        const int hidden = m_.hidden;
        const Rows<float> x = registers_.floats(0);
        const Rows<X> normed = rows_of(normed_, hidden);
        arrive(step, me, 0);
        // Not by parts: a team's very first phase has the tag that untouched shares have.
        team_.each(me, step.tokens, [&](int t) {
            const int64_t token = step.token_ids[t];
            if (token < vocab_) convert((const T*)m_.embed + token * hidden, hidden, x[t]);
            else std::fill(x[t], x[t] + hidden, 0.0f);  // an adapter has the row
            embedding_lora_.add(step.model_segments, me.thread, t, step.token_ids[t], x[t]);
            if (m_.embedding_multiplier != 1) scale_by(x[t], hidden, m_.embedding_multiplier);
            if (m_.position_table)
                add_scaled(m_.position_table + step.positions[t] * (int64_t)hidden, hidden, 1.0f, x[t]);
            if (m_.embedding_norm) run_norm(m_.norm_kind, x[t], m_.embedding_norm, hidden, m_.eps, x[t]);
            if (step.media && step.media[t] >= 0)  // after all that is done to tokens' own embeddings
                std::copy_n(step.media_rows + step.media[t] * step.media_stride, hidden, x[t]);
        });
        const OpDesc *op = step.ops ? step.ops : ops_.data(), *end = op + ops_.size();
        while (op != end) {
            if (is_of_rows(op->kind)) {
                const OpDesc* first = op;
                op = std::find_if(op, end, [](const OpDesc& each) { return !is_of_rows(each.kind); });
                each_part(team_, me, step.tokens, [&](int t, bool) {
                    for (const OpDesc* each = first; each != op; each++) row_ops_.run(step, *each, t, me.thread);
                });
            } else {
                run(step, me, *op++);
            }
        }
        team_.each(me, step.logits_wanted + step.states_wanted,
                   [&](int r) { norm(x[step.logit_tokens[r]], normed[r]); });
        const int rows = step.logits_wanted;
        head_.shrink_adapters(me, normed);
        head_.run(me, normed, {rows, step.logits, step.logit_rows, step.samples});
        if (ranks_) {
            if (!me.thread) agree(step);
        } else if (step.samples) {
            team_.each(me, rows, [&](int r) { head_.choose(step, me.thread, normed, r); });
        } else if (!me.thread) {
            for (int r = 0; r < rows; r++) head_.choose(step, me.thread, normed, r);
        }
    }

    // A thread's part of an op that is not of rows.
    void run(const StepDesc& step, Team::Member& me, const OpDesc& op) {
        switch (op.kind) {
            case OpKind::kArrive: return arrive(step, me, arguments_of<ArriveOp>(op).layer);
            case OpKind::kMeet: return team_.each(me, 1, [&](int) { ranks_->meet(); });
            case OpKind::kGemm: return run_gemm(me, task(step, arguments_of<GemmOp>(op)));
            case OpKind::kGateUp: return gate_up(step, me, op);
            case OpKind::kAttend: return attention_.run(me, step, arguments_of<AttendOp>(op));
            case OpKind::kLatentAttend: return attend_latents(step, me, arguments_of<LatentAttendOp>(op));
            case OpKind::kMultiply: return multiply(step, me, arguments_of<MultiplyOp>(op));
            case OpKind::kChoose: return chooser_.run(me, step, arguments_of<ChooseOp>(op));
            case OpKind::kMix: return mixers_.run(me, step, arguments_of<MixOp>(op));
            case OpKind::kMoe: {
                const auto& moe = arguments_of<MoeOp>(op);
                return experts_.run(me, moe, registers_.rounded(moe.x));
            }
            default: return;
        }
    }

    // The product of a matrix of the model's own.
    void multiply(const StepDesc& step, Team::Member& me, const MultiplyOp& op) {
        const Rows<X> x = registers_.rounded(op.x);
        const Rows<float> y = registers_.floats(op.out);
        const Weights<T> w{op.w, nullptr, op.outputs, op.inputs, op.integers};
        const Gemm<T> gemm{x, step.tokens, w, y, fixed_[me.thread].begin()};
        each_part(team_, me, gemm.units(), [&](int i, bool more) { gemm.run(i, more); });
        if (op.module >= 0 && step.model_segments.count)
            product_lora_.add(team_, me, step.model_segments, step.tokens, op.module, x, op.inputs, y, op.outputs);
    }

    void attend_latents(const StepDesc& step, Team::Member& me, const LatentAttendOp& op) {
        const Rows<const float> q = registers_.floats(op.q).from(0, op.column);
        latents_.attend(me, step, op, q, registers_.rounded(op.out));
    }

    // y = x · wᵀ + bias, with the step's LoRA shapes.
    LoraTask<T> task(const StepDesc& step, const GemmOp& op) {
        const GemmShapes& shapes = projections_.shapes();
        const Weights<T> weights{op.w, op.bias, shapes.outputs(op.shape), shapes.inputs(op.shape), op.integers};
        return {step,
                op.shape,
                op.layer,
                op.number,
                weights,
                registers_.rounded(op.x),
                registers_.floats(op.out),
                op.accumulate != 0};
    }

    // The step has many tokens, and the activation is computed as soon as a tile of the product is.
    bool fuses(const OpDesc& op) const {
        const auto& it = arguments_of<GateUpOp>(op);
        return is_gated(it.activation) && projections_.gated(it.gemm.shape);
    }

    void gate_up(const StepDesc& step, Team::Member& me, const OpDesc& op) {
        const auto& it = arguments_of<GateUpOp>(op);
        const LoraTask<T> up = task(step, it.gemm);
        if (fuses(op)) return projections_.run_gated(me, up, it.gating(), it.factor, registers_.rounded(it.act));
        run_gemm(me, up);
        each_part(team_, me, step.tokens, [&](int t, bool) { row_ops_.gate(it, up.y[t], t); });
    }

    // `Projections::run`, beside which other processes compute what is offloaded to them.
    void run_gemm(Team::Member& me, const LoraTask<T>& task) {
        if (task.step.offloaded) team_.each(me, 1, [&](int) { offloader_.offload(task); });
        projections_.run(me, task);
        if (!task.step.offloaded) return;
        team_.each(me, 1, [&](int) { offloader_.collect(task.step); });
        each_part(team_, me, task.step.tokens, [&](int t, bool) { offloader_.add(task, t); });
    }

    // The argmax of each row over all ranks' shares of the vocabulary, on rank 0; the others want none.
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

    // Wait for what a layer needs of adapters that are still coming.
    void arrive(const StepDesc& step, Team::Member& me, int layer) {
        if (step.segment_ready || step.model_ready || step.mixture_ready)
            team_.each(me, 1, [&](int) { wait_for_layer(step, layer); });
    }

    // A late segment is computed with what lies in its pages: its rows are to be run again, the others don't see them.
    void wait_for_layer(const StepDesc& step, int layer) {
        if (step.offloaded) offloader_.begin_layer(step, layer);
        if (step.segment_ready) wait_for_segments(step.segments, step.segment_ready, step.segment_late, layer);
        if (step.model_ready) wait_for_segments(step.model_segments, step.model_ready, step.model_late, layer);
        if (step.mixture_ready) wait_for_segments(step.mixture->segments, step.mixture_ready, step.mixture_late, layer);
    }

    // As wait_for_layer, of some segments.
    //
    //   segments  of the step
    //   readies   [count]: layers loaded so far; null: all
    //   late      [count]: set where waiting was in vain
    //   layer     that is needed
    void wait_for_segments(const Segments& segments, const std::atomic<int32_t>* const* readies, int32_t* late,
                           int layer) {
        using Clock = std::chrono::steady_clock;
        for (int s = 0; s < segments.count; s++) {
            const auto* ready = readies[s];
            // None of an offloaded layer's rows are in the segment's own descriptor.
            if (!ready || !segments.adapters[s]->in_layer(layer)) continue;
            if (late[s] || ready->load(std::memory_order_acquire) > layer) continue;
            const auto began = Clock::now();
            for (int i = 0;; i++) {
                const int32_t layers = ready->load(std::memory_order_acquire);
                if (layers > layer) break;
                if (layers < 0 || Clock::now() - began > patience_) {
                    late[s] = 1;
                    break;
                }
                if (i < 200) relax();
                else std::this_thread::sleep_for(std::chrono::microseconds(20));  // the reader may need this core
            }
            patience_ -= Clock::now() - began;  // time that is spent computing is not waited for
        }
    }

    // The norm of the last layer's output.
    template <class Out>
    void norm(const float* x, Out* out) const {
        run_norm(m_.norm_kind, x, m_.norm, m_.hidden, m_.eps, out);
    }

    ModelDesc m_;
    const std::vector<OpDesc> ops_;
    Team team_;
    Registers<T> registers_;
    Projections<T> projections_;
    Attention<T> attention_;
    EmbeddingLora<T> embedding_lora_;
    ProductLora<T> product_lora_;
    std::vector<FixedScratch<T>> fixed_;  // of threads
    OutputHead<T> head_;
    ExpertsPart<T> experts_;
    LatentsPart<T> latents_;
    Chooser<T> chooser_;
    RowOps<T> row_ops_;
    Merge<T> merge_;
    Offloader<T> offloader_;
    Mixers<T> mixers_;
    Sampling sampling_;
    int logits_wanted_ = 0;  // of the last step: behind them come the rows to score
    Buffer<X> normed_;  // rows of the last norm
    Ranks* ranks_ = nullptr;
    int vocab_ = m_.vocab;
    std::chrono::nanoseconds patience_{};  // that is left in the step
};

// A decoder of a model of T.
template <class T>
AnyDecoder* decoder_of(const ModelDesc& model, int threads) {
    return new Decoder<T>(model, threads);
}

CHORUS_UNIT_DECODER_FLOAT AnyDecoder* decoder_of<float>(const ModelDesc&, int);
CHORUS_UNIT_DECODER_BF16 AnyDecoder* decoder_of<bf16>(const ModelDesc&, int);

}  // namespace chorus
