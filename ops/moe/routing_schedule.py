"""Schedules of a router's launches on a GPU; they depend only on shapes.

Tests: tests/ops/moe/test_routing_interpreted.py
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

from ..elementwise.elementwise_schedule import power_of_two
from .routing import Routing

#: Rows of a tile of the router's product: of steps with few rows, and of others.
TILE_ROWS = 16, 64

#: Pairs that a program sorts at once, of steps with up to so many and of others: a program waits for each block's load
#: in turn. And entries of tiles that it writes at once.
SORT_BLOCKS, ENTRY_BLOCK = (1024, 4096), 32

#: Columns of the sum of experts' outputs that a program adds up.
SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class RouterConstants:
    """Compile-time constants of a router's product."""

    d_in: int
    experts: int
    block_t: int
    """Rows of a program, and `block_n`: its experts."""
    block_n: int
    block_k: int
    """Inputs that are multiplied at once."""
    stages: int
    bias: bool
    wide: bool
    """The weights are float32; others have the dtype of x."""
    pdl: bool = False
    """The previous launch may still be running when this one begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceConstants(Routing):
    """Compile-time constants of the choice of experts."""

    experts: int
    pdl: bool = False
    """See `RouterConstants`."""

    @property
    def group_size(self) -> int:
        return self.experts // self.groups

    @property
    def block_g(self) -> int:
        """`groups`, or the next power of two; likewise `block_s` of `group_size`, `block_k` of `per_token`."""
        return power_of_two(self.groups)

    @property
    def block_s(self) -> int:
        return power_of_two(self.group_size)

    @property
    def block_k(self) -> int:
        return power_of_two(self.per_token)


@cache
def choice_constants(routing: Routing, experts: int) -> ChoiceConstants:
    """Of a choice among so many experts."""
    return ChoiceConstants(**{each.name: getattr(routing, each.name) for each in fields(Routing)}, experts=experts)


@dataclass(frozen=True, slots=True)
class SortConstants:
    """Compile-time constants of the sort of pairs by expert."""

    experts: int
    block_t: int
    """Rows of a tile."""
    few: bool
    """There are fewer pairs than experts and full tiles: see `expert_tiles_schedule.num_tiles`."""
    block: int = SORT_BLOCKS[0]
    entries: int = ENTRY_BLOCK
    pdl: bool = False
    """See `RouterConstants`."""


@dataclass(frozen=True, slots=True)
class SumConstants:
    """Compile-time constants of the sum of experts' outputs."""

    width: int
    per_token: int
    shared: bool
    gated: bool
    """The shared expert's outputs have gates."""
    block: int = SUM_BLOCK
    pdl: bool = False
    """See `RouterConstants`."""


def router_constants(
    d_in: int, experts: int, rows: int, *, bias: bool, wide: bool, pdl: bool = False
) -> RouterConstants:
    """rows: of a step."""
    is_few = rows <= TILE_ROWS[-1]
    return RouterConstants(
        d_in=d_in,
        experts=experts,
        block_t=TILE_ROWS[0] if is_few else TILE_ROWS[-1],
        block_n=16 if is_few else 32,
        block_k=32 if wide else 128 if is_few else 64,
        stages=4 if is_few else 3,
        bias=bias,
        wide=wide,
        pdl=pdl,
    )


def router_options(constants: RouterConstants) -> dict[str, int | bool]:
    """Options of a launch."""
    options = {"num_warps": 4, "num_stages": constants.stages, "enable_fp_fusion": False}
    # by its own choice the assembler takes 64 registers for sm_120, and spills some
    return options | ({"maxnreg": 200} if constants.block_t == TILE_ROWS[-1] and not constants.wide else {})


def choice_options() -> dict[str, int | bool]:
    """See `router_options`. A program has one row."""
    return {"num_warps": 1, "enable_fp_fusion": False}


def sort_block(pairs: int) -> int:
    """Pairs of a step that a program sorts at once."""
    return SORT_BLOCKS[pairs > SORT_BLOCKS[0]]


def sort_options(constants: SortConstants) -> dict[str, int | bool]:
    """See `router_options`."""
    return {"num_warps": 8 if constants.block > SORT_BLOCKS[0] else 4}


def sum_options() -> dict[str, int | bool]:
    """See `router_options`. Products are rounded before they are added, as torch rounds them."""
    return {"num_warps": 4, "enable_fp_fusion": False}
