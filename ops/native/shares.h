// Which thread does what, where units of work stream memory.
#pragma once
#include <vector>
#include "gemm.h"
#include "pool.h"
#include "sgmv.h"

namespace chorus {

constexpr int kFewTokens = 48;  // up to this many, weights are streamed rather than computed with

// A product's units and others that don't depend on them, side by side. Few rows: the weights are what takes time, so
// every thread has a run of panels of its own, each of which fetches the beginning of the next.
// work(i, more): unit i of the product; more: the next one runs on the same thread.
template <class T, class Work, class Run>
void run_units(Team& team, int& phase, int thread, const Product<T>& product, const std::vector<LoraUnit>& units,
               const std::vector<int>& split, Work work, Run run) {
    const int panels = product.units(), threads = team.size();
    if (product.rows > kFewTokens) {
        team.each(phase, panels + (int)units.size(), [&](int i) {
            if (i < panels) work(i, false);
            else run(units[i - panels]);
        });
        return;
    }
    auto begin = [&](int t) { return (int)((long)panels * t / threads); };
    team.each_own(
        phase, thread, [&](int t) { return begin(t + 1) - begin(t) + split[t + 1] - split[t]; },
        [&](int owner, int i, bool more) {
            const int own = begin(owner + 1) - begin(owner);
            if (i < own) return work(begin(owner) + i, more && i + 1 < own);
            run(units[split[owner] + i - own]);
        });
}

// run(unit, next): handed out one by one, or where units stream memory as one run per thread.
template <class Unit, class Run>
void each_split(Team& team, int& phase, int thread, bool own, const std::vector<Unit>& units, const std::vector<int>& split, Run run) {
    if (!own) {
        team.each(phase, (int)units.size(), [&](int i) { run(units[i], nullptr); });
        return;
    }
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
