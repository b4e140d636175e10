// LoRA on the model's own modules: the token embeddings and the output projection.
//
// Adapters have the rank-rows of the embeddings beside those of layer 0, and those of the head beside those of the last layer.
// Parts with whole rows have a token's row in place of a rank-row of A; it is used in place of the model's own, before LoRA.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>
#include "team/buffer.h"
#include "program/descriptors.h"
#include "lora/sgmv.h"

namespace chorus {

// Where a row of a part begins. A row that goes on in another page is put together in `spare`.
template <class T>
inline const T* row_at(const Arena<T>& arena, const Adapter& adapter, int layer, int module, int row, int width,
                       T* spare) {
    const T* found;
    arena.locate({&adapter, layer, row, 1, adapter.a_offset[module], width}, &found, spare, width);
    return found;
}

// Σ_k x[k] · w[k].
template <class T>
inline float dot(const Act<T>* x, const T* w, int k) {
    using K = Kind<T>;
    using A = Kind<Act<T>>;
    Floats acc[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) acc[i] = floats(0);
    int i = 0;
    for (; i + K::width <= k; i += K::width) acc[0] = A::mac(acc[0], K::load(w + i), A::load(x + i));
    if (i < k) acc[0] = A::mac(acc[0], K::load(w + i, k - i), A::load(x + i, k - i));
    alignas(64) float sums[16];
    store16(sums, reduce16(acc));
    return sums[0];
}

// Adds adapters' terms to token embeddings. A token's column of A takes the place of a product.
template <class T>
class EmbeddingLora {
    using X = Act<T>;

   public:
    EmbeddingLora(const ModelDesc& model, int threads)
        : arena_{(T*)model.arena, model.page_elems},
          module_(model.embed_module),
          rows_module_(model.embed_rows_module),
          hidden_(model.hidden),
          scratch_(threads) {}

    void plan(const Segments& segments) {
        int rank = 0;
        any_ = false;
        for (int s = 0; s < segments.count; s++) {
            const Adapter& adapter = *segments.adapters[s];
            if (has(adapter, module_)) rank = std::max(rank, (int)adapter.rank);
            any_ |= has(adapter, module_) || has(adapter, rows_module_);
        }
        if (!any_) return;
        for (auto& s : scratch_) {
            s.lora.reserve(rank, hidden_);
            grow(s.h, (rank + 2) & ~1);
        }
    }

    // Add the terms of all adapters of a token, to the row that one of them has for it or to the model's.
    //
    //   segments  of the step
    //   thread    that computes
    //   t         the token's place in the step
    //   token     its id
    //   x         [hidden]: its embedding
    void add(const Segments& segments, int thread, int t, int64_t token, float* x) {
        if (!any_) return;
        Scratch& own = scratch_[thread];
        auto is_of = [&](int s, int module) {
            return t >= segments.begin[s] && t < segments.end[s] && has(*segments.adapters[s], module);
        };
        for (int s = 0; s < segments.count; s++) {
            if (!is_of(s, rows_module_)) continue;
            const Adapter& adapter = *segments.adapters[s];
            const int64_t* end = adapter.tokens + adapter.rank;
            const int64_t* found = std::lower_bound(adapter.tokens, end, token);
            if (found == end || *found != token) continue;
            const int row = (int)(found - adapter.tokens);
            convert(row_at(arena_, adapter, 0, rows_module_, row, hidden_, own.lora.spare.data()), hidden_, x);
        }
        for (int s = 0; s < segments.count; s++) {
            if (!is_of(s, module_)) continue;
            const Adapter& adapter = *segments.adapters[s];
            gather(adapter, token, own.h.data());
            for (int c = 0; c < hidden_; c += kColumnChunk) {
                const LoraUnit unit{s, 0, c, std::min(kColumnChunk, hidden_ - c), 0, 1};
                expand<T>(arena_, b_rows(adapter, 0, module_, unit), unit, Rows<X>{own.h.data(), 0},
                          Rows<float>{x, hidden_}, own.lora, {});
            }
        }
    }

