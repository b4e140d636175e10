// Descriptors that ops/library/native_model.py hands over: a model once, a step every time.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>
#include "elementwise/elementwise.h"
#include "mixers/gated_delta.h"
#include "sampling/panels.h"
#include "gemm/gemm_units.h"
#include "program/program.h"
#include "lora/sgmv.h"

namespace chorus {

constexpr int kMaxTargets = 6;  // most projections of a group

// A group of projections with a common input, and outputs side by side. Layers whose groups are the same share it.
struct GemmShapeDesc {
    int32_t inputs, count;
    int32_t row_parallel;  // 1: each TP rank has a share of the inputs, rather than of the outputs
    Target targets[kMaxTargets];  // [count]
};

struct ModelDesc {
    int32_t hidden, layers, vocab, block_tokens, page_groups, num_gemm_shapes;
    float eps;
    NormKind norm_kind;  // of the norms after the embedding and before the output head
    float embedding_multiplier, logits_scale;
    const float* head_bias;  // [vocab]; null: the output projection has none
    const float* position_table;  // [positions, hidden]: added to embeddings; null: nothing is
    const float* embedding_norm;  // as `norm`: embeddings are normalised with these weights; null: they are not
    float logits_softcap;  // logits x become logits_softcap · tanh(x / logits_softcap); 0: they stay
    const OpDesc* ops;  // of all layers
    const RegisterDesc* registers;
    int64_t num_ops, num_registers;
    const GemmShapeDesc* gemm_shapes;
    const void *embed, *lm_head;  // [vocab, hidden] as it is; packed panels
    Integers lm_head_integers;
    const float* norm;  // [hidden], or [2, hidden] with a bias
    void* arena;
    int64_t page_elems, page_bytes;
    int32_t float8_kv;  // 1: K and V are in FP8
    DeltaShape delta;  // without heads where no layer has a recurrent mixer
    int32_t convs_per_page, heads_per_page, conv_pages;  // of a state: see paged_states.h
    int32_t most_drafts, drafts_per_page, draft_page;  // rows of drafts' inputs next to a state, and their first page
    int32_t embed_module, head_module;  // of the embeddings and the output projection; -1: adapters have none
    int32_t embed_rows_module, head_rows_module;  // likewise, of whole rows of them
    int32_t first_token;  // of the logits that this rank computes
};

class Ranks;
struct Exchange;
struct MixtureLoraDesc;

// Segments of a step with LoRA terms that offload workers compute until its layers are in their pages: see offload.h.
struct OffloadDesc {
    Ranks* ranks;
    int64_t count;
    const int32_t* segment;  // [count]: of the step, in order
    const int32_t* row;  // [count + 1]: where their rows begin in what is handed over
    const int32_t* share;  // [ranks]: where each offload worker's rows begin, and where the last's end
    int64_t* const* first_elem;  // [count]: that of the segment's adapter, which has no other user
    const std::atomic<int32_t>* const* image_ready;  // [count]: layers that are in host memory
    int32_t* layers;  // [count]: set: how many were offloaded
    Exchange* exchanges;
};

// What offload workers know of a step's segments.
struct OffloadWorkersDesc {
    int64_t num_gemm_shapes, count, page_elems;
    const GemmShapeDesc* gemm_shapes;  // of the model
    const int32_t *row, *share;  // [count + 1], [ranks]: as in `OffloadDesc`
    const Adapter* const* adapters;  // [count]: their pages are the image's
    void* const* images;  // [count]
    const Exchange* exchanges;
};

struct StepDesc {
    int32_t tokens, rows, logits_wanted,
        states_wanted;  // the last: tokens whose hidden states are kept for afterwards
    int32_t logits_width;  // the vocabulary, and the most tokens beyond it that an adapter of the step has rows of
    const int64_t *token_ids, *positions, *offset;  // [tokens]
    const int64_t* page;  // [page groups, page_stride]: page and offset are where a token's K and V go
    const int32_t *qo_indptr, *kv_lens;  // [rows + 1], [rows]: where a row's tokens begin; tokens of it with K and V
    const int64_t* page_table;  // [rows, table_stride]: pages of each row, a page of each group for every block
    int64_t table_stride, page_stride;
    const int64_t* logit_tokens;  // [logits_wanted + states_wanted]
    Segments segments;
    // Layers loaded so far of the segment's adapter (below 0: the rest never will be); null for a segment with a loaded
    // adapter; null as a whole when all are loaded. late: set for the segments with adapters waited for in vain.
    const std::atomic<int32_t>* const* segment_ready;
    int32_t* segment_late;
    int64_t max_stall_ns;  // of the step
    float* logits;  // rows of logits_width; null when only the best are wanted
    const int32_t* logit_rows;  // [logits_wanted]: the row of `logits` of each, below 0: not kept; null: in order
    int64_t* best;  // [logits_wanted]: the argmax, or a sampled one; -1 when a logit is not finite
    const SampleRow*
        samples;  // [logits_wanted]: where the inverse temperature is not 0, `best` is that draw; null: nowhere
    const OpDesc* ops;  // the model's, with an adapter in some of their weights; null: the model's own
    const OffloadDesc* offloaded;  // null: nothing is
    const int64_t *state_read,
        *state_written;  // [rows, state_stride]: pages of each row's state before and after the step
    const uint8_t* state_fresh;  // [rows]: 1: the row begins with a state of zeros
    const int32_t* state_accepted;  // [rows + 1]: drafts of the step before that rows before row i have accepted
    const int32_t* state_drafts;  // [rows]: the last tokens of each, which its state must not see yet
    int64_t state_stride;
    // Adapters of the model's own modules, with what the fields above say of segments.
    Segments model_segments;
    const std::atomic<int32_t>* const* model_ready;
    int32_t* model_late;
    // Adapters of mixtures of experts, likewise; null: none.
    const MixtureLoraDesc* mixture;
    const std::atomic<int32_t>* const* mixture_ready;
    int32_t* mixture_late;
    // Rows of images in the place of tokens' embeddings; media null: the step has none.
    const int32_t* media;  // [tokens]: the row of each; below 0: the token's own embedding
    const float* media_rows;  // [rows of images, media_stride]: in an embedding's place, then what AddMediaOp adds
    int64_t media_stride;
    const int32_t *block_before, *block_behind;  // [tokens]: see BlockSight; null: the step has no blocks
};

// One matrix of a layer, the projections of a group, with adapters in it; all parts change something in it.
struct MergeDesc {
    const void* origin;  // the group's weights, in packed panels
    Integers integers;  // how they are whole numbers
    void* to;  // the same with the adapters: written
    int32_t shape;
    int32_t layer;
    const Adapter* const* parts;  // [count]
    int64_t count;
};

// The sizes of a model's GEMMs.
class GemmShapes {
   public:
    GemmShapes(const GemmShapeDesc* shapes, int count) : items_(count) {
        for (int p = 0; p < count; p++) {
            Item& item = items_[p];
            item.row_parallel = shapes[p].row_parallel;
            item.inputs = shapes[p].inputs;
            item.targets.assign(shapes[p].targets, shapes[p].targets + shapes[p].count);
            item.outputs = 0;
            for (const Target& t : item.targets) item.outputs += t.width;
        }
    }
    explicit GemmShapes(const ModelDesc& m) : GemmShapes(m.gemm_shapes, m.num_gemm_shapes) {}

