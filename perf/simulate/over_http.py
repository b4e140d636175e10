"""A server, or a cluster, that traces are sent to over HTTP in real time."""

from __future__ import annotations

import asyncio
import random
import string
import time
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from ...core.config import EngineConfig
from ..cpu.rounds import CpuSample
from ..serving.client import Client
from ..serving.load import run_load, warm_up
from ..serving.plan import PlannedRequest
from ..serving.record import LoadError, Record
from ..workload.request import TraceRequest
from .records import Records, Served

_TIMEOUT = 300.0


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
            before, sample = self._seconds_by_name(), CpuSample.take(())
            outcome = await run_load(client, plan)
            self.speed = CpuSample.take(()).speed(sample)
            self.spent = {name: seconds - before[name] for name, seconds in self._seconds_by_name().items()}
            self.seconds, self.spent["client"] = outcome.cost.wall, outcome.cost.cpu
            return outcome.records

    def _seconds_by_name(self) -> dict[str, float]:
        return {name: sum(map(processor_seconds, pids)) for name, pids in self._pids.items()}

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
