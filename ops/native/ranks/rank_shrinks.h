// Shrinks of few tokens that the ranks of a model share (S-LoRA, arXiv 2311.03285, §5).
//
// A of q, k, v, gate and up, and the rows that it multiplies, are whole on every rank. In a step of few tokens, which streams
// A, each rank computes h of some rank-rows alone, and takes the others' over from memory that all share: they are there
// when the base product is, beside which they were computed. An h has the same bits whichever rank computes it.
#pragma once
#include <algorithm>
#include <vector>
#include "program/descriptors.h"
#include "ranks/ranks.h"
#include "team/shares.h"

namespace chorus {

template <class T>
class RankShrinks {
    using X = Act<T>;

   public:
    explicit RankShrinks(int shapes) : all_(shapes) {}

    void join(Ranks* ranks) { ranks_ = ranks; }

    // Begin a step, alike on every rank.
    //
    //   few    the step has few tokens
    //   elems  of h of a product
    void begin(bool few, size_t elems) {
        is_shared_ = few && ranks_ && elems * sizeof(X) <= ranks_->floats() * sizeof(float);
    }

    // Note a product's units.
    //
    //   p             the product
    //   row_parallel  of the product: see GemmShapeDesc
    //   units         all of them; what remains is what this rank is to compute
    void plan(int p, bool row_parallel, std::vector<LoraUnit>& units) {
        all_[p].units.clear();
        if (!is_shared_ || row_parallel) return;  // such have a share of A on each rank
        all_[p].units = units;
        all_[p].split(ranks_->size(), [](const LoraUnit& u) { return u.count * u.tokens; });
        const auto first = all_[p].units.begin();
        const int* own = all_[p].bounds.data() + ranks_->rank();
        units.assign(first + own[0], first + own[1]);
    }

    // True if the ranks share the product's shrinks.
    bool of(int p) const { return !all_[p].units.empty(); }

    // Where this rank's h of the product goes, laid out as h is; then `post`, once, by one thread.
    X* mine() const { return (X*)ranks_->mine(); }
    void post() { ranks_->post(); }

    // Wait for all ranks and write the whole of a layer's h. If a rank has ended, h is void, and so is the step.
    //
    //   task    the product
    //   h       all modules and levels: [·, rank + 1]
    //   row_of  row_of(unit): row of h of the unit's first token
    template <class RowOf>
    void collect(const LoraTask<T>& task, Rows<X> h, RowOf row_of) const {
        if (ranks_->wait() != Ranks::kWell) return;
        const Shares<LoraUnit>& all = all_[task.shape];
        for (int owner = 0; owner < ranks_->size(); owner++) {
            const Rows<const X> part{(const X*)ranks_->part(owner), h.stride};
            for (int i = all.bounds[owner]; i < all.bounds[owner + 1]; i++) {
                const LoraUnit& u = all.units[i];
                if (!task.has(u)) continue;  // where another part's h of the same tokens may lie
                const bool last = u.first + u.count == task.adapter(u).rank;
                const long row = row_of(u);
                for (long t = row; t < row + u.tokens; t++)
                    std::copy_n(part[t] + u.first, u.count + last, h[t] + u.first);  // with the zero behind the last
            }
        }
    }

   private:
    Ranks* ranks_ = nullptr;
    bool is_shared_ = false;
    std::vector<Shares<LoraUnit>> all_;  // of the GEMMs that are shared; each rank's run
};

}  // namespace chorus
