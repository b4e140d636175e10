"""Clients in processes of their own that take bytes as they come and read nothing in them.

What a client makes of an answer costs more than it costs a server to give it: in one process, those who attack would
slow down the neighbour whose rate is measured.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

ATTACKER_NICENESS = 10
MAX_TOKENS = 1 << 21
EVENT = b"data: {"

_spawn = multiprocessing.get_context("spawn")


def ask(address: tuple[str, int], path: str, body: bytes, timeout: float) -> socket.socket:
    """A connection on which a request has been sent whose answer ends with it."""
    head = f"POST {path} HTTP/1.1\r\nhost: {address[0]}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    connection = socket.create_connection(address, timeout=timeout)
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return connection


class Neighbour:
    """Streams one answer after another and notes when each token came."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._times: Any = _spawn.RawArray("d", MAX_TOKENS)
        self._count: Any = _spawn.RawValue("q", 0)
        self._process = _spawn.Process(target=_stream, args=(address, self._times, self._count), daemon=True)
        self._process.start()

    def __iter__(self) -> Iterator[float]:
        return iter(self._times[: self._count.value])

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _stream(address: tuple[str, int], times: Any, count: Any) -> None:
    body = json.dumps({"prompt": "neighbour", "max_tokens": 400, "ignore_eos": True, "stream": True,
                       "temperature": 0, "return_token_ids": True}).encode()  # fmt: skip
    while True:
        with suppress(OSError), ask(address, "/v1/completions", body, 60.0) as connection:
            rest = b""
            while data := connection.recv(1 << 16):
                now, data = time.monotonic(), rest + data
                for _ in range(data.count(EVENT)):
                    times[count.value] = now
                    count.value += 1
                rest = data[-len(EVENT) + 1 :]


class Attacker:
    """Sends what it is told to and gives way to everybody else on the machine, as one on another machine would."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_attack, args=(address, theirs), daemon=True)
        self._process.start()

    def post(self, path: str, body: bytes, timeout: float) -> int:
        """Status of the answer, all of which was received; 0 when there was none in time."""
        self._pipe.send((path, body, timeout))
        return self._pipe.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _attack(address: tuple[str, int], pipe: Connection) -> None:
    os.nice(ATTACKER_NICENESS)
    while True:
        path, body, timeout = pipe.recv()
        status, begin = b"", b""
        with suppress(OSError), ask(address, path, body, timeout) as connection:
            while data := connection.recv(1 << 20):
                begin = begin or data
            status = begin[9:12]
        pipe.send(int(status) if status.isdigit() else 0)
