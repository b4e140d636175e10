"""A server, or a cluster, that traces are sent to over HTTP in real time."""

from __future__ import annotations

import asyncio
import random
import string
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from ....core.config import EngineConfig
from ...bench.machine import CpuSample
from ...serving.errors import LoadError
from ...serving.streams import Stream, send
from ...workload.request import TraceRequest
from ..records import Records, Served

_TIMEOUT = 300.0


class HttpServer:
    """A launched server for traces.

    pids: of its processes, by name. texts: completions of the last trace. seconds: its duration. spent: CPU seconds, by
    the processes of each name and by the client meanwhile. speed: the share of the busy processors' time that a
    hypervisor left.
    """

    def __init__(self, url: str, config: EngineConfig, pids: Mapping[str, Sequence[int]] | None = None) -> None:
        where = urlsplit(url)
        self._address = where.hostname or "", where.port or 80
        self._pids = pids or {}
        self.texts: list[str] = []
        self.seconds, self.spent, self.speed = 0.0, dict[str, float](), 1.0
        self._num_served = 0
        self._base = config.model.name
        self._tokenizer = Tokenizer.from_file(str(config.model / "tokenizer.json"))

    def serve(
        self, trace: Sequence[TraceRequest], *, one_by_one: bool = False, prompts: str | None = None
    ) -> tuple[Records, list[TraceRequest]]:
        """Serve a trace in real time: the client's records, and the trace with the prompts' lengths as counted by the
        server. one_by_one: send each request after the previous one has ended. prompts: the same name gives the same
        prompts again; without one they are new, because a simulation of this trace does not know prefixes cached for an
        earlier one. Raises LoadError for a request that failed.
        """
        self._num_served += 1
        drawn = f"trace {self._num_served}" if prompts is None else prompts
        plan = [(request.arrival, self._body(request, drawn)) for request in trace]
        try:
            found = asyncio.run(self._serve(plan, one_by_one))
        except (RuntimeError, OSError, TimeoutError) as error:
            raise LoadError(f"a request failed: {error or type(error).__name__}") from None
        self.texts, records, counted = [], Records(), []
        for request, (late, stream) in zip(trace, found, strict=True):
            events = stream.events()
            usage, times = events[-1]["usage"], (late + stream.times[0], late + stream.times[-1])
            self.texts.append("".join(choice["text"] for event in events for choice in event["choices"]))
            records.add(Served(request.arrival, *times, 0.0, 0.0, usage["completion_tokens"]))
            counted.append(request._replace(prompt_tokens=usage["prompt_tokens"]))
        return records, counted

    async def _serve(
        self, plan: Sequence[tuple[float, dict[str, Any]]], one_by_one: bool
    ) -> list[tuple[float, Stream]]:
        """Return the delay of each request in seconds, and its completion."""
        async with asyncio.timeout(_TIMEOUT):
            if one_by_one:
                return [(0.0, await send(self._address, body)) for _, body in plan]
            await send(self._address, plan[0][1])
            before, sample = self._seconds_by_name(), CpuSample.take(())
            began, cpu = time.perf_counter(), time.process_time()

            async def at(arrival: float, body: dict[str, Any]) -> tuple[float, Stream]:
                await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
                stream = await send(self._address, body)
                return stream.began - began - arrival, stream

            found = await asyncio.gather(*(at(*each) for each in plan))
            self.seconds, own = time.perf_counter() - began, time.process_time() - cpu
            self.speed = CpuSample.take(()).speed(sample)
            self.spent = {name: seconds - before[name] for name, seconds in self._seconds_by_name().items()}
            self.spent["client"] = own
            return found

    def idle(self, seconds: float) -> dict[str, float]:
        """CPU seconds per second of the processes of each name while the cluster is idle for so long."""
        before = self._seconds_by_name()
        time.sleep(seconds)
        return {name: (spent - before[name]) / seconds for name, spent in self._seconds_by_name().items()}

    def _seconds_by_name(self) -> dict[str, float]:
        return {name: sum(map(processor_seconds, pids)) for name, pids in self._pids.items()}

    def _body(self, request: TraceRequest, drawn: str) -> dict[str, Any]:
        """Random letters, so that no two prompts share a beginning worth caching."""
        source = random.Random(f"{drawn}, request {request.id}")
        letters = "".join(source.choices(string.ascii_lowercase + " ", k=8 * request.prompt_tokens))
        count = max(1, request.prompt_tokens - self._tokenizer.num_special_tokens_to_add(is_pair=False))
        ids = self._tokenizer.encode(letters, add_special_tokens=False).ids[:count]
        text = self._tokenizer.decode(ids)
        return {
            "model": request.adapter or self._base,
            "prompt": text,
            "max_tokens": request.output_tokens,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0.0,
        }


def processor_seconds(pid: int) -> float:
    """CPU seconds of a process so far, all of its threads, to the nanosecond."""
    return time.clock_gettime(~pid << 3 | 2)  # Linux's clock of that process, as of clock_getcpuclockid
