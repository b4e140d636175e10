"""Says which function runs each kind of op in the torch interpreter.

Tests: tests/core/test_families.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import (
    end_ops,
    factor_ops,
    gated_ops,
    hyper_ops,
    indexer_ops,
    inkling_ops,
    ops,
    query_ops,
    stream_ops,
    torch_ends,
    torch_factors,
    torch_gated,
    torch_ops,
    torch_other_ops,
)
from .ops import Op
from .torch_hyper import connect_streams, copy_to_streams, give_to_streams, sum_streams
from .torch_indexer import choose, choose_blocks, index, index_blocks
from .torch_latents import latent_attend, latents
from .torch_queries import outputs_of_experts, queries_of_experts
from .torch_relative import convolve_stream, moe_with_sinks, take_relative
from .torch_step import OpContext, Run
from .torch_streams import add_to_others, correct_streams, predict_streams, stream_factors, take_stream


def bind(op: Op, at: OpContext) -> Run:
    """What runs an op in its place."""
    return _RUNS[type(op)](op, at)


_RUNS: dict[type[Op], Callable[[Any, OpContext], Run]] = {
    ops.Activate: torch_ops.activate,
    ops.Add: torch_ops.add,
    ops.AddMedia: torch_other_ops.add_media,
    stream_ops.AddToOthers: add_to_others,
    ops.AllReduce: torch_ops.all_reduce,
    ops.Attend: torch_ops.attend,
    indexer_ops.Choose: choose,
    indexer_ops.ChooseBlocks: choose_blocks,
    ops.Clip: torch_other_ops.clip,
    ops.Concat: torch_other_ops.concat,
    stream_ops.CorrectStreams: correct_streams,
    ops.GateOutput: torch_other_ops.gate_output,
    ops.Gemm: torch_ops.gemm,
    ops.GrowHeads: torch_other_ops.grow_heads,
    ops.Heads: torch_ops.heads,
    indexer_ops.Index: index,
    indexer_ops.IndexBlocks: index_blocks,
    ops.LatentAttend: latent_attend,
    ops.Latents: latents,
    ops.Mix: torch_other_ops.mix,
    ops.Moe: torch_other_ops.moe,
    ops.SharedExpert: torch_other_ops.shared_expert,
    ops.Norm: torch_ops.norm,
    stream_ops.PredictStreams: predict_streams,
    ops.Replace: torch_other_ops.replace,
    ops.ResizeHeads: torch_other_ops.resize_heads,
    ops.Scale: torch_other_ops.scale,
    ops.SparseGates: torch_other_ops.sparse_gates,
    stream_ops.StreamFactors: stream_factors,
    ops.SubtractHeads: torch_other_ops.subtract_heads,
    ops.Sum: torch_other_ops.plus,
    ops.TakeGates: torch_other_ops.take_gates,
    ops.TakeInput: torch_ends.take_input,
    stream_ops.TakeStream: take_stream,
    factor_ops.AddGated: torch_factors.add_gated,
    factor_ops.NormHeads: torch_factors.norm_heads,
    factor_ops.NormScaled: torch_factors.norm_scaled,
    gated_ops.AddToStreams: torch_gated.add_to_streams,
    gated_ops.GateLookup: torch_gated.gate_lookup,
    gated_ops.LookUp: torch_gated.look_up,
    gated_ops.MeanOfGated: torch_gated.mean_of_gated,
    gated_ops.NormStreams: torch_gated.norm_streams,
    gated_ops.StreamNumbers: torch_gated.stream_numbers,
    factor_ops.AddScaled: torch_factors.add_scaled,
    factor_ops.CarryRouted: torch_factors.carry_routed,
    factor_ops.ScaleEmbeddings: torch_factors.scale_embeddings,
    end_ops.AddPositions: torch_ends.add_positions,
    end_ops.Cap: torch_ends.cap,
    end_ops.Embed: torch_ops.embed,
    end_ops.EmbedMedia: torch_ends.embed_media,
    end_ops.JoinStreams: torch_ends.join_streams,
    end_ops.KeepEmbeddings: torch_ends.keep_embeddings,
    end_ops.Logits: torch_ops.logits,
    end_ops.NormParts: torch_ends.norm_parts,
    end_ops.PlaceImages: torch_ends.place_images,
    end_ops.Select: torch_ops.select,
    end_ops.SplitStreams: torch_ends.split_streams,
    hyper_ops.ConnectStreams: connect_streams,
    hyper_ops.CopyToStreams: copy_to_streams,
    hyper_ops.GiveToStreams: give_to_streams,
    hyper_ops.SumStreams: sum_streams,
    query_ops.OutputsOfExperts: outputs_of_experts,
    query_ops.QueriesOfExperts: queries_of_experts,
    inkling_ops.ConvolveStream: convolve_stream,
    inkling_ops.TakeRelative: take_relative,
    inkling_ops.MoeWithSinks: moe_with_sinks,
}
