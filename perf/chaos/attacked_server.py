"""A real server in a process of its own, watched while it is attacked: its health, its memory and a neighbour."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from ..serving.server_process import launched
from .raw_clients import Attacker, Neighbour

POLL_SECONDS = 0.02
TIMEOUT = 60.0


@dataclass(slots=True)
class Watch:
    """Observations: health's answers as (sent, seconds), and when each of the neighbour's tokens came."""

    health: list[tuple[float, float]] = field(default_factory=list)
    tokens: Iterable[float] = ()
    failures: int = 0

    def worst_delay(self, begin: float, end: float) -> float:
        """Seconds that /health took at most, of the polls that fell into the time."""
        return max((took for sent, took in self.health if sent + took >= begin and sent <= end), default=0.0)

    def rate(self, begin: float, end: float) -> float:
        """The neighbour's tokens per second."""
        return sum(begin <= at < end for at in self.tokens) / (end - begin)


class AttackedServer:
    """A launched server and the watch over it."""

    def __init__(self, url: str, pid: int) -> None:
        self.address = urlsplit(url).netloc
        self.pid = pid
        self.watch = Watch()
        self._stopping = threading.Event()

    def post(self, path: str, body: bytes, timeout: float = TIMEOUT) -> int:
        """Status of an answer that was received whole; 0 when there was none in time."""
        return self._attacker.post(path, body, timeout)

    def rss(self) -> int:
        return self._status("VmRSS")

    def peak(self) -> int:
        """Most bytes resident since `forget_peak`."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def _status(self, name: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/{self.pid}/status has no {name}")

    @contextmanager
    def watched(self) -> Iterator[None]:
        polling = threading.Thread(target=self._poll, daemon=True)
        polling.start()
        host, port = self.address.rsplit(":", 1)
        self._attacker, neighbour = Attacker((host, int(port))), Neighbour((host, int(port)))
        self.watch.tokens = neighbour
        try:
            deadline = time.monotonic() + TIMEOUT
            while not any(neighbour) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            yield
        finally:
            self._stopping.set()
            self._attacker.close()
            neighbour.close()
            polling.join(TIMEOUT)

    def _poll(self) -> None:
        connection = HTTPConnection(self.address, timeout=TIMEOUT)
        while not self._stopping.is_set():
            sent = time.monotonic()
            try:
                connection.request("GET", "/health")
                connection.getresponse().read()
            except (OSError, HTTPException):
                self.watch.failures += 1
                connection.close()
            self.watch.health.append((sent, time.monotonic() - sent))
            self._stopping.wait(POLL_SECONDS)


@contextmanager
def started_server(flags: list[str]) -> Iterator[AttackedServer]:
    """Starts a server with these flags."""
    before = _children()
    with launched(flags) as url:
        (pid,) = _children() - before
        yield AttackedServer(url, pid)


@contextmanager
def attacked_server(flags: list[str]) -> Iterator[AttackedServer]:
    """Starts a server with these flags and watches it."""
    with started_server(flags) as server, server.watched():
        yield server


def _children() -> set[int]:
    found = set()
    for task in os.listdir("/proc/self/task"):
        found |= {int(pid) for pid in Path(f"/proc/self/task/{task}/children").read_text().split()}
    return found
