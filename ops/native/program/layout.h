// Layouts of the structures that Python hands over, and numbers that it writes there: ops/library/native_layout.py makes its own of
// them.
#pragma once
#include <cstddef>
#include <type_traits>
#include "files/file_rows.h"
#include "mixers/gated_delta.h"
#include "moe/mixture.h"
#include "lora/offload.h"
#include "sampling/sampling.h"

namespace chorus {

// A structure; or, of one, a field; or an enumerator or constant.
//
//   name    a structure's, `Structure.field`, `Enumeration.kName`, or a constant's
//   offset  in bytes; of an enumerator or a constant its number
//   bytes   of all elements
//   type    of its elements: as Python's struct module names it; P: a pointer, S: a structure, E: an enumerator
//   of      the name of that structure, or of the enumeration whose numbers a field has
struct Field {
    const char* name;
    int64_t offset, bytes;
    char type;
    const char* of;
};

template <class F>
constexpr char type_of() {
    using E = std::remove_all_extents_t<F>;
    if constexpr (std::is_pointer_v<E>) return 'P';
    else if constexpr (std::is_same_v<E, float>) return 'f';
    else if constexpr (std::is_same_v<E, double>) return 'd';
    else if constexpr (std::is_class_v<E>) return 'S';
    else return sizeof(E) == 1 ? 'B' : sizeof(E) == 4 ? 'i' : 'q';
}

#define ALL(S) {#S, 0, sizeof(S), 'S', nullptr}
#define NAMED(S, name, field) \
    {#S "." #name, offsetof(S, field), sizeof(S::field), type_of<decltype(S::field)>(), nullptr}
#define AT(S, field) NAMED(S, field, field)
#define PART(S, field, Type) {#S "." #field, offsetof(S, field), sizeof(S::field), 'S', #Type}
#define CHOICE(S, field, Enum) \
    {#S "." #field, offsetof(S, field), sizeof(S::field), type_of<decltype(S::field)>(), #Enum}
#define NUMBER(Enum, name) {#Enum "." #name, (int64_t)Enum::name, 0, 'E', nullptr}
#define EACH_NUMBER(Enum, name) NUMBER(Enum, name),
#define CONSTANT(name) {#name, name, 0, 'E', nullptr}
// clang-format off: by structure
constexpr Field kLayout[] = {
    ALL(Adapter), AT(Adapter, pages), AT(Adapter, first_elem), AT(Adapter, rank), AT(Adapter, scale),
        AT(Adapter, slab_elems), AT(Adapter, a_offset), AT(Adapter, b_offset), AT(Adapter, vectors),
        AT(Adapter, modules), AT(Adapter, tokens),
    ALL(Integers), AT(Integers, scales), AT(Integers, zeros), AT(Integers, bits), AT(Integers, group),
        AT(Integers, input_bits), AT(Integers, input_block),
    ALL(RegisterDesc), CHOICE(RegisterDesc, memory, Memory), AT(RegisterDesc, width),
    ALL(OpDesc), CHOICE(OpDesc, kind, OpKind), AT(OpDesc, arguments),
    ALL(ArriveOp), AT(ArriveOp, layer),
    ALL(GemmOp), AT(GemmOp, x), AT(GemmOp, out), AT(GemmOp, accumulate), AT(GemmOp, shape), AT(GemmOp, layer), AT(GemmOp, number), AT(GemmOp, w), AT(GemmOp, bias), PART(GemmOp, integers, Integers),
    ALL(GateUpOp), PART(GateUpOp, gemm, GemmOp), AT(GateUpOp, act), AT(GateUpOp, size), CHOICE(GateUpOp, activation, Activation), AT(GateUpOp, factor), AT(GateUpOp, xielu), AT(GateUpOp, alpha), AT(GateUpOp, limit),
    ALL(Heads), AT(Heads, count), AT(Heads, kv), AT(Heads, dim),
    ALL(AttendOp), AT(AttendOp, x), AT(AttendOp, q), AT(AttendOp, out), PART(AttendOp, heads, Heads), AT(AttendOp, page_group), AT(AttendOp, page_layer), AT(AttendOp, has_keys), AT(AttendOp, keys_are_values), AT(AttendOp, norms_values), CHOICE(AttendOp, head_norm, HeadNorm), CHOICE(AttendOp, output_gate, OutputGate), AT(AttendOp, softplus_gates), AT(AttendOp, kv_copies), AT(AttendOp, window), AT(AttendOp, chunked), AT(AttendOp, blocks), AT(AttendOp, rotary_dim), AT(AttendOp, interleaved), AT(AttendOp, eps), AT(AttendOp, scale), AT(AttendOp, softcap), AT(AttendOp, k_scale), AT(AttendOp, v_scale), AT(AttendOp, q_norm), AT(AttendOp, k_norm), AT(AttendOp, sinks), AT(AttendOp, slopes), AT(AttendOp, cos), AT(AttendOp, sin), AT(AttendOp, query_factors), AT(AttendOp, query_weights), AT(AttendOp, chosen), AT(AttendOp, block), AT(AttendOp, top_k), AT(AttendOp, behind),
    ALL(LatentDesc), AT(LatentDesc, heads), AT(LatentDesc, kv_rank), AT(LatentDesc, key), AT(LatentDesc, rotated),
        AT(LatentDesc, value), AT(LatentDesc, rotary_dim), AT(LatentDesc, interleaved), AT(LatentDesc, page_group),
        AT(LatentDesc, module), AT(LatentDesc, eps), AT(LatentDesc, scale), AT(LatentDesc, k_norm), AT(LatentDesc, cos),
        AT(LatentDesc, sin), AT(LatentDesc, query_factors), AT(LatentDesc, plane), AT(LatentDesc, kv_up), AT(LatentDesc, bias),
        AT(LatentDesc, behind), AT(LatentDesc, top_k), AT(LatentDesc, window), AT(LatentDesc, sinks),
    ALL(LatentAttendOp), AT(LatentAttendOp, q), AT(LatentAttendOp, column), AT(LatentAttendOp, out), AT(LatentAttendOp, layer), AT(LatentAttendOp, chosen),
        PART(LatentAttendOp, latent, LatentDesc),
    ALL(KeepOp), AT(KeepOp, x), AT(KeepOp, column), PART(KeepOp, latent, LatentDesc),
    ALL(IndexKeys), AT(IndexKeys, page_group), AT(IndexKeys, page_layer), AT(IndexKeys, parts), AT(IndexKeys, heads), AT(IndexKeys, stride),
        AT(IndexKeys, first), AT(IndexKeys, piece), AT(IndexKeys, dim),
    ALL(ChooseOp), AT(ChooseOp, q), AT(ChooseOp, weights), AT(ChooseOp, out), AT(ChooseOp, heads), AT(ChooseOp, top_k), AT(ChooseOp, pool),
        AT(ChooseOp, block), AT(ChooseOp, local), AT(ChooseOp, scale), AT(ChooseOp, factor), AT(ChooseOp, biases), PART(ChooseOp, keys, IndexKeys),
    ALL(KeepIndexOp), AT(KeepIndexOp, x), AT(KeepIndexOp, column), PART(KeepIndexOp, keys, IndexKeys),
    ALL(RotateOp), AT(RotateOp, x), AT(RotateOp, column), AT(RotateOp, heads), AT(RotateOp, width), AT(RotateOp, out), AT(RotateOp, first), AT(RotateOp, rotary_dim), AT(RotateOp, interleaved), AT(RotateOp, cos), AT(RotateOp, sin),
    ALL(GateOp), AT(GateOp, x), AT(GateOp, gates), AT(GateOp, width), AT(GateOp, out), AT(GateOp, softplus),
    ALL(LogScaleHeadsOp), AT(LogScaleHeadsOp, x), AT(LogScaleHeadsOp, column), AT(LogScaleHeadsOp, heads), AT(LogScaleHeadsOp, width), AT(LogScaleHeadsOp, out), AT(LogScaleHeadsOp, weight),
    ALL(ProductOp), AT(ProductOp, x), AT(ProductOp, column), AT(ProductOp, width), AT(ProductOp, out), AT(ProductOp, out_column), AT(ProductOp, outputs), AT(ProductOp, tanh), AT(ProductOp, w),
    ALL(StreamsOp), AT(StreamsOp, s), AT(StreamsOp, count), AT(StreamsOp, width), AT(StreamsOp, out), AT(StreamsOp, outs), CHOICE(StreamsOp, mixed, Mixed), AT(StreamsOp, mix), AT(StreamsOp, y), AT(StreamsOp, give), AT(StreamsOp, given),
    ALL(ConnectOp), AT(ConnectOp, m), AT(ConnectOp, count), AT(ConnectOp, take), AT(ConnectOp, give), AT(ConnectOp, mix), AT(ConnectOp, rounds), AT(ConnectOp, floor), AT(ConnectOp, magnitude), AT(ConnectOp, given_floor), AT(ConnectOp, base), AT(ConnectOp, scale),
    ALL(MultiplyOp), AT(MultiplyOp, x), AT(MultiplyOp, out), AT(MultiplyOp, inputs), AT(MultiplyOp, outputs), AT(MultiplyOp, module), AT(MultiplyOp, w), PART(MultiplyOp, integers, Integers),
    ALL(LookUpOp), AT(LookUpOp, out), AT(LookUpOp, width), AT(LookUpOp, factor), AT(LookUpOp, first), AT(LookUpOp, rows), AT(LookUpOp, keeps), AT(LookUpOp, table),
    ALL(MatchOp), AT(MatchOp, x), AT(MatchOp, y), AT(MatchOp, width), AT(MatchOp, out), AT(MatchOp, out_column), AT(MatchOp, least),
    ALL(SparseGatesOp), AT(SparseGatesOp, x), AT(SparseGatesOp, size), AT(SparseGatesOp, out), AT(SparseGatesOp, deviations),
    ALL(DeltaShape), CHOICE(DeltaShape, mixer, Mixer), AT(DeltaShape, k_heads), AT(DeltaShape, v_heads), AT(DeltaShape, k_dim),
        AT(DeltaShape, v_dim), AT(DeltaShape, conv_size), AT(DeltaShape, eps), AT(DeltaShape, beta), AT(DeltaShape, dt_min),
        AT(DeltaShape, gates_norm), AT(DeltaShape, group_ranks), AT(DeltaShape, by_channel), AT(DeltaShape, scan_heads), AT(DeltaShape, scan_rank), AT(DeltaShape, bound),
    ALL(DeltaWeights), NAMED(DeltaWeights, taps, conv), AT(DeltaWeights, dt_bias), AT(DeltaWeights, a_log), NAMED(DeltaWeights, delta_norm, norm), AT(DeltaWeights, conv_bias), AT(DeltaWeights, d), AT(DeltaWeights, gates), AT(DeltaWeights, gate_bias), AT(DeltaWeights, rates), AT(DeltaWeights, scan_low), AT(DeltaWeights, scan_steps),
    ALL(MixOp), AT(MixOp, x), AT(MixOp, out), AT(MixOp, state_layer), AT(MixOp, is_first), PART(MixOp, weights, DeltaWeights),
    ALL(MoeOp), AT(MoeOp, x), AT(MoeOp, out), AT(MoeOp, layer), AT(MoeOp, experts), AT(MoeOp, targets),
    ALL(RouteOp), AT(RouteOp, x),
    ALL(NormOp), AT(NormOp, x), AT(NormOp, column), AT(NormOp, width), AT(NormOp, out), CHOICE(NormOp, norm, NormKind), AT(NormOp, eps), AT(NormOp, weight), AT(NormOp, groups),
    ALL(CopyOp), AT(CopyOp, x), AT(CopyOp, column), AT(CopyOp, width), AT(CopyOp, out), AT(CopyOp, out_column), AT(CopyOp, groups), AT(CopyOp, step), AT(CopyOp, spread),
    ALL(ScaleOp), AT(ScaleOp, x), AT(ScaleOp, column), AT(ScaleOp, width), AT(ScaleOp, out), AT(ScaleOp, out_column), AT(ScaleOp, factor), AT(ScaleOp, weights),
    ALL(AddOp), AT(AddOp, x), AT(AddOp, y), AT(AddOp, width), AT(AddOp, factor), AT(AddOp, column),
    ALL(AddMediaOp), AT(AddMediaOp, x), AT(AddMediaOp, width), AT(AddMediaOp, part),
    ALL(ClipOp), AT(ClipOp, x), AT(ClipOp, column), AT(ClipOp, width), AT(ClipOp, limit),
    ALL(WidenOp), AT(WidenOp, x), AT(WidenOp, width), AT(WidenOp, out),
    ALL(ResizeOp), AT(ResizeOp, x), AT(ResizeOp, column), AT(ResizeOp, heads), AT(ResizeOp, width), AT(ResizeOp, out), AT(ResizeOp, out_column), AT(ResizeOp, to), AT(ResizeOp, order),
    ALL(SubtractOp), AT(SubtractOp, x), AT(SubtractOp, column), AT(SubtractOp, heads), AT(SubtractOp, width), AT(SubtractOp, out), AT(SubtractOp, factor), AT(SubtractOp, eps), AT(SubtractOp, weight),
    ALL(SumOp), AT(SumOp, x), AT(SumOp, y), AT(SumOp, width), AT(SumOp, out),
    ALL(ActivateOp), AT(ActivateOp, x), AT(ActivateOp, size), AT(ActivateOp, out), CHOICE(ActivateOp, activation, Activation), AT(ActivateOp, xielu), AT(ActivateOp, alpha), AT(ActivateOp, limit),
    ALL(ReduceOp), AT(ReduceOp, out), AT(ReduceOp, width), AT(ReduceOp, accumulate),
    NUMBER(OpKind, kArrive),
    NUMBER(OpKind, kMeet),
    NUMBER(OpKind, kGemm),
    NUMBER(OpKind, kGateUp),
    NUMBER(OpKind, kAttend),
    NUMBER(OpKind, kLatentAttend),
    NUMBER(OpKind, kKeep),
    NUMBER(OpKind, kMix),
    NUMBER(OpKind, kMoe),
    NUMBER(OpKind, kChoose),
    NUMBER(OpKind, kMultiply),
    NUMBER(OpKind, kNorm),
    NUMBER(OpKind, kCopy),
    NUMBER(OpKind, kScale),
    NUMBER(OpKind, kAdd),
    NUMBER(OpKind, kSum),
    NUMBER(OpKind, kActivate),
    NUMBER(OpKind, kReduce),
    NUMBER(OpKind, kRoute),
    NUMBER(OpKind, kCombine),
    NUMBER(OpKind, kAddMedia),
    NUMBER(OpKind, kClip),
    NUMBER(OpKind, kWiden),
    NUMBER(OpKind, kResize),
    NUMBER(OpKind, kSubtract),
    NUMBER(OpKind, kRotate),
    NUMBER(OpKind, kKeepIndex),
    NUMBER(OpKind, kGate), NUMBER(OpKind, kLogScaleHeads), NUMBER(OpKind, kProduct), NUMBER(OpKind, kStreams), NUMBER(OpKind, kConnect), NUMBER(OpKind, kLookUp), NUMBER(OpKind, kMatch), NUMBER(OpKind, kSparseGates),
    NUMBER(Mixed, kByNumbers), NUMBER(Mixed, kByTransposed), NUMBER(Mixed, kKept), NUMBER(Mixed, kAddedTo),
    NUMBER(Memory, kFloat),
    NUMBER(Memory, kRounded),
    NUMBER(Memory, kShared),
    NUMBER(Memory, kGates),
    NUMBER(Memory, kIndices),
    NUMBER(Activation, kSilu), NUMBER(Activation, kGelu), NUMBER(Activation, kReluSquaredGate), NUMBER(Activation, kGeluByErfGate), NUMBER(Activation, kClampedSwiglu), NUMBER(Activation, kLimitedSwiglu), NUMBER(Activation, kBoundedSwiglu), NUMBER(Activation, kGeluAlone), NUMBER(Activation, kGeluByErf), NUMBER(Activation, kReluSquared), NUMBER(Activation, kXielu), NUMBER(Activation, kRelu),
    NORM_KINDS(EACH_NUMBER)
    NUMBER(HeadNorm, kEachHead), NUMBER(HeadNorm, kAllHeads), NUMBER(HeadNorm, kOwnHeads), NUMBER(HeadNorm, kBiasedHeads),
    NUMBER(OutputGate, kNoGate), NUMBER(OutputGate, kBesideQueries), NUMBER(OutputGate, kPerHead), NUMBER(OutputGate, kPerElement),
    NUMBER(Scoring, kSoftmax), NUMBER(Scoring, kSoftmaxOfChosen), NUMBER(Scoring, kSigmoid), NUMBER(Scoring, kSigmoidOfChosen), NUMBER(Scoring, kSparseMixer),
    NUMBER(Mixer, kDelta), NUMBER(Mixer, kShortConv), NUMBER(Mixer, kMamba2), NUMBER(Mixer, kRgLru), NUMBER(Mixer, kMamba1), NUMBER(Mixer, kHeadedScan),
    NUMBER(Element, kF32), NUMBER(Element, kF16), NUMBER(Element, kBF16),
    CONSTANT(kMaxExchanges), CONSTANT(kPanel),
    ALL(Target), AT(Target, module), AT(Target, column), AT(Target, width),
    ALL(GemmShapeDesc), AT(GemmShapeDesc, inputs), AT(GemmShapeDesc, count), AT(GemmShapeDesc, row_parallel), PART(GemmShapeDesc, targets, Target),
    ALL(ModelDesc), AT(ModelDesc, hidden), AT(ModelDesc, layers), AT(ModelDesc, vocab), AT(ModelDesc, block_tokens),
        AT(ModelDesc, page_groups), AT(ModelDesc, num_gemm_shapes),
        AT(ModelDesc, eps), CHOICE(ModelDesc, norm_kind, NormKind), AT(ModelDesc, embedding_multiplier), AT(ModelDesc, logits_scale),
        AT(ModelDesc, head_bias), AT(ModelDesc, position_table), AT(ModelDesc, embedding_norm),
        AT(ModelDesc, logits_softcap), AT(ModelDesc, ops), AT(ModelDesc, registers), AT(ModelDesc, num_ops), AT(ModelDesc, num_registers), AT(ModelDesc, gemm_shapes), AT(ModelDesc, embed), AT(ModelDesc, lm_head),
        PART(ModelDesc, lm_head_integers, Integers),
        AT(ModelDesc, norm), AT(ModelDesc, arena), AT(ModelDesc, page_elems), AT(ModelDesc, page_bytes),
        AT(ModelDesc, float8_kv), PART(ModelDesc, delta, DeltaShape),
        AT(ModelDesc, convs_per_page), AT(ModelDesc, heads_per_page), AT(ModelDesc, conv_pages),
        AT(ModelDesc, most_drafts), AT(ModelDesc, drafts_per_page), AT(ModelDesc, draft_page),
        AT(ModelDesc, embed_module), AT(ModelDesc, head_module),
        AT(ModelDesc, embed_rows_module), AT(ModelDesc, head_rows_module), AT(ModelDesc, first_token),
    ALL(Segments), AT(Segments, count), AT(Segments, begin), AT(Segments, end), AT(Segments, adapters),
        AT(Segments, level), AT(Segments, vectors), AT(Segments, undoes),
    ALL(StepDesc), AT(StepDesc, tokens), AT(StepDesc, rows), AT(StepDesc, logits_wanted), AT(StepDesc, states_wanted),
        AT(StepDesc, logits_width),
        AT(StepDesc, token_ids), AT(StepDesc, positions), AT(StepDesc, page), AT(StepDesc, offset),
        AT(StepDesc, qo_indptr), AT(StepDesc, kv_lens), AT(StepDesc, page_table), AT(StepDesc, table_stride),
        AT(StepDesc, page_stride),
        AT(StepDesc, logit_tokens), PART(StepDesc, segments, Segments), AT(StepDesc, segment_ready), AT(StepDesc, segment_late),
        AT(StepDesc, max_stall_ns), AT(StepDesc, logits), AT(StepDesc, logit_rows), AT(StepDesc, best),
        AT(StepDesc, samples), AT(StepDesc, ops), AT(StepDesc, offloaded), AT(StepDesc, state_read), AT(StepDesc, state_written), AT(StepDesc, state_fresh),
        AT(StepDesc, state_accepted), AT(StepDesc, state_drafts), AT(StepDesc, state_stride), PART(StepDesc, model_segments, Segments), AT(StepDesc, model_ready), AT(StepDesc, model_late),
        AT(StepDesc, mixture), AT(StepDesc, mixture_ready), AT(StepDesc, mixture_late),
        AT(StepDesc, media), AT(StepDesc, media_rows), AT(StepDesc, media_stride),
        AT(StepDesc, block_before), AT(StepDesc, block_behind),
    ALL(OffloadDesc), AT(OffloadDesc, ranks), AT(OffloadDesc, count), AT(OffloadDesc, segment), AT(OffloadDesc, row),
        AT(OffloadDesc, share), AT(OffloadDesc, first_elem), AT(OffloadDesc, image_ready), AT(OffloadDesc, layers),
        AT(OffloadDesc, exchanges),
    ALL(OffloadWorkersDesc), AT(OffloadWorkersDesc, num_gemm_shapes), AT(OffloadWorkersDesc, gemm_shapes),
        AT(OffloadWorkersDesc, count), AT(OffloadWorkersDesc, page_elems), AT(OffloadWorkersDesc, row), AT(OffloadWorkersDesc, share),
        AT(OffloadWorkersDesc, adapters), AT(OffloadWorkersDesc, images), AT(OffloadWorkersDesc, exchanges),
    ALL(MergeDesc), AT(MergeDesc, origin), PART(MergeDesc, integers, Integers), AT(MergeDesc, to), AT(MergeDesc, shape), AT(MergeDesc, layer),
        AT(MergeDesc, parts), AT(MergeDesc, count),
    ALL(DeltaDesc), PART(DeltaDesc, shape, DeltaShape), PART(DeltaDesc, weights, DeltaWeights), AT(DeltaDesc, rows),
        AT(DeltaDesc, qo_indptr), AT(DeltaDesc, begins), AT(DeltaDesc, accepted), AT(DeltaDesc, drafts),
        AT(DeltaDesc, most_drafts), AT(DeltaDesc, conv_in), AT(DeltaDesc, recurrent_in), AT(DeltaDesc, drafts_in),
        AT(DeltaDesc, conv_out), AT(DeltaDesc, recurrent_out), AT(DeltaDesc, drafts_out), AT(DeltaDesc, mixed),
        AT(DeltaDesc, out),
    ALL(ExpertMatrices), AT(ExpertMatrices, w), AT(ExpertMatrices, integers), AT(ExpertMatrices, bias),
    ALL(RoutingDesc), AT(RoutingDesc, correction), AT(RoutingDesc, factors), AT(RoutingDesc, per_token), CHOICE(RoutingDesc, scoring, Scoring),
        AT(RoutingDesc, renormalised), AT(RoutingDesc, groups), AT(RoutingDesc, kept_groups),
        AT(RoutingDesc, group_best), AT(RoutingDesc, epsilon), AT(RoutingDesc, factor), AT(RoutingDesc, jitter),
        AT(RoutingDesc, masked_score), AT(RoutingDesc, logits_factor),
    ALL(MixtureDesc), AT(MixtureDesc, hidden), AT(MixtureDesc, experts), AT(MixtureDesc, size),
        AT(MixtureDesc, shared_size), AT(MixtureDesc, router), AT(MixtureDesc, router_bias), PART(MixtureDesc, routing, RoutingDesc),
        CHOICE(MixtureDesc, activation, Activation), AT(MixtureDesc, alpha), AT(MixtureDesc, limit),
        CHOICE(MixtureDesc, shared_activation, Activation), AT(MixtureDesc, shared_alpha), AT(MixtureDesc, shared_limit), PART(MixtureDesc, gate_up, ExpertMatrices),
        PART(MixtureDesc, down, ExpertMatrices), PART(MixtureDesc, shared_gate_up, ExpertMatrices), PART(MixtureDesc, shared_down, ExpertMatrices),
        AT(MixtureDesc, shared_gate), AT(MixtureDesc, of_inputs), AT(MixtureDesc, routed), AT(MixtureDesc, identity),
        AT(MixtureDesc, out_norm), AT(MixtureDesc, out_eps),
    ALL(MixtureStepDesc), AT(MixtureStepDesc, rows), AT(MixtureStepDesc, x), AT(MixtureStepDesc, y),
        AT(MixtureStepDesc, chosen), AT(MixtureStepDesc, weights), AT(MixtureStepDesc, lora), AT(MixtureStepDesc, lora_element),
    ALL(MixtureTargets), AT(MixtureTargets, count), PART(MixtureTargets, targets, Target),
    ALL(MixtureLoraDesc), AT(MixtureLoraDesc, arena), AT(MixtureLoraDesc, page_elems),
        PART(MixtureLoraDesc, segments, Segments), AT(MixtureLoraDesc, experts), AT(MixtureLoraDesc, num_experts),
        AT(MixtureLoraDesc, layer), AT(MixtureLoraDesc, targets),
    ALL(Exchange), AT(Exchange, layer), AT(Exchange, shape), AT(Exchange, active),
    ALL(SampleRow), AT(SampleRow, inverse_temperature), AT(SampleRow, u), AT(SampleRow, top_p), AT(SampleRow, min_p), AT(SampleRow, top_k),
        AT(SampleRow, logits), AT(SampleRow, token),
    ALL(LogprobRow), AT(LogprobRow, logits), AT(LogprobRow, token), AT(LogprobRow, count), AT(LogprobRow, ids), AT(LogprobRow, values),
        AT(LogprobRow, own),
    ALL(ReadJob), AT(ReadJob, a_start), AT(ReadJob, b_start), AT(ReadJob, a_element), AT(ReadJob, b_element),
        AT(ReadJob, rank), AT(ReadJob, d_in), AT(ReadJob, d_out), AT(ReadJob, first), AT(ReadJob, slab_elems),
        AT(ReadJob, a_offset), AT(ReadJob, b_offset),
    ALL(ReadGroup), AT(ReadGroup, spans_begin), AT(ReadGroup, spans_end), AT(ReadGroup, jobs_begin),
        AT(ReadGroup, jobs_end),
    ALL(Span), AT(Span, start), AT(Span, end),
    ALL(ReadFault), AT(ReadFault, fault), AT(ReadFault, job), AT(ReadFault, side), AT(ReadFault, error),
};
// clang-format on
#undef ALL
#undef AT
#undef NAMED
#undef PART
#undef CHOICE
#undef NUMBER
#undef CONSTANT

}  // namespace chorus
