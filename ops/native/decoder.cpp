// A Llama-architecture decoder step as one call: every thread walks the layers, meeting after each phase.
//
// No Python, allocation or dispatch between the products; the step's variable part (rows, block tables, segments) is
// read from a StepDesc, so that one function serves decode buckets and ragged prefill steps alike.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,bmi2")
#include <chrono>
#include <cmath>
#include <memory>
#include "best.h"
#include "buffer.h"
#include "decode_attention.h"
#include "descriptors.h"
#include "elementwise.h"
#include "file_rows.h"
#include "gemm.h"
#include "pool.h"
#include "prefill_attention.h"
#include "sampling.h"
#include "sgmv.h"
#include "shares.h"

namespace chorus {

template <class T>
class Decoder {
   public:
    Decoder(const ModelDesc& model, Team& team)
        : m_(model), layers_(model.layer, model.layer + model.layers), team_(team), scratch_(team.most()) {
        const int q = m_.heads * m_.head_dim, kv = m_.kv_heads * m_.head_dim;
        groups_[0] = {{0, 0, q}, {1, q, kv}, {2, q + kv, kv}};
        groups_[1] = {{3, 0, m_.hidden}};
        groups_[2] = {{4, 0, m_.ffn}, {5, m_.ffn, m_.ffn}};
        groups_[3] = {{6, 0, m_.hidden}};
        none_split_.assign(team_.most() + 1, 0);
    }

    void forward(const StepDesc& step) {
        plan(step);
        patience_ = std::chrono::nanoseconds(step.max_stall_ns);
        logits_wanted_ = step.logits_wanted;
        team_.run([&](int thread) { walk(step, thread); });
    }

    // Logits of some of the last step's score tokens, `[count, vocab]`.
    void score_logits(int first, int count, float* logits) {
        grow_heads(count);
        team_.run([&](int thread) {
            int phase = 0;
            run_head(thread, phase, logits_wanted_ + first, count, logits, nullptr, nullptr);
        });
    }

    // Tokens and log-probabilities of rows of logits.
    void sample(Draw* draws, int num_draws, Score* scores, int num_scores) {
        const bool few = (int64_t)(num_draws + num_scores) * m_.vocab <= kFewLogits;
        sampling_.plan(draws, num_draws, scores, num_scores, m_.vocab, few ? 1 : team_.size());
        const auto finish = [&](int i, int thread) {
            if (i < num_draws) sampling_.draw(i, draws[i], thread);
            else sampling_.score(i, scores[i - num_draws], thread);
        };
        if (few) {
            for (int i = 0; i < sampling_.units(); i++) sampling_.see(i);
            for (int i = 0; i < sampling_.rows(); i++) finish(i, 0);
            return;
        }
        team_.run([&](int thread) {
            int phase = 0;
            team_.each(phase, sampling_.units(), [&](int i) { sampling_.see(i); });
            team_.each(phase, sampling_.rows(), [&](int i) { finish(i, thread); });
        });
    }

   private:
    static constexpr int64_t kFewLogits = 1 << 15;  // drawn from sooner than another thread wakes

    struct Scratch {
        AttentionScratch attention;
        std::vector<const T*> rows;
        std::vector<T> panel, spare;
        std::vector<float> logits;  // of one panel
        Candidates candidates;
        std::vector<float> gated;   // a tile of the gate and one of up, side by side
    };

