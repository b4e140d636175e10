// Products of rows with several matrices of one shape, as a call of their own: each matrix has rows of its own.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>
#include "buffer.h"
#include "elementwise.h"
#include "product.h"
#include "shares.h"

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
    std::vector<Product<T>> products;
    std::vector<int> units{0};  // before each product's
    for (int m = 0, first = 0; m < count; first = (int)ends[m++]) {
        products.push_back({acts.from(first),
                            (int)ends[m] - first,
                            {w[m], bias ? bias[m] : nullptr, outputs, inputs, integers ? integers[m] : Integers{}},
                            {y + (long)first * outputs, outputs},
                            nullptr});
        units.push_back(units.back() + products.back().units());
    }
    team.run([&](Team::Member& me) {
        team.each(me, rows, [&](int r) {  // not by parts: see Decoder::walk
            convert(x + (long)r * inputs, inputs, acts[r]);
        });
        thread_local FixedScratch<T> fixed;  // of the thread that runs this, of the product that it was last used for
        int last = -1;
        each_part(team, me, units.back(), [&](int i, bool more) {
            const int m = int(std::upper_bound(units.begin(), units.end(), i) - units.begin()) - 1;
            Product<T> product = products[m];
            product.fixed = m == last ? &fixed : fixed.begin();
            last = m;
            product.run(i - units[m], more && i + 1 < units[m + 1]);
        });
    });
}

}  // namespace chorus
