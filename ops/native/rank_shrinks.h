// Shrinks of few tokens that the ranks of a model share (S-LoRA, arXiv 2311.03285, §5).
//
// A of q, k, v, gate and up, and the rows that it multiplies, are whole on every rank. In a step of few tokens, which streams
// A, each rank computes h of some rank-rows alone, and takes the others' over from memory that all share: they are there
// when the base product is, beside which they were computed. An h has the same bits whichever rank computes it.
#pragma once
#include <algorithm>
#include <vector>
#include "descriptors.h"
#include "ranks.h"
#include "shares.h"

namespace chorus {

template <class T>
class RankShrinks {
    using X = Act<T>;

   public:
    void join(Ranks* ranks) { ranks_ = ranks; }

    // A step of few tokens, or not, and the elements of h of a group: the same on every rank.
    void begin(bool few, size_t elems) {
        is_shared_ = few && ranks_ && elems * sizeof(X) <= ranks_->floats() * sizeof(float);
    }

    // Note a group's units, and leave in `units` what this rank is to compute of them.
    void plan(int g, std::vector<LoraUnit>& units) {
        all_[g].clear();
        if (!is_shared_ || g % 2) return;  // o and down have a share of A on each rank
        all_[g] = units;
        split(units, ranks_->size(), bounds_[g], [](const LoraUnit& u) { return u.count * u.tokens; });
        const auto first = all_[g].begin();
        units.assign(first + bounds_[g][ranks_->rank()], first + bounds_[g][ranks_->rank() + 1]);
    }

    // True if the ranks share the group's shrinks.
    bool of(int g) const { return !all_[g].empty(); }

    // Where this rank's h of the group goes, laid out as h is; then `post`, once, by one thread.
    X* mine() const { return (X*)ranks_->mine(); }
    void post() { ranks_->post(); }

    // Wait for all ranks and write the whole of a layer's h. at(unit): where the unit's module, of its level, begins in h. ldh: elements
    // from token to token. If a rank has ended, h is void, and so is the step.
    template <class At>
    void collect(const StepDesc& step, int g, int layer, X* h, long ldh, At at) const {
        if (ranks_->wait() != Ranks::kWell) return;
        for (int owner = 0; owner < ranks_->size(); owner++) {
            const X* part = (const X*)ranks_->part(owner);
            for (int i = bounds_[g][owner]; i < bounds_[g][owner + 1]; i++) {
                const LoraUnit& u = all_[g][i];
                const Adapter& adapter = *step.segment_adapters[u.segment];
                if (adapter.first_elem[layer] < 0) continue;  // where another part's h of the same tokens may lie
                const bool last = u.first + u.count == adapter.rank;
                for (int t = u.token; t < u.token + u.tokens; t++) {
                    const long place = at(u) + t * ldh + u.first;
                    std::copy_n(part + place, u.count + last, h + place);  // with the zero behind the last
                }
            }
        }
    }

   private:
    Ranks* ranks_ = nullptr;
    bool is_shared_ = false;
    std::vector<LoraUnit> all_[4];  // of the groups that are shared
    std::vector<int> bounds_[4];  // each rank's first unit, and the end
};

}  // namespace chorus
