"""Access to a cluster's directory from an event loop: a thread reads and writes the files."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from ..executors import DaemonPool, PoolFull
from .directory import ClusterDirectory

log = logging.getLogger(__name__)

MAX_WAITING = 64
"""Files that may wait for a disk that hangs; further ones are written the next time."""


class DirectoryFiles:
    """Methods return at once."""

    def __init__(self, directory: ClusterDirectory) -> None:
        self._directory = directory
        self._count = directory.num_replicas
        self._files = DaemonPool("cluster-directory", threads=1, max_waiting=MAX_WAITING)

    def num_replicas(self) -> int:
        """The number of replicas wanted, as of the last call."""
        self._soon(self._read_count)
        return self._count

    def tell_hint(self, api_server: int, hint: int, about: int) -> None:
        """Write an API server's scale hint."""
        self._soon(partial(self._directory.tell_hint, api_server, hint, about))

    def tell_stuck(self, name: str, pid: int | None) -> None:
        """Name a replica's process that hangs."""
        self._soon(partial(self._directory.stuck_file(name).write_text, str(pid)))

    def _read_count(self) -> None:
        self._count = self._directory.num_replicas

    def _soon(self, call: Callable[[], object]) -> None:
        try:
            self._files.submit(call).add_done_callback(_log_error)
        except (PoolFull, RuntimeError) as error:
            log.warning("the cluster's directory can't be used: %s", error)


def _log_error(done: Future[object]) -> None:
    if (error := done.exception()) is not None:
        log.warning("the cluster's directory can't be used: %s", error)
