// The products of a model with what the step's adapters add to them.
#pragma once
#include <algorithm>
#include <vector>
#include "team/buffer.h"
#include "team/chunks.h"
#include "program/descriptors.h"
#include "elementwise/elementwise.h"
#include "gemm/gemm_units.h"
#include "ranks/rank_shrinks.h"
#include "team/shares.h"
#include "lora/vectors.h"

namespace chorus {

template <class T>
class Projections {
    using X = Act<T>;

   public:
    Projections(const ModelDesc& model, Team& team)
        : m_(model),
          team_(team),
          shapes_(model),
          ranks_(shapes_.count()),
          scratch_(team.most()),
          shrink_(shapes_.count()),
          expand_(shapes_.count()),
          shrink_chunk_(shapes_.count()),
          most_targets_(shapes_.most([&](int p) { return shapes_.targets(p).size(); })),
          most_inputs_(shapes_.most([&](int p) { return shapes_.inputs(p); })) {
        std::vector<int> uses(shapes_.count());
        for (int i = 0; i < model.num_ops; i++)
            if (const GemmOp* gemm = gemm_of(model.ops[i])) {
                uses_before_.insert(uses_before_.end(), uses.begin(), uses.end());
                uses[gemm->shape]++;
            }
    }

    // Of several ranks: see RankShrinks.
    void join(Ranks* ranks) { ranks_.join(ranks); }

    const GemmShapes& shapes() const { return shapes_; }
    bool few() const { return few_; }      // the step has few tokens
    // True if it has many, and gate and up of the product have panels of their own.
    bool gated(int p) const { return gated_ && shapes_.outputs(p) % (2 * kPanel) == 0; }

    // Units of work of the step, the same for all layers.
    void plan(const StepDesc& step) {
        const Segments& segments = step.segments;
        few_ = step.tokens <= kFewTokens;
        gated_ = !few_ && !step.offloaded;
        int rank = 0, levels = 1;
        fused_ = false;
        for (int s = 0; s < segments.count; s++) {
            rank = std::max(rank, (int)segments.adapters[s]->rank);
            levels = std::max(levels, 1 + segments.level_of(s));
            // In a step of few tokens the base product streams its weights, in tiles of as many rows as there are.
            fused_ |= !few_ && segments.is_fused(s);
        }
        ldh_ = (rank + 2) & ~1;
        const size_t h_elems = most_targets_ * levels * (size_t)step.tokens * ldh_;
        grow(h_, h_elems);
        ranks_.begin(few_, h_elems);
        vectors_.plan(segments, step.tokens);
        chunks_.plan(step.tokens, segments, fused_, team_.size());
        const int chunks = chunks_.count();
        if ((int)gates_.size() < chunks) gates_ = std::vector<Team::Gate>(chunks);
        for (auto& gate : gates_) gate.given = gate.done = 0;
        for (int p = 0; p < shapes_.count(); p++) plan_gemm(segments, p, levels);
        if (vectors_.is_any())
            grow(aside_, (size_t)step.tokens * shapes_.most([&](int p) { return shapes_.outputs(p); }));
        for (auto& s : scratch_) {
            if (gated_) grow(s.gated, (size_t)2 * kPanel * chunks_.longest());
            s.lora.reserve(rank, most_inputs_);
        }
    }

    // Run one product of a layer.
    //
    // Few tokens: base product and shrink side by side, then expand in chunks of columns long enough to stream.
    // Many: a chunk's shrink by the first threads to reach its tiles, mostly the thread that wrote x, then expand as
    // more of the base product's reduction dimension. Expanded by themselves still: segments of few tokens, a second
    // part of an adapter for the same tokens, and panels that hold columns of two modules.
    // Vectors change what the product and the adapter's expand are together: where that is added to y, rows that have
    // any are put aside meanwhile.
    //
    //   me    the thread; all threads of the team run the same task
    //   task  the product
    void run(Team::Member& me, const LoraTask<T>& task) {
        if (!vectors_.is_any()) return run_gemm(me, task);
        const int outputs = shapes_.outputs(task.shape);
        const Rows<float> aside{aside_.data(), outputs};
        auto each_row = [&](auto work) { each_part(team_, me, task.step.tokens, [&](int t, bool) { work(t); }); };
        if (task.accumulate)
            each_row([&](int t) {
                if (!has_vectors(task, t)) return;
                std::copy_n(task.y[t], outputs, aside[t]);
                std::fill_n(task.y[t], outputs, 0.0f);
            });
        run_gemm(me, task);
        each_row([&](int t) {
            if (!has_vectors(task, t)) return;
            scale_tile(task, {t, 1, 0, outputs}, task.y.from(t), false);
            if (task.accumulate) add_scaled(aside[t], outputs, 1, task.y[t]);
        });
    }

