"""Copies that are complete when the call returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..host.image import HostImage
from ..pages.adapter_layout import AdapterLayout
from .copy_engine import CopyEngine
from .copy_plan import CopyGroup
from .image_shape import check_image_shape
from .transfer import Transfer


class InlineCopies(CopyEngine):
    """For an arena on the CPU; on a GPU the way to serve without CuPy, slower because the host waits.

    pages: the arena, `[num_pages, page_elems]`.
    """

    def __init__(self, pages: torch.Tensor) -> None:
        num_pages, page_elems = pages.shape
        super().__init__(num_pages, page_elems, pages.itemsize, group_bytes=0)
        self._pages = pages

    def start(self, image: HostImage, layout: AdapterLayout, pages: Sequence[int]) -> Transfer:
        """As the base's, but all that has been read is in place when the call returns."""
        transfer = super().start(image, layout, pages)
        transfer.advance()
        return transfer

    def check_image(self, image: torch.Tensor, num_pages: int) -> None:
        check_image_shape(image, num_pages, self._pages)

    def fence(self, to_device: bool) -> None:
        if self._pages.is_cuda:
            torch.cuda.current_stream(self._pages.device).synchronize()

    def issue(self, image: torch.Tensor, group: CopyGroup, to_device: bool) -> None:
        host, arena = image.view(-1), self._pages.view(-1)
        for run in group.runs:
            there = arena[run.arena_elem : run.arena_elem + run.num_elems]
            here = host[run.image_elem : run.image_elem + run.num_elems]
            if to_device:
                there.copy_(here)
            else:
                here.copy_(there)

    def is_fired(self, event: None) -> bool:
        return True

    def join(self, event: None) -> None:
        """Nothing to wait for."""

    def synchronize(self, event: None) -> None:
        """Nothing to wait for."""
