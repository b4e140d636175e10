"""Requests served by `chorus serve` over HTTP, and what host and wire add to the engine's time.

The engine's profile knows steps and what the engine does between them. A server adds to that: its event loop, which
reads, tokenizes, formats and sends beside the engine's thread and shares the interpreter with it, timers, sockets, and
the client itself. `HostTimes` are fitted to loads of their own, then added to a simulation of others.
"""

from __future__ import annotations

import asyncio
import math
import random
import string
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from tokenizers import Tokenizer

from ...core.config import EngineConfig
from ...core.costs.fit import fit
from ...core.costs.profile import Number, Profile, Terms
from ..serving.client import Client
from ..serving.load import run_load, warm_up
from ..serving.plan import PlannedRequest
from ..serving.record import LoadError, Record
from ..serving.server_process import launched
from ..workload.request import TraceRequest
from .records import Records, Served

_TIMEOUT = 300.0
_STREAMS = (1, 2, 4, 8, 16)
_STREAM_TOKENS = (32, 128)
_PROMPTS = (1, 32, 128)
_LONE, _LONE_TOKENS = 8, 4  # requests, one after another; the stream of a request may hold up its own first token
_CROWDS = (16, 64)  # requests of one token that come at once
_APART = 0.2  # seconds between requests that meet no other
_BESIDE, _COMING = 4, 32  # streams, and requests that come while they run
_REPEATS = 3
_LEAST = 1e-7  # seconds: a fit's samples are above 0

#: Serves a trace in virtual time, with a profile.
Simulate = Callable[[Profile, Sequence[TraceRequest]], Records]
Traced = list[TraceRequest]


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Seconds that serving over HTTP adds.

    per_step, per_row, per_prompt: to a step, as `OverheadCost` has them. Event loop and engine share the interpreter,
    so steps beside a request's intake take longer; that is charged to the step which takes the request.
    intake, intake_per_token: of the event loop and the client for each prompt, one after another. latency: whatever
    else a request waits for beside its steps, before its first token.
    """

    per_step: float
    per_row: float
    per_prompt: float
    latency: float
    intake: float
    intake_per_token: float

    def intake_seconds(self, prompt: int) -> float:
        """Seconds of event loop and client for a prompt of so many tokens."""
        return self.intake + self.intake_per_token * prompt

    def simulate(self, simulate: Simulate, profile: Profile, trace: Sequence[TraceRequest]) -> Records:
        """Serve a trace in virtual time, with a profile of the engine without a server."""
        came, free = [], -math.inf
        for request in trace:
            free = max(free, request.arrival) + self.intake_seconds(request.prompt_tokens)
            came.append(request._replace(arrival=free))
        asked = {request.arrival: each.arrival for request, each in zip(came, trace, strict=True)}
        found, records = Records(), simulate(self.slower(profile), came)
        found.failures = records.failures
        names = ("arrival", "ttft", "e2e", "queue", "cold", "tokens")
        for arrival, ttft, e2e, queue, cold, tokens in zip(*map(records.column, names), strict=True):
            began = asked[float(arrival)]
            more = arrival - began + self.latency
            found.add(Served(began, ttft + more, e2e + more, queue, cold, tokens))
        return found

    def slower(self, profile: Profile) -> Profile:
        """Return the profile of an engine with steps that take as long as beside the server."""
        own = {} if profile.overhead is None else profile.overhead.terms
        added = {"base": self.per_step, "per_row": self.per_row, "per_prompt": self.per_prompt}
        terms = {
            name: Number(value=seconds + (own[name].value if name in own else 0.0), source="engine and server")
            for name, seconds in added.items()
        }
        return profile.model_copy(update={"overhead": Terms(terms={**own, **terms})})


class HttpServer:
    """A launched server that traces can be sent to.

    texts: answers to the last trace. seconds: that it took. spent: of processors, by each process of `pids` and by the
    client meanwhile.
    """

    def __init__(self, url: str, config: EngineConfig, pids: Mapping[str, int] | None = None) -> None:
        self._url = url
        self._pids = pids or {}
        self.texts: list[str] = []
        self.seconds, self.spent = 0.0, dict[str, float]()
        self._num_served = 0
        self._base = config.model.name
        self._tokenizer = Tokenizer.from_file(str(config.model / "tokenizer.json"))

    def serve(
        self, trace: Sequence[TraceRequest], *, one_by_one: bool = False, prompts: str | None = None
    ) -> tuple[Records, Traced]:
        """Serve a trace in real time: the client's records, and the trace with the prompts' lengths as the server
        counted them. one_by_one: each request when the one before it has ended. prompts:
        the same name gives the same prompts again; without one they are new, as a prefix that was cached for an earlier
        trace is none of this one's simulation. Raises LoadError for a request that failed.
        """
        self._num_served += 1
        drawn = f"trace {self._num_served}" if prompts is None else prompts
        plan = [self._planned(request, drawn) for request in trace]
        found = asyncio.run(self._serve(plan, one_by_one))
        self.texts = [record.text for record in found]
        records, counted = Records(), []
        for request, record in zip(trace, found, strict=True):
            if not record.ok:
                raise LoadError(f"request {request.id} failed: {record.error}: {record.detail}")
            records.add(Served(request.arrival, record.ttft, record.e2e, 0.0, 0.0, record.output_tokens))
            counted.append(request._replace(prompt_tokens=record.prompt_tokens))
        return records, counted

    async def _serve(self, plan: Sequence[PlannedRequest], one_by_one: bool) -> list[Record]:
        counts = {"stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0}
        async with Client(self._url, "completions", timeout=_TIMEOUT, api_key=None, extra=counts) as client:
            if one_by_one:
                return await warm_up(client, plan)
            await warm_up(client, plan[:1])  # opens a connection
            before = {name: processor_seconds(pid) for name, pid in self._pids.items()}
            outcome = await run_load(client, plan)
            self.spent = {name: processor_seconds(pid) - before[name] for name, pid in self._pids.items()}
            self.seconds, self.spent["client"] = outcome.cost.wall, outcome.cost.cpu
            return outcome.records

    def _planned(self, request: TraceRequest, drawn: str) -> PlannedRequest:
        """Random letters, so that no two prompts share a beginning worth caching."""
        source = random.Random(f"{drawn}, request {request.id}")
        letters = "".join(source.choices(string.ascii_lowercase + " ", k=8 * request.prompt_tokens))
        count = max(1, request.prompt_tokens - self._tokenizer.num_special_tokens_to_add(is_pair=False))
        ids = self._tokenizer.encode(letters, add_special_tokens=False).ids[:count]
        text = self._tokenizer.decode(ids)
        return PlannedRequest(request.arrival, request.adapter or self._base, text, request.output_tokens)


def processor_seconds(pid: int) -> float:
    """Seconds of processors that a process had so far, all of its threads, to the nanosecond."""
    return time.clock_gettime(~pid << 3 | 2)  # Linux's clock of that process, as of clock_getcpuclockid


@contextmanager
def served(config: EngineConfig) -> Iterator[HttpServer]:
    """`chorus serve` with an engine's configuration. Raises LoadError if it does not start."""
    flags = ["--model", config.model, "--served-model-name", config.model.name, "--adapters", config.adapters]
    flags += ["--max-num-seqs", config.max_num_seqs, "--max-num-batched-tokens", config.max_num_batched_tokens]
    flags += ["--memory-bytes", config.memory_bytes, "--no-access-log"]
    if config.threads is not None:
        flags += ["--threads", config.threads]
    with launched([str(flag) for flag in flags]) as server:
        yield HttpServer(server.url, config)


