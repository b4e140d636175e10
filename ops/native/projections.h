// The four products of a layer with what the step's adapters add to them.
#pragma once
#include <algorithm>
#include <vector>
#include "buffer.h"
#include "descriptors.h"
#include "elementwise.h"
#include "rank_shrinks.h"
#include "shares.h"

namespace chorus {

template <class T>
class Projections {
    using X = Act<T>;

   public:
    Projections(const ModelDesc& model, Team& team)
        : m_(model), team_(team), scratch_(team.most()), shapes_(model), groups_(shapes_.targets) {}

    // Of several ranks: see RankShrinks.
    void join(Ranks* ranks) { ranks_.join(ranks); }

    const std::vector<Target>& group(int g) const { return groups_[g]; }
    bool few() const { return few_; }      // the step has few tokens
    bool gated() const { return gated_; }  // it has many, and gate and up have panels of their own

    // Units of work of the step, the same for all layers.
    void plan(const StepDesc& step) {
        few_ = step.tokens <= kFewTokens;
        gated_ = !few_ && m_.ffn % kPanel == 0 && !step.lent;
        const Segments segments{step.segments, step.segment_begin, step.segment_end, step.segment_adapters,
                                step.segment_level};
        int rank = 0, levels = 1;
        for (int s = 0; s < step.segments; s++) {
            rank = std::max(rank, (int)step.segment_adapters[s]->rank);
            levels = std::max(levels, 1 + segments.level_of(s));
        }
        ldh_ = (rank + 2) & ~1;
        const size_t h_elems = 3 * levels * (size_t)step.tokens * ldh_;
        grow(h_, h_elems);
        ranks_.begin(few_, h_elems);
        fused_ = false;
        if (!few_)  // else the base product streams its weights, in tiles of as many rows as there are
            for (int s = 0; s < step.segments; s++) fused_ |= is_fused(step, s);
        cut(step);
        const int chunks = (int)cuts_.size() - 1;
        if ((int)gates_.size() < chunks) gates_ = std::vector<Team::Gate>(chunks);
        for (auto& gate : gates_) gate.given = gate.done = 0;
        for (int g = 0; g < 4; g++) {
            shrink_[g].clear();
            shrink_chunk_[g].assign(1, 0);
            for (int c = 0; c < chunks; c++) {
                shrink_units(segments, groups_[g], cuts_[c], cuts_[c + 1], shrink_[g]);
                shrink_chunk_[g].push_back((int)shrink_[g].size());
            }
            ranks_.plan(g, shrink_[g]);
            expand_units(segments, 0, groups_[g], team_.size(), expand_[g]);
            auto& units = expand_[g];
            auto cost = [&](const LoraUnit& u) { return u.count * segments.adapters[u.segment]->rank; };
            auto is_long = [](const LoraUnit& u) { return u.tokens >= kLongSegment; };
            if (fused_) units.erase(std::remove_if(units.begin(), units.end(), is_long), units.end());
            if (few_)
                split(shrink_[g], team_.size(), shrink_split_[g],
                      [&](const LoraUnit& u) { return u.count * u.tokens; });
            split(units, team_.size(), expand_split_[g], cost);
            later_[g].resize(levels - 1);
            for (int level = 1; level < levels; level++) {
                Later& later = later_[g][level - 1];
                expand_units(segments, level, groups_[g], team_.size(), later.units);
                split(later.units, team_.size(), later.split, cost);
            }
        }
        int longest = 0;  // of the chunks: rounded to whole tiles, one may exceed what they are to have at most
        for (size_t i = 1; i < cuts_.size(); i++) longest = std::max(longest, cuts_[i] - cuts_[i - 1]);
        for (auto& s : scratch_) {
            if (gated_) grow(s.gated, (size_t)2 * kPanel * longest);
            grow(s.rows, rank + kAddedRows);
            grow(s.panel, (size_t)(rank + 1) * kPanel);
            const int widest = std::max({m_.hidden, m_.heads * m_.head_dim, m_.ffn});
            grow(s.spare, std::max((size_t)kRankChunk * widest, (size_t)rank * kColumnChunk));
        }
    }

