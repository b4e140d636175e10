"""Hashes an adapter's file as it is read: a group of layers on a thread of its own, while the next one is laid out.

Tests: tests/memory/adapters/test_row_jobs.py, tests/server/engine/test_load_source.py
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..host.daemon_pool import ask_for_short_slices

if TYPE_CHECKING:
    from ..files.adapter_weights import AdapterWeights
    from ..files.identity import ContentHash


class Held(Protocol):
    """Has the bytes of the group of layers that was read last, until the second read from now."""

    def bytes(self, start: int, end: int) -> memoryview:
        """Raises LookupError for bytes that were not read."""
        ...


class LayerHashes:
    """Hashes groups of layers, in order, and at the end what is of no layer."""

    def __init__(self, content: ContentHash, file: AdapterWeights) -> None:
        self._content, self._file = content, file
        self._pool = ThreadPoolExecutor(1, "adapter-hash", initializer=ask_for_short_slices)
        self._under_way: Future[None] | None = None

    def add(self, layers: range, rows: Held, spans: Sequence[tuple[int, int]]) -> None:
        """Begin to hash a group that was just read, once the one before it has been hashed. spans: of the file, that
        were read of it. Raises the error of the one before.
        """
        held = _Spans.of(rows, spans)
        self._wait()
        self._under_way = self._pool.submit(self._hash, layers, held)

    def finish(self) -> None:
        """Have the content's hash computed. Raises the error of the last group."""
        self._wait()
        self._content.finish(self._file)

    def close(self) -> None:
        """Wait until no bytes are used any more."""
        self._pool.shutdown()

    def _wait(self) -> None:
        if self._under_way is not None:
            self._under_way.result()

    def _hash(self, layers: range, held: _Spans) -> None:
        for layer in layers:
            self._content.add(layer, self._file, held.find)


class _Spans(NamedTuple):
    """Bytes of a file by their places."""

    starts: list[int]
    views: list[memoryview]

    @classmethod
    def of(cls, rows: Held, spans: Sequence[tuple[int, int]]) -> _Spans:
        found = cls([], [])
        for start, end in spans:
            try:
                found.views.append(rows.bytes(start, end))
            except LookupError:  # it could not be read
                continue
            found.starts.append(start)
        return found

    def find(self, start: int, end: int) -> memoryview:
        """Raises LookupError if they are not there."""
        at = bisect_right(self.starts, start) - 1
        if at < 0 or end - self.starts[at] > len(self.views[at]):
            raise LookupError(f"bytes {start} to {end} were not read")
        return self.views[at][start - self.starts[at] : end - self.starts[at]]
