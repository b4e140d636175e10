// LoRA products that other threads compute, of prompts with an adapter that is still being copied into its pages
// (CPU-assisted prefill, CaraServe §4).
//
// The rows of x are handed over by `Ranks`: rank 0 computes the base model, on a GPU or on its own threads, the others are
// offload workers. An exchange takes two meetings. Rank 0's part of the first is rows of x, and it goes on with the base
// product without waiting; the offload workers' parts of the second are x·A·B of a share of the rows each. They read A and B
// from the adapter's image in host memory. What is to be computed stands in a `Exchange` of its own, as a GPU's host writes
// that long before the GPU, as rank 0, writes the rows.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#include "team/buffer.h"
#include "program/descriptors.h"
#include "elementwise/elementwise.h"
#include "ranks/ranks.h"

namespace chorus {

constexpr int kMaxOffloaded = 1000;  // most segments that are handed over at once

constexpr int kMaxExchanges =
    1 << 12;  // of a step, four a layer; the next one of a step is written when this one was read

// What a layer's product needs beside the rows of x.
struct alignas(64) Exchange {
    int32_t layer;
    int32_t shape;
    uint8_t active[kMaxOffloaded];  // of each offloaded segment: whether its rows are there
};

// That of the exchange which is under way, of either meeting.
template <class H>
inline H& exchange_of(const Ranks& ranks, H* exchanges) {
    return exchanges[ranks.sums() / 2 % kMaxExchanges];
}

// Rank 0's side, within a step. One thread at a time; `add` on any.
template <class T>
class Offloader {
    using X = Act<T>;

   public:
    explicit Offloader(const ModelDesc& model) : shapes_(model) {}

    // Offload a layer of the segments with pages that lack it, if the image has it; a layer that is offloaded has no rows in the
    // segment's own descriptor. Called before the layer.
    void begin_layer(const StepDesc& step, int layer) {
        const OffloadDesc& offloaded = *step.offloaded;
        std::fill(active_, active_ + offloaded.count, 0);
        for (int i = 0; i < offloaded.count; i++) {
            const int s = offloaded.segment[i];
            const auto* pages = step.segment_ready[s];
            if (step.segment_late[s] || pages->load(std::memory_order_acquire) > layer) continue;
            if (offloaded.first_elem[i][layer] < 0 ||
                offloaded.image_ready[i]->load(std::memory_order_acquire) <= layer)
                continue;
            offloaded.first_elem[i][layer] = -1;
            active_[i] = 1;
            offloaded.layers[i]++;
        }
    }
    // Hand rows of a task's x over, if a segment's adapter changes the product.
    void offload(const LoraTask<T>& task) {
        const OffloadDesc& offloaded = *task.step.offloaded;
        const Segments& segments = task.step.segments;
        offloaded_ = false;
        auto& head = exchange_of(*offloaded.ranks, offloaded.exchanges);
        const Rows<X> mine{(X*)offloaded.ranks->mine(), task.x.stride};
        for (int i = 0; i < offloaded.count; i++) {
            const int s = offloaded.segment[i];
            head.active[i] = active_[i] && shapes_.changed(task.shape, *segments.adapters[s]);
            if (!head.active[i]) continue;
            offloaded_ = true;
            memcpy(mine[offloaded.row[i]], task.x[segments.begin[s]],
                   (offloaded.row[i + 1] - offloaded.row[i]) * mine.stride * sizeof(X));
        }
        if (!offloaded_) return;
        head.layer = task.layer;
        head.shape = task.shape;
        offloaded.ranks->post();
    }

    // Wait for what was handed over.
    void collect(const StepDesc& step) {
        if (offloaded_) step.offloaded->ranks->meet();
    }

    // Add what was computed to the token's row of a task's y.
    void add(const LoraTask<T>& task, int token) const {
        if (!offloaded_) return;
        const OffloadDesc& offloaded = *task.step.offloaded;
        const Segments& segments = task.step.segments;
        float* y = task.y[token];
        for (int i = 0; i < offloaded.count; i++) {
            const int s = offloaded.segment[i];
            const Adapter& adapter = *segments.adapters[s];
            if (!active_[i] || token < segments.begin[s] || token >= segments.end[s]) continue;
            const int row = offloaded.row[i] + token - segments.begin[s];
            const int32_t* end = std::upper_bound(offloaded.share, offloaded.share + offloaded.ranks->size(), row);
            const int rank = (int)(end - offloaded.share);
            const float* part =
                offloaded.ranks->part(rank) + (row - end[-1]) * spread<float>(shapes_.outputs(task.shape));
            for (const Target& t : shapes_.targets(task.shape))
                if (adapter.has(t.module))
                    for (int c = t.column; c < t.column + t.width; c++) y[c] += part[c];
        }
    }

