"""Schedule of an SGMV launch. Picked from what a bucket knows, never from what a device holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .sgmv_tables import place_blocks

Kind = Literal["decode", "prefill"]

#: Numbers of tokens at which a range of one schedule ends by the rules below.
RULE_LIMITS: dict[Kind, tuple[int, ...]] = {"decode": (8, 64), "prefill": (256, 1024)}

#: Largest ranks for which prefill has schedules of its own; above the last there is that of the tables' largest rank.
RANK_CLASSES = (16, 64, 256)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Sizes of a shrink and an expand launch; all are compile-time constants of the kernels.

    tensor_cores: products of `tile_tokens` tokens at once; otherwise a program has one token.
    tile_tokens: most tokens of a segment that a program takes. block_r, expand_r: rank-rows at once, in shrink and in
    expand. block_k: inputs at once. block_n: outputs of a program. lanes: programs that share a tile's rank-rows in
    shrink.
    """

    tensor_cores: bool
    tile_tokens: int
    block_r: int
    expand_r: int
    block_k: int
    block_n: int
    max_splits: int
    lanes: int
    warps: int
    expand_warps: int
    stages: int

    def chunks(self, d_in: int) -> int:
        """Blocks of inputs that one shrink program goes through."""
        return -(-d_in // (self.block_k * self.max_splits))

    def splits(self, d_in: int) -> int:
        """Parts that shrink cuts `d_in` inputs into."""
        return -(-d_in // (self.block_k * self.chunks(d_in)))

    def options(self, expand: bool) -> dict[str, int | bool]:
        """Options of a launch. Multiplications and additions fuse, whatever triton's default."""
        warps = self.expand_warps if expand else self.warps
        return {"num_warps": warps, "num_stages": self.stages, "enable_fp_fusion": True}

    def max_tiles(self, tokens: int, segments: int) -> int:
        """Tiles that `segments` segments of `tokens` tokens in all may need, however the tokens are shared out."""
        return min(tokens, tokens // self.tile_tokens + segments)


def decode(tokens: int, max_rank: int) -> Schedule:
    """Every token may be of another adapter: the time goes to reading rank-rows, so many small programs read them. Even
    tokens of one adapter have a program each: the L2 cache has the rank-rows that the first program has read, and one
    program that takes token after token would wait for that cache once per token.

    tokens, max_rank: the bucket's, not a step's. Lanes are for high ranks in small buckets, which leave a GPU idle; in
    large buckets most lanes would find a low rank and have nothing to do. A program of expand is one warp, with all
    rank-rows of a column in one thread, so that no sum crosses threads, or depends on the bucket.
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
    """Largest ranks, rising to the tables' own, for which prefill has schedules. Few, as each is compiled ahead."""
    return [*(limit for limit in RANK_CLASSES if limit < max_rank), max_rank]


def prefill(tokens: int, max_rank: int, itemsize: int = 2) -> Schedule:
    """Segments of many tokens: tensor cores multiply tiles of tokens with rank-rows and with columns.

    itemsize: in float32, which tensor cores don't take as it is, tiles are smaller.
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
    """Rising numbers of tokens up to `most`: between one and the next, there is one schedule per rank and size."""
    return [*(limit for limit in RULE_LIMITS[kind] if limit < most), most]


def shrink_constants(
    schedule: Schedule,
    modules: Sequence[tuple[int, int, int]],
    d_in: int,
    page_elems: int,
    itemsize: int,
    rank: int,
    pages: int,
) -> dict[str, int]:
    """Compile-time constants of a shrink launch; rank: the tables' largest. pages: in a record of theirs."""
    ids = [module for module, _, _ in modules]
    constants = dict(zip(("M0", "M1", "M2"), [*ids, 0, 0], strict=False))
    constants |= {"MODULES": len(ids), "D_IN": d_in, "PAGE": page_elems, "VEC": max(1, 16 // itemsize)}
    constants |= {"BLOCKS": place_blocks(rank), "CHUNKS": schedule.chunks(d_in), "LANES": schedule.lanes}
    constants |= {"BLOCK_R": schedule.block_r, "BLOCK_K": schedule.block_k}
    if schedule.tensor_cores:
        return constants | {"BLOCK_T": schedule.tile_tokens}
    return constants | {"PAGES": pages, "WARPS": schedule.warps, "PDL": 0}


def expand_constants(
    schedule: Schedule,
    modules: Sequence[tuple[int, int, int]],
    d_in: int,
    page_elems: int,
    itemsize: int,
    rank: int,
    pages: int,
) -> dict[str, int]:
    """Compile-time constants of an expand launch."""
    ids, widths = [module for module, _, _ in modules], [width for _, _, width in modules]
    splits = schedule.splits(d_in)
    constants = dict(zip(("M0", "M1", "M2"), [*ids, 0, 0], strict=False))
    constants |= dict(zip(("W0", "W1", "W2"), [*widths, 0, 0], strict=False))
    constants |= {"MODULES": len(ids), "ROW": max(widths), "PAGE": page_elems, "VEC": max(1, 16 // itemsize)}
    constants |= {"BLOCKS": place_blocks(rank), "SPLITS": splits}
    constants |= {"BLOCK_R": schedule.expand_r, "BLOCK_N": schedule.block_n}
    if schedule.tensor_cores:
        return constants | {"BLOCK_T": schedule.tile_tokens}
    constants |= {"PAGES": pages, "SPLIT_BLOCK": 1 << (splits - 1).bit_length()}
    stages = schedule.stages if itemsize <= 2 else 1  # a block of float32 takes the registers of two
    return constants | {"STAGES": stages, "PDL": 0}


@dataclass(frozen=True, slots=True)
class ExpandShape:
    """Compile-time constants of the adapters that are expanded behind a product.

    modules, widths: ids and columns of the projections, side by side. splits: parts of shrink's sums. max_rank: the
    tables' largest. pages: in a record of theirs.
    """

    modules: tuple[int, ...]
    widths: tuple[int, ...]
    splits: int
    page_elems: int
    itemsize: int
    max_rank: int
    pages: int

    @classmethod
    def build(
        cls,
        schedule: Schedule,
        modules: Sequence[tuple[int, int, int]],
        d_in: int,
        page_elems: int,
        itemsize: int,
        max_rank: int,
        pages: int,
    ) -> ExpandShape:
        """schedule: shrink's, of a token a tile. modules: (module id, first column, width)."""
        ids, widths = tuple(module for module, _, _ in modules), tuple(width for _, _, width in modules)
        return cls(ids, widths, schedule.splits(d_in), page_elems, itemsize, max_rank, pages)

    def constants(self) -> dict[str, int]:
        constants = dict(zip(("M0", "M1", "M2"), [*self.modules, 0, 0], strict=False))
        constants |= dict(zip(("W0", "W1", "W2"), [*self.widths, 0, 0], strict=False))
        return constants | {
            "MODULES": len(self.modules),
            "PAGE": self.page_elems,
            "VEC": max(1, 16 // self.itemsize),
            "BLOCKS": place_blocks(self.max_rank),
            "PAGES": self.pages,
            "PARTS": self.splits,
            "PART_BLOCK": 1 << (self.splits - 1).bit_length(),
        }
