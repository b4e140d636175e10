"""Interface through which an executor's adapters are read and moved into its arena."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ..files.format import AdapterManifest
from ..host.image import HostImage
from ..pages.adapter_layout import AdapterLayout
from ..transfers.transfer import Transfer


class AdapterBackend(Protocol):
    """Reads and moves adapter bytes; the executor brings it, so the store never touches a tensor."""

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
