"""Cost of a cluster's front: `python -m chorus.perf.serving.cluster_cost`.

The same streamed requests in turns: to as many `chorus serve` as there are replicas, each asked for its share at the
same time, to a cluster of the same model for each number of `--fronts`, and with `--router` to another project's router
in front of the servers. Every replica and server has one thread. Rates are of many requests side by side, TTFTs of one
after another; processor time, of all processes and of the busiest, is read from the kernel, so that what else the
machine does hardly shows; what the busiest takes for a token bounds the rate where processors are plenty. `ttft_ms` is
of a request alone, `ttft_p99_ms` of the many. Memory is what a process has alone and shared (RSS).

The bars: the rate behind the first number of fronts is at least `--floor` of the servers', and the TTFT at most 2 ms
above theirs. With `--replicas 1` a cluster is a server with its engine in its own process; the bar is then that its
busiest process takes half of what one process for all takes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import httpx
import psutil

from ..cpu.random_model import checkpoint
from ..cpu.workload import GEOMETRIES, Geometry, Workload
from ..report.command import judge, parser
from ..report.table import Goal, Table
from .server_process import LaunchedServer, launched
from .streams import Answered, read_streams

PROMPT = "hello world\n"
START_SECONDS = 60.0
SERVERS = "servers"
"""Name of the way without a front."""


@contextmanager
def routing(command: str, servers: list[str]) -> Iterator[tuple[str, int]]:
    """A router in front of servers, such as `sglang-router launch`: its URL and process id."""
    ports = []
    for _ in range(2):
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            ports.append(str(bound.getsockname()[1]))
    words = [*command.split(), "--policy", "round_robin", "--host", "127.0.0.1", "--port", ports[0],
             "--prometheus-port", ports[1], "--worker-urls", *servers]  # fmt: skip
    url = f"http://127.0.0.1:{ports[0]}"
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the router did not start: {' '.join(words)}")
                time.sleep(0.1)
            yield url, process.pid
        finally:
            process.kill()


def _answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    return False


def cpu_seconds(pid: int) -> float:
    """Processor seconds of a process so far."""
    return sum(psutil.Process(pid).cpu_times()[:2])


def rss_mib(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 2**20


def load(urls: list[str], model: str, requests: int, lone: int, tokens: int) -> tuple[Answered, list[float]]:
    """So many streamed answers side by side, of each URL in turn; TTFTs of `lone` ones after them."""
    addresses = [(one.hostname or "", one.port or 80) for one in map(urlsplit, urls)]
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    answered = read_streams(addresses, [body] * requests)
    alone = [read_streams([addresses[index % len(urls)]], [{**body, "max_tokens": 2}]) for index in range(lone)]
    return answered, [one.firsts[0] for one in alone]


def restart_seconds(server: LaunchedServer, client: httpx.Client, count: int) -> float:
    """Seconds from a replica's kill until all are there again."""
    began = time.perf_counter()
    os.kill(server.children("replica")[0], signal.SIGKILL)
    seen_down = False
    while True:
        up = f"chorus_replicas_up {float(count)}" in client.get("/metrics").text
        seen_down = seen_down or not up
        if seen_down and up:
            return time.perf_counter() - began
        time.sleep(0.01)


@dataclass(frozen=True)
class Way:
    """A way to the same answers. fronts: processes that serve HTTP; others: the processes behind them."""

    urls: list[str]
    fronts: list[int]
    others: list[int] = field(default_factory=list)


