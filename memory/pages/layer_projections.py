"""The projections of each kind of layer, and of the model: rows of the table in `projections`.

Pure data, like `layout`. Tests: tests/memory/pages/test_projections.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from .projections import NORM_GATES, STREAM_GATES, Group, Projection, Projections

#: The groups of a mixer's projections where it is beside another one.
_BESIDE = {Group.MIXER_IN: Group.BESIDE_IN, Group.MIXER_OUT: Group.BESIDE_OUT}


def attention_projections(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    gate: bool = False,
    kept: Sequence[int] | None = None,
    form: str = "",
) -> tuple[Projection, ...]:
    """Those of full attention. gate: q_proj gives each head a query and then a gate. kept: elements of a head's key and
    of its value; one number: k_proj gives both, none: they are another layer's; None: as of its query. form: see
    `Projection`.
    """
    q, kept = heads * head_dim, (head_dim, head_dim) if kept is None else kept
    value = kept[1] if len(kept) > 1 else head_dim
    names = zip(("self_attn.k_proj", "self_attn.v_proj"), kept, strict=False)
    return (
        Projection("self_attn.q_proj", Group.MIXER_IN, hidden, q * (1 + gate), heads, form=form),
        *(Projection(name, Group.MIXER_IN, hidden, kv_heads * width, kv_heads, form=form) for name, width in names),
        Projection("self_attn.o_proj", Group.MIXER_OUT, heads * value, hidden, heads, form=form),
    )


_OF_THE_NEXT = "would give a first token its bias for the one before"
_BESIDE_SINKS = "has sinks beside it, so that a bias of keys would change how much goes to them"


def convolved_projections(hidden: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Projection, ...]:
    """The inputs of attention behind convolutions of queries and keys. The first half of all heads' values is a token's
    own, and the second that of the token before, so that TP ranks can't share them.
    """
    widths = {"q_proj": heads, "k_proj": kv_heads}
    half = kv_heads * head_dim // 2
    return (
        *(Projection(f"self_attn.{each}", Group.MIXER_IN, hidden, n * head_dim, n) for each, n in widths.items()),
        Projection("self_attn.v_proj_current", Group.MIXER_IN, hidden, half, 1),
        Projection("self_attn.v_proj_delayed", Group.MIXER_IN, hidden, half, 1, why_no_bias=_OF_THE_NEXT),
    )


def router_projections(hidden: int, size: int) -> tuple[Projection, ...]:
    """Those of a small network of this width before a mixture's router."""
    return (
        Projection("mlp.router.down_proj", Group.ROUTER_DOWN, hidden, size, 1),
        Projection("mlp.router.fc1", Group.ROUTER_FIRST, size, size, 1),
        Projection("mlp.router.fc2", Group.ROUTER_SECOND, size, size, 1),
    )


def query_expert_projections(hidden: int, kv_heads: int, head_dim: int, experts: int) -> tuple[Projection, ...]:
    """Those of attention with experts of queries and of outputs, whose matrices no adapter changes: keys and values,
    and the router, which every TP rank has.
    """
    names = ("self_attn.k_proj", "self_attn.v_proj")
    return (
        *(Projection(name, Group.MIXER_IN, hidden, kv_heads * head_dim, kv_heads) for name in names),
        Projection("self_attn.query_router", Group.MIXER_IN, hidden, experts, 1),
    )


class LatentWidths(NamedTuple):
    """Widths of latent attention, for its projections."""

    q_rank: int
    """Of the queries' latents; 0 where queries have none."""

    kv_rank: int
    """Of the latents of keys and values together."""

    key: int
    """Elements of a head's key that are not rotated."""

    rotated: int
    value: int
    both: bool = False
    """Queries are made of their latents with and without a norm."""

    gate: int = 0
    """Elements of the gate that each head has behind its query."""

    input_gate: int = 0
    """Elements of the gate that the layer's input gives each head."""

    form: str = ""
    """See `Projection`."""

    is_shared: bool = False
    """Latents of keys and values are another layer's."""

    bias_factor: float = 1.0
    """Of q_b_proj: see `Projection`."""

    sinks: bool = False
    """Attention weights of a token don't add up to one."""


