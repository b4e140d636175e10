"""What the native library is told of a model: shapes, packed weights, and how each layer computes.

Tests: tests/ops/test_native.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Array
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch

from .native_descriptors import (
    MixtureTargetsDescriptor,
    NativeActivation,
    NativeHeadNorm,
    NativeOutputGate,
    ProductShape,
)

PANEL = 32  # output columns of a packed panel, kPanel in gemm.h


def pack(weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Reorder a weight `[n, k]` into panels `[⌈n/32⌉, k/pair, 32, pair]`; pair is 2 in bf16, 1 in float32.

    out: optional output, with the shape of `packed_shape` and the weight's dtype.
    """
    n, k = weight.shape
    shape = packed_shape(n, k, weight.dtype)
    out = torch.empty(shape, dtype=weight.dtype) if out is None else out
    whole = n // PANEL
    out[:whole] = weight[: whole * PANEL].view(whole, PANEL, shape[1], shape[3]).transpose(1, 2)
    if rest := n - whole * PANEL:
        out[whole] = 0
        out[whole, :, :rest] = weight[whole * PANEL :].view(rest, shape[1], shape[3]).transpose(0, 1)
    return out


def unpack(packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The weight `[n, k]` of panels, in any shape of their elements."""
    panels = packed.view(packed_shape(n, k, packed.dtype))
    return panels.transpose(1, 2).reshape(len(panels) * PANEL, k)[:n]


def packed_shape(n: int, k: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    pair = 4 // dtype.itemsize
    if k % pair:
        raise ValueError(f"the reduction dimension is {k}; it must be a multiple of {pair} in {dtype}")
    return -(-n // PANEL), k // pair, PANEL, pair


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of latent attention: see `core.model.layers.LatentSpec`."""

    heads: int
    q_rank: int
    kv_rank: int
    key: int
    rotated: int
    value: int

    eps: float
    """Of the norms of latents."""

    @property
    def packed_elems(self) -> tuple[int, int]:
        """Elements of a head's packed keys, and of its packed values."""
        return -(-self.kv_rank // PANEL) * PANEL * self.key, -(-self.value // PANEL) * PANEL * self.kv_rank

    def pack(self, kv_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Reorder the rows of kv_b_proj `[heads · (key + value), kv_rank]`: first each head's keys, transposed, then
        each head's values, both in panels; see `pack`.

        out: optional output, flat.
        """
        keys, values = self.packed_elems
        out = kv_up.new_empty(self.heads * (keys + values)) if out is None else out
        whole = kv_up.view(self.heads, self.key + self.value, self.kv_rank)
        parts = out.split(self.heads * [keys] + self.heads * [values])
        for own, key, value in zip(whole, parts[: self.heads], parts[self.heads :], strict=True):
            pack(own[: self.key].T, key.view(packed_shape(self.kv_rank, self.key, kv_up.dtype)))
            pack(own[self.key :], value.view(packed_shape(self.value, self.kv_rank, kv_up.dtype)))
        return out

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """The rows of kv_b_proj that were packed."""
        keys, values = (
            part.unflatten(0, (self.heads, -1))
            for part in packed.split([self.heads * each for each in self.packed_elems])
        )
        dense = packed.new_empty(self.heads, self.key + self.value, self.kv_rank)
        for own, key, value in zip(dense, keys, values, strict=True):
            own[: self.key] = unpack(key, self.kv_rank, self.key).T
            own[self.key :] = unpack(value, self.value, self.kv_rank)
        return dense.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class LatentPlace:
    """Latent attention of a layer: its sizes, and where it keeps latents."""

    shape: LatentShape
    module: int
    """The id of kv_b_proj."""

    plane: int
    """Elements from a page's beginning to the layer's latents."""


@dataclass(slots=True)
class LayerValues:
    """How a layer computes, whatever its weights are."""

    scale: float
    """Factor of the scores q · k."""

    cos: torch.Tensor | None = None
    """`[positions, rotary_dim]` float32: of each rotated element, times the attention factor. None: none is rotated."""

    sin: torch.Tensor | None = None

    interleaved: bool = False
    """Elements 2i and 2i + 1 are rotated together, rather than i and i + rotary_dim / 2."""

    window: int = 0
    """Tokens that a query sees, itself included; 0: all before it."""

    chunked: bool = False
    """The window begins at a multiple of its length."""

    softcap: float = 0.0
    """Scores s become `softcap · tanh(s / softcap)`; 0: they stay."""

    heads: int = 0
    """Of its queries; 0: as many as the model has. Likewise the two below."""

    kv_heads: int = 0
    head_dim: int = 0

    keys_are_values: bool = False
    """There are no projected values: they are keys before their norm."""

    norms_values: bool = False
    """Every head of values is normalised, without weights."""

    output_factor: float = 1.0
    """Of the residual stream behind the layer."""

    head_norm: NativeHeadNorm = NativeHeadNorm.EACH
    """What q_norm and k_norm are, where they are there."""

    parallel: bool = False
    """The feed-forward part has attention's input or, with an mlp_norm, a norm of its own of the same stream."""

    page_group: int = 0
    """The page group whose pages have its keys and values."""

    query_factors: torch.Tensor | None = None
    """`[positions]` float32, factors of queries; None: none."""

    query_weights: torch.Tensor | None = None
    """`[head_dim]` float32, what rotated queries are multiplied by; None: nothing."""

    page_layer: int | None = None
    """Its place among the layers in these pages; None: its index."""

    k_scale: float = 1.0
    """Stored keys stand for so many times what is stored: of a KV cache in FP8."""

    v_scale: float = 1.0
    residual_multiplier: float = 1.0

    attention_in_factor: float = 1.0
    """Of attention's input, where a recurrent mixer is beside it; likewise the three below."""

    attention_out_factor: float = 1.0
    beside_in_factor: float = 1.0
    beside_out_factor: float = 1.0

    gate_factor: float = 1.0
    """Of a gate, before its activation."""

    part_factor: float = 1.0
    """Of the feed-forward part's output."""

    activation: NativeActivation = NativeActivation.SILU

    state_layer: int = 0
    """Of a layer with a recurrent mixer: its place among such layers."""

    latent: LatentPlace | None = None
    """None: keys and values are no latents."""


class DescribedMixture(Protocol):
    """A mixture of experts in the library's form; see `native_mixture`."""

    @property
    def address(self) -> int:
        """Of its description, which lives as long as the object."""
        ...


class LayerMixture(NamedTuple):
    """A layer's mixture of experts as its feed-forward part."""

    weights: DescribedMixture
    targets: Array[MixtureTargetsDescriptor]
    """What adapters change of it; see `MixtureModules.described`."""
    factor: float
    """Of the sum of all experts' outputs."""


class NativeMixer(IntEnum):
    """A recurrent mixer of the library."""

    DELTA = 0
    SHORT_CONV = 1
    MAMBA2 = 2


@dataclass(frozen=True, slots=True)
class NativeShape:
    """Shapes of a recurrent mixer, as `native/gated_delta.h` has them."""

    mixer: NativeMixer
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_size: int
    delta_eps: float
    beta: float = 1.0

    dt_min: float = 0.0
    """Of Mamba 2: the least time step."""

    gates_norm: bool = False
    """Of Mamba 2: the gate multiplies what was normalised."""

    group_ranks: int = 1
    """Of Mamba 2: TP ranks that share each group's heads."""

    by_channel: bool = False
    """Of Gated DeltaNet: each channel of a key has a decay, and gates are sigmoids."""


@dataclass(frozen=True, slots=True)
class NativeStates:
    """Where states are in their pages: see `memory.pages.states`."""

    convs_per_page: int
    heads_per_page: int
    conv_pages: int
    most_drafts: int
    drafts_per_page: int
    draft_page: int


@dataclass(slots=True)
class NativeModel:
    """Shapes and weights. embed: `[vocab, hidden]`; lm_head packed; norm float32; arena `[pages, elems]`.

    layers: a tensor, or None where there is none, for each name in `LAYER_WEIGHTS`: packed projections in the model's
    dtype or as `IntegerPanels`, everything else float32. A layer without attention_norm or mlp_norm takes the residual
    stream as it is.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    block_tokens: int
    eps: float
    layers: Sequence[Any]
    values: Sequence[LayerValues]
    products: Sequence[ProductShape]
    """The different products of the layers."""
    product_of: Sequence[Mapping[int, int]]
    """Indices in `products`, by layer and group."""
    positions: int
    embed: torch.Tensor
    """`[vocab, hidden]`."""
    lm_head: Any
    """Packed: a tensor or `IntegerPanels`."""
    norm: torch.Tensor
    arena: torch.Tensor
    """`[pages, elems]`."""

    centered: bool = False
    """Norms subtract the mean: LayerNorm."""

    biased: bool = False
    """Norms have biases: their weights are `[2, hidden]`. Those of heads have none."""

    embedding_multiplier: float = 1.0
    logits_scale: float = 1.0

    logits_softcap: float = 0.0
    """Logits x become `softcap · tanh(x / softcap)`; 0: they stay."""

    head_bias: torch.Tensor | None = None
    """`[vocab]` float32, of the logits before their scale; None: there is none."""

    embedding_norm: bool = False
    """Embeddings are normalised, as the output of the last layer is."""

    page_groups: int = 1

    kv_copies: int = 1
    """TP ranks that have the same K/V heads."""

    float8_kv: bool = False
    """Keys and values are in FP8, one byte each: see `float8_kv`."""

    output_gate: NativeOutputGate = NativeOutputGate.NONE

    recurrent: tuple[NativeShape, NativeStates] | None = None
    """None: no layer has a recurrent mixer."""

    embed_module: int = -1
    """Module id of the token embeddings; -1: adapters can't change them."""

    head_module: int = -1
    """Module id of the output projection, likewise."""

    embed_rows_module: int = -1
    """Module id of whole rows of the embeddings, likewise."""

    head_rows_module: int = -1
    """Module id of whole rows of the output projection, likewise."""

    first_token: int = 0
    """Token of this rank's first column of the logits."""

    mixtures: Sequence[LayerMixture | None] = ()
    """By layer, the experts that it has in place of gate, up and down; empty: no layer has any."""

    mixture_ids: tuple[int, ...] = ()
    """Modules of all mixtures: see `NativeMixtureLora`."""