    int count() const { return (int)items_.size(); }
    bool row_parallel(int p) const { return items_[p].row_parallel; }
    int inputs(int p) const { return items_[p].inputs; }
    int outputs(int p) const { return items_[p].outputs; }
    const std::vector<Target>& targets(int p) const { return items_[p].targets; }

    // The largest value(p) of sizes p.
    template <class Value>
    int most(Value value) const {
        int found = 0;
        for (int p = 0; p < count(); p++) found = std::max(found, (int)value(p));
        return found;
    }
    bool changed(int p, const Adapter& adapter) const {
        const auto& own = targets(p);
        return std::any_of(own.begin(), own.end(), [&](const Target& t) { return adapter.has(t.module); });
    }

   private:
    struct Item {
        bool row_parallel;
        int inputs, outputs;
        std::vector<Target> targets;
    };
    std::vector<Item> items_;
};

// One group's GEMM of a layer in a step, with what adapters add: y (+)= x · wᵀ + bias + Σ scale · x · Aᵀ · Bᵀ, of each
// segment's adapter on the segment's rows.
//
//   shape       number of its sizes
//   layer       number of the layer
//   gemm        number of the GEMM among those of all layers, in their order
//   w           its weights in the layer
//   x           [tokens, inputs]
//   y           [tokens, outputs]
//   accumulate  true: y is added to
template <class T>
struct LoraTask {
    const StepDesc& step;
    int shape;
    int layer;
    int gemm;
    Weights<T> w;
    Rows<const Act<T>> x;
    Rows<float> y;
    bool accumulate;

    const Adapter& adapter(const LoraUnit& unit) const { return *step.segments.adapters[unit.segment]; }
    // True if the unit's adapter changes the layer.
    bool has(const LoraUnit& unit) const { return adapter(unit).in_layer(layer); }
};

}  // namespace chorus
