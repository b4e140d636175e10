"""The real engine in virtual time: a cost model's steps, with its real policies, pages, adapters and prefix cache."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...core.cold_start import ColdStart, stalls
from ...core.config import EngineConfig
from ...core.costs.profile import Profile
from ...core.costs.work import step_work
from ...core.engine import Engine
from ...core.executors.base import ExecutorBase, ModelInfo
from ...core.policies import Policies
from ...core.requests.types import StepPlan, StepResult
from .adapters import SimAdapterBackend, SimAdapters
from .link import SimSwaps, SimTransfer, Urgency, VirtualClock
from .merging import SimShadow
from .scheduler import TOKEN, RepeatedPlan, RepeatedResult, SimScheduler


class _Tokens(dict[str, int]):
    """The token of any request, so no step has to list tokens."""

    def __missing__(self, request_id: str) -> int:
        return TOKEN


_TOKENS = _Tokens()
_PLAIN = StepResult(_TOKENS)
"""Result of nearly every step; callers do not modify it."""
_NONE: frozenset[int] = frozenset()


@dataclass(slots=True)
class StepPrice:
    """Seconds of a plan's first step, and the increase of each repeat over the step before it."""

    first: float
    growth: float = 0.0
    stall: float = 0.0
    """The part of `first` spent waiting for adapters."""
    late: frozenset[int] = _NONE
    """Slots of adapters that don't come in time."""
    single: bool = False
    """The plan must not be repeated at this price."""

    def total(self, count: int) -> float:
        """Seconds of `count` consecutive steps."""
        if count == 1:
            return self.first
        return count * self.first + self.growth * (count * (count - 1) / 2)

    def count_until(self, seconds: float, most: int) -> int:
        """The fewest steps, at least one and at most `most`, that take `seconds` or more."""
        return min(most, 1 + bisect_left(range(1, most + 1), seconds, key=self.total))


