"""The projections of each kind of layer, and of the model: rows of the table in `projections`.

Pure data, like `layout`. Tests: tests/memory/pages/test_projections.py
"""

from __future__ import annotations

from collections.abc import Sequence

from .projections import Group, Projection, Projections

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
