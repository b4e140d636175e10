"""Ops that most models have, in the torch interpreter: each runs the kernel that fits the device.

Tests: tests/core/test_families.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import mm
from torch.nn.functional import embedding, linear

from ....memory.pages.projections import LAYER_GROUPS
from ....ops.attention.relative import Relative
from ....ops.elementwise.elementwise import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    rms_norm,
    rotate,
    rotate_and_write,
    silu_and_mul,
    split_gates,
    split_gates_apart,
    split_gates_of_heads,
    with_normed_values,
    xielu,
)
from ....ops.elementwise.rotation import KvSlots
from ....ops.gemm import float8_rows
from ....ops.gemm.narrow_weights import NarrowWeight
from ....ops.gemm.packed_gemm import packed_linear
from ..batch import GemmBackend, GemmBackends, GemmKind
from ..lora.step_lora import ATTN_O, DOWN, GATE_UP, QKV
from ..moe.experts import activated
from ..nvtx_spans import span
from ..specs.attention import AttentionSpec, OutputGate
from ..specs.norms import NormKind, NormSpec
from ..weights.rounding_weight import RoundingWeight
from .end_ops import Embed, Logits, Rows, Select
from .layer_program import Kept
from .ops import Activate, Add, AllReduce, Attend, Gemm, Heads, Norm
from .torch_heads import attended_of, head_norms, query_growth, query_weights, scores_of
from .torch_step import Bound, OpContext, Run, Step, reader

if TYPE_CHECKING:
    from ....ops.lora.sgmv_triton import Shrunk

#: A weight of a GEMM, as a device or a CPU keeps it.
Weight = torch.Tensor | NarrowWeight | RoundingWeight

#: Ops, each with the buffers that nothing reads after it.
Runs = list[tuple[Run, tuple[str, ...]]]

_SPLITS = {
    OutputGate.BESIDE_QUERIES: split_gates,
    OutputGate.APART: split_gates_apart,
    OutputGate.OF_HEADS: split_gates_of_heads,
}


#: Spans of the groups of projections, with the base weights and with adapters.
_SPANS = {
    QKV: ("attn.qkv", "lora.qkv"),
    ATTN_O: ("attn.o", "lora.o"),
    GATE_UP: ("mlp.gate_up", "lora.gate_up"),
    DOWN: ("mlp.down", "lora.down"),
}


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


def norm(op: Norm, at: OpContext) -> Run:
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


def gemm(op: Gemm, at: OpContext) -> Run:
    """A GEMM with what adapters add, gated or not; in one launch but for shrink where the backend has that."""
    read, index, slot, bias_slot, out, silu = reader(op.x), at.index, op.weight, op.bias, op.out, op.silu
    group, offloads = int(op.group), op.group in LAYER_GROUPS
    base_name, lora_name = _SPANS.get(group, (op.group.name.lower(), f"lora.{op.group.name.lower()}"))

    def run(step: Step) -> None:
        names, weights, lora, shrunk = step.names, step.layers[index], step.batch.lora, None
        x, weight, bias = read(names), weights[slot], weights.get(bias_slot)
        backend = backend_for(step.batch.backends, weight, bias, silu=silu)
        if lora is not None:
            if offloads:
                lora.offload(group, x, index)
            if backend is GemmBackend.EXPANDED:
                with span(lora_name):
                    shrunk = lora.shrink(group, x, index)
        is_added = lora is None or shrunk is not None
        with span(base_name):
            y = multiply(backend, x, weight, bias, gate=silu and is_added, shrunk=shrunk)
        if lora is not None and shrunk is None:
            with span(lora_name):
                lora.add(group, y, x, index)
            y = silu_and_mul(y) if silu else y
        names[out] = y

    return run


def backend_for(
    backends: GemmBackends,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    silu: bool = False,
    is_head: bool = False,
) -> GemmBackend:
    """The backend of a GEMM, among those of a step."""
    if not backends:
        return GemmBackend.LIBRARY
    return backends.get(kind_of(weight, bias, silu=silu, is_head=is_head), GemmBackend.LIBRARY)


def kind_of(weight: Weight, bias: torch.Tensor | None = None, *, silu: bool = False, is_head: bool = False) -> GemmKind:
    """The kind of a GEMM with a weight `[outputs, inputs]`, or with those of experts `[experts, outputs, inputs]`."""
    weight = weight.weight if isinstance(weight, RoundingWeight) else weight
    form = str(weight.dtype).removeprefix("torch.")
    if isinstance(weight, NarrowWeight):
        name = "MXFP4" if weight.float4 else "FP8" if weight.float8 else f"int{weight.bits}"
        form = f"{name} in groups of {weight.group}"
        form += " with zeros" * (weight.zeros is not None) + ", rounds inputs" * weight.rounds_inputs
    *experts, outputs, inputs = weight.shape
    count, is_narrow = experts[0] if experts else 0, isinstance(weight, NarrowWeight)
    is_float4 = isinstance(weight, NarrowWeight) and weight.float4
    return GemmKind(outputs, inputs, form, bias is not None, silu, is_head, count, is_narrow, is_float4)


def multiply(
    backend: GemmBackend,
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    gate: bool = False,
    shrunk: Shrunk | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ weightᵀ + bias`. x: `[rows, in]`, weight: `[out, in]`; a narrow one is widened in memory for the
    library, and x is rounded for one that says so. gate: `silu(gate) · up` of the halves of that, the
    same bits as one after the other of the same way. shrunk: of adapters that are expanded in the product's launch.
    out: where the product is written, contiguous, in x's dtype; without a bias and a gate.
    """
    if isinstance(weight, RoundingWeight):
        x, weight = weight.inputs(x), weight.weight
    if isinstance(weight, NarrowWeight) and weight.rounds_inputs and backend is not GemmBackend.LIBRARY:
        x = float8_rows.rounded(x)
    if backend in (GemmBackend.SMALL, GemmBackend.EXPANDED, GemmBackend.SPLIT):
        from ....ops.gemm import small_gemm_triton, split_gemm_triton  # need triton

        if backend is GemmBackend.SPLIT and isinstance(weight, torch.Tensor):
            return split_gemm_triton.multiply(x, weight, bias)
        return small_gemm_triton.multiply(x, weight, bias, silu=gate, shrunk=shrunk, out=out)
    if backend is GemmBackend.SWAPPED and isinstance(weight, NarrowWeight):
        from ....ops.gemm import swapped_gemm_triton  # needs triton

        y = swapped_gemm_triton.multiply(x, weight, bias)
    else:
        y = _multiply_by_library(x, weight, bias, out)
    y = silu_and_mul(y) if gate else y
    return y if out is None or y is out else out.copy_(y)


