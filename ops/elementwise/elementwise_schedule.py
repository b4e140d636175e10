"""Schedules of the fused elementwise launches; they depend only on shapes.

Tests: tests/ops/elementwise/test_elementwise_triton.py
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

#: Elements of an activation's output per program.
GATED_BLOCK = 1024

#: Heads that a program rotates.
ROTARY_HEADS = 8


def power_of_two(least: int) -> int:
    """The least power of two of at least so much."""
    return 1 << (least - 1).bit_length()


@dataclass(frozen=True, slots=True)
class NormConstants:
    """Compile-time constants of the launch of a norm, with one program per row."""

    width: int
    block: int
    """`width`, or the next power of two."""
    add: bool
    pdl: bool = False
    """The previous launch may still be running when this one begins."""
    centered: bool = False
    """The mean is subtracted first (LayerNorm)."""
    wide: bool = False
    """Weights are float32 and values are not: the product is rounded, rather than its factors."""


class Gating(StrEnum):
    """Activations of a gated part; see the functions of `elementwise`."""

    SILU = "silu"
    GELU = "gelu"
    CLAMPED_SWIGLU = "clamped swiglu"


@dataclass(frozen=True, slots=True)
class GatedConstants:
    """Compile-time constants of the launch of a gated activation."""

    ffn: int
    gating: Gating = Gating.SILU
    alpha: float = 0.0
    """See `elementwise.clamped_swiglu`, and `limit`."""
    limit: float = 0.0
    block: int = GATED_BLOCK
    pdl: bool = False
    """See `NormConstants`."""


class HeadNorming(StrEnum):
    """Norm of heads before they are rotated; see `rotation.HeadNorms`."""

    NONE = "none"
    EACH = "each"
    WHOLE = "whole"
    """All heads of a token at once."""


@dataclass(frozen=True, slots=True)
class RotaryConstants:
    """Compile-time constants of a rotary and KV append launch."""

    heads: int
    kv_heads: int
    head_dim: int
    dim: int
    """Elements of a head that are rotated, the first ones; 0: none."""
    interleaved: bool = False
    """See `rotation.Rotation`."""
    norm: HeadNorming = HeadNorming.NONE
    wide: bool = False
    """See `NormConstants`."""
    block_h: int = ROTARY_HEADS
    pdl: bool = False
    """See `NormConstants`."""
    float8: bool = False
    """Keys and values are stored in FP8."""

    @property
    def half(self) -> int:
        """Elements that rotate with as many others; of heads that aren't rotated half of all."""
        return (self.dim or self.head_dim) // 2

    @property
    def rest(self) -> int:
        """Elements of a head that are not rotated where others are."""
        return self.head_dim - 2 * self.half

    @property
    def block_d(self) -> int:
        """`half`, or the next power of two; likewise `block_r` of `rest`."""
        return power_of_two(self.half)

    @property
    def block_r(self) -> int:
        return power_of_two(max(1, self.rest))


@dataclass(frozen=True, slots=True)
class LatentConstants(RotaryConstants):
    """Compile-time constants of a launch that rotates queries and keys of latents, and appends latents.

    Here `head_dim` counts the last elements of a query, behind its `key_dim` others; the first `dim` of them rotate.
    """

    key_dim: int = 0
    """Elements of a query before these."""
    kv_rank: int = 0
    """Elements of a latent."""
    has_norm: bool = False
    """Latents are normalised."""

    @property
    def block_key(self) -> int:
        """`key_dim`, or the next power of two; likewise `block_rank` of `kv_rank`."""
        return power_of_two(self.key_dim)

    @property
    def block_rank(self) -> int:
        return power_of_two(self.kv_rank)


def norm_constants(width: int, add: bool, *, centered: bool = False, wide: bool = False) -> NormConstants:
    """See `NormConstants`."""
    return NormConstants(width, power_of_two(width), add, centered=centered, wide=wide)


def norm_options(width: int) -> dict[str, int | bool]:
    warps = 4 if width <= 2048 else 8 if width <= 8192 else 16
    return {"num_warps": warps, "enable_fp_fusion": False}


def gated_options() -> dict[str, int | bool]:
    return {"num_warps": 4, "enable_fp_fusion": False}


def rotary_options(*, interleaved: bool = False) -> dict[str, int | bool]:
    # x · cos + y · sin is rounded after each multiplication, as torch rounds it
    options = {"num_warps": 2, "enable_fp_fusion": False}
    # by its own choice the assembler takes 40 registers for sm_100 in float32, and spills some
    return options | ({"maxnreg": 128} if interleaved else {})


def rotary_blocks(num_heads: int, kv_heads: int) -> int:
    """Programs per token: first for query heads, then for KV heads."""
    return -(-num_heads // ROTARY_HEADS) - (-kv_heads // ROTARY_HEADS)
