"""Schedules of the fused elementwise launches; they depend only on shapes."""

from __future__ import annotations

#: Elements of an activation's output per program.
SILU_BLOCK = 1024

#: Heads that a program rotates.
ROTARY_HEADS = 8


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def norm_constants(width: int, add: bool) -> dict[str, int]:
    """Compile-time constants of an RMSNorm launch, with one program per row."""
    return {"WIDTH": width, "BLOCK": _power_of_two(width), "ADD": int(add), "PDL": 0}


def norm_options(width: int) -> dict[str, int | bool]:
    warps = 4 if width <= 2048 else 8 if width <= 8192 else 16
    return {"num_warps": warps, "enable_fp_fusion": False}


def silu_constants(ffn: int) -> dict[str, int]:
    """Compile-time constants of a SiLU · up launch."""
    return {"FFN": ffn, "BLOCK": SILU_BLOCK, "PDL": 0}


def silu_options() -> dict[str, int | bool]:
    return {"num_warps": 4, "enable_fp_fusion": False}


def rotary_constants(num_heads: int, kv_heads: int, head_dim: int, norm: bool) -> dict[str, int]:
    """Compile-time constants of a rotary and KV append launch."""
    return {
        "HEADS": num_heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "NORM": int(norm),
        "BLOCK_H": ROTARY_HEADS,
        "BLOCK_D": _power_of_two(head_dim // 2),
        "PDL": 0,
    }


def rotary_options() -> dict[str, int | bool]:
    # x · cos + y · sin is rounded after each multiplication, as torch rounds it
    return {"num_warps": 2, "enable_fp_fusion": False}


def rotary_blocks(num_heads: int, kv_heads: int) -> int:
    """Programs per token: first for query heads, then for KV heads."""
    return -(-num_heads // ROTARY_HEADS) - (-kv_heads // ROTARY_HEADS)
