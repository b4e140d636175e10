// Attention between a layer's two products: queries and keys are normalised and rotated, keys and values written to their pages.
#pragma once
#include <algorithm>
#include <vector>
#include "attention/attention.h"
#include "attention/decode_attention.h"
#include "program/descriptors.h"
#include "attention/prefill_attention.h"
#include "ranks/ranks.h"
#include "program/registers.h"
#include "team/shares.h"
#include "units.h"

namespace chorus {

template <class T>
class Attention {
    using X = Act<T>;

   public:
    Attention(const ModelDesc& model, Team& team, Registers<T>& registers)
        : m_(model), team_(team), registers_(registers), scratch_(team.most()) {
        for (int i = 0; i < model.num_ops; i++) {
            if (model.ops[i].kind != OpKind::kAttend) continue;
            const Heads& heads = arguments_of<AttendOp>(model.ops[i]).heads;
            auto same = [&](const Shape& shape) { return shape.heads == heads; };
            if (std::none_of(shapes_.begin(), shapes_.end(), same)) shapes_.push_back({heads});
        }
    }

    void join(Ranks* ranks) { ranks_ = ranks; }

    // Units of work of a step. decode: it has few tokens and each is a row of its own
    void plan(const StepDesc& step, bool decode) {
        decode_ = decode;
        for (Shape& shape : shapes_) plan(step, shape);
    }

    // Run a layer's attention. Called by every thread of the team alike.
    void run(Team::Member& me, const StepDesc& step, const AttendOp& op);

   private:
    // Units of work of attention of some heads.
    struct Shape {
        Heads heads;
        Shares<AttentionUnit> prompts{};
        Shares<DecodeUnit> decodes{};
    };