    // y (+)= x · wᵀ and the step's LoRA products of one group.
    //
    // Few tokens: base product and shrink side by side, then expand in chunks of columns long enough to stream.
    // Many: a chunk's shrink by the first threads to reach its tiles, mostly the thread that wrote x, then expand as
    // more of the base product's reduction dimension. Expanded by themselves still: segments of few tokens, a second
    // part of an adapter for the same tokens, and panels that hold columns of two modules.
    void run(const StepDesc& step, int thread, int& phase, int g, int layer, const X* x, long ldx, int k, const void* w,
             int n, float* y, long ldy, bool accumulate, const float* bias) {
        const Product<T> product{x, ldx, step.tokens, (const T*)w, n, k, y, ldy, accumulate, bias, &cuts_};
        const auto& expands = expand_[g];
        auto run_base = [&](int i, bool more) { product.run(i, more); };
        auto shrink_into = [&](X* h) {
            return [&, h](const LoraUnit& u, const LoraUnit* next) {
                run_shrink(step, thread, g, layer, x, ldx, k, h, u, next);
            };
        };
        if (ranks_.of(g)) {
            each_split(team_, phase, thread, shrink_[g], shrink_split_[g], shrink_into(ranks_.mine()));
            if (!thread) ranks_.post();
            each_part(team_, phase, thread, product.units(), run_base);
            team_.each(phase, 1, [&](int) {
                ranks_.collect(step, g, layer, h_.data(), ldh_, [&](const LoraUnit& u) { return place(step, u); });
            });
        } else if (few_) {
            run_units(team_, phase, thread, product, shrink_[g], shrink_split_[g], run_base, shrink_into(h_.data()));
        } else {
            each_tile(phase, thread, product.panels(), [&](int i, bool more) {
                shrink_chunk(step, thread, g, layer, x, ldx, k, i / product.panels());
                if (!fused_) return product.run(i, more);
                const Tile tile = product.tile_of(i);
                run_tile(step, thread, g, layer, product, tile, y + tile.row * ldy + tile.column, ldy, false);
            });
        }
        auto run_unit = [&](const LoraUnit& u, const LoraUnit* next) {
            run_expand(step, thread, g, layer, u, next, y, ldy);
        };
        if (!expands.empty()) each_split(team_, phase, thread, expands, expand_split_[g], run_unit);
        for (const Later& later : later_[g])  // what tokens have a second time is added to what they have first
            each_split(team_, phase, thread, later.units, later.split, run_unit);
    }

    // act = silu(gate) · up for many tokens: the gate's tile and up's of the same columns one after the other, so that
    // neither leaves the cache before the two become one of half the bytes.
    void run_gated(const StepDesc& step, int thread, int& phase, int layer, const X* x, const LayerDesc& w, X* act) {
        const long ldx = spread<X>(m_.hidden), lda = spread<X>(m_.ffn);
        const Product<T> product{x,       ldx, step.tokens, (const T*)w.gate_up, 2 * m_.ffn, m_.hidden,
                                 nullptr, 0,   false,       w.gate_up_bias,      &cuts_};
        const int panels = m_.ffn / kPanel;
        each_tile(phase, thread, panels, [&](int i, bool) {
            shrink_chunk(step, thread, 2, layer, x, ldx, m_.hidden, i / panels);
            const Tile gate = product.tile_of(i / panels * 2 * panels + i % panels);
            Tile up = gate;
            up.column += m_.ffn;
            float* out = scratch_[thread].gated.data();
            run_tile(step, thread, 2, layer, product, gate, out, 2 * kPanel, true);
            run_tile(step, thread, 2, layer, product, up, out + kPanel, 2 * kPanel, true);
            for (int r = 0; r < gate.rows; r++, out += 2 * kPanel)
                silu_and_mul(out, out + kPanel, kPanel, act + (gate.row + r) * lda + gate.column);
        });
    }

   private:
    struct Scratch {
        std::vector<const T*> rows;
        std::vector<X> panel;
        std::vector<T> spare;
        std::vector<float> gated;  // a tile of the gate and one of up, side by side
    };
    struct Later {  // expand of the segments of one level
        std::vector<LoraUnit> units;
        std::vector<int> split;
    };