def latent_projections(hidden: int, heads: int, widths: LatentWidths) -> tuple[Projection, ...]:
    """Those of latent attention. What makes latents is of all heads, and every TP rank has it whole."""
    q_rank, kv_rank, key, rotated, value, both, gate, input_gate, form, is_shared, factor, sinks = widths
    q, why_no_bias = heads * (key + rotated + gate), _BESIDE_SINKS if sinks else ""
    query = (
        (
            Projection("self_attn.q_a_proj", Group.MIXER_IN, hidden, q_rank, 1, form=form),
            Projection(
                "self_attn.q_b_proj", Group.QUERY_UP, q_rank * (1 + both), q, heads, form=form, bias_factor=factor
            ),
        )
        if q_rank
        else (Projection("self_attn.q_proj", Group.MIXER_IN, hidden, q, heads, form=form),)
    )
    gates = Projection("self_attn.g_proj", Group.MIXER_IN, hidden, heads * input_gate, heads, form=form)
    kept = Projection("self_attn.kv_a_proj_with_mqa", Group.MIXER_IN, hidden, kv_rank + rotated, 1, form=form)
    return (
        *query,
        *((kept,) * (not is_shared)),
        *((gates,) * (input_gate > 0)),
        Projection(
            "self_attn.kv_b_proj",
            Group.KV_UP,
            kv_rank,
            heads * (key + value),
            heads,
            form=form,
            why_no_bias=why_no_bias,
        ),
        Projection("self_attn.o_proj", Group.MIXER_OUT, heads * value, hidden, heads, form=form),
    )


def indexer_projections(
    hidden: int, inputs: int, heads: int, key: int, *, apart: bool = False
) -> tuple[Projection, ...]:
    """Those of the indexer of sparse attention, next to `latent_projections`. inputs: width of what makes its queries;
    key: elements of each of its heads' queries, and of the key that they share. apart: attention's queries have another
    input. Every TP rank has it whole, so that all choose the same tokens.
    """
    return (
        Projection("self_attn.indexer.wq_b", Group.INDEX_UP if apart else Group.QUERY_UP, inputs, heads * key, 1),
        Projection("self_attn.indexer.wk", Group.MIXER_IN, hidden, key, 1),
        Projection("self_attn.indexer.weights_proj", Group.MIXER_IN, hidden, heads, 1),
    )


def mean_indexer_projections(hidden: int, heads: int, key: int) -> tuple[Projection, ...]:
    """That of the indexer of blocks with one key for all queries, which gives queries and then keys: see
    `block_indexer_projections`. Every TP rank has it whole.
    """
    return (Projection("self_attn.indexer.index_qk_proj", Group.MIXER_IN, hidden, (heads + 1) * key, 1),)


def stream_gate_projections(hidden: int, count: int, rank: int, part: str) -> tuple[Projection, ...]:
    """Those by which a part takes of so many streams and gives to them; behind all layers nothing is given. part: see
    `STREAM_GATES`. rank: width between the two matrices of gates.
    """
    down, up = STREAM_GATES[part]
    width = count * hidden
    given = (Projection(f"streams.{part}_give", down, width, count, 1),) if part != "join" else ()
    return (
        Projection(f"streams.{part}_down", down, width, rank, 1),
        *given,
        Projection(f"streams.{part}_up", up, rank, width, 1),
    )


def lookup_projections(width: int, channels: int, hidden: int) -> tuple[Projection, ...]:
    """Those of rows of a table, `width` elements of a token. channels: of the keys of all streams."""
    return (
        Projection("ple.key_proj", Group.LOOKUP_IN, width, channels, 1),
        Projection("ple.value_proj", Group.LOOKUP_IN, width, hidden, 1),
    )


