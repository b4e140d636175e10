"""Cost of a cluster's front: `python -m chorus.perf.serving.cluster_cost`.

The same streamed requests in turns: to a cluster's front with its replicas behind it, to as many `chorus serve` of the
same model, each asked for its share at the same time, and with `--router` to another project's router in front of these
servers. Every replica and server has one thread. Rates are of many requests side by side, TTFTs of one after another;
processor time, of all processes and of the busiest, is read from the kernel, so that what else the machine does hardly
shows; what the busiest takes for a token bounds the rate where processors are plenty. `ttft_ms` is of a request alone,
`ttft_p99_ms` of the many. With `--replicas 1` the front is a server whose engine has a process of its own. Memory is
what a process has alone and shared (RSS). The bars: the rate behind the front is at least `--floor` of the servers',
and the TTFT at most 2 ms above theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median

import httpx

from ..cpu.random_model import checkpoint
from ..cpu.workload import GEOMETRIES, Geometry, Workload
from ..report.command import judge, parser
from ..report.table import Goal, Table
from .server_process import LaunchedServer, launched

PROMPT = "hello world\n"
START_SECONDS = 60.0


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
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


def load(urls: list[str], model: str, requests: int, lone: int, tokens: int) -> tuple[float, list[float], list[float]]:
    """Wall seconds for so many streamed answers side by side, of each URL in turn; TTFTs of these, the shortest first,
    and of `lone` ones after them.
    """

    async def one(client: httpx.AsyncClient, url: str, count: int) -> float:
        body = {"model": model, "prompt": PROMPT, "max_tokens": count, "ignore_eos": True, "stream": True,
                "temperature": 0}  # fmt: skip
        began, first = time.perf_counter(), 0.0
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != 200:  # httpx's own error can't come back from this process
                raise RuntimeError(f"{url}: {response.status_code} {await response.aread()}")
            async for _ in response.aiter_raw():
                first = first or time.perf_counter() - began
        return first

    async def run() -> tuple[float, list[float], list[float]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as client:
            began = time.perf_counter()
            firsts = await asyncio.gather(*(one(client, urls[index % len(urls)], tokens) for index in range(requests)))
            took = time.perf_counter() - began
            return took, sorted(firsts), [await one(client, urls[index % len(urls)], 2) for index in range(lone)]

    return asyncio.run(run())


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


def rounds(ways: dict[str, tuple[list[str], list[int]]], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of what each way spent, in turns. ways: by name the URLs, and the processes that take part."""
    seen: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    total = args.requests * args.tokens
    name = httpx.get(f"{ways['front'][0][0]}/v1/models", trust_env=False).json()["data"][0]["id"]
    with multiprocessing.get_context("spawn").Pool(1) as client:
        for _ in range(args.rounds + 1):
            for way, (urls, processes) in ways.items():
                before = [*map(cpu_seconds, processes)]
                took, firsts, lone = client.apply(load, (urls, name, args.requests, args.lone, args.tokens))
                spent = [after - at for at, after in zip(before, map(cpu_seconds, processes), strict=True)]
                seen[way].append({
                    "tokens_per_second": total / took, "ttft_ms": 1e3 * median(lone),
                    "ttft_p99_ms": 1e3 * firsts[int(0.99 * (len(firsts) - 1))],
                    "cpu_us_a_token": 1e6 * sum(spent) / total, "busiest_us_a_token": 1e6 * max(spent) / total,
                })  # fmt: skip
    return {
        way: {name: median(one[name] for one in found[1:]) for name in found[0]}  # the first round warms up
        for way, found in seen.items()
    }


def main() -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--replicas", type=int, default=3)
    command.add_argument("--fronts", type=int, default=1, help="processes that serve HTTP")
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
    flags = [*model, "--threads", "1"]
    with ExitStack() as stack:
        servers = [stack.enter_context(launched(flags)) for _ in range(args.replicas)]
        began = time.perf_counter()
        front = stack.enter_context(launched([*flags, "--replicas", str(args.replicas), "--fronts", str(args.fronts)],
                                              command=("cluster", "up")))  # fmt: skip
        started = time.perf_counter() - began
        urls, pids = [one.url for one in servers], [one.pid for one in servers]
        fronts = front.children("front") or [front.pid]
        ways = {"front": ([front.url], [*fronts, *front.children("replica")]), "servers": (urls, pids)}
        if args.router is not None:
            url, pid = stack.enter_context(routing(args.router, urls))
            ways["router"] = [url], [pid, *pids]
        found = rounds(ways, args)
        memory = {"front": rss_mib(fronts[0]), "replica": max(map(rss_mib, front.children("replica")))}
        with httpx.Client(base_url=front.url, timeout=60) as client:
            restarted = restart_seconds(front, client, args.replicas)
    table = Table(f"medians of {args.rounds} rounds", ["way", *found["front"]])
    for way, values in found.items():
        table.add(way, *values.values())
    table.show()
    sizes = Table("sizes", ["front MiB", "replica MiB", "start s", "restart of a replica s"])
    sizes.add(memory["front"], memory["replica"], started, restarted)
    sizes.show()
    ratio = found["front"]["tokens_per_second"] / found["servers"]["tokens_per_second"]
    added = found["front"]["ttft_ms"] - found["servers"]["ttft_ms"]
    result = {**found, "rss_mib": memory, "start_seconds": started, "restart_seconds": restarted,
              "ratio": round(ratio, 3), "added_ttft_ms": round(added, 2)}  # fmt: skip
    goals = [Goal("rate behind the front, of the servers' without it", ratio, args.floor)]
    goals.append(Goal("added TTFT of a request alone, ms", added, 2.0, at_most=True))
    return judge(result, goals)


if __name__ == "__main__":
    sys.exit(main())
