"""A profile of this machine: the real executor measured and fitted (`chorus profile`).

Tests: tests/core/costs/test_measure.py.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import EngineConfig
from ..cpus import processor_name
from ..engine import Engine
from ..executors.base import Executor, ExecutorBase
from ..model.read_config import read_model_config
from ..model.specs.config import ModelConfig
from ..quarantine import adapter_directories
from ..requests.request import Request
from ..requests.request_params import RequestParams
from ..requests.types import StepPlan, StepResult
from .fit import Fit, fit
from .measure import Clock, MeasureError, Samples, StepProfiler, fit_steps, fit_transfer, r2_of, typical
from .models import Kernel, StepCost
from .profile import FitReport, Geometry, Number, Profile, Terms, Whole

_OVERHEAD_PROMPT = 24  # tokens: more than a block, so that it is one to cache
_OVERHEAD_STEPS = 40


@dataclass(frozen=True, slots=True)
class Measured:
    """A profile, and the steps that it was fitted to: with the same seed, the same steps.

    uncached: adapters were read from the disk itself.
    """

    profile: Profile
    decode: Samples
    prefill: Samples
    uncached: bool

    @property
    def noise(self) -> float:
        """Share by which a median round is above the best one."""
        return max(self.decode.noise, self.prefill.noise)


class TimedExecutor(ExecutorBase):
    """Another executor, with the seconds that its steps took."""

    def __init__(self, inner: Executor, clock: Clock = time.perf_counter) -> None:
        super().__init__()
        self._inner, self._clock = inner, clock
        self.model, self.layout, self.num_pages, self.adapters = (
            inner.model,
            inner.layout,
            inner.num_pages,
            inner.adapters,
        )
        self.shadow, self.swaps = inner.shadow, inner.swaps
        self.start = None  # each step's own time is wanted
        self.seconds = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        began = self._clock()
        try:
            return self._inner.execute(plan)
        finally:
            self.seconds += self._clock() - began

    def close(self) -> None:
        self._inner.close()


def measure_machine(
    config: EngineConfig,
    *,
    batches: int = 240,
    rounds: int = 5,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Clock = time.perf_counter,
) -> Measured:
    """Measure `config`'s model with `config`'s adapters where it runs. progress: (steps done, steps in all). clock: of
    steps; with `time.thread_time` a profile of one thread has the processor's seconds, whatever else ran.

    Raises MeasureError for unmeasurable input, UnsupportedModel and AdapterFormatError for files that can't be loaded.
    """
    if config.adapters is None:
        raise MeasureError("there are no adapters to measure with; name a directory of some, of several ranks")
    paths = adapter_directories(config.adapters)
    engine = Engine.from_config(config.model_copy(update={"speculation": "off"}))  # steps of known sizes
    try:
        return _measure(engine, paths, batches=batches, rounds=rounds, seed=seed, progress=progress, clock=clock)
    finally:
        engine.close()
        del engine
        gc.collect()  # its memory goes back now, not while something else is timed


def _measure(
    engine: Engine,
    paths: Sequence[Path],
    batches: int,
    rounds: int,
    seed: int,
    progress: Callable[[int, int], None],
    clock: Clock,
) -> Measured:
    config, executor = engine.config, engine.executor
    profiler = StepProfiler(
        executor,
        paths,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        seed=seed,
        clock=clock,
    )
    profiler.place_adapters()
    decodes, prefills = profiler.decode_plans(batches), profiler.prefill_plans(max(40, batches // 3))
    done, total = 0, rounds * (len(decodes) + len(prefills))

    def step_done() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    decode = profiler.measure(decodes, Kernel.SGMV, rounds, step_done)
    prefill = profiler.measure(prefills, Kernel.SGMV, rounds, step_done)
    transfers = profiler.measure_transfers(rounds, config.host_bytes)
    model = read_model_config(config.model)
    device = device_name(config.device)
    how = f"measured on this machine in {rounds} rounds"
    steps = fit_steps(decode + prefill, model.experts.share_per_token if model.experts else 0.0)
    step = _terms(steps, how, r2_of(StepCost(**steps.terms), decode))
    disk = _terms(fit_transfer(transfers.num_bytes, transfers.read), how)
    disk.terms["contention"] = Number(value=transfers.contention, source="steps that ran beside these reads")
    profile = Profile(
        name=f"{config.model.resolve().name}-measured",
        device=device,
        model=f"{model.architecture}, {model.num_layers} layers, hidden size {model.hidden_size}",
        source=f"chorus profile on {device}: {how}; {_describe(engine)}",
        kernel=Kernel.SGMV.value,
        geometry=geometry_of(model, executor),
        memory_bytes=Whole(value=executor.num_pages * executor.layout.page_bytes, source="the engine's page pool"),
        step=step,
        disk=disk,
        link=_terms(fit_transfer(transfers.num_bytes, transfers.place), how),
        overhead=_terms(_measure_overhead(config, executor, paths, clock), "engine steps, less their executor's part"),
    )
    return Measured(profile, decode, prefill, transfers.uncached)


def geometry_of(model: ModelConfig, executor: Executor) -> Geometry:
    """Shapes of a model as an executor serves it."""
    own = executor.layout
    return Geometry.of(
        model, executor.model.max_model_len, own.itemsize, float8_kv=own.float8_kv, value_dim=own.value_dim
    )


def _measure_overhead(config: EngineConfig, executor: Executor, adapters: Sequence[Path], clock: Clock) -> Fit:
    """Fit the time of an engine's steps outside the executor, by rows and by requests that come or go."""
    timed = TimedExecutor(executor, clock)
    engine = Engine(config, timed)
    try:
        names = [engine.store.register(path.name, path).name for path in adapters]
        for _ in _overhead_of(engine, timed, clock, names, count=len(names), seed=0):
            """Loads the adapters."""
        found: dict[tuple[int, int], list[float]] = {}
        for rows in sorted({1, 2, 3, 4, 6, 8, 12, 16, 24, config.max_num_seqs}):
            if rows <= config.max_num_seqs:
                for key, took in _overhead_of(engine, timed, clock, names, count=rows, seed=rows):
                    found.setdefault(key, []).append(took)
    finally:
        engine.store.close()
    values = [(1.0, rows, moving / 2) for rows, moving in found]
    seconds = [typical(took) for took in found.values()]
    if len(values) <= 3:
        return Fit({"base": min(seconds)}, 0.0, 0.0, len(values))
    return fit(("base", "per_row", "per_prompt"), values, seconds)