    void plan(const StepDesc& step, Shape& shape) {
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

    const Shape& shape_of(const Heads& heads) const {
        return *std::find_if(shapes_.begin(), shapes_.end(), [&](const Shape& shape) { return shape.heads == heads; });
    }

    // As `run`, with pages whose elements are P.
    template <class P>
    void attend(const StepDesc& step, Team::Member& me, const AttendOp& w) {
        const Heads& heads = w.heads;
        const Rows<float> y = registers_.floats(w.x);
        const Rows<X> q = registers_.rounded(w.q), out = registers_.rounded(w.out);
        const int head_stride = heads.dim + w.behind;
        const int64_t plane = (int64_t)m_.block_tokens * heads.kv * head_stride;
        P* keys = (P*)m_.arena + 2 * w.page_layer * plane;
        const PagedCache<P> cache{keys,
                                  keys + plane,
                                  m_.page_bytes / (int64_t)sizeof(P),
                                  m_.block_tokens,
                                  m_.page_groups,
                                  heads.kv,
                                  heads.dim,
                                  head_stride,
                                  heads.count / heads.kv,
                                  w.scale * w.k_scale,
                                  w.v_scale,
                                  w.softcap,
                                  w.window,
                                  w.chunked != 0,
                                  w.sinks,
                                  w.slopes};
        if (w.head_norm == kAllHeads) normalise_heads(me, w, step.tokens, y);
        auto rotate = [&](int t, int first, int count) {
            for (int h = first; h < first + count; h++)
                rotate_and_store(step, w, cache, t, h, y[t], q[t], scratch_[me.thread]);
        };
        auto row_of = [&](int row) {
            return KvRow{step.page_table + row * step.table_stride + w.page_group, step.kv_lens[row]};
        };
        if (decode_) {
            shape_of(heads).decodes.each(team_, me, [&](const DecodeUnit& unit, const DecodeUnit* next) {
                const int row = unit.row;
                rotate(row, unit.first, unit.heads);
                if (w.chosen && step.kv_lens[row] > w.top_k)
                    for (int h = unit.first; h < unit.first + unit.heads; h++)
                        attend_chosen(cache, w, row, h, q, out, row_of(row), me.thread);
                else
                    attend_decode<P>(cache, unit, q[row], out[row], row_of(row), scratch_[me.thread],
                                     next ? NextRead{row_of(next->row), next->first} : NextRead{});
                gate(w, y[row], unit.first * cache.group, unit.heads * cache.group, out[row]);
            });
            return;
        }
        each_part(team_, me, step.tokens, [&](int t, bool) {
            for (int i = 0; i < y.stride; i += kLanes) prefetch(y[t + 1] + i);
            rotate(t, 0, heads.kv);
        });
        const BlockSight blocks{step.block_before, step.block_behind, (BlockMask)w.blocks};
        shape_of(heads).prompts.each(team_, me, [&](const AttentionUnit& unit, const AttentionUnit*) {
            const KvRow row = row_of(unit.row);
            const int row_end = step.qo_indptr[unit.row + 1], before = row.length - row_end + 1;
            AttentionUnit whole = unit;  // tokens that attend to all that they see
            if (w.chosen) whole.tokens = std::clamp(w.top_k - before - unit.token + 1, 0, unit.tokens);
            if (whole.tokens) chorus::attend<P>(cache, whole, q, out, row, row_end, blocks, scratch_[me.thread]);
            for (int t = unit.token + whole.tokens; t < unit.token + unit.tokens; t++)
                attend_chosen(cache, w, t, unit.kv_head, q, out, KvRow{row.pages, before + t}, me.thread);
            for (int t = unit.token; t < unit.token + unit.tokens; t++)
                gate(w, y[t], unit.kv_head * cache.group, cache.group, out[t]);
        });
    }

    // Attention of a token's queries of a K/V head to the blocks that are chosen for them. row: up to the token.
    template <class P>
    void attend_chosen(const PagedCache<P>& cache, const AttendOp& w, int token, int kv_head, Rows<const X> q,
                       Rows<X> out, const KvRow& row, int thread) {
        AttentionScratch& own = scratch_[thread];
        const int top = w.top_k / w.block;
        const int32_t* blocks = registers_.indices(w.chosen)[token] + kv_head * top;
        own.chosen.clear();
        for (int i = 0; i < top; i++)
            for (int s = blocks[i] * w.block; s < std::min(row.length, (blocks[i] + 1) * w.block); s++)
                own.chosen.push_back(s);
        const KeyList list{own.chosen.data(), 0, (int)own.chosen.size()};
        attend_decode<P>(cache, DecodeUnit{token, kv_head, 1}, q[token], out[token], row, own, NextRead{}, list);
    }

    // Norm all heads of q, and of k, of each token at once; of several ranks the heads of all of them.
    //
    //   y  [tokens, outputs]: q and k are changed
    void normalise_heads(Team::Member& me, const AttendOp& w, int tokens, Rows<float> y) {
        if (!ranks_) {
            each_part(team_, me, tokens, [&](int t, bool) {
                float* k = y[t] + w.q_rows();
                scale_queries(w, y[t], query_squares(w, y[t]) / w.heads.q_size());
                if (w.has_keys) rms_norm(k, w.k_norm, w.heads.kv_size(), w.eps, k);
            });
            return;
        }
        const Rows<float> own{ranks_->mine(), 2};
        const bool counts_k =
            w.has_keys && ranks_->rank() % w.kv_copies == 0;  // of ranks with the same K/V heads, the first does
        each_part(team_, me, tokens, [&](int t, bool) {
            own[t][0] = query_squares(w, y[t]);
            own[t][1] = counts_k ? sum_of_squares(y[t] + w.q_rows(), w.heads.kv_size()) : 0.0f;
        });
        team_.each(me, 1, [&](int) { ranks_->meet(); });
        const float q_count = (float)w.heads.q_size() * ranks_->size();
        const float k_count = (float)w.heads.kv_size() * (ranks_->size() / w.kv_copies);
        each_part(team_, me, tokens, [&](int t, bool) {
            float squares[2] = {};
            ranks_->add(squares, 2 * t, 2);
            float* k = y[t] + w.q_rows();
            scale_queries(w, y[t], squares[0] / q_count);
            if (w.has_keys) scale_to_norm(k, w.k_norm, w.heads.kv_size(), squares[1] / k_count, w.eps, k);
        });
    }

    // Σ x² of a token's queries y.
    float query_squares(const AttendOp& w, const float* y) const {
        const int count = w.heads.count, n = w.heads.dim;
        if (!w.gaps()) return sum_of_squares(y, count * n);
        float all = 0;
        for (int h = 0; h < count; h++) all += sum_of_squares(y + 2 * h * n, n);
        return all;
    }
    // The norm of a token's queries y, in place; mean: of their squares.
    void scale_queries(const AttendOp& w, float* y, float mean) const {
        const int count = w.heads.count, n = w.heads.dim;
        if (!w.gaps()) return scale_to_norm(y, w.q_norm, count * n, mean, w.eps, y);
        for (int h = 0; h < count; h++) scale_to_norm(y + 2 * h * n, w.q_norm + h * n, n, mean, w.eps, y + 2 * h * n);
    }

    // Apply the gates of some heads of a token, where the model has any.
    //
    //   y    of the token, with the gates
    //   out  [heads, head_dim] of the token
    void gate(const AttendOp& w, const float* y, int first, int count, X* out) const {
        const int n = w.heads.dim;
        const float* behind = y + w.q_rows() + w.kv_rows();
        auto each = [&](const float* gates, int h) {
            if (w.softplus_gates) apply_softplus(gates, n, out + h * n);
            else apply_gate(gates, n, out + h * n);
        };
        for (int h = first; h < first + count; h++) switch (w.output_gate) {
                case kNoGate: return;
                case kBesideQueries: each(y + (2 * h + 1) * n, h); break;
                case kPerHead:
                    if (w.softplus_gates) apply_softplus_of_all(behind[h], n, out + h * n);
                    else apply_gate_of_all(behind[h], n, out + h * n);
                    break;
                case kPerElement: each(behind + h * n, h);
            }
    }

    // Of token t, one K/V head and the query heads that share it: norm each (where the layer does) and rotate q and k, then write
    // q to its buffer, k and v to their page.
    template <class P>
    void rotate_and_store(const StepDesc& step, const AttendOp& w, const PagedCache<P>& cache, int t, int kv_head,
                          float* y, X* q, AttentionScratch& scratch) {
        const int head_dim = w.heads.dim;
        const int64_t at = step.positions[t] * w.rotary_dim;
        const Rotation rotation{w.cos + at, w.sin + at, w.rotary_dim, w.interleaved != 0};
        const int64_t place = cache.at(step.page[w.page_group * step.page_stride + t], step.offset[t], kv_head);
        if (w.has_keys) {
            // Keys may be the values: before their norm.
            const float* v = y + w.q_rows() + (w.keys_are_values ? 0 : w.heads.kv_size()) + kv_head * head_dim;
            if (w.norms_values) v = normed_value(v, head_dim, w.eps, scratch);
            store(cache.v + place, w.v_scale, scratch, head_dim, [&](T* to) { convert(v, head_dim, to); });
        }
        for (int i = 0; i < cache.group + w.has_keys; i++) {
            const bool key = i == cache.group;
            const int head = kv_head * cache.group + i;
            float* x = key ? y + w.q_rows() + kv_head * head_dim : y + (head << w.gaps()) * head_dim;
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
    void normalise_head(const AttendOp& w, const float* norm, int head, float* x) const {
        const int n = w.heads.dim;
        if (w.head_norm == kEachHead) rms_norm(x, norm, n, w.eps, x);
        if (w.head_norm == kOwnHeads) layer_norm(x, norm + head * n, nullptr, n, w.eps, x);
        if (w.head_norm == kBiasedHeads) layer_norm(x, norm, norm + n, n, w.eps, x);
    }

    // The norm of a head of v, which has no weights.
    static const float* normed_value(const float* v, int head_dim, float eps, AttentionScratch& scratch) {
        grow(scratch.value, head_dim);
        std::copy_n(v, head_dim, scratch.value.data());
        scale_by(scratch.value.data(), head_dim, 1.0f / __builtin_sqrtf(sum_of_squares(v, head_dim) / head_dim + eps));
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

    const ModelDesc m_;
    Team& team_;
    Registers<T>& registers_;
    std::vector<AttentionScratch> scratch_;
    std::vector<Shape> shapes_;
    Ranks* ranks_ = nullptr;
    bool decode_ = false;
};

template <class T>
void Attention<T>::run(Team::Member& me, const StepDesc& step, const AttendOp& op) {
    if (m_.float8_kv) attend<Float8<X>>(step, me, op);
    else attend<T>(step, me, op);
}

CHORUS_UNIT_ATTENTION_FLOAT void Attention<float>::run(Team::Member&, const StepDesc&, const AttendOp&);
CHORUS_UNIT_ATTENTION_BF16 void Attention<bf16>::run(Team::Member&, const StepDesc&, const AttendOp&);

}  // namespace chorus
