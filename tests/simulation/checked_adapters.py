"""Adapters in virtual time: a disk of which reads are slow or fail, and copies into the memory of contents."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.identity import ContentHash
from chorus.memory.files.manifest import AdapterManifest
from chorus.memory.host.image import HostImage, LayerStream
from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart

from ..tables import LLAMA, TINY_PATHS
from .asked import promise
from .made_up_model import VOCAB, Memory, content_in
from .virtual_reads import VirtualClock


@dataclass
class Fate:
    """Course of a directory's next read: its duration and its outcome."""

    seconds: float
    outcome: str  # good, fails, short, stuck
    hangs_at: int = 0  # layer, if it is stuck


class Disk:
    """Adapter directories: which content lies in each, how large it is, and how reads go."""

    def __init__(self, rng: random.Random, speed: float = 0.0, patience: float = 1.0, trouble: float = 0.0) -> None:
        """speed: typical seconds of a read. patience: seconds without anything after which the engine may cancel a
        read. trouble: part of the reads that fail, end early or hang.
        """
        self._rng = rng
        self._patience = patience
        self._speed = speed
        self._contents = itertools.count(1)
        self.content: dict[Path, int] = {}
        self.pages: dict[int, int] = {}
        self.layers: dict[int, int] = {}
        self.broken: set[Path] = set()
        self.unlucky: set[int] = set()
        """Contents of which a read failed, hung, or met another content."""
        self.has_hung = False
        self.trouble = trouble
        self.has_activated = False
        """True if each third content is an activated adapter."""

    def write(self, path: Path, pages: int, layers: int | None = None) -> int:
        """Put a new content into a directory, even while a read of the old one is pending. layers: any number."""
        content = self.content[path] = next(self._contents)
        self.pages[content], self.layers[content] = pages, layers or self._rng.randint(1, 4)
        return content

    def fate(self, path: Path, content: int) -> Fate:
        """Course of a read of `content`, which the directory held when it was registered."""
        fate = Fate(self._speed * 10 ** self._rng.uniform(-1, 1.5), "good")
        if path in self.broken:
            fate.outcome = "fails"
        elif self._rng.random() < self.trouble:
            fate.outcome, fate.hangs_at = self._rng.choice(["fails", "short", "stuck"]), self._rng.randrange(4)
        hangs = fate.outcome == "stuck" or fate.seconds / self.layers[content] > self._patience
        self.has_hung |= hangs
        if hangs or fate.outcome != "good":
            self.unlucky.add(content)
        return fate

    def note_slow(self, contents: Sequence[int], seconds: float) -> None:
        """Note contents that are read together, each layer in so many seconds, if the engine may cancel that."""
        if seconds > self._patience:
            self.has_hung = True
            self.unlucky.update(contents)


def contents_read(manifest: AdapterManifest) -> list[int]:
    """The contents of the files that a read of an adapter needs."""
    return [source.mtime_ns for source, _ in manifest.sources] or [manifest.mtime_ns]


