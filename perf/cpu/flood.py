"""One tenant sends many times its share: the other tenants' time to first token, and the cost in throughput.

    python -m chorus.perf.cpu.flood [--tenants 8] [--flood 10] [--load 0.7] [--seconds 30] [--rounds 6]

A round measures the engine's capacity first: requests per second with every seat taken. A tenant's share is `--load` of
that over the number of tenants. Then the same seeded Poisson arrivals are served again and again, each time by a new
engine: with every tenant at its share ("calm"), and with the first at `--flood` times its share under each order of the
queue: tenants take turns, resident adapters go first whatever the tenant, first come first served. The next round has
other arrivals, and the runs in another order, so that drift of the machine's speed falls on all runs. Bars: over all
rounds, the other tenants' 99th percentile of the time to the first token is at most 1.5 times what it is when all send
their share, and tokens per second at least 0.95 of what first come first served gives; the ranges hold nine in ten of
the values for as many rounds drawn from the measured ones, with replacement. "alone" is one of the others at its share,
without any other tenant; it is shown without a bar. Every tenant has an adapter of its own.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.requests.request import Request
from ...core.requests.sampling_params import SamplingParams
from ..report.command import judge, parser, say
from ..report.table import Goal, Table
from .random_model import adapters, checkpoint
from .workload import Geometry, Workload

MOST_SLOWER = 1.5
LEAST_THROUGHPUT = 0.95

ORDERS = {
    "turns": {"fair_by": "tenant"},
    "resident first": {"fair_by": "tenant"},
    "first come": {"fair_by": "tenant", "max_overtake_seconds": 0.0},
}
"""Engine options of each order; in all but the first, all requests have the same tenant's name."""


class Arrival(NamedTuple):
    """A request: seconds after the beginning, and the tenant's number."""

    time: float
    tenant: int


class Served(NamedTuple):
    """Results of a run: times to the first token by tenant, tokens while all tenants sent, and seconds."""

    ttft: dict[int, list[float]]
    tokens: int
    seconds: float


Round = dict[str, Served]
"""Runs of one machine, one after another, by name."""


class Runs:
    """The runs of some rounds that have one name."""

    def __init__(self, rounds: Sequence[Round], name: str) -> None:
        self._runs = [each[name] for each in rounds]

    def p99(self) -> float:
        """99th percentile of the times to the first token of all tenants but the first."""
        others = [times for run in self._runs for tenant, times in run.ttft.items() if tenant]
        return float(np.percentile(list(itertools.chain.from_iterable(others)), 99))

    def worst(self) -> float:
        """The largest median of any tenant but the first."""
        tenants = [tenant for tenant in self._runs[0].ttft if tenant]
        times = [[each for run in self._runs for each in run.ttft[tenant]] for tenant in tenants]
        return max(median(each) for each in times if each)

    def tokens_per_second(self) -> float:
        return sum(run.tokens for run in self._runs) / sum(run.seconds for run in self._runs)


def slower(rounds: Sequence[Round], than: str) -> float:
    """Return the others' p99 beside a flood, in turns, as a multiple of that in other runs."""
    return Runs(rounds, "turns").p99() / Runs(rounds, than).p99()


def throughput(rounds: Sequence[Round]) -> float:
    """Return the tokens per second of turns over the tokens per second of first come, first served."""
    return Runs(rounds, "turns").tokens_per_second() / Runs(rounds, "first come").tokens_per_second()


def spread(rounds: Sequence[Round], value: Callable[[Sequence[Round]], float]) -> tuple[float, float]:
    """Return the range of `value` in nine of ten draws, with replacement, of as many rounds."""
    draw = random.Random(0)
    drawn = [value(draw.choices(rounds, k=len(rounds))) for _ in range(500)]
    low, high = np.percentile(drawn, [5, 95])
    return float(low), float(high)


def arrivals(rates: list[float], seconds: float, seed: int) -> list[Arrival]:
    """Poisson arrivals of each tenant at its rate; a tenant's do not depend on what others send."""
    coming = []
    for tenant, rate in enumerate(rates):
        draw, now = random.Random(f"{seed} {tenant}"), 0.0
        while (now := now + draw.expovariate(rate)) < seconds:
            coming.append(Arrival(now, tenant))
    return sorted(coming)


