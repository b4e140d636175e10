"""One tenant sends many times its share: the other tenants' time to first token, and the cost in throughput.

A round measures the engine's capacity first: requests per second with every slot taken. A tenant's share is `LOAD` of
that over the number of tenants. Then the same seeded Poisson arrivals are served several times, each time by a new
engine. In "calm", every tenant sends its share. Otherwise the first sends `FLOOD` times its share, under each order of
the queue: tenants take turns, resident adapters go first whatever the tenant, first come first served. The next round
has other arrivals, and the runs in another order, so drift of the machine's speed affects all runs. "alone" is one of
the others at its share, without any other tenant. Every tenant has an adapter of its own.

Tests: tests/perf/bench/test_tenants.py
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...report.command import say
from ...report.table import Goal, Table, rows_table
from ..context import Context
from ..subject import Subject

RANK, LOAD, FLOOD = 16, 0.7, 10.0

MOST_SLOWER = 1.5
"""Goal: others' p99 of TTFT with a flood, relative to that when all send their share."""

LEAST_THROUGHPUT = 0.95
"""Goal: tokens per second with turns, relative to first come first served."""

ORDERS: dict[str, dict[str, Any]] = {"turns": {}, "resident first": {}, "first come": {"max_overtake_seconds": 0.0}}
"""Engine options of each order; in all but the first, all requests have the same tenant's name."""


class Arrival(NamedTuple):
    """A request: seconds after the start, and the tenant's number."""

    time: float
    tenant: int


class Served(NamedTuple):
    """Results of a run: times to first token by tenant, tokens while all tenants sent, and seconds."""

    ttft: dict[int, list[float]]
    tokens: int
    seconds: float


Round = dict[str, Served]
"""Runs of one machine, one after another, by name."""


def p99(rounds: Sequence[Round], name: str) -> float:
    """99th percentile of the times to first token of all tenants but the first, in all runs of a name."""
    others = [times for each in rounds for tenant, times in each[name].ttft.items() if tenant]
    return float(np.percentile(list(itertools.chain.from_iterable(others)), 99))


def rate(rounds: Sequence[Round], name: str) -> float:
    """Tokens per second of all runs of a name."""
    return sum(each[name].tokens for each in rounds) / sum(each[name].seconds for each in rounds)


def slower(rounds: Sequence[Round]) -> float:
    """Return the others' p99 with a flood, under turns, as a multiple of that when all send their share."""
    return p99(rounds, "turns") / p99(rounds, "calm")


def throughput(rounds: Sequence[Round]) -> float:
    """Return the tokens per second of turns over the tokens per second of first come, first served."""
    return rate(rounds, "turns") / rate(rounds, "first come")


def spread(rounds: Sequence[Round], value: Callable[[Sequence[Round]], float]) -> tuple[float, float]:
    """Return the range of `value` in nine of ten resamples, with replacement, of as many rounds."""
    draw = random.Random(0)
    drawn = [value(draw.choices(rounds, k=len(rounds))) for _ in range(500)]
    low, high = np.percentile(drawn, [5, 95])
    return float(low), float(high)


def arrivals(rates: list[float], seconds: float, seed: int) -> list[Arrival]:
    """Poisson arrivals of each tenant at its rate; a tenant's arrivals do not depend on the others."""
    coming = []
    for tenant, rate in enumerate(rates):
        draw, now = random.Random(f"{seed} {tenant}"), 0.0
        while (now := now + draw.expovariate(rate)) < seconds:
            coming.append(Arrival(now, tenant))
    return sorted(coming)