def block_indexer_projections(hidden: int, heads: int, key: int) -> tuple[Projection, ...]:
    """Those of the indexer of blocks, next to `attention_projections`. key: elements of each of its heads' queries, and
    of the key that they share, which every TP rank has.
    """
    return (
        Projection("self_attn.indexer.q_proj", Group.MIXER_IN, hidden, heads * key, heads),
        Projection("self_attn.indexer.k_proj", Group.MIXER_IN, hidden, key, 1),
    )


def linear_projections(
    hidden: int, key: int, value: int, k_heads: int, v_heads: int, *, parted: bool = False
) -> tuple[Projection, ...]:
    """Those of Gated DeltaNet. key, value: widths of all heads of keys, and of values. parted: queries, keys and values
    have one each.

    TP ranks share heads of keys, each with the heads of values that it serves.
    """
    widths = {"q": key, "k": key, "v": value}
    joined = Projection(
        "linear_attn.in_proj_qkv", Group.MIXER_IN, hidden, 2 * key + value, k_heads, sections=(key, key, value)
    )
    each = (
        Projection(f"linear_attn.{name}_proj", Group.MIXER_IN, hidden, width, k_heads, form="linear")
        for name, width in widths.items()
    )
    return (
        *(each if parted else (joined,)),
        Projection("linear_attn.in_proj_z", Group.MIXER_IN, hidden, value, k_heads),
        Projection("linear_attn.in_proj_b", Group.MIXER_IN, hidden, v_heads, k_heads),
        Projection("linear_attn.in_proj_a", Group.MIXER_IN, hidden, v_heads, k_heads),
        Projection("linear_attn.out_proj", Group.MIXER_OUT, value, hidden, k_heads),
    )


def channel_projections(hidden: int, key: int, value: int, heads: int, rank: int) -> tuple[Projection, ...]:
    """Those of Gated DeltaNet with a decay for each channel of keys. key, value: see `linear_projections`; rank: width
    of the latents of decays, and of those of gates, 0 where both are made without latents. What makes these latents is
    of all heads, and every TP rank has it whole.
    """
    linear = "linear"
    inputs = (
        Projection("self_attn.q_proj", Group.MIXER_IN, hidden, key, heads, form=linear),
        Projection("self_attn.k_proj", Group.MIXER_IN, hidden, key, heads, form=linear),
        Projection("self_attn.v_proj", Group.MIXER_IN, hidden, value, heads, form=linear),
    )
    beta = Projection("self_attn.b_proj", Group.MIXER_IN, hidden, heads, heads)
    output = Projection("self_attn.o_proj", Group.MIXER_OUT, value, hidden, heads, form=linear)
    if not rank:
        gates = Projection("self_attn.g_proj", Group.MIXER_IN, hidden, value, heads, form=linear)
        return (*inputs, gates, beta, Projection("self_attn.f_proj", Group.MIXER_IN, hidden, key, heads), output)
    return (
        *inputs,
        Projection("self_attn.g_a_proj", Group.MIXER_IN, hidden, rank, 1),
        beta,
        Projection("self_attn.f_a_proj", Group.MIXER_IN, hidden, rank, 1),
        Projection("self_attn.f_b_proj", Group.DECAY_UP, rank, key, heads),
        Projection("self_attn.g_b_proj", Group.OUTPUT_GATE_UP, rank, value, heads),
        output,
    )


def conv_projections(hidden: int, size: int) -> tuple[Projection, ...]:
    """Those of a gated short convolution. size: its channels, which TP ranks share."""
    return (
        Projection("conv.in_proj", Group.MIXER_IN, hidden, 3 * size, size, sections=(size, size, size)),
        Projection("conv.out_proj", Group.MIXER_OUT, size, hidden, size),
    )


def mamba_projections(hidden: int, heads: int, head_dim: int, groups: int, state: int) -> tuple[Projection, ...]:
    """Those of Mamba 2. state: width of B and C of a group. TP ranks share heads; with more ranks than groups, several
    have the same B and C.
    """
    size, shared = heads * head_dim, groups * state
    sections, units = (size, size, shared, shared, heads), (heads, heads, groups, groups, heads)
    outputs = sum(sections)
    return (
        Projection("mamba.in_proj", Group.MIXER_IN, hidden, outputs, heads, sections=sections, section_units=units),
        Projection("mamba.out_proj", Group.MIXER_OUT, size, hidden, heads),
    )


