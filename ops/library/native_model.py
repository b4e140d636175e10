"""What the native library is told of a model: shapes, packed weights, and the ops of its layers.

Tests: tests/ops/cpu/test_native.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Array
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from .native_descriptors import GemmShape
from .native_library import library
from .native_program import NativeOp, Register

PANEL = 32  # output columns of a packed panel, kPanel in gemm.h


def pack(weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Reorder a weight `[n, k]` into panels `[⌈n/32⌉, k/pair, 32, pair]`; pair is 2 in bf16, 1 in float32.

    out: optional output, with the shape of `packed_shape` and the weight's dtype.
    """
    n, k = weight.shape
    shape = packed_shape(n, k, weight.dtype)
    out = torch.empty(shape, dtype=weight.dtype) if out is None else out
    found = library()
    if found is not None and all(each.is_cpu and each.is_contiguous() for each in (weight, out)):
        found.chorus_pack(torch.get_num_threads(), weight.data_ptr(), n, shape[1], out.data_ptr())
        return out
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
    """Sizes of kv_b_proj of latent attention: see `core.model.specs.attention.LatentSpec`."""

    heads: int
    kv_rank: int
    key: int
    value: int

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


class DescribedMixture(Protocol):
    """A mixture of experts in the library's form; see `native_mixture`."""

    @property
    def address(self) -> int:
        """Of its description, which lives as long as the object."""
        ...


class LayerMixture(NamedTuple):
    """A layer's mixture of experts as its feed-forward part."""

    weights: DescribedMixture
    targets: Array[Any]
    """What adapters change of it; see `MixtureModules.described`."""

    shared: LayerMixture | None = None
    """The shared expert beside experts of latents, as a mixture of its own."""


@dataclass(frozen=True, slots=True)
class NativeShape:
    """Shapes of a recurrent mixer, by the names of its `DeltaShape`."""

    mixer: str
    """Its kind's name in the library."""
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_size: int
    eps: float
    beta: float = 1.0

    dt_min: float = 0.0
    """Of Mamba 2: the least time step."""

    gates_norm: bool = False
    """Of Mamba 2: the gate multiplies what was normalised."""

    group_ranks: int = 1
    """Of Mamba 2: TP ranks that share each group's heads."""

    by_channel: bool = False
    """Of Gated DeltaNet: each channel of a key has a decay, and gates are sigmoids."""

    scan_heads: int = 0
    """Of Mamba 1 by heads; so is the width of what time steps are made of."""

    scan_rank: int = 0

    bound: float = 0.0
    """Of such decays: the least logarithm; 0: there is none."""


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
    """Shapes, ops and weights. embed: `[vocab, hidden]`; lm_head packed; norm float32; arena `[pages, elems]`."""

    hidden: int
    vocab: int
    block_tokens: int
    eps: float
    num_layers: int
    ops: Sequence[NativeOp]
    """Of all layers."""

    registers: Sequence[Register]
    gemm_shapes: Sequence[GemmShape]
    """The different sizes of the layers' GEMMs."""
    gemm_shape_of: Sequence[Mapping[str, int]]
    """Indices in `gemm_shapes`, by layer and product."""
    positions: int
    embed: torch.Tensor
    """`[vocab, hidden]`."""
    lm_head: Any
    """Packed: a tensor or `IntegerPanels`."""
    norm: torch.Tensor
    arena: torch.Tensor
    """`[pages, elems]`."""

    norm_kind: str = "kRms"
    """The kind of the norms after the embedding and before the output head, by its name in the library."""

    embedding_multiplier: float = 1.0
    logits_scale: float = 1.0

    logits_softcap: float = 0.0
    """Logits x become `softcap · tanh(x / softcap)`; 0: they stay."""

    head_bias: torch.Tensor | None = None
    """`[vocab]` float32, of the logits before their scale; None: there is none."""

    position_table: torch.Tensor | None = None
    """`[positions, hidden]` float32, added to embeddings; None: nothing is."""

    embedding_norm: torch.Tensor | None = None
    """The weights of the norm of embeddings, as `norm`; None: they are not normalised."""

    page_groups: int = 1

    float8_kv: bool = False
    """Keys and values are in FP8, one byte each: see `float8_kv`."""

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
