// LoRA products that other processes of the machine compute, of prompts with an adapter that is still being copied into its pages
// (CPU-assisted prefill, CaraServe §4).
//
// The rows of x are handed over in memory that the processes share, by `Ranks`: rank 0 is the process of the base model, the
// others are assistants. A hand-over takes two meetings. Rank 0's part of the first is rows of x, and it goes on with the
// base product without waiting; the assistants' parts of the second are x·A·B of a share of the rows each. They read A and
// B from the adapter's image in host memory. What is to be computed stands in a `Handover` of its own, as a GPU's host
// writes that long before the GPU, as rank 0, writes the rows.
#pragma once
#include <algorithm>
#include <vector>
#include "buffer.h"
#include "descriptors.h"
#include "elementwise.h"
#include "ranks.h"

namespace chorus {

constexpr int kLent = 1000;  // most segments that are handed over at once

constexpr int kHandovers =
    1 << 12;  // of a step, four a layer; the next one of a step is written when this one was read

// What a layer's group of projections needs beside the rows of x.
struct alignas(64) Handover {
    int32_t layer;
    Group group;
    uint8_t active[kLent];  // of each lent segment: whether its rows are there
};

// That of the hand-over which is under way, of either meeting.
template <class H>
inline H& handover_of(const Ranks& ranks, H* handovers) {
    return handovers[ranks.sums() / 2 % kHandovers];
}

// Rank 0's side, within a step. One thread at a time; `add` on any.
template <class T>
class Lender {
    using X = Act<T>;

   public:
    explicit Lender(const ModelDesc& model) : groups_(model) {}

    // Lend a layer of the segments with pages that lack it, if the image has it; a layer that is lent has no rows in the
    // segment's own descriptor. Called before the layer.
    void begin_layer(const StepDesc& step, int layer) {
        const LentDesc& lent = *step.lent;
        std::fill(active_, active_ + lent.count, 0);
        if (lent.ranks->state() != Ranks::kWell) return;
        for (int i = 0; i < lent.count; i++) {
            const int s = lent.segment[i];
            const auto* pages = step.segment_ready[s];
            if (step.segment_late[s] || pages->load(std::memory_order_acquire) > layer) continue;
            if (lent.first_elem[i][layer] < 0 || lent.image_ready[i]->load(std::memory_order_acquire) <= layer)
                continue;
            lent.first_elem[i][layer] = -1;
            active_[i] = 1;
            lent.layers[i]++;
        }
    }
    // True if a segment needs no page of the layer.
    bool has(const StepDesc& step, int segment) const {
        for (int i = 0; i < step.lent->count; i++)
            if (step.lent->segment[i] == segment) return active_[i];
        return false;
    }

    // Hand rows of a task's x over, if a segment's adapter changes the group.
    void lend(const LoraTask<T>& task) {
        const LentDesc& lent = *task.step.lent;
        const Segments& segments = task.step.segments;
        lent_ = false;
        auto& head = handover_of(*lent.ranks, lent.handovers);
        const Rows<X> mine{(X*)lent.ranks->mine(), task.x.stride};
        for (int i = 0; i < lent.count; i++) {
            const int s = lent.segment[i];
            head.active[i] = active_[i] && groups_.changed(task.group, *segments.adapters[s]);
            if (!head.active[i]) continue;
            lent_ = true;
            memcpy(mine[lent.row[i]], task.x[segments.begin[s]],
                   (lent.row[i + 1] - lent.row[i]) * mine.stride * sizeof(X));
        }
        if (!lent_) return;
        head.layer = task.layer;
        head.group = task.group;
        lent.ranks->post();
    }

    // Wait for what was handed over. If an assistant has ended, the rows are void.
    void collect(const StepDesc& step) {
        if (!lent_ || step.lent->ranks->meet() == Ranks::kWell) return;
        lent_ = false;
        for (int i = 0; i < step.lent->count; i++)
            if (active_[i]) step.segment_late[step.lent->segment[i]] = 1;
        std::fill(active_, active_ + step.lent->count, 0);
    }

