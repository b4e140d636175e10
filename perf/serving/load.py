"""Open-loop load: every request is sent when its time has come, whatever has become of the others."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import track

from .client import Client
from .plan import PlannedRequest
from .record import Record

#: Seconds between the start and the first arrival, so that not even that one is late.
_LEAD = 0.05
_BEAT = 0.02


@dataclass
class ClientCost:
    """Cost of the client itself: what it measures is too long by about its event loop's lag.

    lags: by how many seconds a timer of the event loop fired late, several times a second. cpu: processor seconds.
    """

    lags: list[float] = field(default_factory=list)
    cpu: float = 0.0
    wall: float = 0.0
    chunks: int = 0


@dataclass
class Outcome:
    """All records in the order of the plan, and the client's own part in them."""

    records: list[Record]
    cost: ClientCost


async def warm_up(client: Client, requests: Sequence[PlannedRequest]) -> list[Record]:
    """Requests one after another that are not measured."""
    records = []
    start = time.perf_counter()
    for request in requests:
        record = Record(request.model, 0.0)
        await client.ask(client.body(request), record, lambda: time.perf_counter() - start)
        records.append(record)
    return records


async def run_load(client: Client, plan: Sequence[PlannedRequest], max_concurrency: int | None = None) -> Outcome:
    """Send the plan. max_concurrency: requests at a time; the others wait in the client, and that counts."""
    records = [Record(request.model, request.at) for request in plan]
    bodies = [client.body(request) for request in plan]  # writing a long prompt takes time that is not there later
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    gc.collect()
    gc.freeze()  # nothing that was there before is looked at again while times are taken
    cost, chunks = ClientCost(), client.chunks
    start = time.perf_counter() + _LEAD
    cpu = time.process_time()

    def clock() -> float:
        return time.perf_counter() - start

    async def one(body: bytes, record: Record) -> None:
        async with gate:
            await client.ask(body, record, clock)

    beat = asyncio.create_task(_heartbeat(cost.lags))
    tasks, console = [], Console(stderr=True)
    sending = track(
        list(zip(bodies, records, strict=True)), "sent", console=console, refresh_per_second=2,
        disable=not console.is_terminal,
    )  # fmt: skip
    try:
        for body, record in sending:
            await asyncio.sleep(max(0.0, record.scheduled - clock()))
            tasks.append(asyncio.create_task(one(body, record)))
        await asyncio.gather(*tasks)
    finally:
        for task in (beat, *tasks):
            task.cancel()
        await asyncio.gather(beat, *tasks, return_exceptions=True)
        gc.unfreeze()
    cost.cpu, cost.wall = time.process_time() - cpu, clock() + _LEAD
    cost.chunks = client.chunks - chunks
    return Outcome(records, cost)


async def _heartbeat(lags: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_BEAT)
        lags.append(max(0.0, time.perf_counter() - before - _BEAT))
