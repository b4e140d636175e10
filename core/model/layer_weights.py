"""Weights of a decoder layer.

Tests: tests/core/model/test_weight_loader.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...memory.pages.projections import LAYER_GROUPS, Group
from ...ops.recurrent import RecurrentWeights
from .experts import ExpertWeights

#: Names of a layer's matrices in `LayerWeights`, in the order of the groups of projections.
MATRICES = ("qkv", "o", "gate_up", "down")

#: Of every group whose matrix adapters may be merged into. Each has a field for its bias, `…_bias`, too, which is the
#: adapter's in merged weights.
MERGED_MATRICES = {
    **{int(group): name for group, name in zip(LAYER_GROUPS, MATRICES, strict=True)},
    int(Group.QUERY_UP): "q_up",
    int(Group.KV_UP): "kv_up",
    int(Group.BESIDE_IN): "beside_in",
    int(Group.BESIDE_OUT): "beside_out",
    int(Group.DECAY_UP): "decay_up",
    int(Group.OUTPUT_GATE_UP): "output_gate_up",
}


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. Biases are as long as their projection has rows. None: the layer has none."""

    qkv: torch.Tensor
    """The mixer's input: attention's `[q + 2·kv, hidden]`, with gates where q_proj has them, a recurrent mixer's
    `[in, hidden]`, or latent attention's `[q_rank + kv_rank + rotated, hidden]`.
    """

    o: torch.Tensor
    """`[hidden, in]`: the mixer's output."""

    gate_up: torch.Tensor
    """`[2·ffn, hidden]`, without a gate `[ffn, hidden]`; no elements where the layer has experts instead."""

    down: torch.Tensor
    """`[hidden, ffn]`, likewise."""

    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    attention_norm: torch.Tensor | None = None
    """`[hidden]`, of attention's input; where the parts are parallel, of the feed-forward part's, too. A norm with a
    bias has both: `[2, hidden]`.
    """

    attention_out_norm: torch.Tensor | None = None
    mlp_norm: torch.Tensor | None = None
    mlp_out_norm: torch.Tensor | None = None

    dense_out_norm: torch.Tensor | None = None
    """`[hidden]`, of the gated part's output in a layer that has experts, too (Gemma 4)."""

    experts_norm: torch.Tensor | None = None
    """Likewise, of the input of these experts."""

    experts_out_norm: torch.Tensor | None = None
    router_norm: torch.Tensor | None = None
    """Likewise, of the input of their router."""

    q_norm: torch.Tensor | None = None
    """`[head_dim]`, or of all heads together; of latents `[q_rank]`."""

    k_norm: torch.Tensor | None = None
    """Likewise; of latents `[kv_rank]`."""

    q_up: torch.Tensor | None = None
    """`[heads · (key + rotated), q_rank]`: queries of latents."""

    q_up_bias: torch.Tensor | None = None

    kv_up: torch.Tensor | None = None
    """`[heads · (key + value), kv_rank]`: keys and values of latents, which are never multiplied as one matrix. It is
    never narrow; the native decoder packs it by head.
    """

    kv_up_bias: torch.Tensor | None = None

    sinks: torch.Tensor | None = None
    """`[heads]`: see `AttentionSpec.sinks`."""

    scalar: torch.Tensor | None = None
    """`[1]`: see `LayerSpec.scaled`."""

    input_gate: torch.Tensor | None = None
    """`[size, hidden]`: see `LayerInputSpec`."""

    input_projection: torch.Tensor | None = None
    """`[hidden, size]`."""

    input_norm: torch.Tensor | None = None
    """`[hidden]`."""

    beside_in: torch.Tensor | None = None
    """`[in, hidden]`: the input of a recurrent mixer beside attention."""

    beside_in_bias: torch.Tensor | None = None

    beside_factors: torch.Tensor | None = None
    """`[in]`: see `MixerBeside.section_factors`."""

    beside_out: torch.Tensor | None = None
    """`[hidden, out]`: that mixer's output."""

    beside_out_bias: torch.Tensor | None = None

    low_rank_down: torch.Tensor | None = None
    """`[rank, hidden]`: see `StreamsSpec.rank`."""

    low_rank_up: torch.Tensor | None = None
    """`[hidden, rank]`."""

    low_rank_norm: torch.Tensor | None = None
    """`[hidden]`."""

    stream_router: torch.Tensor | None = None
    """`[streams, hidden]`: gives the numbers of which `stream_prediction` and `stream_correction` make factors."""

    stream_router_norm: torch.Tensor | None = None
    """`[hidden]`, of its input, with the factor 1 / hidden."""

    stream_prediction: torch.Tensor | None = None
    """`[streams · streams, streams]`: what a prediction of each stream takes of each."""

    stream_correction: torch.Tensor | None = None
    """`[streams, streams]`: what each stream takes of the active one's change."""

    stream_scale: torch.Tensor | None = None
    """`[hidden]`: see `StreamsSpec.scaled`."""

    recurrent: RecurrentWeights | None = None
    """The rest of a layer with a recurrent mixer."""

    experts: ExpertWeights | None = None
    """The mixture of a layer that has experts."""

    xielu: torch.Tensor | None = None
    """`[4]` float32: see `ops.elementwise.xielu`."""

    decay_up: torch.Tensor | None = None
    """`[decays, rank]`: a recurrent mixer's decays, of their latents; see `RecurrentSpec.input_parts`."""

    decay_up_bias: torch.Tensor | None = None

    output_gate_up: torch.Tensor | None = None
    """`[out, rank]`: likewise, the gates of its output."""

    output_gate_up_bias: torch.Tensor | None = None
