"""What client, front and replica need of a processor, by the kernel's count of a real cluster with one replica.

So nothing depends on which processes ran beside each other. Fitted are three kinds of loads: requests that meet no
other, with prompts of several lengths; streams beside each other; and skewed requests that come at random, as between
requests processors rest and caches cool down.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import median

from ...core.costs.fit import Fit, fit
from ..workload.request import TraceRequest
from .fleet import Fleet, cluster, counted, skewed
from .host import HostWork, Works

_LONE, _APART, _LONE_TOKENS = 24, 0.05, 4  # requests that meet no other, seconds between them, tokens of each answer
_PROMPTS = (1, 32, 128)  # tokens of theirs
_STREAMS, _STREAM_PROMPT, _STREAM_TOKENS = (1, 2, 4, 8, 16), 32, 128
_RATES, _SECONDS = (5.0, 10.0, 20.0), 4.0  # of requests that come at random
_SEED = 1_000_000  # of the first such load; seeds of what is predicted are below it
_REPORTED = 0.5  # seconds after which a replica's counts have come to the front

TERMS = "idle", *(field.name for field in fields(HostWork))


@dataclass(frozen=True, slots=True)
class Sample:
    """A load that was served. seconds: that it took. spent: of processors, by process. ttft: median."""

    trace: Sequence[TraceRequest]
    seconds: float
    steps: float
    spent: dict[str, float]
    ttft: float

    def terms(self) -> tuple[float, ...]:
        """What each of `TERMS` is multiplied by."""
        prompts = sum(each.prompt_tokens for each in self.trace)
        return self.seconds, len(self.trace), prompts, self.steps, sum(each.output_tokens for each in self.trace)


@dataclass(frozen=True, slots=True)
class FittedWorks:
    """works: for a simulation. fits: by process, with `idle`, the share of a processor that it needs beside that, which
    nothing simulates.
    """

    works: Works
    fits: dict[str, Fit]


def measure(fleet: Fleet, repeat: int) -> list[Sample]:
    """Serve the loads on a cluster with one replica. Raises LoadError if it does not start."""
    found = []
    with cluster(fleet.config, 1, "first-fit") as (url, server):
        server.serve(loads(fleet, repeat)[0])
        for trace in loads(fleet, repeat):
            before = counted(url, "steps")
            records, trace = server.serve(trace)
            time.sleep(_REPORTED)
            steps = counted(url, "steps") - before - trace[0].output_tokens  # which opens a connection, alone
            found.append(Sample(trace, server.seconds, steps, server.spent, float(median(records.column("ttft")))))
    return found


def fit_works(fleet: Fleet, samples: Sequence[Sample]) -> FittedWorks:
    """Fit each process's work; a replica's is what it needed beside its simulated steps. The latency is what clients
    wait for beside that, of requests that meet no other.
    """
    fleet = replace(fleet, replicas=1)
    rows = [sample.terms() for sample in samples]
    fits = {name: fit(TERMS, rows, [each.spent[name] for each in samples]) for name in ("client", "front")}
    works = Works(_work(fits["client"]), _work(fits["front"]), processors=len(os.sched_getaffinity(0)))
    busy = [fleet.simulate(each.trace, "first-fit", works=works)[1] for each in samples]
    beside = [(seconds, count, 0, *rest) for seconds, count, _, *rest in rows]  # a prompt's tokens are in its step
    fits["replica"] = fit(TERMS, beside, [each.spent["replica"] for each in samples], busy)
    works = replace(works, replica=_work(fits["replica"]))
    waits = [
        each.ttft - float(median(fleet.simulate(each.trace, "first-fit", works=works)[0].column("ttft")))
        for each in samples
        if each.trace[0].output_tokens == _LONE_TOKENS
    ]
    return FittedWorks(replace(works, latency=max(0.0, median(waits))), fits)


def loads(fleet: Fleet, repeat: int) -> list[list[TraceRequest]]:
    """Traces of all kinds; of skewed requests others in each repeat."""
    adapter = max(fleet.ranks)
    rank = fleet.ranks[adapter]

    def alike(count: int, apart: float, prompt: int, output: int) -> list[TraceRequest]:
        return [TraceRequest(index, apart * index, adapter, prompt, output, rank) for index in range(count)]

    return [
        *(alike(_LONE, _APART, prompt, _LONE_TOKENS) for prompt in _PROMPTS),
        *(alike(count, 0.0, _STREAM_PROMPT, _STREAM_TOKENS) for count in _STREAMS),
        *(skewed(rate, _SECONDS, _SEED + repeat, fleet.ranks) for rate in _RATES),
    ]


def _work(found: Fit) -> HostWork:
    return HostWork(*(found.terms[name] for name in TERMS[1:]))
