// Ops of a model's layers, which the decoder runs one after the other: core/model/program/native_ops.py lists them.
//
// An op reads and writes registers, [tokens, width] each. Ops of rows work on each token by itself, so that neighbours among
// them are one pass over the tokens; before and behind each of the others the threads meet.
#pragma once
#include "elementwise/elementwise.h"
#include "mixers/gated_delta.h"
#include "gemm/integers.h"
#include "attention/latent_attention.h"

namespace chorus {

struct MixtureDesc;
struct MixtureTargets;

// What a register's elements are: float32; of the type that products read; float32 in memory that all TP ranks read; float32, of
// gates and what they multiply, which a step of many tokens doesn't keep; whole numbers (int32).
enum class Memory : int32_t { kFloat, kRounded, kShared, kGates, kIndices };

// Of register 0: the residual stream.
struct RegisterDesc {
    Memory memory;
    int32_t width;
};

// Ops; those of rows come last.
enum class OpKind : int32_t {
    kArrive,  // ArriveOp
    kMeet,  // ranks meet: parts in shared registers can be added up; no arguments
    kGemm,  // GemmOp
    kGateUp,  // GateUpOp
    kAttend,  // AttendOp
    kLatentAttend,  // LatentAttendOp
    kMix,  // MixOp
    kMoe,  // MoeOp
    kChoose,  // ChooseOp
    kMultiply,  // MultiplyOp
    kNorm,  // NormOp
    kKeep,  // KeepOp
    kCopy,  // CopyOp
    kScale,  // ScaleOp
    kAdd,  // AddOp
    kSum,  // SumOp
    kActivate,  // ActivateOp
    kReduce,  // ReduceOp
    kRoute,  // RouteOp
    kCombine,  // MoeOp: what its experts give is added up
    kAddMedia,  // AddMediaOp
    kClip,  // ClipOp
    kWiden,  // WidenOp
    kResize,  // ResizeOp
    kSubtract,  // SubtractOp
    kRotate,  // RotateOp
    kKeepIndex,  // KeepIndexOp
    kGate,  // GateOp
    kLogScaleHeads,  // LogScaleHeadsOp
    kProduct,  // ProductOp
    kStreams,  // StreamsOp
    kConnect,  // ConnectOp
    kSparseGates,  // SparseGatesOp
    kLookUp,  // LookUpOp
    kMatch,  // MatchOp
};

inline bool is_of_rows(OpKind kind) { return kind >= OpKind::kNorm; }

// An op and its arguments, a structure of its kind's.
struct OpDesc {
    OpKind kind;
    const void* arguments;
};

// Wait for what adapters have in a layer, before its first product.
struct ArriveOp {
    int32_t layer;
};

// out (+)= x · wᵀ + bias, with what adapters add; see LoraTask.
struct GemmOp {
    int32_t x, out, accumulate, shape, layer, number;
    const void* w;  // packed panels
    const float* bias;  // [outputs]; null: there is none
    Integers integers;  // how weights are whole numbers
};

// act = activation(factor · gate) · up, or activation(up) without a gate, of the gates and ups that a product gives.
struct GateUpOp {
    GemmOp gemm;
    int32_t act, size;
    Activation activation;
    float factor;
    const float* xielu;  // [4]: parameters of that activation
    float alpha = 0, limit = 0;  // see Gating

    Gating gating() const { return {activation, alpha, limit}; }
};

// A norm of queries and keys: of each head, with weights that all have, of all heads at once, or a LayerNorm of each head, with
// weights of its own or with weights and biases that all have.
enum HeadNorm : int32_t { kEachHead, kAllHeads, kOwnHeads, kBiasedHeads };

// Where the gates of attention's output are: nowhere, behind each head's query, or behind queries, keys and values, one of each
// head or of each element.
enum OutputGate : int32_t { kNoGate, kBesideQueries, kPerHead, kPerElement };

// Heads of a layer's attention: of queries, of keys and of values, and elements of each.
struct Heads {
    int32_t count, kv, dim;

