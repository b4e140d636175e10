"""Schedule of the products of a mixture's experts on a GPU; it depends only on shapes.

Tests: tests/ops/moe/test_expert_tiles_interpreted.py
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from ..elementwise.elementwise_schedule import Gating
from ..gemm.small_gemm_schedule import FULL, WeightForm
from ..gemm.swapped_gemm_schedule import BLOCK_K, Tile, blocks_of, stages_of, swapped_options

#: Rows of a tile: those of one matrix instruction of a warp, of a warp group, and of two.
TILE_ROWS = 16, 64, 128

#: The most rows of a step whose tiles have the fewest rows.
FEW_ROWS = 64

#: Rows of a matrix that a program of a large tile reads: so many that several programs fit on a multiprocessor, or
#: twice as many, for fewer instructions and for reading rows of x half as often. A race says which is faster.
TILE_COLUMNS = 128, 256

#: From so many rows of an expert on average, tiles have the most rows: an expert's last tile is half empty on average,
#: and a tile of 128 rows reads 2/3 of the bytes for a product that one of 64 reads.
_MANY_ROWS = 96

#: The most rows of a step whose pairs are a tile each, unsorted. Two rows seldom go to the same of many experts; where
#: they do, the second one's weights come from the L2 cache.
UNSORTED_ROWS = 4

#: Narrow weights that a program of few rows reads of a column at once.
_NARROW_K = 128


#: Rows of gate and of up that alternate where weights are the first operand: a thread has one of each then.
GATE_ROWS = 8


class Gate(NamedTuple):
    """The activation of products whose matrices are gate and up, one above the other; see `GatedConstants`."""

    gating: Gating = Gating.SILU
    alpha: float = 0.0
    limit: float = 0.0


class ExpertLaunches(NamedTuple):
    """How a GPU launches the products of a mixture's experts."""

    joins: bool = False
    """The activation is in the launch of gate and up, and few rows are not sorted."""
    swaps: bool = False
    """Narrow weights are the first operand."""
    is_wide: bool = False
    """See `tile_constants`."""


@dataclass(frozen=True, slots=True)
class TileConstants:
    """Compile-time constants of a launch."""

    d_in: int
    d_out: int
    """Columns of the result; with `gating`, half of a matrix's rows."""
    block_t: int
    """Rows of a tile."""
    block_n: int
    """Rows of a matrix that a program reads."""
    block_k: int
    """Inputs that are multiplied at once."""
    stages: int
    """Blocks of inputs in flight at once."""
    per_row: int
    """Results that a row of x has: one for each expert that it goes to."""
    experts: int
    bias: bool
    bits: int = 16
    """Bits of a weight; 16: it has the dtype of the product, whatever that is, and the rest does not count."""
    group: int = 0
    """Inputs that share a scale."""
    groups: int = 1
    """Groups of a row."""
    zeros: bool = False
    float8: bool = False
    float4: bool = False
    unit: int = 16
    """See `WeightForm.unit`."""
    splits: int = 1
    """Parts of the sum over the inputs: see `GemmConstants`."""
    gating: Gating | None = None
    """See `Gate`; None: products are the result."""
    alpha: float = 0.0
    limit: float = 0.0
    of_pairs: bool = False
    """See `ExpertTiles.of_pairs`."""
    pdl: bool = False
    """The previous launch may still be running when this one begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedTileConstants(TileConstants):
    """Compile-time constants of a launch whose weights are the first operand: see `SwappedConstants`."""

    blocks: int
    warps: int


def most_rows(form: WeightForm) -> int:
    """The most rows of a tile. Where sums of blocks are scaled, two sums of as many would spill registers."""
    return TILE_ROWS[2] if form.bits == 16 or form.float4 else TILE_ROWS[1]


def tile_rows(rows: int, pairs: int, experts: int, most: int = TILE_ROWS[2]) -> int:
    """Rows of the tiles of a step with so many rows and pairs of a row and an expert; at most `most`."""
    if rows <= FEW_ROWS:
        return TILE_ROWS[0]
    return min(most, TILE_ROWS[2] if pairs >= _MANY_ROWS * experts else TILE_ROWS[1])


def num_tiles(pairs: int, experts: int, block_t: int) -> int:
    """The most tiles of so many pairs of a row and an expert: a pair each, or each expert has one that is not full."""
    return min(pairs, experts + pairs // block_t)


def has_few_pairs(pairs: int, experts: int, block_t: int) -> bool:
    """Whether there can't be more tiles because each has a pair."""
    return pairs <= experts + pairs // block_t


def tile_constants(
    d_in: int,
    d_out: int,
    block_t: int,
    itemsize: int,
    *,
    per_row: int,
    experts: int,
    bias: bool,
    form: WeightForm = FULL,
    gate: Gate | None = None,
    of_pairs: bool = False,
    pdl: bool = False,
    is_wide: bool = False,
) -> TileConstants:
    """d_out: columns of the result. itemsize: of an element of x. is_wide: tiles of 64 rows have the most columns,
    which changes no bits. A block of narrow weights has one scale, but for MXFP4.
    """
    columns = _columns(block_t, is_wide=is_wide)
    is_large = block_t > TILE_ROWS[0] and itemsize == 2
    block_k = 64 if itemsize == 2 else 32
    if form.bits < 16 and not is_large and itemsize == 2 and (form.float4 or not form.group % _NARROW_K):
        block_k = _NARROW_K
    return TileConstants(
        d_in=d_in,
        d_out=d_out,
        block_t=block_t,
        block_n=columns if is_large else 32,
        block_k=block_k,
        stages=4 if not is_large else 3 if columns == TILE_COLUMNS[0] else 2,
        per_row=per_row,
        experts=experts,
        bias=bias,
        bits=form.bits,
        group=form.group,
        groups=-(-d_in // form.group) if form.group else 1,
        zeros=form.zeros,
        float8=form.float8,
        float4=form.float4,
        unit=form.unit,
        **({} if gate is None else gate._asdict()),
        of_pairs=of_pairs,
        pdl=pdl,
    )


def swapped(constants: TileConstants, form: WeightForm, *, is_wide: bool = False) -> SwappedTileConstants:
    """The same launch with narrow weights as the first operand. Inputs are summed alike in tiles of all sizes. is_wide:
    see `tile_constants`.
    """
    is_large = constants.block_t > TILE_ROWS[0]
    columns = _columns(constants.block_t, is_wide=is_wide)
    tile = Tile(constants.block_t, columns, 8) if is_large else Tile(constants.block_t, 64, 4)
    sizes = replace(constants, block_n=tile.columns, block_k=BLOCK_K, stages=stages_of(tile))
    return SwappedTileConstants(**asdict(sizes), blocks=blocks_of(form), warps=tile.warps)


def _columns(block_t: int, *, is_wide: bool) -> int:
    """Of a large tile. With 128 rows the most columns would spill registers."""
    return TILE_COLUMNS[is_wide and block_t == TILE_ROWS[1]]


def tile_options(constants: TileConstants) -> dict[str, int | bool]:
    """Options of a launch."""
    if isinstance(constants, SwappedTileConstants):
        tile = Tile(constants.block_t, constants.block_n, constants.warps)
        return swapped_options(tile, WeightForm(float8=constants.float8))
    warps = 8 if constants.block_n > 64 else 4
    return {"num_warps": warps, "num_stages": constants.stages, "enable_fp_fusion": False}