   private:
    struct Scratch {
        LoraScratch<T> lora;
        std::vector<X> h;
    };

    static bool has(const Adapter& adapter, int module) {
        return module >= 0 && adapter.has(module) && adapter.in_layer(0);
    }

    // h[i] = scale · A_i[token], and a zero behind them.
    void gather(const Adapter& adapter, int64_t token, X* h) const {
        const int64_t first = adapter.first_elem[0] + adapter.a_offset[module_] + token;
        for (int i = 0; i < adapter.rank; i++) {
            const int64_t elem = first + i * adapter.slab_elems;
            const int64_t page = adapter.pages[elem / arena_.page_elems];
            const float value = adapter.scale * widen(arena_.data[page * arena_.page_elems + elem % arena_.page_elems]);
            convert(&value, 1, h + i);
        }
        h[adapter.rank] = 0;
    }

    const Arena<T> arena_;
    const int module_, rows_module_, hidden_;
    bool any_ = false;
    std::vector<Scratch> scratch_;
};

// Adds the terms of adapters of a module of the model to a product of a step's tokens.
template <class T>
class ProductLora {
    using X = Act<T>;

   public:
    ProductLora(const ModelDesc& model, int threads) : arena_{(T*)model.arena, model.page_elems}, scratch_(threads) {}

    // y += scale · x · Aᵀ · B of each segment's adapter. Called by every thread of the team alike.
    //
    //   segments         of the step
    //   tokens           of the step
    //   module           the product's
    //   x, y             [tokens, inputs] and [tokens, outputs]
    void add(Team& team, Team::Member& me, const Segments& segments, int tokens, int module, Rows<const X> x,
             int inputs, Rows<float> y, int outputs) {
        each_part(team, me, (tokens + kTokenChunk - 1) / kTokenChunk, [&](int i, bool) {
            const int first = i * kTokenChunk, last = std::min(tokens, first + kTokenChunk);
            for (int s = 0; s < segments.count; s++) {
                const Adapter& adapter = *segments.adapters[s];
                const int begin = std::max(first, segments.begin[s]), end = std::min(last, segments.end[s]);
                if (begin < end && adapter.rank && adapter.has(module) && adapter.in_layer(0))
                    add(scratch_[me.thread], adapter, {s, 0, 0, 0, begin, end - begin}, module, x, inputs, y, outputs);
            }
        });
    }

   private:
    struct Scratch {
        LoraScratch<T> lora;
        Buffer<X> h;
    };

    void add(Scratch& own, const Adapter& adapter, LoraUnit unit, int module, Rows<const X> x, int inputs,
             Rows<float> y, int outputs) {
        const int rank = adapter.rank;
        const long ldh = (rank + 2) & ~1;
        own.lora.reserve(rank, std::max(inputs, outputs));
        grow(own.h, (size_t)unit.tokens * ldh);
        const Rows<X> h = Rows<X>{own.h.data(), ldh}.from(-unit.token);
        for (int r = 0; r < rank; r += kRankChunk) {
            unit.first = r, unit.count = std::min(kRankChunk, rank - r);
            shrink<T>(arena_, a_rows(adapter, 0, module, unit, inputs), unit, x, h, own.lora, {});
        }
        for (int c = 0; c < outputs; c += kColumnChunk) {
            unit.first = c, unit.count = std::min(kColumnChunk, outputs - c);
            expand<T>(arena_, b_rows(adapter, 0, module, unit), unit, h, y, own.lora, {});
        }
    }

    const Arena<T> arena_;
    std::vector<Scratch> scratch_;
};

// Adds adapters' terms to logits, and replaces those of tokens with rows of their own. Tokens beyond the model's vocabulary
// have columns behind it, in rows of their adapter alone.
template <class T>
class HeadLora {
    using X = Act<T>;

   public:
    HeadLora(const ModelDesc& model, int threads)
        : arena_{(T*)model.arena, model.page_elems},
          module_(model.head_module),
          rows_module_(model.head_rows_module),
          first_token_(model.first_token),
          layer_(model.layers - 1),
          hidden_(model.hidden),
          beyond_(model.first_token + model.vocab),
          scratch_(threads) {}

