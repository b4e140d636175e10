"""The interface of an executor's copies of KV pages between its arena and host memory."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

from .transfer import Transfer


class CopyMode(StrEnum):
    """How a backend copies pages."""

    AT_ONCE = "at once"
    """Copies are complete when they return."""
    BACKGROUND = "background"
    """Copies run while steps do, and nobody waits for them."""
    WAITED = "waited"
    """Somebody waits for copies, or they take messages: steps must not depend on many of them."""


class SwapBackend(Protocol):
    """Copies pages between arena and host; the executor implements it, so no other code touches a tensor."""

    @property
    def page_seconds(self) -> float:
        """Seconds to copy a page out and back, measured before anything was swapped."""
        ...

    @property
    def copying(self) -> CopyMode:
        """How pages are copied."""
        ...

    def copy_out(self, pages: Sequence[int], *, ahead: bool = False) -> tuple[Any, Transfer | None]:
        """Begin to copy pages to host memory; return the image, and its transfer unless it is already complete.

        ahead: nobody waits for the copy, so that others go before it.
        """
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
