// Products of rows with several matrices of one shape, as a call of their own: each matrix has rows of its own.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>
#include "team/buffer.h"
#include "elementwise/elementwise.h"
#include "gemm/gemm_units.h"
#include "team/shares.h"
#include "units.h"

namespace chorus {

// The team of a thread that makes such calls, kept for its next one. A forked process has none of its parent's threads,
// and begins anew.
class OwnTeam {
   public:
    OwnTeam() = default;
    OwnTeam(const OwnTeam&) = delete;
    OwnTeam& operator=(const OwnTeam&) = delete;
    ~OwnTeam() { drop(); }
    Team& of(int threads) {
        if (team_ && (process_ != getpid() || threads_ != threads)) drop();
        if (!team_) team_ = std::make_unique<Team>(threads), process_ = getpid(), threads_ = threads;
        return *team_;
    }

   private:
    void drop() {
        if (process_ == getpid()) team_.reset();
        else (void)team_.release();  // nobody would end it
    }
    std::unique_ptr<Team> team_;
    pid_t process_ = 0;
    int threads_ = 0;
};

// GEMMs of rows with different matrices, as units of work for the team: one after the other.
template <class T>
class GemmList {
   public:
    void clear() {
        gemms_.clear();
        units_.assign(1, 0);
    }
    // Append y = x · wᵀ + bias of some rows, if there are any.
    void add(Rows<const Act<T>> x, int rows, const Weights<T>& w, Rows<float> y) {
        if (!rows) return;
        gemms_.push_back({x, rows, w, y, nullptr});
        units_.push_back(units_.back() + gemms_.back().units());
    }
    // Compute all of them; called by every thread of the team alike, but not first: see Decoder::walk.
    void run(Team& team, Team::Member& me) const {
        thread_local FixedScratch<T> fixed;  // of the thread that runs this, of the GEMM that it was last used for
        int last = -1;
        each_part(team, me, units_.back(), [&](int i, bool more) {
            const int p = int(std::upper_bound(units_.begin(), units_.end(), i) - units_.begin()) - 1;
            Gemm<T> gemm = gemms_[p];
            gemm.fixed = p == last ? &fixed : fixed.begin();
            last = p;
            gemm.run(i - units_[p], more && i + 1 < units_[p + 1]);
        });
    }

   private:
    std::vector<Gemm<T>> gemms_;
    std::vector<int> units_{0};  // before each one's
};

// y[i] = x[i] · w[m]ᵀ + bias[m] for the rows i from ends[m - 1] up to ends[m].
//
//   count            matrices
//   ends             [count] rows behind each matrix's, in rising order
//   w                [count] packed: see gemm.h, and integers.h
//   integers         [count] how each is whole numbers, without bits where it is of T; null: all are of T
//   bias             [count] of [outputs] float32; null: none
//   outputs, inputs  of each matrix
//   x                [rows, inputs] float32
//   y                [rows, outputs] float32: written
template <class T>
void multiply_each(Team& team, int count, const int64_t* ends, const void* const* w, const Integers* integers,
                   const float* const* bias, int outputs, int inputs, const float* x, float* y) {
    using X = Act<T>;
    if (!count) return;
    thread_local Buffer<X> memory;  // the caller's: all threads of its team use the same
    const int rows = (int)ends[count - 1];
    grow_rows(memory, rows, inputs);
    const Rows<X> acts = rows_of(memory, inputs);
    GemmList<T> gemms;
    for (int m = 0, first = 0; m < count; first = (int)ends[m++])
        gemms.add(acts.from(first), (int)ends[m] - first,
                  {w[m], bias ? bias[m] : nullptr, outputs, inputs, integers ? integers[m] : Integers{}},
                  {y + (long)first * outputs, outputs});
    team.run([&](Team::Member& me) {
        team.each(me, rows, [&](int r) {  // not by parts: see Decoder::walk
            convert(x + (long)r * inputs, inputs, acts[r]);
        });
        gemms.run(team, me);
    });
}

CHORUS_UNIT_MIXTURE void multiply_each<float>(Team&, int, const int64_t*, const void* const*, const Integers*,
                                              const float* const*, int, int, const float*, float*);
CHORUS_UNIT_MIXTURE void multiply_each<bf16>(Team&, int, const int64_t*, const void* const*, const Integers*,
                                             const float* const*, int, int, const float*, float*);

}  // namespace chorus