    // As `run`, without vectors that are applied last; those that are undone are.
    void run_gemm(Team::Member& me, const LoraTask<T>& task) {
        const int p = task.shape;
        const Gemm<T> gemm{task.x,          task.step.tokens, task.w, task.y, scratch_[me.thread].fixed.begin(),
                           task.accumulate, &chunks_.cuts()};
        auto run_base = [&](int i, bool more) { gemm.run(i, more); };
        auto shrink_into = [&](Rows<X> h) {
            return [&, h](const LoraUnit& u, const LoraUnit* next) { run_shrink(me, task, h, u, next); };
        };
        if (ranks_.of(p)) {
            shrink_[p].each(team_, me, shrink_into({ranks_.mine(), ldh_}));
            if (!me.thread) ranks_.post();
            each_part(team_, me, gemm.units(), run_base);
            team_.each(me, 1, [&](int) {
                ranks_.collect(task, h(), [&](const LoraUnit& u) { return row_of(task.step, u) + u.token; });
            });
        } else if (few_) {
            shrink_[p].each_beside(team_, me, gemm.units(), run_base, shrink_into(h()));
        } else {
            const int panels = task.w.panels();
            chunks_.each_tile(team_, me, panels, [&](int i, bool more) {
                shrink_chunk(me, task, i / panels);
                if (!fused_) return gemm.run(i, more);
                const Tile tile = gemm.tile_of(i);
                run_tile(me, task, gemm, tile, task.y.from(tile.row, tile.column), false);
            });
        }
        if (task.step.segments.undoes)
            each_part(team_, me, task.step.tokens,
                      [&](int t, bool) { scale_tile(task, {t, 1, 0, shapes_.outputs(p)}, task.y.from(t), true); });
        auto run_unit = [&](const LoraUnit& u, const LoraUnit* next) { run_expand(me, task, u, next, task.y); };
        // Level after level: what tokens have a second time is added to what they have first.
        for (const Shares<LoraUnit>& level : expand_[p])
            if (!level.units.empty()) level.each(team_, me, run_unit);
    }

    // act = activation(gate) · up for many tokens: the gate's tile and up's of the same columns one after the other, so that
    // neither leaves the cache before the two become one of half the bytes.
    //
    //   me          the thread
    //   task        the product of gate and up, which is not kept: y has no memory
    //   activation  of the gate
    //   factor      of the gate, before its activation
    //   act         [tokens, ffn]
    void run_gated(Team::Member& me, const LoraTask<T>& task, const Gating& gating, float factor, Rows<X> act) {
        const Gemm<T> gemm{task.x, task.step.tokens, task.w, {}, scratch_[me.thread].fixed.begin(),
                           false,  &chunks_.cuts()};
        const int size = shapes_.outputs(task.shape) / 2, panels = size / kPanel;
        chunks_.each_tile(team_, me, panels, [&](int i, bool) {
            shrink_chunk(me, task, i / panels);
            const Tile gate = gemm.tile_of(i / panels * 2 * panels + i % panels);
            Tile up = gate;
            up.column += size;
            const Rows<float> out{scratch_[me.thread].gated.data(), 2 * kPanel};
            run_tile(me, task, gemm, gate, out, true);
            run_tile(me, task, gemm, up, out.from(0, kPanel), true);
            if (vectors_.is_any()) {
                scale_tile(task, gate, out, false);
                scale_tile(task, up, out.from(0, kPanel), false);
            }
            for (int r = 0; factor != 1 && r < gate.rows; r++) scale_by(out[r], kPanel, factor);
            for (int r = 0; r < gate.rows; r++)
                activate(gating, out[r], out[r] + kPanel, kPanel, act[gate.row + r] + gate.column);
        });
    }

   private:
    struct Scratch {
        LoraScratch<T> lora;
        FixedScratch<T> fixed;
        std::vector<float> gated;  // a tile of the gate and one of up, side by side
    };