    // Compute logits beside other ranks. vocab: of all of them.
    void join(int vocab) { beyond_ = vocab; }

    // The first token beyond the model's vocabulary.
    int beyond() const { return beyond_; }

    // Find which rows of logits the step's adapters change: each run of tokens is a run of rows. Kept until the next step.
    //
    //   step  that is planned
    //   room  most columns that follow the vocabulary
    void plan(const StepDesc& step, int room) {
        entries_.clear();
        rows_.clear();
        units_.clear();
        most_added_ = 0;
        if (module_ < 0 || !step.model_segments.count) return;
        const int wanted = step.logits_wanted, all = wanted + step.states_wanted;
        const int64_t* tokens = step.logit_tokens;
        // kept tokens: those of prompt logits in their order, then the pooled ones in theirs
        const int middle = (int)(std::is_sorted_until(tokens + wanted, tokens + all) - tokens);
        int rank = 0;
        size_t elems = 0;
        for (int s = 0; s < step.model_segments.count; s++) {
            const Adapter& adapter = *step.model_segments.adapters[s];
            const bool has_rows = rows_module_ >= 0 && adapter.has(rows_module_);
            if (!(has_rows || adapter.has(module_)) || !adapter.in_layer(layer_)) continue;
            for (const auto& [begin, end] : {std::pair{0, wanted}, std::pair{wanted, middle}, std::pair{middle, all}}) {
                const int64_t *from = tokens + begin, *to = tokens + end;
                const int first = (int)(std::lower_bound(from, to, step.model_segments.begin[s]) - tokens);
                const int last = (int)(std::lower_bound(from, to, step.model_segments.end[s]) - tokens);
                if (first == last) continue;
                if (has_rows) {
                    const int added = adapter.rank ? (int)adapter.tokens[adapter.rank - 1] + 1 - beyond_ : 0;
                    rows_.push_back({&adapter, first, last, 0, 0, std::clamp(added, 0, room)});
                    most_added_ = std::max(most_added_, rows_.back().added);
                    continue;
                }
                const long ldh = (adapter.rank + 2) & ~1;
                entries_.push_back({&adapter, first, last, elems, ldh, 0});
                elems += (last - first) * ldh;
                rank = std::max(rank, (int)adapter.rank);
            }
        }
        for (int e = 0; e < (int)entries_.size(); e++) {
            const Entry& entry = entries_[e];
            for (int r = 0; r < entry.adapter->rank; r += kRankChunk)
                for (int t = entry.first; t < entry.last; t += kTokenChunk)
                    units_.push_back({e, 0, r, std::min(kRankChunk, entry.adapter->rank - r), t,
                                      std::min(kTokenChunk, entry.last - t)});
        }
        if (entries_.empty() && rows_.empty()) return;
        grow(h_, elems);
        for (auto& s : scratch_) s.reserve(rank, hidden_);
    }

    bool any() const { return !entries_.empty() || !rows_.empty(); }
    int units() const { return (int)units_.size(); }

    // The most columns that follow the vocabulary in a row, and those of one row of the step.
    int most_added() const { return most_added_; }
    int added(int row) const {
        int found = 0;
        if (most_added_)
            for (const Entry& entry : rows_)
                if (row >= entry.first && row < entry.last) found = std::max(found, entry.added);
        return found;
    }

    // Logits of tokens beyond the vocabulary; -inf where an adapter has no row of one.
    //
    //   thread      that computes
    //   row         of the step
    //   begin, end  the tokens, of those that are added
    //   x           [hidden]: the final hidden state
    //   y           [end - begin]: written
    //   finish      finish(logit) turns a product into a logit in place
    template <class Finish>
    void add_beyond(int thread, int row, int begin, int end, const X* x, float* y, Finish finish) {
        std::fill(y, y + (end - begin), -INFINITY);
        for (const Entry& entry : rows_) {
            if (row < entry.first || row >= entry.last) continue;
            each_own(thread, *entry.adapter, beyond_ + begin, end - begin, [&](int at, const T* w) {
                y[at] = dot<T>(x, w, hidden_);
                finish(y + at);
            });
        }
    }

