// Chunks of a step's rows: activations of one stay in L2 while panels of weights pass.
#pragma once
#include <algorithm>
#include <vector>
#include "lora/adapters.h"
#include "team/shares.h"

namespace chorus {

constexpr int kSegmentChunk = 300;  // rows of a chunk where each has an adapter's rows to pack; else kRowChunk
constexpr int kShortChunk = kSegmentChunk / 4;  // fewer rows are not worth a pass over the weights

class Chunks {
   public:
    // Cut a step. A segment with a fused expand has its own chunks, as each packs its adapter's rows; but none is so short that
    // it reads all weights for few rows, as the tokens of running requests after a prompt's would.
    //
    //   tokens    of the step
    //   segments  of the step
    //   fused     a segment has a fused expand
    //   threads   of the step
    void plan(int tokens, const Segments& segments, bool fused, int threads) {
        cuts_.assign(1, 0);
        first_chunk_.clear();
        if (tokens <= kFewTokens) return cuts_.push_back(tokens);
        const int most = fused ? kSegmentChunk : kRowChunk;
        // Chunks end where a thread's rows do, or threads share them where each would read all weights for few.
        const int parts = tokens >= threads * kRowChunk ? threads : 1;
        if (parts > 1) first_chunk_.push_back(0);
        for (int part = 1; part <= parts; part++) {
            const int end = part < parts ? part_begin(tokens, part, parts) / kRows * kRows : tokens;
            for (int s = 0; fused && s < segments.count; s++) {
                if (!segments.is_fused(s) || segments.tokens_of(s) < kShortChunk) continue;
                for (int at : {segments.begin[s], segments.end[s]})
                    if (at - cuts_.back() >= kShortChunk && end - at >= kShortChunk) cut_up_to(at, most);
            }
            cut_up_to(end, most);
            if (parts > 1) first_chunk_.push_back(count());
        }
    }

    int count() const { return (int)cuts_.size() - 1; }
    // Where each begins, and the last ends.
    const std::vector<int>& cuts() const { return cuts_; }
    // Rows of the longest: rounded to whole tiles, it may exceed what chunks are to have at most.
    int longest() const {
        int rows = 0;
        for (int c = 0; c < count(); c++) rows = std::max(rows, cuts_[c + 1] - cuts_[c]);
        return rows;
    }

    // Have a product's units done; a thread owns the units of the rows that it normalises.
    //
    //   me      the calling thread
    //   panels  units of each chunk
    //   work    work(unit, more); more: the next one runs on the same thread
    template <class Work>
    void each_tile(Team& team, Team::Member& me, int panels, Work work) const {
        if (first_chunk_.empty()) return each_part(team, me, count() * panels, work);
        team.each_own(
            me, [&](int t) { return first_chunk_[t] * panels; }, [&](int i, bool more, int) { work(i, more); });
    }

   private:
    // In about equal parts of at most `most` rows, of whole tiles.
    void cut_up_to(int end, int most) {
        const int begin = cuts_.back(), rows = end - begin, parts = (rows + most - 1) / most;
        for (int i = 1; i < parts; i++) cuts_.push_back(begin + (rows * i / parts + kRows / 2) / kRows * kRows);
        if (parts) cuts_.push_back(end);
    }

    std::vector<int> cuts_;
    std::vector<int> first_chunk_;  // of each thread and their number; empty where threads share chunks
};

}  // namespace chorus