def rounds(ways: dict[str, Way], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of what each way spent, in turns."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    total = args.requests * args.tokens
    model = httpx.get(f"{ways[SERVERS].urls[0]}/v1/models", trust_env=False).json()["data"][0]["id"]
    with multiprocessing.get_context("spawn").Pool(1) as client:
        for _ in range(args.rounds + 1):
            for name, way in ways.items():
                processes = [*way.fronts, *way.others]
                before = [*map(cpu_seconds, processes)]
                answered, alone = client.apply(load, (way.urls, model, args.requests, args.lone, args.tokens))
                spent = [after - at for at, after in zip(before, map(cpu_seconds, processes), strict=True)]
                of_fronts = sum(spent[: len(way.fronts)])
                seen[name].append({
                    "tokens_per_second": total / answered.seconds, "ttft_ms": 1e3 * median(alone),
                    "ttft_p99_ms": 1e3 * answered.firsts[int(0.99 * (len(answered.firsts) - 1))],
                    "cpu_us_a_token": 1e6 * sum(spent) / total, "fronts_us_a_token": 1e6 * of_fronts / total,
                    "busiest_us_a_token": 1e6 * max(spent) / total,
                })  # fmt: skip
    return {
        name: {value: median(one[value] for one in found[1:]) for value in found[0]}  # the first round warms up
        for name, found in seen.items()
    }


def main() -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--replicas", type=int, default=3)
    command.add_argument(
        "--fronts", type=int, nargs="+", default=[1], metavar="N",
        help="processes that serve HTTP; a cluster for each number that is given",
    )  # fmt: skip
    command.add_argument("--seqs", type=int, help="requests of a step (default: as `chorus serve` has it)")
    command.add_argument(
        "--geometry", type=Geometry.parse, metavar="SIZE",
        help=f"a random model, not the built-in one: {', '.join(GEOMETRIES)} or NAME=NUMBER,…",
    )  # fmt: skip
    command.add_argument("--requests", type=int, default=24, help="requests at once")
    command.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    command.add_argument("--lone", type=int, default=15, help="requests one after another, for the TTFT")
    command.add_argument("--rounds", type=int, default=3, help="rounds, of which the median counts")
    command.add_argument("--floor", type=float, default=0.9, help="least share of the servers' rate")
    command.add_argument("--router", metavar="COMMAND", help="another router beside, such as 'sglang-router launch'")
    args = command.parse_args()
    model = []
    if args.geometry is not None:
        workload = Workload(geometry=args.geometry)
        model = [str(checkpoint(workload, Path.home() / ".cache/chorus/bench_cpu"))]
    flags = [*model, "--threads", "1", *(["--max-num-seqs", str(args.seqs)] if args.seqs else [])]
    descriptors = max(4096, 4 * args.requests)  # a client's address has the half of them at most
    clusters: dict[str, tuple[LaunchedServer, float]] = {}
    with ExitStack() as stack:
        servers = [stack.enter_context(launched(flags, descriptors)) for _ in range(args.replicas)]
        ways = {SERVERS: Way([one.url for one in servers], [one.pid for one in servers])}
        for count in args.fronts:
            began = time.perf_counter()
            parts = ["--replicas", str(args.replicas), "--fronts", str(count)]
            cluster = stack.enter_context(launched([*flags, *parts], descriptors, ("cluster", "up")))
            name = f"{count} front{'s' * (count > 1)}"
            clusters[name] = cluster, time.perf_counter() - began
            ways[name] = Way([cluster.url], cluster.children("front") or [cluster.pid], cluster.children("replica"))
        if args.router is not None:
            url, pid = stack.enter_context(routing(args.router, ways[SERVERS].urls))
            ways["router"] = Way([url], [pid], ways[SERVERS].fronts)
        found = rounds(ways, args)
        first = next(iter(clusters))
        front, started = clusters[first]
        memory = {"front": rss_mib(ways[first].fronts[0]), "replica": max(map(rss_mib, ways[first].others))}
        with httpx.Client(base_url=front.url, timeout=60) as client:
            restarted = restart_seconds(front, client, args.replicas)
    table = Table(f"medians of {args.rounds} rounds", ["way", *found[SERVERS]])
    for way, values in found.items():
        table.add(way, *values.values())
    table.show()
    sizes = Table("sizes", ["front MiB", "replica MiB", "start s", "restart of a replica s"])
    sizes.add(memory["front"], memory["replica"], started, restarted)
    sizes.show()
    ratio = found[first]["tokens_per_second"] / found[SERVERS]["tokens_per_second"]
    added = found[first]["ttft_ms"] - found[SERVERS]["ttft_ms"]
    capacities = {name: found[SERVERS]["busiest_us_a_token"] / found[name]["busiest_us_a_token"] for name in clusters}
    result = {**found, "rss_mib": memory, "start_seconds": started, "restart_seconds": restarted,
              "ratio": round(ratio, 3), "added_ttft_ms": round(added, 2), "capacity": capacities}  # fmt: skip
    if args.replicas == 1:
        best = max(capacities, key=capacities.__getitem__)
        goals = [Goal("capacity of the busiest process, of one process for all", capacities[best], 2.0, where=best)]
    else:
        goals = [Goal("rate behind the front, of the servers' without it", ratio, args.floor)]
        goals.append(Goal("added TTFT of a request alone, ms", added, 2.0, at_most=True))
    return judge(result, goals)


if __name__ == "__main__":
    sys.exit(main())
