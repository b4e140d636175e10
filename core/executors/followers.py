"""The processes of all ranks but the first, as the first has them: begun, asked, watched and ended."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any, TypeVar

from ...memory.transfers.transfer import ExecutorLost
from ...ops.ranks import Ranks, RanksLost, StepGivenUp
from ..config import EngineConfig
from ..model.shard import Shard
from .rank_memory import MemoryLayout

T = TypeVar("T")

#: Seconds that the other ranks may take to end.
STOP_SECONDS = 5.0

_LOOK_SECONDS = 0.2

#: Variables that no other process needs.
_KEYS = "CHORUS_API_KEY", "CHORUS_ADMIN_KEY"


class Followers:
    """The processes of all ranks but the first. Messages are `rank.Follower`'s methods."""

    def __init__(self, config: EngineConfig, layout: MemoryLayout, memory_fd: int, ranks: Ranks) -> None:
        self._size, self._seconds, self._ranks = layout.size, layout.seconds, ranks
        self._processes: list[Popen[bytes]] = []
        self._links: list[Connection] = []
        self._on_lost: Callable[[ExecutorLost], None] = lambda error: None
        self._is_closed = False
        command = [sys.executable, "-m", f"{__package__}.rank"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_KEYS)}
        environment["PYTHONPATH"] = os.pathsep.join(part or os.getcwd() for part in sys.path)
        try:
            for rank in range(1, layout.size):
                here, there = socket.socketpair()
                here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(layout.seconds) + 1, 0))
                with there:
                    self._links.append(Connection(here.detach()))
                    fds = there.fileno(), memory_fd
                    self._processes.append(Popen([*command, *map(str, fds)], stdin=PIPE, pass_fds=fds, env=environment))
                with suppress(OSError):  # of a process that has ended already, of which `join` says why
                    self._links[-1].send((config, Shard(rank, layout.size), layout))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def join(self) -> list[int]:
        """Wait until every rank has read its weights, and watch it from then on; the bytes of each."""
        found = []
        for rank, (link, process) in enumerate(zip(self._links, self._processes, strict=True), 1):
            while not link.poll(_LOOK_SECONDS) and process.poll() is None:
                pass
            try:
                num_bytes, reason = link.recv()
            except (EOFError, OSError):
                num_bytes, reason = None, f"its process ended ({self._end_of(rank)}); its messages are above"
            if reason is not None:
                raise RuntimeError(f"rank {rank} of {self._size} could not join: {reason}")
            found.append(num_bytes)
        for rank in range(1, self._size):
            threading.Thread(target=self._watch, args=[rank], name=f"chorus-rank-{rank}", daemon=True).start()
        return found

    def watch(self, on_lost: Callable[[ExecutorLost], None]) -> None:
        self._on_lost = on_lost

    def send(self, name: str, *arguments: Any) -> None:
        """Send all a message. Raises ExecutorLost."""
        message = pickle.dumps((name, *arguments))
        for rank, link in enumerate(self._links, 1):
            try:
                link.send_bytes(message)
            except OSError as error:
                raise self._lost(rank) from error

    def beside(self, work: Callable[[], T], name: str, *arguments: Any) -> tuple[T, list[Any]]:
        """Do the first rank's work while the others do what a message says; its result, and their answers. Raises its
        error or another rank's, after all have answered, or ExecutorLost.
        """
        self.send(name, *arguments)
        try:
            result = work()
        except Exception as error:
            self._answers(error)
            raise
        return result, self._answers()

    def _answers(self, failure: Exception | None = None) -> list[Any]:
        """All answers to a message. Raises ExecutorLost, or an error of another rank, unless one of the first rank's
        own, `failure`, explains it.
        """
        seconds = STOP_SECONDS if isinstance(failure, RanksLost) else self._seconds
        deadline, found, errors = time.monotonic() + seconds, [], []
        for rank, link in enumerate(self._links, 1):
            try:
                if not link.poll(max(0.0, deadline - time.monotonic())):
                    self._ranks.lose()
                    raise ExecutorLost(f"rank {rank} of {self._size} kept the others waiting for {self._seconds:g} s")
                value, error = link.recv()
            except (EOFError, OSError) as error:
                raise self._lost(rank) from error
            found.append(value)
            if isinstance(error, Exception):
                errors.append(error)
            elif error is not None:
                errors.append(RuntimeError(f"rank {rank} of {self._size}: {error}"))
        if isinstance(failure, RanksLost):
            raise ExecutorLost(str(failure)) from failure
        if errors and (failure is None or isinstance(failure, StepGivenUp)):
            raise errors[0]
        return found

    def close(self) -> None:
        """End all processes, by force where they don't end by themselves."""
        self._is_closed = True
        self._ranks.lose()
        for link, process in zip(self._links, self._processes, strict=False):
            link.close()
            if process.stdin is not None:
                process.stdin.close()
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, rank: int) -> None:
        self._processes[rank - 1].wait()
        if not self._is_closed:
            self._on_lost(self._lost(rank))

    def _lost(self, rank: int) -> ExecutorLost:
        self._ranks.lose()
        return ExecutorLost(f"rank {rank} of {self._size} has ended ({self._end_of(rank)})")

    def _end_of(self, rank: int) -> str:
        try:
            status = self._processes[rank - 1].wait(STOP_SECONDS)
        except TimeoutExpired:
            return "it does not answer any more"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
