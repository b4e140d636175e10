"""Schedule of the launches of adapters on kv_b_proj; it depends only on shapes.

Tests: tests/ops/attention/test_latents_triton.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ..elementwise.elementwise_schedule import power_of_two
from ..lora.sgmv_schedule import Records
from ..lora.sgmv_tables import place_blocks

#: Rank-rows that a program loads at once, of A and of B.
_BLOCK_R = 8

#: The most registers of a thread that makes values: those of eight programs on a multiprocessor.
_EXPAND_REGISTERS = 64


@dataclass(frozen=True, slots=True)
class LatentLoraConstants:
    """Compile-time constants of a launch."""

    records: Records
    module: int
    """The projection's id."""
    kv_rank: int
    width: int
    """Elements of a head's key and value."""
    first: int
    """The first of these elements that the launch reads: 0 for keys, the size of a key for values."""
    elems: int
    """How many it reads."""
    absorbs: bool
    """Queries go to the latents' space; else values come out of it."""
    terms: int
    """Records of a tile, see `SgmvTables`."""
    block_a: int
    """`kv_rank`, or the next power of two; likewise `block_b` of `elems`."""
    block_b: int
    block_r: int = _BLOCK_R
    pdl: bool = False
    """The previous launch may still be running when this one begins."""


def supports_heads(key: int, value: int, itemsize: int) -> bool:
    """True if heads' rows of B begin at multiples of 16 bytes, as loads need."""
    return key * itemsize % 16 == 0 and value * itemsize % 16 == 0


def latent_lora_constants(
    module: int,
    key: int,
    value: int,
    kv_rank: int,
    page_elems: int,
    itemsize: int,
    max_rank: int,
    pages: int,
    table: int,
    *,
    absorbs: bool,
    terms: int = 1,
) -> LatentLoraConstants:
    """key, value: elements of a head's key and value. max_rank, table, pages: of the tables, their modules, and of one
    of their records.
    """
    elems = key if absorbs else value
    return LatentLoraConstants(
        Records(page_elems, 16 // itemsize, place_blocks(max_rank), pages, table),
        module,
        kv_rank,
        key + value,
        0 if absorbs else key,
        elems,
        absorbs=absorbs,
        terms=terms,
        block_a=power_of_two(kv_rank),
        block_b=power_of_two(elems),
    )


def latent_lora_options(*, absorbs: bool, terms: int) -> dict[str, int | bool]:
    """Options of a launch; see `LatentLoraConstants`. Without a limit, the compiler takes fewer registers for values of
    several records than it has, and spills.
    """
    limit = {} if absorbs or terms == 1 else {"maxnreg": _EXPAND_REGISTERS}
    return {"num_warps": 4, "enable_fp_fusion": False, **limit}
