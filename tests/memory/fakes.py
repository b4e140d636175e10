"""Adapters without files and reads that end when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from chorus.memory.adapters.adapter import Adapter
from chorus.memory.adapters.store import AdapterStore
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.identity import ContentHash
from chorus.memory.files.manifest import AdapterManifest
from chorus.memory.host.image import HostImage, LayerStream
from chorus.memory.host.images import Reads
from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart


class FakeBackend:
    """A path is named after its page count: `four` has 4 pages, and `none` changes images alone. Names in `broken` fail
    to read, in `stuck` to place.
    """

    SIZES = {"none": 0, "one": 1, "two": 2, "three": 3, "four": 4, "huge": 100}

    def __init__(self):
        self.broken: set[str] = set()
        self.stuck: set[str] = set()
        self.reads: list[str] = []
        self.placed: list[tuple[str, list[int]]] = []
        self.saved: list[str] = []

    def inspect(self, path: Path) -> AdapterManifest:
        if path.name not in self.SIZES:
            raise AdapterFormatError(f"{path}: no such directory")
        return AdapterManifest(path, (AdapterPart(self.SIZES[path.name], 1.0, (0,), ("q_proj",)),))

    def keep_within(self, room: Callable[[], int]) -> None:
        """Does nothing: no image has memory of its own."""

    def layout(self, manifest: AdapterManifest) -> AdapterLayout:
        return AdapterLayout((), num_elems=manifest.rank, num_pages=manifest.rank, num_layers=1)

    def read(
        self, manifest: AdapterManifest, layout: AdapterLayout, image: HostImage, content: ContentHash | None = None
    ) -> None:
        self.reads.append(manifest.path.name)
        if manifest.path.name in self.broken:
            raise AdapterFormatError(f"{manifest.path}: cannot be read")
        image.data = manifest.path.name
        image.publish(layout.num_layers)

    def load(self, image: HostImage, layout: AdapterLayout, pages: list[int]) -> FakeTransfer | None:
        if image.data in self.stuck:
            raise RuntimeError("no copy")
        transfer = FakeTransfer(image, layout, lambda: self.placed.append((image.data, list(pages))))
        return None if transfer.is_done() else transfer

    def save(self, layout: AdapterLayout, pages: list[int]) -> HostImage | None:
        image = HostImage()
        image.data = next(data for data, placed in reversed(self.placed) if placed == pages)
        image.publish(layout.num_layers)
        self.saved.append(image.data)
        return image


class FakeTransfer:
    """Done when all layers are read. `busy`: something is still written after `cancel`, until a test says no."""

    def __init__(self, image: HostImage, layout: AdapterLayout, write: Callable[[], None]):
        self._image = image
        self._num_layers = layout.num_layers
        self._write = write
        self._is_done = False
        self.is_cancelled = False
        self.busy = False
        image.follow(self._advance)
        self._advance()

    def _advance(self) -> None:
        if self._image.stream.num_ready == self._num_layers and not self.is_cancelled and not self._is_done:
            self._write()
            self._is_done = True

    def wait_layer(self, layer: int, timeout: float) -> bool:
        return self._is_done

    def is_done(self) -> bool:
        return self._is_done

    def has_failed(self) -> bool:
        return self._image.stream.num_ready == LayerStream.FAILED

    def cancel(self) -> None:
        self.is_cancelled = True

    def is_quiet(self) -> bool:
        return not self.busy


class SlowReads(Reads):
    """Reads that run when `finish` is called, in any order."""

    def __init__(self):
        self.pending: list[tuple[Future, object]] = []
        self.is_shut = False

    def submit(self, read, group="") -> Future:
        future: Future = Future()
        self.pending.append((future, read))
        return future

    def arrange(self, futures) -> None:
        places = {future: place for place, future in enumerate(futures)}
        self.pending.sort(key=lambda job: places.get(job[0], len(places)))

    def finish(self, index: int = 0) -> None:
        """Run the index-th read under way, unless it was cancelled."""
        future, read = self.pending.pop(index)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(read())
            except Exception as error:
                future.set_exception(error)

    def shutdown(self) -> None:
        self.is_shut = True


def acquire_whole(store: AdapterStore, adapter: Adapter) -> None:
    """Acquire an adapter once all of it has been read. Raises the errors of its read."""
    while not store.loads.fetch(adapter):
        store.images.wait(1.0)
    store.acquire(adapter)
