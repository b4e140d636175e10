"""The ops of a mixture of attention heads in the torch interpreter.

Tests: tests/core/layers/test_query_experts.py
"""

from __future__ import annotations

from ..nvtx_spans import span
from .layer_program import Kept
from .query_ops import OutputsOfExperts, QueriesOfExperts
from .torch_step import OpContext, Run, Step, reader


def queries_of_experts(op: QueriesOfExperts, at: OpContext) -> Run:
    index, mixer, spec = at.index, op.attention, op.spec
    read, logits_of = reader(op.x), reader(op.logits)
    by_head = (spec.per_token, mixer.num_kv_heads, mixer.head_dim)
    chosen_out, weights_out = Kept(op.chosen, by_head[:1], is_index=True), Kept(op.weights, by_head[:1], is_wide=True)

    def run(step: Step) -> None:
        names, experts = step.names, step.layers[index][op.experts]
        with span("attn.queries"):
            found = experts.choose(logits_of(names).float().contiguous(), spec.routing)
            q = experts.queries_of(read(names), found.experts)
            names[op.out] = q.view(-1, *by_head).transpose(1, 2).flatten(1)
        chosen, weights = step.kept.get(chosen_out), step.kept.get(weights_out)
        names[op.chosen] = found.experts if chosen is None else chosen.copy_(found.experts)
        names[op.weights] = found.weights if weights is None else weights.copy_(found.weights)

    return run


def outputs_of_experts(op: OutputsOfExperts, at: OpContext) -> Run:
    index, mixer, spec = at.index, op.attention, op.spec
    by_head = (mixer.num_kv_heads, spec.per_token, mixer.head_dim)

    def run(step: Step) -> None:
        names, weights = step.names, step.layers[index]
        experts, bias = weights[op.experts], weights.get(op.bias)  # other ranks have no bias
        with span("attn.outputs"):
            rows = names[op.x].reshape(-1, *by_head).transpose(1, 2).flatten(2).flatten(0, 1)
            y = experts.outputs_of(rows, names[op.chosen].long(), names[op.weights])
            names[op.out] = y if bias is None else y + bias

    return run
