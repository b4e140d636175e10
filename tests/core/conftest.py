"""An engine under test with everything it was asked, ran and answered."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors.base import Executor, ExecutorBase, ModelExecutor, StartedStep
from chorus.core.executors.choice import open_executor
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.shard import Shard
from chorus.core.policies import Policies
from chorus.core.requests.record import NotHere, to_record
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import FinishReason, RequestOutput, StepPlan, StepResult, TokenLogprobs
from chorus.core.scheduling.service import OutputLengths
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.identity import with_content
from chorus.memory.host.images import Reads
from chorus.memory.pages.adapter_layout import AdapterLayout
from chorus.perf.inline_reads import InlineReads

from ..simulation.late_results import LateResults
from .executors.thread_ranks import ThreadProcess
from .tiny_families import Tiny, make_tiny

#: The CPU operators; tests of those that this machine lacks skip.
KERNELS = ["torch", "native"]

#: Ranks of every engine under test, threads of this process: to run any test of engines on several.
RANKS = int(os.environ.get("CHORUS_TEST_RANKS", "1"))


class RecordingExecutor(ExecutorBase):
    """A CPU executor that keeps the plans it ran. `before` sees each plan first and may raise."""

    def __init__(self, inner: Executor, before: Callable[[StepPlan], None] | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.model, self.layout, self.num_pages, self.adapters = (
            inner.model,
            inner.layout,
            inner.num_pages,
            inner.adapters,
        )
        self.shadow, self.swaps = inner.shadow, inner.swaps
        self.cold_starts = inner.cold_starts
        self.eager_steps = inner.eager_steps
        self.start = None if inner.start is None else self._start
        self.before = before
        self.plans: list[StepPlan] = []

    @property
    def rank(self) -> CpuExecutor:
        """The part of the model that this process computes: all of it, or the first rank's shard."""
        return cast(CpuExecutor, getattr(self.inner, "first", self.inner))

    def execute(self, plan: StepPlan) -> StepResult:
        self._note(plan)
        return self.inner.execute(plan)

    def _start(self, plan: StepPlan) -> StartedStep:
        self._note(plan)
        assert self.inner.start is not None
        return self.inner.start(plan)

    def _note(self, plan: StepPlan) -> None:
        rows = [replace(row, pages=list(row.pages), token_ids=list(row.token_ids)) for row in plan.sequences]
        self.plans.append(replace(plan, sequences=rows))
        if self.before is not None:
            self.before(plan)

    @property
    def release_pages(self) -> Callable[[], None] | None:
        return self.inner.release_pages

    def close(self) -> None:
        self.inner.close()


