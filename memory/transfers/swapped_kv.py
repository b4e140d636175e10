"""Swapped KV of preempted requests in host memory: being copied out, kept, and being copied back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..host.budget import HostBudget
from ..pages.block_table import BlockTable
from ..pages.eviction import RestoreCosts
from ..pages.pool import IntegrityError, PageKind, PagePool
from .page_copies import PageFetch
from .swap_backend import SwapBackend
from .transfer import Transfer, state_of


@dataclass(slots=True, eq=False)
class KvImage:
    """KV of a request's first `num_tokens` tokens, without the blocks before `blocks`, which others used then."""

    data: Any
    num_bytes: int
    blocks: range
    held: list[bool]
    """For each page of these blocks' page groups: False if it had left its window. After them come the pages of the
    request's state."""
    num_tokens: int
    accepted: int = 0
    """Of these tokens, accepted drafts that the state has the inputs of: see `StateSlots`."""
    is_whole: bool = False
    """True if all of it is in host memory."""
    is_used: bool = False
    """True if its request is starting, or it is being copied back: it must not be dropped for others."""
    is_dropped: bool = False
    """True if it is lost, or no longer needed."""


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy in flight."""

    transfer: Transfer
    image: KvImage
    is_out: bool
    table: BlockTable | None
    """The pages to free when the copy ends; None while a request has them."""


class SwappedKv:
    """Images of KV, within the host memory budget that they share with adapters' images.

    A new image evicts adapters' images and cached pages, never another request's KV. Adapters that requests wait for
    evict KV images as a last resort, oldest first.

    An in-flight copy owns its pages until it completes. Pages copied out are then freed. Pages of a cancelled copy back
    are freed when nothing writes to them any more.
    """

    def __init__(
        self, backend: SwapBackend | None, budget: HostBudget, page_bytes: int, costs: RestoreCosts | None = None
    ) -> None:
        """backend: None if copies are impossible; then no KV is ever saved."""
        self.backend = backend
        self._costs = costs or RestoreCosts()
        self._budget = budget
        self._page_bytes = page_bytes
        self._images: dict[KvImage, None] = {}  # oldest first
        self.copies: list[_Copy] = []
        """Copies in flight, in either direction."""
        self.num_bytes = 0
        self.num_out = self.num_in = self.num_bytes_out = self.num_bytes_in = self.num_dropped = 0
        budget.join(self)

    def __len__(self) -> int:
        """Number of images, including images being copied."""
        return len(self._images)

    @property
    def frees_pages(self) -> bool:
        """True if pages will become free when copies end."""
        return any(copy.table is not None for copy in self.copies)

    def leaving(self) -> Counter[int]:
        """Count, for each page, the copies that hold it until they end."""
        return Counter(page for copy in self.copies if copy.table is not None for page in copy.table.held)

    def swap_out(self, table: BlockTable, blocks: range, num_tokens: int) -> KvImage | None:
        """Begin to copy blocks of a table that is about to be freed; return None if there is no room or no backend.

        If the copy does not complete at once, it takes over the pages and the table becomes empty. Raises the backend's
        errors; then nothing is kept.
        """
        pages = table.of_blocks(blocks)
        held = [page != PagePool.DUMMY for page in pages]
        copied = [page for page in pages if page]
        if table.states is not None:
            copied += table.states.current
        num_bytes = len(copied) * self._page_bytes
        if self.backend is None or not blocks or not self._budget.claim(num_bytes):
            return None
        data, transfer = self.backend.copy_out(copied)
        accepted = 0 if table.states is None else table.states.accepted
        image = KvImage(
            data, num_bytes, blocks, held, num_tokens=num_tokens, accepted=accepted, is_whole=transfer is None
        )
        self._images[image] = None
        self.num_bytes += num_bytes
        self._budget.offer(self, image, num_bytes, len(copied) * self._costs.prefix_page, 1, wanted=True)
        if transfer is not None:
            self.copies.append(_Copy(transfer, image, True, table.hand_over()))
        self.num_out += 1
        self.num_bytes_out += num_bytes
        return image

    def hold(self, image: KvImage) -> None:
        """Keep an image from being dropped for others while room is made for its request."""
        image.is_used = True

    def let_go(self, image: KvImage) -> None:
        """Let an image be dropped for others again: its request did not start."""
        image.is_used = False

    def restore(self, image: KvImage, pages: Sequence[int], skip: int) -> Transfer | None:
        """Begin to copy a complete image back, without its first `skip` pages; return None if that is already done.

        The pages are the request's; while the transfer is in flight, only `cancel` may release them.
        """
        assert self.backend is not None
        transfer = self.backend.copy_in(image.data, skip, pages)
        self.num_in += 1
        self.num_bytes_in += len(pages) * self._page_bytes
        if transfer is None:
            self.forget(image)
        else:
            image.is_used = True
            self.copies.append(_Copy(transfer, image, False, None))
        return transfer

    def fetch(self, image: KvImage, pages: Sequence[int]) -> Transfer | None:
        """Begin to copy images of cached pages, the list in `image.data`, into pages; None if that is already done.

        As of `restore`, but the images are the prefix cache's. Raises the backend's errors.
        """
        assert self.backend is not None
        transfer = PageFetch(self.backend, image.data, pages, self._page_bytes)
        if transfer.is_complete:
            return None
        image.is_used = True
        self.copies.append(_Copy(transfer, image, False, None))
        return transfer

    def cancel(self, image: KvImage, table: BlockTable) -> None:
        """End a copy back early; the image stays, and the table's pages are freed as soon as that is safe."""
        for copy in self.copies:
            if copy.image is image and not copy.is_out and copy.table is None:
                copy.table = table.hand_over()
                copy.transfer.cancel()

    def drop(self, item: Hashable) -> None:
        """Drop an image that was not restored: it is lost, others need its memory, or the KV exists without it."""
        if isinstance(item, KvImage) and not item.is_dropped:
            self.num_dropped += 1
            self.forget(item)

    def forget(self, image: KvImage) -> None:
        """Drop an image. Its memory counts until no copy reads or writes it."""
        image.is_dropped = True
        for copy in self.copies:
            if copy.image is image:
                copy.transfer.cancel()
        self._clear(image)

    def finish_copies(self) -> tuple[list[Transfer], list[Transfer]]:
        """Complete ended copies; return the transfers of finished and of failed copies back.

        The caller must `cancel` the failed ones.
        """
        done, failed = [], []
        for copy in list(self.copies):
            state = state_of(copy.transfer)
            if copy.table is None and state == "failed":
                failed.append(copy.transfer)
            elif copy.is_out and state == "done":
                copy.image.is_whole = True
                self._end(copy)
            elif state == "done" and copy.table is None:
                self.copies.remove(copy)
                self.forget(copy.image)
                done.append(copy.transfer)
            elif state != "coming" and copy.transfer.is_quiet():
                if copy.is_out and not copy.image.is_dropped:
                    self.drop(copy.image)
                self._end(copy)
        return done, failed

    def wait(self, timeout: float) -> bool:
        """Wait until a copy may have ended; return False at once if nothing is being copied."""
        if self.copies and self.backend is not None:
            self.backend.wait(timeout)
        return bool(self.copies)

    # -- called by the budget

    def is_loose(self, item: Hashable) -> bool:
        return isinstance(item, KvImage) and item.is_whole and not item.is_used and not item.is_dropped

    # -- integrity

    def holders(self) -> Iterator[tuple[PageKind, list[int]]]:
        """Pages that copies hold, for `PagePool.check_integrity`."""
        for copy in self.copies:
            if copy.table is not None:
                yield PageKind.KV, copy.table.held

    def check_integrity(self, wanted: Iterable[KvImage]) -> None:
        """Raise IntegrityError unless every image is `wanted` or still being copied, and the bytes add up."""
        known = {id(image) for image in wanted} | {id(copy.image) for copy in self.copies}
        if any(id(image) not in known for image in self._images):
            raise IntegrityError("host memory holds KV of a request that has ended")
        if (total := sum(image.num_bytes for image in self._images)) != self.num_bytes:
            raise IntegrityError(f"swapped KV has {total} bytes, {self.num_bytes} are counted")

    def _end(self, copy: _Copy) -> None:
        self.copies.remove(copy)
        if copy.table is not None:
            copy.table.free()
        if not copy.is_out:
            copy.image.is_used = False
        if copy.image.is_dropped:
            self._clear(copy.image)

    def _clear(self, image: KvImage) -> None:
        if image in self._images and all(copy.image is not image for copy in self.copies):
            del self._images[image]
            self._budget.withdraw(image)
            image.data = None
            self.num_bytes -= image.num_bytes
