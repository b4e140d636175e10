"""The threads of one server: pools and periodic work."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod

from ..memory.host.daemon_pool import DaemonPool, PoolFull

__all__ = ["DaemonPool", "Executors", "PoolFull", "Repeating"]

log = logging.getLogger(__name__)


class Executors:
    """The thread pools of one server.

    text: reading long bodies, and writing long responses and lists. stop: the engine's end. scrapes: writing the
    metrics. page: encoding the operator's page.
    """

    def __init__(self) -> None:
        self.text = DaemonPool("text", threads=2)
        self.stop = DaemonPool("stop", threads=1, max_waiting=1)
        self.scrapes = DaemonPool("scrapes", threads=1, max_waiting=1)
        self.page = DaemonPool("page", threads=1, max_waiting=1)

    def shutdown(self) -> None:
        for pool in (self.text, self.stop, self.scrapes, self.page):
            pool.shutdown()


class Repeating(ABC):
    """Does something periodically on a daemon thread, from `start` to `stop`, and once more at the end."""

    def __init__(self, name: str, seconds: float, stop_seconds: float = 0.0) -> None:
        """stop_seconds: the longest that `stop` waits for the end."""
        self._seconds, self._stop_seconds = seconds, stop_seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"chorus-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> bool:
        """Ask it to end; True if it has ended."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(self._stop_seconds)
        return not self._thread.is_alive()

    @abstractmethod
    def _turn(self) -> None:
        """The periodic work; an error is logged, and the work continues."""

    def _run(self) -> None:
        ends = False
        while not ends:
            ends = self._stopping.wait(self._seconds)
            try:
                self._turn()
            except Exception:
                log.exception("%s failed; it goes on", self._thread.name)
