// Shrinks of few tokens, shared by the ranks of a model (S-LoRA, arXiv 2311.03285, §5).
//
// A of q, k, v, gate and up, and B of o and down, are whole on every rank. In a step of few tokens, which streams them, no
// rank reads all of that: of the first five each rank computes h of some rank-rows, of o and down h of its inputs, and all
// exchange these, which takes no time as it is done beside the base product. Then a rank expands its own outputs: of o and
// down an equal share of the columns, which the sum over the ranks puts together.
#pragma once
#include <algorithm>
#include <vector>
#include "descriptors.h"
#include "elementwise.h"
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

    // Note a group's units and leave in `units` what this rank is to compute of them.
    void plan(int g, std::vector<LoraUnit>& units) {
        all_[g].clear();
        if (!is_shared_) return;
        all_[g] = units;
        if (is_sum(g)) return;
        split(units, ranks_->size(), bounds_[g], [](const LoraUnit& u) { return u.count * u.tokens; });
        const int begin = bounds_[g][ranks_->rank()], end = bounds_[g][ranks_->rank() + 1];
        units.assign(all_[g].begin() + begin, all_[g].begin() + end);
    }

    // True if the ranks share the group's shrinks.
    bool of(int g) const { return !all_[g].empty(); }

    // Columns of a module's outputs, `width` of them on this rank, that it is to expand: first … last-1.
    int first_column(int g, int width) const { return of(g) && is_sum(g) ? column(width, ranks_->rank()) : 0; }
    int last_column(int g, int width) const { return of(g) && is_sum(g) ? column(width, ranks_->rank() + 1) : width; }

    // Where this rank's h of the group goes, laid out as h is. Before `post`, which one thread calls once it is there.
    X* mine() const { return (X*)ranks_->mine(); }
    void post() { ranks_->post(); }

    // Wait for all ranks and write the whole of h. at(unit): where the unit's module, of its level, begins in h. ldh: elements
    // from token to token. If a rank has ended, h is void, and so is the step.
    template <class At>
    void collect(const StepDesc& step, int g, X* h, long ldh, At at) const {
        if (ranks_->wait() != Ranks::kWell) return;
        for (int i = 0, owner = 0; i < (int)all_[g].size(); i++) {
            const LoraUnit& u = all_[g][i];
            const int end = u.first + u.count, rank = step.segment_adapters[u.segment]->rank;
            const int count = u.count + (end == rank);  // and the zero behind the last
            while (!is_sum(g) && i >= bounds_[g][owner + 1]) owner++;
            for (int t = u.token; t < u.token + u.tokens; t++) {
                const long place = at(u) + t * ldh + u.first;
                if (is_sum(g)) add_up(place, count, h + place);
                else std::copy_n(part(owner) + place, count, h + place);
            }
        }
    }

   private:
    // Groups whose inputs the ranks share (o and down), so that each has a part of every sum.
    static bool is_sum(int g) { return g % 2; }

    const X* part(int rank) const { return (const X*)ranks_->part(rank); }
    int column(int width, int rank) const {
        return rank == ranks_->size() ? width : width / kPanel * rank / ranks_->size() * kPanel;
    }

    void add_up(long place, int count, X* out) const {
        for (int i = 0; i < count; i += kLanes) {
            const Head here = head(count - i);
            Floats sum = load16(part(0) + place + i, here);
            for (int r = 1; r < ranks_->size(); r++) sum = sum + load16(part(r) + place + i, here);
            store16(out + i, sum, here);
        }
    }

    Ranks* ranks_ = nullptr;
    bool is_shared_ = false;
    std::vector<LoraUnit> all_[4];  // of the groups that are shared
    std::vector<int> bounds_[4];  // each rank's first unit, and the end
};

}  // namespace chorus