    // Row chunks of the products: a segment with a fused expand has its own, as each chunk packs its adapter's rows;
    // but none is so short that it reads all weights for few rows, as the tokens of running requests after a prompt's would.
    void cut(const StepDesc& step) {
        cuts_.assign(1, 0);
        first_chunk_.clear();
        if (few_) return cuts_.push_back(step.tokens);
        auto up_to = [&](int end) {  // in about equal parts, of whole tiles
            const int most = fused_ ? kSegmentChunk : kRowChunk, begin = cuts_.back(), rows = end - begin,
                      parts = (rows + most - 1) / most;
            for (int i = 1; i < parts; i++) cuts_.push_back(begin + (rows * i / parts + kRows / 2) / kRows * kRows);
            if (parts) cuts_.push_back(end);
        };
        // Chunks end where a thread's rows do, or threads share them where each would read all weights for few.
        const int parts = step.tokens >= team_.size() * kRowChunk ? team_.size() : 1;
        if (parts > 1) first_chunk_.push_back(0);
        for (int part = 1; part <= parts; part++) {
            const int end = part < parts ? part_begin(step.tokens, part, parts) / kRows * kRows : step.tokens;
            for (int s = 0; fused_ && s < step.segments; s++) {
                if (!is_fused(step, s) || step.segment_end[s] - step.segment_begin[s] < kShortChunk) continue;
                for (int at : {step.segment_begin[s], step.segment_end[s]})
                    if (at - cuts_.back() >= kShortChunk && end - at >= kShortChunk) up_to(at);
            }
            up_to(end);
            if (parts > 1) first_chunk_.push_back((int)cuts_.size() - 1);
        }
    }

    // A product's units of work for many tokens: a thread owns the units of the rows that it normalises.
    template <class Work>
    void each_tile(int& phase, int thread, int panels, Work work) {
        const int units = ((int)cuts_.size() - 1) * panels;
        if (first_chunk_.empty()) return each_part(team_, phase, thread, units, work);
        team_.each_own(
            phase, thread, [&](int t) { return (first_chunk_[t + 1] - first_chunk_[t]) * panels; },
            [&](int owner, int i, bool more) { work(first_chunk_[owner] * panels + i, more); });
    }

    // Before a tile of the chunk: what its adapters' expands need.
    void shrink_chunk(const StepDesc& step, int thread, int g, int layer, const X* x, long ldx, int k, int chunk) {
        auto units = [&](int group) { return shrink_chunk_[group][chunk + 1] - shrink_chunk_[group][chunk]; };
        if (!units(g)) return;
        int first = layer * (units(0) + units(1) + units(2) + units(3));  // of what passes the chunk's gate in a step
        for (int group = 0; group < g; group++) first += units(group);
        const LoraUnit* unit = shrink_[g].data() + shrink_chunk_[g][chunk];
        team_.pass(gates_[chunk], first + units(g),
                   [&](int i) { run_shrink(step, thread, g, layer, x, ldx, k, h_.data(), unit[i - first], nullptr); });
    }

    void run_shrink(const StepDesc& step, int thread, int g, int layer, const X* x, long ldx, int k, X* h,
                    const LoraUnit& u, const LoraUnit* next) {
        const Adapter& adapter = *step.segment_adapters[u.segment];
        if (adapter.first_elem[layer] < 0) return;
        Upcoming rows{};
        if (const Adapter* other = adapter_of(step, layer, next))
            rows = {other, next->first, next->count, other->a_offset[groups_[g][next->module].module], k};
        shrink<T>(arena(), adapter, layer, groups_[g][u.module].module, u, x, ldx, k, h + place(step, u), ldh_,
                  scratch_[thread].spare.data(), rows);
    }

    // Null where there is no unit, or its adapter has nothing in the layer.
    static const Adapter* adapter_of(const StepDesc& step, int layer, const LoraUnit* u) {
        const Adapter* adapter = u ? step.segment_adapters[u->segment] : nullptr;
        return adapter && adapter->first_elem[layer] >= 0 ? adapter : nullptr;
    }

    // y: where the group's first column of the step's first token is.
    void run_expand(const StepDesc& step, int thread, int g, int layer, const LoraUnit& u, const LoraUnit* next,
                    float* y, long ldy) {
        const Adapter& adapter = *step.segment_adapters[u.segment];
        if (adapter.first_elem[layer] < 0) return;
        Upcoming rows{};
        if (const Adapter* other = adapter_of(step, layer, next))
            rows = {other, 0, other->rank, other->b_offset[groups_[g][next->module].module] + next->first, next->count};
        const Target& target = groups_[g][u.module];
        Scratch& own = scratch_[thread];
        expand<T>(arena(), adapter, layer, target.module, u, h_of(step, u), ldh_, y + target.column, ldy,
                  own.rows.data(), own.panel.data(), own.spare.data(), rows);
    }

