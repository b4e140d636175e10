"""Thousands of sockets that say nothing, say it slowly, or don't read, against a real server with few descriptors.

    python -m tests.attacks.sockets

Starts `chorus serve` (the built-in model) under a limit of descriptors, opens sockets of six kinds at once, and asks
for /health and /v1/models over new connections all the while. The bar: every socket is closed within 60 s, every new
client is served within 1 s, and the log stays below 1 MB.
"""

from __future__ import annotations

import multiprocessing
import resource
import select
import socket
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from chorus.perf.report.command import judge, parser
from chorus.perf.report.table import Goal, Table
from chorus.perf.serving.server_process import LaunchedServer, launched
from tests.processes import descriptors

from .attacked_server import Address, Probe

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
        b"POST /v1/completions HTTP/1.1\r\n" + _JSON + b"content-length: %d\r\n\r\n" % len(_STREAM) + _STREAM,
        b"",
    ),
}
"""Kind → the bytes sent at once, and those sent every two seconds."""

DRIP_SECONDS = 2.0
PROBE_SECONDS = 0.25
"""Seconds between two new clients."""


class Holder:
    """Sockets that one process holds open. closed: kind → seconds until each was closed."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._poller = select.epoll()
        self._open: dict[int, tuple[socket.socket, str, float]] = {}
        self._greeted: set[int] = set()
        self.opened: defaultdict[str, int] = defaultdict(int)
        self.closed: defaultdict[str, list[float]] = defaultdict(list)

    def hold(self, count: int, seconds: float) -> None:
        """Open `count` sockets and keep them for `seconds`, or until all were closed."""
        deadline, next_drip, asked = time.monotonic() + seconds, time.monotonic() + DRIP_SECONDS, 0
        while time.monotonic() < deadline and (asked < count or self._open):
            for _ in range(min(100, count - asked)):
                self._connect(list(KINDS)[asked % len(KINDS)])
                asked += 1
            for descriptor, events in self._poller.poll(0.02):
                if events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
                    self._end(descriptor)
                elif descriptor not in self._greeted:
                    self._greeted.add(descriptor)
                    self._poller.modify(descriptor, select.EPOLLRDHUP)
                    self._send(descriptor, 0)
            if time.monotonic() >= next_drip:
                next_drip = time.monotonic() + DRIP_SECONDS
                for descriptor in self._greeted:
                    self._send(descriptor, 1)

    def _connect(self, kind: str) -> None:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        client.connect_ex(self._address)
        self._open[client.fileno()] = client, kind, time.monotonic()
        self.opened[kind] += 1
        self._poller.register(client, select.EPOLLOUT | select.EPOLLRDHUP)

    def _send(self, descriptor: int, part: int) -> None:
        client, kind, _ = self._open[descriptor]
        with suppress(OSError):  # it is closed, or takes no more; the poller says which
            client.send(KINDS[kind][part])

    def _end(self, descriptor: int) -> None:
        client, kind, since = self._open.pop(descriptor)
        self._greeted.discard(descriptor)
        self.closed[kind].append(time.monotonic() - since)
        self._poller.unregister(client)
        client.close()


_holders: list[Holder] = []  # of this process: open connections stay open until the server has been inspected


def hold(address: Address, seconds: float, count: int) -> tuple[dict[str, int], dict[str, list[float]]]:
    """Sockets of this process that were opened, by kind, and how soon they were closed."""
    raise_limit()
    _holders.append(Holder(address))
    _holders[-1].hold(count, seconds)
    return dict(_holders[-1].opened), dict(_holders[-1].closed)


def raise_limit() -> int:
    """This process may have as many descriptors as it is ever allowed to; returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


def num_sockets(server: LaunchedServer) -> int:
    return sum(link.startswith("socket:") for link in descriptors(server.pid))


def run(sockets: int, descriptors: int, seconds: float) -> dict[str, Any]:
    """The whole attack, and its result."""
    with launched(["--threads", "1", "--grace-seconds", "2"], descriptors) as server:
        before = num_sockets(server)
        probe = Probe(server.url, ["/health", "/v1/models"], PROBE_SECONDS, keeps_connection=False)
        most = max(1, raise_limit() - SPARE)
        shares = [min(most, sockets - at) for at in range(0, sockets, most)]
        opened: defaultdict[str, int] = defaultdict(int)
        closed: defaultdict[str, list[float]] = defaultdict(list)
        with ProcessPoolExecutor(len(shares), multiprocessing.get_context("spawn")) as pool:
            for counts, times in pool.map(partial(hold, server.address, seconds), shares):
                for kind, count in counts.items():
                    opened[kind] += count
                    closed[kind] += times.get(kind, [])
            left = num_sockets(server) - before
            probe.end()
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
            "probes": len(probe.answers),
            "probe_failures": probe.failures[:5],
            "slowest_probe_s": round(max(took for _, took in probe.answers), 3),
            "exit_code": server.stop(),
            "log_bytes": server.log_bytes,
        }


def main() -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--sockets", type=int, default=5000, help="sockets opened")
    command.add_argument("--descriptors", type=int, default=1024, help="the server's limit")
    command.add_argument("--seconds", type=float, default=60.0, help="how long they are kept")
    args = command.parse_args()
    result = run(args.sockets, args.descriptors, args.seconds)
    table = Table(f"{result['open_in_server_after']} open after {args.seconds:g} s", ["kind", "opened", "closed", "s"])
    for kind, row in result["kinds"].items():
        table.add(kind, *row.values())
    table.show()
    goals = [
        # The probe's own connection, and one that is being closed, may be open when the server is looked at.
        Goal("sockets still open", result["open_in_server_after"], 2, at_most=True),
        Goal("probes that failed", len(result["probe_failures"]), 0, at_most=True),
        Goal("seconds of the slowest probe", result["slowest_probe_s"], 1.0, at_most=True),
        Goal("bytes of log", result["log_bytes"], LOG_BYTES - 1, at_most=True),
        Goal("the server's exit code", abs(result["exit_code"]), 0, at_most=True),
    ]
    return judge(result, goals)


if __name__ == "__main__":
    sys.exit(main())