   private:
    const GemmShapes shapes_;
    uint8_t active_[kMaxOffloaded] = {};
    bool offloaded_ = false;  // the product that is under way
};

// Hand rows over as the first product's input of layer 0, of one segment, to measure what that takes.
//
//   ranks      rank 0's
//   exchanges  [kMaxExchanges]
//   x          [rows, k] float32
template <class T>
void post_exchange(Ranks& ranks, Exchange* exchanges, const float* x, int64_t rows, int k) {
    auto& head = exchange_of(ranks, exchanges);
    head.layer = 0;
    head.shape = 0;
    head.active[0] = 1;
    for (int64_t r = 0; r < rows; r++) convert(x + r * k, k, (Act<T>*)ranks.mine() + r * spread<Act<T>>(k));
    ranks.post();
}

// An offload worker's share of exchanges, on one thread.
template <class T>
class OffloadShare {
    using X = Act<T>;

   public:
    // Compute a share of every exchange of a step, until rank 0 ends it.
    //
    //   ranks  with the worker's number
    //   desc   of the step
    void serve(Ranks& ranks, const OffloadWorkersDesc& desc) {
        const GemmShapes shapes(desc.gemm_shapes, desc.num_gemm_shapes);
        while (ranks.meet() == Ranks::kWell) {
            const Exchange& head = exchange_of(ranks, desc.exchanges);
            compute(shapes, desc, ranks.rank(), head, (const X*)ranks.part(0), ranks.mine());
            if (ranks.meet() != Ranks::kWell) return;
        }
    }

   private:
    // This offload worker's share of an exchange.
    //
    //   shapes  of the model
    //   desc    of the step
    //   rank    of this offload worker
    //   head    what is to be computed
    //   all_x   the rows that were handed over
    //   all_y   the LoRA terms of this offload worker's rows: written
    void compute(const GemmShapes& shapes, const OffloadWorkersDesc& desc, int rank, const Exchange& head,
                 const X* all_x, float* all_y) {
        const int first = desc.share[rank - 1], last = desc.share[rank];
        const int inputs = shapes.inputs(head.shape);
        const Rows<const X> every_x{all_x, spread<X>(inputs)};
        const Rows<float> every_y{all_y, spread<float>(shapes.outputs(head.shape))};
        const auto& targets = shapes.targets(head.shape);
        for (int i = 0; i < desc.count; i++) {
            const Adapter& adapter = *desc.adapters[i];
            const int begin = std::max(first, desc.row[i]), end = std::min(last, desc.row[i + 1]);
            if (!head.active[i] || begin >= end) continue;
            const Arena<T> image{(T*)desc.images[i], desc.page_elems};
            const int32_t own_begin = 0, own_end = end - begin;
            const Adapter* adapters[1] = {&adapter};
            const Segments one{1, &own_begin, &own_end, adapters, nullptr, 0, 0};
            const Rows<const X> x = every_x.from(begin);
            const Rows<float> y = every_y.from(begin - first);
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

struct AnyOffloadWorkers {
    virtual ~AnyOffloadWorkers() = default;
    virtual void begin(const OffloadWorkersDesc& desc) = 0;
    virtual void end() = 0;
};

// All offload workers: threads that sleep between steps. One thread at a time calls it.
template <class T>
class OffloadWorkers final : public AnyOffloadWorkers {
   public:
    // ranks  rank 0's, which outlive the workers
    // cpus   [ranks - 1]: the processor of each; below 0: any
    OffloadWorkers(Ranks& ranks, const int32_t* cpus) : ranks_(ranks) {
        for (int i = 1; i < ranks.size(); i++) threads_.emplace_back([this, i, cpu = cpus[i - 1]] { work(i, cpu); });
    }
    ~OffloadWorkers() override {
        start(nullptr);
        for (auto& thread : threads_) thread.join();
    }
    // Begin a step, whose exchanges may follow; `desc` and all it points to stay until `end`.
    void begin(const OffloadWorkersDesc& desc) override {
        ranks_.begin(++step_);
        start(&desc);
    }
    // End the step, once its exchanges are done: all workers have left it when this returns.
    void end() override {
        ranks_.fail(step_);
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !working_; });
    }

   private:
    void start(const OffloadWorkersDesc* desc) {
        {
            std::lock_guard lock(mutex_);
            desc_ = desc;
            working_ = (int)threads_.size();
            round_++;
        }
        changed_.notify_all();
    }
    void work(int number, int cpu) {
        pthread_setname_np(pthread_self(), "chorus-offload");
        if (cpu >= 0) {
            cpu_set_t own;
            CPU_ZERO(&own);
            CPU_SET(cpu, &own);
            pthread_setaffinity_np(pthread_self(), sizeof(own), &own);
        }
        Ranks ranks(ranks_, number);
        OffloadShare<T> share;
        for (int64_t round = 1;; round++) {
            const OffloadWorkersDesc* desc;
            {
                std::unique_lock lock(mutex_);
                changed_.wait(lock, [&] { return round_ == round; });
                desc = desc_;
            }
            if (!desc) return;
            ranks.begin(round);
            share.serve(ranks, *desc);
            std::lock_guard lock(mutex_);
            if (!--working_) changed_.notify_all();
        }
    }

    Ranks& ranks_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable changed_;
    const OffloadWorkersDesc* desc_ = nullptr;
    int64_t round_ = 0, step_ = 0;
    int working_ = 0;  // threads that have not left the step
};

}  // namespace chorus
