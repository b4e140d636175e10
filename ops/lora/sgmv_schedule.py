"""Schedules of SGMV launches. They depend on the bucket, never on data that is on a device.

Tests: tests/ops/lora/test_sgmv_triton.py, tests/ops/lora/test_sgmv_tables.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from .sgmv_tables import place_blocks

Kind = Literal["decode", "prefill"]

#: Numbers of tokens at which the range of one schedule ends, by the rules below.
RULE_LIMITS: dict[Kind, tuple[int, ...]] = {"decode": (8, 64), "prefill": (256, 1024)}

#: Largest ranks for which prefill has its own schedules; higher ranks use the schedule of the tables' largest rank.
RANK_CLASSES = (16, 64, 256)


#: Most projections of a launch.
MAX_TARGETS = 4


@dataclass(frozen=True, slots=True)
class Schedule:
    """Sizes of a shrink and an expand launch; all are compile-time constants of the kernels."""

    tensor_cores: bool
    """True: a program multiplies `tile_tokens` tokens at once; otherwise it has one token."""
    tile_tokens: int
    """The most tokens of a segment per program."""
    block_r: int
    """Rank-rows at once in shrink."""
    expand_r: int
    """Rank-rows at once in expand."""
    block_k: int
    """Inputs at once."""
    block_n: int
    """Outputs of a program."""
    max_splits: int
    lanes: int
    """Programs that share a tile's rank-rows in shrink."""
    warps: int
    expand_warps: int
    stages: int

    def chunks(self, d_in: int) -> int:
        """Blocks of inputs that one shrink program processes."""
        return -(-d_in // (self.block_k * self.max_splits))

    def splits(self, d_in: int) -> int:
        """Number of parts into which shrink splits `d_in` inputs."""
        return -(-d_in // (self.block_k * self.chunks(d_in)))

    def options(self, expand: bool) -> dict[str, int | bool]:
        """Options of a launch. Multiplications and additions fuse, whatever Triton's default."""
        warps = self.expand_warps if expand else self.warps
        return {"num_warps": warps, "num_stages": self.stages, "enable_fp_fusion": True}

    def max_tiles(self, tokens: int, segments: int) -> int:
        """The most tiles that `segments` segments with `tokens` tokens in all may need, however they are split."""
        return min(tokens, tokens // self.tile_tokens + segments)


def decode(tokens: int, max_rank: int) -> Schedule:
    """The schedule for decode steps, where every token may have another adapter.

    Reading rank-rows takes most of the time, so many small programs read them. Even tokens of one adapter have a
    program each. The L2 cache has the rank-rows that the first program read, and a single program that takes token
    after token would wait for that cache once per token.

    tokens, max_rank: the bucket's, not a step's. Lanes are for high ranks in small buckets, which leave a GPU idle. In
    large buckets most lanes would find a low rank and have nothing to do. A program of expand is one warp, with all
    rank-rows of a column in one thread, so no sum crosses threads or depends on the bucket.
    """
    block_r = 16 if max_rank > 8 else 8
    return Schedule(
        tensor_cores=False,
        tile_tokens=1,
        block_r=block_r,
        expand_r=block_r,
        block_k=256,
        block_n=128,
        max_splits=16,
        lanes=min(4, -(-max_rank // block_r)) if tokens <= 8 else 1,
        warps=4,
        expand_warps=1,
        stages=2,
    )


def rank_classes(max_rank: int) -> list[int]:
    """The largest ranks of prefill's schedules, up to the tables' own: few, as each is compiled ahead."""
    return [*(limit for limit in RANK_CLASSES if limit < max_rank), max_rank]


def prefill(tokens: int, max_rank: int, itemsize: int = 2) -> Schedule:
    """The schedule for segments of many tokens: tensor cores multiply tiles of tokens with rank-rows and with columns.

    itemsize: in float32, which tensor cores don't take directly, tiles are smaller.
    """
    block_r = 16 if max_rank <= 16 or itemsize > 2 else 32 if max_rank <= 32 else 64
    return Schedule(
        tensor_cores=True,
        tile_tokens=64,
        block_r=block_r,
        expand_r=min(block_r, 32),
        block_k=64 if itemsize <= 2 else 32,
        block_n=128 if itemsize <= 2 else 64,
        max_splits=8 if tokens <= 256 else 4 if tokens <= 1024 else 2,
        lanes=-(-max_rank // block_r),
        warps=4,
        expand_warps=4,
        stages=3,
    )


def token_limits(kind: Kind, most: int) -> list[int]:
    """Rising numbers of tokens up to `most`; between two of them there is one schedule per rank and element size."""
    return [*(limit for limit in RULE_LIMITS[kind] if limit < most), most]


@dataclass(frozen=True, slots=True)
class Modules:
    """Projections of a launch, with adjacent outputs. Tuples have MAX_TARGETS items, 0 beyond the last projection."""

    count: int
    ids: tuple[int, ...] = (0,) * MAX_TARGETS
    widths: tuple[int, ...] = (0,) * MAX_TARGETS
    """Columns of each."""
    columns: tuple[int, ...] = (0,) * MAX_TARGETS
    """The first column of each."""
    blocks: tuple[int, ...] = (0,) * MAX_TARGETS
    """The first block of columns of each: a program's columns are of one projection."""

    @classmethod
    def build(cls, ids: Sequence[int], widths: Sequence[int], block_n: int) -> Modules:
        """block_n: columns of a block."""
        padded = [*widths, *[0] * (MAX_TARGETS - len(widths))]
        return cls(
            count=len(ids),
            ids=(*ids, *[0] * (MAX_TARGETS - len(ids))),
            widths=tuple(padded),
            columns=tuple(accumulate(padded[:-1], initial=0)),
            blocks=tuple(accumulate((-(-width // block_n) for width in padded[:-1]), initial=0)),
        )


@dataclass(frozen=True, slots=True)
class Records:
    """How a launch finds rank-rows; see `SgmvTables`."""

    page: int = 0
    """Elements of a page."""
    vec: int = 0
    """Elements in 16 bytes."""
    blocks: int = 0
    """Records of an adapter in a layer, each of PLACE_ROWS rank-rows."""
    pages: int = 0
    """Pages of a record; 0: records are not read."""
    modules: int = 0
    """Of the model, that adapters may change."""


@dataclass(frozen=True, slots=True)
class ShrinkConstants:
    """Compile-time constants of a shrink launch."""

    modules: Modules
    records: Records
    d_in: int
    chunks: int
    """Blocks of inputs of a program."""
    lanes: int
    """Programs that share a tile's rank-rows."""
    block_r: int
    block_k: int
    block_t: int
    """Tokens of a tile."""
    warps: int
    terms: int
    """Records of a tile, see `SgmvTables`."""
    pdl: bool = False
    """The previous launch may still be running when this one begins."""


@dataclass(frozen=True, slots=True)
class ExpandConstants:
    """Compile-time constants of an expand launch."""

    modules: Modules
    records: Records
    row: int
    """The most columns of a projection."""
    splits: int
    """Number of shrink's partial sums."""
    split_block: int
    """`splits`, or the next power of two."""
    block_r: int
    block_n: int
    block_t: int
    """Tokens of a tile."""
    stages: int
    """Blocks of rank-rows in flight at once, after the first."""
    terms: int
    """See `ShrinkConstants`."""
    pdl: bool = False
    """See `ShrinkConstants`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SgmvShape:
    """The projections that share an input, the adapters' pages and tables, and the schedule of their launches."""

    schedule: Schedule
    modules: tuple[tuple[int, int, int], ...]
    """(module id, first column, width) of each projection."""
    d_in: int
    page_elems: int
    itemsize: int
    max_rank: int
    """The tables' largest rank."""
    pages: int
    """Pages of one of the tables' records."""
    table: int
    """Modules in the tables."""

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(module for module, _, _ in self.modules)

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(width for _, _, width in self.modules)

    @property
    def records(self) -> Records:
        """How launches of this schedule find rank-rows."""
        pages = 0 if self.schedule.tensor_cores else self.pages
        return Records(self.page_elems, max(1, 16 // self.itemsize), place_blocks(self.max_rank), pages, self.table)


def shrink_constants(shape: SgmvShape, terms: int = 1) -> ShrinkConstants:
    """terms: records of a tile."""
    schedule = shape.schedule
    return ShrinkConstants(
        Modules.build(shape.ids, (), 1),
        shape.records,
        d_in=shape.d_in,
        chunks=schedule.chunks(shape.d_in),
        lanes=schedule.lanes,
        block_r=schedule.block_r,
        block_k=schedule.block_k,
        block_t=schedule.tile_tokens,
        warps=schedule.warps,
        terms=terms,
    )


def expand_constants(shape: SgmvShape, terms: int = 1) -> ExpandConstants:
    """See `shrink_constants`."""
    schedule = shape.schedule
    splits = schedule.splits(shape.d_in)
    return ExpandConstants(
        Modules.build(shape.ids, shape.widths, schedule.block_n),
        shape.records,
        row=max(shape.widths),
        splits=splits,
        split_block=1 << (splits - 1).bit_length(),
        block_r=schedule.expand_r,
        block_n=schedule.block_n,
        block_t=schedule.tile_tokens,
        stages=schedule.stages if shape.itemsize <= 2 else 1,  # a block of float32 takes the registers of two
        terms=terms,
    )


@dataclass(frozen=True, slots=True)
class ExpandShape:
    """The adapters that a GEMM expands, as its compile-time constants have them."""

    modules: tuple[int, ...]
    """Ids of the projections."""
    widths: tuple[int, ...]
    """Columns of the projections, which are adjacent."""
    splits: int
    """Number of shrink's partial sums."""
    page_elems: int
    itemsize: int
    max_rank: int
    """The tables' largest rank."""
    pages: int
    """Pages of one of the tables' records."""
    table: int
    """Modules in the tables."""

    @classmethod
    def build(cls, shape: SgmvShape) -> ExpandShape:
        """shape: of shrink's launch, whose schedule has one token per tile."""
        return cls(
            modules=shape.ids,
            widths=shape.widths,
            splits=shape.schedule.splits(shape.d_in),
            page_elems=shape.page_elems,
            itemsize=shape.itemsize,
            max_rank=shape.max_rank,
            pages=shape.pages,
            table=shape.table,
        )

    @property
    def records(self) -> Records:
        """How the launch finds rank-rows."""
        vec, blocks = max(1, 16 // self.itemsize), place_blocks(self.max_rank)
        return Records(self.page_elems, vec, blocks, self.pages, self.table)