    // A tile of a group's product at `out`, with the expands that are fused with it or, where the tile stays in the cache, `all`
    // of them. Unfused expands, and what the panel can't take in one piece, are added to what the product gave.
    void run_tile(const StepDesc& step, int thread, int g, int layer, const Product<T>& product, const Tile& tile,
                  float* out, long ldo, bool all) {
        Scratch& own = scratch_[thread];
        int done = tile.row;  // rows below are complete
        auto at = [&](int row) { return out + (row - tile.row) * ldo; };
        auto fits = [&](const LoraUnit& u) {
            return u.token >= done && u.count == tile.columns && is_fused(step, u.segment);
        };
        bool rest = false;
        expand_tile(step, g, tile, 0, all, [&](const LoraUnit& u) {
            const Adapter& adapter = *step.segment_adapters[u.segment];
            if (adapter.first_elem[layer] < 0) return;
            if (!fits(u)) return (void)(rest = true);
            if (done < u.token) product.run(tile, done, u.token - done, at(done), ldo, nullptr);
            const auto extra = expand_panel<T>(arena(), adapter, layer, groups_[g][u.module].module, u, h_of(step, u),
                                               ldh_, own.rows.data(), own.panel.data(), own.spare.data());
            product.run(tile, u.token, u.tokens, at(u.token), ldo, &extra);
            done = u.token + u.tokens;
        });
        if (done < tile.row + tile.rows) product.run(tile, done, tile.row + tile.rows - done, at(done), ldo, nullptr);
        auto add = [&](const LoraUnit& u) { run_expand(step, thread, g, layer, u, nullptr, at(0) - tile.column, ldo); };
        done = tile.row;
        if (rest)
            expand_tile(step, g, tile, 0, all, [&](const LoraUnit& u) {
                if (step.segment_adapters[u.segment]->first_elem[layer] < 0) return;
                if (fits(u)) done = u.token + u.tokens;
                else add(u);
            });
        for (int level = 1; all && level <= (int)later_[g].size(); level++) expand_tile(step, g, tile, level, all, add);
    }

    // True if a segment's expand is done tile by tile, with the base product, in a step of many tokens.
    static bool is_fused(const StepDesc& step, int s) {
        return step.segment_end[s] - step.segment_begin[s] >= kLongSegment && !level_of(step, s);
    }
    static int level_of(const StepDesc& step, int s) { return step.segment_level ? step.segment_level[s] : 0; }

    // Expand the parts of the group's modules, and of a level's segments (all, or only the fused), that lie in a tile
    // of the product.
    template <class Run>
    void expand_tile(const StepDesc& step, int g, const Tile& tile, int level, bool all, Run run_expand) {
        for (int s = 0; s < step.segments; s++) {
            if (level_of(step, s) != level || (!all && !is_fused(step, s))) continue;
            const int begin = std::max(tile.row, step.segment_begin[s]);
            const int end = std::min(tile.row + tile.rows, step.segment_end[s]);
            if (begin >= end) continue;
            for (int m = 0; m < (int)groups_[g].size(); m++) {
                const Target& target = groups_[g][m];
                const int first = std::max(tile.column, target.column) - target.column;
                const int last = std::min(tile.column + tile.columns, target.column + target.width) - target.column;
                if (first < last && step.segment_adapters[s]->b_offset[target.module] >= 0)
                    run_expand({s, m, first, last - first, begin, end - begin});
            }
        }
    }

    Arena<T> arena() const { return {(T*)m_.arena, m_.page_elems}; }

    // Where in h the outputs of the shrink for a module of a group begin, of the segments of the unit's level: [tokens, ldh_].
    long place(const StepDesc& step, const LoraUnit& u) const {
        return (u.module + 3 * level_of(step, u.segment)) * (long)step.tokens * ldh_;
    }
    X* h_of(const StepDesc& step, const LoraUnit& u) { return h_.data() + place(step, u); }

    const ModelDesc m_;
    Team& team_;
    RankShrinks<T> ranks_;
    std::vector<Scratch> scratch_;
    const Groups shapes_;
    const std::vector<Target>* groups_;
    std::vector<LoraUnit> shrink_[4], expand_[4];
    std::vector<Later> later_[4];  // of the levels from 1 on
    std::vector<Team::Gate> gates_;  // of the chunks
    std::vector<int> cuts_, shrink_chunk_[4], shrink_split_[4], expand_split_[4];
    std::vector<int> first_chunk_;  // of each thread and their number; empty where threads share chunks
    Buffer<X> h_;
    int ldh_ = 2;
    bool fused_ = false;  // the step has a long segment
    bool few_ = false, gated_ = false;
};

}  // namespace chorus
