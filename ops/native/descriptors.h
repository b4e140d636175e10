// Descriptors that ops/native.py hands over: a model once, a step every time.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>
#include "panels.h"
#include "sgmv.h"

namespace chorus {

// The descriptors mirror the ctypes structures of ops/native_library.py, field by field.
struct LayerDesc {
    const float *input_norm, *post_attention_norm;
    const void *qkv, *o, *gate_up, *down;   // packed panels
    const float *qkv_bias, *q_norm, *k_norm;  // null where the architecture has none, like all biases
    const float *o_bias, *gate_up_bias, *down_bias;
};

struct ModelDesc {
    int32_t hidden, ffn, layers, heads, kv_heads, head_dim, vocab, block_tokens;
    float eps;
    int32_t reserved;
    const LayerDesc* layer;
    const void *embed, *lm_head;  // [vocab, hidden] as it is; packed panels
    const float *norm, *cos, *sin;  // cos, sin: [positions, head_dim]
    void* arena;
    int64_t page_elems;
};

class Ranks;
struct Handover;

// Segments of a step with products that other processes compute until its layers are in their pages: see lend.h.
struct LentDesc {
    Ranks* ranks;
    int64_t count;
    const int32_t* segment;                          // [count]: of the step, in order
    const int32_t* row;                              // [count + 1]: where their rows begin in what is handed over
    const int32_t* share;  // [ranks]: where each assistant's rows begin, and where the last's end
    int64_t* const* first_elem;  // [count]: that of the segment's adapter, which has no other user
    const std::atomic<int32_t>* const* image_ready;  // [count]: layers that are in host memory
    int32_t* layers;  // [count]: set: how many were lent
    Handover* handovers;
};

// What an assistant knows of a step's segments. first, last: its rows.
struct AssistDesc {
    int32_t hidden, ffn, q, kv, first, last;
    int64_t count, page_elems;
    const int32_t* row;  // [count + 1]
    const Adapter* const* adapters;  // [count]: their pages are the image's
    void* const* images;  // [count]
    const Handover* handovers;
};

struct StepDesc {
    int32_t tokens, rows, segments, logits_wanted;
    const int64_t *token_ids, *positions, *page, *offset;  // [tokens]
    const int32_t *qo_indptr, *kv_lens;  // [rows + 1], [rows]
    const int64_t* page_table;  // [rows, table_stride]
    int64_t table_stride;
    const int64_t* logit_tokens;  // [logits_wanted + scores_wanted]
    const int32_t *segment_begin, *segment_end;  // [segments]
    const Adapter* const* segment_adapters;  // [segments]
    float* logits;  // rows of vocab; null when only the best are wanted
    const int32_t* logit_rows;  // [logits_wanted]: the row of `logits` of each, below 0: not kept; null: in order
    // Layers loaded so far of the segment's adapter (below 0: the rest never will be); null for a segment with a loaded
    // adapter; null as a whole when all are loaded. late: set for the segments with adapters waited for in vain.
    const std::atomic<int32_t>* const* segment_ready;
    int32_t* segment_late;
    int64_t max_stall_ns;  // of the step
    int64_t* best;  // [logits_wanted]: the likeliest token, or a drawn one; -1 when a logit is not finite
    int64_t scores_wanted;  // tokens with logits that are asked for in slices once the step is done
    const int32_t* segment_level;  // [segments]: see Segments; null where all are 0
    const LayerDesc*
        layer;  // [layers] in place of the model's own: with an adapter in some of their projections; or null
    const Draw* draws;  // [logits_wanted]: where the inverse temperature is not 0, `best` is that draw; null: nowhere
    const LentDesc* lent;  // null: nothing is
};

// One matrix of a layer, the projections of a group, with adapters in it; all parts change something in it.
struct MergeDesc {
    const void* from;  // packed panels
    void* to;
    int32_t group, layer, columns, inputs;  // `from` is [columns, inputs]
    const Adapter* const* parts;
    int64_t count;
};

// Groups of modules with outputs side by side: 0 query, key and value, 1 output, 2 gate and up, 3 down. Inputs and outputs of
// each, and its modules with their columns.
struct Groups {
    int inputs[4], outputs[4];
    std::vector<Target> targets[4];

    explicit Groups(const ModelDesc& m) : Groups(m.hidden, m.ffn, m.heads * m.head_dim, m.kv_heads * m.head_dim) {}
    Groups(int hidden, int ffn, int q, int kv)
        : inputs{hidden, q, hidden, ffn},
          outputs{q + 2 * kv, hidden, 2 * ffn, hidden},
          targets{{{0, 0, q}, {1, q, kv}, {2, q + kv, kv}},
                  {{3, 0, hidden}},
                  {{4, 0, ffn}, {5, ffn, ffn}},
                  {{6, 0, hidden}}} {}

    bool changed(int g, const Adapter& adapter) const {
        return std::any_of(targets[g].begin(), targets[g].end(),
                           [&](const Target& t) { return adapter.b_offset[t.module] >= 0; });
    }
};

}  // namespace chorus
