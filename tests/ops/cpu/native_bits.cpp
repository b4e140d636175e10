// Prints the bits of a small random model's logits and its samples, step by step: the same program at every level, for machines
// that have a compiler or an emulator of the level and nothing else.
#include "library.h"
#include <cstdio>

using namespace chorus;

namespace {

constexpr int kHidden = 72, kLayers = 3, kHeads = 6, kKvHeads = 2, kHeadDim = 20, kVocab = 203, kBlock = 16;
enum Group { kQkv, kO, kGateUp, kDown, kQueryUp, kGroups };  // a layer's GEMMs; of queries from their latents
constexpr Group kDense[] = {kQkv, kO, kGateUp, kDown};
constexpr int kQ = kHeads * kHeadDim, kKv = kKvHeads * kHeadDim, kPages = 200, kTable = 12, kRank = 5;
// Of latents: of queries and of keys and values, elements of a key and of a value.
constexpr int kQueryRank = 26, kKvRank = 28, kRotated = 12, kKey = 20, kValue = 14,
              kQueries = kHeads * (kKey + kRotated), kMade = kHeads * (kKey + kValue), kDenseModules = 7,
              kAllModules = 9;

uint64_t state = 1;
float random_number() {  // from -0.5 to 0.5
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (state >> 40) / 16777216.0f - 0.5f;
}
template <class T> T as(float x) {
    if constexpr (sizeof(T) == 4) return x;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (T)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
template <class T> std::vector<T> numbers(size_t count, float scale, float middle = 0) {
    std::vector<T> all(count);
    for (T& one : all) one = as<T>(middle + scale * random_number());
    return all;
}

uint64_t hash(const void* data, size_t bytes) {  // of words of 32 bits, by FNV-1a
    uint64_t bits = 1469598103934665603ull;
    for (size_t i = 0; i < bytes; i += 4) {
        uint32_t own;
        memcpy(&own, (const char*)data + i, 4);
        bits = (bits ^ own) * 1099511628211ull;
    }
    return bits;
}

// A mixture of experts with one that every row goes to, and a part of an adapter on its router, its shared expert and some
// of its experts.
//
//   weight  weight(n, k): a random matrix
//   vector  vector(n, scale, middle): random numbers
template <class Weight, class Vector> struct Experts {
    static constexpr int kCount = 9, kSize = 40, kShared = 24, kGemms = 8;

    Experts(Weight weight, Vector vector) {
        for (int e = 0; e < kCount; e++) {
            up[e] = weight(2 * kSize, kHidden), down[e] = weight(kHidden, kSize);
            up_bias[e] = vector(2 * kSize, 0.3f, 0), down_bias[e] = vector(kHidden, 0.3f, 0);
        }
        shared_up = weight(2 * kShared, kHidden), shared_down = weight(kHidden, kShared);
        desc.hidden = kHidden, desc.experts = kCount, desc.size = kSize, desc.shared_size = kShared;
        desc.routed = kHidden;
        desc.router = vector(kPanel * kHidden, 1, 0), desc.router_bias = vector(kCount, 0.3f, 0);
        desc.routing = {nullptr, nullptr, 3, kSoftmax, 1, 1, 1, 1, 0, 1.5f, 0};
        desc.activation = kSilu;
        desc.gate_up = {up, nullptr, up_bias}, desc.down = {down, nullptr, down_bias};
        desc.shared_gate_up = {&shared_up, nullptr, nullptr}, desc.shared_down = {&shared_down, nullptr, nullptr};
        desc.shared_gate = vector(kHidden, 1, 0);
        const int in[kGemms] = {kHidden, kHidden, kHidden, kHidden, kShared, kHidden, kHidden, kSize},
                  out[kGemms] = {kCount, 1, kShared, kShared, kHidden, kSize, kSize, kHidden};
        for (Adapter* part : {&of_layer, &of_experts}) {
            const bool experts = part == &of_experts;
            int32_t *a = offsets[experts], *b = a + kGemms;
            part->a_offset = a, part->b_offset = b, part->modules = kGemms;
            std::fill_n(a, 2 * kGemms, -1);
            for (int m = experts ? 5 : 0; m < (experts ? kGemms : 5); m++) {
                a[m] = (int)part->slab_elems, b[m] = (int)part->slab_elems + in[m];
                part->slab_elems += in[m] + out[m];
            }
            part->rank = experts ? 2 : 3, part->scale = 0.6f, part->first_elem = experts ? first : first + kLayers;
        }
        std::fill_n(first, 2 * kLayers, -1);
        first[1] = 11, first[kLayers + 1] = 1703;
        desc_of_targets();
    }

    void desc_of_targets() {
        targets[kRouter] = {1, {{0, 0, kCount}}}, targets[kSharedGate] = {1, {{1, 0, 1}}};
        targets[kSharedGateUp] = {2, {{2, 0, kShared}, {3, kShared, kShared}}};
        targets[kSharedDown] = {1, {{4, 0, kHidden}}};
        targets[kExpertGateUp] = {2, {{5, 0, kSize}, {6, kSize, kSize}}};
        targets[kExpertDown] = {1, {{7, 0, kHidden}}};
    }

    // Of the rows begin … end - 1.
    MixtureLoraDesc lora(void* arena, int64_t page_elems, const int64_t* pages, int begin, int end) {
        of_layer.pages = of_experts.pages = pages;
        origins[0] = origins[1] = begin, tos[0] = tos[1] = end;
        return {arena, page_elems, {2, origins, tos, parts, nullptr, 0, 0}, lists, counts, 0, nullptr};
    }

    const void *up[kCount], *down[kCount], *shared_up, *shared_down;
    const float *up_bias[kCount], *down_bias[kCount];
    MixtureDesc desc{};
    MixtureTargets targets[kMixtureGemms];
    Adapter of_layer{}, of_experts{};
    int64_t first[2 * kLayers];
    int32_t offsets[2][2 * kGemms];  // of A, then of B
    const int32_t own[4] = {0, 2, 3, 7}, counts[2] = {0, 4}, *const lists[2] = {nullptr, own};
    int32_t origins[2], tos[2];
    const Adapter* const parts[2] = {&of_layer, &of_experts};
};

// A layer: its ops are listed by `program`.
struct Layer {
    const void* weights[kGroups];
    const float* bias[kGroups];
    Integers integers[kGroups];
    int shape[kGroups] = {kQkv, kO, kGateUp, kDown, -1};
    const float *attention_norm, *attention_out_norm, *mlp_norm, *mlp_out_norm;  // null: it has none
    float residual_multiplier = 1;
    bool parallel = false;
    Activation activation = kSilu;
    AttendOp attend{};
    LatentDesc latent{};  // without heads: keys and values are no latents
    const float* query_norm = nullptr;  // of their latents
    const MixtureDesc* experts = nullptr;
    const MixtureTargets* targets = nullptr;
};

enum Register {
    kStream, kNormed, kIn, kRotatedQueries, kAttended, kPart, kGatesUp, kAct, kLatentIn, kQueryLatents, kLatentQueries,
    kLatentOut
};

// The ops of layers, and what they point to.
class Program {
   public:
    // l: the layer's number. kind: of its norms
    void add(const Layer& layer, int l, int ffn, NormKind kind) {
        if (l) op(OpKind::kArrive, ArriveOp{l});
        norm(layer.attention_norm, kStream, kNormed, kind);
        const bool latents = layer.latent.heads;
        op(OpKind::kGemm, gemm(layer, l, kQkv, kNormed, latents ? kLatentIn : kIn, false));
        if (latents) {
            op(OpKind::kKeep, KeepOp{kLatentIn, kQueryRank, layer.latent});
            op(OpKind::kNorm, NormOp{kLatentIn, 0, kQueryRank, kQueryLatents, NormKind::kRms, 1e-6f, layer.query_norm});
            op(OpKind::kGemm, gemm(layer, l, kQueryUp, kQueryLatents, kLatentQueries, false));
        }
        if (layer.parallel) feed_forward(layer, l, ffn, kind);
        AttendOp attend = layer.attend;
        attend.x = kIn, attend.q = kRotatedQueries, attend.out = kAttended;
        if (latents) op(OpKind::kLatentAttend, LatentAttendOp{kLatentQueries, 0, kLatentOut, l, layer.latent});
        else op(OpKind::kAttend, attend);
        part(layer, l, kO, latents ? kLatentOut : kAttended, layer.attention_out_norm, kind);
        if (layer.parallel) return;
        norm(layer.mlp_norm, kStream, kNormed, kind);
        feed_forward(layer, l, ffn, kind);
    }

    std::vector<OpDesc> ops;

   private:
    template <class Arguments> void op(OpKind kind, const Arguments& arguments) {
        auto* kept = new char[sizeof arguments];  // as long as the program runs
        memcpy(kept, &arguments, sizeof arguments);
        ops.push_back({kind, kept});
    }
    void norm(const float* weight, int x, int out, NormKind kind) {
        if (weight) op(OpKind::kNorm, NormOp{x, 0, kHidden, out, kind, 1e-5f, weight});
        else op(OpKind::kCopy, CopyOp{x, 0, kHidden, out, 0});
    }
    GemmOp gemm(const Layer& layer, int l, Group group, int x, int out, bool accumulate) {
        return {x, out, accumulate, layer.shape[group], l, number_++, layer.weights[group], layer.bias[group],
                layer.integers[group]};
    }
    void feed_forward(const Layer& layer, int l, int ffn, NormKind kind) {
        if (layer.experts) {
            op(OpKind::kRoute, RouteOp{kNormed});
            const MoeOp moe{kNormed, kPart, l, layer.experts, layer.targets};
            op(OpKind::kMoe, moe), op(OpKind::kCombine, moe);
            op(OpKind::kScale, ScaleOp{kPart, 0, kHidden, kPart, 0, 0.9f, nullptr});
            return add_part(layer, layer.mlp_out_norm, kind);
        }
        op(OpKind::kGateUp,
           GateUpOp{gemm(layer, l, kGateUp, kNormed, kGatesUp, false), kAct, ffn, layer.activation, 1, nullptr});
        part(layer, l, kDown, kAct, layer.mlp_out_norm, kind);
    }
    // A GEMM that is added to the residual stream.
    void part(const Layer& layer, int l, Group group, int x, const float* out_norm, NormKind kind) {
        const bool direct = !out_norm && layer.residual_multiplier == 1;
        op(OpKind::kGemm, gemm(layer, l, group, x, direct ? kStream : kPart, direct));
        if (!direct) add_part(layer, out_norm, kind);
    }
    void add_part(const Layer& layer, const float* out_norm, NormKind kind) {
        if (out_norm) norm(out_norm, kPart, kPart, kind);
        op(OpKind::kAdd, AddOp{kStream, kPart, kHidden, layer.residual_multiplier});
    }

    int number_ = 0;
};

// kFfn: not a multiple of a panel, or one, by which gate and up get panels of their own. kinds: layers differ from Llama's.
// bits: of whole-number weights, in groups of 24 with zero points; 0: none are. float8: keys and values are in FP8. mixes:
// layer 1 has experts. latents: its keys and values are latents.
template <class T, int kFfn>
void run(bool kinds, int bits = 0, bool float8 = false, bool mixes = false, bool latents = false) {
    std::vector<std::vector<T>> weights;
    std::vector<std::vector<float>> vectors;
    auto weight = [&](int n, int k) -> const void* {  // in panels; what lies beyond n is never stored
        weights.push_back(numbers<T>((size_t)(n + kPanel - 1) / kPanel * kPanel * k, 3 / std::sqrt((float)k)));
        return weights.back().data();
    };
    auto vector = [&](int n, float scale, float middle) -> const float* {
        vectors.push_back(numbers<float>(n, scale, middle));
        return vectors.back().data();
    };
    Layer layers[kLayers] = {};
    for (Layer& layer : layers) {
        layer.attention_norm = vector(kHidden, 0.3f, 1);
        layer.mlp_norm = vector(kHidden, 0.3f, 1);
        layer.weights[kQkv] = weight(kQ + 2 * kKv, kHidden), layer.weights[kO] = weight(kHidden, kQ);
        layer.weights[kGateUp] = weight(2 * kFfn, kHidden), layer.weights[kDown] = weight(kHidden, kFfn);
    }
    const int inputs[] = {kHidden, kQ, kHidden, kFfn}, outputs[] = {kQ + 2 * kKv, kHidden, 2 * kFfn, kHidden};
    std::vector<std::vector<uint8_t>> whole;
    std::vector<std::vector<bf16>> zeros;
    for (Layer& layer : layers)
        for (const Group group : kDense) {
            if (!bits) continue;
            const int panels = (outputs[group] + kPanel - 1) / kPanel, groups = (inputs[group] + 23) / 24;
            whole.emplace_back(panels * integer_panel_bytes(inputs[group], bits));
            for (uint8_t& each : whole.back()) each = (uint8_t)(255 * (random_number() + 0.5f));
            zeros.push_back(numbers<bf16>((size_t)panels * groups * kPanel, 0));
            for (bf16& zero : zeros.back()) zero = as<bf16>((float)(int)(8 * random_number()));
            const float* scales = vector(panels * groups * kPanel, 0.02f * (16 >> bits / 2), 0);
            layer.weights[group] = whole.back().data();
            layer.integers[group] = {scales, zeros.back().data(), bits, 24, 0, 0};
        }
    layers[1].bias[kQkv] = vector(kQ + 2 * kKv, 0.3f, 0);
    layers[1].attend.q_norm = vector(kHeadDim, 0.3f, 1), layers[1].attend.k_norm = vector(kHeadDim, 0.3f, 1);
    const auto embed = numbers<T>(kVocab * kHidden, 2);
    const int64_t page_elems = 2 * kLayers * kBlock * kKv / (float8 ? sizeof(T) : 1);
    auto arena = numbers<T>(page_elems * kPages, 0.4f);
    const float *norm = vector(kHidden, 0.3f, 1), *cos = vector(256 * kHeadDim, 2, 0),
                *sin = vector(256 * kHeadDim, 2, 0);
    for (Layer& layer : layers) {
        AttendOp& own = layer.attend;
        own.cos = cos, own.sin = sin, own.rotary_dim = kHeadDim, own.eps = 1e-5f;
        own.scale = 1.0f / std::sqrt((float)kHeadDim), own.heads = {kHeads, kKvHeads, kHeadDim}, own.has_keys = 1;
        own.k_scale = float8 ? 0.03f : 1, own.v_scale = float8 ? 0.004f : 1;
    }
    const GemmShapeDesc shapes[] = {{kHidden, 3, 0, {{0, 0, kQ}, {1, kQ, kKv}, {2, kQ + kKv, kKv}}},
                                    {kQ, 1, 1, {{3, 0, kHidden}}},
                                    {kHidden, 2, 0, {{4, 0, kFfn}, {5, kFfn, kFfn}}},
                                    {kFfn, 1, 1, {{6, 0, kHidden}}},
                                    {kHidden, 2, 0, {{0, 0, kQueryRank}, {1, kQueryRank, kKvRank + kRotated}}},
                                    {kQueryRank, 1, 0, {{7, 0, kQueries}}},
                                    {kHeads * kValue, 1, 1, {{3, 0, kHidden}}}};
    for (int l = 0; l < kLayers; l++) layers[l].attend.page_layer = l;
    ModelDesc model{};
    model.hidden = kHidden, model.layers = kLayers, model.vocab = kVocab, model.block_tokens = kBlock,
    model.page_groups = 1;
    model.num_gemm_shapes = 7, model.eps = 1e-5f, model.embedding_multiplier = model.logits_scale = 1;
    model.gemm_shapes = shapes, model.embed = embed.data(),
    model.lm_head = weight(kVocab, kHidden);
    model.norm = norm, model.arena = arena.data(), model.page_elems = page_elems;
    model.page_bytes = page_elems * sizeof(T), model.float8_kv = float8;
    if (kinds) {
        layers[0].attend.window = 33, layers[0].attend.softcap = 0.7f, layers[0].residual_multiplier = 0.3f;
        layers[0].attend.rotary_dim = 12, layers[0].attend.interleaved = 1, layers[0].activation = kGelu;
        layers[0].attention_out_norm = vector(kHidden, 0.3f, 1), layers[0].mlp_out_norm = vector(kHidden, 0.3f, 1);
        layers[1].attend.q_norm = vector(kQ, 0.3f, 1), layers[1].attend.k_norm = vector(kKv, 0.3f, 1);
        layers[1].attend.head_norm = kAllHeads;
        layers[1].attend.rotary_dim = 0, layers[1].attention_norm = layers[1].mlp_norm = nullptr;
        layers[2].parallel = true, layers[2].attend.window = 5, layers[2].attend.rotary_dim = 10;
        model.norm_kind = NormKind::kLayer, model.embedding_multiplier = 2.5f, model.logits_scale = 0.5f, model.logits_softcap = 3;
    }
    Experts experts(weight, vector);
    if (mixes) {
        layers[1].experts = &experts.desc, layers[1].targets = experts.targets;
    }
    if (latents) {
        Layer& layer = layers[1];
        layer.weights[kQkv] = weight(kQueryRank + kKvRank + kRotated, kHidden), layer.bias[kQkv] = nullptr;
        layer.weights[kQueryUp] = weight(kQueries, kQueryRank), layer.weights[kO] = weight(kHidden, kHeads * kValue);
        layer.integers[kQkv] = layer.integers[kO] = {};
        layer.shape[kQkv] = 4, layer.shape[kQueryUp] = 5, layer.shape[kO] = 6;
        const int panels = (kKvRank + kPanel - 1) / kPanel, values = (kValue + kPanel - 1) / kPanel;
        LatentDesc& own = layer.latent;
        own.kv_up = weight(kPanel * kHeads, panels * kKey + values * kKvRank);
        layer.query_norm = vector(kQueryRank, 0.3f, 1), own.k_norm = vector(kKvRank, 0.3f, 1);
        own.heads = kHeads, own.kv_rank = kKvRank, own.key = kKey, own.rotated = kRotated, own.value = kValue;
        own.rotary_dim = kinds ? 8 : kRotated, own.interleaved = kinds, own.module = 8, own.eps = 1e-6f;
        own.scale = 0.2f, own.cos = cos, own.sin = sin, own.plane = 2 * kBlock * kKv;
        own.query_factors = kinds ? vector(256, 0.3f, 1) : nullptr, own.bias = kinds ? vector(kMade, 0.3f, 0) : nullptr;
    }
    Program program;
    for (int l = 0; l < kLayers; l++) program.add(layers[l], l, kFfn, model.norm_kind);
    const RegisterDesc registers[] = {{Memory::kFloat, kHidden},        {Memory::kRounded, kHidden},
                                      {Memory::kFloat, kQ + 2 * kKv},   {Memory::kRounded, kQ},
                                      {Memory::kRounded, kQ},           {Memory::kFloat, kHidden},
                                      {Memory::kGates, 2 * kFfn},       {Memory::kRounded, kFfn},
                                      {Memory::kFloat, kQueryRank + kKvRank + kRotated},
                                      {Memory::kRounded, kQueryRank},   {Memory::kFloat, kQueries},
                                      {Memory::kRounded, kHeads * kValue}};
    model.ops = program.ops.data(), model.num_ops = program.ops.size();
    model.registers = registers, model.num_registers = sizeof registers / sizeof *registers;
    Decoder<T> decoder(model, 2);

    Adapter adapter{};
    const int in[] = {kHidden, kHidden, kHidden, kQ, kHidden, kHidden, kFfn, kQueryRank, kKvRank},
              out[] = {kQ, kKv, kKv, kHidden, kFfn, kFfn, kHidden, kQueries, kMade};
    int32_t a[kAllModules], b[kAllModules];
    std::fill_n(a, kAllModules, -1), std::fill_n(b, kAllModules, -1);
    adapter.a_offset = a, adapter.b_offset = b, adapter.modules = kAllModules;
    for (int m = 0; m < (latents ? kAllModules : kDenseModules); m++) {
        a[m] = (int)adapter.slab_elems, b[m] = (int)adapter.slab_elems + in[m];
        adapter.slab_elems += in[m] + out[m];
    }
    int64_t first[kLayers], pages[90];
    for (int l = 0; l < kLayers; l++) first[l] = l * kRank * adapter.slab_elems;
    for (int i = 0; i < 90; i++) pages[i] = 100 + i * 7 % 90;
    adapter.pages = pages, adapter.first_elem = first, adapter.rank = kRank, adapter.scale = 0.7f;
    int32_t part_a[kAllModules], part_b[kAllModules];
    std::copy_n(a, kAllModules, part_a), std::copy_n(b, kAllModules, part_b);
    part_a[1] = part_b[1] = part_a[6] = part_b[6] = -1;
    Adapter part = adapter;  // a second part for the same tokens, without some modules
    part.pages = pages + 9, part.scale = -0.3f, part.a_offset = part_a, part.b_offset = part_b;
    const Adapter* adapters[] = {&adapter, &adapter, &part};

    auto step = [&](const std::vector<int>& counts, const std::vector<int>& before, int segments) {
        const int rows = (int)counts.size();
        std::vector<int64_t> ids, positions, page, offset, table, wanted;
        std::vector<int32_t> begin{0}, lengths;
        for (int r = 0; r < rows; r++) {
            for (int i = 0; i < kTable; i++) table.push_back(1 + r * kTable + i);
            for (int p = before[r]; p < before[r] + counts[r]; p++) {
                ids.push_back((p * 13 + r * 7) % kVocab), positions.push_back(p), wanted.push_back(wanted.size());
                page.push_back(table[r * kTable + p / kBlock]), offset.push_back(p % kBlock);
            }
            begin.push_back((int)ids.size()), lengths.push_back(before[r] + counts[r]);
        }
        const int tokens = (int)ids.size();
        const int32_t from[] = {0, begin[1], 0}, to[] = {begin[1], tokens, tokens}, level[] = {0, 0, 1};
        std::vector<float> logits((size_t)tokens * kVocab);
        std::vector<int64_t> best(tokens);
        std::vector<SampleRow> samples(tokens);
        for (int i = 0; i < tokens; i++)
            samples[i] = {
                i % 4 ? 1.3 : 0, i % 17 / 17.0, i % 3 ? 0.8 : 1.0, i % 5 ? 0 : 0.05, i % 7 ? 0 : 9, nullptr, 0};
        StepDesc desc{};
        desc.tokens = tokens, desc.rows = rows, desc.logits_wanted = tokens, desc.logits_width = kVocab;
        const int count = segments < 3 ? std::min(rows, segments) : segments;
        desc.token_ids = ids.data(), desc.positions = positions.data(), desc.page = page.data();
        desc.offset = offset.data(), desc.qo_indptr = begin.data(), desc.kv_lens = lengths.data();
        desc.page_table = table.data(), desc.table_stride = kTable, desc.logit_tokens = wanted.data();
        desc.segments = {count, from, to, adapters, segments == 3 ? level : nullptr, 0, 0};
        const MixtureLoraDesc mixture = experts.lora(arena.data(), page_elems, pages, begin[rows / 2], tokens);
        if (mixes && segments) desc.mixture = &mixture;
        desc.logits = logits.data(), desc.best = best.data(), desc.samples = samples.data();
        decoder.forward(desc);
        uint64_t sampled = 7;
        for (int64_t token : best) sampled = sampled * 1000003 + token;
        printf("%d tokens, %d bytes, %d: logits %016llx, samples %016llx\n", tokens, (int)sizeof(T), segments,
               (unsigned long long)hash(logits.data(), logits.size() * 4), (unsigned long long)sampled);
    };
    for (int segments : {0, 2, 3}) {
        step({70, 33}, {0, 0}, segments);
        step({1}, {70}, segments);
        step({1, 1}, {71, 33}, segments);
        step({3, 1}, {72, 34}, segments);
        step({1, 1, 1, 1, 1, 1, 1, 1}, {75, 35, 0, 0, 0, 0, 0, 0}, segments);
        step({60, 5}, {76, 36}, segments);
    }
    for (const Group group : kDense) {
        if (latents && group <= kO) continue;  // layer 1 has others
        std::vector<T> out((size_t)(outputs[group] + kPanel - 1) / kPanel * kPanel * inputs[group]);
        const MergeDesc desc{
            layers[1].weights[group], layers[1].integers[group], out.data(), group, 1, adapters + 1, 2};
        const float growth = decoder.merge(desc);
        printf("merge %d: %016llx, %a\n", group, (unsigned long long)hash(out.data(), out.size() * sizeof(T)), growth);
    }
}

}  // namespace

int main() {
    for (const bool kinds : {false, true}) {
        run<float, 136>(kinds);
        run<bf16, 136>(kinds);
        run<float, 160>(kinds);
        run<bf16, 160>(kinds);
    }
    for (const int bits : {8, 4}) {
        run<float, 136>(false, bits);
        run<bf16, 160>(false, bits);
    }
    for (const bool kinds : {false, true}) {
        run<float, 136>(kinds, 0, true);
        run<bf16, 160>(kinds, 0, true);
    }
    for (const bool kinds : {false, true}) {
        run<float, 136>(kinds, 0, false, true);
        run<bf16, 160>(kinds, 0, false, true);
    }
    for (const bool kinds : {false, true}) {
        run<float, 136>(kinds, 0, false, false, true);
        run<bf16, 160>(kinds, 0, false, true, true);
    }
}
