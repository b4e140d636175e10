"""Names and numbers that Python shares with the native library beside its structures, which `native_layout` makes.

Tests: tests/ops/library/test_native_layout.py
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import torch

from .native_library import native_layout


class Element(IntEnum):
    """Number of an element type in the library, by its name in safetensors files."""

    F32 = 0
    F16 = 1
    BF16 = 2


ELEMENT_OF = {torch.float32: Element.F32, torch.float16: Element.F16, torch.bfloat16: Element.BF16}

#: The sizes of a GEMM of layers: its inputs, (module id, first column, width) of its projections, and whether TP ranks
#: share the inputs.
GemmShape = tuple[int, Sequence[tuple[int, int, int]], bool]


def described_gemm_shapes(shapes: Sequence[GemmShape]) -> Array[Any]:
    """Sizes of GEMMs in the library's form."""
    layout = native_layout()
    most = layout.length("GemmShapeDesc.targets")
    found = layout.array("GemmShapeDesc", [{}] * len(shapes))
    for descriptor, (inputs, modules, is_row_parallel) in zip(found, shapes, strict=True):
        if len(modules) > most:
            raise ValueError(f"a GEMM has {len(modules)} modules; the native library has room for {most}")
        descriptor.row_parallel = is_row_parallel
        descriptor.inputs, descriptor.count = inputs, len(modules)
        descriptor.targets[: len(modules)] = [layout.structure("Target")(*module) for module in modules]
    return found


class NativeActivation(StrEnum):
    """An activation, by its name in the library."""

    SILU = "kSilu"
    GELU = "kGelu"
    """By tanh, as torch's `gelu(approximate="tanh")`."""
    RELU_SQUARED_GATE = "kReluSquaredGate"
    """`max(gate, 0)² · up`."""
    GELU_BY_ERF_GATE = "kGeluByErfGate"
    CLAMPED_SWIGLU = "kClampedSwiglu"
    """`(up + 1) · gate · sigmoid(alpha · gate)`, with gate at most `limit` and up within ± `limit`."""
    LIMITED_SWIGLU = "kLimitedSwiglu"
    """`silu(gate) · up`, likewise."""
    BOUNDED_SWIGLU = "kBoundedSwiglu"
    """`silu(gate) · up`, with silu(gate) at most `limit` and up within ± `limit`."""
    GELU_ALONE = "kGeluAlone"
    """As GELU, without a gate; so are all below."""
    GELU_BY_ERF = "kGeluByErf"
    RELU = "kRelu"
    RELU_SQUARED = "kReluSquared"
    XIELU = "kXielu"


class NativeGating(NamedTuple):
    """What becomes of gate and up. alpha, limit: of activations that have them."""

    activation: NativeActivation
    alpha: float = 0.0
    limit: float = 0.0


class NativeHeadNorm(StrEnum):
    """A norm of queries and keys, by its name in the library."""

    EACH = "kEachHead"
    """Of each head, with weights `[head_dim]`."""
    ALL = "kAllHeads"
    """Of all heads at once, with weights `[heads · head_dim]`."""
    OWN = "kOwnHeads"
    """LayerNorm of each head, with as many weights."""
    BIASED = "kBiasedHeads"
    """LayerNorm of each head, with weights and biases `[2, head_dim]`."""


class NativeOutputGate(StrEnum):
    """Where the gates of attention's output are, by its name in the library."""

    NONE = "kNoGate"
    BESIDE_QUERIES = "kBesideQueries"
    """Behind each head's query."""
    PER_HEAD = "kPerHead"
    """Behind queries, keys and values, one of each head."""
    PER_ELEMENT = "kPerElement"
    """There, of each element."""


class ReadJob(NamedTuple):
    """One module of one layer: A `[rank, d_in]` and B `[d_out, rank]` of the file, to rows of the output.

    a_start, b_start: bytes from the file's beginning; a_element, b_element: values of `Element`. Row i of A is written
    at element `first + i · slab_elems + a_offset`, row i of Bᵀ at `first + i · slab_elems + b_offset`.
    """

    a_start: int
    b_start: int
    a_element: int
    b_element: int
    rank: int
    d_in: int
    d_out: int
    first: int
    slab_elems: int
    a_offset: int
    b_offset: int
