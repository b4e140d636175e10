// What a step's adapters add in a layer's mixture of experts: to its router, its shared expert, and its experts.
#pragma once
#include <algorithm>
#include <vector>
#include "adapters.h"
#include "buffer.h"
#include "sgmv.h"
#include "shares.h"

namespace chorus {

// Products of a mixture that adapters change; as MIXTURE_GROUPS of memory/pages/projections.py.
enum MixtureProduct : int32_t {
    kRouter,
    kSharedGate,
    kSharedGateUp,
    kSharedDown,
    kExpertGateUp,
    kExpertDown,
    kMixtureProducts
};

// Projections of a product. Mirrors MixtureTargetsDescriptor of ops/native_descriptors.py.
struct MixtureTargets {
    int32_t count;
    Target targets[2];  // [count]
};

// The step's adapters of mixtures, in one layer.
struct MixtureLoraDesc {
    void* arena;
    int64_t page_elems;
    int32_t layer;
    Segments segments;  // of the step's rows
    // For each segment the experts of its rank-rows, in rising order, and their number: each one's rank-rows follow those of
    // the one before. 0: the rank-rows are not of experts.
    const int32_t* const* experts;
    const int32_t* num_experts;
    MixtureTargets targets[kMixtureProducts];
};

// Adds adapters of any element type.
struct AnyMixtureLora {
    virtual ~AnyMixtureLora() = default;

    // Begin a step of so many rows.
    virtual void begin(const MixtureLoraDesc& desc, int rows, int threads) = 0;

    // Note which experts each row goes to. One thread calls it before terms of experts are added.
    //
    //   counts   [experts]: rows that go to each
    //   experts  of the model
    //   row      expert after expert, the rows that go to it, in rising order
    virtual void route(const int32_t* counts, int experts, const std::vector<int>& row) = 0;

    // y += Σ scale · x · Aᵀ · Bᵀ of a product, of each segment's adapter on the segment's rows. Called by every thread of
    // the team alike.
    //
    //   x         [rows, inputs]: the step's rows, or with `gathered` the rows gathered by expert
    //   inputs    of the product
    //   y         [rows, outputs]; of experts, of what is gathered
    //   gathered  true: x is [rows that go to experts, inputs]; only experts' products may have it
    virtual void add(Team& team, Team::Member& me, MixtureProduct product, Rows<const float> x, int inputs,
                     Rows<float> y, bool gathered) = 0;
};

template <class T>
class MixtureLora final : public AnyMixtureLora {
    using X = Act<T>;

   public:
    void begin(const MixtureLoraDesc& desc, int rows, int threads) override {
        desc_ = &desc;
        rows_ = rows;
        arena_ = {(T*)desc.arena, desc.page_elems};
        if ((int)scratch_.size() < threads) scratch_.resize(threads);
        rank_ = 0;
        for (int s = 0; s < desc.segments.count; s++) rank_ = std::max(rank_, (int)desc.segments.adapters[s]->rank);
    }

    void route(const int32_t* counts, int experts, const std::vector<int>& row) override {
        const Segments& all = desc_->segments;
        row_ = &row;
        begins_.clear(), ends_.clear(), levels_.clear(), adapters_.clear(), first_elems_.clear();
        for (int e = 0, first = 0; e < experts; first += counts[e++]) {
            if (!counts[e]) continue;
            const auto begin = row.begin() + first, end = begin + counts[e];
            for (int s = 0; s < all.count; s++) {
                const int32_t *own = desc_->experts[s], *last = own + desc_->num_experts[s];
                const int32_t* at = std::lower_bound(own, last, e);
                if (at == last || *at != e || !all.adapters[s]->in_layer(desc_->layer)) continue;
                const auto from = std::lower_bound(begin, end, all.begin[s]),
                           to = std::lower_bound(begin, end, all.end[s]);
                if (from == to) continue;
                const Adapter& whole = *all.adapters[s];
                begins_.push_back(int(from - row.begin()));
                ends_.push_back(int(to - row.begin()));
                levels_.push_back(all.level_of(s));
                adapters_.push_back(whole);
                first_elems_.push_back(whole.first_elem[desc_->layer] + (at - own) * whole.rank * whole.slab_elems);
            }
        }
        pointers_.clear();
        for (size_t i = 0; i < adapters_.size(); i++) {
            adapters_[i].first_elem = &first_elems_[i];  // of layer 0, the only one
            pointers_.push_back(&adapters_[i]);
        }
    }