    // Buffers and units of work of the step, the same for all layers.
    void plan(const StepDesc& step) {
        const int q = m_.heads * m_.head_dim, qkv = q + 2 * m_.kv_heads * m_.head_dim;
        const size_t tokens = std::max(step.tokens, step.logits_wanted + (int)step.scores_wanted);
        grow(x_, tokens * spread<float>(m_.hidden));
        few_ = step.tokens <= kFewTokens;
        gated_ = !few_ && m_.ffn % kPanel == 0;
        grow(y_, tokens * spread<float>(gated_ ? qkv : std::max(qkv, 2 * m_.ffn)));
        grow(normed_, tokens * spread<T>(m_.hidden));
        grow(q_, tokens * spread<T>(q));
        grow(attended_, tokens * spread<T>(q));
        grow(act_, tokens * spread<T>(m_.ffn));
        decode_ = few_ && step.tokens == step.rows;
        const Segments segments{step.segments, step.segment_begin, step.segment_end, step.segment_adapters,
                                step.segment_level};
        int rank = 0, levels = 1;
        for (int s = 0; s < step.segments; s++) {
            rank = std::max(rank, (int)step.segment_adapters[s]->rank);
            levels = std::max(levels, 1 + segments.level_of(s));
        }
        ldh_ = (rank + 2) & ~1;
        grow(h_, 3 * levels * tokens * ldh_);
        fused_ = false;
        if (!few_)  // else the base product streams its weights, in tiles of as many rows as there are
            for (int s = 0; s < step.segments; s++) fused_ |= is_fused(step, s);
        cut(step);
        for (int g = 0; g < 4; g++) {
            shrink_units(segments, groups_[g], shrink_[g]);
            expand_units(segments, 0, groups_[g], team_.size(), expand_[g]);
            auto& units = expand_[g];
            auto cost = [&](const LoraUnit& u) { return u.count * segments.adapters[u.segment]->rank; };
            auto is_long = [](const LoraUnit& u) { return u.tokens >= kLongSegment; };
            if (fused_) units.erase(std::remove_if(units.begin(), units.end(), is_long), units.end());
            split(shrink_[g], team_.size(), shrink_split_[g], [&](const LoraUnit& u) { return u.count * u.tokens; });
            split(units, team_.size(), expand_split_[g], cost);
            later_[g].resize(levels - 1);
            for (int level = 1; level < levels; level++) {
                Later& later = later_[g][level - 1];
                expand_units(segments, level, groups_[g], team_.size(), later.units);
                split(later.units, team_.size(), later.split, cost);
            }
        }
        if (decode_) {
            decodes_ = decode_units(step.kv_lens, step.rows, m_.kv_heads, team_.size());
            split(decodes_, team_.size(), decode_split_,
                  [&](const DecodeUnit& u) { return step.kv_lens[u.row] * u.heads; });
        } else {
            attention_units(step.qo_indptr, step.rows, m_.heads, m_.kv_heads, attention_);
            split(attention_, team_.size(), attention_split_, [&](const AttentionUnit& u) {
                return u.tokens * (step.kv_lens[u.row] - step.qo_indptr[u.row + 1] + u.token + u.tokens);
            });
        }
        grow_heads(step.logits_wanted);
        if (step.draws) panels_.plan(step.logits_wanted, m_.vocab);
        for (auto& s : scratch_) {
            if (gated_) grow(s.gated, 2 * kPanel * kSegmentChunk);
            grow(s.rows, rank);
            grow(s.panel, (size_t)(rank + 1) * kPanel);
            grow(s.spare, std::max((size_t)kRankChunk * std::max({m_.hidden, q, m_.ffn}), (size_t)rank * kColumnChunk));
        }
    }

    void grow_heads(int rows) {
        best_.resize((size_t)team_.size() * rows);
        for (auto& s : scratch_) grow(s.logits, (size_t)std::min(rows, kRowChunk) * kPanel);
    }

    // Row chunks of the products: a segment whose expand is part of them has its own, as each chunk packs its adapter's rows.
    void cut(const StepDesc& step) {
        cuts_.assign(1, 0);
        auto up_to = [&](int end) {  // in about equal parts, of whole tiles
            const int most = fused_ ? kSegmentChunk : kRowChunk, begin = cuts_.back(), rows = end - begin,
                      parts = (rows + most - 1) / most;
            for (int i = 1; i < parts; i++) cuts_.push_back(begin + (rows * i / parts + kRows / 2) / kRows * kRows);
            if (parts) cuts_.push_back(end);
        };
        if (fused_)
            for (int s = 0; s < step.segments; s++) {
                if (!is_fused(step, s) || step.segment_end[s] - step.segment_begin[s] < kSegmentChunk / 4) continue;
                if (step.segment_begin[s] >= cuts_.back()) up_to(step.segment_begin[s]);
                if (step.segment_end[s] > cuts_.back()) up_to(step.segment_end[s]);
            }
        up_to(step.tokens);
    }