class Bench:
    """A model and its adapters, and an engine for each run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._workload = Workload(
            options.geometry, requests=64, prompt_tokens=options.prompt_tokens, threads=options.threads,
            ranks=(options.rank,) * options.tenants,
        )  # fmt: skip
        work_dir = Path(options.work_dir)
        self._model, self._adapters = checkpoint(self._workload, work_dir), adapters(self._workload, work_dir)
        self._prompts = itertools.cycle(self._workload.prompts())
        self._params = SamplingParams(max_tokens=options.output_tokens, temperature=0, ignore_eos=True)
        self._serial = itertools.count()

    def capacity(self) -> float:
        """Requests per second with every seat taken and more waiting, after a while; at least one is awaited."""
        engine, ended, began = self._engine({}), 0, 0.0
        for index in itertools.count():
            while engine.stats().num_waiting < 4:
                engine.add_request(self._request(index % self._options.tenants, ""))
            ended += sum(output.finish_reason is not None for output in engine.step())
            if not began and ended >= self._options.seats:
                ended, began = 0, time.perf_counter()
            if began and ended and (spent := time.perf_counter() - began) > self._options.seconds / 3:
                break
        engine.close()
        return ended / spent

    def serve(self, coming: list[Arrival], order: str) -> Served:
        """Serve arrivals as they come; what still waits when the last one has come is dropped."""
        engine, seconds = self._engine(ORDERS[order]), self._options.seconds
        ttft: dict[int, list[float]] = {tenant: [] for tenant in range(self._options.tenants)}
        waiting: dict[str, Arrival] = {}
        tokens, queue, start = 0, iter([*coming, Arrival(float("inf"), 0)]), time.perf_counter()
        following = next(queue)
        while (now := time.perf_counter() - start) < seconds:
            while following.time <= now:
                request = self._request(following.tenant, str(following.tenant) if order == "turns" else "")
                waiting[request.id] = following
                engine.add_request(request)
                following = next(queue)
            if not engine.has_work():
                time.sleep(max(0.0, min(following.time, seconds) - now))
                continue
            outputs = engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                tokens += len(output.token_ids)
                if arrival := waiting.pop(output.request_id, None):
                    ttft[arrival.tenant].append(now - arrival.time)
        for arrival in waiting.values():  # it has waited at least so long
            ttft[arrival.tenant].append(seconds - arrival.time)
        engine.close()
        return Served(ttft, tokens, seconds)

    def round(self, number: int) -> tuple[float, Round]:
        """Return the requests per second that the engine is capable of, and the runs of a round."""
        options, capacity = self._options, self.capacity()
        seed, share = options.seed + number, options.load * capacity / options.tenants
        calm = arrivals([share] * options.tenants, options.seconds, seed)
        flood = arrivals([share * options.flood, *[share] * (options.tenants - 1)], options.seconds, seed)
        alone = [arrival for arrival in calm if arrival.tenant == 1]
        runs = [("alone", alone, "turns"), ("calm", calm, "turns"), *((order, flood, order) for order in ORDERS)]
        first = number % len(runs)
        return capacity, {name: self.serve(coming, order) for name, coming, order in runs[first:] + runs[:first]}

    def _engine(self, more: dict[str, Any]) -> Engine:
        engine = Engine.from_config(EngineConfig(
            model=self._model, max_num_seqs=self._options.seats, threads=self._options.threads, prefix_cache=False,
            max_waiting=None, **more,
        ))  # fmt: skip
        for name, path in self._adapters.items():
            engine.store.register(name, path)
        return engine

    def _request(self, tenant: int, name: str) -> Request:
        adapter = list(self._adapters)[tenant]
        return Request(f"r{next(self._serial)}", list(next(self._prompts)), self._params, adapter, tenant=name)


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[Goal]]:
    """Return the result, and the bars that it is held against."""
    bench, rounds, capacities = Bench(options), [], []
    for number in range(options.rounds):
        capacity, made = bench.round(number)
        capacities.append(capacity)
        rounds.append(made)
        found = f"p99 of TTFT {slower([made], 'calm'):.2f} of calm's, tokens {throughput([made]):.3f} of first come's"
        say(f"round {number + 1}: {capacity:.1f} requests/s, {found}")
    runs = {name: Runs(rounds, name) for name in ("alone", "calm", *ORDERS)}
    table = Table(
        "tenants at their share beside one that floods", ("", "p99 of TTFT, ms", "worst median, ms", "tokens/s")
    )
    for name, each in runs.items():
        table.add(name, each.p99() * 1e3, each.worst() * 1e3, each.tokens_per_second())
    table.show()
    over_calm, of_tokens = slower(rounds, "calm"), throughput(rounds)
    result = {
        "capacity": capacities, "slower": over_calm, "slower_range": spread(rounds, lambda some: slower(some, "calm")),
        "slower_by_round": [slower([each], "calm") for each in rounds],
        "throughput": of_tokens, "throughput_range": spread(rounds, throughput),
        "slower_than_alone": slower(rounds, "alone"),
        "ttft_p99": {name: each.p99() for name, each in runs.items()},
        "tokens_per_second": {name: each.tokens_per_second() for name, each in runs.items()},
    }  # fmt: skip
    return result, [
        Goal("others' p99 of TTFT, flood over calm", over_calm, MOST_SLOWER, at_most=True),
        Goal("tokens/s, turns over first come", of_tokens, LEAST_THROUGHPUT),
    ]


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--geometry", type=Geometry.parse, default=Geometry(), help="the model's shapes, as of perf.cpu")
    add("--tenants", type=int, default=8)
    add("--flood", type=float, default=10.0, help="times its share that the first tenant sends")
    add("--load", type=float, default=0.7, help="all tenants' shares, of the engine's capacity")
    add("--seconds", type=float, default=30.0, help="of each run")
    add("--rounds", type=int, default=6)
    add("--seats", type=int, default=16, help="requests in a step at most")
    add("--prompt-tokens", type=int, default=64)
    add("--output-tokens", type=int, default=32)
    add("--rank", type=int, default=16, help="of every adapter")
    add("--threads", type=int, help="CPU threads; default: all")
    add("--seed", type=int, default=0)
    add("--work-dir", default=str(Path(tempfile.gettempdir()) / "chorus-flood"), help="where models are kept")
    return judge(*run(command.parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())
