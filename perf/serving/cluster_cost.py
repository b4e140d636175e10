"""Cost of a cluster's front: `python -m chorus.perf.serving.cluster_cost`.

Replicas of the built-in model with one thread each answer the same requests twice in turns: behind the front, over
HTTP, and driven directly over their sockets by this process, with the same frames and no front. Processor time is read
from the kernel, so that what else the machine does hardly shows; rates and TTFT are by the clock. Memory is what a
process has alone and shared (RSS). The bar: the rate behind the front is at least `--floor` of the direct one.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from ...core.requests.record import to_record
from ...core.requests.request import Request
from ...core.requests.sampling_params import SamplingParams
from ...core.requests.types import RequestOutput
from ...server.cluster.dispatcher import Dispatcher
from ...server.cluster.link import Link
from ...server.cluster.processes import ClusterDirectory
from ...server.cluster.router import MostIdle
from ..report.command import judge, parser
from ..report.table import Goal, Table
from .server_process import LaunchedServer, launched

PROMPT = "hello world\n"
CONNECT_SECONDS = 60.0


def cpu_seconds(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


def over_http(url: str, requests: int, tokens: int) -> tuple[float, list[float]]:
    """Wall seconds for so many streamed answers side by side, and their TTFTs."""

    async def one(client: httpx.AsyncClient) -> float:
        body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
        began, first = time.perf_counter(), 0.0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_raw():
                first = first or time.perf_counter() - began
        return first

    async def run() -> tuple[float, list[float]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
            began = time.perf_counter()
            firsts = await asyncio.gather(*(one(client) for _ in range(requests)))
            return time.perf_counter() - began, list(firsts)

    return asyncio.run(run())


def directly(directory: str, replicas: int, prompt: list[int], requests: int, tokens: int) -> tuple[float, list[float]]:
    """The same over the replicas' sockets, with no HTTP and no text."""

    async def run() -> tuple[float, list[float]]:
        firsts: dict[str, float] = {}
        ended, up = asyncio.Semaphore(0), asyncio.Event()

        def deliver(outputs: list[RequestOutput]) -> None:
            for output in outputs:
                firsts.setdefault(output.request_id, time.perf_counter() - began)
                if output.finish_reason is not None:
                    ended.release()

        links = ClusterDirectory(Path(directory)).links(replicas, CONNECT_SECONDS)
        dispatcher = Dispatcher(links, MostIdle(), deliver, CONNECT_SECONDS)
        dispatcher.on_change = lambda: up.set() if all(link.is_up for link in links) else None
        tasks = [asyncio.create_task(Link.run(link, dispatcher)) for link in links]
        await asyncio.wait_for(up.wait(), CONNECT_SECONDS)
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        began = time.perf_counter()
        for index in range(requests):
            record = to_record(Request(f"direct-{index}", prompt, params), 0.0)
            dispatcher.add(record, None, 0, time.monotonic(), Future())
        for _ in range(requests):
            await ended.acquire()
        took = time.perf_counter() - began
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return took, list(firsts.values())

    return asyncio.run(run())


def spent(server: LaunchedServer, work: Callable[[], tuple[float, list[float]]], tokens: int) -> dict[str, float]:
    """Rate, median TTFT, and processor µs a token of the front and of all replicas, of some work."""
    replicas = server.children("replica")
    before = cpu_seconds(server.pid), sum(map(cpu_seconds, replicas))
    took, firsts = work()
    after = cpu_seconds(server.pid), sum(map(cpu_seconds, replicas))
    front, behind = (1e6 * (end - start) / tokens for start, end in zip(before, after, strict=True))
    return {
        "tokens_per_second": tokens / took,
        "ttft_ms": 1e3 * median(firsts),
        "front_us": front,
        "replica_us": behind,
    }


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


def rounds(server: LaunchedServer, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of what each way spent, in turns."""
    sockets = Path(f"/proc/{server.children('replica')[0]}/cmdline").read_bytes().decode().split("\0")
    directory = str(Path(sockets[sockets.index("--address-file") + 1]).parent)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        prompt = client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    seen: dict[str, list[dict[str, float]]] = {"front": [], "direct": []}
    total = args.requests * args.tokens
    with multiprocessing.get_context("spawn").Pool(1) as load:
        for _ in range(args.rounds + 1):
            calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
                "front": (over_http, (server.url, args.requests, args.tokens)),
                "direct": (directly, (directory, args.replicas, prompt, args.requests, args.tokens)),
            }
            for name, (function, arguments) in calls.items():
                seen[name].append(spent(server, lambda f=function, a=arguments: load.apply(f, a), total))
    return {
        way: {name: median(one[name] for one in found[1:]) for name in found[0]}  # the first round warms up
        for way, found in seen.items()
    }


def main() -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--replicas", type=int, default=3)
    command.add_argument("--requests", type=int, default=48, help="requests at once")
    command.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    command.add_argument("--rounds", type=int, default=3, help="rounds, of which the median counts")
    command.add_argument("--floor", type=float, default=0.9, help="least share of the direct rate")
    args = command.parse_args()
    began = time.perf_counter()
    with launched(["--replicas", str(args.replicas), "--threads", "1"], command=("cluster", "up")) as server:
        started = time.perf_counter() - began
        found = rounds(server, args)
        memory = {"front": rss_mib(server.pid), "replica": max(map(rss_mib, server.children("replica")))}
        with httpx.Client(base_url=server.url, timeout=60) as client:
            restarted = restart_seconds(server, client, args.replicas)
    table = Table(f"medians of {args.rounds} rounds", ["way", *found["front"]])
    for way, values in found.items():
        table.add(way, *values.values())
    table.show()
    sizes = Table("sizes", ["front MiB", "replica MiB", "start s", "restart of a replica s"])
    sizes.add(memory["front"], memory["replica"], started, restarted)
    sizes.show()
    ratio = found["front"]["tokens_per_second"] / found["direct"]["tokens_per_second"]
    added = found["front"]["ttft_ms"] - found["direct"]["ttft_ms"]
    result = {**found, "rss_mib": memory, "start_seconds": started, "restart_seconds": restarted,
              "ratio": round(ratio, 3), "added_ttft_ms": round(added, 2)}  # fmt: skip
    goals = [Goal("rate behind the front, of the direct one", ratio, args.floor)]
    goals.append(Goal("added TTFT, ms", added, 2.0, at_most=True))
    return judge(result, goals)


if __name__ == "__main__":
    sys.exit(main())