    void walk(const StepDesc& step, int thread) {
        int phase = 0;
        const int tokens = step.tokens, hidden = m_.hidden, head_dim = m_.head_dim;
        const int q = m_.heads * head_dim, kv = m_.kv_heads * head_dim, qkv = q + 2 * kv;
        const long ldx = spread<float>(hidden), ldn = spread<T>(hidden), ldq = spread<T>(q), lda = spread<T>(m_.ffn);
        const long ldqkv = spread<float>(qkv), ldgu = spread<float>(2 * m_.ffn);
        const int heads_per_kv = m_.heads / m_.kv_heads;
        const float scale = 1.0f / std::sqrt((float)head_dim);
        auto each_token = [&](auto work) { each_part(team_, phase, thread, tokens, [&](int t, bool) { work(t); }); };
        // Not by parts: a team's very first phase has the tag that untouched shares have.
        team_.each(phase, tokens, [&](int t) {
            convert((const T*)m_.embed + step.token_ids[t] * hidden, hidden, x_.data() + t * ldx);
        });
        const int64_t kv_plane = (int64_t)m_.block_tokens * kv;
        for (int l = 0; l < m_.layers; l++) {
            const LayerDesc& w = layers_[l];
            if (step.segment_ready) team_.each(phase, 1, [&](int) { wait_for_layer(step, l); });
            T* k_plane = (T*)m_.arena + (2 * l) * kv_plane;
            T* v_plane = k_plane + kv_plane;
            normalise(thread, phase, tokens, w.input_norm);
            project(step, thread, phase, 0, l, normed_.data(), ldn, hidden, w.qkv, qkv, y_.data(), ldqkv, false,
                    w.qkv_bias);
            auto rotate = [&](int t, int first, int count) {
                for (int h = first; h < first + count; h++)
                    rotate_and_store(step, w, t, h, y_.data() + t * ldqkv, k_plane, v_plane);
            };
            const PagedCache<T> cache{k_plane, v_plane, m_.page_elems, m_.block_tokens, m_.kv_heads, head_dim};
            auto table = [&](int row) { return step.page_table + row * step.table_stride; };
            if (decode_) {
                each_split(team_, phase, thread, decodes_, decode_split_,
                           [&](const DecodeUnit& unit, const DecodeUnit* next) {
                               const long row = unit.row;
                               rotate(row, unit.first, unit.heads);
                               attend_decode<T>(cache, unit, q_.data() + row * ldq, attended_.data() + row * ldq,
                                                heads_per_kv, table(row), step.kv_lens[row], scale,
                                                scratch_[thread].attention, next ? table(next->row) : nullptr,
                                                next ? step.kv_lens[next->row] : 0, next ? next->first : 0);
                           });
            } else {
                each_token([&](int t) {
                    for (int i = 0; i < qkv; i += kLanes) prefetch(y_.data() + (t + 1) * ldqkv + i);
                    rotate(t, 0, m_.kv_heads);
                });
                each_split(team_, phase, thread, attention_, attention_split_,
                           [&](const AttentionUnit& unit, const AttentionUnit*) {
                               attend<T>(cache, unit, q_.data(), attended_.data(), ldq, heads_per_kv, table(unit.row),
                                         step.kv_lens[unit.row], step.qo_indptr[unit.row + 1], scale,
                                         scratch_[thread].attention);
                           });
            }
            project(step, thread, phase, 1, l, attended_.data(), ldq, q, w.o, hidden, x_.data(), ldx, true, w.o_bias);
            normalise(thread, phase, tokens, w.post_attention_norm);
            if (gated_) {
                project_gated(step, thread, phase, l, w);
            } else {
                project(step, thread, phase, 2, l, normed_.data(), ldn, hidden, w.gate_up, 2 * m_.ffn, y_.data(), ldgu,
                        false, w.gate_up_bias);
                each_token([&](int t) {
                    const float* gate = y_.data() + t * ldgu;
                    silu_and_mul(gate, gate + m_.ffn, m_.ffn, act_.data() + t * lda);
                });
            }
            project(step, thread, phase, 3, l, act_.data(), lda, m_.ffn, w.down, hidden, x_.data(), ldx, true,
                    w.down_bias);
        }
        team_.each(phase, step.logits_wanted + step.scores_wanted, [&](int r) {
            rms_norm(x_.data() + step.logit_tokens[r] * ldx, m_.norm, hidden, m_.eps, normed_.data() + r * ldn);
        });
        const int rows = step.logits_wanted;
        run_head(thread, phase, 0, rows, step.logits, step.logit_rows, step.draws);
        if (step.draws) {
            team_.each(phase, rows, [&](int r) { choose(step, thread, r); });
        } else if (!thread) {
            for (int r = 0; r < rows; r++) choose(step, thread, r);
        }
    }

