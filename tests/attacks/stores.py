"""Thousands of adapters and a store that hangs: `python -m tests.attacks.stores`.

Starts `chorus serve` with the built-in model, first without adapters, then over a directory of adapters, some of them
broken. It shows how many it serves, how long its start takes and how much memory it needs. Then requests of the base
model arrive at a steady rate. Half of the rounds add as many other requests whose adapters come from a store on
loopback that never answers. The bar: the p99 of the time to first token is at most 1.25 times that without them. Rounds
alternate, so other load on the machine affects both kinds.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import httpx

from chorus.memory.files.config import CONFIG_FILE
from chorus.memory.files.form import WEIGHTS_FILE
from chorus.perf.report.command import judge, parser, say
from chorus.perf.report.table import Goal, Table, spread
from chorus.perf.serving.server_process import LaunchedServer, launched
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_NAME
from tests.processes import rss

ANSWER_TOKENS = 4
TRICKLE_SECONDS = 3.0
IDLE_SECONDS, IDLE_SHARE = 0.5, 0.1
BREAKS = 5
"""Kinds of broken adapters."""


def make_adapters(directory: Path, count: int, broken: int) -> None:
    """Copies of a built-in adapter, of which `broken`, spread evenly, are broken in one of several ways each."""
    source = min((path for path in BUILTIN_ADAPTERS.iterdir() if path.is_dir()), key=_size)
    config, weights = (source / CONFIG_FILE).read_bytes(), (source / WEIGHTS_FILE).read_bytes()
    bad = {round(index * count / broken): index for index in range(broken)}
    for index in range(count):
        path = directory / f"adapter-{index:05}"
        path.mkdir()
        kind = bad[index] % BREAKS if index in bad else BREAKS
        (path / CONFIG_FILE).write_bytes(
            b"{" if kind == 0 else json.dumps(json.loads(config) | {"r": 99}).encode() if kind == 1 else config
        )
        if kind != 2:
            cut = 100 if kind == 3 else len(weights) // 2 if kind == 4 else len(weights)
            (path / WEIGHTS_FILE).write_bytes(weights[:cut])


def _size(path: Path) -> int:
    return (path / WEIGHTS_FILE).stat().st_size


class HangingStore:
    """A web server on loopback that begins answers and never ends them: a byte every few seconds."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._kept: list[socket.socket] = []
        self._over = threading.Event()
        for work in (self._accept, self._trickle):
            threading.Thread(target=work, daemon=True).start()

    def break_off(self) -> None:
        """End all answers, so that the next round begins as the first did."""
        kept, self._kept = self._kept, []
        for one in kept:
            one.close()

    def close(self) -> None:
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.break_off()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                one = self._listener.accept()[0]
                one.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
                self._kept.append(one)

    def _trickle(self) -> None:
        while not self._over.wait(TRICKLE_SECONDS):
            for one in list(self._kept):
                with suppress(OSError):
                    one.sendall(b" ")


def first_token_seconds(client: httpx.Client, due: float) -> float:
    """Seconds from when a request of the base model was to be sent to its first token."""
    body = {"model": BUILTIN_NAME, "prompt": "the first token", "max_tokens": ANSWER_TOKENS, "stream": True}
    with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
        answer.raise_for_status()
        lines = answer.iter_lines()
        next(lines)
        took = time.perf_counter() - due
        for _ in lines:
            pass
    return took


def wait_until_idle(pid: int) -> None:
    """Wait until a process has used next to no CPU for a while."""
    for _ in range(40):
        before = cpu_seconds(pid)
        time.sleep(IDLE_SECONDS)
        if cpu_seconds(pid) - before <= IDLE_SHARE * IDLE_SECONDS:
            return


def run_round(server: LaunchedServer, prefix: str, hung: int, args: argparse.Namespace) -> tuple[list[float], float]:
    """Times to first token while `hung` requests wait for a store, and the server's CPU seconds meanwhile."""
    url = server.url
    limits = httpx.Limits(max_connections=None)
    with ExitStack() as stack:
        waiting = [stack.enter_context(_ask_hung(url, f"{prefix}{index}")) for index in range(hung)]
        client = stack.enter_context(httpx.Client(base_url=url, limits=limits, timeout=60))
        threads = stack.enter_context(ThreadPoolExecutor(32))
        first_token_seconds(client, time.perf_counter())
        wait_until_idle(server.pid)  # all of them wait then
        asked = []
        before = cpu_seconds(server.pid)
        due = time.perf_counter()
        for _ in range(round(args.rate * args.seconds)):
            time.sleep(max(0.0, due - time.perf_counter()))
            asked.append(threads.submit(first_token_seconds, client, due))
            due += 1 / args.rate
        took = [one.result() for one in asked]
        spent = cpu_seconds(server.pid) - before
        if ended := len(select.select(waiting, [], [], 0)[0]):
            raise RuntimeError(f"{ended} of {hung} requests did not hang for as long as the round")
    return took, spent


