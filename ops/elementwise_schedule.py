"""Schedules of the fused elementwise launches; they depend only on shapes."""

from __future__ import annotations

from dataclasses import dataclass

#: Elements of an activation's output per program.
SILU_BLOCK = 1024

#: Heads that a program rotates.
ROTARY_HEADS = 8


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


@dataclass(frozen=True, slots=True)
class NormConstants:
    """Compile-time constants of an RMSNorm launch, with one program per row."""

    width: int
    block: int
    """`width`, or the next power of two."""
    add: bool
    pdl: bool = False
    """The previous launch may still be running when this one begins."""


@dataclass(frozen=True, slots=True)
class SiluConstants:
    """Compile-time constants of a SiLU · up launch."""

    ffn: int
    block: int = SILU_BLOCK
    pdl: bool = False
    """See `NormConstants`."""


@dataclass(frozen=True, slots=True)
class RotaryConstants:
    """Compile-time constants of a rotary and KV append launch."""

    heads: int
    kv_heads: int
    head_dim: int
    norm: bool
    block_d: int
    """Half a head, or the next power of two."""
    block_h: int = ROTARY_HEADS
    pdl: bool = False
    """See `NormConstants`."""
    float8: bool = False
    """Keys and values are stored in FP8."""


def norm_constants(width: int, add: bool) -> NormConstants:
    """See `NormConstants`."""
    return NormConstants(width, _power_of_two(width), add)


def norm_options(width: int) -> dict[str, int | bool]:
    warps = 4 if width <= 2048 else 8 if width <= 8192 else 16
    return {"num_warps": warps, "enable_fp_fusion": False}


def silu_options() -> dict[str, int | bool]:
    return {"num_warps": 4, "enable_fp_fusion": False}


def rotary_constants(num_heads: int, kv_heads: int, head_dim: int, norm: bool) -> RotaryConstants:
    """See `RotaryConstants`."""
    return RotaryConstants(num_heads, kv_heads, head_dim, norm, _power_of_two(head_dim // 2))


def rotary_options() -> dict[str, int | bool]:
    # x · cos + y · sin is rounded after each multiplication, as torch rounds it
    return {"num_warps": 2, "enable_fp_fusion": False}


def rotary_blocks(num_heads: int, kv_heads: int) -> int:
    """Programs per token: first for query heads, then for KV heads."""
    return -(-num_heads // ROTARY_HEADS) - (-kv_heads // ROTARY_HEADS)
