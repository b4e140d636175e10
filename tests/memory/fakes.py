"""Adapters without files and reads that end when a test says so."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

from chorus.memory.adapter_format import AdapterFormatError, AdapterManifest
from chorus.memory.adapter_layout import AdapterLayout, AdapterPart


class FakeBackend:
    """A path is named after its page count: `four` has 4 pages. Names in `broken` fail to read, in `stuck` to place."""

    SIZES = {"one": 1, "two": 2, "three": 3, "four": 4, "huge": 100}

    def __init__(self):
        self.broken: set[str] = set()
        self.stuck: set[str] = set()
        self.reads: list[str] = []
        self.placed: list[tuple[str, list[int]]] = []

    def inspect(self, path: Path) -> AdapterManifest:
        if path.name not in self.SIZES:
            raise AdapterFormatError(f"{path}: no such directory")
        return AdapterManifest(path, (AdapterPart(self.SIZES[path.name], 1.0, (0,), ("q_proj",)),))

    def layout(self, manifest: AdapterManifest) -> AdapterLayout:
        return AdapterLayout((), num_elems=manifest.rank, num_pages=manifest.rank)

    def read(self, manifest: AdapterManifest, layout: AdapterLayout) -> str:
        self.reads.append(manifest.path.name)
        if manifest.path.name in self.broken:
            raise AdapterFormatError(f"{manifest.path}: cannot be read")
        return manifest.path.name

    def place(self, image: str, pages: list[int]) -> None:
        if image in self.stuck:
            raise RuntimeError("no copy")
        self.placed.append((image, list(pages)))


class SlowReads:
    """Reads that run when `finish` is called, in any order."""

    def __init__(self):
        self.pending: list[tuple[Future, object]] = []
        self.is_shut = False

    def submit(self, read) -> Future:
        future: Future = Future()
        self.pending.append((future, read))
        return future

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