def _ask_hung(url: str, name: str) -> socket.socket:
    """The connection of a request that waits for an adapter; no thread does, so that it costs the client nothing."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps({"model": f"hung/{name}", "prompt": "x", "max_tokens": 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    connection = socket.create_connection((host, int(port)))
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, which other load on the machine changes less than the time by the clock."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(flags: list[str]) -> Iterator[tuple[LaunchedServer, dict[str, float]]]:
    """A server and the cost of its start: wall-clock and processor seconds, and MiB of memory."""
    began = time.perf_counter()
    with launched(flags) as server:
        seconds = time.perf_counter() - began
        yield server, {"seconds": seconds, "cpu_seconds": cpu_seconds(server.pid), "mib": rss(server.pid) / 2**20}


def _measure(where: Path, args: argparse.Namespace) -> int:
    directory = where / "adapters"
    directory.mkdir()
    empty = where / "none"
    empty.mkdir()
    make_adapters(directory, args.adapters, args.broken)
    table = Table("start", ["adapters", "served", "set aside", "seconds", "CPU seconds", "memory, MiB"])
    with serving(["--adapters", str(empty)]) as (_, alone):
        table.add(0, 0, 0, *alone.values())
    with closing(HangingStore()) as store:
        flags = ["--adapter-source", f"hung/*={store.url}/*", "--adapter-source-hosts", store.url]
        flags += ["--adapter-source-seconds", "600"]
        flags += ["--adapter-cache", str(where / "cache"), "--adapters", str(directory)]
        with serving(flags) as (server, took):
            listed = httpx.get(f"{server.url}/v1/adapters", timeout=60).json()
            served, aside = len(listed["data"]), len(listed["quarantined"])
            table.add(args.adapters, served, aside, *took.values())
            table.show()
            seen, spent = run_rounds(server, store, args)
    found = {kind: ms for kind, took in seen.items() if (ms := spread(1e3 * seconds for seconds in took))}
    columns = ["hung reads", "requests", "p50", "p99", "max", "server's CPU seconds"]
    times = Table("TTFT of the base model, ms", columns)
    for kind, ms in found.items():
        times.add(kind, len(seen[kind]), ms["p50"], ms["p99"], ms["max"], spent[kind])
    times.show()
    ratio = found["with"]["p99"] / found["without"]["p99"]
    result = {
        "served": served,
        "set_aside": aside,
        "hung": args.hung,
        "p99_ratio": round(ratio, 3),
        "start": {name: [round(alone[name], 1), round(took[name], 1)] for name in took},
        "cpu_seconds": {kind: round(seconds, 1) for kind, seconds in spent.items()},
        "ttft_p99_ms": {kind: round(ms["p99"], 1) for kind, ms in found.items()},
    }
    good = args.adapters - args.broken
    goals = [Goal("served", served, good), Goal("p99 with hung reads / without", ratio, 1.25, at_most=True)]
    return judge(result, goals)


def run_rounds(
    server: LaunchedServer, store: HangingStore, args: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Times to first token of rounds without and with hung reads, and the server's CPU seconds in these rounds."""
    seen: dict[str, list[float]] = {"without": [], "with": []}
    spent = dict.fromkeys(seen, 0.0)
    run_round(server, "warm", 0, args)
    for index in range(args.rounds):
        for kind in ("without", "with") if index % 2 == 0 else ("with", "without"):
            say(f"round {index + 1} {kind} hung reads")
            took, seconds = run_round(server, f"{index}-", args.hung if kind == "with" else 0, args)
            seen[kind] += took
            spent[kind] += seconds
            store.break_off()
    return seen, spent


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--adapters", type=int, default=5000, help="adapters in the directory")
    add("--broken", type=int, default=50, help="of which are broken")
    add("--hung", type=int, default=100, help="requests that wait for the store")
    add("--seconds", type=float, default=4.0, help="of a round")
    add("--rounds", type=int, default=4, help="of each kind")
    add("--rate", type=float, default=20.0, help="requests of the base model per second")
    args = command.parse_args(argv)
    where = Path(tempfile.mkdtemp())
    try:
        return _measure(where, args)
    finally:
        shutil.rmtree(where)


if __name__ == "__main__":
    sys.exit(main())
