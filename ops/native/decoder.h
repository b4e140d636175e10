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
#include "latents.h"
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
#include "ungated.h"

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
          latents_(model, team_),
          merge_(team_),
          offloader_(model),
          delta_(model.delta),
          short_conv_(model.delta),
          mamba_(model.delta),
          attention_scratch_(team_.most()) {
        for (const LayerDesc& w : layers_) {
            gates_[w.product[kGateUp]] = is_gated(w.activation);
            q_size_ = std::max(q_size_, attended_size(w));
            if (w.latent.heads) continue;
            auto same = [&](const Shape& shape) { return shape.heads == w.heads; };
            if (std::none_of(shapes_.begin(), shapes_.end(), same)) shapes_.push_back({w.heads});
            has_beside_ |= has(w, kBesideIn);
            has_apart_ |= has(w, kBesideIn) || (w.parallel && w.mlp_norm);
        }
    }

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

    bool gaps() const { return m_.output_gate == kBesideQueries; }  // between queries there are gates
    int kv_rows(const LayerDesc& w) const { return w.heads.kv_size() * (w.keys_are_values ? 1 : 2); }
    int q_rows(const LayerDesc& w) const { return w.heads.q_size() << gaps(); }
    int outputs(const LayerDesc& w, Group g) const { return projections_.products().outputs(w.product[g]); }
    bool has(const LayerDesc& w, Group g) const { return w.product[g] >= 0 && outputs(w, g); }
    int attended_size(const LayerDesc& w) const { return w.latent.heads ? w.latent.out_size() : w.heads.q_size(); }
    int inputs(const LayerDesc& w, Group g) const { return projections_.products().inputs(w.product[g]); }
    int ffn(const LayerDesc& w) const { return inputs(w, kDown); }

    // Buffers and units of work of the step, the same for all layers.
    void plan(const StepDesc& step) {
        const size_t tokens = std::max(step.tokens, step.logits_wanted + step.states_wanted);
        projections_.plan(step);
        const Products& products = projections_.products();
        const int widest = products.most([&](int p) {  // of what is kept of products
            return gates_[p] && projections_.gated(p) ? 0 : products.outputs(p);
        });
        grow_rows(x_, tokens, m_.hidden);
        grow_rows(y_, tokens, widest);
        grow_rows(normed_, tokens, m_.hidden);
        if (has_apart_) grow_rows(apart_, tokens, m_.hidden);
        grow_rows(q_, tokens, q_size_);
        grow_rows(attended_, tokens, std::max(q_size_, m_.delta.v_size()));
        if (has_beside_) grow_rows(beside_, tokens, m_.delta.v_size());
        if (m_.delta.v_heads) plan_mixer(step);
        grow_rows(act_, tokens,
                  products.most([&](int p) { return products.group(p) == kDown ? products.inputs(p) : 0; }));
        decode_ = projections_.few() && step.tokens == step.rows;
        for (Shape& shape : shapes_) plan_attention(step, shape);
        experts_.plan(step);
        latents_.plan(step);
        embedding_lora_.plan(step.model_segments);
        head_.plan_adapters(step);
        head_.plan(step.logits_wanted, step.samples);
    }

    // Units of work of attention of some heads.
    struct Shape {
        Heads heads;
        Shares<AttentionUnit> prompts{};
        Shares<DecodeUnit> decodes{};
    };

    void plan_attention(const StepDesc& step, Shape& shape) {
        const Heads& heads = shape.heads;
        if (decode_) {
            decode_units(step.kv_lens, step.rows, heads.kv, team_.size(), shape.decodes.units);
            shape.decodes.split(team_.size(), [&](const DecodeUnit& u) { return step.kv_lens[u.row] * u.heads; });
        } else {
            attention_units(step.qo_indptr, step.rows, heads.count, heads.kv, shape.prompts.units);
            shape.prompts.split(team_.size(), [&](const AttentionUnit& u) {
                return u.tokens * (step.kv_lens[u.row] - step.qo_indptr[u.row + 1] + u.token + u.tokens);
            });
        }
    }

    const Shape& shape_of(const LayerDesc& w) const {
        return *std::find_if(shapes_.begin(), shapes_.end(),
                             [&](const Shape& shape) { return shape.heads == w.heads; });
    }

    // A thread's part of a step.
    void walk(const StepDesc& step, Team::Member& me) {
        const int tokens = step.tokens, hidden = m_.hidden;
        const Rows<float> x = rows_of(x_, hidden);
        const Rows<X> normed = rows_of(normed_, hidden), apart = rows_of(apart_, hidden);
        const bool waits = step.segment_ready || step.model_ready || step.mixture_ready;
        // Not by parts: a team's very first phase has the tag that untouched shares have.
        if (waits) team_.each(me, 1, [&](int) { wait_for_layer(step, 0); });
        team_.each(me, tokens, [&](int t) {
            const int64_t token = step.token_ids[t];
            if (token < vocab_) convert((const T*)m_.embed + token * hidden, hidden, x[t]);
            else std::fill(x[t], x[t] + hidden, 0.0f);  // an adapter has the row
            embedding_lora_.add(step.model_segments, me.thread, t, step.token_ids[t], x[t]);
            if (m_.embedding_multiplier != 1) scale_by(x[t], hidden, m_.embedding_multiplier);
            if (m_.embedding_norm) norm_.run(x[t], m_.norm, hidden, x[t]);
        });
        const LayerDesc* layers = step.layer ? step.layer : layers_.data();
        for (int l = 0; l < m_.layers; l++) {
            const LayerDesc& w = layers[l];
            if (waits && l) team_.each(me, 1, [&](int) { wait_for_layer(step, l); });
            const float out = w.residual_multiplier;
            if (has(w, kO)) {
                normalise(me, tokens, w.attention_norm, normed, w.attention_in_factor,
                          w.experts && w.parallel && !w.mlp_norm);
                if (w.parallel && w.mlp_norm) normalise(me, tokens, w.mlp_norm, apart, 1, w.experts);
                if (has(w, kBesideIn)) mix_beside(step, me, w, l);
                const LoraTask<T> o = task(step, w, l, kO, mix(step, me, w, l), x);
                add_to_residual(me, o, w.attention_out_norm, out * w.attention_out_factor);
            }
            if (has(w, kBesideOut)) {
                const LoraTask<T> o = task(step, w, l, kBesideOut, rows_of(beside_, m_.delta.v_size()), x);
                add_to_residual(me, o, nullptr, out * w.beside_out_factor);
            }
            if (w.experts) {
                if (!w.parallel) normalise(me, tokens, w.mlp_norm, normed, 1, true);
                add_experts(me, tokens, w, l, w.parallel && w.mlp_norm ? apart : normed, x);
            } else if (has(w, kDown)) {
                if (!w.parallel) normalise(me, tokens, w.mlp_norm, normed);
                feed_forward(step, me, w, l, w.parallel && w.mlp_norm ? apart : normed);
            }
            if (w.output_factor != 1)
                each_part(team_, me, tokens, [&](int t, bool) { scale_by(x[t], hidden, w.output_factor); });
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

    // Add to the residual stream what the feed-forward part of layer l makes of `inputs`, with weights w.
    void feed_forward(const StepDesc& step, Team::Member& me, const LayerDesc& w, int l, Rows<const X> inputs) {
        const int size = ffn(w), width = outputs(w, kGateUp);
        const Rows<float> y = rows_of(y_, width);
        const Rows<X> act = rows_of(act_, size);
        const LoraTask<T> up = task(step, w, l, kGateUp, inputs, y);
        if (is_gated(w.activation) && projections_.gated(w.product[kGateUp])) {
            projections_.run_gated(me, up, w.activation, w.gate_factor, act);
        } else {
            run_product(me, up);
            each_part(team_, me, step.tokens, [&](int t, bool) {
                if (w.gate_factor != 1) scale_by(y[t], size, w.gate_factor);
                if (is_gated(w.activation)) activate(w.activation, y[t], y[t] + size, size, act[t]);
                else activate_alone(w.activation, w.xielu, y[t], size, act[t]);
            });
        }
        const LoraTask<T> down = task(step, w, l, kDown, act, rows_of(x_, m_.hidden));
        add_to_residual(me, down, w.mlp_out_norm, w.residual_multiplier * w.part_factor);
    }

    // What the mixer of layer l makes of normed, with weights w.
    Rows<X> mix(const StepDesc& step, Team::Member& me, const LayerDesc& w, int l) {
        const Rows<float> y = rows_of(y_, outputs(w, kQkv));
        run_product(me, task(step, w, l, kQkv, rows_of(normed_, m_.hidden), y));
        const bool recurs = w.delta.conv && !has(w, kBesideIn);
        const Rows<X> out = rows_of(attended_, recurs ? m_.delta.v_size() : attended_size(w));
        if (recurs) recur(step, me, w, l, y, out);
        else if (w.latent.heads) attend_latents(step, me, w, l, y, out);
        else if (m_.float8_kv) attend<Float8<X>>(step, me, w, y, out);
        else attend<T>(step, me, w, y, out);
        return out;
    }

    // out = attention of layer l with weights w, whose keys and values are latents.
    void attend_latents(const StepDesc& step, Team::Member& me, const LayerDesc& w, int l, Rows<float> y, Rows<X> out) {
        latents_.write(me, step, w.latent, y);
        if (w.latent.q_rank) {
            y = rows_of(y_, outputs(w, kQueryUp));
            run_product(me, task(step, w, l, kQueryUp, latents_.query_latents(w.latent), y));
        }
        latents_.attend(me, step, w.latent, l, y, out);
    }

    // What the mixer beside attention in layer l makes of the residual stream, in `beside_`.
    void mix_beside(const StepDesc& step, Team::Member& me, const LayerDesc& w, int l) {
        const Rows<X> inputs = rows_of(apart_, m_.hidden);
        const Rows<float> y = rows_of(y_, outputs(w, kBesideIn));
        normalise(me, step.tokens, w.attention_norm, inputs, w.beside_in_factor);
        run_product(me, task(step, w, l, kBesideIn, inputs, y));
        if (w.beside_factors)
            each_part(team_, me, step.tokens,
                      [&](int t, bool) { multiply_each(y[t], w.beside_factors, outputs(w, kBesideIn), y[t]); });
        recur(step, me, w, l, y, rows_of(beside_, m_.delta.v_size()));
    }

    void plan_mixer(const StepDesc& step) {
        const int seen = step.tokens + step.state_accepted[step.rows];
        const bool drafts = m_.most_drafts > 0;
        if (m_.delta.mixer == Mixer::kDelta) delta_.plan(seen, drafts, team_.size());
        const int latents = projections_.products().most([&](int p) {
            return projections_.products().group(p) == kDecayUp ? projections_.products().inputs(p) : 0;
        });
        if (latents) {
            grow_rows(gate_latents_, step.tokens, latents), grow_rows(decay_latents_, step.tokens, latents);
            grow_rows(gates_made_, step.tokens, m_.delta.v_size());
            grow_rows(decays_made_, step.tokens, m_.delta.decays());
        }
        if (m_.delta.mixer == Mixer::kMamba2) mamba_.plan(step.tokens, seen, drafts, team_.size());
    }

    // out = what a recurrent mixer of layer l with weights w makes of y.
    void recur(const StepDesc& step, Team::Member& me, const LayerDesc& w, int l, Rows<const float> y, Rows<X> out) {
        const PagedStates states{m_, step, w.state_layer};
        switch (m_.delta.mixer) {
            case Mixer::kDelta: return delta_.run(team_, me, w.delta, states, delta_inputs(step, me, w, l, y), out);
            case Mixer::kShortConv: return short_conv_.run(team_, me, w.delta, states, y, out);
            case Mixer::kMamba2: return mamba_.run(team_, me, ranks_, w.delta, states, step.tokens, y, out);
        }
    }

    // What Gated DeltaNet of layer l takes of y, some of which may be latents that products make gates and decays of.
    DeltaInputs delta_inputs(const StepDesc& step, Team::Member& me, const LayerDesc& w, int l, Rows<const float> y) {
        if (!has(w, kDecayUp)) return delta_.inputs(y);
        const int rank = inputs(w, kDecayUp), gates_at = m_.delta.channels(), b = gates_at + rank;
        const Rows<X> latents[2] = {rows_of(gate_latents_, rank), rows_of(decay_latents_, rank)};
        const Rows<float> gates = rows_of(gates_made_, m_.delta.v_size()),
                          decays = rows_of(decays_made_, m_.delta.decays());
        each_part(team_, me, step.tokens, [&](int t, bool) {
            convert(y[t] + gates_at, rank, latents[0][t]);
            convert(y[t] + b + m_.delta.v_heads, rank, latents[1][t]);
        });
        run_product(me, task(step, w, l, kOutputGateUp, latents[0], gates));
        run_product(me, task(step, w, l, kDecayUp, latents[1], decays));
        return {y, gates, y.from(0, b), decays};
    }

    // out = attention of a layer with weights w: q, k and v, which y has, are rotated, and k and v written to their pages, whose
    // elements are P.
    template <class P>
    void attend(const StepDesc& step, Team::Member& me, const LayerDesc& w, Rows<float> y, Rows<X> out) {
        const Heads& heads = w.heads;
        const Rows<X> q = rows_of(q_, heads.q_size());
        const int64_t plane = (int64_t)m_.block_tokens * heads.kv_size();
        P* keys = (P*)m_.arena + 2 * w.page_layer * plane;
        const PagedCache<P> cache{keys,
                                  keys + plane,
                                  m_.page_bytes / (int64_t)sizeof(P),
                                  m_.block_tokens,
                                  m_.page_groups,
                                  heads.kv,
                                  heads.dim,
                                  heads.count / heads.kv,
                                  w.scale * w.k_scale,
                                  w.v_scale,
                                  w.softcap,
                                  w.window,
                                  w.chunked != 0,
                                  w.sinks};
        if (w.head_norm == kAllHeads) normalise_heads(me, w, step.tokens, y);
        auto rotate = [&](int t, int first, int count) {
            for (int h = first; h < first + count; h++)
                rotate_and_store(step, w, cache, t, h, attention_scratch_[me.thread]);
        };
        auto row_of = [&](int row) {
            return KvRow{step.page_table + row * step.table_stride + w.page_group, step.kv_lens[row]};
        };
        if (decode_) {
            shape_of(w).decodes.each(team_, me, [&](const DecodeUnit& unit, const DecodeUnit* next) {
                const int row = unit.row;
                rotate(row, unit.first, unit.heads);
                attend_decode<P>(cache, unit, q[row], out[row], row_of(row), attention_scratch_[me.thread],
                                 next ? NextRead{row_of(next->row), next->first} : NextRead{});
                gate(w, y[row], unit.first * cache.group, unit.heads * cache.group, out[row]);
            });
            return;
        }
        each_part(team_, me, step.tokens, [&](int t, bool) {
            for (int i = 0; i < y.stride; i += kLanes) prefetch(y[t + 1] + i);
            rotate(t, 0, heads.kv);
        });
        shape_of(w).prompts.each(team_, me, [&](const AttentionUnit& unit, const AttentionUnit*) {
            chorus::attend<P>(cache, unit, q, out, row_of(unit.row), step.qo_indptr[unit.row + 1],
                              attention_scratch_[me.thread]);
            for (int t = unit.token; t < unit.token + unit.tokens; t++)
                gate(w, y[t], unit.kv_head * cache.group, cache.group, out[t]);
        });
    }

    // Norm all heads of q, and of k, of each token at once; of several ranks the heads of all of them.
    //
    //   y  [tokens, outputs]: q and k are changed
    void normalise_heads(Team::Member& me, const LayerDesc& w, int tokens, Rows<float> y) {
        if (!ranks_) {
            each_part(team_, me, tokens, [&](int t, bool) {
                float* k = y[t] + q_rows(w);
                scale_queries(w, y[t], query_squares(w, y[t]) / w.heads.q_size());
                rms_norm(k, w.k_norm, w.heads.kv_size(), m_.eps, k);
            });
            return;
        }
        const Rows<float> own{ranks_->mine(), 2};
        const bool counts_k = ranks_->rank() % m_.kv_copies == 0;  // of ranks with the same K/V heads, the first does
        each_part(team_, me, tokens, [&](int t, bool) {
            own[t][0] = query_squares(w, y[t]);
            own[t][1] = counts_k ? sum_of_squares(y[t] + q_rows(w), w.heads.kv_size()) : 0.0f;
        });
        team_.each(me, 1, [&](int) { ranks_->meet(); });
        const float q_count = (float)w.heads.q_size() * ranks_->size();
        const float k_count = (float)w.heads.kv_size() * (ranks_->size() / m_.kv_copies);
        each_part(team_, me, tokens, [&](int t, bool) {
            float squares[2] = {};
            ranks_->add(squares, 2 * t, 2);
            float* k = y[t] + q_rows(w);
            scale_queries(w, y[t], squares[0] / q_count);
            scale_to_norm(k, w.k_norm, w.heads.kv_size(), squares[1] / k_count, m_.eps, k);
        });
    }

    // Σ x² of a token's queries y.
    float query_squares(const LayerDesc& w, const float* y) const {
        const int count = w.heads.count, n = w.heads.dim;
        if (!gaps()) return sum_of_squares(y, count * n);
        float all = 0;
        for (int h = 0; h < count; h++) all += sum_of_squares(y + 2 * h * n, n);
        return all;
    }
    // The norm of a token's queries y, in place; mean: of their squares.
    void scale_queries(const LayerDesc& w, float* y, float mean) const {
        const int count = w.heads.count, n = w.heads.dim;
        if (!gaps()) return scale_to_norm(y, w.q_norm, count * n, mean, m_.eps, y);
        for (int h = 0; h < count; h++) scale_to_norm(y + 2 * h * n, w.q_norm + h * n, n, mean, m_.eps, y + 2 * h * n);
    }

    // Apply the gates of some heads of a token, where the model has any.
    //
    //   y    of the token, with the gates
    //   out  [heads, head_dim] of the token
    void gate(const LayerDesc& w, const float* y, int first, int count, X* out) const {
        const int n = w.heads.dim;
        const float* behind = y + q_rows(w) + kv_rows(w);
        for (int h = first; h < first + count; h++) switch (m_.output_gate) {
                case kNoGate: return;
                case kBesideQueries: apply_gate(y + (2 * h + 1) * n, n, out + h * n); break;
                case kOfHeads: apply_gate_of_all(behind[h], n, out + h * n); break;
                case kApart: apply_gate(behind + h * n, n, out + h * n);
            }
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
    void add_experts(Team::Member& me, int tokens, const LayerDesc& w, int l, Rows<const X> rows, Rows<float> x) {
        const Rows<float> sum = rows_of(y_, m_.hidden);
        const Rows<float> own{ranks_ ? ranks_->mine() : sum.data, sum.stride};
        const auto add = [&](int t) {
            if (w.experts_factor != 1) scale_by(sum[t], m_.hidden, w.experts_factor);
            add_part(sum[t], w.mlp_out_norm, w.residual_multiplier, x[t]);
        };
        experts_.run(me, w, l, rows);
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

    // normed = factor · norm(x); without a norm where weight is null. experts: read it, too.
    void normalise(Team::Member& me, int tokens, const float* weight, Rows<X> normed, float factor = 1,
                   bool experts = false) {
        const Rows<float> x = rows_of(x_, m_.hidden), wide = rows_of(y_, m_.hidden);
        auto run = [&](int t, auto to) {
            if (weight) norm_.run(x[t], weight, m_.hidden, to);
            else convert(x[t], m_.hidden, to);
        };
        each_part(team_, me, tokens, [&](int t, bool) {
            if (factor == 1) {
                run(t, normed[t]);
            } else {
                run(t, wide[t]);
                scale_by(wide[t], m_.hidden, factor);
                convert(wide[t], m_.hidden, normed[t]);
            }
            if (experts) experts_.take(t, normed[t]);
        });
    }

    // Of token t, one K/V head and the query heads that share it: norm each (where the layer does) and rotate q and k, then write
    // q to its buffer, k and v to their page.
    template <class P>
    void rotate_and_store(const StepDesc& step, const LayerDesc& w, const PagedCache<P>& cache, int t, int kv_head,
                          AttentionScratch& scratch) {
        const int head_dim = w.heads.dim;
        float* y = rows_of(y_, outputs(w, kQkv))[t];
        X* q = rows_of(q_, w.heads.q_size())[t];
        const int64_t at = step.positions[t] * w.rotary_dim;
        const Rotation rotation{w.cos + at, w.sin + at, w.rotary_dim, w.interleaved != 0};
        const int64_t place = cache.at(step.page[w.page_group * step.page_stride + t], step.offset[t], kv_head);
        // Keys may be the values: before their norm.
        const float* v = y + q_rows(w) + (w.keys_are_values ? 0 : w.heads.kv_size()) + kv_head * head_dim;
        if (w.norms_values) v = normed_value(v, head_dim, scratch);
        store(cache.v + place, w.v_scale, scratch, head_dim, [&](T* to) { convert(v, head_dim, to); });
        for (int i = 0; i <= cache.group; i++) {
            const bool key = i == cache.group;
            const int head = kv_head * cache.group + i;
            float* x = key ? y + q_rows(w) + kv_head * head_dim : y + (head << gaps()) * head_dim;
            if (const float* norm = key ? w.k_norm : w.q_norm) normalise_head(w, norm, key ? kv_head : head, x);
            if (!key && w.query_factors)
                for (int d = 0; d < head_dim; d++) x[d] *= w.query_factors[step.positions[t]];
            if (key)
                store(cache.k + place, w.k_scale, scratch, head_dim, [&](T* to) { rotation.run(x, head_dim, to); });
            else if (!w.query_weights) rotation.run(x, head_dim, q + head * head_dim);
            else {
                grow(scratch.head, head_dim);
                rotation.run(x, head_dim, scratch.head.data());
                multiply_each(scratch.head.data(), w.query_weights, head_dim, q + head * head_dim);
            }
        }
    }

    // The norm of a head of q or k, unless it was normalised with all the others.
    void normalise_head(const LayerDesc& w, const float* norm, int head, float* x) const {
        const int n = w.heads.dim;
        if (w.head_norm == kEachHead) rms_norm(x, norm, n, m_.eps, x);
        if (w.head_norm == kOwnHeads) layer_norm(x, norm + head * n, nullptr, n, m_.eps, x);
    }

    // The norm of a head of v, which has no weights.
    const float* normed_value(const float* v, int head_dim, AttentionScratch& scratch) const {
        grow(scratch.value, head_dim);
        std::copy_n(v, head_dim, scratch.value.data());
        scale_by(scratch.value.data(), head_dim,
                 1.0f / __builtin_sqrtf(sum_of_squares(v, head_dim) / head_dim + m_.eps));
        return scratch.value.data();
    }

    // Write a head of K or V as T to `out`, or, where that is FP8, round it from there.
    //
    //   out    [head_dim]
    //   scale  of what is stored
    //   write  write(to) writes [head_dim] of T
    template <class P, class Write>
    void store(P* out, float scale, AttentionScratch& scratch, int head_dim, Write write) const {
        if constexpr (std::is_same_v<P, T>) {
            write(out);
        } else {
            grow(scratch.head, head_dim);
            write((T*)scratch.head.data());
            convert_scaled((const T*)scratch.head.data(), head_dim, scale, out);
        }
    }

    ModelDesc m_;
    const Norm norm_{m_.eps, m_.centered != 0, m_.biased != 0};
    std::vector<LayerDesc> layers_;
    Team team_;
    Projections<T> projections_;
    std::vector<char> gates_ = std::vector<char>(m_.num_products);  // of each product: whether it is of gate and up
    EmbeddingLora<T> embedding_lora_;
    OutputHead<T> head_;
    ExpertsPart<T> experts_;
    LatentsPart<T> latents_;
    Merge<T> merge_;
    Offloader<T> offloader_;
    GatedDelta delta_;
    ShortConv short_conv_;
    Mamba2 mamba_;
    Sampling sampling_;
    std::vector<AttentionScratch> attention_scratch_;
    std::vector<Shape> shapes_;
    int q_size_ = 0;  // the largest of any layer
    int logits_wanted_ = 0;  // of the last step: behind them come the rows to score
    Buffer<float> x_, y_;
    Buffer<X> normed_, q_, attended_, act_;
    Buffer<X> gate_latents_, decay_latents_;
    Buffer<float> gates_made_, decays_made_;
    Buffer<X> apart_;  // a second part's norm of the residual stream that attention has
    Buffer<X> beside_;  // what a mixer beside attention gives
    bool has_apart_ = false, has_beside_ = false;
    Ranks* ranks_ = nullptr;
    int vocab_ = m_.vocab;
    bool decode_ = false;  // the step has few tokens and each is a row of its own
    std::chrono::nanoseconds patience_{};  // that is left in the step
};

}  // namespace chorus