    int q_size() const { return count * dim; }
    int kv_size() const { return kv * dim; }
    bool operator==(const Heads& other) const { return count == other.count && kv == other.kv && dim == other.dim; }
};

// out = attention of the queries that x has, behind which are keys and values, which are written to their pages.
struct AttendOp {
    int32_t x, q, out;  // q: of rotated queries
    Heads heads;
    int32_t page_group, page_layer;  // whose pages have its K and V, and its place among the layers in them
    int32_t has_keys;  // 0: x has queries alone; keys and values are another layer's
    int32_t keys_are_values;  // 1: there are no projected values: they are keys before their norm
    int32_t norms_values;  // 1: every head of values is normalised, without weights
    HeadNorm head_norm;  // where q_norm and k_norm are there
    OutputGate output_gate;
    int32_t softplus_gates;  // 1: gates multiply by log(1 + e^gate), rather than by their sigmoids
    int32_t kv_copies;  // TP ranks that have the same K/V heads
    int32_t window;  // tokens that a query sees, itself included; 0: all before it
    int32_t chunked;  // 1: it sees those of its own chunk of `window` tokens alone
    int32_t blocks;  // what it sees of its token's block in a step that has any: see BlockSight
    int32_t rotary_dim;  // leading elements of a head that are rotated
    int32_t interleaved;  // 1: elements 2i and 2i + 1 are rotated together; 0: i and i + rotary_dim / 2
    float eps;  // of norms of heads
    float scale;  // of scores
    float softcap;  // scores s become softcap · tanh(s / softcap); 0: they stay
    float k_scale, v_scale;  // what is stored of K and V stands for so many times that: of FP8, else 1
    const float *q_norm, *k_norm;  // [head_dim], [2, head_dim], or of every head: see HeadNorm; or null
    const float* sinks;  // [heads]; null where there is none
    const float* slopes;  // [heads]: what a score loses for each token between query and key (ALiBi); null: nothing
    const float *cos, *sin;  // [positions, rotary_dim]: of each element; with the attention factor
    const float* query_factors;  // [positions]; null: queries have none
    const float* query_weights;  // [head_dim], of rotated queries; null: they have none
    int32_t
        chosen;  // of the blocks of `block` tokens that each K/V head's queries attend to: see ChooseOp; 0: there are none
    int32_t block, top_k;  // and of the tokens of all of them
    int32_t behind;  // elements that pages keep behind each head of K and of V: an indexer's

    // Between queries there are gates.
    bool gaps() const { return output_gate == kBesideQueries; }
    // Elements of x: of queries, and of keys and values.
    int q_rows() const { return heads.q_size() << gaps(); }
    int kv_rows() const { return heads.kv_size() * (!has_keys ? 0 : keys_are_values ? 1 : 2); }
};

// out = attention of the queries that columns of q have, over latents.
struct LatentAttendOp {
    int32_t q, column, out, layer;
    LatentDesc latent;
    int32_t chosen = 0;  // of the tokens that queries attend to: see ChooseOp; 0: there are none
};

// Where pages keep an indexer's key of a token: in pieces, behind what they have of each head.
struct IndexKeys {
    int32_t page_group, page_layer;  // see AttendOp
    int32_t parts;  // 2: pages have keys and values, and first pieces are behind all keys; 1: keys alone
    int32_t heads, stride;  // of keys, and elements from one to the next
    int32_t first, piece;  // elements of a head before the piece, and of it
    int32_t dim;  // elements that are kept of a token

