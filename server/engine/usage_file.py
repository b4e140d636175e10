"""The usage file: what each tenant used of each model, for bills. `chorus usage` reads it.

Tests: tests/server/engine/test_usage_file.py
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.requests.types import FinishReason
from ...memory.adapters.composition import without_scales
from ..executors import Repeating
from .appended_csv import AppendedCsv

if TYPE_CHECKING:
    from .request_metrics import Ended

log = logging.getLogger(__name__)

WRITE_SECONDS = 5.0
"""Seconds between two writes; a process that is killed loses as much."""

STOP_SECONDS = 1.0

MAX_UNWRITTEN = 1 << 16
"""Pairs of a tenant and a model that may wait for a disk that refuses writes; further ones are logged and lost."""


@dataclass(slots=True)
class Used:
    """What a tenant used of a model."""

    requests: int = 0
    """Ended choices."""
    errors: int = 0
    """Choices among them that ended with an error."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    generated_tokens: int = 0
    page_seconds: float = 0.0
    """Pages of KV times the seconds that they were held."""
    queue_seconds: float = 0.0

    def add(self, other: Used) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


COLUMNS = ("time", "tenant", "model", *(one.name for one in fields(Used)))
HEADER = ",".join(COLUMNS)


class UsageFile(Repeating):
    """Adds up ended requests, and appends the sums as rows on a thread: no step and no response waits for a disk.

    Rows that could not be written are kept for the next write.
    """

    def __init__(self, path: Path) -> None:
        """Raises NotAppendable if the file holds something else, or can't be opened."""
        super().__init__("usage", WRITE_SECONDS, STOP_SECONDS)
        self.path = path
        self._file = AppendedCsv(path, HEADER, "--usage-file", "usage file")
        self._used: dict[tuple[str, str], Used] = {}
        self._lock = threading.Lock()
        self._num_lost = 0

    def note(self, model: str, tenant: str, reason: str, one: Ended) -> None:
        """A choice has ended; a prompt with several choices counts once. Of scales there is no end: a composition's
        row has its adapters' names alone.
        """
        used = Used(
            requests=1,
            errors=reason == FinishReason.ERROR,
            prompt_tokens=one.num_prompt_tokens if one.is_first_choice else 0,
            cached_tokens=one.num_cached_tokens if one.is_first_choice else 0,
            generated_tokens=one.num_generated_tokens,
            page_seconds=one.page_seconds,
            queue_seconds=one.queue_seconds or 0.0,
        )
        with self._lock:
            self._add((tenant, without_scales(model)), used)

    def stop(self) -> bool:
        """Write the remaining rows."""
        if ended := super().stop():
            self._file.close()
        return ended

    def _turn(self) -> None:
        self.flush()

    def flush(self) -> None:
        """Write what has been used since the last write."""
        with self._lock:
            used, self._used = self._used, {}
            lost, self._num_lost = self._num_lost, 0
        if lost:
            log.error("%s: the disk refuses writes; usage of %d requests is lost", self.path, lost)
        if not used:
            return
        now = f"{time.time():.0f}"
        rows = [(now, *pair, *_written(one)) for pair, one in used.items()]
        try:
            self._file.append(rows)
        except OSError as error:
            log.warning("%s: %s; its rows are kept and written later", self.path, error.strerror)
            with self._lock:
                for pair, one in used.items():
                    self._add(pair, one)

    def _add(self, pair: tuple[str, str], used: Used) -> None:
        known = self._used.get(pair)
        if known is not None:
            known.add(used)
        elif len(self._used) < MAX_UNWRITTEN:
            self._used[pair] = used
        else:
            self._num_lost += used.requests


def _written(used: Used) -> list[object]:
    return [f"{value:.6f}" if isinstance(value, float) else int(value) for value in astuple(used)]