@dataclass
class Answer:
    """The outputs of a request so far."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    failure: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    pooled: bytes | None = None


def exported(engine: Engine, request_id: str) -> dict[str, Any]:
    """Return a request in progress as plain data, which another engine can resume."""
    return to_record(engine.scheduler.get(request_id), engine.clock())


def moved(here: Driver, there: Driver, names: Iterable[str], *, steps: int) -> dict[str, list[int]]:
    """Tokens of requests that go on in another engine after some steps, in the middle of prompts and of answers."""
    for driver in (here, there):
        for adapter in list(driver.engine.store.versions()):
            driver.engine.store.note(adapter, with_content(adapter.manifest))
    for _ in range(steps):
        here.step()
    begun = {name: list(here.answers[name].tokens) for name in names}
    assert any(begun.values())
    assert not all(begun.values())
    for name in begun:
        if here.answers[name].finish_reason is None:
            resumed = there.engine.resume(json.loads(json.dumps(exported(here.engine, name))))
            assert not isinstance(resumed, NotHere)
            there.answers[name] = Answer()
    there.drain()
    assert not {name: answer.error for name, answer in there.answers.items() if answer.error}
    return {name: told + (there.answers[name].tokens if name in there.answers else []) for name, told in begun.items()}


class Driver:
    """Adds requests to an engine and steps it; the pool's accounting is checked after every step.

    has_stalled_link: adapters' copies may never end, so that requests alone are waited for.
    """

    has_stalled_link = False

    def __init__(self, engine: Engine, executor: RecordingExecutor) -> None:
        self.engine = engine
        self.executor = executor
        self.answers: dict[str, Answer] = {}

    @property
    def plans(self) -> list[StepPlan]:
        return self.executor.plans

    def add(
        self,
        request_id: str,
        adapter: str | None,
        prompt: list[int],
        choice_group: str = "",
        tenant: str = "",
        prediction: Sequence[int] = (),
        **params: Any,
    ) -> Request:
        """Greedy and past end-of-sequence unless `params` say otherwise."""
        params = {"temperature": 0.0, "ignore_eos": True, **params}
        others = {"choice_group": choice_group, "tenant": tenant, "prediction": prediction}
        request = Request(request_id, prompt, RequestParams(**params), adapter, **others)
        self.engine.add_request(request)
        self.answers[request_id] = Answer()
        return request

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        if isinstance(late := getattr(self.executor, "inner", None), LateResults):
            assert not late.violations
        self.engine.check_integrity()
        for output in outputs:
            answer = self.answers[output.request_id]
            assert answer.finish_reason is None, f"{output.request_id} goes on after its end"
            answer.tokens += output.token_ids
            answer.finish_reason, answer.stop_token_id, answer.error, answer.failure = (
                output.finish_reason,
                output.stop_token_id,
                output.error,
                output.failure,
            )
            if len(answer.tokens) == len(output.token_ids):
                answer.num_cached_tokens = output.num_cached_tokens
            else:
                assert not output.num_cached_tokens, "they are told again"
            answer.logprobs += output.logprobs
            answer.num_preemptions = max(answer.num_preemptions, output.num_preemptions)
            answer.pooled = output.pooled
            if output.prompt_logprobs is not None:
                assert answer.prompt_logprobs is None, f"{output.request_id}'s prompt is scored twice"
                answer.prompt_logprobs = output.prompt_logprobs
        return outputs

    def held_pages(self) -> int:
        """Pages that requests and resident adapters hold, without cached pages, which can be freed at any time."""
        stats = self.engine.stats()
        return stats.num_pages - stats.num_free_pages - stats.num_cached_pages

    def drain(self, limit: int = 5000) -> dict[str, Answer]:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self._is_busy():
                break
            self.step()
        assert not self._is_busy(), f"not done after {limit} steps"
        stats = self.engine.stats()
        assert stats.num_running == stats.num_waiting == stats.num_kv_pages == 0
        return self.answers

    def _is_busy(self) -> bool:
        if self.has_stalled_link and all(each.finish_reason is not None for each in self.answers.values()):
            return False
        return self.engine.has_work()

    def run(self, *args: Any, **params: Any) -> Answer:
        """One request to its end."""
        request = self.add(*args, **params)
        return self.drain()[request.id]


def ticking(seconds: float = 1e-3) -> Callable[[], float]:
    """A clock on which that much time goes by between any two looks."""
    ticks = itertools.count(1)
    return lambda: next(ticks) * seconds


def on_ranks(settings: EngineConfig, adapters: Iterable[Path]) -> EngineConfig:
    """The same on `RANKS` ranks. A pool of a given number of pages has as many more as the largest adapter takes more:
    a rank's share of an adapter is more than its part of the ranks, and its part of a page is not. Skips models whose
    shapes don't divide.
    """
    whole = read_model_config(settings.model)
    try:
        Shard(0, RANKS).config(whole)
    except UnsupportedModel as error:
        pytest.skip(str(error))

    def most_pages(size: int) -> int:
        shapes = ModelExecutor(settings, Shard(0, size))
        page, projections = shapes.layout, shapes.config.projections
        manifests = [inspect_adapter(path, whole.module_paths) for path in adapters]
        layouts = [
            AdapterLayout.build(each.parts, projections, page.page_elems, page.itemsize, vectors=each.vectors)
            for each in manifests
        ]
        return max((layout.num_pages for layout in layouts), default=0)

    adapters, changes = list(adapters), {"tensor_parallel_size": RANKS}
    if settings.num_pages is not None:
        changes["num_pages"] = settings.num_pages + most_pages(RANKS) - most_pages(1)
    return settings.model_copy(update=changes)


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    """Every engine test runs with each; a test may choose by parametrising `kernels` itself."""
    return request.param


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that admit requests without a thought for how far they will grow: some are preempted."""
    monkeypatch.setattr(OutputLengths, "final_lengths", lambda self, requests: [0 for _ in requests])


@pytest.fixture
def ahead() -> bool:
    """Return whether engines launch steps ahead; modules whose tests are to hold either way have one of their own."""
    return False


@pytest.fixture
def drive(kernels: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Driver]]:
    """`drive(subject, before=…, reads=…, clock=…, **config)`: a float32 engine with the subject's adapters registered.

    Adapters are read at once and time goes by evenly unless `reads` and `clock` say otherwise, so that every run takes
    the same steps.
    """
    engines: list[Engine] = []
    monkeypatch.setattr("chorus.core.executors.worker_processes.Popen", ThreadProcess)

    def make(
        subject: Any,
        *,
        before: Callable[[StepPlan], None] | None = None,
        adapters: dict[str, Path] | None = None,
        reads: Reads | None = None,
        clock: Callable[[], float] | None = None,
        policies: Policies | None = None,
        is_async: bool = ahead,
        **config: Any,
    ) -> Driver:
        defaults = {
            "dtype": "float32",
            "memory_bytes": RANKS * (8 << 20),
            "cpu_kernels": kernels,
            "threads": 1,
            "device": "cpu",
        }
        settings = EngineConfig(model=subject.model, **{**defaults, **config})
        paths = subject.adapters if adapters is None else adapters
        if RANKS > 1 and "tensor_parallel_size" not in config:
            settings = on_ranks(settings, paths.values())
        inner = open_executor(settings)
        executor = RecordingExecutor(LateResults(inner) if is_async else inner, before)
        engine = Engine(settings, executor, clock or ticking(), reads or InlineReads(), policies)
        engines.append(engine)
        for name, path in paths.items():
            engine.store.register(name, path)
        return Driver(engine, executor)

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Tiny]:
    """`tiny("qwen3")`: the family's model with adapters, made once in a process. It takes six megabytes."""
    return cache(make_tiny)


@pytest.fixture
def drive_crowded(drive: Callable[..., Driver], crowded: None) -> Callable[..., Driver]:
    """`drive_crowded(subject, **config)`: an engine with pages for all adapters and 80 tokens, which swaps requests."""

    def make(subject: Any, **config: Any) -> Driver:
        limits = {"block_tokens": 8, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
        limits |= {"preemption": "swap", "prefix_cache": False, **config}
        probe = drive(subject, **limits).engine
        adapters = sum(adapter.num_pages for _, adapter in probe.store.registered())
        return drive(subject, num_pages=adapters + probe.executor.layout.pages_for_tokens(80, chunk=64), **limits)

    return make
