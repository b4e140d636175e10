"""A device whose streams run when a test says so, on real host memory."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeEvent:
    """`record` is the latest one: waiting and asking look at that, as CUDA's do."""

    record: list[bool] = field(default_factory=lambda: [True])


@dataclass
class Copy:
    """A copy to or from the device. The host's side must not change between the call and the copy."""

    target: int
    source: int
    num_bytes: int
    source_then: bytes | None


class FakeDriver:
    """A CupyDriver. Whatever a stream is given waits in its queue until `run`, `finish` or `synchronize`."""

    def __init__(self) -> None:
        self.queues: dict[int, deque[Any]] = {}
        self.compute = self.new_stream()
        self.num_copies = 0
        self.copies_before_failure = -1
        self.pinned: dict[int, int] = {}
        self.on_copy: Callable[[Copy], None] = lambda copy: None

    # -- CupyDriver

    def new_stream(self) -> int:
        self.queues[len(self.queues)] = deque()
        return len(self.queues) - 1

    def compute_stream(self) -> int:
        return self.compute

    def new_event(self) -> FakeEvent:
        return FakeEvent()

    def record(self, event: FakeEvent, stream: int) -> None:
        event.record = [False]
        self.queues[stream].append(("record", event.record))

    def wait_event(self, stream: int, event: FakeEvent) -> None:
        self.queues[stream].append(("wait", event.record))

    def query(self, event: FakeEvent) -> bool:
        return event.record[0]

    def synchronize(self, event: FakeEvent) -> None:
        while not event.record[0]:
            assert any(self.run(stream, 1) for stream in self.queues), "the host would wait for ever"

    def memcpy_async(self, target: int, source: int, num_bytes: int, to_device: bool, stream: int) -> None:
        if self.copies_before_failure == 0:
            raise RuntimeError("no copy")
        self.copies_before_failure -= 1
        self.num_copies += 1
        copy = Copy(target, source, num_bytes, ctypes.string_at(source, num_bytes) if to_device else None)
        self.on_copy(copy)
        self.queues[stream].append(copy)

    def pin(self, address: int, num_bytes: int) -> None:
        assert address not in self.pinned
        self.pinned[address] = num_bytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def write_value(self, stream: int, address: int, value: int) -> None:
        self.queues[stream].append(lambda: setattr(ctypes.c_uint32.from_address(address), "value", value))

    def wait_value(self, stream: int, address: int, value: int) -> None:
        self.queues[stream].append(("wait value", ctypes.c_uint32.from_address(address), value))

    # -- controls of a test

    def launch(self, kernel: Callable[[], None]) -> None:
        """Give the compute stream something to run."""
        self.queues[self.compute].append(kernel)

    def run(self, stream: int, count: int) -> int:
        """Run the next `count` entries of a stream, or fewer if it has to wait; returns how many ran."""
        queue = self.queues[stream]
        for done in range(count):
            if not queue or self._has_to_wait(queue[0]):
                return done
            self._execute(queue.popleft())
        return count

    def finish(self) -> None:
        """Run everything."""
        while any(self.queues.values()):
            assert any(self.run(stream, 1) for stream in self.queues), "streams wait for each other"

    def pending_copies(self) -> list[Copy]:
        return [entry for queue in self.queues.values() for entry in queue if isinstance(entry, Copy)]

    @staticmethod
    def _has_to_wait(entry: Any) -> bool:
        match entry:
            case ("wait", record):
                return not record[0]
            case ("wait value", word, value):
                return ctypes.c_int32(word.value - value).value < 0
        return False

    def _execute(self, entry: Any) -> None:
        match entry:
            case ("record", record):
                record[0] = True
            case ("wait" | "wait value", *_):
                pass
            case Copy(target, source, num_bytes, source_then):
                if source_then is not None:
                    assert ctypes.string_at(source, num_bytes) == source_then, "the image changed before it was copied"
                ctypes.memmove(target, source, num_bytes)
            case kernel:
                kernel()
