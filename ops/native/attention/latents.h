// The steps of latent attention between a layer's products (MLA, DeepSeek-V2, arXiv 2405.04434 §2.1, appendix C).
//
// Keys and values of heads are never made. A query goes to the latents' space by its head's keys of kv_b_proj, and what is
// attended comes back by its values. An adapter's B · A on kv_b_proj goes the same ways: q · B_K · A, and B_V · A · x. Its
// vectors scale the outputs that nothing computes: queries before they leave, values once they are there. A bias of keys adds
// the same to all scores of a query, which their softmax takes away again.
#pragma once
#include <algorithm>
#include <vector>
#include "team/buffer.h"
#include "program/descriptors.h"
#include "program/registers.h"
#include "attention/latent_attention.h"
#include "gemm/gemm_units.h"
#include "lora/sgmv.h"
#include "team/shares.h"
#include "lora/vectors.h"
#include "units.h"

namespace chorus {

template <class T>
class LatentsPart {
    using X = Act<T>;

   public:
    // team: outlives the object, as registers do
    LatentsPart(const ModelDesc& model, Team& team, Registers<T>& registers)
        : team_(team),
          registers_(registers),
          arena_{(T*)model.arena, model.page_elems},
          block_tokens_(model.block_tokens),
          page_groups_(model.page_groups),
          scratch_(team.most()) {
        for (int i = 0; i < model.num_ops; i++) {
            if (model.ops[i].kind != OpKind::kLatentAttend) continue;
            const LatentDesc& w = arguments_of<LatentAttendOp>(model.ops[i]).latent;
            if (std::none_of(layers_.begin(), layers_.end(), [&](const LatentDesc& own) { return is_alike(own, w); }))
                layers_.push_back(w);
        }
        plans_.resize(layers_.size());
    }

    // Make room for a step, and divide its work.
    void plan(const StepDesc& step) {
        if (layers_.empty()) return;
        const int block = std::min(step.tokens, kBlock);
        int rank = 0, most = 0;
        has_lora_ = undoes_ = false;
        for (int s = 0; s < step.segments.count; s++) {
            const Adapter& adapter = *step.segments.adapters[s];
            const bool own =
                std::any_of(layers_.begin(), layers_.end(), [&](auto& w) { return adapter.has(w.module); });
            if (own) rank = std::max(rank, (int)adapter.rank);
            has_lora_ |= own || adapter.vectors;
            undoes_ |= adapter.vectors && adapter.scale < 0;
        }
        vectors_.plan(step.segments, step.tokens);
        for (size_t i = 0; i < layers_.size(); i++) {
            const LatentDesc& w = layers_[i];
            grow_rows(queries_, block * w.heads, w.dim());
            grow_rows(latents_, block * w.heads, w.kv_rank);
            most = std::max({most, w.kv_rank, w.query(), w.value});
            Plan& plan = plans_[i];
            plan.resize((step.tokens + kBlock - 1) / kBlock);
            for (size_t b = 0; b < plan.size(); b++) {
                latent_units(step.qo_indptr, step.kv_lens, step.rows, b * kBlock,
                             std::min(step.tokens, (int)(b + 1) * kBlock), w.heads, team_.size(), plan[b].units);
                plan[b].split(team_.size(),
                              [&](const LatentUnit& u) { return (long)u.tokens * u.heads * step.kv_lens[u.row]; });
            }
        }
        ldh_ = (rank + 2) & ~1;
        for (Scratch& own : scratch_) {
            grow_rows(own.rows, kRowsOfUnit, most);
            grow_rows(own.scaled, kRowsOfUnit, most);
            grow_rows(own.sums, kRowsOfUnit, most);
            grow(own.head, most);
            grow(own.h, kRowsOfUnit * ldh_);
            if (has_lora_) own.lora.reserve(rank, most);
        }
    }

    // Norm and rotate what all heads share of a token, and write it to its page.
    //
    //   w   the layer
    //   in  [kv_rank + rotated]
    void keep(const StepDesc& step, const LatentDesc& w, int token, const float* in) {
        T* to = arena_.data + w.plane + step.page[w.page_group * step.page_stride + token] * arena_.page_elems +
                step.offset[token] * (w.dim() + w.behind);
        if (w.k_norm) rms_norm(in, w.k_norm, w.kv_rank, w.eps, to);
        else convert(in, w.kv_rank, to);
        rotation(step, w, token).run(in + w.kv_rank, w.rotated, to + w.kv_rank);
    }

    // out = the heads' values.
    //
    //   op   the layer
    //   q    [tokens, heads · (key + rotated)]: neither rotated nor scaled
    //   out  [tokens, heads · value]
    void attend(Team::Member& me, const StepDesc& step, const LatentAttendOp& op, Rows<const float> q, Rows<X> out);

