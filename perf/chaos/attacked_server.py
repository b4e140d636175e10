"""A server's neighbour, its health and an attacker: what is done to one that is attacked, and what others see of it.

Neighbour and attacker are processes of their own that take bytes as they come and read nothing in them. What a client
makes of an answer costs more than it costs a server to give it: in one process, those who attack would slow down the
neighbour whose rate is measured.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from ..serving.server_process import LaunchedServer, launched

Address = tuple[str, int]

ATTACKER_NICENESS = 10
POLL_SECONDS = 0.02
TIMEOUT = 60.0
MAX_TOKENS = 1 << 21
EVENT = b"data: {"

_spawn = multiprocessing.get_context("spawn")


def ask(address: Address, path: str, body: bytes, timeout: float = TIMEOUT) -> socket.socket:
    """A connection on which a request has been sent whose answer ends with it."""
    head = f"POST {path} HTTP/1.1\r\nhost: {address[0]}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    connection = socket.create_connection(address, timeout=timeout)
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return connection


class Neighbour:
    """Streams one answer after another and notes when each token came."""

    def __init__(self, address: Address) -> None:
        self._times: Any = _spawn.RawArray("d", MAX_TOKENS)
        self._count: Any = _spawn.RawValue("q", 0)
        self._process = _spawn.Process(target=_stream, args=(address, self._times, self._count), daemon=True)
        self._process.start()
        deadline = time.monotonic() + TIMEOUT
        while not self._count.value and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def __iter__(self) -> Iterator[float]:
        return iter(self._times[: self._count.value])

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _stream(address: Address, times: Any, count: Any) -> None:
    body = json.dumps({"prompt": "neighbour", "max_tokens": 400, "ignore_eos": True, "stream": True,
                       "temperature": 0, "return_token_ids": True}).encode()  # fmt: skip
    while True:
        with suppress(OSError), ask(address, "/v1/completions", body) as connection:
            rest = b""
            while data := connection.recv(1 << 16):
                now, data = time.monotonic(), rest + data
                for _ in range(data.count(EVENT)):
                    times[count.value] = now
                    count.value += 1
                rest = data[-len(EVENT) + 1 :]


def _attack(address: Address, path: str, body: bytes) -> int:
    status = b""
    with suppress(OSError), ask(address, path, body) as connection:
        begin = connection.recv(1 << 20)
        while connection.recv(1 << 20):
            pass
        status = begin[9:12]
    return int(status) if status.isdigit() else 0


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

    def poll(self, url: str, stop: threading.Event) -> None:
        with httpx.Client(base_url=url, timeout=TIMEOUT, trust_env=False) as http:
            while not stop.wait(POLL_SECONDS):
                sent = time.monotonic()
                try:
                    http.get("/health")
                except httpx.HTTPError:
                    self.failures += 1
                self.health.append((sent, time.monotonic() - sent))


@dataclass(frozen=True, slots=True)
class AttackedServer:
    """A launched server, the watch over it, and one who attacks and gives way to everybody else on the machine."""

    server: LaunchedServer
    watch: Watch
    attacker: ProcessPoolExecutor

    def post(self, path: str, body: bytes) -> int:
        """Status of an answer that was received whole; 0 when there was none in time."""
        return self.attacker.submit(_attack, self.server.address, path, body).result()


@contextmanager
def attacked_server(flags: list[str]) -> Iterator[AttackedServer]:
    """Start a server with these flags and watch it."""
    stop = threading.Event()
    with launched(flags) as server, ProcessPoolExecutor(1, _spawn, os.nice, (ATTACKER_NICENESS,)) as attacker:
        neighbour = Neighbour(server.address)
        watch = Watch(tokens=neighbour)
        polling = threading.Thread(target=watch.poll, args=(server.url, stop), daemon=True)
        polling.start()
        try:
            yield AttackedServer(server, watch, attacker)
        finally:
            stop.set()
            polling.join(TIMEOUT)
            neighbour.close()
