"""Adapters without bytes: the time that they take to come from the disk and over the link, in virtual time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ...core.costs.models import CostModel
from ...core.costs.profile import Geometry
from ...memory.files.error import AdapterFormatError
from ...memory.files.identity import ContentHash
from ...memory.files.manifest import AdapterManifest
from ...memory.host.image import HostImage, LayerStream
from ...memory.host.reads import Reads
from ...memory.pages.adapter_layout import AdapterLayout, AdapterPart, uniform_parts
from .link import Link, SimTransfer, Urgency, VirtualClock


class SimAdapters:
    """The existing adapters, by name: rank and size. Any number of simulated replicas can share one catalogue."""

    def __init__(self, geometry: Geometry, block_tokens: int, targets: Collection[str] | None = None) -> None:
        """targets: projections that they change, in every layer and of every expert; by default all outside mixtures of
        experts.
        """
        self._geometry = geometry
        self._page = geometry.page_layout(block_tokens)
        names = geometry.projections.names if targets is None else geometry.projections.names_with_mixtures
        self.targets = tuple(name for name in names if targets is None or name in targets)
        self._known: dict[str, tuple[AdapterManifest, AdapterLayout, int]] = {}
        self._shapes: dict[tuple[int, int | None], tuple[tuple[AdapterPart, ...], AdapterLayout, int]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def add(self, name: str, rank: int, num_bytes: int | None = None) -> Path:
        """Add an adapter to the catalogue; returns the path to register.

        num_bytes: of its image on device and host; default: by its rank and the targets.
        """
        shape = self._shapes.get((rank, num_bytes))
        if shape is None:
            parts = uniform_parts(self._geometry.projections, rank, targets=self.targets)
            size = self._geometry.adapter_bytes(rank, self.targets) if num_bytes is None else num_bytes
            pages = max(1, -(-size // self._page.page_bytes))
            layout = AdapterLayout((), size // self._page.itemsize, pages, self._geometry.num_layers)
            shape = self._shapes[rank, num_bytes] = parts, layout, size
        parts, layout, size = shape
        self._known[name] = AdapterManifest(path := Path(name), parts, size), layout, rank
        return path

    def path(self, name: str) -> Path:
        return self.manifest(name).path

    def manifest(self, name: str) -> AdapterManifest:
        return self._find(name)[0]

    def layout(self, name: str) -> AdapterLayout:
        return self._find(name)[1]

    def num_bytes(self, name: str) -> int:
        return self.manifest(name).file_size

    def rank(self, name: str) -> int:
        return self._find(name)[2]

    def _find(self, name: str) -> tuple[AdapterManifest, AdapterLayout, int]:
        try:
            return self._known[name]
        except KeyError:
            raise AdapterFormatError(f"{name}: no such simulated adapter; add it to SimAdapters first") from None


class SimReads(Reads):
    """A few threads that read one adapter after another, each for as long as the disk model says.

    A read begins when a thread is free for it. Other reads may be put before it until then, so it runs only when a
    caller looks at a time at which it has begun.
    """

    def __init__(self, clock: VirtualClock, threads: int = 2) -> None:
        self._clock = clock
        self._free_at = [clock.now] * threads
        self._queue: list[SimRead] = []  # waiting for a thread, as of the last look
        self._last_seconds = 0.0  # of the read that began last
        self._news: list[float] = []  # times at which reads bring something new

    @property
    def free_at(self) -> float:
        """Return the time at which the next read would begin, if the reads before it take as long as the last one."""
        if not self._queue:
            return min(self._free_at)
        self.begin_until(self._clock.now)
        free_at = sorted(self._free_at)
        for _ in self._queue:
            heapq.heapreplace(free_at, free_at[0] + self._last_seconds)
        return free_at[0]

    def submit(self, read: Callable[[], Any], group: str = "") -> Future:
        self.begin_until(self._clock.now)
        found = SimRead(self, self._clock, read)
        self._queue.append(found)
        self.begin_until(self._clock.now)
        return found

    def arrange(self, futures: Sequence[Future]) -> None:
        self.begin_until(self._clock.now)
        places = {future: place for place, future in enumerate(futures)}
        self._queue.sort(key=lambda read: places.get(read, len(places)))

    def begin_until(self, time: float) -> None:
        """Begin the reads for which threads are free by `time`; until then nothing may be put before them."""
        while self._queue and min(self._free_at) <= time:
            self.begin_next()

    def begin_next(self) -> None:
        """Begin the next read as soon as a thread is free, which makes its end known."""
        clock, now, read = self._clock, self._clock.now, self._queue.pop(0)
        thread = min(range(len(self._free_at)), key=self._free_at.__getitem__)
        start = clock.now = max(read.asked, self._free_at[thread])
        read.run()  # moves the clock on by the read's duration, as its thread sees it
        self._free_at[thread] = clock.now
        self._last_seconds = clock.now - start
        clock.now = now

    def cancel(self, read: SimRead) -> bool:
        """Forget a read; False if it has begun."""
        self.begin_until(self._clock.now)
        if read not in self._queue:
            return False
        self._queue.remove(read)
        return True

    def wait(self, pending: list[Future], timeout: float) -> None:
        """Move the clock to the first news or end among `pending`, at most by `timeout`."""
        now = self._clock.now
        self.begin_until(now)
        self._news = [moment for moment in self._news if moment > now]
        self._clock.now = min(
            [now + timeout, *self._news, *(read.end for read in pending if isinstance(read, SimRead))]
        )

    def wake(self) -> None:
        """End a wait at the current time of the reading thread."""
        self._news.append(self._clock.now)

    def shutdown(self) -> None:
        """Nothing is in progress."""


class SimRead(Future):
    """A read that ends at a time of virtual time. asked: time of the request. start, end: infinite before it has
    begun.
    """

    def __init__(self, reads: SimReads, clock: VirtualClock, read: Callable[[], Any]) -> None:
        self.asked = clock.now
        self.start = self.end = math.inf
        self._reads = reads
        self._clock = clock
        self._read = read
        self._error: Exception | None = None

    def run(self) -> None:
        """Read, from now on, which moves the clock to the end."""
        self.start = self._clock.now
        try:
            self._read()
        except Exception as error:
            self._error = error
        self.end = self._clock.now

    def done(self) -> bool:
        self._reads.begin_until(self._clock.now)
        return self._clock.now >= self.end

    def running(self) -> bool:
        self._reads.begin_until(self._clock.now)
        return self.start <= self._clock.now < self.end

    def result(self, timeout: float | None = None) -> None:
        """Return the result; if it is not there yet, wait for it."""
        while self.end == math.inf:
            self._reads.begin_next()
        self._clock.now = max(self._clock.now, self.end)
        if self._error is not None:
            raise self._error

    def cancel(self) -> bool:
        """Prevent it from beginning; False once it has begun."""
        if not self._reads.cancel(self):
            return False
        self.start = self.end = self._clock.now
        return True


class SimStream(LayerStream):
    """An image; its layers are read evenly from `start` to `end`."""

    def __init__(self, clock: VirtualClock, start: float, num_layers: int) -> None:
        super().__init__()
        self._clock = clock
        self._has_failed = False
        self._num_layers = num_layers
        self.start = start
        self.end = clock.now

    @property
    def num_ready(self) -> int:
        now = self._clock.now
        if self._has_failed:
            return LayerStream.FAILED
        if now >= self.end:
            return self._num_layers
        return int(self._num_layers * max(0.0, now - self.start) / (self.end - self.start))

    def fail(self) -> None:
        """The rest is not waited for."""
        self._has_failed = True


class SimAdapterBackend:
    """Adapter backend of a simulated executor. Copies go over the link, one at a time.

    stream: prefills wait layer by layer for incoming adapters; otherwise a step begins when its adapters are complete,
    as in engines without overlap. In both cases copies that no step needs yet run in parallel with the steps.
    read_threads: number of threads that read from the disk.
    """

    def __init__(
        self,
        adapters: SimAdapters,
        costs: CostModel,
        clock: VirtualClock,
        *,
        stream: bool = True,
        read_threads: int = 2,
    ) -> None:
        self._adapters = adapters
        self._costs = costs
        self._clock = clock
        self._stream = stream
        self.link = Link(clock)
        self.reads = SimReads(clock, read_threads)
        self.urgency = Urgency.LOAD  # name of the adapter placed next
        self._reads: list[tuple[float, float]] = []  # start and end of each read in progress or planned
        self.stalled_seconds = 0.0  # times that the clock moved on because of loads

    @property
    def is_loading(self) -> bool:
        """True if bytes are in transit."""
        return self.link.is_busy

    def inspect(self, path: Path, roots: Sequence[Path] = ()) -> AdapterManifest:
        return self._adapters.manifest(str(path))

    def keep_within(self, room: Callable[[], int]) -> None:
        """Does nothing: no image has memory of its own."""

    def layout(self, manifest: AdapterManifest) -> AdapterLayout:
        return self._adapters.layout(str(manifest.path))

    def read(
        self, manifest: AdapterManifest, layout: AdapterLayout, image: HostImage, content: ContentHash | None = None
    ) -> None:
        clock, seconds = self._clock, self._costs.disk.seconds(manifest.file_size)
        start = clock.now
        clock.now = start + seconds / layout.num_layers
        image.publish(1)  # requests may begin with these; later layers end no wait
        clock.now = start + seconds
        image.data = manifest.file_size
        if self._costs.disk.contention:
            self._reads.append((start, self._clock.now))
        image.stream = SimStream(self._clock, start, layout.num_layers)

    @property
    def is_reading(self) -> bool:
        """True if reads are in progress, or wait for a thread: steps then take longer."""
        self.reads.begin_until(self._clock.now)
        if self._reads:
            now = self._clock.now
            self._reads = [read for read in self._reads if read[1] > now]
        return bool(self._reads)

    def delay(self, seconds: float) -> float:
        """Return the extra time of a step of `seconds` that begins now, because of reads in progress."""
        now, disk = self._clock.now, self._costs.disk
        self.reads.begin_until(now + seconds)  # no other read is put before them while the step runs
        total = 0.0
        for start, end in self._reads:
            begin = max(start, now)
            if begin < now + seconds:
                total += disk.delay(now + seconds - begin, end - begin)
        return total

    def save(self, layout: AdapterLayout, pages: list[int]) -> None:
        """Simulated directories never change."""

    def load(self, image: HostImage, layout: AdapterLayout, pages: list[int]) -> SimTransfer | None:
        while image.data is None:  # the transfer's end depends on the read's
            self.reads.begin_next()
        now, seconds = self._clock.now, self._costs.link.seconds(image.data)
        layer = seconds / layout.num_layers
        stream = image.stream
        assert isinstance(stream, SimStream)
        sending = self.link.send(seconds, self.urgency, ready=stream.end + layer)
        if sending.end <= now:
            return None
        if not self._stream:
            return SimTransfer(self._clock, self.link, sending, layout.num_layers)
        first_read = stream.start + (stream.end - stream.start) / layout.num_layers
        first = max(sending.start, first_read) + layer
        return SimTransfer(self._clock, self.link, sending, layout.num_layers, first)
