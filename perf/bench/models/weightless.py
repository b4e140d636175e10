"""Adapters without weights, for modules that place and schedule them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ....memory.files.identity import ContentHash
from ....memory.files.manifest import AdapterManifest
from ....memory.host.image import HostImage
from ....memory.pages.adapter_layout import AdapterLayout, uniform_parts
from ....memory.pages.layout import PageLayout
from ....memory.pages.projections import Projections


class WeightlessAdapters:
    """An adapter backend that lays adapters out and moves nothing. A path's name ends with the rank, as in `a7-16`."""

    def __init__(self, projections: Projections, page: PageLayout) -> None:
        self._projections = projections
        self._page = page
        self._layouts: dict[int, AdapterLayout] = {}

    def inspect(self, path: Path, roots: Sequence[Path] = ()) -> AdapterManifest:
        rank = int(path.name.rpartition("-")[2])
        return AdapterManifest(path, uniform_parts(self._projections, rank))

    def keep_within(self, room: Callable[[], int]) -> None:
        """Does nothing: no image has memory of its own."""

    def layout(self, manifest: AdapterManifest) -> AdapterLayout:
        page, rank = self._page, manifest.rank
        if rank not in self._layouts:
            self._layouts[rank] = AdapterLayout.build(manifest.parts, self._projections, page.page_elems, page.itemsize)
        return self._layouts[rank]

    def read(
        self, manifest: AdapterManifest, layout: AdapterLayout, image: HostImage, content: ContentHash | None = None
    ) -> None:
        image.publish(layout.num_layers)

    def save(self, layout: AdapterLayout, pages: list[int]) -> None:
        """There is nothing to save."""

    def load(self, image: HostImage, layout: AdapterLayout, pages: list[int]) -> None:
        """There is nothing to move."""
