"""Virtual time in which adapter reads, on threads that run one at a time, take as long as a script says."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from chorus.memory.host.images import Reads


class Abandoned(BaseException):
    """Raised inside a read that is still in progress when its simulation ends."""


class VirtualClock:
    """A clock, and events by time. Everything happens on the caller's thread or on one it waits for."""

    def __init__(self) -> None:
        self.now = 1.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Have `action` called when that much time has gone by."""
        heapq.heappush(self._events, (self.now + seconds, next(self._serial), action))

    def advance(self, seconds: float) -> None:
        """Advance the time; events that are due happen on the way."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.next_event()
        self.now = end

    def next_event(self) -> bool:
        """Go on to the next event and let it happen; False if there is none."""
        if not self._events:
            return False
        time, _, action = heapq.heappop(self._events)
        self.now = max(self.now, time)
        action()
        return True

    @property
    def next_time(self) -> float:
        return self._events[0][0] if self._events else math.inf


class _Worker(threading.Thread):
    """A thread that runs a job only while the resuming thread waits: a coroutine with a stack of its own."""

    def __init__(self) -> None:
        super().__init__(name="virtual-read", daemon=True)
        self._go, self._back = threading.Lock(), threading.Lock()  # held, but for the moment in which one lets go
        self._go.acquire()
        self._back.acquire()
        self._job: Callable[[], None] | None = None
        self.start()

    def resume(self, job: Callable[[], None] | None = None) -> None:
        """Let the thread go on, or begin a job, until it pauses or ends it."""
        self._job = job or self._job
        self._go.release()
        self._back.acquire()

    def pause(self) -> None:
        """On the worker's own thread: let the other go on, until `resume`."""
        self._back.release()
        self._go.acquire()

    def run(self) -> None:
        while True:
            self._go.acquire()
            job, self._job = self._job, None
            assert job is not None
            job()
            self._back.release()


_idle: list[_Worker] = []


class _Read(Future):
    """A read under way; waiting for its result lets virtual time go by until it has ended."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def result(self, timeout: float | None = None) -> Any:
        end = math.inf if timeout is None else self._clock.now + timeout
        while not self.done() and self._clock.next_time <= end:
            if not self._clock.next_event():
                break
        if not self.done():
            raise TimeoutError("a read never ends, and its result is awaited")
        return super().result(0)


class VirtualReads(Reads):
    """Runs reads on a few threads in turns; a read takes virtual time by calling `pause` on its thread."""

    def __init__(self, clock: VirtualClock, threads: int) -> None:
        self._clock = clock
        self._threads = threads
        self._queue: deque[tuple[_Read, Callable[[], Any]]] = deque()
        self._busy: set[_Worker] = set()
        self._aside: set[Future] = set()
        self._closing = False

    def submit(self, read: Callable[[], Any], group: str = "") -> Future:
        future = _Read(self._clock)
        self._queue.append((future, read))
        self._clock.after(0.0, self._start)
        return future

    def wait(self, pending: list[Future], timeout: float) -> None:
        """Let time go by until one of `pending` has ended, at most `timeout` seconds."""
        end = self._clock.now + timeout
        while not any(read.done() for read in pending) and self._clock.next_time <= end:
            self._clock.next_event()
        if not any(read.done() for read in pending):
            self._clock.advance(max(0.0, end - self._clock.now))

    def arrange(self, futures: Sequence[Future]) -> None:
        places = {future: place for place, future in enumerate(futures)}
        self._queue = deque(sorted(self._queue, key=lambda job: places.get(job[0], len(places))))

    def set_aside(self, future: Future) -> bool:
        """Have one more thread until the read ends."""
        if not future.running():
            return False
        if future not in self._aside:
            self._aside.add(future)
            self._threads += 1
            self._clock.after(0.0, self._start)
        return True

    def pause(self, seconds: float) -> None:
        """Let time go by for the read that calls this; with infinite seconds it never goes on."""
        worker = threading.current_thread()
        assert isinstance(worker, _Worker)
        if math.isfinite(seconds):
            self._clock.after(seconds, lambda: self._resume(worker))
        worker.pause()
        if self._closing:
            raise Abandoned

    def shutdown(self) -> None:
        """End every read under way, as a process does that goes away."""
        self._closing = True
        self._queue.clear()
        for worker in list(self._busy):
            self._resume(worker)

    def _start(self) -> None:
        while self._queue and len(self._busy) < self._threads and not self._closing:
            future, read = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                worker = _idle.pop() if _idle else _Worker()
                self._busy.add(worker)
                self._switch(worker, partial(self._run, worker, future, read))

    def _resume(self, worker: _Worker) -> None:
        if worker in self._busy:
            self._switch(worker)

    def _switch(self, worker: _Worker, job: Callable[[], None] | None = None) -> None:
        """Let a worker go on, with a new job if there is one, until it pauses or ends."""
        worker.resume(job)
        if self._queue and len(self._busy) < self._threads:
            self._clock.after(0.0, self._start)

    def _run(self, worker: _Worker, future: _Read, read: Callable[[], Any]) -> None:
        try:
            result = read()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        if future in self._aside:
            self._aside.discard(future)
            self._threads -= 1
        self._busy.discard(worker)
        _idle.append(worker)
