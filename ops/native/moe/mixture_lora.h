// What a step's adapters add in a layer's mixture of experts: to its router, its shared expert, and its experts.
#pragma once
#include <algorithm>
#include <functional>
#include <initializer_list>
#include <vector>
#include "lora/adapters.h"
#include "team/buffer.h"
#include "elementwise/elementwise.h"
#include "lora/sgmv.h"
#include "team/shares.h"
#include "units.h"

namespace chorus {

// Products of a mixture that adapters change; as MIXTURE_GROUPS of memory/pages/projections.py.
enum MixtureGemm : int32_t {
    kRouter,
    kSharedGate,
    kSharedGateUp,
    kSharedDown,
    kExpertGateUp,
    kExpertDown,
    kMixtureGemms
};

// Projections of a gemm. Described to Python by program/layout.h.
struct MixtureTargets {
    int32_t count;
    Target targets[2];  // [count]
};

// A step's adapters of mixtures.
struct MixtureLoraDesc {
    void* arena;
    int64_t page_elems;
    Segments segments;  // of the step's rows
    // For each segment the experts of its rank-rows, in rising order, and their number: each one's rank-rows follow those of
    // the one before. 0: the rank-rows are not of experts.
    const int32_t* const* experts;
    const int32_t* num_experts;
    int32_t layer;  // that a call of its own computes, and the same layer's projections; not of a step of a decoder
    const MixtureTargets* targets;  // [kMixtureGemms]
};

// What a gemm adds adapters to.
struct MixtureOutputs {
    MixtureGemm gemm;
    Rows<float> y;  // [rows, outputs]; of experts, of what is gathered
};

// Writes a row of a product's inputs: row r of the step or, of experts' products, the r-th that is gathered by expert.
using RowSource = std::function<void(int row, float* out)>;

// Adds adapters of any element type.
struct AnyMixtureLora {
    virtual ~AnyMixtureLora() = default;

    // Begin a step of so many rows.
    virtual void begin(const MixtureLoraDesc& desc, int rows, int threads) = 0;

    // Begin a layer. One thread calls it before any other function of the layer.
    //
    //   layer    of the model
    //   targets  [kMixtureGemms]: of the layer's products
    virtual void begin_layer(int layer, const MixtureTargets* targets) = 0;

    // True if an adapter of the step may change experts in the layer: then `route` must be called.
    virtual bool changes_experts() const = 0;

    // Note which experts each row goes to. One thread calls it before terms of experts are added.
    //
    //   counts   [experts]: rows that go to each
    //   experts  of the model
    //   row      expert after expert, the rows that go to it, in rising order; must outlive the layer
    virtual void route(const int32_t* counts, int experts, const std::vector<int>& row) = 0;

    // Number of shrinks, h = scale · x · Aᵀ, of a gemm.
    virtual int shrinks(MixtureGemm gemm) const = 0;

    // Compute one of them.
    //
    //   i, more  the shrink; more: the next one runs on the same thread
    //   inputs   of the product
    //   x        the product's
    //   thread   that computes it
    virtual void shrink(MixtureGemm gemm, int i, bool more, int inputs, const RowSource& x, int thread) = 0;

    // y += h · Bᵀ of some products, whose shrinks are done. Called by every thread of the team alike.
    virtual void expand(Team& team, Team::Member& me, std::initializer_list<MixtureOutputs> outputs) = 0;
};

template <class T>
class MixtureLora final : public AnyMixtureLora {
    using X = Act<T>;

   public:
    void begin(const MixtureLoraDesc& desc, int rows, int threads) override {
        desc_ = &desc;
        rows_ = rows;
        threads_ = threads;
        arena_ = {(T*)desc.arena, desc.page_elems};
        if ((int)own_.size() < threads) own_ = std::vector<Own>(threads);
        rank_ = 0;
        for (int s = 0; s < desc.segments.count; s++) rank_ = std::max(rank_, (int)desc.segments.adapters[s]->rank);
        ldh_ = (rank_ + 2) & ~1;
    }

