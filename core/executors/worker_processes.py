"""Worker processes, such as other TP ranks: this process starts them, sends messages, watches them and ends them.

Tests: tests/core/executors/test_ranks.py, tests/core/executors/test_lora_offload.py
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any, Protocol, TypeVar

from ...memory.host.child_python import python_command
from ...memory.transfers.transfer import ExecutorLost
from ...ops.ranks.ranks import RanksLost, StepGivenUp

T = TypeVar("T")

#: Seconds that worker processes may take to end.
STOP_SECONDS = 5.0

_LOOK_SECONDS = 0.2

#: Environment variables that worker processes don't need.
_KEYS = "CHORUS_API_KEY", "CHORUS_ADMIN_KEY"


class Losable(Protocol):
    """Something that processes wait for each other in."""

    def lose(self) -> None:
        """Release every waiting process; thread-safe."""
        ...


class WorkerProcesses:
    """Processes that share collectives with this one, which is the first rank."""

    def __init__(
        self, makers: Mapping[str, Callable[[int], Any]], memory_fd: int, ranks: Losable, seconds: float
    ) -> None:
        """makers: for each process name, a function that makes the object there whose methods are the messages, from
        the descriptor of the shared memory; `join` returns its `joined`. seconds: time limit of a reply.
        """
        self._names, self._seconds, self._ranks = list(makers), seconds, ranks
        self._processes: list[Popen[bytes]] = []
        self._links: list[Connection] = []
        self._on_lost: Callable[[ExecutorLost], None] = lambda error: None
        self._is_closed = False
        command = python_command(f"{__package__}.rank")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_KEYS)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # an empty one is the current directory
        try:
            for make in makers.values():
                here, there = socket.socketpair()
                here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds) + 1, 0))
                with there:
                    self._links.append(Connection(here.detach()))
                    fds = there.fileno(), memory_fd
                    self._processes.append(Popen([*command, *map(str, fds)], stdin=PIPE, pass_fds=fds, env=environment))
                with suppress(OSError):  # a process that has already ended: `join` says why
                    self._links[-1].send(make)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def join(self) -> list[Any]:
        """Wait until every process is ready, watch it from then on, and return each one's `joined`."""
        found = []
        for index, (link, process) in enumerate(zip(self._links, self._processes, strict=True)):
            while not link.poll(_LOOK_SECONDS) and process.poll() is None:
                pass
            try:
                answer, reason = link.recv()
            except (EOFError, OSError):
                answer, reason = None, f"its process ended ({self._end_of(index)}); its messages are above"
            if reason is not None:
                raise RuntimeError(f"{self._names[index]} could not join: {reason}")
            found.append(answer)
        for index, name in enumerate(self._names):
            threading.Thread(target=self._watch, args=[index], name=f"chorus-{name}", daemon=True).start()
        return found

    def watch(self, on_lost: Callable[[ExecutorLost], None]) -> None:
        """Register `on_lost`: it is called, from any thread, when a process ends by itself, or has already ended."""
        self._on_lost = on_lost
        for index, process in enumerate(self._processes):
            if process.poll() is not None:
                on_lost(self._lost(index))

    def send(self, name: str, *arguments: Any) -> None:
        """Send all processes a message. Raises ExecutorLost."""
        message = pickle.dumps((name, *arguments))
        for index, link in enumerate(self._links):
            try:
                link.send_bytes(message)
            except OSError as error:
                raise self._lost(index) from error

    def beside(self, work: Callable[[], T], name: str, *arguments: Any) -> tuple[T, list[Any]]:
        """Do the first rank's work while the others execute a message; return its result and their replies.

        Raises its error or another rank's, after all have replied, or ExecutorLost.
        """
        self.send(name, *arguments)
        try:
            result = work()
        except Exception as error:
            self.answers(error)
            raise
        return result, self.answers()

    def why(self) -> str | None:
        """Ask lost ranks for the error of the one that failed; None if none replies any more."""
        if self._is_closed:
            return None
        try:
            while True:  # earlier messages may not have been answered either
                self.answers(seconds=STOP_SECONDS)
        except ExecutorLost as error:
            return str(error) if self.have_ended else None
        except Exception as error:
            return str(error)

    @property
    def have_ended(self) -> bool:
        """True if any process has ended."""
        return any(process.poll() is not None for process in self._processes)

    def answers(self, failure: Exception | None = None, seconds: float | None = None) -> list[Any]:
        """Return all replies to the oldest message without replies.

        Raises ExecutorLost, or another rank's error unless `failure`, an error of the first rank, explains it. seconds:
        time limit, if different from the usual one.
        """
        if seconds is None:
            seconds = STOP_SECONDS if isinstance(failure, RanksLost) else self._seconds
        found, errors = self._collect(seconds)
        if isinstance(failure, RanksLost):
            raise ExecutorLost(str(failure)) from failure
        if errors and (failure is None or isinstance(failure, StepGivenUp)):
            raise errors[0]
        return found

    def _collect(self, seconds: float) -> tuple[list[Any], list[Exception]]:
        """Collect a reply from each process, and the errors among them. Raises ExecutorLost."""
        deadline, pending = time.monotonic() + seconds, dict(enumerate(self._links))
        found: list[Any] = [None] * len(pending)
        errors: list[Exception] = []
        while pending:
            ready = wait(pending.values(), max(0.0, deadline - time.monotonic()))
            if not ready:  # the error of a failed rank is more useful than that of a rank waiting for it
                self._ranks.lose()
                why = [str(error) for error in errors if RanksLost.__name__ not in str(error)]
                raise ExecutorLost([*why, f"{self._names[min(pending)]} kept the others waiting for too long"][0])
            for index in [index for index, link in pending.items() if link in ready]:
                del pending[index]
                found[index], error = self._receive(index)
                errors += [] if error is None else [error]
        return found, errors

    def _receive(self, index: int) -> tuple[Any, Exception | None]:
        try:
            value, error = self._links[index].recv()
        except (EOFError, OSError) as error:
            raise self._lost(index) from error
        if error is None or isinstance(error, Exception):
            return value, error
        return value, RuntimeError(f"{self._names[index]}: {error}")

    def close(self) -> None:
        """End all processes; kill those that don't end by themselves."""
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

    def _watch(self, index: int) -> None:
        self._processes[index].wait()
        if not self._is_closed:
            self._on_lost(self._lost(index))

    def _lost(self, index: int) -> ExecutorLost:
        self._ranks.lose()
        return ExecutorLost(f"{self._names[index]} has ended ({self._end_of(index)})")

    def _end_of(self, index: int) -> str:
        try:
            status = self._processes[index].wait(STOP_SECONDS)
        except TimeoutExpired:
            return "it does not answer any more"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
