"""The torch interpreter's ops: each runs the kernel that fits the device.

Tests: tests/core/test_families.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....ops.elementwise.elementwise import (
    add_layer_norm,
    add_rms_norm,
    gate_output,
    layer_norm,
    rms_norm,
    rotate,
    rotate_and_write,
    split_gates,
    split_gates_apart,
    split_gates_of_heads,
    with_normed_values,
    xielu,
)
from ....ops.elementwise.rotation import KvSlots
from ....ops.elementwise.sparse_gates import sparse_gates
from ..moe.experts import activated, mix_experts
from ..nvtx_spans import span
from ..specs.attention import OutputGate
from ..specs.norms import NormKind, NormSpec
from .builder import Kept
from .end_ops import Cap, Embed, EmbedMedia, JoinStreams, Logits, NormParts, PlaceImages, Select, SplitStreams
from .ops import (
    Activate,
    Add,
    AddMedia,
    AddToOthers,
    AllReduce,
    Attend,
    Concat,
    CorrectStreams,
    GateOutput,
    Gemm,
    Heads,
    LatentAttend,
    Latents,
    Mix,
    Moe,
    Norm,
    Op,
    PredictStreams,
    Scale,
    SparseGates,
    StreamFactors,
    Sum,
    TakeInput,
    TakeStream,
)
from .torch_ends import (
    cap,
    embed,
    embed_media,
    join_streams,
    logits,
    norm_parts,
    place_images,
    select,
    split_streams,
    take_input,
)
from .torch_gemm import gemm
from .torch_heads import attended_of, head_norms, query_growth, query_weights, scores_of
from .torch_latents import latent_attend, latents
from .torch_step import OpContext, Run, Step, reader
from .torch_streams import add_to_others, correct_streams, predict_streams, stream_factors, take_stream

#: Ops, each with the buffers that nothing reads after it.
Runs = list[tuple[Run, tuple[str, ...]]]

_SPLITS = {
    OutputGate.BESIDE_QUERIES: split_gates,
    OutputGate.APART: split_gates_apart,
    OutputGate.OF_HEADS: split_gates_of_heads,
}


def bind(op: Op, at: OpContext) -> Run:
    """What runs an op in its place."""
    return _RUNS[type(op)](op, at)


def run_ops(runs: Runs, step: Step) -> None:
    """Run ops. Buffers are dropped once they are read for the last time: what binds them holds their memory."""
    names = step.names
    for run, dead in runs:
        run(step)
        for name in dead:
            del names[name]


def within_span(name: str, runs: Runs) -> Run:
    """Ops as one, in a span."""

    def run(step: Step) -> None:
        with span(name):
            run_ops(runs, step)

    return run


def _norm(op: Norm, at: OpContext) -> Run:
    read, index, slot, out, added, norm = reader(op.x), at.index, op.weight, op.out, op.added, op.norm

    def run(step: Step) -> None:
        names = step.names
        y = None if added is None else names[added]
        names[out] = normed(read(names), step.layers[index][slot], norm, y)

    return run


def normed(x: torch.Tensor, weight: torch.Tensor, norm: NormSpec, added: torch.Tensor | None = None) -> torch.Tensor:
    """The norm of x `[tokens, hidden]`, to which `added` is added in place first."""
    match norm.kind:
        case NormKind.RMS:
            return rms_norm(x, weight, norm.eps) if added is None else add_rms_norm(added, x, weight, norm.eps)
        case NormKind.LAYER:
            return layer_norm(x, weight, norm.eps) if added is None else add_layer_norm(added, x, weight, norm.eps)
        case NormKind.BIASED_LAYER:
            return layer_norm(x if added is None else x.add_(added), weight[0], norm.eps, weight[1])


def _gate_output(op: GateOutput, _: OpContext) -> Run:
    def run(step: Step) -> None:
        names = step.names
        gates = names[op.gates]
        names[op.out] = gate_output(names[op.x], gates)

    return run


def _heads(op: Heads, at: OpContext) -> Run:
    mixer, read, model, kv = op.attention, reader(op.x), at.model, at.model.kv_index[at.index]
    norms, weights = head_norms(at.weights, mixer, op.norm, model), query_weights(at.weights, mixer)
    growth, eps, q_out = query_growth(mixer, model), op.norm.eps, Kept(op.q, (mixer.num_heads, mixer.query_dim))
    ones = torch.ones(mixer.head_dim, device=model.device) if mixer.value_norm else None
    split = None if mixer.output_gate is None else _SPLITS[mixer.output_gate]

    def run(step: Step) -> None:
        names, out = step.names, step.kept.get(q_out)
        qkv = read(names)
        with span("attn.rope"):
            if ones is not None and not mixer.shares_kv:
                copies = mixer.keys_are_values
                qkv = with_normed_values(qkv, mixer.kv_size, ones, eps, keys_are_values=copies)
            rotation = step.rotations[mixer.rope]
            if mixer.shares_kv:
                rows = qkv.view(-1, mixer.num_heads, mixer.head_dim)
                names[op.q] = rotate(rows, rotation, at.weights.get(op.q_norm), eps, out)
                return
            if split is not None and op.gates is not None:
                qkv, names[op.gates] = split(qkv, mixer.num_heads, mixer.head_dim)
            place = step.batch.page[model.page_groups[kv]], step.batch.offset
            slots = KvSlots(*model.arena.kv_layers[kv], *place, model.kv_scales[kv])
            q = rotate_and_write(qkv, rotation, norms, slots, out)
            if weights is not None:
                q.mul_(weights)
            if growth is not None:
                q.mul_(growth[step.batch.positions])
            names[op.q] = q

    return run


def _attend(op: Attend, at: OpContext) -> Run:
    kv, model = at.model.kv_index[at.index], at.model
    scores, kept = scores_of(op.attention, model.max_model_len), attended_of(op)

    def run(step: Step) -> None:
        with span("attn.run"):
            of_group, (k, v) = step.batch.attention.of(model.page_groups[kv]), model.arena.kv_layers[kv]
            q, out, scales = step.names[op.q], step.kept.get(kept), model.kv_scales[kv]
            sinks = at.weights.get(op.sinks)
            step.names[op.out] = of_group.run(q, k, v, out, scores, sinks=sinks, kv_scales=scales)

    return run


def _mix(op: Mix, at: OpContext) -> Run:
    read, index, kept, model = reader(op.x), at.index, Kept(op.out, (op.mixer.out_size,)), at.model

    def run(step: Step) -> None:
        states = step.states
        if states is None:
            raise RuntimeError(f"layer {index} has a recurrent mixer, and the step has no states for it")
        with span("recurrent.run"):
            y = states.mix(index, read(step.names), at.weights[op.weights], model.ranks)
        out = step.kept.get(kept)
        step.names[op.out] = y if out is None else out.copy_(y)

    return run


def _concat(op: Concat, _: OpContext) -> Run:
    reads = [reader(part) for part in op.parts]

    def run(step: Step) -> None:
        step.names[op.out] = torch.cat([read(step.names) for read in reads], 1)

    return run


def _activate(op: Activate, at: OpContext) -> Run:
    read, index, slot = reader(op.x), at.index, op.parameters

    def run(step: Step) -> None:
        x = read(step.names)
        if slot is not None:
            step.names[op.out] = xielu(x, step.layers[index][slot])
        else:
            step.names[op.out] = activated(x, op.activation)

    return run


def _sparse_gates(op: SparseGates, at: OpContext) -> Run:
    model = at.model

    def run(step: Step) -> None:
        step.names[op.out] = sparse_gates(step.names[op.x], op.sparsity, model.ranks)

    return run


def _moe(op: Moe, at: OpContext) -> Run:
    read, index, spec = reader(op.x), at.index, op.spec
    routed_of = None if op.routed is None else reader(op.routed)

    def run(step: Step) -> None:
        names, experts, lora = step.names, step.layers[index][op.experts], step.batch.lora
        added = None if lora is None else lora.mixture(index)
        routed = None if routed_of is None else routed_of(names)
        names[op.out] = mix_experts(read(names), experts, spec, added, routed)

    return run


def _add(op: Add, _: OpContext) -> Run:
    def run(step: Step) -> None:
        step.names[op.x].add_(step.names[op.y])

    return run


def _add_media(op: AddMedia, _: OpContext) -> Run:
    def run(step: Step) -> None:
        if (media := step.batch.media) is not None:
            x = step.names[op.x]
            x.index_add_(0, media.places.to(x.device), media.part(op.part, x.shape[1]).to(x.device, x.dtype))

    return run


def _sum(op: Sum, _: OpContext) -> Run:
    def run(step: Step) -> None:
        step.names[op.out] = step.names[op.x] + step.names[op.y]

    return run


def _scale(op: Scale, at: OpContext) -> Run:
    read, index, slot = reader(op.x), at.index, op.weight

    def run(step: Step) -> None:
        x = read(step.names)
        factor = op.factor if slot is None else step.layers[index][slot]
        if op.in_place:
            x.mul_(factor)
        else:
            step.names[op.out] = x * factor

    return run


def _all_reduce(op: AllReduce, at: OpContext) -> Run:
    model = at.model

    def run(step: Step) -> None:
        if model.ranks is not None:
            step.names[op.y] = model.ranks.add_up(step.names[op.y])

    return run


_RUNS: dict[type[Op], Callable[[Any, OpContext], Run]] = {
    Activate: _activate,
    Add: _add,
    AddMedia: _add_media,
    AddToOthers: add_to_others,
    AllReduce: _all_reduce,
    Attend: _attend,
    Cap: cap,
    Concat: _concat,
    CorrectStreams: correct_streams,
    Embed: embed,
    EmbedMedia: embed_media,
    GateOutput: _gate_output,
    Gemm: gemm,
    Heads: _heads,
    JoinStreams: join_streams,
    LatentAttend: latent_attend,
    Latents: latents,
    Logits: logits,
    Mix: _mix,
    Moe: _moe,
    Norm: _norm,
    NormParts: norm_parts,
    PlaceImages: place_images,
    PredictStreams: predict_streams,
    Scale: _scale,
    Select: select,
    SparseGates: _sparse_gates,
    SplitStreams: split_streams,
    StreamFactors: stream_factors,
    Sum: _sum,
    TakeInput: take_input,
    TakeStream: take_stream,
}
