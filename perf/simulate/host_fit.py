"""What client, front and replica need of a processor, by the kernel's count of a real cluster with one replica.

So nothing depends on which processes ran beside each other. Fitted are three kinds of loads: requests that meet no
other, with prompts of several lengths; streams beside each other; and skewed requests that come at random, as between
requests processors rest and caches cool down.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, fields, replace
from statistics import median

from ...core.costs.fit import Fit, fit
from ..workload.request import TraceRequest
from .fleet import Fleet, cluster, counted, skewed
from .host import HostWork, Works
from .records import Records

_LONE, _APART, _LONE_TOKENS = 24, 0.05, 4  # requests that meet no other, seconds between them, tokens of each answer
_PROMPTS = (1, 32, 128)  # tokens of theirs
_STREAMS, _STREAM_PROMPT, _STREAM_TOKENS = (1, 2, 4, 8, 16), 32, 128
_RATES, _SECONDS = (5.0, 10.0, 20.0), 5.0  # of requests that come at random
_SEED = 1_000_000  # of the first such load; seeds of what is predicted are below it
_REPEATS = 3
_REPORTED = 0.5  # seconds after which a replica's counts have come to the front

TERMS = "idle", *(field.name for field in fields(HostWork))


@dataclass(frozen=True, slots=True)
class FittedWorks:
    """works: for a simulation. fits: by process, with `idle`, the share of a processor that it needs beside that, which
    nothing simulates.
    """

    works: Works
    fits: dict[str, Fit]


def measure_works(fleet: Fleet, adapter: str) -> FittedWorks:
    """Serve the loads on a cluster with one replica and fit each process's work; a replica's is what it needed beside
    its simulated steps. Raises LoadError if it does not start.

    The latency is what clients wait for beside that, of requests that meet no other.
    """
    fleet = replace(fleet, replicas=1)
    rows, spent = [], dict[str, list[float]](client=[], front=[], replica=[])
    served = list[tuple[Records, list[TraceRequest]]]()
    with cluster(fleet.config, 1, "first-fit") as (url, server):
        server.serve(loads(fleet, adapter, 0)[0])
        for trace in (each for repeat in range(_REPEATS) for each in loads(fleet, adapter, repeat)):
            before = counted(url, "steps")
            found, trace = server.serve(trace)
            served.append((found, trace))
            time.sleep(_REPORTED)
            steps = counted(url, "steps") - before - trace[0].output_tokens  # which opens a connection, alone
            prompts, tokens = sum(each.prompt_tokens for each in trace), sum(each.output_tokens for each in trace)
            rows.append((server.seconds, len(trace), prompts, steps, tokens))
            for name, seconds in server.spent.items():
                spent[name].append(seconds)
    fits = {name: fit(TERMS, rows, spent[name]) for name in ("client", "front")}
    works = Works(*map(_work, fits.values()), processors=len(os.sched_getaffinity(0)))
    busy = [fleet.simulate(trace, "first-fit", works=works)[1] for _, trace in served]
    beside = [(seconds, count, 0, *rest) for seconds, count, _, *rest in rows]  # a prompt's tokens are in its step
    fits["replica"] = fit(TERMS, beside, spent["replica"], busy)
    works = replace(works, replica=_work(fits["replica"]))
    waits = [
        float(median(real.column("ttft")) - median(fleet.simulate(trace, "first-fit", works=works)[0].column("ttft")))
        for real, trace in served
        if trace[0].output_tokens == _LONE_TOKENS
    ]
    return FittedWorks(replace(works, latency=max(0.0, median(waits))), fits)


def loads(fleet: Fleet, adapter: str, repeat: int) -> list[list[TraceRequest]]:
    """Traces of all kinds; of skewed requests others in each repeat."""
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
