"""Time of a schedule on the device: compiled without spills, right in its values, then timed as section `sgmv` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from ...ops.sgmv_schedule import RANK_CLASSES, Kind, Schedule
from ..kernels.variants import GROUPS, Variant, compile_variant
from .context import Context
from .lora_case import ArenaPages, LoraCase, layer_bytes, layers_for, num_pages
from .sections.sgmv import TOLERANCE
from .tune_search import Bucket, Unfit

#: Ranks of the adapters of a decode step, in turn, up to the bucket's.
_RANKS = (8, 16, 32, 64, 128, 256)

_MOST_SEGMENTS = 4
_MOST_LAYERS = {"decode": 256, "prefill": 8}

_TOKENS: dict[Kind, tuple[int, ...]] = {
    "decode": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "prefill": (256, 512, 1024, 2048, 4096, 8192),
}
_SMOKE_TOKENS: dict[Kind, tuple[int, ...]] = {"decode": (2,), "prefill": (16,)}


def buckets(context: Context, max_ranks: Sequence[int] = ()) -> list[Bucket]:
    """Those that a table of this device has entries for. max_ranks: RANK_CLASSES by default."""
    every = context.pick(_SMOKE_TOKENS, _TOKENS, _TOKENS)
    ranks = max_ranks or context.pick((16,), RANK_CLASSES, RANK_CLASSES)
    itemsize = context.dtype.itemsize
    return [Bucket(kind, tokens, rank, itemsize) for kind in every for rank in ranks for tokens in every[kind]]


def step(bucket: Bucket) -> tuple[list[int], list[int]]:
    """(lengths, ranks) of the segments that a bucket is measured with.

    Decode: an adapter per token, of all ranks up to the bucket's. Prefill: up to four of the bucket's rank.
    """
    if bucket.kind == "decode":
        ranks = sorted({*(rank for rank in _RANKS if rank < bucket.max_rank), bucket.max_rank}, reverse=True)
        return [1] * bucket.tokens, [ranks[index % len(ranks)] for index in range(bucket.tokens)]
    count = min(_MOST_SEGMENTS, max(1, bucket.tokens // 256))
    return [bucket.tokens // count] * count, [bucket.max_rank] * count


@dataclass(frozen=True, slots=True)
class _Chosen(Variant):
    """A kernel's specialisation for a schedule that no rule names."""

    chosen: Schedule

    def schedule(self) -> Schedule:
        return self.chosen


@cache
def _compile_problems(schedule: Schedule, max_rank: int, arch: str) -> tuple[str, ...]:
    phase = "prefill" if schedule.tensor_cores else "decode"
    lines = (
        compile_variant((_Chosen(f"{side}_{phase}", group, "bf16", 64, max_rank, schedule), arch))
        for group in GROUPS
        for side in ("shrink", "expand")
    )
    return tuple(
        f"{line.variant.kernel} of {line.variant.group} {problem}" for line in lines for problem in line.problems()
    )


class Bench:
    """`bench(bucket, schedule)`: microseconds per layer, all projections. Raises Unfit."""

    def __init__(self, context: Context, chosen: Sequence[Bucket]) -> None:
        """Makes pages for the largest of the buckets."""
        self._context = context
        pages = max(num_pages(context.size, step(it)[1], self._layers(it), it.itemsize) for it in chosen)
        self._arena = ArenaPages(context.size, context.dtype, context.device, pages, context.seed)

    def __call__(self, bucket: Bucket, schedule: Schedule) -> float:
        context = self._context
        if context.device == "cuda":
            major, minor = torch.cuda.get_device_capability()
            if problems := _compile_problems(schedule, bucket.max_rank, f"sm_{major}{minor}"):
                raise Unfit("; ".join(problems))
        lengths, ranks = step(bucket)
        layers = self._layers(bucket)
        case = LoraCase(
            context.size, self._arena, lengths, ranks, layers, schedule, bucket.max_rank, context.seed
        )  # fmt: skip
        if not (error := case.error()) <= TOLERANCE[context.dtype_name]:
            raise Unfit(f"differs from torch by {error:.1e} of the largest output")
        return context.timer.time(case.run).seconds / layers * 1e6

    def _layers(self, bucket: Bucket) -> int:
        size, ranks = self._context.size, step(bucket)[1]
        per_layer = layer_bytes(size, ranks, bucket.itemsize)
        return layers_for(per_layer, self._context.l2_bytes(), _MOST_LAYERS[bucket.kind])
