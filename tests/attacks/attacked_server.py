"""A server under attack: the attacker's requests, a neighbour's rate meanwhile, and a probe of /health.

Neighbour and attacker are processes of their own that receive bytes and parse nothing. To parse an answer costs a
client more than it costs the server to write it: in one process, the attacker would slow down the neighbour's
measurement.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

from chorus.perf.serving.server_process import LaunchedServer, launched

Address = tuple[str, int]

ATTACKER_NICENESS = 10
POLL_SECONDS = 0.02
TIMEOUT = 60.0
MAX_TOKENS = 1 << 21
EVENT = b"data: {"

_spawn = multiprocessing.get_context("spawn")


def ask(address: Address, path: str, body: bytes, timeout: float = TIMEOUT) -> socket.socket:
    """Send a request; return the connection, which the server closes after its answer."""
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
    body = json.dumps(
        {
            "prompt": "neighbour",
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
            "return_token_ids": True,
        }
    ).encode()
    attacker = multiprocessing.parent_process()
    while attacker is not None and attacker.is_alive():  # one that was killed has closed nothing
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


class Probe:
    """Sends a server a GET every few milliseconds, on a thread of its own, until `end`.

    answers: (time sent, seconds until the answer) of each request. failures: errors, as text.
    """

    def __init__(self, url: str, paths: Sequence[str], pause: float, *, keeps_connection: bool = True) -> None:
        """pause: seconds between two requests. keeps_connection: else each request opens a new connection."""
        self.answers: list[tuple[float, float]] = []
        self.failures: list[str] = []
        self._over = threading.Event()
        limits = httpx.Limits(max_keepalive_connections=None if keeps_connection else 0)
        self._http = httpx.Client(base_url=url, limits=limits, timeout=TIMEOUT, trust_env=False)
        self._thread = threading.Thread(target=self._run, args=(paths, pause), daemon=True)
        self._thread.start()

    def _run(self, paths: Sequence[str], pause: float) -> None:
        with self._http:
            while not self._over.wait(pause):
                path, sent = paths[len(self.answers) % len(paths)], time.monotonic()
                try:
                    self._http.get(path).raise_for_status()
                except httpx.HTTPError as error:
                    self.failures.append(f"{path}: {type(error).__name__}: {error}")
                self.answers.append((sent, time.monotonic() - sent))

    def end(self) -> None:
        self._over.set()
        self._thread.join(TIMEOUT)


class Canary:
    """A port of this machine that nothing has a reason to connect to, and the connections that came nevertheless."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def count(self) -> int:
        """Connections since the last call."""
        came = 0
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._socket.accept()
                connection.close()
                came += 1
        return came

    def close(self) -> None:
        self._socket.close()


def worst_gap(tokens: Iterable[float], begin: float, end: float) -> float:
    """Longest time without a token, in seconds, between `begin` and `end`."""
    times = [begin, *(at for at in tokens if begin <= at < end), end]
    return max(after - before for before, after in pairwise(times))


def worst_delay(answers: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Longest time to an answer, in seconds, of a probe's requests in flight between `begin` and `end`."""
    return max((took for sent, took in answers if sent + took >= begin and sent <= end), default=0.0)


def rate(tokens: Iterable[float], begin: float, end: float) -> float:
    """Tokens per second of the times at which they came."""
    return sum(begin <= at < end for at in tokens) / (end - begin)


@dataclass(frozen=True, slots=True)
class AttackedServer:
    """A launched server, a probe of its health, a neighbour, and an attacker at a lower priority than all of them."""

    server: LaunchedServer
    health: Probe
    neighbour: Neighbour
    attacker: ProcessPoolExecutor

    def post(self, path: str, body: bytes) -> int:
        """Status of an answer that was received whole; 0 when there was none in time."""
        return self.attacker.submit(_attack, self.server.address, path, body).result()


@contextmanager
def attacked_server(flags: list[str]) -> Iterator[AttackedServer]:
    """Start a server with these flags and watch it."""
    with launched(flags) as server, ProcessPoolExecutor(1, _spawn, os.nice, (ATTACKER_NICENESS,)) as attacker:
        neighbour = Neighbour(server.address)
        health = Probe(server.url, ["/health"], POLL_SECONDS)
        try:
            yield AttackedServer(server, health, neighbour, attacker)
        finally:
            health.end()
            neighbour.close()
