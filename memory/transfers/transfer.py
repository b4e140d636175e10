"""Transfers of images between host and arena: interfaces of copy engines and of the transfers they start.

Tests: tests/memory/transfers/test_swapped_kv.py, tests/memory/transfers/test_page_copies.py
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from ..host.image import HostImage
from ..pages.adapter_layout import AdapterLayout

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class ExecutorLost(RuntimeError):
    """The device failed for good: this process can no longer compute or copy anything."""


class Transfer(Protocol):
    """The copy of an adapter's bytes into its pages, in layer order."""

    @property
    def address(self) -> int:
        """Address of an int32: the layers in place, as far as the host has checked; 0 if they are not counted."""
        ...

    def wait_layer(self, layer: int, timeout: float) -> bool:
        """Make later computations see `layer`, waiting at most `timeout` seconds; return False if impossible."""
        ...

    def is_done(self) -> bool:
        """True if every layer is in its pages."""
        ...

    def has_failed(self) -> bool:
        """True if the rest will never come."""
        ...

    def cancel(self) -> None:
        """Start no more copies; the pages may be reused once `is_quiet`."""
        ...

    def is_quiet(self) -> bool:
        """True if no copy is running and none will be started."""
        ...


def state_of(transfer: Transfer) -> Literal["coming", "done", "failed"]:
    """Return the state of a copy of KV; a cancelled one has failed. Raises ExecutorLost."""
    try:
        if transfer.is_done():
            return "done"
        return "failed" if transfer.has_failed() else "coming"
    except ExecutorLost:
        raise
    except Exception:  # a driver that refuses a copy: the KV is computed again
        logger.exception("a copy of KV failed")
        return "failed"


class CopyEngine(Protocol):
    """Moves images between the host and one arena. `start` is called by the thread that launches compute."""

    @property
    def is_background(self) -> bool:
        """True if copies run while the caller and steps go on."""
        ...

    def start(self, image: HostImage, layout: AdapterLayout, pages: Sequence[int]) -> Transfer:
        """Begin to load an adapter into `pages` (arena page per page of the layout).

        image: its data is `[layout.num_pages, page_elems]` on the host. While it is still being read, the reading
        thread copies each layer as it comes. Copies begin after all compute launched so far, which may still use the
        pages for their former owner. Raises ValueError for an image or pages that don't fit.
        """
        ...

    def copy_out(self, pages: Sequence[int], image: torch.Tensor) -> None:
        """Copy whole pages to the host, complete when this returns. image: `[len(pages), page_elems]`."""
        ...

    def copy_pages(
        self, image: torch.Tensor, pages: Sequence[int], *, to_device: bool, ahead: bool = False
    ) -> Transfer:
        """Begin to move whole pages, such as a swapped-out request's KV, into the arena or out of it.

        image: `[len(pages), page_elems]` on the host. Copies begin after all compute launched so far. ahead: nobody
        waits for it, so that other copies through pinned blocks go first.
        """
        ...

    def advance(self) -> None:
        """Begin the copies that can begin, and drop transfers that have ended; to be called once per step."""
        ...

    def close(self) -> None:
        """End every transfer and wait until no copy is running. The arena may be freed after that."""
        ...


def check_pages(pages: Sequence[int], wanted: int, num_pages: int) -> None:
    """Raise ValueError unless `pages` are `wanted` pages of an arena of `num_pages`."""
    if len(pages) != wanted:
        raise ValueError(f"the adapter has {wanted} pages, {len(pages)} pages of the arena were given")
    for page in pages:
        if not 0 <= page < num_pages:
            raise ValueError(f"page {page} is not one of the arena's {num_pages} pages")


def check_image(image: torch.Tensor, num_pages: int, arena: torch.Tensor) -> None:
    """Raise ValueError unless `image` is contiguous, on the host, `[num_pages, page_elems]` and of the dtype."""
    want = (num_pages, arena.shape[1])
    is_host = image.device.type == "cpu"
    if not is_host or tuple(image.shape) != want or image.dtype != arena.dtype or not image.is_contiguous():
        raise ValueError(
            f"image must be {list(want)}, {arena.dtype}, contiguous and on the host, "
            f"not {list(image.shape)}, {image.dtype}, strides {image.stride()}, on {image.device}"
        )
