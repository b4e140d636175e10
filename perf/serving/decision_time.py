"""Time of one routing decision: `python -m chorus.perf.serving.decision_time`.

API servers with 3, 8 and 60 replicas that hold some of 10,000 adapters, with requests in progress and no sockets.
Reported is the median CPU time of each policy's decision, in microseconds. The goal: least-delay takes at most 50 µs
with 60 replicas. The gate compares its time relative to that of a fixed loop.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from ...core.executors.base import ModelInfo
from ...server.cluster.address import UnixSocket
from ...server.cluster.cluster_view import NOTHING
from ...server.cluster.dispatcher import Dispatcher
from ...server.cluster.in_flight_table import OpenRequest
from ...server.cluster.link import Link
from ...server.cluster.placer import RoutedRequest
from ...server.cluster.report import Hello, ModelIdentity, Report
from ...server.cluster.router import POLICIES, Estimates
from ..bench.machine import processor
from ..report.command import judge, parser
from ..report.table import Goal, rows_table

SIZES = (3, 8, 60)
LIMIT_US = 50.0
OWN = "least-delay"

_BUSY, _SEATS = 20, 32  # requests of a replica, now and at most
_IN_ARENA, _ON_HOST = 100, 1000  # adapters of a replica
_RANKS = (8, 16, 32, 64)
_PROMPT = [1] * 100
_NUM_BYTES = 1 << 20
_WARM, _LOOPS, _PARTS = 100, 200, 5
_HELLO = Hello(
    ModelIdentity("model", "bfloat16", "cuda", "1"),
    ModelInfo(32000, 4096, (2,)),
    max_num_seqs=_SEATS,
    max_adapters=_SEATS,
    block_tokens=16,
    pages_per_token=1 / 16,
    pid=1,
)
_STATS = replace(NOTHING, num_pages=4096, num_free_pages=2000, num_kv_pages=1500, num_cached_pages=500)


class ApiServer:
    """A dispatcher with busy connected replicas; requests are for adapters by a power law."""

    def __init__(self, policy: str, replicas: int, adapters: int) -> None:
        estimates = Estimates()
        self._policy = POLICIES[policy](estimates, 0)
        links = [Silent(f"r{index}", UnixSocket(Path("none")), b"", 1.0) for index in range(replicas)]
        self._dispatcher = Dispatcher(links, self._policy, lambda outputs: None, 1.0, estimates=estimates)
        self._names = [f"{index:064x}" for index in range(adapters)]
        weights = 1.0 / np.arange(1, adapters + 1)
        self._numbers = iter(np.random.default_rng(0).choice(adapters, 100_000, p=weights / weights.sum()).tolist())
        self._ids = map("q{}".format, itertools.count())
        random, loaded = Random(0), set(self._names)
        for link in links:
            link.hello, link.loaded = _HELLO, loaded
            near = random.sample(self._names, min(adapters, _IN_ARENA + _ON_HOST))
            tiers = dict.fromkeys(near, "host") | dict.fromkeys(near[:_IN_ARENA], "device")
            link.note_report(Report(_STATS, tiers=tiers))
            self._dispatcher.fleet.note_up(link)
            self._dispatcher.fleet.note_report(link)
        for _ in range(_BUSY * replicas):
            self._dispatch()()

    def choose(self) -> Callable[[], Any]:
        """Return the policy's decision about a request."""
        record, rank = self._next()
        _, replicas = self._dispatcher.fleet.candidates(OpenRequest("none", record))
        return partial(self._policy, RoutedRequest(record["content_hash"], len(_PROMPT), rank), replicas)

    def _dispatch(self) -> Callable[[], Any]:
        record, rank = self._next()
        return partial(
            self._dispatcher.add, record, Path("none"), rank, arrival=0.0, accepted=Future(), num_bytes=_NUM_BYTES
        )

    def _next(self) -> tuple[dict[str, Any], int]:
        """A request's record, and its adapter's rank."""
        number = next(self._numbers)
        name = self._names[number]
        record = {
            "id": next(self._ids),
            "tokens": _PROMPT,
            "num_prompt_tokens": len(_PROMPT),
            "adapter": name,
            "content_hash": name,
            "tenant": "",
            "choice_group": "",
        }
        return record, _RANKS[number % len(_RANKS)]


class Silent(Link):
    """A link without a socket: frames are dropped."""

    def send(self, kind: str, *fields: Any) -> None:
        pass


def timed(make: Callable[[], Callable[[], Any]], decisions: int) -> list[float]:
    """Microseconds of CPU time of each of so many decisions, without the first `_WARM`."""
    found = []
    for _ in range(_WARM + decisions):
        work = make()
        began = time.thread_time_ns()
        work()
        found.append((time.thread_time_ns() - began) / 1e3)
    return found[_WARM:]


def loop_us() -> float:
    """Microseconds of CPU time of a fixed loop."""
    return float(np.median(timed(lambda: partial(sum, [index * index for index in range(1000)]), _LOOPS)))


def repeats(found: Sequence[float]) -> dict[str, list[float]]:
    """Medians of a few parts of the timings, in µs, and relative to the time of a fixed loop."""
    loop, parts = loop_us(), [float(np.median(part)) for part in np.array_split(found, _PARTS)]
    return {"choose": [part / loop for part in parts], "choose_us": parts}


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--decisions", type=int, default=1000, help="decisions of each kind")
    command.add_argument("--limit", type=float, default=LIMIT_US, metavar="US", help="the goal, for a quiet machine")
    command.add_argument("--adapters", type=int, default=10_000)
    command.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), metavar="NAME")
    args = command.parse_args(argv)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, list[float]] = {}
    for size in SIZES:
        for policy in args.policies:
            api_server = ApiServer(policy, size, args.adapters)
            chosen = timed(api_server.choose, args.decisions)
            rows.append({"policy": policy, "replicas": size, "choose_us": float(np.median(chosen))})
            if policy == OWN:
                ratios = repeats(chosen)
    rows_table(
        f"µs of a decision among replicas with {args.adapters} adapters", "policy | replicas | choose_us", rows
    ).show()
    goals = [
        Goal(f"{OWN} with {row['replicas']} replicas, µs", row["choose_us"], args.limit, at_most=True)
        for row in rows
        if row["policy"] == OWN
    ]
    return judge({"device": processor(), "decisions": rows, "repeats": ratios}, goals)


if __name__ == "__main__":
    sys.exit(main())
