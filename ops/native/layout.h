// Layouts of the structures that Python hands over: ops/native_library.py compares them with its own when it loads a library,
// so that one built from other sources is refused.
#pragma once
#include <cstddef>
#include "file_rows.h"
#include "gated_delta.h"
#include "mixture.h"
#include "offload.h"
#include "sampling.h"

namespace chorus {

// A structure or, of one, a field.
struct Field {
    const char* name;
    int64_t offset, bytes;
};

#define ALL(S) {#S, 0, sizeof(S)}
#define NAMED(S, name, field) {#S "." #name, offsetof(S, field), sizeof(S::field)}
#define AT(S, field) NAMED(S, field, field)
// clang-format off: by structure
constexpr Field kLayout[] = {
    ALL(Adapter), AT(Adapter, pages), AT(Adapter, first_elem), AT(Adapter, rank), AT(Adapter, scale),
        AT(Adapter, slab_elems), AT(Adapter, a_offset), AT(Adapter, b_offset), AT(Adapter, vectors),
        AT(Adapter, tokens),
    ALL(Integers), AT(Integers, scales), AT(Integers, zeros), AT(Integers, bits), AT(Integers, group),
        AT(Integers, input_bits), AT(Integers, input_block),
    ALL(LayerDesc), AT(LayerDesc, attention_norm), AT(LayerDesc, attention_out_norm), AT(LayerDesc, mlp_norm),
        AT(LayerDesc, mlp_out_norm),
        NAMED(LayerDesc, qkv, weights[kQkv]), NAMED(LayerDesc, qkv_bias, bias[kQkv]),
        NAMED(LayerDesc, o, weights[kO]), NAMED(LayerDesc, o_bias, bias[kO]),
        NAMED(LayerDesc, gate_up, weights[kGateUp]), NAMED(LayerDesc, gate_up_bias, bias[kGateUp]),
        NAMED(LayerDesc, down, weights[kDown]), NAMED(LayerDesc, down_bias, bias[kDown]),
        NAMED(LayerDesc, beside_in, weights[kBesideIn]), NAMED(LayerDesc, beside_in_bias, bias[kBesideIn]),
        NAMED(LayerDesc, beside_out, weights[kBesideOut]), NAMED(LayerDesc, beside_out_bias, bias[kBesideOut]),
        NAMED(LayerDesc, q_up, weights[kQueryUp]), NAMED(LayerDesc, q_up_bias, bias[kQueryUp]),
        NAMED(LayerDesc, output_gate_up, weights[kOutputGateUp]),
        NAMED(LayerDesc, output_gate_up_bias, bias[kOutputGateUp]),
        NAMED(LayerDesc, decay_up, weights[kDecayUp]), NAMED(LayerDesc, decay_up_bias, bias[kDecayUp]),
        AT(LayerDesc, integers),
        AT(LayerDesc, q_norm), AT(LayerDesc, k_norm), AT(LayerDesc, sinks), AT(LayerDesc, xielu), AT(LayerDesc, beside_factors), AT(LayerDesc, cos), AT(LayerDesc, sin), AT(LayerDesc, query_factors), AT(LayerDesc, query_weights),
        AT(LayerDesc, scale),
        AT(LayerDesc, softcap), AT(LayerDesc, k_scale), AT(LayerDesc, v_scale), AT(LayerDesc, residual_multiplier),
        AT(LayerDesc, attention_in_factor), AT(LayerDesc, attention_out_factor), AT(LayerDesc, beside_in_factor),
        AT(LayerDesc, beside_out_factor), AT(LayerDesc, output_factor), AT(LayerDesc, gate_factor), AT(LayerDesc, part_factor), AT(LayerDesc, window), AT(LayerDesc, chunked), AT(LayerDesc, rotary_dim),
        AT(LayerDesc, interleaved), NAMED(LayerDesc, heads, heads.count), NAMED(LayerDesc, kv_heads, heads.kv),
        NAMED(LayerDesc, head_dim, heads.dim), AT(LayerDesc, keys_are_values), AT(LayerDesc, norms_values), AT(LayerDesc, head_norm), AT(LayerDesc, parallel),
        AT(LayerDesc, page_group), AT(LayerDesc, page_layer), AT(LayerDesc, activation), AT(LayerDesc, product),
        NAMED(LayerDesc, taps, delta.conv), NAMED(LayerDesc, dt_bias, delta.dt_bias),
        NAMED(LayerDesc, a_log, delta.a_log), NAMED(LayerDesc, delta_norm, delta.norm),
        NAMED(LayerDesc, conv_bias, delta.conv_bias), NAMED(LayerDesc, d, delta.d), AT(LayerDesc, state_layer),
        AT(LayerDesc, experts), AT(LayerDesc, mixture_targets), AT(LayerDesc, experts_factor), AT(LayerDesc, latent),
    ALL(LatentDesc), AT(LatentDesc, heads), AT(LatentDesc, q_rank), AT(LatentDesc, kv_rank), AT(LatentDesc, key),
        AT(LatentDesc, rotated), AT(LatentDesc, value), AT(LatentDesc, rotary_dim), AT(LatentDesc, interleaved),
        AT(LatentDesc, page_group), AT(LatentDesc, module), AT(LatentDesc, eps), AT(LatentDesc, scale),
        AT(LatentDesc, q_norm), AT(LatentDesc, k_norm), AT(LatentDesc, cos), AT(LatentDesc, sin),
        AT(LatentDesc, query_factors), AT(LatentDesc, plane), AT(LatentDesc, kv_up), AT(LatentDesc, bias),
    ALL(ProductDesc), AT(ProductDesc, group), AT(ProductDesc, inputs), AT(ProductDesc, count), AT(ProductDesc, targets),
    ALL(ModelDesc), AT(ModelDesc, hidden), AT(ModelDesc, layers), AT(ModelDesc, vocab), AT(ModelDesc, block_tokens),
        AT(ModelDesc, page_groups), AT(ModelDesc, num_products),
        AT(ModelDesc, eps), AT(ModelDesc, centered), AT(ModelDesc, biased), AT(ModelDesc, embedding_multiplier), AT(ModelDesc, logits_scale),
        AT(ModelDesc, head_bias), AT(ModelDesc, embedding_norm),
        AT(ModelDesc, logits_softcap), AT(ModelDesc, layer), AT(ModelDesc, products), AT(ModelDesc, embed), AT(ModelDesc, lm_head),
        AT(ModelDesc, lm_head_integers),
        AT(ModelDesc, norm), AT(ModelDesc, arena), AT(ModelDesc, page_elems), AT(ModelDesc, page_bytes),
        AT(ModelDesc, float8_kv), AT(ModelDesc, output_gate), NAMED(ModelDesc, mixer, delta.mixer), NAMED(ModelDesc, k_heads, delta.k_heads), NAMED(ModelDesc, v_heads, delta.v_heads),
        NAMED(ModelDesc, k_dim, delta.k_dim), NAMED(ModelDesc, v_dim, delta.v_dim),
        NAMED(ModelDesc, conv_size, delta.conv_size), NAMED(ModelDesc, delta_eps, delta.eps), NAMED(ModelDesc, beta, delta.beta),
        NAMED(ModelDesc, dt_min, delta.dt_min), NAMED(ModelDesc, gates_norm, delta.gates_norm),
        NAMED(ModelDesc, group_ranks, delta.group_ranks), NAMED(ModelDesc, by_channel, delta.by_channel),
        AT(ModelDesc, convs_per_page), AT(ModelDesc, heads_per_page), AT(ModelDesc, conv_pages),
        AT(ModelDesc, most_drafts), AT(ModelDesc, drafts_per_page), AT(ModelDesc, draft_page),
        AT(ModelDesc, kv_copies), AT(ModelDesc, embed_module), AT(ModelDesc, head_module),
        AT(ModelDesc, embed_rows_module), AT(ModelDesc, head_rows_module), AT(ModelDesc, first_token),
    ALL(Segments), AT(Segments, count), AT(Segments, begin), AT(Segments, end), AT(Segments, adapters),
        AT(Segments, level), AT(Segments, vectors), AT(Segments, undoes),
    ALL(StepDesc), AT(StepDesc, tokens), AT(StepDesc, rows), AT(StepDesc, logits_wanted), AT(StepDesc, states_wanted),
        AT(StepDesc, logits_width),
        AT(StepDesc, token_ids), AT(StepDesc, positions), AT(StepDesc, page), AT(StepDesc, offset),
        AT(StepDesc, qo_indptr), AT(StepDesc, kv_lens), AT(StepDesc, page_table), AT(StepDesc, table_stride),
        AT(StepDesc, page_stride),
        AT(StepDesc, logit_tokens), AT(StepDesc, segments), AT(StepDesc, segment_ready), AT(StepDesc, segment_late),
        AT(StepDesc, max_stall_ns), AT(StepDesc, logits), AT(StepDesc, logit_rows), AT(StepDesc, best),
        AT(StepDesc, samples), AT(StepDesc, layer), AT(StepDesc, offloaded), AT(StepDesc, state_read), AT(StepDesc, state_written), AT(StepDesc, state_fresh),
        AT(StepDesc, state_accepted), AT(StepDesc, state_drafts), AT(StepDesc, state_stride), AT(StepDesc, model_segments), AT(StepDesc, model_ready), AT(StepDesc, model_late),
        AT(StepDesc, mixture), AT(StepDesc, mixture_ready), AT(StepDesc, mixture_late),
    ALL(OffloadDesc), AT(OffloadDesc, ranks), AT(OffloadDesc, count), AT(OffloadDesc, segment), AT(OffloadDesc, row),
        AT(OffloadDesc, share), AT(OffloadDesc, first_elem), AT(OffloadDesc, image_ready), AT(OffloadDesc, layers),
        AT(OffloadDesc, exchanges),
    ALL(OffloadWorkerDesc), AT(OffloadWorkerDesc, num_products), AT(OffloadWorkerDesc, products),
        AT(OffloadWorkerDesc, first), AT(OffloadWorkerDesc, last), AT(OffloadWorkerDesc, count), AT(OffloadWorkerDesc, page_elems),
        AT(OffloadWorkerDesc, row), AT(OffloadWorkerDesc, adapters), AT(OffloadWorkerDesc, images), AT(OffloadWorkerDesc, exchanges),
    ALL(MergeDesc), AT(MergeDesc, origin), AT(MergeDesc, integers), AT(MergeDesc, to), AT(MergeDesc, product), AT(MergeDesc, layer),
        AT(MergeDesc, parts), AT(MergeDesc, count),
    ALL(DeltaDesc), NAMED(DeltaDesc, mixer, shape.mixer), NAMED(DeltaDesc, k_heads, shape.k_heads), NAMED(DeltaDesc, v_heads, shape.v_heads),
        NAMED(DeltaDesc, k_dim, shape.k_dim), NAMED(DeltaDesc, v_dim, shape.v_dim),
        NAMED(DeltaDesc, conv_size, shape.conv_size), NAMED(DeltaDesc, eps, shape.eps), NAMED(DeltaDesc, beta, shape.beta),
        NAMED(DeltaDesc, dt_min, shape.dt_min), NAMED(DeltaDesc, gates_norm, shape.gates_norm),
        NAMED(DeltaDesc, group_ranks, shape.group_ranks), NAMED(DeltaDesc, by_channel, shape.by_channel),
        NAMED(DeltaDesc, taps, weights.conv), NAMED(DeltaDesc, dt_bias, weights.dt_bias),
        NAMED(DeltaDesc, a_log, weights.a_log), NAMED(DeltaDesc, norm, weights.norm), NAMED(DeltaDesc, conv_bias, weights.conv_bias),
        NAMED(DeltaDesc, d, weights.d), AT(DeltaDesc, rows),
        AT(DeltaDesc, qo_indptr), AT(DeltaDesc, begins), AT(DeltaDesc, accepted), AT(DeltaDesc, drafts),
        AT(DeltaDesc, most_drafts), AT(DeltaDesc, conv_in), AT(DeltaDesc, recurrent_in), AT(DeltaDesc, drafts_in),
        AT(DeltaDesc, conv_out), AT(DeltaDesc, recurrent_out), AT(DeltaDesc, drafts_out), AT(DeltaDesc, mixed),
        AT(DeltaDesc, out),
    ALL(ExpertMatrices), AT(ExpertMatrices, w), AT(ExpertMatrices, integers), AT(ExpertMatrices, bias),
    ALL(RoutingDesc), AT(RoutingDesc, correction), AT(RoutingDesc, per_token), AT(RoutingDesc, scoring),
        AT(RoutingDesc, renormalised), AT(RoutingDesc, groups), AT(RoutingDesc, kept_groups),
        AT(RoutingDesc, group_best), AT(RoutingDesc, epsilon), AT(RoutingDesc, factor), AT(RoutingDesc, jitter),
    ALL(MixtureDesc), AT(MixtureDesc, hidden), AT(MixtureDesc, experts), AT(MixtureDesc, size),
        AT(MixtureDesc, shared_size), AT(MixtureDesc, router), AT(MixtureDesc, router_bias), AT(MixtureDesc, routing),
        AT(MixtureDesc, activation), AT(MixtureDesc, alpha), AT(MixtureDesc, limit), AT(MixtureDesc, gate_up),
        AT(MixtureDesc, down), AT(MixtureDesc, shared_gate_up), AT(MixtureDesc, shared_down),
        AT(MixtureDesc, shared_gate), AT(MixtureDesc, of_inputs),
    ALL(MixtureStepDesc), AT(MixtureStepDesc, rows), AT(MixtureStepDesc, x), AT(MixtureStepDesc, y),
        AT(MixtureStepDesc, chosen), AT(MixtureStepDesc, weights), AT(MixtureStepDesc, lora), AT(MixtureStepDesc, lora_element),
    ALL(MixtureTargets), AT(MixtureTargets, count), AT(MixtureTargets, targets),
    ALL(MixtureLoraDesc), AT(MixtureLoraDesc, arena), AT(MixtureLoraDesc, page_elems),
        AT(MixtureLoraDesc, segments), AT(MixtureLoraDesc, experts), AT(MixtureLoraDesc, num_experts),
        AT(MixtureLoraDesc, layer), AT(MixtureLoraDesc, targets),
    ALL(Exchange), AT(Exchange, layer), AT(Exchange, product), AT(Exchange, active),
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

}  // namespace chorus
