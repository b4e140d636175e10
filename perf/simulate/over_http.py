"""A server, or a cluster, that traces are sent to over HTTP in real time."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx
from tokenizers import Tokenizer

from ...core.config import EngineConfig
from ..cpu.rounds import CpuSample
from ..serving.errors import LoadError
from ..serving.plan import PlannedRequest, body
from ..workload.request import TraceRequest
from .records import Records, Served

_TIMEOUT = 300.0
_LEAD = 0.05  # seconds between the start and the first arrival, so that not even that one is late
_DATA, _DONE = "data: ", "[DONE]"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client saw of a request. first, last: seconds since the load began."""

    first: float
    last: float
    text: str
    prompt_tokens: int
    output_tokens: int


class HttpServer:
    """A launched server that traces can be sent to.

    pids: of its processes, by name. texts: answers to the last trace. seconds: that it took. spent: of processors, by
    the processes of each name and by the client meanwhile. speed: the part of the time in which the processors had
    something to do that a hypervisor left them.
    """

    def __init__(self, url: str, config: EngineConfig, pids: Mapping[str, Sequence[int]] | None = None) -> None:
        self._url = url
        self._pids = pids or {}
        self.texts: list[str] = []
        self.seconds, self.spent, self.speed = 0.0, dict[str, float](), 1.0
        self._num_served = 0
        self._base = config.model.name
        self._tokenizer = Tokenizer.from_file(str(config.model / "tokenizer.json"))

    def serve(
        self, trace: Sequence[TraceRequest], *, one_by_one: bool = False, prompts: str | None = None
    ) -> tuple[Records, list[TraceRequest]]:
        """Serve a trace in real time: the client's records, and the trace with the prompts' lengths as the server
        counted them. one_by_one: each request when the one before it has ended. prompts:
        the same name gives the same prompts again; without one they are new, as a prefix that was cached for an earlier
        trace is none of this one's simulation. Raises LoadError for a request that failed.
        """
        self._num_served += 1
        drawn = f"trace {self._num_served}" if prompts is None else prompts
        plan = [self._planned(request, drawn) for request in trace]
        found = asyncio.run(self._serve(plan, one_by_one))
        self.texts = [answer.text for answer in found]
        records, counted = Records(), []
        for request, each in zip(trace, found, strict=True):
            came = request.arrival
            records.add(Served(came, each.first - came, each.last - came, 0.0, 0.0, each.output_tokens))
            counted.append(request._replace(prompt_tokens=each.prompt_tokens))
        return records, counted

    async def _serve(self, plan: Sequence[PlannedRequest], one_by_one: bool) -> list[Answer]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT, limits=limits, trust_env=False) as client:
            start = time.perf_counter()
            if one_by_one:
                return [await _ask(client, each, start) for each in plan]
            await _ask(client, plan[0], start)  # opens a connection
            gc.collect()
            gc.freeze()  # nothing that was there before is looked at again while times are taken
            before, sample = self._seconds_by_name(), CpuSample.take(())
            cpu, start = time.process_time(), time.perf_counter() + _LEAD
            try:
                found = await asyncio.gather(*(_ask_at(client, each, start) for each in plan))
            finally:
                gc.unfreeze()
            client_seconds, self.seconds = time.process_time() - cpu, time.perf_counter() - start + _LEAD
            self.speed = CpuSample.take(()).speed(sample)
            self.spent = {name: seconds - before[name] for name, seconds in self._seconds_by_name().items()}
            self.spent["client"] = client_seconds
            return found

    def _seconds_by_name(self) -> dict[str, float]:
        return {name: sum(map(processor_seconds, pids)) for name, pids in self._pids.items()}

    def _planned(self, request: TraceRequest, drawn: str) -> PlannedRequest:
        """Random letters, so that no two prompts share a beginning worth caching."""
        source = random.Random(f"{drawn}, request {request.id}")
        letters = "".join(source.choices(string.ascii_lowercase + " ", k=8 * request.prompt_tokens))
        count = max(1, request.prompt_tokens - self._tokenizer.num_special_tokens_to_add(is_pair=False))
        ids = self._tokenizer.encode(letters, add_special_tokens=False).ids[:count]
        text = self._tokenizer.decode(ids)
        sent = body(request.adapter or self._base, text, request.output_tokens)
        return PlannedRequest(request.arrival, {**sent, "ignore_eos": True})


async def _ask_at(client: httpx.AsyncClient, request: PlannedRequest, start: float) -> Answer:
    """Send a request when its time has come, whatever has become of the others."""
    await asyncio.sleep(max(0.0, start + request.at - time.perf_counter()))
    return await _ask(client, request, start)


async def _ask(client: httpx.AsyncClient, request: PlannedRequest, start: float) -> Answer:
    """Send a request and read its answer. LoadError if it fails."""
    first, texts, usage = None, [], None
    try:
        async with client.stream("POST", "/v1/completions", json=request.body) as response:
            if response.status_code != 200:
                raise LoadError(f"{request.model}: HTTP {response.status_code}: {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if not line.startswith(_DATA) or line.endswith(_DONE):
                    continue
                chunk = json.loads(line.removeprefix(_DATA))
                first = time.perf_counter() - start if first is None else first
                texts += [choice["text"] for choice in chunk.get("choices", ())]
                usage = chunk.get("usage") or usage
    except httpx.HTTPError as error:
        raise LoadError(f"{request.model}: {error or type(error).__name__}") from None
    if first is None or usage is None:
        raise LoadError(f"{request.model}: the stream ended before the answer did: {''.join(texts)[:300]!r}")
    last = time.perf_counter() - start
    return Answer(first, last, "".join(texts), usage["prompt_tokens"], usage["completion_tokens"])


def processor_seconds(pid: int) -> float:
    """Seconds of processors that a process had so far, all of its threads, to the nanosecond."""
    return time.clock_gettime(~pid << 3 | 2)  # Linux's clock of that process, as of clock_getcpuclockid