def fit_host(server: HttpServer, profile: Profile, simulate: Simulate, rows: int) -> HostTimes:
    """Fit what a server adds to `profile`'s engine: by many requests that come at once, by requests that meet no other,
    of several lengths, and by streams beside each other.

    rows: most that run at a time. Each is what the client saw, less what is simulated without it.
    """

    def serve(prompt: int, output: int, count: int, apart: float = 0.0) -> list[tuple[Records, Traced]]:
        trace = [TraceRequest(index, apart * index, None, prompt, output) for index in range(count)]
        return [server.serve(trace) for _ in range(_REPEATS)]

    def more(known: HostTimes, name: str, served: Sequence[tuple[Records, Traced]]) -> float:
        return median(
            float(np.median(real.column(name)) - np.median(known.simulate(simulate, profile, trace).column(name)))
            for real, trace in served
        )

    known = HostTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    # the difference of two crowds, so that what is there once falls out
    few, many = (median(real.column("e2e").max() for real, _ in serve(_PROMPTS[0], 1, count)) for count in _CROWDS)
    known = replace(known, intake=max(0.0, float(many - few) / (_CROWDS[1] - _CROWDS[0])))
    lone = [serve(prompt, _LONE_TOKENS, _LONE, _APART) for prompt in _PROMPTS]
    later = [more(known, "ttft", served) for served in lone]
    slope = float(np.polynomial.Polynomial.fit(_PROMPTS, later, 1).convert().coef[1])
    known = replace(known, intake=max(0.0, known.intake - slope * _PROMPTS[0]), intake_per_token=max(0.0, slope))
    streams = sorted({min(count, rows) for count in _STREAMS})
    slower = [max(_LEAST, more(known, "tpot", serve(*_STREAM_TOKENS, count))) for count in streams]
    known = replace(known, **fit(("per_step", "per_row"), [(1.0, count) for count in streams], slower).terms)
    known = replace(known, per_prompt=max(0.0, _beside_streams(server, known, profile, simulate)))
    return replace(known, latency=max(0.0, more(known, "ttft", lone[0])))


def _beside_streams(server: HttpServer, known: HostTimes, profile: Profile, simulate: Simulate) -> float:
    """Seconds by which each request that comes holds up the streams that run."""
    prompt, output = _STREAM_TOKENS
    streams = [TraceRequest(index, 0.0, None, prompt, output) for index in range(_BESIDE)]
    found = []
    for _ in range(_REPEATS):
        apart = _length(server.serve(streams)[0], output) / _COMING
        others = [TraceRequest(_BESIDE + index, apart * (index + 1), None, prompt, 1) for index in range(_COMING)]
        real, trace = server.serve([*streams, *others])
        longer = _length(real, output) - _length(known.simulate(simulate, profile, trace), output)
        found.append(longer / _COMING)
    return median(found)


def _length(records: Records, tokens: int) -> float:
    """Median seconds from the first to the last of so many tokens."""
    lengths = records.column("e2e") - records.column("ttft")
    return float(np.median(lengths[records.column("tokens") == tokens]))
