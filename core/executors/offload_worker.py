"""An offload worker: a process that computes LoRA terms for the base model's process (CaraServe §4)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ...ops.cpu.lora_offload import OffloadWorker
from ...ops.library.native_descriptors import GemmShape
from ...ops.lora.sgmv import AdapterRows
from .shared_memory import MemoryLayout, SharedMemory

#: Seconds that a worker waits for the base model within a step: more than any step takes.
_PATIENCE_SECONDS = 600.0


class OffloadWorkerProcess:
    """Computes a share of the offloaded rows of each step, as rank `number`, from 1 on.

    Its methods are messages (`processes`).
    """

    joined = None

    def __init__(
        self,
        memory_fd: int,
        *,
        layout: MemoryLayout,
        number: int,
        gemm_shapes: Sequence[GemmShape],
        dtype: torch.dtype,
        page_elems: int,
        cpu: int | None,
    ) -> None:
        """cpu: the processor to which it is bound."""
        if cpu is not None:
            os.sched_setaffinity(0, {cpu})
        self._memory = SharedMemory(memory_fd, layout)
        self._ranks = self._memory.ranks(number, _PATIENCE_SECONDS)
        self._offload_worker = OffloadWorker(gemm_shapes, dtype)
        self._number, self._page_elems = number, page_elems

    def serve(
        self, step: int, rows: Sequence[AdapterRows], row: Sequence[int], share: Sequence[int], offsets: Sequence[int]
    ) -> None:
        """Compute until the base model's process ends the step.

        row, share: see `OffloadedSegments`; offsets: of the images.
        """
        self._ranks.begin(step)
        own = share[self._number - 1], share[self._number]
        images = [self._memory.address(offset) for offset in offsets]
        self._offload_worker.serve(
            self._ranks,
            rows=rows,
            row=row,
            share=own,
            images=images,
            page_elems=self._page_elems,
            exchanges=self._memory.exchanges,
        )