   private:
    static constexpr int kBlock = 512;  // tokens whose queries are in the latents' space at once
    static constexpr int kRowsOfUnit = 64;

    using Plan = std::vector<Shares<LatentUnit>>;  // by block of tokens

    // Of one head and some tokens, panels of the outputs of a product.
    struct Unit {
        int head, token, tokens, panel, end;
    };

    struct Scratch {
        Buffer<X> rows, scaled;  // queries of a unit; those that the weights are multiplied with
        Buffer<float> sums;  // its outputs
        std::vector<float> head;
        Buffer<X> h;
        LoraScratch<T> lora;
        FixedScratch<T> fixed;
        LatentScratch<X> attention;
    };

    static bool is_alike(const LatentDesc& a, const LatentDesc& b) {
        return a.heads == b.heads && a.kv_rank == b.kv_rank && a.key == b.key && a.rotated == b.rotated &&
               a.value == b.value && a.module == b.module;
    }

    size_t plan_of(const LatentDesc& w) const {
        return std::find_if(layers_.begin(), layers_.end(), [&](const LatentDesc& own) { return is_alike(own, w); }) -
               layers_.begin();
    }

    Rotation rotation(const StepDesc& step, const LatentDesc& w, int token) const {
        const int64_t at = step.positions[token] * w.rotary_dim;
        return {w.cos + at, w.sin + at, w.rotary_dim, w.interleaved != 0};
    }

    // run(part, list) for parts of a unit: tokens that see all before them, together, and each other one by itself, with the keys
    // that it attends to.
    template <class Run>
    void each_list(const StepDesc& step, const LatentAttendOp& op, const PagedCache<T>& cache, const LatentUnit& unit,
                   const KvRow& row, Run run) {
        const int before = row.length - step.qo_indptr[unit.row + 1] + 1, end = unit.token + unit.tokens;
        const int top_k = op.chosen ? op.latent.top_k : 0;
        int t = unit.token;
        while (t < end && !(top_k && before + t > top_k) && !cache.first(before + t)) t++;
        if (t > unit.token) run({unit.row, unit.token, t - unit.token, unit.head, unit.heads}, KeyList{});
        for (; t < end; t++) {
            const int visible = before + t, first = cache.first(visible);
            KeyList list{nullptr, first, visible - first};
            if (top_k) {
                list = {registers_.indices(op.chosen)[t], 0, top_k};
                while (list.places[list.count - 1] < 0) list.count--;
            }
            run({unit.row, t, 1, unit.head, unit.heads}, list);
        }
    }

    // run(unit, more) for heads, one after the other, of some tokens; more: the next panels follow in memory. Units of a step
    // with adapters have all panels: what adapters add begins with a product of its own.
    template <class Run>
    void each_unit(Team::Member& me, int heads, int begin, int end, int outputs, Run run) {
        const int panels = (outputs + kPanel - 1) / kPanel, chunks = (end - begin + kRowsOfUnit - 1) / kRowsOfUnit;
        const int all = heads * chunks, wanted = (2 * team_.size() + all - 1) / all;
        const int parts = has_lora_ || team_.size() == 1 ? 1 : std::min(panels, wanted);
        each_part(team_, me, all * parts, [&](int i, bool more) {
            const int part = i % parts, chunk = i / parts % chunks, token = begin + chunk * kRowsOfUnit;
            run(Unit{i / parts / chunks, token, std::min(kRowsOfUnit, end - token), panels * part / parts,
                     panels * (part + 1) / parts},
                more && (part + 1 < parts || chunks == 1));
        });
    }

    // The product of a unit's rows and a head's panels.
    void multiply(Scratch& own, const Unit& unit, Rows<const X> x, const Weights<T>& w, Rows<float> sums, bool more) {
        for (int p = unit.panel; p < unit.end; p++) {
            const int column = p * kPanel;
            weights_gemm<T>({x, 0, unit.tokens, 0, unit.tokens}, w, column,
                            {sums.from(0, column), w.columns(column), false, w.bias ? w.bias + column : nullptr},
                            own.fixed, nullptr, more || p + 1 < unit.end);
        }
    }

