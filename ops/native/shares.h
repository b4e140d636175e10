// Shares of work: the part of a phase that each thread does.
#pragma once
#include <vector>
#include "gemm.h"
#include "pool.h"
#include "sgmv.h"

namespace chorus {

constexpr int kFewTokens = 48;  // up to this many, weights are streamed rather than computed with

// First thing of thread t's part of `count` things: of tokens as of a product's units, which have their rows in the
// same order, so that most of what a thread reads was written by itself and lies in its own cache.
inline int part_begin(int count, int t, int threads) { return (int)((long)count * t / threads); }

// work(i, more): thing i; more: the next one runs on the same thread.
template <class Work>
void each_part(Team& team, int& phase, int thread, int count, Work work) {
    const int threads = team.size();
    auto begin = [&](int t) { return part_begin(count, t, threads); };
    team.each_own(
        phase, thread, [&](int t) { return begin(t + 1) - begin(t); },
        [&](int owner, int i, bool more) { work(begin(owner) + i, more); });
}

// A product's units and others that don't depend on them, side by side: every thread has a run of panels of its own, each of
// which fetches the beginning of the next, and of the others. run(unit, next): as of `each_split`.
template <class T, class Work, class Run>
void run_units(Team& team, int& phase, int thread, const Product<T>& product, const std::vector<LoraUnit>& units,
               const std::vector<int>& split, Work work, Run run) {
    const int count = product.units(), threads = team.size();
    auto begin = [&](int t) { return part_begin(count, t, threads); };
    team.each_own(
        phase, thread, [&](int t) { return begin(t + 1) - begin(t) + split[t + 1] - split[t]; },
        [&](int owner, int i, bool more) {
            const int own = begin(owner + 1) - begin(owner);
            if (i < own) return work(begin(owner) + i, more && i + 1 < own);
            const LoraUnit& unit = units[split[owner] + i - own];
            run(unit, more ? &unit + 1 : nullptr);
        });
}

// run(unit, next): each thread's run of units in order.
template <class Unit, class Run>
void each_split(Team& team, int& phase, int thread, const std::vector<Unit>& units, const std::vector<int>& split,
                Run run) {
    team.each_own(
        phase, thread, [&](int t) { return split[t + 1] - split[t]; },
        [&](int owner, int i, bool more) {
            const Unit& unit = units[split[owner] + i];
            run(unit, more ? &unit + 1 : nullptr);
        });
}

// Thread t's run of units is bounds[t] … bounds[t + 1]-1: about equal sums of their costs.
template <class Unit, class Cost>
void split(const std::vector<Unit>& units, int threads, std::vector<int>& bounds, Cost cost) {
    long total = 0, sum = 0;
    for (const Unit& unit : units) total += cost(unit);
    bounds.assign(threads + 1, (int)units.size());
    bounds[0] = 0;
    int t = 1;
    for (int i = 0; i < (int)units.size(); i++) {
        const long half = sum + cost(units[i]) / 2;
        for (; t < threads && half * threads >= total * t; t++) bounds[t] = i;
        sum += cost(units[i]);
    }
}

}  // namespace chorus