    int pieces() const { return (dim + piece - 1) / piece; }
    int width(int i) const { return std::min(piece, dim - i * piece); }
    // Elements from a page's beginning to piece i of the token at an offset.
    long at(int block_tokens, int offset, int i) const {
        const long plane = (long)page_layer * parts + i / heads;
        return ((plane * block_tokens + offset) * heads + i % heads) * stride + first;
    }
};

// What queries attend to, of tokens that see more than `top_k`: as many places of tokens, rising, and -1 behind the last one
// where they are fewer; or of each head the numbers of as many blocks as have them, rising.
struct ChooseOp {
    int32_t q, weights, out;  // queries, rounded; factors of heads; whole numbers
    int32_t heads, top_k;
    int32_t
        pool;  // tokens that are chosen together, and the tokens behind the last of such pools are, too; 0: each by itself
    int32_t block,
        local;  // tokens of a block, 0: there are no blocks; those that are chosen first, up to the token's own
    float scale, factor;  // of products, and of heads' factors
    const float* biases;  // [pool, key]: of gates, which lie behind keys
    IndexKeys keys;
};

// Columns of x go to the token's page, as an indexer's key.
struct KeepIndexOp {
    int32_t x, column;
    IndexKeys keys;
};

// out = x · sigmoid(gates), or x · log(1 + e^gates)
struct GateOp {
    int32_t x, gates, width, out, softplus;
};

// Heads of `width` elements in out = those in columns of x, each times scale · log(position + 1) + bias.
struct LogScaleHeadsOp {
    int32_t x, column, heads, width, out;
    const float* weight;  // [2, heads]: scales, then biases
};

// Columns of out = columns of x · wᵀ, of few outputs, in float32.
struct ProductOp {
    int32_t x, column, width, out, out_column, outputs;
    int32_t tanh;  // 1: out is the hyperbolic tangent of that
    const float* w;  // [outputs, width]
};

// How streams are mixed: none of them is, each by itself, or by numbers of the token, [outs, count] or the other way about.
enum class Mixed : int32_t { kByNumbers, kByTransposed, kKept, kAddedTo };

// out_i = Σ_j c_ij · s_j + d_i · y, of streams of `width` elements side by side.
//
//   kByNumbers     c_ij = mix[i, j]
//   kByTransposed  c_ij = mix[j, i]
//   kKept          c_ij = 1 for i = j, else 0
//   kAddedTo       the sum of the two: kByNumbers and kKept
struct StreamsOp {
    int32_t s, count, width, out, outs;
    Mixed mixed;
    int32_t mix;  // register of numbers; 0: all of them are 1 / count
    int32_t y, give;  // register of y, and of numbers d; 0: there is no y
    float given;  // added to d
};

// out = x · wᵀ by a matrix of the model's own, with what adapters of the model add.
struct MultiplyOp {
    int32_t x, out, inputs, outputs;
    int32_t module;  // of adapters; -1: they have none
    const void* w;  // packed panels
    Integers integers;  // how weights are whole numbers
};

// out = factor · a row of a table: each token's own, the first one's being that of token `first`. Tokens from `rows` on have the
// first row; with `keeps` they have the last one, and out stays for tokens before the first.
struct LookUpOp {
    int32_t out, width;
    float factor;
    int64_t first, rows;
    int32_t keeps;
    const void* table;  // [rows, width], as it is
};

// Columns of out = x, as large as y: both have the same root mean square, but for an x whose mean square is below `least`.
struct MatchOp {
    int32_t x, y, width, out, out_column;
    float least;
};

// The numbers of hyper-connections, of the products m of a token's streams: see HyperConnectionSpec.
struct ConnectOp {
    int32_t m, count, take, give, mix;  // registers; give, mix: 0: there are none
    int32_t rounds;  // of Sinkhorn-Knopp
    float floor, magnitude, given_floor;
    const float *base, *scale;  // [rows], and of each kind of numbers
};

// The gates of x's first half less a cutoff, the mean and `deviations` of them, or 0; the second half as it is.
struct SparseGatesOp {
    int32_t x, size, out;
    float deviations;
};

// Heads of `width` elements in out = those in columns of x, with `rotary_dim` elements from `first` on rotated.
struct RotateOp {
    int32_t x, column, heads, width, out, first, rotary_dim, interleaved;
    const float *cos, *sin;  // [positions, rotary_dim]
};

// Columns of x are the latent, and the key that all heads share, of a token: they go to their pages.
struct KeepOp {
    int32_t x, column;
    LatentDesc latent;
};

// out = what a recurrent mixer makes of x.
struct MixOp {
    int32_t x, out;
    int32_t state_layer;  // its place among layers with a state
    int32_t is_first;  // 1: the first of a mixer's two parts, whose result is float32
    DeltaWeights weights;
};

// out = what the experts make of x, which `RouteOp` gave to their router: computed by a `kMoe`, added up by a `kCombine`.
struct MoeOp {
    int32_t x, out, layer;
    const MixtureDesc* experts;
    const MixtureTargets* targets;  // [kMixtureGemms]: what adapters change of it
};

// The router reads x.
struct RouteOp {
    int32_t x;
};

// out = norm(columns of x); without a weight, the columns divided by their norm.
struct NormOp {
    int32_t x, column, width, out;
    NormKind norm;
    float eps;
    const float* weight;  // [width], or [2, width] with a bias
    int32_t groups = 0;  // of `width` columns each, which are normalised by themselves; 0: one
};

// Columns of out = columns of x.
struct CopyOp {
    int32_t x, column, width, out, out_column;
    int32_t groups = 0,
            step = 0;  // so many groups of columns lie side by side in out, and `step` columns apart in x; 0: one
    int32_t spread = 0;  // 1: all columns of a group of out are the first one of x's
};

// Columns of out = factor · columns of x.
struct ScaleOp {
    int32_t x, column, width, out, out_column;
    float factor;
    const float* weights;  // [width], in place of a factor; null: there are none
};

// Columns of x += factor · y
struct AddOp {
    int32_t x, y, width;
    float factor;
    int32_t column = 0;  // the first of x's
};

// x += a part of an image's row, of tokens that stand for one.
struct AddMediaOp {
    int32_t x, width, part;
};

// Columns of x become at least -limit and at most limit.
struct ClipOp {
    int32_t x, column, width;
    float limit;
};

// out = x, in float32, where x is of the type that products read.
struct WidenOp {
    int32_t x, width, out;
};

// Heads of `to` elements in columns of out = heads of `width` elements in columns of x, each cut or with zeros behind it.
struct ResizeOp {
    int32_t x, column, heads, width, out, out_column, to;
    const int32_t* order;  // [heads]: those of x, by number; null: each, in order
};

// Each of `heads` heads of out = norm(head of x - factor · the head of x as many behind it), heads of `width` elements.
struct SubtractOp {
    int32_t x, column, heads, width, out;
    float factor, eps;
    const float* weight;  // [width]: of the norm
};

// out = x + y
struct SumOp {
    int32_t x, y, width, out;
};

// out = activation(gate) · up of the halves of x, or activation(x) without a gate.
struct ActivateOp {
    int32_t x, size, out;
    Activation activation;
    const float* xielu;  // [4]: parameters of that activation
    float alpha, limit;  // see Gating

    Gating gating() const { return {activation, alpha, limit}; }
};

// out (+)= the sum of all ranks' parts, after they have met.
struct ReduceOp {
    int32_t out, width, accumulate;
};

// An op's arguments.
template <class Arguments>
inline const Arguments& arguments_of(const OpDesc& op) {
    return *(const Arguments*)op.arguments;
}

// The product that an op computes; null: none.
inline const GemmOp* gemm_of(const OpDesc& op) {
    if (op.kind == OpKind::kGemm) return &arguments_of<GemmOp>(op);
    return op.kind == OpKind::kGateUp ? &arguments_of<GateUpOp>(op).gemm : nullptr;
}

}  // namespace chorus