    void begin_layer(int layer, const MixtureTargets* targets) override {
        layer_ = layer;
        targets_ = targets;
        for (Own& own : own_) own.tokens = 0;
        for (int p = 0; p < kMixtureGemms; p++) clear(plans_[p]);
        for (const MixtureGemm p : {kRouter, kSharedGate, kSharedGateUp, kSharedDown})
            plan(p, desc_->segments, layer, rows_);
        changes_experts_ = false;
        for (int s = 0; s < desc_->segments.count; s++)
            changes_experts_ |= desc_->num_experts[s] && desc_->segments.adapters[s]->in_layer(layer);
    }

    bool changes_experts() const override { return changes_experts_; }

    void route(const int32_t* counts, int experts, const std::vector<int>& row) override {
        const Segments& all = desc_->segments;
        begins_.clear(), ends_.clear(), levels_.clear(), adapters_.clear(), first_elems_.clear();
        for (int e = 0, first = 0; e < experts; first += counts[e++]) {
            if (!counts[e]) continue;
            const auto begin = row.begin() + first, end = begin + counts[e];
            for (int s = 0; s < all.count; s++) {
                const int32_t *own = desc_->experts[s], *last = own + desc_->num_experts[s];
                const int32_t* at = std::lower_bound(own, last, e);
                if (at == last || *at != e || !all.adapters[s]->in_layer(layer_)) continue;
                const auto from = std::lower_bound(begin, end, all.begin[s]),
                           to = std::lower_bound(begin, end, all.end[s]);
                if (from == to) continue;
                const Adapter& whole = *all.adapters[s];
                begins_.push_back(int(from - row.begin()));
                ends_.push_back(int(to - row.begin()));
                levels_.push_back(all.level_of(s));
                adapters_.push_back(whole);
                first_elems_.push_back(whole.first_elem[layer_] + (at - own) * whole.rank * whole.slab_elems);
            }
        }
        pointers_.clear();
        for (size_t i = 0; i < adapters_.size(); i++) {
            adapters_[i].first_elem = &first_elems_[i];  // of layer 0, the only one
            pointers_.push_back(&adapters_[i]);
        }
        const Segments of_experts{
            (int32_t)adapters_.size(), begins_.data(), ends_.data(), pointers_.data(), levels_.data(), 0, 0};
        for (const MixtureGemm p : {kExpertGateUp, kExpertDown}) plan(p, of_experts, 0, (int)row.size());
    }

    int shrinks(MixtureGemm gemm) const override { return (int)plans_[gemm].shrinks.size(); }

    void shrink(MixtureGemm gemm, int i, bool more, int inputs, const RowSource& x, int thread) override {
        const Plan& it = plans_[gemm];
        Own& own = own_[thread];
        const LoraUnit& u = it.shrinks[i];
        own.scratch.reserve(rank_, inputs);
        if (own.gemm != gemm || own.token != u.token || own.tokens != u.tokens) {
            own.gemm = gemm, own.token = u.token, own.tokens = u.tokens;
            grow_rows(own.x, u.tokens, inputs);
            grow(own.row, inputs);
            for (int t = 0; t < u.tokens; t++) {
                x(u.token + t, own.row.data());
                convert(own.row.data(), inputs, rows_of(own.x, inputs)[t]);
            }
        }
        chorus::shrink<T>(arena_, a_of(it, &u, inputs), u, rows_of(own.x, inputs).from(-u.token), h_of(it, u),
                          own.scratch, a_of(it, more ? &u + 1 : nullptr, inputs));
    }

    void expand(Team& team, Team::Member& me, std::initializer_list<MixtureOutputs> outputs) override {
        LoraScratch<T>& scratch = own_[me.thread].scratch;
        scratch.reserve(rank_, 0);
        size_t levels = 0;
        for (const auto& each : outputs) levels = std::max(levels, plans_[each.gemm].expands.size());
        for (size_t level = 0; level < levels; level++) {
            int count = 0;
            for (const auto& each : outputs) count += units(each.gemm, level);
            if (!count) continue;
            each_part(team, me, count, [&](int i, bool more) {
                for (const auto& each : outputs) {
                    const int own = units(each.gemm, level);
                    if (i < own) return expand(each, level, i, more && i + 1 < own, scratch);
                    i -= own;
                }
            });
        }
    }