    // The row's likeliest token, or the one that is drawn.
    void choose(const StepDesc& step, int thread, int row) {
        const int rows = step.logits_wanted;
        Best all = best_[row];
        for (int t = 1; t < team_.size(); t++) all.join(best_[(long)t * rows + row]);
        step.best[row] = all.nan || !std::isfinite(all.value) ? -1 : all.token;
        if (step.best[row] < 0 || !step.draws || !(step.draws[row].inverse_temperature > 0)) return;
        const int kept = !step.logits ? -1 : step.logit_rows ? step.logit_rows[row] : row;
        step.best[row] =
            panels_.draw(row, step.draws[row], scratch_[thread].candidates, [&](int panel) -> const float* {
                if (kept >= 0) return step.logits + (long)kept * m_.vocab + panel * kPanel;
                const long ldn = spread<T>(m_.hidden);
                float* y = scratch_[thread].logits.data();
                panel_product<T>(normed_.data() + row * ldn, ldn, 1,
                                 (const T*)m_.lm_head + panel * panel_elems<T>(m_.hidden), m_.hidden, y, kPanel,
                                 std::min(kPanel, m_.vocab - panel * kPanel), false, nullptr);
                return y;
            });
    }

    // The head's product with normalised rows, and the best of each while they are in the cache. logits: null when none are
    // kept. kept: which of its rows each row's logits go to, below 0 where they are not kept; null: one after the other.
    // draws: null when none are drawn from.
    void run_head(int thread, int& phase, int first, int rows, float* logits, const int32_t* kept, const Draw* draws) {
        const int panel = panel_elems<T>(m_.hidden), vocab = m_.vocab;
        Best* best = best_.data() + (long)thread * rows;
        std::fill(best, best + rows, Best{});
        const long ldn = spread<T>(m_.hidden);
        Product<T> head{normed_.data() + first * ldn,
                        ldn,
                        rows,
                        (const T*)m_.lm_head,
                        vocab,
                        m_.hidden,
                        logits,
                        vocab,
                        false,
                        nullptr};
        run_units(
            team_, phase, thread, head, none_, none_split_,
            [&](int i, bool) {
                const Tile t = head.tile_of(i);
                const bool direct = logits && !kept;
                float* y = direct ? logits + (long)t.row * vocab + t.column : scratch_[thread].logits.data();
                const int ldy = direct ? vocab : kPanel;
                panel_product<T>(head.x + t.row * head.ldx, head.ldx, t.rows, head.w + (long)t.column / kPanel * panel,
                                 head.k, y, ldy, t.columns, false, nullptr);
                for (int r = 0; r < t.rows; r++) {
                    const float* row = y + (long)r * ldy;
                    best[t.row + r].see(row, t.columns, t.column);
                    if (draws && draws[t.row + r].inverse_temperature > 0)
                        panels_.see(t.row + r, row, t.columns, t.column, draws[t.row + r].weighed(vocab));
                    if (kept && kept[t.row + r] >= 0)
                        convert(row, t.columns, logits + (long)kept[t.row + r] * vocab + t.column);
                }
            },
            [](const LoraUnit&) {});
    }

    // A late segment is computed with what lies in its pages: its rows are to be run again, the others don't see them.
    void wait_for_layer(const StepDesc& step, int layer) {
        using Clock = std::chrono::steady_clock;
        for (int s = 0; s < step.segments; s++) {
            const auto* ready = step.segment_ready[s];
            if (!ready || step.segment_late[s] || ready->load(std::memory_order_acquire) > layer) continue;
            const auto began = Clock::now();
            for (int i = 0;; i++) {
                const int32_t layers = ready->load(std::memory_order_acquire);
                if (layers > layer) break;
                if (layers < 0 || Clock::now() - began > patience_) {
                    step.segment_late[s] = 1;
                    break;
                }
                if (i < 200) _mm_pause();
                else std::this_thread::sleep_for(std::chrono::microseconds(20));  // the reader may need this core
            }
            patience_ -= Clock::now() - began;  // time that is spent computing is not waited for
        }
    }

