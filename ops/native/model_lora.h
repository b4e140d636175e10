// LoRA on the model's own modules: the token embeddings and the output projection.
//
// Adapters have the rank-rows of the embeddings beside those of layer 0, and those of the head beside those of the last layer.
#pragma once
#include <algorithm>
#include <vector>
#include "buffer.h"
#include "descriptors.h"
#include "sgmv.h"

namespace chorus {

// Adds adapters' terms to token embeddings. A token's column of A takes the place of a product.
template <class T>
class EmbeddingLora {
    using X = Act<T>;

   public:
    EmbeddingLora(const ModelDesc& model, int threads)
        : arena_{(T*)model.arena, model.page_elems},
          module_(model.embed_module),
          hidden_(model.hidden),
          scratch_(threads) {}

    void plan(const Segments& segments) {
        int rank = 0;
        for (int s = 0; s < segments.count; s++)
            if (has(*segments.adapters[s])) rank = std::max(rank, (int)segments.adapters[s]->rank);
        any_ = rank > 0;
        if (!any_) return;
        for (auto& s : scratch_) {
            s.lora.reserve(rank, hidden_);
            grow(s.h, (rank + 2) & ~1);
        }
    }

    // Add the terms of all adapters of a token.
    //
    //   segments  of the step
    //   thread    that computes
    //   t         the token's place in the step
    //   token     its id
    //   x         [hidden]: its embedding
    void add(const Segments& segments, int thread, int t, int64_t token, float* x) {
        if (!any_) return;
        for (int s = 0; s < segments.count; s++) {
            const Adapter& adapter = *segments.adapters[s];
            if (t < segments.begin[s] || t >= segments.end[s] || !has(adapter)) continue;
            Scratch& own = scratch_[thread];
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

    bool has(const Adapter& adapter) const { return module_ >= 0 && adapter.has(module_) && adapter.in_layer(0); }

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
    const int module_, hidden_;
    bool any_ = false;
    std::vector<Scratch> scratch_;
};

// Adds adapters' terms to logits.
template <class T>
class HeadLora {
    using X = Act<T>;

   public:
    HeadLora(const ModelDesc& model, int threads)
        : arena_{(T*)model.arena, model.page_elems},
          module_(model.head_module),
          layer_(model.layers - 1),
          hidden_(model.hidden),
          scratch_(threads) {}

    // Find which rows of logits the step's adapters change: each run of tokens is a run of rows. Kept until the next step.
    void plan(const StepDesc& step) {
        entries_.clear();
        units_.clear();
        if (module_ < 0 || !step.model_segments.count) return;
        const int wanted = step.logits_wanted, all = wanted + step.states_wanted;
        const int64_t* tokens = step.logit_tokens;
        // kept tokens: those of prompt logits in their order, then the pooled ones in theirs
        const int middle = (int)(std::is_sorted_until(tokens + wanted, tokens + all) - tokens);
        int rank = 0;
        size_t elems = 0;
        for (int s = 0; s < step.model_segments.count; s++) {
            const Adapter& adapter = *step.model_segments.adapters[s];
            if (!adapter.has(module_) || !adapter.in_layer(layer_)) continue;
            for (const auto& [begin, end] : {std::pair{0, wanted}, std::pair{wanted, middle}, std::pair{middle, all}}) {
                const int64_t *from = tokens + begin, *to = tokens + end;
                const int first = (int)(std::lower_bound(from, to, step.model_segments.begin[s]) - tokens);
                const int last = (int)(std::lower_bound(from, to, step.model_segments.end[s]) - tokens);
                if (first == last) continue;
                const long ldh = (adapter.rank + 2) & ~1;
                entries_.push_back({&adapter, first, last, elems, ldh});
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
        if (entries_.empty()) return;
        grow(h_, elems);
        for (auto& s : scratch_) s.reserve(rank, hidden_);
    }

    int units() const { return (int)units_.size(); }

    // A unit of x · Aᵀ; all before the first `add`.
    //
    //   thread  that computes
    //   i       the unit
    //   x       [rows, hidden]: what the logits are of
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
    //   y                [rows, columns]
    void add(int thread, int row, int rows, int column, int columns, Rows<float> y) {
        for (int e = 0; e < (int)entries_.size(); e++) {
            const Entry& entry = entries_[e];
            const int begin = std::max(row, entry.first), end = std::min(row + rows, entry.last);
            if (begin >= end) continue;
            const LoraUnit unit{e, 0, column, columns, begin, end - begin};
            expand<T>(arena_, b_rows(*entry.adapter, layer_, module_, unit), unit, h_of(entry), y.from(-row, -column),
                      scratch_[thread], {});
        }
    }

   private:
    // Rows `first` … last-1 of logits that an adapter changes, and where their h is.
    struct Entry {
        const Adapter* adapter;
        int first, last;
        size_t at;
        long ldh;
    };

    Rows<X> h_of(const Entry& entry) { return Rows<X>{h_.data() + entry.at, entry.ldh}.from(-entry.first); }

    const Arena<T> arena_;
    const int module_, layer_, hidden_;
    std::vector<Entry> entries_;
    std::vector<LoraUnit> units_;
    std::vector<LoraScratch<T>> scratch_;
    Buffer<X> h_;
};

}  // namespace chorus
