"""A mixture of experts with sinks: further ones that every token goes to, by weights of the same router.

Tests: tests/core/layers/test_sink_experts.py
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from .....ops.elementwise.activations import sigmoid
from ...moe.experts import ExpertChoice, ExpertWeights
from ...moe.mixture_launches import MixtureLaunches
from ...moe.mixture_lora import MixtureLora
from .experts import SinkExperts


def mix_with_sinks(
    x: torch.Tensor,
    experts: ExpertWeights,
    sinks: ExpertWeights,
    spec: SinkExperts,
    lora: MixtureLora | MixtureLaunches | None = None,
) -> torch.Tensor:
    """The output of a mixture for rows `[rows, hidden]`. lora: the step's adapters, which sinks have none of."""
    chosen, weights = choose_with_sinks(x, experts, sinks, spec)
    every = torch.arange(spec.sinks, device=x.device).expand(len(x), -1).contiguous()
    outputs = experts.outputs(x, chosen, spec, lora).view(*chosen.shape, -1)
    further = sinks.outputs(x, every, spec.of_sinks).view(*every.shape, -1)
    return experts.add_up(torch.cat((outputs, further), 1), weights, None)


def choose_with_sinks(x: torch.Tensor, experts: ExpertWeights, sinks: ExpertWeights, spec: SinkExperts) -> ExpertChoice:
    """The experts of rows, and the weights of them and of all sinks: sigmoids, divided by their sum."""
    routing, logits = spec.routing, experts.logits(x)
    scores = sigmoid(logits)
    ranked = scores if experts.correction is None else scores + experts.correction
    chosen = ranked.topk(routing.per_token, dim=-1).indices
    every = logsigmoid(torch.cat((logits.gather(1, chosen), sinks.logits(x)), 1))
    weights = torch.exp(every - every.logsumexp(-1, keepdim=True)) * routing.factor
    return ExpertChoice(chosen, weights if experts.scale is None else weights * experts.scale)