    void normalise(int thread, int& phase, int tokens, const float* weight) {
        const int hidden = m_.hidden;
        each_part(team_, phase, thread, tokens, [&](int t, bool) {
            rms_norm(x_.data() + t * spread<float>(hidden), weight, hidden, m_.eps,
                     normed_.data() + t * spread<T>(hidden));
        });
    }

    // y (+)= x · wᵀ and the step's LoRA products of one group.
    //
    // Few tokens: base product and shrink side by side, then expand in chunks of columns long enough to stream.
    // Many: shrink first, then expand as more of the base product's reduction dimension. By themselves still expand segments
    // of few tokens, a second part of an adapter for the same tokens, and panels that hold columns of two modules.
    void project(const StepDesc& step, int thread, int& phase, int g, int layer, const T* x, long ldx, int k,
                 const void* w, int n, float* y, long ldy, bool accumulate, const float* bias) {
        const Product<T> product{
            x, ldx, step.tokens, (const T*)w, n, k, y, ldy, accumulate, bias, few_ ? nullptr : &cuts_};
        const auto &shrinks = shrink_[g], &expands = expand_[g];
        if (fused_) {
            shrink_all(step, thread, phase, g, layer, x, ldx, k);
            each_part(team_, phase, thread, product.units(), [&](int i, bool) {
                const Tile tile = product.tile_of(i);
                run_tile(step, thread, g, layer, product, tile, y + tile.row * ldy + tile.column, ldy, false);
            });
        } else {
            run_units(
                team_, phase, thread, product, shrinks, shrink_split_[g],
                [&](int i, bool more) { product.run(i, more); },
                [&](const LoraUnit& u) { run_shrink(step, thread, g, layer, x, ldx, k, u); });
        }
        if (!expands.empty())
            each_split(team_, phase, thread, expands, expand_split_[g],
                       [&](const LoraUnit& u, const LoraUnit*) { run_expand(step, thread, g, layer, u, y, ldy); });
        for (const Later& later : later_[g])  // what tokens have a second time is added to what they have first
            each_split(team_, phase, thread, later.units, later.split,
                       [&](const LoraUnit& u, const LoraUnit*) { run_expand(step, thread, g, layer, u, y, ldy); });
    }

    // act_ = silu(gate) · up for many tokens: the gate's tile and up's of the same columns one after the other, so that
    // neither leaves the cache before the two become one of half the bytes.
    void project_gated(const StepDesc& step, int thread, int& phase, int layer, const LayerDesc& w) {
        const T* x = normed_.data();
        const long ldx = spread<T>(m_.hidden), lda = spread<T>(m_.ffn);
        const Product<T> product{x,       ldx, step.tokens, (const T*)w.gate_up, 2 * m_.ffn, m_.hidden,
                                 nullptr, 0,   false,       w.gate_up_bias,      &cuts_};
        shrink_all(step, thread, phase, 2, layer, x, ldx, m_.hidden);
        const int panels = m_.ffn / kPanel;
        each_part(team_, phase, thread, product.units() / 2, [&](int i, bool) {
            const Tile gate = product.tile_of(i / panels * 2 * panels + i % panels);
            Tile up = gate;
            up.column += m_.ffn;
            float* out = scratch_[thread].gated.data();
            run_tile(step, thread, 2, layer, product, gate, out, 2 * kPanel, true);
            run_tile(step, thread, 2, layer, product, up, out + kPanel, 2 * kPanel, true);
            for (int r = 0; r < gate.rows; r++, out += 2 * kPanel)
                silu_and_mul(out, out + kPanel, kPanel, act_.data() + (gate.row + r) * lda + gate.column);
        });
    }