def scan_projections(hidden: int, size: int, rank: int, state: int, blocks: int) -> tuple[Projection, ...]:
    """Those of Mamba 1. size: its channels, in blocks that TP ranks share; rank: of steps; state: width of B and C."""
    return (
        Projection("mamba.in_proj", Group.MIXER_IN, hidden, 2 * size, blocks, sections=(size, size)),
        Projection("mamba.x_proj", Group.SCAN_IN, size, rank + 2 * state, blocks),
        Projection("mamba.dt_proj", Group.DECAY_UP, rank, size, blocks, is_bypassed=True),
        Projection("mamba.out_proj", Group.MIXER_OUT, size, hidden, blocks),
    )


def headed_scan_projections(hidden: int, size: int, heads: int) -> tuple[Projection, ...]:
    """Those of Mamba 1 by heads, of `size` channels: x and gates alternate in the outputs of the first."""
    return (
        Projection("mamba.in_proj", Group.MIXER_IN, hidden, 2 * size, heads),
        Projection("mamba.out_proj", Group.MIXER_OUT, size, hidden, heads),
    )


def unit_projections(hidden: int, size: int, heads: int) -> tuple[Projection, ...]:
    """Those of gated linear recurrent units: of their gates, of their inputs, and of their outputs."""
    return (
        Projection("temporal.linear_y", Group.MIXER_IN, hidden, size, heads),
        Projection("temporal.linear_x", Group.MIXER_IN, hidden, size, heads),
        Projection("temporal.linear_out", Group.MIXER_OUT, size, hidden, heads),
    )


def projections_beside(projections: Sequence[Projection]) -> tuple[Projection, ...]:
    """Those of a recurrent mixer, where it is beside attention. Each mixer has an input of its own."""
    return tuple(replace(each, group=_BESIDE[each.group]) for each in projections)


def input_projections(hidden: int, size: int) -> tuple[Projection, ...]:
    """Those of a layer's further input."""
    return (
        Projection("per_layer_input_gate", Group.INPUT_GATE, hidden, size, 1),
        Projection("per_layer_projection", Group.INPUT_PROJECTION, size, hidden, 1),
    )


def low_rank_projections(hidden: int, rank: int) -> tuple[Projection, ...]:
    """Those of two small matrices beside a mixer, which LAuReL has."""
    return (
        Projection("laurel.linear_left", Group.LOW_RANK_DOWN, hidden, rank, 1),
        Projection("laurel.linear_right", Group.LOW_RANK_UP, rank, hidden, 1),
    )


def norm_gate_projections(hidden: int, rank: int, norms: Sequence[str]) -> tuple[Projection, ...]:
    """Those of the gates of norms' outputs, by the names of these norms. rank: width between the two matrices."""
    return tuple(
        each
        for norm in norms
        for down, up in (NORM_GATES[norm],)
        for each in (
            Projection(f"norm_gates.{norm}.fc1", down, hidden, rank, 1),
            Projection(f"norm_gates.{norm}.fc2", up, rank, hidden, 1),
        )
    )


