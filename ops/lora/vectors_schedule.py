"""Schedules of the launches that apply adapters' vectors; they depend only on shapes.

Tests: tests/ops/lora/test_vectors_triton.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .sgmv_schedule import Modules

#: Outputs of a program.
BLOCK = 1024


@dataclass(frozen=True, slots=True)
class VectorConstants:
    """Compile-time constants of a launch."""

    modules: Modules
    page: int
    """Float32 values of a page."""
    table: int
    """Modules in the tables."""
    undo: bool
    """Undo the vectors instead of applying them."""
    block_n: int = BLOCK


def vector_constants(
    modules: Sequence[tuple[int, int, int]], page_bytes: int, table: int, *, undo: bool
) -> VectorConstants:
    """modules: (module id, first column, width), adjacent in the outputs. table: modules in the tables."""
    ids, widths = [module for module, _, _ in modules], [width for _, _, width in modules]
    return VectorConstants(Modules.build(ids, widths, BLOCK), page_bytes // 4, table, undo)


def vector_blocks(modules: Sequence[tuple[int, int, int]]) -> int:
    """Programs of a token."""
    return sum(-(-width // BLOCK) for _, _, width in modules)


def vector_options() -> dict[str, int | bool]:
    """Options of a launch."""
    return {"num_warps": 4, "enable_fp_fusion": True}