class SimExecutor(ExecutorBase):
    """Advances a virtual clock by the cost of each step.

    horizon: virtual time of the next event that the engine doesn't know of: no repeated step begins at or after it.
    held_until: no step ends before it, if its process shares processors.
    """

    def __init__(
        self,
        profile: Profile,
        adapters: SimAdapters,
        config: EngineConfig,
        clock: VirtualClock,
        *,
        stream: bool = True,
        read_threads: int = 2,
        assist: Literal["never", "always", "chosen"] = "chosen",
    ) -> None:
        """adapters: the catalogue, made for the page layout of `profile` and `config`. stream, read_threads:
        `SimAdapterBackend`'s. assist: when the CPU computes LoRA of incoming adapters, if the profile has its cost.

        The page pool has the profile's size unless the configuration sets `num_pages` or `memory_bytes`.
        """
        super().__init__()
        geometry = profile.geometry
        limit = min(config.max_model_len or geometry.max_model_len, geometry.max_model_len)
        self.costs = profile.costs()
        self.model = ModelInfo(geometry.vocab_size, limit, (), expert_share=self.costs.step.expert_share)
        self.layout = geometry.page_layout(config.block_tokens)
        given = "memory_bytes" in config.model_fields_set
        memory_bytes = (config.memory_bytes if given else None) or profile.memory_bytes.value
        self.num_pages = config.num_pages or max(2, memory_bytes // self.layout.page_bytes)
        self.adapters = SimAdapterBackend(adapters, self.costs, clock, stream=stream, read_threads=read_threads)
        self._assist = assist
        self._product_bytes = geometry.product_bytes(adapters.targets)  # cost of a token's x·A·B in all layers
        self.swaps = SimSwaps(self.costs, self.adapters.link, clock, self.layout.page_bytes)
        self.start = None
        self.shadow = None  # without a price of merging, nothing is merged
        if self.costs.merge is not None:
            self.shadow = SimShadow(self.costs.merge, self.layout, geometry.projections, self._spend)
        self.horizon = math.inf
        self.held_until = -math.inf
        self.busy_seconds = 0.0
        self.num_merged_steps = 0
        self._clock = clock
        self._max_stall = config.max_load_stall_seconds if stream else math.inf
        self._priced: tuple[StepPlan, StepPrice] | None = None
        self._timed: tuple[StepPlan, float, tuple[int, float]] | None = None  # with its horizon

    @property
    def stalled_seconds(self) -> float:
        """Virtual time so far in which steps waited for adapters."""
        return self.adapters.stalled_seconds

    def price(self, plan: StepPlan) -> StepPrice:
        """Return the price of executing a plan now."""
        if self._priced is not None and self._priced[0] is plan:
            return self._priced[1]
        costs, rows = self.costs, plan.sequences
        computing = costs.step.seconds(step_work(plan, costs.kernel))
        growth, prompts = 0.0, 0
        if plan.bucket is not None:
            growth = costs.step.growth(len(rows))
        elif costs.overhead.per_prompt:
            prompts = sum(len(row.tokens) > 1 for row in rows)
        first = computing + costs.overhead.seconds(len(rows), prompts)
        reading = self.adapters.is_reading
        if reading:
            first += self.adapters.delay(first)
        if self.adapters.is_loading and any(adapter.transfer for adapter in plan.adapters):
            price = self._stalled(first, computing, growth, plan)
        else:
            price = StepPrice(first, growth, 0.0, _NONE, reading)
        self._priced = plan, price
        return price

    def end(self, plan: StepPlan) -> float:
        """Return the time at which `execute` would end, given the current horizon."""
        return self._clock.now + self._length(plan, self.price(plan))[1]

    def execute(self, plan: StepPlan) -> StepResult:
        price = self.price(plan)
        count, seconds = self._length(plan, price)
        self._priced = None
        first_end = self._clock.now + price.first
        self._clock.now = max(self._clock.now + seconds, self.held_until)
        self.busy_seconds += seconds
        self.num_merged_steps += plan.merged is not None
        self.adapters.stalled_seconds += price.stall
        if price.late:
            return StepResult(
                _TOKENS, unready={row.request_id for row in plan.sequences if row.lora_index in price.late}
            )
        return _PLAIN if count == 1 else RepeatedResult(_TOKENS, count=count, first_end=first_end)

    def _spend(self, seconds: float) -> None:
        self._clock.now += seconds
        self.busy_seconds += seconds

    def close(self) -> None:
        """Nothing is held."""

    def _length(self, plan: StepPlan, price: StepPrice) -> tuple[int, float]:
        """Return the number of steps that run until the horizon, and their seconds."""
        if not isinstance(plan, RepeatedPlan) or price.single:
            return 1, price.first
        timed, horizon = self._timed, self.horizon
        if timed is not None and timed[0] is plan and timed[1] == horizon:
            return timed[2]
        count = price.count_until(min(horizon, plan.until) - self._clock.now, plan.repeat)
        length = count, price.total(count)
        self._timed = plan, horizon, length
        return length

    def _stalled(self, first: float, computing: float, growth: float, plan: StepPlan) -> StepPrice:
        """Every layer waits for its bytes, but no step waits longer than its limit: a later adapter is late.

        computing: the part of `first` that goes through the layers, during which bytes may arrive.
        """
        adapters = enumerate(plan.adapters)
        coming = [
            (lora_index, adapter.transfer)
            for lora_index, adapter in adapters
            if isinstance(adapter.transfer, SimTransfer)
        ]
        found = {lora_index: self._stall(plan, lora_index, transfer, computing) for lora_index, transfer in coming}
        late = frozenset(lora_index for lora_index, stall in found.items() if stall > self._max_stall)
        stall = min(self._max_stall, max(found.values()))
        return StepPrice(first + stall, growth, stall, late)

    def _stall(self, plan: StepPlan, lora_index: int, transfer: SimTransfer, computing: float) -> float:
        """Return the time that a step that begins now, and otherwise takes `computing` for its layers, waits for
        incoming adapters, or for the CPU, which computes x·A·B of missing layers (CaraServe §4).
        """
        cost, link, now = self.costs.cpu_lora, self.adapters.link, self._clock.now
        stall = transfer.stall(now, computing)
        if cost is None or stall <= 0:
            return stall
        tokens = sum(len(row.tokens) for row in plan.sequences if row.lora_index == lora_index)
        returned = tokens * self._product_bytes * self.costs.link.per_byte
        arrival = transfer.arrival(now)
        found = stalls(arrival, computing, cost.seconds(tokens, plan.adapters[lora_index].rank), returned)
        assists = self._assist == "always" or (self._assist == "chosen" and found.offload < stall)
        self.cold_starts.count(ColdStart.OFFLOAD if assists else ColdStart.STREAM)
        chosen = found.offload if assists else stall
        self.cold_starts.regret_seconds += chosen - min(stall, found.offload)
        if assists:
            link.send(returned * found.offloaded_layers / arrival.layers, Urgency.STEP)
        return chosen


MODEL = Path("simulated")
"""`EngineConfig.model` if no checkpoint is read."""


class SimEngine(Engine):
    """Takes `SimRequest`s only; one of its steps may stand for many equal ones."""

    scheduler_type = SimScheduler
    scheduler: SimScheduler

    @property
    def num_cold_starts(self) -> int:
        """Requests so far whose adapter was incomplete when they could begin."""
        return self.scheduler.num_cold_starts

    @property
    def num_available_pages(self) -> int:
        """Pages that are free, or not in use."""
        return self.reclaimer.available


def simulated_engine(
    profile: Profile,
    adapters: SimAdapters,
    config: EngineConfig | None = None,
    clock: VirtualClock | None = None,
    *,
    mix: bool = True,
    most_prompts: int | None = None,
    most_rows: int | None = None,
    policies: Policies | None = None,
    **options: Any,
) -> tuple[SimEngine, SimExecutor]:
    """An engine in virtual time, with its executor. options: `SimExecutor`'s.

    mix: prompts and decoding requests share steps; otherwise a prompt interrupts decoding (`SimScheduler.mix`).
    most_prompts, most_rows: in a step (`SimScheduler.limit_prompts`, `limit_rows`); None for no limit. policies:
    `Engine`'s. The prefix cache works on the tokens of prompts: leave it off where these are made up.
    """
    clock = VirtualClock() if clock is None else clock
    config = EngineConfig(model=MODEL, prefix_cache=False) if config is None else config
    executor = SimExecutor(profile, adapters, config, clock, **options)
    engine = SimEngine(config, executor, clock, executor.adapters.reads, policies)
    engine.scheduler.mix = mix
    engine.scheduler.may_repeat = engine.modes is None and not config.prefix_cache
    engine.scheduler.limit_prompts(most_prompts)
    engine.scheduler.limit_rows(most_rows)
    if engine.modes is not None and most_rows is not None:
        engine.modes.max_batch = most_rows
    return engine, executor