    // A unit of x · Aᵀ; all before the first `add`.
    //
    //   thread  that computes
    //   i       the unit
    //   x       [rows, hidden]: the final hidden states
    void run_shrink(int thread, int i, Rows<const X> x) {
        const LoraUnit& unit = units_[i];
        const Entry& entry = entries_[unit.segment];
        shrink<T>(arena_, a_rows(*entry.adapter, layer_, module_, unit, hidden_), unit, x, h_of(entry),
                  scratch_[thread], {});
    }

    // Add the terms of some logits.
    //
    //   thread           that computes
    //   row, rows        of the step
    //   column, columns  first token, and how many: at most kColumnChunk
    //   x                [rows of the step, hidden]: the final hidden states
    //   y                [rows, columns]
    void add(int thread, int row, int rows, int column, int columns, Rows<const X> x, Rows<float> y) {
        for (const Entry& entry : rows_) {
            const int begin = std::max(row, entry.first), end = std::min(row + rows, entry.last);
            if (begin < end) replace(thread, *entry.adapter, begin, end, column, columns, x, y.from(-row, -column));
        }
        auto upcoming = [&](int e) {  // the next entry with some of the rows
            while (e < (int)entries_.size() && (entries_[e].last <= row || entries_[e].first >= row + rows)) e++;
            return e;
        };
        auto b_of = [&](int e) -> RankRows {
            if (e == (int)entries_.size()) return {};
            return b_rows(*entries_[e].adapter, layer_, module_, {e, 0, column, columns, 0, 0});
        };
        for (int e = upcoming(0); e < (int)entries_.size();) {
            const Entry& entry = entries_[e];
            const int begin = std::max(row, entry.first), end = std::min(row + rows, entry.last);
            const int next = upcoming(e + 1);
            expand<T>(arena_, b_of(e), {e, 0, column, columns, begin, end - begin}, h_of(entry), y.from(-row, -column),
                      scratch_[thread], b_of(next));
            e = next;
        }
    }

   private:
    // Rows `first` … last-1 of logits that an adapter changes, and where their h is.
    struct Entry {
        const Adapter* adapter;
        int first, last;
        size_t at;
        long ldh;
        int added;  // tokens beyond the vocabulary, up to the last that the adapter has a row of
    };

    // Replace the logits of an adapter's own tokens among some columns. begin, end: rows of the step.
    void replace(int thread, const Adapter& adapter, int begin, int end, int column, int columns, Rows<const X> x,
                 Rows<float> y) {
        each_own(thread, adapter, first_token_ + column, columns, [&](int at, const T* w) {
            for (int r = begin; r < end; r++) y[r][column + at] = dot<T>(x[r], w, hidden_);
        });
    }

    // Call use(token - first, [hidden] row) for each of some tokens that an adapter has a row of.
    template <class Use>
    void each_own(int thread, const Adapter& adapter, int64_t first, int count, Use use) {
        const int64_t* last = adapter.tokens + adapter.rank;
        const int64_t* found = std::lower_bound(adapter.tokens, last, first);
        for (; found < last && *found < first + count; found++)
            use((int)(*found - first), row_at(arena_, adapter, layer_, rows_module_, (int)(found - adapter.tokens),
                                              hidden_, scratch_[thread].spare.data()));
    }

    Rows<X> h_of(const Entry& entry) { return Rows<X>{h_.data() + entry.at, entry.ldh}.from(-entry.first); }

    const Arena<T> arena_;
    const int module_, rows_module_, first_token_, layer_, hidden_;
    int beyond_, most_added_ = 0;
    std::vector<Entry> entries_, rows_;
    std::vector<LoraUnit> units_;
    std::vector<LoraScratch<T>> scratch_;
    Buffer<X> h_;
};

}  // namespace chorus
