"""CPU needs of client, API server and replica, by the kernel's count for a real cluster with one replica.

So nothing depends on which processes ran at the same time. Three kinds of loads are fitted: requests that meet no
other, with prompts of several lengths, and with more and less rest between them; concurrent streams; and skewed
requests that arrive at random.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean

from ....core.costs.fit import Fit, fit
from ...workload.request import TraceRequest
from ..machine import LONGEST_REST, HostWork, Works
from .fleet import Fleet, cluster, counted, skewed

_LONE, _LONE_TOKENS = 24, 4  # requests that meet no other, tokens of each completion
_PROMPTS = (1, 0.05), (32, 0.05), (128, 0.05), (32, 0.02), (32, 0.2)  # tokens of theirs, seconds between them
_STREAMS, _STREAMS_APART, _STREAM_PROMPT, _STREAM_TOKENS = (1, 2, 4, 8, 16), 0.01, 32, 192
_RATES, _SECONDS = (5.0, 10.0, 20.0), 4.0  # of requests that arrive at random
_SEED = 1_000_000  # of the first such load; predicted loads use seeds below it
_IDLE_SECONDS = 2.0
_REPORTED = 0.5  # seconds after which a replica's counts have reached the API server

TERMS = tuple(field.name for field in fields(HostWork))


@dataclass(frozen=True, slots=True)
class Sample:
    """A load that was served."""

    trace: Sequence[TraceRequest]
    rest: float
    """Seconds of it, see `rest_of`."""
    steps: float
    spent: dict[str, float]
    """CPU seconds by process, above the idle consumption."""
    ttft: float
    """Mean."""

    def terms(self) -> tuple[float, ...]:
        """The factors of `TERMS`."""
        prompts = sum(each.prompt_tokens for each in self.trace)
        tokens = sum(each.output_tokens for each in self.trace)
        return len(self.trace), prompts, self.steps, tokens, self.rest


@dataclass(frozen=True, slots=True)
class FittedWorks:
    """works: for a simulation. fits: by process."""

    works: Works
    fits: dict[str, Fit]


def measure(fleet: Fleet, repeat: int) -> list[Sample]:
    """Serve the loads on a cluster with one replica. Raises LoadError if it does not start."""
    found = []
    with cluster(fleet.config, 1, "first-fit") as (url, server):
        server.serve(loads(fleet, repeat)[0])
        idle = server.idle(_IDLE_SECONDS)
        for trace in loads(fleet, repeat):
            before = counted(url, "steps")
            records, trace = server.serve(trace)
            time.sleep(_REPORTED)
            steps = counted(url, "steps") - before - trace[0].output_tokens  # it opens a connection, alone
            arrivals, ttfts, latencies = (records.column(name) for name in ("arrival", "ttft", "e2e"))
            rest = rest_of(zip(arrivals, arrivals + latencies, strict=True))
            spent = {name: each - idle.get(name, 0.0) * server.seconds for name, each in server.spent.items()}
            found.append(Sample(trace, rest, steps, spent, float(ttfts.mean())))
    return found


def rest_of(requests: Iterable[tuple[float, float]]) -> float:
    """Sum of the times without a request, each up to `LONGEST_REST`. requests: begin and end of each, in order."""
    begins, ends = zip(*requests, strict=True)
    rests = zip(begins[1:], itertools.accumulate(ends, max), strict=False)
    return sum(min(max(0.0, begin - end), LONGEST_REST) for begin, end in rests)


def fit_works(fleet: Fleet, samples: Sequence[Sample]) -> FittedWorks:
    """Fit each process's work; a replica's is its CPU time in addition to its simulated steps. The latency is the
    remaining time that clients wait for requests that arrive at random.
    """
    fleet = replace(fleet, replicas=1)
    rows = [sample.terms() for sample in samples]
    fits = {name: fit(TERMS, rows, [each.spent[name] for each in samples]) for name in ("client", "front")}
    works = Works(_work(fits["client"]), _work(fits["front"]), processors=len(os.sched_getaffinity(0)))
    busy = [fleet.simulate(each.trace, "first-fit", works=works)[1] for each in samples]
    beside = [(count, 0, *others) for count, _, *others in rows]  # a prompt's tokens are in its step
    fits["replica"] = fit(TERMS, beside, [each.spent["replica"] for each in samples], busy)
    works = replace(works, replica=_work(fits["replica"]))
    at_random = [each for each in samples if len({request.output_tokens for request in each.trace}) > 1]
    waits = [
        each.ttft - float(fleet.simulate(each.trace, "first-fit", works=works)[0].column("ttft").mean())
        for each in at_random
    ]
    latency = fmean(waits, weights=[len(each.trace) for each in at_random])
    return FittedWorks(replace(works, latency=max(0.0, latency)), fits)


def loads(fleet: Fleet, repeat: int) -> list[list[TraceRequest]]:
    """Traces of all kinds; each repeat has other skewed requests. Adapters are used in rotation."""
    names = itertools.cycle(fleet.ranks)

    def alike(count: int, apart: float, prompt: int, output: int) -> list[TraceRequest]:
        adapters = itertools.islice(names, count)
        return [
            TraceRequest(
                index,
                apart * index,
                adapter=adapter,
                prompt_tokens=prompt,
                output_tokens=output,
                rank=fleet.ranks[adapter],
            )
            for index, adapter in enumerate(adapters)
        ]

    return [
        *(alike(_LONE, apart, prompt, _LONE_TOKENS) for prompt, apart in _PROMPTS),
        *(alike(count, _STREAMS_APART, _STREAM_PROMPT, _STREAM_TOKENS) for count in _STREAMS),
        *(skewed(rate, _SECONDS, _SEED + repeat, fleet.ranks) for rate in _RATES),
    ]


def _work(found: Fit) -> HostWork:
    return HostWork(**found.terms)