   private:
    // A product's segments, and units of work on them. Each gemm has its own: a thread may begin the next one while
    // another has still to see that it is done with this one.
    struct Plan {
        int layer;  // of the segments' adapters
        long rows;
        Segments segments;
        std::vector<Target> targets;
        std::vector<LoraUnit> shrinks;
        std::vector<std::vector<LoraUnit>> expands;  // by level
        Buffer<X> h;

        const Adapter& adapter(const LoraUnit& u) const { return *segments.adapters[u.segment]; }
        const Target& target(const LoraUnit& u) const { return targets[u.module]; }
    };

    // A thread's memory. gemm, token, tokens: of the rows that x has.
    struct Own {
        LoraScratch<T> scratch;
        Buffer<X> x;
        std::vector<float> row;
        MixtureGemm gemm;
        int token, tokens = 0;
    };

    static void clear(Plan& it) {
        it.shrinks.clear();
        for (auto& level : it.expands) level.clear();
    }

    // layer: of the segments' adapters. rows: that the gemm has.
    void plan(MixtureGemm gemm, const Segments& segments, int layer, int rows) {
        Plan& it = plans_[gemm];
        const MixtureTargets& its = targets_[gemm];
        it.targets.assign(its.targets, its.targets + its.count);
        it.layer = layer;
        it.rows = rows;
        it.segments = segments;
        const auto keep = [&](std::vector<LoraUnit>& units) {  // those of adapters that have rows in the layer
            const auto out = [&](const LoraUnit& u) { return !it.adapter(u).in_layer(layer); };
            units.erase(std::remove_if(units.begin(), units.end(), out), units.end());
        };
        shrink_units(segments, it.targets, 0, rows, it.shrinks);
        keep(it.shrinks);
        if (it.shrinks.empty()) return;
        int levels = 1;
        for (int s = 0; s < segments.count; s++) levels = std::max(levels, 1 + segments.level_of(s));
        it.expands.resize(levels);
        for (int level = 0; level < levels; level++) {
            expand_units(segments, level, it.targets, threads_, it.expands[level]);
            keep(it.expands[level]);
        }
        grow(it.h, (size_t)levels * it.targets.size() * rows * ldh_);
    }

    int units(MixtureGemm gemm, size_t level) const {
        const auto& expands = plans_[gemm].expands;
        return level < expands.size() ? (int)expands[level].size() : 0;
    }

    void expand(const MixtureOutputs& to, size_t level, int i, bool more, LoraScratch<T>& scratch) {
        Plan& it = plans_[to.gemm];
        const LoraUnit* u = &it.expands[level][i];
        chorus::expand<T>(arena_, b_of(it, u), *u, h_of(it, *u), to.y.from(0, it.target(*u).column), scratch,
                          b_of(it, more ? u + 1 : nullptr));
    }

    RankRows a_of(const Plan& it, const LoraUnit* u, int inputs) const {
        return u ? a_rows(it.adapter(*u), it.layer, it.target(*u).module, *u, inputs) : RankRows{};
    }
    RankRows b_of(const Plan& it, const LoraUnit* u) const {
        return u ? b_rows(it.adapter(*u), it.layer, it.target(*u).module, *u) : RankRows{};
    }

    // Where h of the first row is, of a unit's level and module.
    Rows<X> h_of(const Plan& it, const LoraUnit& u) const {
        const size_t index = it.segments.level_of(u.segment) * it.targets.size() + u.module;
        return {(X*)it.h.data() + index * it.rows * ldh_, ldh_};
    }

    const MixtureLoraDesc* desc_ = nullptr;
    const MixtureTargets* targets_ = nullptr;
    Arena<T> arena_{};
    int rows_ = 0, rank_ = 0, layer_ = 0, threads_ = 1;
    bool changes_experts_ = false;
    // Of experts: a segment for each segment of the step and expert that some of its rows go to.
    std::vector<int32_t> begins_, ends_, levels_;
    std::vector<Adapter> adapters_;
    std::vector<int64_t> first_elems_;
    std::vector<const Adapter*> pointers_;
    Plan plans_[kMixtureGemms];
    long ldh_ = 0;
    std::vector<Own> own_;
};

CHORUS_UNIT_MIXTURE class MixtureLora<float>;
CHORUS_UNIT_MIXTURE class MixtureLora<bf16>;

}  // namespace chorus
