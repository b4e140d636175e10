"""Records a trace of a server's requests for `chorus plan`: lengths, adapters and times, never prompts."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING

from ..executors import Repeating
from .appended_csv import AppendedCsv

if TYPE_CHECKING:
    from ...core.requests.request import Request
    from .backend_adapters import BackendAdapters

log = logging.getLogger(__name__)

HEADER = "arrival,adapter,rank,prompt_tokens,output_tokens,tenant"

WRITE_SECONDS = 0.5
"""Seconds between two writes."""

RANK_SECONDS = 0.25
"""Seconds that a write waits for the engine to report ranks, so rows are written within about a second; a missing rank
stays empty.
"""

STOP_SECONDS = 1.0
"""Seconds that a server's end waits for the last write."""

MAX_ROWS = 1 << 16
"""Rows that may wait to be written; more are dropped, and their number is logged."""

MAX_RANKS = 1 << 14
"""Ranks of adapters that are cached."""

_Row = tuple[float, str | None, int, int, str]


class Recorder(Repeating):
    """Rows are collected on the event loop and written by a thread, so no step and no response waits for a disk.

    Several processes may append to one file, each whole rows at a time.
    """

    def __init__(self, path: Path) -> None:
        """Raises NotAppendable if the file holds something else, or can't be opened."""
        super().__init__("recorder", WRITE_SECONDS, STOP_SECONDS)
        self._file = AppendedCsv(path, HEADER, "--record", "trace")
        self._rows: deque[_Row] = deque()
        self._num_dropped = 0
        self._epoch = time.time() - time.monotonic()
        self._ranks: dict[str, int] = {}
        self._adapters: BackendAdapters | None = None

    def start(self, adapters: BackendAdapters | None = None) -> None:
        """adapters: knows their ranks."""
        self._adapters = adapters
        super().start()

    def note(self, request: Request, prompt: int, output: int) -> None:
        """A request has ended, in any way, with so many tokens. One without a token counts as if it had one."""
        if len(self._rows) >= MAX_ROWS:
            self._num_dropped += 1
            return
        self._rows.append(
            (
                request.arrival_time,
                request.adapter_name,
                prompt,
                max(1, output),
                request.tenant,
            )
        )

    def stop(self) -> bool:
        """Write the remaining rows."""
        if ended := super().stop():
            self._file.close()
        return ended

    def _turn(self) -> None:
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        dropped, self._num_dropped = self._num_dropped, 0
        if not rows:
            return
        self._learn_ranks({adapter for _, adapter, *_ in rows if adapter is not None})
        lines: list[tuple[object, ...]] = []
        for arrival, adapter, prompt, output, tenant in rows:
            rank = 0 if adapter is None else self._ranks.get(adapter)
            name = hashlib.blake2b(tenant.encode(), digest_size=8).hexdigest() if tenant else ""
            lines.append((f"{self._epoch + arrival:.4f}", adapter, rank, prompt, output, name))
        try:
            self._file.append(lines)
        except OSError as error:
            dropped += len(rows)
            log.warning("%s: %s", self._file.path, error.strerror)
        if dropped:
            log.warning("%d requests are missing from %s", dropped, self._file.path)

    def _learn_ranks(self, adapters: set[str]) -> None:
        """Ranks of the versions that have these names now; a name keeps the rank that was first recorded."""
        if len(self._ranks) > MAX_RANKS:
            self._ranks.clear()
        if self._adapters is None or not (unknown := adapters - self._ranks.keys()):
            return
        asked = {name: self._adapters.state(name) for name in unknown}
        wait(asked.values(), RANK_SECONDS)
        for name, state in asked.items():
            if state.done() and not state.cancelled() and state.exception() is None:
                self._ranks[name] = state.result().manifest.rank
