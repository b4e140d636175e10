"""The thread pools of one server."""

from __future__ import annotations

from ..memory.host.daemon_pool import DaemonPool, PoolFull

__all__ = ["DaemonPool", "Executors", "PoolFull"]


class Executors:
    """The pools of one server.

    text: reading long bodies, and writing long answers and lists. stop: the engine's end. scrapes: writing the metrics.
    page: encoding the operator's page.
    """

    def __init__(self) -> None:
        self.text = DaemonPool("text", threads=2)
        self.stop = DaemonPool("stop", threads=1, max_waiting=1)
        self.scrapes = DaemonPool("scrapes", threads=1, max_waiting=1)
        self.page = DaemonPool("page", threads=1, max_waiting=1)

    def shutdown(self) -> None:
        for pool in (self.text, self.stop, self.scrapes, self.page):
            pool.shutdown()
