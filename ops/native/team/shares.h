// Shares of work: the part of a phase that each thread does.
#pragma once
#include <vector>
#include "team/pool.h"

namespace chorus {

constexpr int kFewTokens = 48;  // up to this many, weights are streamed rather than computed with

// First thing of thread t's part of `count` things: of tokens as of a product's units, which have their rows in the
// same order, so that most of what a thread reads was written by itself and lies in its own cache.
inline int part_begin(int count, int t, int threads) { return (int)((long)count * t / threads); }

// Have every thread do its part of `count` things in order.
//
//   me     the calling thread
//   count  things
//   work   work(i, more): thing i; more: the next one runs on the same thread
template <class Work>
void each_part(Team& team, Team::Member& me, int count, Work work) {
    const int threads = team.size();
    team.each_own(
        me, [=](int t) { return part_begin(count, t, threads); }, [&](int i, bool more, int) { work(i, more); });
}

// Units in runs of about equal cost: run t is units bounds[t] … bounds[t + 1]-1.
template <class Unit>
struct Shares {
    std::vector<Unit> units;
    std::vector<int> bounds;

    // Divide the units into runs.
    //
    //   count  runs: one for each thread
    //   cost   cost(unit), in any unit of measure
    template <class Cost>
    void split(int count, Cost cost) {
        long total = 0, sum = 0;
        for (const Unit& unit : units) total += cost(unit);
        bounds.assign(count + 1, (int)units.size());
        bounds[0] = 0;
        int t = 1;
        for (int i = 0; i < (int)units.size(); i++) {
            const long half = sum + cost(units[i]) / 2;
            for (; t < count && half * count >= total * t; t++) bounds[t] = i;
            sum += cost(units[i]);
        }
    }

    // Have every thread do its run of units in order.
    //
    //   me   the calling thread
    //   run  run(unit, next); next: the unit behind it, null if that is another thread's
    template <class Run>
    void each(Team& team, Team::Member& me, Run run) const {
        each_beside(team, me, 0, [](int, bool) {}, run);
    }

    // The same beside a product's units, which don't depend on them: every thread has a run of panels of its own, each of
    // which fetches the beginning of the next, and then one of these units.
    //
    //   me     the calling thread
    //   count  units of the product
    //   work   work(i, more): one of them; see each_part
    //   run    see each
    template <class Work, class Run>
    void each_beside(Team& team, Team::Member& me, int count, Work work, Run run) const {
        const int threads = team.size();
        team.each_own(
            me, [&](int t) { return part_begin(count, t, threads) + bounds[t]; },
            [&](int i, bool more, int owner) {
                const int first = i - bounds[owner], end = part_begin(count, owner + 1, threads);
                if (first < end) return work(first, more && first + 1 < end);
                const Unit& unit = units[i - end];
                run(unit, more ? &unit + 1 : nullptr);
            });
    }
};

}  // namespace chorus