def place_projections(
    hidden: int, widths: Sequence[tuple[str, int, int]], heads_rank: int, ffn: int, mlp_rank: int
) -> tuple[Projection, ...]:
    """A layer's own matrices beside a block that layers share. widths: of queries, keys and values: the letter, the
    width of all heads, and their number. heads_rank, mlp_rank: inner widths of the pairs of these, and of that of gate
    and up, whose width is ffn; 0: there are none. The block's input is twice as wide as the residual stream.
    """
    ups = (Group.PLACE_QUERY_UP, Group.PLACE_KEY_UP, Group.PLACE_VALUE_UP)
    found = []
    if heads_rank:
        down = Group.PLACE_HEADS_DOWN
        found += [Projection(f"self_attn.{each}_place_down", down, 2 * hidden, heads_rank, 1) for each, _, _ in widths]
        found += [
            Projection(f"self_attn.{each}_place_up", group, heads_rank, width, heads)
            for group, (each, width, heads) in zip(ups, widths, strict=True)
        ]
    if mlp_rank:
        found += [
            Projection("mlp.place_down", Group.PLACE_MLP_DOWN, hidden, mlp_rank, 1),
            Projection("mlp.place_up", Group.PLACE_MLP_UP, mlp_rank, 2 * ffn, ffn, sections=(ffn, ffn)),
        ]
    return (*found, Projection("linear", Group.PLACE_OUT, hidden, hidden, 1))


def model_projections(vocab: int, hidden: int, head: int, inputs: int = 0) -> tuple[Projection, ...]:
    """The token embeddings and the output projection. head: how many tokens the latter gives logits of. inputs: width
    of the further inputs of all layers.
    """
    own = (Projection("model.per_layer_model_projection", Group.INPUTS, hidden, inputs, 1),) if inputs else ()
    return (
        Projection("model.embed_tokens", Group.EMBEDDING, vocab, hidden, 1),
        Projection("lm_head", Group.HEAD, hidden, head, 1),
        Projection("model.embed_tokens_rows", Group.EMBEDDING_ROWS, hidden, 0, 1),
        Projection("lm_head_rows", Group.HEAD_ROWS, hidden, 0, 1),
        *own,
    )


def gated_projections(hidden: int, size: int, form: str = "") -> tuple[Projection, ...]:
    """Those of a gated feed-forward part. form: see `Projection`."""
    return (
        Projection("mlp.gate_proj", Group.GATE_UP, hidden, size, size, form=form),
        Projection("mlp.up_proj", Group.GATE_UP, hidden, size, size, form=form),
        Projection("mlp.down_proj", Group.DOWN, size, hidden, size, form=form),
    )


def mixture_projections(
    hidden: int,
    count: int,
    size: int,
    shared_size: int = 0,
    *,
    shared_gate: bool = False,
    has_gates: bool = True,
    latent: int = 0,
) -> tuple[Projection, ...]:
    """Those of a mixture of experts. size, shared_size: widths of an expert's gate and up, and of the shared expert's,
    0 where there is none. shared_gate: the shared expert's output has a factor. has_gates: experts are gated parts.
    latent: width of what experts read and give, where that is made of the layer's input; 0: it is that.
    """
    inputs, width = ("gate_proj", "up_proj") if has_gates else ("up_proj",), latent or hidden
    found = [Projection("mlp.gate", Group.ROUTER, hidden, count, 1)]
    if shared_size:
        found += [
            *(
                Projection(f"mlp.shared_expert.{each}", Group.SHARED_GATE_UP, hidden, shared_size, shared_size)
                for each in inputs
            ),
            Projection("mlp.shared_expert.down_proj", Group.SHARED_DOWN, shared_size, hidden, shared_size),
        ]
    if shared_gate:
        found.append(Projection("mlp.shared_expert_gate", Group.SHARED_GATE, hidden, 1, 1))
    if latent:
        found += [
            Projection("mlp.pre_expert_proj", Group.LOW_RANK_DOWN, hidden, latent, 1),
            Projection("mlp.post_expert_proj", Group.LOW_RANK_UP, latent, hidden, 1),
        ]
    return (
        *found,
        *(Projection(f"mlp.experts.{each}", Group.EXPERT_GATE_UP, width, size, size, experts=count) for each in inputs),
        Projection("mlp.experts.down_proj", Group.EXPERT_DOWN, size, width, size, experts=count),
    )


def dense_projections(num_layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int) -> Projections:
    """The table of a model shaped like Llama: every layer has full attention and a gated feed-forward part."""
    layer = attention_projections(hidden, heads, kv_heads, head_dim) + gated_projections(hidden, ffn)
    return Projections((layer,) * num_layers)