class CheckedAdapters:
    """The adapter backend: reads take virtual time, layers come one by one, copies write to the checked memory.

    pause: lets time go by for the read that calls it.
    """

    def __init__(
        self,
        disk: Disk,
        pause: Callable[[float], None],
        clock: VirtualClock,
        memory: Memory,
        rng: random.Random,
        reached: Counter[str],
    ) -> None:
        self._disk = disk
        self._pause = pause
        self._clock = clock
        self._memory = memory
        self._rng = rng
        self._reached = reached

    def inspect(self, path: Path) -> AdapterManifest:
        if path not in self._disk.content:
            raise AdapterFormatError(f"{path}: no such directory")
        content = self._disk.content[path]
        part = AdapterPart(self._disk.pages[content], 1.0, (0,), LLAMA)
        is_activated = self._disk.has_activated and content % 3 == 0
        invocation = (2 + content % (VOCAB - 2),) if is_activated else ()
        return AdapterManifest(
            path,
            (part,),
            mtime_ns=content,
            content_hash=str(content),
            invocation_tokens=invocation,
            modules=TINY_PATHS,
        )

    def keep_within(self, room: Callable[[], int]) -> None:
        """Does nothing: no image has memory of its own."""

    def layout(self, manifest: AdapterManifest) -> AdapterLayout:
        pages, num_layers = manifest.rank, max(self._disk.layers[content] for content in contents_read(manifest))
        return AdapterLayout((), num_elems=pages, num_pages=pages, num_layers=num_layers)

    def read(
        self, manifest: AdapterManifest, layout: AdapterLayout, image: HostImage, content: ContentHash | None = None
    ) -> None:
        """Read layer by layer, each from all files: a composed adapter's are those of its sources."""
        files = [source for source, _ in manifest.sources] or [manifest]
        read = [(file.path, file.mtime_ns, self._disk.fate(file.path, file.mtime_ns)) for file in files]
        self._disk.note_slow(contents_read(manifest), sum(fate.seconds for *_, fate in read) / layout.num_layers)
        for layer in range(layout.num_layers):
            for path, version, fate in read:
                self._read_layer(path, version, fate, layer, layout.num_layers)
            image.data = content_in(manifest)
            image.publish(layer + 1)

    def _read_layer(self, path: Path, content: int, fate: Fate, layer: int, num_layers: int) -> None:
        self._pause(fate.seconds / num_layers)
        if fate.outcome == "stuck" and layer == fate.hangs_at % num_layers:
            self._pause(float("inf"))
        if fate.outcome in ("fails", "short") and layer == num_layers // 2:
            kind = OSError(5, "Input/output error") if fate.outcome == "fails" else AdapterFormatError("cut short")
            raise kind
        if self._disk.content.get(path) != content:
            self._disk.unlucky.add(content)
            raise AdapterFormatError(f"{path}: it changed on disk")

    def save(self, layout: AdapterLayout, pages: list[int]) -> HostImage:
        held = [self._memory[page][0] for page in pages]
        content: Any = held[0]
        content = content[0]
        promise(held == [(content, index, layout.num_layers) for index in range(len(pages))], "not whole, yet saved")
        image = HostImage()
        image.data = content
        image.publish(layout.num_layers)
        self._reached["saved"] += 1
        return image

    def load(self, image: HostImage, layout: AdapterLayout, pages: list[int]) -> CheckedTransfer | None:
        transfer = CheckedTransfer(image, layout, pages, self._memory, self._clock, self._rng)
        self._reached["streamed"] += not transfer.is_done()
        return None if transfer.is_done() else transfer


class CheckedTransfer:
    """Layers on their way into pages. After `cancel` a copy may still be writing, until `is_quiet`."""

    def __init__(
        self,
        image: HostImage,
        layout: AdapterLayout,
        pages: list[int],
        memory: Memory,
        clock: VirtualClock,
        rng: random.Random,
    ) -> None:
        self._image = image
        self._num_layers = layout.num_layers
        self._pages = pages
        self._memory = memory
        self._clock = clock
        self._rng = rng
        self._copied = 0
        self._cancelled = False
        self._quiet = True
        image.follow(self._advance)
        self._advance()

    def _advance(self) -> None:
        ready = self._image.stream.num_ready
        if self._cancelled or ready == LayerStream.FAILED or ready <= self._copied:
            return
        self._copied = ready
        for index, page in enumerate(self._pages):
            self._memory[page][0] = (self._image.data, index, ready)
        if self.is_done():
            self._image.unfollow(self._advance)

    def wait_layer(self, layer: int, timeout: float) -> bool:
        end = self._clock.now + timeout
        while self._copied <= layer and not self.has_failed() and self._clock.next_time <= end:
            self._clock.next_event()
        return self._copied > layer

    def is_done(self) -> bool:
        return self._copied == self._num_layers

    def has_failed(self) -> bool:
        return self._image.stream.num_ready == LayerStream.FAILED

    def cancel(self) -> None:
        self._cancelled = True
        if self._rng.random() < 0.8:
            self._quiet = False
            self._clock.after(self._rng.uniform(0, 0.1), self._end)

    def _end(self) -> None:
        for page in self._pages:
            self._memory[page][:] = ["a late copy"] * len(self._memory[page])
        self._quiet = True

    def is_quiet(self) -> bool:
        return self._quiet
