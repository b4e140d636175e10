"""Time of `schedule()` under load, with a fake executor instead of tensors.

Many running and waiting requests over many registered adapters: with every slot taken, and in three states with free
slots but nothing that may be admitted. Prints the median in milliseconds: `python -m chorus.perf.bench.schedule_time
--waiting 10000 --tenants 1000`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.executors.base import ExecutorBase, ModelInfo
from ...core.requests.request import Request
from ...core.requests.request_params import RequestParams
from ...core.requests.types import StepPlan, StepResult
from ...memory.host.images import Reads
from ...memory.pages.layer_projections import dense_projections
from ...memory.pages.layout import PageLayout
from ..report.command import conclude, parser
from .models.weightless import WeightlessAdapters

_LAYERS = 4
_PROJECTIONS = dense_projections(_LAYERS, hidden=64, ffn=64, heads=1, kv_heads=1, head_dim=64)
_RANK = 16
_PROMPT = 128

#: full: every slot is taken. pages: no waiting request fits into the pages that the running ones leave. limit: the
#: number of adapters per step is used up. reads: every waiting adapter is still to be read, and no read ends.
STATES = ("full", "pages", "limit", "reads")


@dataclass(frozen=True)
class Load:
    """Numbers of each."""

    running: int = 256
    waiting: int = 1000
    adapters: int = 1000
    tenants: int = 1


def schedule_times(
    load: Load,
    samples: int,
    clock: Callable[[], float] = time.perf_counter,
    pick: Callable[[Sequence[float]], float] = median,
) -> dict[str, float]:
    """Seconds of one `schedule()` call per state, and of the slowest call.

    pick: chooses the reported sample.
    """
    found = {state: pick(_measure(state, load, samples, clock)) for state in STATES}
    return {**found, "slowest": max(found.values())}


def _measure(state: str, load: Load, samples: int, clock: Callable[[], float]) -> list[float]:
    engine, executor = _busy_engine(state, load, samples)
    scheduler = engine.scheduler
    waiting = 0
    while waiting != len(scheduler.waiting):  # tenants with fewer slots than others begin more
        waiting = len(scheduler.waiting)
        engine.step()
    took = []
    for _ in range(samples):
        began = clock()
        plan = scheduler.schedule()
        took.append(clock() - began)
        if plan is None or len(plan.sequences) < load.running or len(scheduler.waiting) != waiting:
            rows = 0 if plan is None else len(plan.sequences)
            raise RuntimeError(f"{state}: {rows} rows ran and {len(scheduler.waiting)} of {load.waiting} requests wait")
        scheduler.update(plan, executor.execute(plan))
    engine.close()
    return took


def _busy_engine(state: str, load: Load, samples: int) -> tuple[Engine, FakeExecutor]:
    """An engine with `load.running` decoding requests, each on its own adapter, and the waiting ones."""
    growth = load.running * (_max_tokens(samples) // 16 + 1)
    resident = min(load.running, load.adapters) if state == "pages" else load.adapters
    executor = FakeExecutor(2 + load.running * (_PROMPT // 16 + 1) + growth + resident * 8)
    reads = StoppedReads()
    num_bytes = executor.layout.page_bytes * executor.adapters.layout(executor.adapters.inspect(_path(0))).num_pages
    config = EngineConfig(
        model=Path("none"),
        max_num_seqs=load.running if state == "full" else load.running + 64,
        max_num_batched_tokens=load.running * _PROMPT,
        max_adapters_per_step=load.running if state == "limit" else None,
        host_cache_bytes=128 * num_bytes,
        num_pages=executor.num_pages,
        max_waiting=None,
    )
    engine = Engine(config, executor, clock=lambda: 1.0, reads=reads)
    for index in range(load.adapters):
        engine.store.register(f"a{index}", _path(index))
    for index in range(load.running):
        engine.add_request(_request(index, index % load.adapters, _PROMPT, samples, index % load.tenants))
    engine.step()
    while len(engine.scheduler.running) < load.running:
        engine.step()
    reads.stopped = state == "reads"
    if reads.stopped:
        engine.costs.disk_adapter_page = 1.0  # too long for a prefill to cover
    _add_waiting(engine, state, load, samples, load.running)
    return engine, executor


def _add_waiting(engine: Engine, state: str, load: Load, samples: int, first: int) -> None:
    """Add requests, numbered from `first` on, until `load.waiting` wait, for adapters that none of the first uses."""
    used = min(load.running, load.adapters)
    fresh = load.adapters - used if state != "pages" else 0
    available = engine.reclaimer.available
    for index in range(load.waiting - len(engine.scheduler.waiting)):
        adapter = used + index % fresh if fresh else index % used
        prompt = 16 * available + 1 if state == "pages" and index == 0 else _PROMPT
        engine.add_request(_request(first + index, adapter, prompt, samples, index % load.tenants))


def _path(index: int) -> Path:
    return Path(f"a{index}-{_RANK}")


def _request(index: int, adapter: int, prompt_tokens: int, steps: int, tenant: int) -> Request:
    """steps: number of steps during which no request ends."""
    params = RequestParams(max_tokens=_max_tokens(steps), temperature=0.0, ignore_eos=True)
    return Request(f"r{index}", [1] * prompt_tokens, params, f"a{adapter}", tenant=f"t{tenant}")


def _max_tokens(steps: int) -> int:
    """More tokens than a request can generate while the others are admitted and `steps` are measured."""
    return steps + 256


class FakeExecutor(ExecutorBase):
    """Samples token 1 for every sequence that asks for one."""

    def __init__(self, num_pages: int) -> None:
        super().__init__()
        self.model = ModelInfo(vocab_size=256, max_model_len=1 << 24, eos_token_ids=())
        self.layout = PageLayout(_LAYERS, kv_heads=2, head_dim=64, block_tokens=16, itemsize=2)
        self.num_pages = num_pages
        self.adapters = WeightlessAdapters(_PROJECTIONS, self.layout)
        self.shadow = self.swaps = self.start = None

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(tokens={row.request_id: 1 for row in plan.sequences if row.samples})

    def close(self) -> None:
        pass


class StoppedReads(Reads):
    """Reads that end at once until `stopped` is set; from then on they never end."""

    def __init__(self) -> None:
        self.stopped = False

    def submit(self, read: Callable[[], Any], group: str = "") -> Future:
        future: Future = Future()
        if not self.stopped:
            future.set_result(read())
        return future

    def shutdown(self) -> None:
        pass


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--running", type=int, default=256)
    add("--waiting", type=int, default=1000)
    add("--adapters", type=int, default=1000)
    add("--tenants", type=int, default=1, help="that the requests are from")
    add("--steps", type=int, default=50, help="that are measured")
    args = command.parse_args(argv)
    load = Load(args.running, args.waiting, args.adapters, args.tenants)
    times = schedule_times(load, args.steps, time.thread_time)
    for state, seconds in times.items():
        print(f"{state:8} {1e3 * seconds:8.4f} ms")
    return conclude({**vars(args), "ms": {state: 1e3 * seconds for state, seconds in times.items()}}, ok=True)


if __name__ == "__main__":
    raise SystemExit(main())
