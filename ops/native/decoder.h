// A step of a decoder as one call: every thread walks the layers, meeting after each phase.
//
// No Python, allocation or dispatch between the products; the step's variable part (rows, block tables, segments) is
// read from a StepDesc, so that one function serves decode buckets and ragged prefill steps alike.
#pragma once
#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>
#include "decode_attention.h"
#include "experts_part.h"
#include "head.h"
#include "offload.h"
#include "paged_states.h"
#include "mamba2.h"
#include "merge.h"
#include "model_lora.h"
#include "prefill_attention.h"
#include "projections.h"
#include "ranks.h"
#include "sampling.h"
#include "short_conv.h"

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
    // model: the layers are copied, what they point to is not. threads: the caller's included.
    Decoder(const ModelDesc& model, int threads)
        : m_(model),
          layers_(model.layer, model.layer + model.layers),
          team_(threads),
          projections_(model, team_),
          embedding_lora_(model, team_.most()),
          head_(model, team_),
          experts_(model, team_),
          merge_(team_),
          offloader_(model),
          delta_(model.delta),
          short_conv_(model.delta),
          mamba_(model.delta),
          attention_scratch_(team_.most()) {}

    void forward(const StepDesc& step) override {
        plan(step);
        patience_ = std::chrono::nanoseconds(step.max_stall_ns);
        logits_wanted_ = step.logits_wanted;
        team_.run([&](Team::Member& me) { walk(step, me); });
    }

    void join(Ranks* ranks, int vocab) override {
        ranks_ = ranks;
        vocab_ = vocab;
        projections_.join(ranks);
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
        return merge_.run(desc, projections_.products(), arena);
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

    int q_size() const { return m_.heads * m_.head_dim; }
    int q_rows() const { return q_size() << m_.output_gate; }
    int kv_size() const { return m_.kv_heads * m_.head_dim; }
    int outputs(const LayerDesc& w, Group g) const { return projections_.products().outputs(w.product[g]); }

    // Buffers and units of work of the step, the same for all layers.
    void plan(const StepDesc& step) {
        const size_t tokens = std::max(step.tokens, step.logits_wanted + step.states_wanted);
        projections_.plan(step);
        const Products& products = projections_.products();
        const int widest = products.most([&](int p) {  // of what is kept of products
            return products.group(p) == kGateUp && projections_.gated() ? 0 : products.outputs(p);
        });
        grow_rows(x_, tokens, m_.hidden);
        grow_rows(y_, tokens, widest);
        grow_rows(normed_, tokens, m_.hidden);
        grow_rows(q_, tokens, q_size());
        grow_rows(attended_, tokens, std::max(q_size(), m_.delta.v_size()));
        if (m_.delta.v_heads) plan_mixer(step);
        grow_rows(act_, tokens, m_.ffn);
        decode_ = projections_.few() && step.tokens == step.rows;
        if (decode_) {
            decode_units(step.kv_lens, step.rows, m_.kv_heads, team_.size(), decodes_.units);
            decodes_.split(team_.size(), [&](const DecodeUnit& u) { return step.kv_lens[u.row] * u.heads; });
        } else {
            attention_units(step.qo_indptr, step.rows, m_.heads, m_.kv_heads, attention_.units);
            attention_.split(team_.size(), [&](const AttentionUnit& u) {
                return u.tokens * (step.kv_lens[u.row] - step.qo_indptr[u.row + 1] + u.token + u.tokens);
            });
        }
        experts_.plan(step);
        embedding_lora_.plan(step.model_segments);
        head_.plan_adapters(step);
        head_.plan(step.logits_wanted, step.samples);
    }

    // A thread's part of a step.
    void walk(const StepDesc& step, Team::Member& me) {
        const int tokens = step.tokens, hidden = m_.hidden;
        const Rows<float> x = rows_of(x_, hidden), y = rows_of(y_, 2 * m_.ffn);
        const Rows<X> normed = rows_of(normed_, hidden), act = rows_of(act_, m_.ffn);
        const bool waits = step.segment_ready || step.model_ready || step.mixture_ready;
        // Not by parts: a team's very first phase has the tag that untouched shares have.
        if (waits) team_.each(me, 1, [&](int) { wait_for_layer(step, 0); });
        team_.each(me, tokens, [&](int t) {
            const int64_t token = step.token_ids[t];
            if (token < vocab_) convert((const T*)m_.embed + token * hidden, hidden, x[t]);
            else std::fill(x[t], x[t] + hidden, 0.0f);  // an adapter has the row
            embedding_lora_.add(step.model_segments, me.thread, t, step.token_ids[t], x[t]);
            if (m_.embedding_multiplier != 1) scale_by(x[t], hidden, m_.embedding_multiplier);
        });
        const LayerDesc* layers = step.layer ? step.layer : layers_.data();
        for (int l = 0; l < m_.layers; l++) {
            const LayerDesc& w = layers[l];
            if (waits && l) team_.each(me, 1, [&](int) { wait_for_layer(step, l); });
            normalise(me, tokens, w.attention_norm, w.experts && w.parallel);
            const Rows<X> mixed = mix(step, me, w, l);
            add_to_residual(me, task(step, w, l, kO, mixed, x), w.attention_out_norm, w.residual_multiplier);
            if (!w.parallel) normalise(me, tokens, w.mlp_norm, w.experts);
            if (w.experts) {
                add_experts(me, tokens, w, l, x);
                continue;
            }
            const LoraTask<T> gate_up = task(step, w, l, kGateUp, normed, y);
            if (projections_.gated()) {
                projections_.run_gated(me, gate_up, w.activation, act);
            } else {
                run_product(me, gate_up);
                each_part(team_, me, tokens,
                          [&](int t, bool) { activate(w.activation, y[t], y[t] + m_.ffn, m_.ffn, act[t]); });
            }
            add_to_residual(me, task(step, w, l, kDown, act, x), w.mlp_out_norm, w.residual_multiplier);
        }
        team_.each(me, step.logits_wanted + step.states_wanted,
                   [&](int r) { norm_.run(x[step.logit_tokens[r]], m_.norm, hidden, normed[r]); });
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

    // y = x · wᵀ + bias of a group in layer l, with the step's LoRA products.
    LoraTask<T> task(const StepDesc& step, const LayerDesc& w, int l, Group g, Rows<const X> x, Rows<float> y) const {
        const int inputs = projections_.products().inputs(w.product[g]);
        const Weights<T> weights{w.weights[g], w.bias[g], outputs(w, g), inputs, w.integers[g]};
        return {step, w.product[g], l, weights, x, y, false};
    }

    // What the mixer of layer l makes of normed, with weights w.
    Rows<X> mix(const StepDesc& step, Team::Member& me, const LayerDesc& w, int l) {
        const Rows<float> y = rows_of(y_, outputs(w, kQkv));
        run_product(me, task(step, w, l, kQkv, rows_of(normed_, m_.hidden), y));
        const Rows<X> out = rows_of(attended_, w.delta.conv ? m_.delta.v_size() : q_size());
        if (w.delta.conv) recur(step, me, w, y, out);
        else if (m_.float8_kv) attend<Float8<X>>(step, me, w, y, out);
        else attend<T>(step, me, w, y, out);
        return out;
    }

    void plan_mixer(const StepDesc& step) {
        const int seen = step.tokens + step.state_accepted[step.rows];
        const bool drafts = m_.most_drafts > 0;
        if (m_.delta.mixer == Mixer::kDelta) delta_.plan(seen, drafts, team_.size());
        if (m_.delta.mixer == Mixer::kMamba2) mamba_.plan(step.tokens, seen, drafts, team_.size());
    }

    // out = what a recurrent mixer with weights w makes of y.
    void recur(const StepDesc& step, Team::Member& me, const LayerDesc& w, Rows<const float> y, Rows<X> out) {
        const PagedStates states{m_, step, w.state_layer};
        switch (m_.delta.mixer) {
            case Mixer::kDelta: return delta_.run(team_, me, w.delta, states, y, out);
            case Mixer::kShortConv: return short_conv_.run(team_, me, w.delta, states, y, out);
            case Mixer::kMamba2: return mamba_.run(team_, me, w.delta, states, step.tokens, y, out);
        }
    }

    // out = attention of a layer with weights w: q, k and v, which y has, are rotated, and k and v written to their pages, whose
    // elements are P.
    template <class P>
    void attend(const StepDesc& step, Team::Member& me, const LayerDesc& w, Rows<float> y, Rows<X> out) {
        const Rows<X> q = rows_of(q_, q_size());
        const int64_t plane = (int64_t)m_.block_tokens * kv_size();
        P* keys = (P*)m_.arena + 2 * w.page_layer * plane;
        const PagedCache<P> cache{keys,
                                  keys + plane,
                                  m_.page_bytes / (int64_t)sizeof(P),
                                  m_.block_tokens,
                                  m_.page_groups,
                                  m_.kv_heads,
                                  m_.head_dim,
                                  m_.heads / m_.kv_heads,
                                  w.scale * w.k_scale,
                                  w.v_scale,
                                  w.softcap,
                                  w.window};
        if (w.norms_all_heads) normalise_heads(me, w, step.tokens, y);
        auto rotate = [&](int t, int first, int count) {
            for (int h = first; h < first + count; h++)
                rotate_and_store(step, w, cache, t, h, attention_scratch_[me.thread]);
        };
        auto row_of = [&](int row) {
            return KvRow{step.page_table + row * step.table_stride + w.page_group, step.kv_lens[row]};
        };
        if (decode_) {
            decodes_.each(team_, me, [&](const DecodeUnit& unit, const DecodeUnit* next) {
                const int row = unit.row;
                rotate(row, unit.first, unit.heads);
                attend_decode<P>(cache, unit, q[row], out[row], row_of(row), attention_scratch_[me.thread],
                                 next ? NextRead{row_of(next->row), next->first} : NextRead{});
                gate(y[row], unit.first * cache.group, unit.heads * cache.group, out[row]);
            });
            return;
        }
        each_part(team_, me, step.tokens, [&](int t, bool) {
            for (int i = 0; i < y.stride; i += kLanes) prefetch(y[t + 1] + i);
            rotate(t, 0, m_.kv_heads);
        });
        attention_.each(team_, me, [&](const AttentionUnit& unit, const AttentionUnit*) {
            chorus::attend<P>(cache, unit, q, out, row_of(unit.row), step.qo_indptr[unit.row + 1],
                              attention_scratch_[me.thread]);
            for (int t = unit.token; t < unit.token + unit.tokens; t++)
                gate(y[t], unit.kv_head * cache.group, cache.group, out[t]);
        });
    }

    // Norm all heads of q, and of k, of each token at once; of several ranks the heads of all of them.
    //
    //   y  [tokens, outputs]: q and k are changed
    void normalise_heads(Team::Member& me, const LayerDesc& w, int tokens, Rows<float> y) {
        if (!ranks_) {
            each_part(team_, me, tokens, [&](int t, bool) {
                norm_.run(y[t], w.q_norm, q_size(), y[t]);
                norm_.run(y[t] + q_rows(), w.k_norm, kv_size(), y[t] + q_rows());
            });
            return;
        }
        const Rows<float> own{ranks_->mine(), 2};
        const bool counts_k = ranks_->rank() % m_.kv_copies == 0;  // of ranks with the same K/V heads, the first does
        each_part(team_, me, tokens, [&](int t, bool) {
            own[t][0] = sum_of_squares(y[t], q_size());
            own[t][1] = counts_k ? sum_of_squares(y[t] + q_rows(), kv_size()) : 0.0f;
        });
        team_.each(me, 1, [&](int) { ranks_->meet(); });
        const float q_count = (float)q_size() * ranks_->size();
        const float k_count = (float)kv_size() * (ranks_->size() / m_.kv_copies);
        each_part(team_, me, tokens, [&](int t, bool) {
            float squares[2] = {};
            ranks_->add(squares, 2 * t, 2);
            float* k = y[t] + q_rows();
            scale_to_norm(y[t], w.q_norm, q_size(), squares[0] / q_count, m_.eps, y[t]);
            scale_to_norm(k, w.k_norm, kv_size(), squares[1] / k_count, m_.eps, k);
        });
    }

    // Apply the gates of some heads of a token, where the model has any.
    //
    //   y    of the token, with the gates
    //   out  [heads, head_dim] of the token
    void gate(const float* y, int first, int count, X* out) const {
        if (m_.head_gate) {
            const float* gates = y + q_rows() + 2 * kv_size();
            for (int h = first; h < first + count; h++) apply_gate_of_all(gates[h], m_.head_dim, out + h * m_.head_dim);
        }
        if (!m_.output_gate) return;
        for (int h = first; h < first + count; h++)
            apply_gate(y + (2 * h + 1) * m_.head_dim, m_.head_dim, out + h * m_.head_dim);
    }

    // `Projections::run`, beside which other processes compute what is offloaded to them.
    void run_product(Team::Member& me, const LoraTask<T>& task) {
        if (task.step.offloaded) team_.each(me, 1, [&](int) { offloader_.offload(task); });
        projections_.run(me, task);
        if (!task.step.offloaded) return;
        team_.each(me, 1, [&](int) { offloader_.collect(task.step); });
        each_part(team_, me, task.step.tokens, [&](int t, bool) { offloader_.add(task, t); });
    }

    // y += multiplier · norm(product), of several ranks that of the sum of what each has. Without a norm and a multiplier the
    // product is added to y as it is computed.
    //
    //   me          the thread
    //   task        the product, with the residual stream as its y
    //   norm        [hidden]; null: none
    //   multiplier  of what is added
    void add_to_residual(Team::Member& me, LoraTask<T> task, const float* norm, float multiplier) {
        const bool direct = !norm && multiplier == 1;
        const Rows<float> x = task.y, sum = direct ? x : rows_of(y_, m_.hidden);
        task.y = sum;
        if (ranks_) {
            task.y.data = ranks_->mine();
            projections_.run(me, task);
            team_.each(me, 1, [&](int) { ranks_->meet(); });
        } else {
            task.accumulate = direct;
            run_product(me, task);
            if (direct) return;
        }
        each_part(team_, me, task.step.tokens, [&](int t, bool) {
            if (ranks_) {
                if (!direct) std::fill_n(sum[t], m_.hidden, 0.0f);
                ranks_->add(sum[t], t * sum.stride, m_.hidden);
            }
            if (!direct) add_part(sum[t], norm, multiplier, x[t]);
        });
    }

    // x += multiplier · norm(part) of a token.
    void add_part(float* part, const float* norm, float multiplier, float* x) const {
        if (norm) norm_.run(part, norm, m_.hidden, part);
        add_scaled(part, m_.hidden, multiplier, x);
    }

    // The same of the experts of layer l with weights w, which read normed.
    void add_experts(Team::Member& me, int tokens, const LayerDesc& w, int l, Rows<float> x) {
        const Rows<float> sum = rows_of(y_, m_.hidden);
        const Rows<float> own{ranks_ ? ranks_->mine() : sum.data, sum.stride};
        const auto add = [&](int t) {
            if (w.experts_factor != 1) scale_by(sum[t], m_.hidden, w.experts_factor);
            add_part(sum[t], w.mlp_out_norm, w.residual_multiplier, x[t]);
        };
        experts_.run(me, w, l, rows_of(normed_, m_.hidden));
        each_part(team_, me, tokens, [&](int t, bool) {
            experts_.add_up(w, t, me.thread, own[t]);
            if (!ranks_) add(t);
        });
        if (!ranks_) return;
        team_.each(me, 1, [&](int) { ranks_->meet(); });
        each_part(team_, me, tokens, [&](int t, bool) {
            std::fill_n(sum[t], m_.hidden, 0.0f);
            ranks_->add(sum[t], t * sum.stride, m_.hidden);
            add(t);
        });
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

    // normed = norm(x); x itself where weight is null. experts: read it, too.
    void normalise(Team::Member& me, int tokens, const float* weight, bool experts) {
        const Rows<float> x = rows_of(x_, m_.hidden);
        const Rows<X> normed = rows_of(normed_, m_.hidden);
        each_part(team_, me, tokens, [&](int t, bool) {
            if (weight) norm_.run(x[t], weight, m_.hidden, normed[t]);
            else convert(x[t], m_.hidden, normed[t]);
            if (experts) experts_.take(t, normed[t]);
        });
    }

    // Of token t, one K/V head and the query heads that share it: norm each (where the layer does) and rotate q and k, then write
    // q to its buffer, k and v to their page.
    template <class P>
    void rotate_and_store(const StepDesc& step, const LayerDesc& w, const PagedCache<P>& cache, int t, int kv_head,
                          AttentionScratch& scratch) {
        const int head_dim = m_.head_dim;
        float* y = rows_of(y_, outputs(w, kQkv))[t];
        X* q = rows_of(q_, q_size())[t];
        const int64_t at = step.positions[t] * w.rotary_dim;
        const Rotation rotation{w.cos + at, w.sin + at, w.rotary_dim, w.interleaved != 0};
        const int64_t place = cache.at(step.page[w.page_group * step.page_stride + t], step.offset[t], kv_head);
        for (int i = 0; i <= cache.group; i++) {
            const bool key = i == cache.group;
            const int head = kv_head * cache.group + i;
            float* x = key ? y + q_rows() + kv_head * head_dim : y + (head << m_.output_gate) * head_dim;
            if (const float* norm = w.norms_all_heads ? nullptr : key ? w.k_norm : w.q_norm)
                norm_.run(x, norm, head_dim, x);
            if (!key && w.query_factors)
                for (int d = 0; d < head_dim; d++) x[d] *= w.query_factors[step.positions[t]];
            if (key) store(cache.k + place, w.k_scale, scratch, [&](T* to) { rotation.run(x, head_dim, to); });
            else rotation.run(x, head_dim, q + head * head_dim);
        }
        const float* v = y + q_rows() + kv_size() + kv_head * head_dim;
        store(cache.v + place, w.v_scale, scratch, [&](T* to) { convert(v, head_dim, to); });
    }

    // Write a head of K or V as T to `out`, or, where that is FP8, round it from there.
    //
    //   out    [head_dim]
    //   scale  of what is stored
    //   write  write(to) writes [head_dim] of T
    template <class P, class Write>
    void store(P* out, float scale, AttentionScratch& scratch, Write write) const {
        if constexpr (std::is_same_v<P, T>) {
            write(out);
        } else {
            grow(scratch.head, m_.head_dim);
            write((T*)scratch.head.data());
            convert_scaled((const T*)scratch.head.data(), m_.head_dim, scale, out);
        }
    }

    ModelDesc m_;
    const Norm norm_{m_.eps, m_.centered != 0};
    std::vector<LayerDesc> layers_;
    Team team_;
    Projections<T> projections_;
    EmbeddingLora<T> embedding_lora_;
    OutputHead<T> head_;
    ExpertsPart<T> experts_;
    Merge<T> merge_;
    Offloader<T> offloader_;
    GatedDelta delta_;
    ShortConv short_conv_;
    Mamba2 mamba_;
    Sampling sampling_;
    std::vector<AttentionScratch> attention_scratch_;
    Shares<AttentionUnit> attention_;
    Shares<DecodeUnit> decodes_;
    int logits_wanted_ = 0;  // of the last step: behind them come the rows to score
    Buffer<float> x_, y_;
    Buffer<X> normed_, q_, attended_, act_;
    Ranks* ranks_ = nullptr;
    int vocab_ = m_.vocab;
    bool decode_ = false;  // the step has few tokens and each is a row of its own
    std::chrono::nanoseconds patience_{};  // that is left in the step
};

}  // namespace chorus