def _overhead_of(
    engine: Engine, timed: TimedExecutor, clock: Clock, names: Sequence[str], count: int, seed: int
) -> Iterator[tuple[tuple[int, int], float]]:
    """Serve `count` requests: (rows, arrivals plus departures) of each step and its seconds.

    A request's arrival and departure are assumed to cost the same, each half of the request's cost.
    """
    source = random.Random(seed)
    num_tokens = min(_OVERHEAD_PROMPT, engine.model.max_model_len // 2)
    longest = min(_OVERHEAD_STEPS, engine.model.max_model_len - num_tokens)
    spent = 0.0
    for index in range(count):
        prompt = [source.randrange(engine.model.vocab_size) for _ in range(num_tokens)]
        length = max(1, longest - source.randrange(longest) // 2)
        params = RequestParams(max_tokens=length, temperature=0.0, seed=0, ignore_eos=True)
        began = clock()
        engine.add_request(Request(f"overhead-{count}-{index}", prompt, params, names[index % len(names)]))
        spent += clock() - began
    while engine.has_work():
        before, began = timed.seconds, clock()
        plan = engine.begin_step()
        outputs = engine.end_step(plan)
        spent += clock() - began - (timed.seconds - before)
        if plan is None:  # it waited for a read
            continue
        moving = sum(len(row.tokens) > 1 for row in plan.sequences)
        moving += sum(output.finish_reason is not None for output in outputs)
        yield (len(plan.sequences), moving), spent
        spent = 0.0


def _terms(found: Fit, how: str, decode_r2: float | None = None) -> Terms:
    return Terms(
        terms={name: Number(value=value, source=how) for name, value in found.terms.items()},
        fit=FitReport(r2=found.r2, decode_r2=decode_r2, mean_error=found.mean_error, samples=found.num_samples),
    )


def _describe(engine: Engine) -> str:
    config = engine.config
    threads = "all" if config.threads is None else config.threads
    return (
        f"max_num_seqs {config.max_num_seqs}, max_num_batched_tokens {config.max_num_batched_tokens}, "
        f"threads {threads}, dtype {config.dtype}, KV cache dtype {config.kv_cache_dtype}, "
        f"quantization {config.quantization or 'none'}"
    )


def device_name(device: str) -> str:
    """Return the device's name, for people."""
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
    return processor_name()
