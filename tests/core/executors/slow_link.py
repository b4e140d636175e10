"""A link slower than this machine's memory, by which adapters come into a CPU's arena: the case for offload workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from chorus.core.executors.adapters import ModelAdapters
from chorus.memory.host.image import HostImage, ReadGivenUp
from chorus.memory.pages.adapter_layout import AdapterLayout
from chorus.memory.transfers.host_copies import HostCopies, HostTransfer

#: Seconds after which a read that brings nothing is no longer followed.
_MOST_SECONDS = 600.0


class SlowCopies(HostCopies):
    """Copies a layer into its pages once `pace(layer, layout)` has returned, on a thread of each transfer's own."""

    def __init__(self, pages: torch.Tensor, pace: Callable[[int, AdapterLayout], None]) -> None:
        super().__init__(pages)
        self._pace = pace

    def start(self, image: HostImage, layout: AdapterLayout, pages: Sequence[int]) -> HostTransfer:
        passed = HostImage()
        transfer = HostTransfer(self, passed, layout, pages)
        threading.Thread(target=self._pass, args=(image, passed, layout), daemon=True).start()
        return transfer

    def _pass(self, image: HostImage, passed: HostImage, layout: AdapterLayout) -> None:
        try:
            for layer in range(layout.num_layers):
                self._pace(layer, layout)
                if not image.stream.wait(layer, _MOST_SECONDS):
                    return passed.fail(image.error or TimeoutError("the read brought nothing"))
                passed.data = image.data
                passed.publish(layer + 1)
        except ReadGivenUp:
            pass


def slow_down(adapters: ModelAdapters, pages: torch.Tensor, pace: Callable[[int, AdapterLayout], None]) -> None:
    """Have an executor's adapters come by `SlowCopies` from now on."""
    adapters.dma = replace(adapters.dma, copies=SlowCopies(pages, pace))