    // Add what was computed to the token's row of a task's y.
    void add(const LoraTask<T>& task, int token) const {
        if (!lent_) return;
        const LentDesc& lent = *task.step.lent;
        const Segments& segments = task.step.segments;
        float* y = task.y[token];
        for (int i = 0; i < lent.count; i++) {
            const int s = lent.segment[i];
            const Adapter& adapter = *segments.adapters[s];
            if (!active_[i] || token < segments.begin[s] || token >= segments.end[s]) continue;
            const int row = lent.row[i] + token - segments.begin[s];
            const int32_t* end = std::upper_bound(lent.share, lent.share + lent.ranks->size(), row);
            const int rank = (int)(end - lent.share);
            const float* part = lent.ranks->part(rank) + (row - end[-1]) * spread<float>(groups_.outputs[task.group]);
            for (const Target& t : groups_.targets[task.group])
                if (adapter.has(t.module))
                    for (int c = t.column; c < t.column + t.width; c++) y[c] += part[c];
        }
    }

   private:
    const Groups groups_;
    uint8_t active_[kLent] = {};
    bool lent_ = false;  // the group that is under way
};

// Hand rows over as the first group's input of layer 0, of one segment, to measure what that takes.
//
//   ranks      rank 0's
//   handovers  [kHandovers]
//   x          [rows, k] float32
template <class T>
void hand_over(Ranks& ranks, Handover* handovers, const float* x, int64_t rows, int k) {
    auto& head = handover_of(ranks, handovers);
    head.layer = 0;
    head.group = kQkv;
    head.active[0] = 1;
    for (int64_t r = 0; r < rows; r++) convert(x + r * k, k, (Act<T>*)ranks.mine() + r * spread<Act<T>>(k));
    ranks.post();
}

struct AnyAssistant {
    virtual ~AnyAssistant() = default;
    virtual void serve(Ranks& ranks, const AssistDesc& desc) = 0;
};

// An assistant's side, on one thread.
template <class T>
class Assistant final : public AnyAssistant {
    using X = Act<T>;

   public:
    // Compute a share of every hand-over of a step, until rank 0 ends it.
    void serve(Ranks& ranks, const AssistDesc& desc) override {
        const Groups groups(desc.hidden, desc.ffn, desc.q, desc.kv);
        while (ranks.meet() == Ranks::kWell) {
            const Handover& head = handover_of(ranks, desc.handovers);
            compute(groups, desc, head, (const X*)ranks.part(0), ranks.mine());
            if (ranks.meet() != Ranks::kWell) return;
        }
    }

   private:
    // This assistant's share of a hand-over.
    //
    //   groups  of the model
    //   desc    of the step
    //   head    what is to be computed
    //   all_x   the rows that were handed over
    //   all_y   the products of this assistant's rows: written
    void compute(const Groups& groups, const AssistDesc& desc, const Handover& head, const X* all_x, float* all_y) {
        const int inputs = groups.inputs[head.group];
        const Rows<const X> every_x{all_x, spread<X>(inputs)};
        const Rows<float> every_y{all_y, spread<float>(groups.outputs[head.group])};
        const auto& targets = groups.targets[head.group];
        for (int i = 0; i < desc.count; i++) {
            const Adapter& adapter = *desc.adapters[i];
            const int begin = std::max(desc.first, desc.row[i]), end = std::min(desc.last, desc.row[i + 1]);
            if (!head.active[i] || begin >= end) continue;
            const Arena<T> image{(T*)desc.images[i], desc.page_elems};
            const int32_t own_begin = 0, own_end = end - begin;
            const Adapter* adapters[1] = {&adapter};
            const Segments one{1, &own_begin, &own_end, adapters, nullptr};
            const Rows<const X> x = every_x.from(begin);
            const Rows<float> y = every_y.from(begin - desc.first);
            const long ldh = (adapter.rank + 2) & ~1;
            grow(h_, targets.size() * own_end * ldh);
            scratch_.reserve(adapter.rank, inputs);
            auto module = [&](const LoraUnit& u) { return targets[u.module].module; };
            auto h = [&](const LoraUnit& u) { return Rows<X>{h_.data() + u.module * own_end * ldh, ldh}; };
            units_.clear();
            shrink_units(one, targets, 0, own_end, units_);
            for (const LoraUnit& u : units_)
                shrink<T>(image, a_rows(adapter, head.layer, module(u), u, inputs), u, x, h(u), scratch_, {});
            for (const Target& t : targets)
                for (int r = 0; r < own_end; r++) std::fill_n(y[r] + t.column, t.width, 0.0f);
            expand_units(one, 0, targets, 1, units_);
            for (const LoraUnit& u : units_)
                expand<T>(image, b_rows(adapter, head.layer, module(u), u), u, h(u),
                          y.from(0, targets[u.module].column), scratch_, {});
        }
    }

    Buffer<X> h_;
    LoraScratch<T> scratch_;
    std::vector<LoraUnit> units_;
};

}  // namespace chorus