    void shrink_all(const StepDesc& step, int thread, int& phase, int g, int layer, const T* x, long ldx, int k) {
        if (shrink_[g].empty()) return;
        each_split(team_, phase, thread, shrink_[g], shrink_split_[g],
                   [&](const LoraUnit& u, const LoraUnit*) { run_shrink(step, thread, g, layer, x, ldx, k, u); });
    }

    void run_shrink(const StepDesc& step, int thread, int g, int layer, const T* x, long ldx, int k,
                    const LoraUnit& u) {
        const Adapter& adapter = *step.segment_adapters[u.segment];
        if (adapter.first_elem[layer] < 0) return;
        shrink<T>(arena(), adapter, layer, groups_[g][u.module].module, u, x, ldx, k, h_of(step, u), ldh_,
                  scratch_[thread].spare.data());
    }

    // y: where the group's first column of the step's first token is.
    void run_expand(const StepDesc& step, int thread, int g, int layer, const LoraUnit& u, float* y, long ldy) {
        const Adapter& adapter = *step.segment_adapters[u.segment];
        if (adapter.first_elem[layer] < 0) return;
        const Target& target = groups_[g][u.module];
        Scratch& own = scratch_[thread];
        expand<T>(arena(), adapter, layer, target.module, u, h_of(step, u), ldh_, y + target.column, ldy,
                  own.rows.data(), own.panel.data(), own.spare.data());
    }

    // A tile of a group's product at `out`, with the expands that are fused with it or, where the tile stays in the cache, `all`
    // of them. Those that aren't fused, and what the panel can't take in one piece, are added to what the product gave.
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
        auto add = [&](const LoraUnit& u) { run_expand(step, thread, g, layer, u, at(0) - tile.column, ldo); };
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

    // The parts of a level's segments, of all or of those that are fused, and of the group's modules that lie in a tile of the
    // product.
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

    // Of one K/V head and the query heads that share it: norm (where the architecture has it) and rotate q and k, then
    // write q to its buffer, k and v to their page.
    void rotate_and_store(const StepDesc& step, const LayerDesc& w, int t, int kv_head, float* y, T* k_plane,
                          T* v_plane) {
        const int head_dim = m_.head_dim, q = m_.heads * head_dim, kv = m_.kv_heads * head_dim,
                  group = m_.heads / m_.kv_heads;
        const float *cos = m_.cos + step.positions[t] * head_dim, *sin = m_.sin + step.positions[t] * head_dim;
        const int64_t place = step.page[t] * m_.page_elems + step.offset[t] * kv + kv_head * head_dim;
        for (int i = 0; i <= group; i++) {
            const bool key = i == group;
            const int head = key ? m_.heads + kv_head : kv_head * group + i;
            float* x = y + head * head_dim;
            if (const float* norm = key ? w.k_norm : w.q_norm) rms_norm(x, norm, head_dim, m_.eps, x);
            rotate(x, cos, sin, head_dim, key ? k_plane + place : q_.data() + t * spread<T>(q) + head * head_dim);
        }
        convert(y + q + kv + kv_head * head_dim, head_dim, v_plane + place);
    }

    Arena<T> arena() const { return {(T*)m_.arena, m_.page_elems}; }

    // Output of the shrink for a module of a group, of the segments of the unit's level: [tokens, ldh_].
    T* h_of(const StepDesc& step, const LoraUnit& u) {
        return h_.data() + (u.module + 3 * level_of(step, u.segment)) * (long)step.tokens * ldh_;
    }

    // Elements from row to row: an odd number of cache lines, so that rows don't fall into the same few sets.
    template <class E>
    static long spread(int n) {
        constexpr int line = 64 / (int)sizeof(E);
        return ((n + line - 1) / line | 1) * (long)line;
    }

    template <class V>
    static void grow(V& v, size_t n) {
        if (v.size() < n) v.resize(n);
    }