    // One product's shrinks, by chunks of tokens, and its expands, by levels of segments.
    void plan_gemm(const Segments& segments, int p, int levels) {
        const auto& targets = shapes_.targets(p);
        Shares<LoraUnit>& shrinks = shrink_[p];
        shrinks.units.clear();
        shrink_chunk_[p].assign(1, 0);
        for (int c = 0; c < chunks_.count(); c++) {
            shrink_units(segments, targets, chunks_.cuts()[c], chunks_.cuts()[c + 1], shrinks.units);
            shrink_chunk_[p].push_back((int)shrinks.units.size());
        }
        ranks_.plan(p, shapes_.row_parallel(p), shrinks.units);
        if (few_) shrinks.split(team_.size(), [](const LoraUnit& u) { return u.count * u.tokens; });
        expand_[p].resize(levels);
        for (int level = 0; level < levels; level++) {
            Shares<LoraUnit>& expands = expand_[p][level];
            auto& units = expands.units;
            expand_units(segments, level, targets, team_.size(), units);
            auto is_long = [](const LoraUnit& u) { return u.tokens >= kLongSegment; };
            if (fused_ && !level) units.erase(std::remove_if(units.begin(), units.end(), is_long), units.end());
            expands.split(team_.size(),
                          [&](const LoraUnit& u) { return u.count * segments.adapters[u.segment]->rank; });
        }
    }

    // Before a tile of the chunk: what its adapters' expands need.
    void shrink_chunk(const Team::Member& me, const LoraTask<T>& task, int chunk) {
        auto units = [&](int p) { return shrink_chunk_[p][chunk + 1] - shrink_chunk_[p][chunk]; };
        const int own = units(task.shape);
        if (!own) return;
        int first = 0;  // of the GEMM's among all units that pass the chunk's gate
        const int* uses = &uses_before_[task.gemm * shapes_.count()];
        for (int p = 0; p < shapes_.count(); p++) first += uses[p] * units(p);
        const LoraUnit* unit = shrink_[task.shape].units.data() + shrink_chunk_[task.shape][chunk];
        team_.pass(gates_[chunk], first + own, [&](int i) { run_shrink(me, task, h(), unit[i - first], nullptr); });
    }

    // The unit's rows of A in the layer; none where there is no unit, or its adapter has nothing in the layer.
    RankRows a_of(const LoraTask<T>& task, const LoraUnit* u) const {
        if (!u || !task.has(*u)) return {};
        return a_rows(task.adapter(*u), task.layer, target(task, *u).module, *u, shapes_.inputs(task.shape));
    }
    // The same of Bᵀ.
    RankRows b_of(const LoraTask<T>& task, const LoraUnit* u) const {
        if (!u || !task.has(*u)) return {};
        return b_rows(task.adapter(*u), task.layer, target(task, *u).module, *u);
    }

    // h: of all modules and levels.
    void run_shrink(const Team::Member& me, const LoraTask<T>& task, Rows<X> h, const LoraUnit& u,
                    const LoraUnit* next) {
        if (!task.has(u)) return;
        shrink<T>(arena(), a_of(task, &u), u, task.x, h.from(row_of(task.step, u)), scratch_[me.thread].lora,
                  a_of(task, next));
    }

    // y: where the group's first column of the step's first token is.
    void run_expand(const Team::Member& me, const LoraTask<T>& task, const LoraUnit& u, const LoraUnit* next,
                    Rows<float> y) {
        if (!task.has(u)) return;
        expand<T>(arena(), b_of(task, &u), u, h_of(task, u), y.from(0, target(task, u).column),
                  scratch_[me.thread].lora, b_of(task, next));
    }

    // A tile of a gemm, with the expands that are fused with it or, where the tile stays in the cache, all of
    // them. Unfused expands, and what the panel can't take in one piece, are added to what the product gave.
    //
    //   me       the thread
    //   task     the product with its adapters
    //   product  without them
    //   tile     rows and columns of y
    //   out      [tile.rows, tile.columns]
    //   all      whether unfused expands are added here
    void run_tile(const Team::Member& me, const LoraTask<T>& task, const Gemm<T>& gemm, const Tile& tile,
                  Rows<float> out, bool all) {
        const Segments& segments = task.step.segments;
        int done = tile.row;  // rows below are complete
        auto base = [&](int end, const Extra<X>* extra) {
            const Tile part{done, end - done, tile.column, tile.columns};
            if (part.rows > 0) gemm.run(part, out.from(done - tile.row), extra);
            done = end;
        };
        auto fits = [&](const LoraUnit& u) {
            return u.token >= done && u.count == tile.columns && segments.is_fused(u.segment);
        };
        bool rest = false;
        expand_tile(segments, task.shape, tile, 0, all, [&](const LoraUnit& u) {
            if (!task.has(u)) return;
            if (!fits(u)) return (void)(rest = true);
            base(u.token, nullptr);
            const auto extra = expand_panel<T>(arena(), b_of(task, &u), u, h_of(task, u), scratch_[me.thread].lora);
            base(u.token + u.tokens, &extra);
        });
        base(tile.row + tile.rows, nullptr);
        if (all && segments.undoes) scale_tile(task, tile, out, true);
        auto add = [&](const LoraUnit& u) { run_expand(me, task, u, nullptr, out.from(-tile.row, -tile.column)); };
        done = tile.row;
        if (rest)
            expand_tile(segments, task.shape, tile, 0, all, [&](const LoraUnit& u) {
                if (!task.has(u)) return;
                if (fits(u)) done = u.token + u.tokens;
                else add(u);
            });
        for (int level = 1; all && level < (int)expand_[task.shape].size(); level++)
            expand_tile(segments, task.shape, tile, level, all, add);
    }

