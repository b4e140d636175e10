"""An adapter as the engine knows it: one version of one name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ..files.format import AdapterManifest
from ..pages.adapter_layout import AdapterLayout
from ..transfers.transfer import Transfer


class Tier(StrEnum):
    """Tier of an adapter's bytes; LOADING is on the way from the disk, FAILED on the disk but not to be had."""

    DISK = "disk"
    LOADING = "loading"
    HOST = "host"
    DEVICE = "device"
    FAILED = "failed"


class Adapter:
    """One version of one adapter. `pages` is empty unless it is resident.

    requests: live requests that hold this version, waiting or running. references: running ones, which pin its pages.
    transfer: the way of its bytes into the pages, until they are all there.
    """

    __slots__ = (
        "__weakref__", "is_idle", "layout", "load_seconds", "manifest", "name", "pages", "rank", "references",
        "requests", "transfer", "uses", "version",
    )  # fmt: skip

    def __init__(self, name: str, version: int, manifest: AdapterManifest, layout: AdapterLayout) -> None:
        self.name = name
        self.version = version
        self.manifest = manifest
        self.layout = layout
        self.pages: list[int] = []
        self.transfer: Transfer | None = None
        self.is_idle = False
        self.references = 0
        self.requests = 0
        self.uses = 0
        self.load_seconds: float | None = None  # its latest way from host memory to the pages
        self.rank = manifest.rank  # asked for in every step

    @property
    def num_pages(self) -> int:
        """Pages that it takes when it is resident."""
        return self.layout.num_pages

    def __repr__(self) -> str:
        return f"Adapter({self.name!r} v{self.version}, r={self.rank}, pages={len(self.pages)}, refs={self.references})"


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A snapshot of an adapter for the outside."""

    name: str
    version: int
    rank: int
    target_modules: tuple[str, ...]
    path: Path
    tier: str
    references: int
    num_pages: int
