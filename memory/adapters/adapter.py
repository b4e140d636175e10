"""An adapter version, and the interface of the backend that reads and moves adapter bytes.

Tests: tests/memory/adapters/test_adapter_store.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..files.error import AdapterFormatError, shown
from .composition import is_composition

if TYPE_CHECKING:
    from ..files.identity import ContentHash
    from ..files.manifest import AdapterManifest
    from ..host.image import HostImage
    from ..pages.adapter_layout import AdapterLayout
    from ..transfers.transfer import Transfer

MAX_NAME_CHARACTERS = 256


def check_name(name: str) -> str:
    """Return the name if responses, logs and metrics can contain it; else raise AdapterFormatError, quoted."""
    if len(name) > MAX_NAME_CHARACTERS:
        raise AdapterFormatError(
            f"{shown(name[:MAX_NAME_CHARACTERS])}… has {len(name)} characters; names have at most {MAX_NAME_CHARACTERS}"
        )
    if not name or not name.isprintable() or name != name.strip():
        raise AdapterFormatError(
            f"{shown(name)} can't be a name: use printable UTF-8 characters, no blanks at the ends"
        )
    if is_composition(name):
        raise AdapterFormatError(
            f"{shown(name)} can't be a name: it reads as adapters with scales, such as A*0.7+B*0.5; leave out the *"
        )
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise AdapterFormatError(f"{shown(name)} can't be a name: a part between slashes is empty, '.' or '..'")
    return name


class Tier(StrEnum):
    """Where an adapter's bytes are."""

    DISK = "disk"
    LOADING = "loading"
    """Being read from disk, or copied into its pages."""
    HOST = "host"
    DEVICE = "device"
    FAILED = "failed"
    """On disk, but reading it failed."""


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Adapter:
    """One version of one adapter."""

    name: str
    version: int
    """Counts up over all adapters; requests and the prefix cache identify a version by it."""
    manifest: AdapterManifest
    layout: AdapterLayout
    label: str = ""
    """The version as clients see it; see `versions`."""
    pages: list[int] = field(default_factory=list)
    """Empty unless the adapter is resident."""
    transfer: Transfer | None = None
    """The copy of its bytes into the pages, until it is complete."""
    is_idle: bool = False
    """True if the adapter is resident, and neither pinned nor used by a running request."""
    references: int = 0
    """Running requests; they pin its pages."""
    requests: int = 0
    """Live requests that hold this version, waiting or running."""
    uses: int = 0
    load_seconds: float | None = None
    """Duration of its latest copy from host memory into the pages."""
    sources: tuple[Adapter, ...] = ()
    """The versions that it is composed of; empty: it has files of its own."""
    num_overflows: int | None = 0
    """Requests that ended because its logits were not finite; None once a request has ended normally."""
    rank: int = field(init=False)  # used in every step

    def __post_init__(self) -> None:
        self.rank = self.manifest.rank
        self.label = self.label or str(self.version)

    @property
    def num_pages(self) -> int:
        """Number of pages that it takes when it is resident."""
        return self.layout.num_pages

    @property
    def lacks_pages(self) -> bool:
        """True unless all its pages are here. An adapter that changes images alone needs none."""
        return not self.pages and self.layout.num_pages > 0

    def __repr__(self) -> str:
        return f"Adapter({self.name!r} v{self.version}, r={self.rank}, pages={len(self.pages)}, refs={self.references})"


class AdapterBackend(Protocol):
    """Reads and moves adapter bytes; the executor implements it, so the store never touches a tensor."""

    def inspect(self, path: Path, roots: Sequence[Path] = ()) -> AdapterManifest:
        """Check a directory and the headers of its files. With `roots`, the files must be below one of them."""
        ...

    def keep_within(self, room: Callable[[], int]) -> None:
        """Keep the memory of freed images for the next ones while `room()` bytes of host memory are free."""
        ...

    def layout(self, manifest: AdapterManifest) -> AdapterLayout: ...

    def read(
        self, manifest: AdapterManifest, layout: AdapterLayout, image: HostImage, content: ContentHash | None = None
    ) -> None:
        """Read the weights into `image` and publish every layer; called on its own thread. content: may get the bytes
        as they are read, and has the hash afterwards if it did.
        """
        ...

    def load(self, image: HostImage, layout: AdapterLayout, pages: list[int]) -> Transfer | None:
        """Move an image, complete or still being read, into its pages; None if the move is already done."""
        ...

    def save(self, layout: AdapterLayout, pages: list[int]) -> HostImage | None:
        """Copy an adapter's pages to host memory; return the complete image, or None if it can be read again."""
        ...