    // queries = those of a head in the latents' space, and behind them their rotated elements.
    void absorb(const Team::Member& me, const StepDesc& step, const LatentDesc& w, int layer, const Unit& unit,
                Rows<const float> q, Rows<X> queries, bool more) {
        Scratch& own = scratch_[me.thread];
        const Rows<X> rows = rows_of(own.rows, w.key), scaled = undoes_ ? rows_of(own.scaled, w.key) : rows;
        const Rows<float> sums = rows_of(own.sums, w.kv_rank);
        float* head = own.head.data();
        for (int r = 0; r < unit.tokens; r++) {
            const int t = unit.token + r;
            std::copy_n(q[t] + (long)unit.head * w.query(), w.query(), head);
            if (w.query_factors) scale_by(head, w.query(), w.query_factors[step.positions[t]]);
            if (!unit.panel)
                rotation(step, w, t).run(head + w.key, w.rotated, queries[(long)t * w.heads + unit.head] + w.kv_rank);
            scale(step, w, layer, unit, r, head, 0, w.key, false);
            convert(head, w.key, rows[r]);
            if (!undoes_) continue;
            scale(step, w, layer, unit, r, head, 0, w.key, true);
            convert(head, w.key, scaled[r]);
        }
        const T* keys = (const T*)w.kv_up + unit.head * keys_elems(w);
        multiply(own, unit, scaled, {keys, nullptr, w.kv_rank, w.key, {}}, sums, more);
        const int64_t first = (int64_t)unit.head * w.width();
        each_segment(step, w, layer, unit, [&](const LoraUnit& part, const Adapter& adapter) {
            add_lora(own, {&adapter, layer, 0, adapter.rank, adapter.b_offset[w.module] + (int)first, w.key},
                     {&adapter, layer, 0, adapter.rank, adapter.a_offset[w.module], w.kv_rank}, part, rows, sums);
        });
        const int column = unit.panel * kPanel, columns = std::min(w.kv_rank, unit.end * kPanel) - column;
        for (int r = 0; r < unit.tokens; r++)
            convert(sums[r] + column, columns, queries[(long)(unit.token + r) * w.heads + unit.head] + column);
    }

    // out = the values of a head, of attended latents.
    void expand(const Team::Member& me, const StepDesc& step, const LatentDesc& w, int layer, const Unit& unit,
                Rows<const X> latents, Rows<X> out, bool more) {
        Scratch& own = scratch_[me.thread];
        const Rows<float> sums = rows_of(own.sums, w.value);
        const Rows<const X> x{latents[(long)unit.token * w.heads + unit.head], latents.stride * w.heads};
        const T* values = (const T*)w.kv_up + w.heads * keys_elems(w) + unit.head * values_elems(w);
        const float* bias = w.bias ? w.bias + (long)unit.head * w.width() + w.key : nullptr;
        multiply(own, unit, x, {values, bias, w.value, w.kv_rank, {}}, sums, more);
        for (int r = 0; r < unit.tokens && undoes_; r++) scale(step, w, layer, unit, r, sums[r], w.key, w.value, true);
        each_segment(step, w, layer, unit, [&](const LoraUnit& part, const Adapter& adapter) {
            const int first = unit.head * w.width() + w.key;
            add_lora(own, {&adapter, layer, 0, adapter.rank, adapter.a_offset[w.module], w.kv_rank},
                     {&adapter, layer, 0, adapter.rank, adapter.b_offset[w.module] + first, w.value}, part, x, sums);
        });
        const int column = unit.panel * kPanel, columns = std::min(w.value, unit.end * kPanel) - column;
        for (int r = 0; r < unit.tokens; r++) {
            scale(step, w, layer, unit, r, sums[r], w.key, w.value, false);
            convert(sums[r] + column, columns, out[unit.token + r] + (long)unit.head * w.value + column);
        }
    }

    // Elements of a head's panels of keys, and of values.
    static long keys_elems(const LatentDesc& w) { return (w.kv_rank + kPanel - 1) / kPanel * panel_elems<T>(w.key); }
    static long values_elems(const LatentDesc& w) {
        return (w.value + kPanel - 1) / kPanel * panel_elems<T>(w.kv_rank);
    }

    // run(part, adapter) for segments with kv_b_proj in the layer: part has a unit's tokens, counted from its first.
    template <class Run>
    void each_segment(const StepDesc& step, const LatentDesc& w, int layer, const Unit& unit, Run run) const {
        if (!has_lora_) return;
        const Segments& segments = step.segments;
        for (int s = 0; s < segments.count; s++) {
            const Adapter& adapter = *segments.adapters[s];
            const int begin = std::max(unit.token, segments.begin[s]);
            const int end = std::min(unit.token + unit.tokens, segments.end[s]);
            if (begin < end && adapter.rank && adapter.has(w.module) && adapter.in_layer(layer))
                run({s, 0, 0, 0, begin - unit.token, end - begin}, adapter);
        }
    }

    // sums += scale · x · Inᵀ · Out of an adapter.
    //
    //   in, out  its rank-rows, all of them: of the inputs, and of the outputs
    //   part     tokens
    //   x        [tokens, in.columns]
    //   sums     [tokens, out.columns]
    void add_lora(Scratch& own, RankRows in, RankRows out, LoraUnit part, Rows<const X> x, Rows<float> sums) const {
        const Rows<X> h{own.h.data(), ldh_};
        const int rank = in.count, columns = out.columns, offset = out.offset;
        for (int r = 0; r < rank; r += kRankChunk) {
            part.first = in.first = r, part.count = in.count = std::min(kRankChunk, rank - r);
            shrink<T>(arena_, in, part, x, h, own.lora, {});
        }
        for (int c = 0; c < columns; c += kColumnChunk) {
            part.first = c, part.count = out.columns = std::min(kColumnChunk, columns - c), out.offset = offset + c;
            chorus::expand<T>(arena_, out, part, h, sums, own.lora, {});
        }
    }

