"""Receivers of requests' outputs, and delivery of a step's outputs to them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Iterable

from ...core.requests.types import FinishReason, RequestOutput
from .backend import OnOutput

log = logging.getLogger(__name__)

_Batch = list[tuple[OnOutput, RequestOutput]]


class Subscribers:
    """Receivers by request id; any thread may call any method. A receiver is removed with its last output."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._receivers: dict[str, tuple[OnOutput, asyncio.AbstractEventLoop | None]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._receivers

    def ids(self) -> list[str]:
        with self._lock:
            return list(self._receivers)

    def add(self, request_id: str, on_output: OnOutput, loop: asyncio.AbstractEventLoop | None) -> None:
        """`on_output` is called on `loop`; on the delivering thread if that runs the loop, or if there is none."""
        with self._lock:
            self._receivers[request_id] = on_output, loop

    def discard(self, request_id: str) -> None:
        with self._lock:
            self._receivers.pop(request_id, None)

    def end_all(self, reason: FinishReason, message: str) -> tuple[list[str], list[str]]:
        """End all requests; return their ids, and the ids of requests whose loop is closed."""
        with self._lock:
            ended = list(self._receivers)
            return ended, self.deliver([RequestOutput(i, (), finish_reason=reason, error=message) for i in ended])

    def deliver(self, outputs: Iterable[RequestOutput]) -> list[str]:
        """Deliver outputs, all of a loop at once; return the ids of requests whose loop is closed."""
        batches: dict[asyncio.AbstractEventLoop | None, _Batch] = defaultdict(list)
        with self._lock:
            for output in outputs:
                receiver = self._receivers.get(output.request_id)
                if receiver is None:
                    continue
                if output.finish_reason is not None:
                    del self._receivers[output.request_id]
                on_output, loop = receiver
                batches[loop].append((on_output, output))
        orphaned: list[str] = []
        here = _running_loop()
        for loop, batch in batches.items():
            if loop in (None, here):
                _hand_over(batch)
                continue
            try:
                loop.call_soon_threadsafe(_hand_over, batch)
            except RuntimeError:  # the loop was closed, and the clients with it
                orphaned += [output.request_id for _, output in batch]
        return orphaned


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _hand_over(batch: _Batch) -> None:
    for on_output, output in batch:
        try:
            on_output(output)
        except Exception:
            log.exception("a receiver of request %s's output failed", output.request_id)
