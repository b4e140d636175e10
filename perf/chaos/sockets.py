"""Thousands of sockets that say nothing, say it slowly, or don't read, against a real server with few descriptors.

    python -m chorus.perf.chaos.sockets

Starts `chorus serve` (the built-in model) under a limit of descriptors, opens sockets of six kinds at once, and asks
for /health and /v1/models over new connections all the while. The bar: every socket is closed within 60 s, every new
client is served within 1 s, and the log stays below 1 MB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CLOSED_SECONDS = 60.0
SERVED_SECONDS = 1.0
LOG_BYTES = 1 << 20
SPARE = 100
"""Descriptors that a process keeps for all but its sockets."""

_JSON = b"host: localhost\r\ncontent-type: application/json\r\n"
_STREAM = b'{"model": "chorus-builtin", "prompt": "abc\\n", "max_tokens": 400, "ignore_eos": true, "stream": true}'

KINDS: dict[str, tuple[bytes, bytes]] = {
    "silent": (b"", b""),
    "half a head": (b"GET /health HTTP/1.1\r\nhost: loc", b""),
    "slow head": (b"GET /health HTTP/1.1\r\nx: ", b"y"),
    "slow body": (b"POST /v1/completions HTTP/1.1\r\n" + _JSON + b"content-length: 5000\r\n\r\n", b" "),
    "unread pages": (b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 200, b""),
    "unread stream": (
        b"POST /v1/completions HTTP/1.1\r\n" + _JSON + b"content-length: %d\r\n\r\n" % len(_STREAM) + _STREAM, b""
    ),
}  # fmt: skip
"""Kind → what is sent at once, and what every two seconds."""

DRIP_SECONDS = 2.0


@dataclass
class Attack:
    """Fate of one process's sockets. opened: kind → count. closed: kind → seconds until each was closed."""

    opened: dict[str, int] = field(default_factory=dict)
    closed: dict[str, list[float]] = field(default_factory=dict)


def attack(port: int, count: int, seconds: float, result: Connection) -> None:
    """Open `count` sockets, keep them for `seconds`, and tell what became of them."""
    raise_limit()
    poller, opened, attack = select.epoll(), {}, Attack()
    kinds = list(KINDS)
    deadline = time.monotonic() + seconds
    next_drip = time.monotonic() + DRIP_SECONDS
    asked = 0
    while time.monotonic() < deadline and (asked < count or opened):
        for _ in range(min(100, count - asked)):
            kind = kinds[asked % len(kinds)]
            asked += 1
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
            opened[client.fileno()] = [client, kind, time.monotonic(), False]
            attack.opened[kind] = attack.opened.get(kind, 0) + 1
            poller.register(client, select.EPOLLOUT | select.EPOLLRDHUP)
        for descriptor, events in poller.poll(0.02):
            client, kind, _, greeted = one = opened[descriptor]
            if events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
                _end(attack, opened, poller, one)
            elif not greeted:
                one[3] = True
                poller.modify(client, select.EPOLLRDHUP)
                _send(client, KINDS[kind][0])
        if time.monotonic() >= next_drip:
            next_drip = time.monotonic() + DRIP_SECONDS
            for client, kind, _, greeted in opened.values():
                if greeted:
                    _send(client, KINDS[kind][1])
    result.send((attack.opened, attack.closed))
    result.recv()  # what is still open stays so until the server has been looked at


def _send(client: socket.socket, data: bytes) -> None:
    try:
        if data:
            client.send(data)
    except OSError:
        pass  # it is closed, or takes no more; the poller says which


def _end(attack: Attack, opened: dict[int, list[Any]], poller: select.epoll, one: list[Any]) -> None:
    client, kind, since, _ = one
    attack.closed.setdefault(kind, []).append(time.monotonic() - since)
    poller.unregister(client)
    del opened[client.fileno()]
    client.close()


def probe(port: int, stop: Any, result: Connection) -> None:
    """A new client every quarter of a second; tells how long each waited, and what went wrong."""
    seconds, failures = [], []
    while not stop.is_set():
        path = ("/health", "/v1/models")[len(seconds) % 2]
        start = time.monotonic()
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
                client.settimeout(30)
                client.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
                answer = b""
                while part := client.recv(1 << 16):
                    answer += part
            if not answer.startswith(b"HTTP/1.1 200"):
                failures.append(f"{path}: {answer[:60]!r}")
        except OSError as error:
            failures.append(f"{path}: {type(error).__name__}: {error}")
        seconds.append(time.monotonic() - start)
        time.sleep(0.25)
    result.send((seconds, failures))


