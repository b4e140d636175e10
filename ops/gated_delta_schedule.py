"""Schedules of the launches of Gated DeltaNet; they depend only on shapes.

Tests: tests/ops/test_gated_delta_interpreted.py
"""

from __future__ import annotations

from dataclasses import dataclass

#: Columns of a state that a program has while a prompt's tokens pass.
SCAN_COLUMNS = 16


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


@dataclass(frozen=True, slots=True)
class DeltaConstants:
    """Compile-time constants of a launch."""

    v_heads: int
    k_dim: int
    v_dim: int
    block_k: int
    """`k_dim`, or the next power of two."""
    block_v: int
    """Columns of a state that a program has."""
    k_heads: int = 0
    conv: int = 0
    """Tokens that the convolution sees."""


def step_constants(k_heads: int, v_heads: int, k_dim: int, v_dim: int, conv_size: int) -> DeltaConstants:
    """Of a decode step's launch, with a program for each head of values of a sequence."""
    block_k, block_v = _power_of_two(k_dim), _power_of_two(v_dim)
    return DeltaConstants(v_heads, k_dim, v_dim, block_k, block_v, k_heads=k_heads, conv=conv_size)


def step_options(k_dim: int, v_dim: int) -> dict[str, int | bool]:
    """A program holds a head's state in registers: 64 values a thread for 128 × 128."""
    return {"num_warps": 8 if k_dim * v_dim > 1 << 12 else 4, "enable_fp_fusion": True}


def scan_constants(v_heads: int, k_dim: int, v_dim: int) -> DeltaConstants:
    """Of a launch for a prompt, with a program for some columns of a head."""
    return DeltaConstants(v_heads, k_dim, v_dim, _power_of_two(k_dim), SCAN_COLUMNS)


def scan_options() -> dict[str, int | bool]:
    return {"num_warps": 2, "enable_fp_fusion": True}
