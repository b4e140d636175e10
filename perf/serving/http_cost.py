"""Processor time of the HTTP server, by part: `python -m chorus.perf.serving.http_cost`.

Starts `chorus serve` (the built-in model) and reads the processor time of each of its threads from the kernel, so that
what else the machine does hardly shows. Parts: requests over kept and over new connections, a body of 1-byte chunks
with and without a use for it, and streams side by side, of which each token is an event. The first thread runs HTTP,
the busiest other one the engine. The bar: a megabyte of 1-byte chunks takes at most half a second of the HTTP thread.
"""

from __future__ import annotations

import multiprocessing
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from ..report.command import judge, parser
from ..report.table import Goal, Table
from .server_process import LaunchedServer, launched
from .streams import Address, read_streams

CHUNKED_SECONDS = 0.5
"""Most processor seconds of the HTTP thread for a megabyte of 1-byte chunks."""

_PING = b"GET /ping HTTP/1.1\r\nhost: localhost\r\n"
_POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


def thread_seconds(server: LaunchedServer) -> dict[int, float]:
    """Processor seconds of each thread so far; the first one's id is the process's."""
    found = {}
    for task in Path(f"/proc/{server.pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def spent(server: LaunchedServer, work: Callable[[], Any]) -> tuple[dict[str, float], float, Any]:
    """Processor seconds that work took, by part; its wall seconds; its result."""
    before, began = thread_seconds(server), time.perf_counter()
    result = work()
    took = time.perf_counter() - began
    time.sleep(0.05)  # the kernel counts a running thread's time when it next leaves the processor
    parts = {thread: seconds - before.get(thread, 0.0) for thread, seconds in thread_seconds(server).items()}
    http = parts.pop(server.pid)
    engine = max(parts.values(), default=0.0)
    return {"http": http, "engine": engine, "rest": sum(parts.values()) - engine}, took, result


def ask(address: Address, count: int, keeps: bool) -> None:
    """Send GET /ping `count` times over one connection, or over a new one each."""
    head = _PING + (b"\r\n" if keeps else b"connection: close\r\n\r\n")
    connection: socket.socket | None = None
    for _ in range(count):
        connection = connection or socket.create_connection(address)
        connection.sendall(head)
        if not connection.recv(1 << 16).startswith(b"HTTP/1.1 200"):
            raise RuntimeError("the server does not answer")
        if not keeps:
            connection.close()
            connection = None


def send_chunks(address: Address, head: bytes, size: int) -> bytes:
    """Send a body of `size` bytes on the wire in 1-byte chunks; what was answered first."""
    body = b"1\r\nx\r\n" * (size // 6) + b"0\r\n\r\n"
    with socket.create_connection(address) as connection:
        with suppress(OSError):  # it may be refused before all of it was sent
            connection.sendall(head + _CHUNKED + body)
        with suppress(OSError):
            return connection.recv(64)
    return b""


def streams(address: Address, number: int, tokens: int) -> int:
    """Events of `number` streams side by side."""
    body = {"prompt": "abc\n", "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    return read_streams([address], number, body).events


def measure(server: LaunchedServer, args: Any) -> Iterator[tuple[str, float, float]]:
    """Names, values, and wall-clock rates of one round."""
    process = multiprocessing.get_context("spawn").Pool(1)
    with process:
        call = lambda function, *rest: lambda: process.apply(function, (server.address, *rest))  # noqa: E731
        call(ask, 50, True)()
        for name, count, keeps in (("kept", args.requests, True), ("new", args.requests // 2, False)):
            parts, took, _ = spent(server, call(ask, count, keeps))
            yield f"µs a request, {name} connection", 1e6 * parts["http"] / count, count / took
        for name, head in (("POST /v1/completions", _POST), ("GET /ping", _PING)):
            parts, _, _ = spent(server, call(send_chunks, head, 1 << 20))
            yield f"s for 1 MiB of 1-byte chunks, {name}", parts["http"], 0.0
        parts, took, events = spent(server, call(streams, args.streams, args.tokens))
        if events < args.streams * args.tokens:
            raise RuntimeError(f"{events} events for {args.streams * args.tokens} tokens")
        for part, seconds in parts.items():
            yield f"µs a streamed token, {part}", 1e6 * seconds / events, events / took


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--requests", type=int, default=2000, help="requests of a round")
    command.add_argument("--streams", type=int, default=64, help="streams side by side")
    command.add_argument("--tokens", type=int, default=200, help="tokens of a stream")
    command.add_argument("--rounds", type=int, default=3, help="rounds, of which the median counts")
    args = command.parse_args(argv)
    values: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    with launched(["--threads", "1", "--max-num-seqs", str(args.streams)]) as server:
        for _ in range(args.rounds):
            for name, value, rate in measure(server, args):
                values.setdefault(name, []).append(value)
                rates.setdefault(name, []).append(rate)
    found = {name: median(seen) for name, seen in values.items()}
    table = Table(f"median of {args.rounds} rounds", ["what", "processor time", "a second, by the clock"])
    for name, value in found.items():
        table.add(name, value, median(rates[name]) or None)
    table.show()
    chunked = max(value for name, value in found.items() if "chunks" in name)
    goals = [Goal("processor seconds for a megabyte of 1-byte chunks", chunked, CHUNKED_SECONDS, at_most=True)]
    return judge({name: round(value, 4) for name, value in found.items()}, goals)


if __name__ == "__main__":
    sys.exit(main())