def raise_limit() -> int:
    """This process may have as many descriptors as it is ever allowed to; returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


def start_server(descriptors: int, log: Path) -> tuple[subprocess.Popen, int]:
    """A server of the built-in model, and its port once it listens."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "chorus.server", "serve", "--port", "0", "--threads", "1", "--grace-seconds", "2"],
            stdout=out, stderr=out, preexec_fn=limit,
        )  # fmt: skip
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"listening on http://\S+:(\d+)", log.read_text("utf-8", "replace")):
            return process, int(found[1])
        time.sleep(0.1)
    process.kill()
    raise SystemExit(f"the server did not start:\n{log.read_text('utf-8', 'replace')[-2000:]}")


def num_sockets(process: subprocess.Popen) -> int:
    """Sockets that the server has open."""
    links = []
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            links.append(os.readlink(descriptor))
        except OSError:
            continue  # closed meanwhile
    return sum(link.startswith("socket:") for link in links)


def run(sockets: int, descriptors: int, seconds: float) -> dict[str, Any]:
    """The whole attack, and what came of it."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        process, port = start_server(descriptors, log)
        try:
            before = num_sockets(process)
            stop = context.Event()
            per_process = max(1, raise_limit() - SPARE)
            shares = [min(per_process, sockets - at) for at in range(0, sockets, per_process)]
            told, workers = [], []
            for target, args in ((probe, (port, stop)), *((attack, (port, share, seconds)) for share in shares)):
                here, there = context.Pipe()
                told.append(here)
                workers.append(context.Process(target=target, args=(*args, there), daemon=True))
                workers[-1].start()
            opened: dict[str, int] = {}
            closed: dict[str, list[float]] = {}
            for one in told[1:]:
                counts, times = one.recv()
                for kind, count in counts.items():
                    opened[kind] = opened.get(kind, 0) + count
                    closed.setdefault(kind, []).extend(times.get(kind, []))
            left = num_sockets(process) - before
            stop.set()
            waits, failures = told[0].recv()
            for one in told[1:]:
                one.send(None)
            for worker in workers:
                worker.join(30)
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
        finally:
            process.kill()
        return {
            "sockets": sum(opened.values()),
            "descriptors": descriptors,
            "kinds": {
                kind: {
                    "opened": count,
                    "closed": len(closed[kind]),
                    "last_closed_s": round(max(closed[kind], default=0), 1),
                }
                for kind, count in opened.items()
            },
            "open_in_server_after": left,
            "after_s": seconds,
            "probes": len(waits),
            "probe_failures": failures[:5],
            "slowest_probe_s": round(max(waits), 3),
            "log_bytes": log.stat().st_size,
            "exit_code": code,
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chorus.perf.chaos.sockets", description=__doc__.partition("\n")[0])
    parser.add_argument("--sockets", type=int, default=5000, help="sockets opened (default: 5000)")
    parser.add_argument("--descriptors", type=int, default=1024, help="the server's limit (default: 1024)")
    parser.add_argument("--seconds", type=float, default=CLOSED_SECONDS, help="how long they are kept (default: 60)")
    arguments = parser.parse_args()
    result = run(arguments.sockets, arguments.descriptors, arguments.seconds)
    print(f"{'kind':14} {'opened':>7} {'closed':>7} {'last after':>11}")
    for kind, row in result["kinds"].items():
        print(f"{kind:14} {row['opened']:7} {row['closed']:7} {row['last_closed_s']:9.1f} s")
    print(f"open in the server {result['after_s']:g} s after the first: {result['open_in_server_after']}")
    print(f"new clients: {result['probes']}, slowest {result['slowest_probe_s']} s, failed {result['probe_failures']}")
    print(f"log: {result['log_bytes']} bytes; exit code {result['exit_code']}")
    # The probe's own connection, and one that is being closed, may be open when the server is looked at.
    result["met"] = (
        result["open_in_server_after"] <= 2
        and not result["probe_failures"]
        and result["slowest_probe_s"] <= SERVED_SECONDS
        and result["log_bytes"] < LOG_BYTES
        and result["exit_code"] == 0
    )
    print(json.dumps(result))
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