    // True if a token's adapter has vectors for the gemm.
    bool has_vectors(const LoraTask<T>& task, int token) const {
        bool found = false;
        vectors_.each(token, [&](int s) {
            for (const Target& target : shapes_.targets(task.shape))
                found |= vector_place<T>(*task.step.segments.adapters[s], task.layer, target).scale >= 0;
        });
        return found;
    }

    // Apply vectors to a tile of the gemm.
    //
    //   task  the product with its adapters
    //   tile  rows and columns of y
    //   out   [tile.rows, tile.columns]
    //   undo  those that are undone, instead of the others
    void scale_tile(const LoraTask<T>& task, const Tile& tile, Rows<float> out, bool undo) const {
        for (int r = 0; r < tile.rows; r++)
            vectors_.each(tile.row + r, [&](int s) {
                const Adapter& adapter = *task.step.segments.adapters[s];
                if ((adapter.scale < 0) != undo) return;
                for (const Target& target : shapes_.targets(task.shape)) {
                    const auto part = target.within(tile.column, tile.columns);
                    const VectorPlace place = vector_place<T>(adapter, task.layer, target);
                    if (place.scale < 0) continue;
                    float* y = out[r] + target.column - tile.column;
                    each_piece(arena(), adapter, place, part,
                               [&](const float* scales, const float* offsets, int first, int count) {
                                   if (undo) undo_scale_and_shift(y + first, count, scales, offsets);
                                   else scale_and_shift(y + first, count, scales, offsets);
                               });
                }
            });
    }

    // run(unit), with the parts of expands that lie in a tile of the gemm.
    //
    //   segments  of the step
    //   p         the product
    //   tile      rows and columns of y
    //   level     of the segments
    //   all       whether of all these segments, or of the fused
    template <class Run>
    void expand_tile(const Segments& segments, int p, const Tile& tile, int level, bool all, Run run) {
        for (int s = 0; s < segments.count; s++) {
            if (segments.level_of(s) != level || (!all && !segments.is_fused(s))) continue;
            const int begin = std::max(tile.row, segments.begin[s]);
            const int end = std::min(tile.row + tile.rows, segments.end[s]);
            if (begin >= end) continue;
            for (int m = 0; m < (int)shapes_.targets(p).size(); m++) {
                const Target& target = shapes_.targets(p)[m];
                const auto part = target.within(tile.column, tile.columns);
                if (part.any() && segments.adapters[s]->has(target.module))
                    run({s, m, part.first, part.last - part.first, begin, end - begin});
            }
        }
    }

    Arena<T> arena() const { return {(T*)m_.arena, m_.page_elems}; }
    const Target& target(const LoraTask<T>& task, const LoraUnit& u) const {
        return shapes_.targets(task.shape)[u.module];
    }

    // Outputs of the shrinks: for each level, of each module of a gemm, the tokens' rows.
    Rows<X> h() { return {h_.data(), ldh_}; }
    long row_of(const StepDesc& step, const LoraUnit& u) const {
        return (u.module + most_targets_ * step.segments.level_of(u.segment)) * (long)step.tokens;
    }
    Rows<X> h_of(const LoraTask<T>& task, const LoraUnit& u) { return h().from(row_of(task.step, u)); }

    const ModelDesc m_;
    Team& team_;
    const GemmShapes shapes_;
    RankShrinks<T> ranks_;
    std::vector<Scratch> scratch_;
    std::vector<Shares<LoraUnit>> shrink_;  // of each GEMM's sizes
    std::vector<std::vector<Shares<LoraUnit>>> expand_;  // of each GEMM's sizes and level
    std::vector<Team::Gate> gates_;  // of the chunks
    Chunks chunks_;
    std::vector<std::vector<int>> shrink_chunk_;  // where each chunk's shrinks of a GEMM begin
    const int most_targets_, most_inputs_;  // of a GEMM
    std::vector<int> uses_before_;  // [gemms, shapes]: how many earlier ones have the shape
    Buffer<X> h_;
    VectorSegments vectors_;
    Buffer<float> aside_;  // of y's rows
    long ldh_ = 2;
    bool fused_ = false;  // the step has a long segment
    bool few_ = false, gated_ = false;
};

}  // namespace chorus