class Bench:
    """The load's size, and an engine for each run."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tenants, self._lora_indices, self.seconds = context.pick((3, 4, 1.0), (8, 16, 8.0), (8, 16, 25.0))
        self._prompt, self._output = context.pick((8, 8), (64, 32), (64, 32))
        self._adapters = context.adapters(RANK, self._tenants)

    def capacity(self) -> float:
        """Requests per second with every slot taken and more waiting, after a warm-up; waits for at least one."""
        with self._engine({}) as subject:
            ended, began, spent = 0, 0.0, 0.0
            for index in itertools.count():
                while subject.engine.stats().num_waiting < 4:
                    self._add(subject, index % self._tenants, "")
                ended += sum(output.finish_reason is not None for output in subject.step())
                if not began and ended >= self._lora_indices:
                    ended, began = 0, time.perf_counter()
                if began and ended and (spent := time.perf_counter() - began) > self.seconds / 3:
                    break
        return ended / spent

    def serve(self, coming: list[Arrival], order: str) -> Served:
        """Serve arrivals as they come; requests that still wait when the last one has come are dropped."""
        ttft: dict[int, list[float]] = {tenant: [] for tenant in range(self._tenants)}
        waiting: dict[str, Arrival] = {}
        with self._engine(ORDERS[order]) as subject:
            tokens, queue, start = 0, iter([*coming, Arrival(float("inf"), 0)]), time.perf_counter()
            following = next(queue)
            while (now := time.perf_counter() - start) < self.seconds:
                while following.time <= now:
                    name = str(following.tenant) if order == "turns" else ""
                    waiting[self._add(subject, following.tenant, name)] = following
                    following = next(queue)
                if not subject.engine.has_work():
                    time.sleep(max(0.0, min(following.time, self.seconds) - now))
                    continue
                outputs = subject.step()
                now = time.perf_counter() - start
                for output in outputs:
                    tokens += len(output.token_ids)
                    if arrival := waiting.pop(output.request_id, None):
                        ttft[arrival.tenant].append(now - arrival.time)
        for arrival in waiting.values():  # it has waited at least that long
            ttft[arrival.tenant].append(self.seconds - arrival.time)
        return Served(ttft, tokens, self.seconds)

    def round(self, number: int) -> tuple[float, Round]:
        """Return the engine's capacity in requests per second, and the runs of a round."""
        capacity, count, seed = self.capacity(), self._tenants, self._context.seed + number
        share = LOAD * capacity / count
        calm = arrivals([share] * count, self.seconds, seed)
        flood = arrivals([share * FLOOD, *[share] * (count - 1)], self.seconds, seed)
        alone = [arrival for arrival in calm if arrival.tenant == 1]
        runs = [("alone", alone, "turns"), ("calm", calm, "turns"), *((order, flood, order) for order in ORDERS)]
        first = number % len(runs)
        return capacity, {name: self.serve(coming, order) for name, coming, order in runs[first:] + runs[:first]}

    def _engine(self, more: dict[str, Any]) -> Subject:
        return Subject(
            self._context,
            self._adapters,
            max_seqs=self._lora_indices,
            max_batched=2048,
            max_len=self._prompt + self._output + 16,
            fair_by="tenant",
            max_waiting=None,
            **more,
        )

    def _add(self, subject: Subject, tenant: int, name: str) -> str:
        """Queue a request with the tenant's adapter. name: the tenant's name for the engine. Return its id."""
        request = subject.request(self._prompt, self._output, list(self._adapters)[tenant])
        request.tenant = name
        subject.engine.add_request(request)
        return request.id


def run(context: Context) -> dict[str, Any]:
    """Ratios over all rounds; the ranges hold nine in ten of the values of resampled rounds."""
    bench = Bench(context)
    found: dict[str, Any] = {"load": LOAD, "flood": FLOOD, "seconds": bench.seconds, "capacity": [], "rows": []}
    rounds: list[Round] = []
    for number in range(context.pick(2, 3, 6)):
        with context.row(found, f"tenants, round {number + 1}"):
            capacity, made = bench.round(number)
            rounds.append(made)
            found["capacity"].append(capacity)
            found |= _findings(rounds)
            say(f"p99 of TTFT {slower([made]):.2f} of calm's, tokens {throughput([made]):.3f} of first come's")
    return found


def _findings(rounds: list[Round]) -> dict[str, Any]:
    return {
        "rows": [
            {"run": name, "ttft_p99_ms": p99(rounds, name) * 1e3, "tokens_per_s": rate(rounds, name)}
            for name in ("alone", "calm", *ORDERS)
        ],
        "slower": slower(rounds),
        "slower_range": spread(rounds, slower),
        "slower_by_round": [slower([each]) for each in rounds],
        "throughput": throughput(rounds),
        "throughput_range": spread(rounds, throughput),
    }


def goals(values: dict[str, Any]) -> list[Goal]:
    return [
        Goal("others' p99 of TTFT, flood over calm", values.get("slower"), MOST_SLOWER, at_most=True),
        Goal("tokens/s, turns over first come", values.get("throughput"), LEAST_THROUGHPUT),
    ]


def tables(values: dict[str, Any]) -> list[Table]:
    columns = ": run | p99 of TTFT, ms: ttft_p99_ms | tokens/s: tokens_per_s"
    return [rows_table("(n) tenants at their share beside one that floods", columns, values["rows"])]
