"""The real engine in virtual time: a cost model's steps beside its own policies, pages, adapters and prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...core.config import EngineConfig
from ...core.costs.profile import Profile
from ...core.engine import Engine
from ...core.policies import Policies
from .adapters import SimAdapters, VirtualClock
from .executor import SimExecutor
from .scheduler import SimScheduler

MODEL = Path("simulated")
"""`EngineConfig.model` where no checkpoint is read."""


class SimEngine(Engine):
    """Takes `SimRequest`s only; one step of it may be many that are alike."""

    scheduler_type = SimScheduler
    scheduler: SimScheduler

    @property
    def num_cold_starts(self) -> int:
        """Requests so far with an adapter that was not all there when they could begin."""
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
    engine_type: type[Engine] = SimEngine,
    policies: Policies | None = None,
    **options: Any,
) -> tuple[Engine, SimExecutor]:
    """An engine in virtual time, with its executor. options: `SimExecutor`'s.

    mix: prompts and decoding requests share steps; otherwise a prompt interrupts decoding (`SimScheduler.mix`).
    most_prompts, most_rows: in a step (`SimScheduler.limit_prompts`, `limit_rows`); None for no limit. engine_type:
    `Engine` takes any request and one step at a time. policies: `Engine`'s. The prefix cache works on the tokens of
    prompts: leave it off where these are made up.
    """
    clock = VirtualClock() if clock is None else clock
    config = EngineConfig(model=MODEL, prefix_cache=False) if config is None else config
    executor = SimExecutor(profile, adapters, config, clock, **options)
    engine = engine_type(config, executor, clock, executor.adapters.reads, policies)
    if isinstance(engine, SimEngine):
        engine.scheduler.mix = mix
        engine.scheduler.may_repeat = engine.modes is None
        engine.scheduler.limit_prompts(most_prompts)
        engine.scheduler.limit_rows(most_rows)
        if engine.modes is not None and most_rows is not None:
            engine.modes.max_batch = most_rows
    elif not mix or most_prompts is not None or most_rows is not None:
        limits = f"mix is {mix}, most_prompts {most_prompts} and most_rows {most_rows}"
        raise ValueError(f"{limits}: only SimEngine's scheduler keeps them")
    return engine, executor
