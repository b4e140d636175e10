"""The interface of an executor's copies of KV pages between its arena and host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .transfer import Transfer


class SwapBackend(Protocol):
    """Copies pages between arena and host; the executor implements it, so no other code touches a tensor."""

    @property
    def page_seconds(self) -> float:
        """Seconds to copy a page out and back, measured before anything was swapped."""
        ...

    @property
    def copies_at_once(self) -> bool:
        """True if copies out are complete when `copy_out` returns."""
        ...

    @property
    def keeps_evicted(self) -> bool:
        """True if pages that are evicted are copied to host memory first: a step must not wait for a device's copy."""
        ...

    def copy_out(self, pages: Sequence[int]) -> tuple[Any, Transfer | None]:
        """Begin to copy pages to host memory; return the image, and its transfer unless it is already complete."""
        ...

    def copy_in(self, image: Any, skip: int, pages: Sequence[int]) -> Transfer | None:
        """Begin to copy an image, without its first `skip` pages, into pages; return None if they already hold it."""
        ...

    def wait(self, timeout: float) -> None:
        """Wait until a copy may have ended, at most `timeout` seconds."""
        ...

    def new_image(self) -> Any:
        """Return an uninitialized image of a page; from any thread."""
        ...

    def bytes_of(self, image: Any) -> memoryview:
        """Return the bytes of an image of a page, to read or to change."""
        ...