def _multiply_by_library(
    x: torch.Tensor, weight: torch.Tensor | NarrowWeight, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """out: see `multiply`; left alone where the library can't write there."""
    if isinstance(weight, NarrowWeight):
        if weight.rounds_inputs:
            return float8_rows.multiply(x, weight, bias)
        weight = weight.dense()
    if weight.is_mkldnn:
        return packed_linear(x, weight, bias)
    return linear(x, weight, bias) if out is None else mm(x, weight.t(), out=out)


def _caches(mixer: AttentionSpec, model: Bound, kv: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Gives the cached keys and values of a layer, without an indexer's keys."""
    if mixer.block_indexer is None:
        return lambda: model.arena.kv_layers[kv]

    def own() -> tuple[torch.Tensor, torch.Tensor]:
        k, v = model.arena.kv_layers[kv]
        return k[..., : mixer.head_dim], v[..., : mixer.head_dim]

    return own


def heads(op: Heads, at: OpContext) -> Run:
    mixer, read, model, kv = op.attention, reader(op.x), at.model, at.model.kv_index[at.index]
    norms, weights = head_norms(at.weights, mixer, op.norm, model), query_weights(at.weights, mixer)
    growth, eps, q_out = query_growth(mixer, model), op.norm.eps, Kept(op.q, (mixer.num_heads, mixer.query_dim))
    ones = torch.ones(mixer.head_dim, device=model.device) if mixer.value_norm else None
    cache_of = _caches(mixer, model, kv)
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
            slots = KvSlots(*cache_of(), *place, model.kv_scales[kv])
            q = rotate_and_write(qkv, rotation, norms, slots, out)
            if weights is not None:
                q.mul_(weights)
            if growth is not None:
                q.mul_(growth[step.batch.positions])
            names[op.q] = q

    return run


def attend(op: Attend, at: OpContext) -> Run:
    kv, model = at.model.kv_index[at.index], at.model
    scores, kept = scores_of(op.attention, model.max_model_len), attended_of(op)
    cache_of, is_sparse = _caches(op.attention, model, kv), scores.top_k is not None

    def run(step: Step) -> None:
        with span("attn.run"):
            of_group, (k, v) = step.batch.attention.of(model.page_groups[kv]), cache_of()
            q, out, scales = step.names[op.q], step.kept.get(kept), model.kv_scales[kv]
            own = {"sinks": at.weights.get(op.sinks), "slopes": at.weights.get(op.slopes)}
            if is_sparse and op.chosen is not None:
                own["chosen"] = step.names[op.chosen]
            if op.relative is not None:
                states = step.names[op.relative].view(len(q), op.attention.num_heads, -1)
                own["relative"] = Relative(states, at.weights[op.profiles])
            step.names[op.out] = of_group.run(q, k, v, out, scores, kv_scales=scales, **own)

    return run


def activate(op: Activate, at: OpContext) -> Run:
    read, index, slot = reader(op.x), at.index, op.parameters

    def run(step: Step) -> None:
        x = read(step.names)
        if slot is not None:
            step.names[op.out] = xielu(x, step.layers[index][slot])
        else:
            step.names[op.out] = activated(x, op.activation)

    return run


def add(op: Add, _: OpContext) -> Run:
    def run(step: Step) -> None:
        step.names[op.x].add_(step.names[op.y])

    return run


def all_reduce(op: AllReduce, at: OpContext) -> Run:
    model = at.model

    def run(step: Step) -> None:
        if model.ranks is not None:
            step.names[op.y] = model.ranks.add_up(step.names[op.y])

    return run


def embed(op: Embed, at: OpContext) -> Run:
    index, model = at.index, at.model

    def run(step: Step) -> None:
        table, token_ids, lora = step.layers[index][op.table], step.batch.token_ids, step.batch.lora
        known = token_ids if lora is None else lora.known(token_ids)
        if op.first_from is not None:
            known = known.where(known < op.first_from, 0)
        rows = embedding(known, table)
        if lora is not None and op.adapted:
            lora.embed(rows, token_ids)
        if op.factor != 1.0:
            rows = rows * float(torch.tensor(op.factor, dtype=rows.dtype))
        step.names[op.out] = rows.to(model.dtype)

    return run


def select(op: Select, _: OpContext) -> Run:
    def run(step: Step) -> None:
        tokens = step.batch.logit_tokens if op.rows is Rows.LOGITS else step.batch.kept_tokens
        if tokens is not None:  # else all tokens have logits
            step.names |= {each: step.names[each][tokens] for each in op.parts}

    return run


def logits(op: Logits, at: OpContext) -> Run:
    index, model = at.index, at.model

    def run(step: Step) -> None:
        names, weights = step.names, step.layers[index]
        x, weight, memory = names[op.x], weights[op.weight], names.get(op.out)
        backend = backend_for(step.batch.backends, weight, is_head=True)
        if memory is not None and memory.dtype == x.dtype and step.added_logits is None:
            names[op.out] = multiply(backend, x, weight, out=memory)  # nothing is added: see `logits_dtype`
            return
        found = multiply(backend, x, weight)
        is_wide = memory is not None and memory.dtype == torch.float32
        found = memory.copy_(found) if memory is not None and is_wide else found.float()
        if step.added_logits is not None:
            ranks = model.ranks
            step.added_logits(found, x, 0 if ranks is None else op.vocab * ranks.rank // ranks.size)
        if op.bias is not None:
            found.add_(weights[op.bias])
        names[op.out] = found

    return run