    void add(Team& team, Team::Member& me, MixtureProduct product, Rows<const float> x, int inputs, Rows<float> y,
             bool gathered) override {
        Plan& it = plans_[product];
        if (!desc_->targets[product].count) return;
        team.each(me, 1, [&](int) { plan(it, product, inputs, team.size()); });
        if (it.shrinks.empty()) return;
        const Rows<X> own = rows_of(x_, inputs);
        const bool gathers = it.of_experts && !gathered;
        each_part(team, me, (int)it.covered.size(), [&](int r, bool) {
            if (it.covered[r]) convert(x[gathers ? (*row_)[r] : r], inputs, own[r]);
        });
        LoraScratch<T>& scratch = scratch_[me.thread];
        scratch.reserve(rank_, inputs);
        const auto a_of = [&](const LoraUnit* u) -> RankRows {
            return u ? a_rows(it.adapter(*u), it.layer, it.target(*u).module, *u, inputs) : RankRows{};
        };
        const auto b_of = [&](const LoraUnit* u) -> RankRows {
            return u ? b_rows(it.adapter(*u), it.layer, it.target(*u).module, *u) : RankRows{};
        };
        each_part(team, me, (int)it.shrinks.size(), [&](int i, bool more) {
            const LoraUnit* u = &it.shrinks[i];
            shrink<T>(arena_, a_of(u), *u, own, h_of(it, *u), scratch, a_of(more ? u + 1 : nullptr));
        });
        for (const std::vector<LoraUnit>& level : it.expands)
            each_part(team, me, (int)level.size(), [&](int i, bool more) {
                const LoraUnit* u = &level[i];
                expand<T>(arena_, b_of(u), *u, h_of(it, *u), y.from(0, it.target(*u).column), scratch,
                          b_of(more ? u + 1 : nullptr));
            });
    }

   private:
    // A product's segments in a step, and units of work on them. Each product has its own: a thread may begin the next one
    // while another has still to see that it is done with this one.
    struct Plan {
        bool of_experts;
        int layer;  // of the segments' adapters
        Segments segments;
        std::vector<Target> targets;
        std::vector<LoraUnit> shrinks;
        std::vector<std::vector<LoraUnit>> expands;  // by level
        std::vector<char> covered;  // rows that an adapter changes

        const Adapter& adapter(const LoraUnit& u) const { return *segments.adapters[u.segment]; }
        const Target& target(const LoraUnit& u) const { return targets[u.module]; }
    };

    void plan(Plan& it, MixtureProduct product, int inputs, int threads) {
        const MixtureTargets& its = desc_->targets[product];
        it.targets.assign(its.targets, its.targets + its.count);
        it.of_experts = product >= kExpertGateUp;
        it.layer = it.of_experts ? 0 : desc_->layer;
        it.segments = it.of_experts ? Segments{(int32_t)adapters_.size(),
                                               begins_.data(),
                                               ends_.data(),
                                               pointers_.data(),
                                               levels_.data(),
                                               0,
                                               0}
                                    : desc_->segments;
        const auto keep = [&](std::vector<LoraUnit>& units) {  // those of adapters that have rows in the layer
            const auto out = [&](const LoraUnit& u) { return !it.adapter(u).in_layer(it.layer); };
            units.erase(std::remove_if(units.begin(), units.end(), out), units.end());
        };
        const int rows = it.of_experts ? (int)row_->size() : rows_;
        it.shrinks.clear();
        shrink_units(it.segments, it.targets, 0, rows, it.shrinks);
        keep(it.shrinks);
        int levels = 1;
        for (int s = 0; s < it.segments.count; s++) levels = std::max(levels, 1 + it.segments.level_of(s));
        it.expands.resize(levels);
        for (int level = 0; level < levels; level++) {
            expand_units(it.segments, level, it.targets, threads, it.expands[level]);
            keep(it.expands[level]);
        }
        it.covered.assign(rows, 0);
        for (const LoraUnit& u : it.shrinks) std::fill_n(it.covered.begin() + u.token, u.tokens, 1);
        grow_rows(x_, rows, inputs);
        ldh_ = (rank_ + 2) & ~1;
        grow(h_, (size_t)levels * it.targets.size() * rows * ldh_);
    }

    // Where h of the first row is, of a unit's level and module.
    Rows<X> h_of(const Plan& it, const LoraUnit& u) {
        const size_t index = it.segments.level_of(u.segment) * it.targets.size() + u.module;
        return {h_.data() + index * it.covered.size() * ldh_, ldh_};
    }

    const MixtureLoraDesc* desc_ = nullptr;
    Arena<T> arena_{};
    int rows_ = 0, rank_ = 0;
    // Of experts: a segment for each segment of the step and expert that some of its rows go to.
    const std::vector<int>* row_ = nullptr;
    std::vector<int32_t> begins_, ends_, levels_;
    std::vector<Adapter> adapters_;
    std::vector<int64_t> first_elems_;
    std::vector<const Adapter*> pointers_;
    Plan plans_[kMixtureProducts];
    Buffer<X> x_, h_;  // of the product that is added
    long ldh_ = 0;
    std::vector<LoraScratch<T>> scratch_;
};

}  // namespace chorus
