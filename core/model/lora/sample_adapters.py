"""Random adapters, with which kernels are tried and steps are timed before real ones are loaded.

Tests: tests/core/model/lora/test_lora_state_cuda.py, tests/core/executors/test_cuda_interpreted.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from ....ops.lora.sgmv import Segments
from .lora_launches import LoraLaunches
from .lora_state import rows_in
from .lora_state_cuda import CudaLoraState

#: Rank of the adapters, and the standard deviation of their elements: large enough that the LoRA terms are about as
#: large as the base model's.
RANK, SCALE = 16, 1 / 16


class SampleAdapters:
    """Adapters of one rank on all modules, in pages of their own. Within the context that this is, launches read them.

    Were they in the model's arena, the KV of steps that run meanwhile would overwrite them. Were they all in the same
    pages, steps would find them in a cache.
    """

    def __init__(self, lora: CudaLoraState, rows: int, free_bytes: int) -> None:
        """rows: sequences of the largest step. free_bytes: free memory of the device. The adapters take at most a
        quarter of it; if they need more, they share pages.
        """
        self._lora = lora
        self._parts, self._layout = lora.whole(min(RANK, lora.max_rank))
        page_bytes = lora.arena.nbytes // len(lora.arena)
        pages = max(1, min(rows * self._layout.num_pages, free_bytes // 4 // page_bytes))
        self.pages = lora.arena.new_empty((pages, *lora.arena.shape[1:]))
        self._entered = ExitStack()

    def __enter__(self) -> SampleAdapters:
        lora, arena = self._lora, self._lora.arena
        self._entered.enter_context(random_numbers(self.pages))
        self._entered.callback(lora.use_arena, arena)
        self._entered.callback(lora.rest)
        lora.use_arena(self.pages)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def launches(self, rows: int) -> LoraLaunches:
        """The launches of a captured step of so many sequences, with tables in which each has an adapter of its own, as
        far as they have room.
        """
        tables, layout = self._lora.tables, self._layout
        places, most = list(zip(self._parts, layout.parts, strict=True)), len(tables.offsets) // len(self._parts)
        pages, adapters = itertools.cycle(range(len(self.pages))), []
        for _ in range(min(rows, most)):
            own = list(itertools.islice(pages, layout.num_pages))
            adapters.append([rows_in(part, place, own) for part, place in places])
        segments = Segments()
        for row, adapter in zip(range(rows), itertools.cycle(adapters)):
            for part in adapter:
                segments.add(row, row + 1, part)
        launches = self._lora.bucket(rows)
        tables.plan(segments, launches.schedule.tile_tokens)
        return launches


@contextmanager
def random_numbers(pages: torch.Tensor) -> Iterator[None]:
    """Within this context pages hold random numbers, from a seed; they are zeroed afterwards."""
    pages.normal_(0.0, SCALE, generator=torch.Generator(pages.device).manual_seed(0))
    try:
        yield
    finally:
        pages.zero_()
