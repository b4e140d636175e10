"""Schedules of the launches of Gated DeltaNet; they depend only on shapes.

Tests: tests/ops/test_gated_delta_interpreted.py
"""

from __future__ import annotations

#: Columns of a state that a program has while a prompt's tokens pass.
SCAN_COLUMNS = 16


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def step_constants(k_heads: int, v_heads: int, k_dim: int, v_dim: int, conv_size: int) -> dict[str, int]:
    """Compile-time constants of a decode step's launch, with a program for each head of values of a sequence."""
    return {
        "K_HEADS": k_heads,
        "V_HEADS": v_heads,
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "CONV": conv_size,
        "BLOCK_K": _power_of_two(k_dim),
        "BLOCK_V": _power_of_two(v_dim),
    }


def step_options(k_dim: int, v_dim: int) -> dict[str, int | bool]:
    """A program holds a head's state in registers: 64 values a thread for 128 × 128."""
    return {"num_warps": 8 if k_dim * v_dim > 1 << 12 else 4, "enable_fp_fusion": True}


def scan_constants(v_heads: int, k_dim: int, v_dim: int) -> dict[str, int]:
    """Compile-time constants of a launch for a prompt, with a program for some columns of a head."""
    return {
        "V_HEADS": v_heads,
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "BLOCK_K": _power_of_two(k_dim),
        "BLOCK_V": SCAN_COLUMNS,
    }


def scan_options() -> dict[str, int | bool]:
    return {"num_warps": 2, "enable_fp_fusion": True}