    ModelDesc m_;
    std::vector<LayerDesc> layers_;
    Team& team_;
    std::vector<Scratch> scratch_;
    std::vector<Target> groups_[4];
    struct Later {  // expand of the segments of one level
        std::vector<LoraUnit> units;
        std::vector<int> split;
    };
    std::vector<LoraUnit> shrink_[4], expand_[4];
    std::vector<Later> later_[4];  // of the levels from 1 on
    std::vector<int> cuts_, shrink_split_[4], expand_split_[4], decode_split_, attention_split_, none_split_;
    std::vector<LoraUnit> none_;
    std::vector<AttentionUnit> attention_;
    std::vector<DecodeUnit> decodes_;
    std::vector<Best> best_;
    Sampling sampling_;
    Panels panels_;
    int logits_wanted_ = 0;  // of the last step: behind them come the rows to score
    Buffer<float> x_, y_;
    Buffer<T> normed_, q_, attended_, act_, h_;
    int ldh_ = 2;
    bool fused_ = false;  // the step has a long segment
    bool few_ = false;  // it has few tokens
    bool gated_ = false;  // it has many, and gate and up have panels of their own
    bool decode_ = false;  // it has few and each is a row of its own
    std::chrono::nanoseconds patience_;  // that is left in the step
};

struct AnyDecoder {
    virtual ~AnyDecoder() = default;
    virtual void forward(const StepDesc& step) = 0;
    virtual void score_logits(int first, int count, float* logits) = 0;
    virtual void sample(Draw* draws, int num_draws, Score* scores, int num_scores) = 0;
    virtual int threads() const = 0;
};

template <class T>
struct TypedDecoder final : AnyDecoder {
    TypedDecoder(const ModelDesc& model, int threads) : team(threads), decoder(model, team) {}
    void forward(const StepDesc& step) override { decoder.forward(step); }
    void score_logits(int first, int count, float* logits) override { decoder.score_logits(first, count, logits); }
    void sample(Draw* draws, int num_draws, Score* scores, int num_scores) override {
        decoder.sample(draws, num_draws, scores, num_scores);
    }
    int threads() const override { return team.size(); }
    Team team;
    Decoder<T> decoder;
};

}  // namespace chorus

using namespace chorus;

#define CHORUS_API __attribute__((visibility("default")))

extern "C" {

CHORUS_API int chorus_supported() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16");
}

// Sizes of the descriptors, so that a library built from other sources than the Python side is told apart.
CHORUS_API int64_t chorus_descriptors() {
    return ((int64_t)sizeof(StepDesc) * 1000 + sizeof(ModelDesc)) * 1000 + sizeof(LayerDesc);
}

// element: 2 for bfloat16, 4 for float32.
CHORUS_API void* chorus_decoder_create(int element, const ModelDesc* model, int threads) {
    if (element == 2) return new TypedDecoder<bf16>(*model, threads);
    return new TypedDecoder<float>(*model, threads);
}

CHORUS_API void chorus_decoder_forward(void* decoder, const StepDesc* step) { ((AnyDecoder*)decoder)->forward(*step); }

CHORUS_API void chorus_decoder_score_logits(void* decoder, int first, int count, float* logits) {
    ((AnyDecoder*)decoder)->score_logits(first, count, logits);
}

CHORUS_API void chorus_decoder_sample(void* decoder, Draw* draws, int num_draws, Score* scores, int num_scores) {
    ((AnyDecoder*)decoder)->sample(draws, num_draws, scores, num_scores);
}

// Number of threads that the next step takes: all, or fewer while others keep the processors busy.
CHORUS_API int chorus_decoder_threads(void* decoder) { return ((AnyDecoder*)decoder)->threads(); }

CHORUS_API void chorus_decoder_destroy(void* decoder) { delete (AnyDecoder*)decoder; }

// The rows of a file, group by group: see file_rows.h. `jobs` stay the caller's and must outlive it, as must `fd`.
CHORUS_API void* chorus_rows_open(int fd, const Span* spans, const ReadGroup* groups, int64_t count,
                                  const ReadJob* jobs, int64_t element) {
    return new FileRows(fd, spans, groups, count, jobs, (Element)element);
}
CHORUS_API int chorus_rows_next(void* rows, void* out, ReadFault* fault) {
    return ((FileRows*)rows)->next(out, *fault);
}
CHORUS_API const char* chorus_rows_at(void* rows, int64_t start, int64_t bytes) {
    return ((FileRows*)rows)->at(start, bytes);
}
CHORUS_API void chorus_rows_close(void* rows) { delete (FileRows*)rows; }
}