    // Apply vectors of adapters to some outputs of a unit's head, at a token. Offsets of keys change no weight of a softmax.
    //
    //   row           of the unit's tokens
    //   y             [count]
    //   first, count  of the head's outputs
    //   undo          those that are undone, instead of the others
    void scale(const StepDesc& step, const LatentDesc& w, int layer, const Unit& unit, int row, float* y, int first,
               int count, bool undo) const {
        if (!vectors_.is_any()) return;
        const int begin = unit.head * w.width() + first;
        vectors_.each(unit.token + row, [&](int s) {
            const Adapter& adapter = *step.segments.adapters[s];
            if ((adapter.scale < 0) != undo) return;
            const VectorPlace place = vector_place<T>(adapter, layer, {w.module, 0, w.heads * w.width()});
            if (place.scale < 0) return;
            each_piece(arena_, adapter, place, {begin, begin + count},
                       [&](const float* scales, const float* offsets, int c, int n) {
                           float* to = y + c - begin;
                           if (!first && undo) divide_each(to, scales, n);
                           else if (!first) multiply_each(to, scales, n, to);
                           else if (undo) undo_scale_and_shift(to, n, scales, offsets);
                           else scale_and_shift(to, n, scales, offsets);
                       });
        });
    }

    static void divide_each(float* y, const float* by, int n) {
        for (int i = 0; i < n; i += kLanes) {
            const Head here = head(n - i);
            store16(y + i, load16(y + i, here) / load16(by + i, here), here);
        }
    }

    Team& team_;
    Registers<T>& registers_;
    const Arena<T> arena_;
    const int block_tokens_, page_groups_;
    std::vector<LatentDesc> layers_;  // those that differ in shape
    std::vector<Plan> plans_;  // of each of them
    std::vector<Scratch> scratch_;
    Buffer<X> queries_, latents_;
    VectorSegments vectors_;
    long ldh_ = 2;
    bool has_lora_ = false, undoes_ = false;  // some adapter of the step may change kv_b_proj; one's vectors are undone
};

template <class T>
void LatentsPart<T>::attend(Team::Member& me, const StepDesc& step, const LatentAttendOp& op, Rows<const float> q,
                            Rows<X> out) {
    const LatentDesc& w = op.latent;
    const int layer = op.layer;
    const PagedCache<T> cache{arena_.data + w.plane,
                              arena_.data + w.plane,
                              arena_.page_elems,
                              block_tokens_,
                              page_groups_,
                              1,
                              w.dim(),
                              w.dim() + w.behind,
                              w.heads,
                              w.scale,
                              1,
                              0,
                              w.window,
                              false,
                              w.sinks,
                              nullptr};
    const Plan& plan = plans_[plan_of(w)];
    for (size_t b = 0; b < plan.size(); b++) {
        const int begin = b * kBlock, end = std::min(step.tokens, begin + kBlock);
        const Rows<X> queries = rows_of(queries_, w.dim()).from(-begin * w.heads);
        const Rows<X> latents = rows_of(latents_, w.kv_rank).from(-begin * w.heads);
        each_unit(me, w.heads, begin, end, w.kv_rank,
                  [&](const Unit& unit, bool more) { absorb(me, step, w, layer, unit, q, queries, more); });
        plan[b].each(team_, me, [&](const LatentUnit& unit, const LatentUnit*) {
            const KvRow row{step.page_table + unit.row * step.table_stride + w.page_group, step.kv_lens[unit.row]};
            each_list(step, op, cache, unit, row, [&](const LatentUnit& part, const KeyList& list) {
                attend_latents<T>(cache, w.kv_rank, part, queries, latents, row, step.qo_indptr[unit.row + 1],
                                  scratch_[me.thread].attention, list);
            });
        });
        each_unit(me, w.heads, begin, end, w.value,
                  [&](const Unit& unit, bool more) { expand(me, step, w, layer, unit, latents, out, more); });
    }
}

CHORUS_UNIT_ATTENTION_FLOAT void LatentsPart<float>::attend(Team::Member&, const StepDesc&, const LatentAttendOp&,
                                                            Rows<const float>, Rows<Act<float>>);
CHORUS_UNIT_ATTENTION_BF16 void LatentsPart<bf16>::attend(Team::Member&, const StepDesc&, const LatentAttendOp&,
                                                          Rows<const float>, Rows<Act<bf16>>);

}  // namespace chorus
