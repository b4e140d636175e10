"""An adapter as the engine knows it, one version of one name, and the interface to what reads and moves its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..files.error import AdapterFormatError, shown

if TYPE_CHECKING:
    from ..files.format import AdapterManifest
    from ..host.image import HostImage
    from ..pages.adapter_layout import AdapterLayout
    from ..transfers.transfer import Transfer

MAX_NAME_CHARACTERS = 256


def check_name(name: str) -> str:
    """The name, if every answer, log line and metric can hold it; else AdapterFormatError, which shows it safely."""
    if len(name) > MAX_NAME_CHARACTERS:
        raise AdapterFormatError(
            f"{shown(name[:MAX_NAME_CHARACTERS])}… has {len(name)} characters; a name has at most {MAX_NAME_CHARACTERS}"
        )
    if not name or not name.isprintable() or name != name.strip():
        raise AdapterFormatError(
            f"{shown(name)} is no name: printable characters are needed, in UTF-8, without blanks around them"
        )
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise AdapterFormatError(f"{shown(name)} is no name: its parts between slashes can't be empty, '.' or '..'")
    return name


class Tier(StrEnum):
    """Tier of an adapter's bytes; LOADING: being read from disk; FAILED: on disk, but its read failed."""

    DISK = "disk"
    LOADING = "loading"
    HOST = "host"
    DEVICE = "device"
    FAILED = "failed"


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Adapter:
    """One version of one adapter. `pages` is empty unless it is resident.

    requests: live requests that hold this version, waiting or running. references: running ones, which pin its pages.
    transfer: the copy of its bytes into the pages, until it is complete. load_seconds: of its latest copy from host
    memory to the pages. num_overflows: requests that ended because its logits were not finite; None once one has ended
    well. label: the version as clients see it, see `versions`.
    """

    name: str
    version: int
    manifest: AdapterManifest
    layout: AdapterLayout
    label: str = ""
    pages: list[int] = field(default_factory=list)
    transfer: Transfer | None = None
    is_idle: bool = False
    references: int = 0
    requests: int = 0
    uses: int = 0
    load_seconds: float | None = None
    num_overflows: int | None = 0
    rank: int = field(init=False)  # used in every step

    def __post_init__(self) -> None:
        self.rank = self.manifest.rank
        self.label = self.label or str(self.version)

    @property
    def num_pages(self) -> int:
        """Pages that it takes when it is resident."""
        return self.layout.num_pages

    def __repr__(self) -> str:
        return f"Adapter({self.name!r} v{self.version}, r={self.rank}, pages={len(self.pages)}, refs={self.references})"


class AdapterBackend(Protocol):
    """Reads and moves adapter bytes; the executor implements it, so the store never touches a tensor."""

    def inspect(self, path: Path, roots: Sequence[Path] = ()) -> AdapterManifest:
        """Check a directory and the headers of its files, which must really lie below `roots` if there are any."""
        ...

    def layout(self, manifest: AdapterManifest) -> AdapterLayout: ...

    def read(self, manifest: AdapterManifest, layout: AdapterLayout, image: HostImage) -> None:
        """Read the weights into `image`, publishing every layer; on a thread of its own."""
        ...

    def place(self, image: HostImage, layout: AdapterLayout, pages: list[int]) -> Transfer | None:
        """Move an image, whole or still being read, into its pages; None when it already has been."""
        ...

    def save(self, layout: AdapterLayout, pages: list[int]) -> HostImage | None:
        """Copy an adapter's pages to the host, whole when this returns; None when it can be read again at any time."""
        ...
