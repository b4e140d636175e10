"""Random sequences of everything that can happen to an engine, over an executor that checks what it is told to do."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors.base import ModelInfo
from chorus.core.request import Request
from chorus.core.sampling_params import InvalidRequest, SamplingParams
from chorus.core.types import BASE_SLOT, FinishReason, StepPlan, StepResult
from chorus.graphs.buckets import DecodeBuckets
from chorus.memory.adapter_format import AdapterFormatError, AdapterManifest
from chorus.memory.adapter_layout import AdapterLayout, AdapterPart
from chorus.memory.adapter_store import UnknownAdapter
from chorus.memory.layout import MODULES, PageLayout
from chorus.memory.pages import PageKind, PagePool

VOCAB = 48
EOS = (0, 1)
MAX_MODEL_LEN = 40
NAMES = ("alto", "bass", "tenor")


def next_token(voice: str, tokens: list[int], seed: int | None) -> int:
    """The fake model: what follows `tokens` in the voice of an adapter version. `seed` only when it samples."""
    return zlib.crc32(repr((voice, tokens, seed)).encode()) % VOCAB


class FakeAdapters:
    """Adapters are paths with a page count; their images say whose page it is."""

    def __init__(self, memory: dict[tuple[int, int], object]) -> None:
        self.num_pages: dict[Path, int] = {}
        self.broken: set[Path] = set()
        self._memory = memory

    def inspect(self, path: Path) -> AdapterManifest:
        if path not in self.num_pages:
            raise AdapterFormatError(f"{path}: no such directory")
        return AdapterManifest(path, (AdapterPart(self.num_pages[path], 1.0, (0,), MODULES),))

    def layout(self, manifest: AdapterManifest) -> AdapterLayout:
        return AdapterLayout((), num_pages=manifest.rank)

    def read(self, manifest: AdapterManifest, layout: AdapterLayout) -> list[object]:
        if manifest.path in self.broken:
            raise AdapterFormatError(f"{manifest.path}: cannot be read")
        return [(manifest.path, index) for index in range(manifest.rank)]

    def place(self, image: list[object], pages: list[int]) -> None:
        for page, content in zip(pages, image, strict=True):
            self._memory[page, 0] = content


class CheckingExecutor:
    """Remembers what was last written to every place of the arena and checks every plan against it.

    The engine turns an executor's exceptions into a request's error, so what is found wrong is kept in `violations`.
    """

    def __init__(self, config: EngineConfig, expected: dict[str, Expected]) -> None:
        self.config = config
        self.model = ModelInfo(VOCAB, MAX_MODEL_LEN, EOS)
        self.layout = PageLayout(1, 1, 8, config.block_tokens, 4)
        self.num_pages = config.num_pages
        self.memory: dict[tuple[int, int], object] = {}
        self.adapters = FakeAdapters(self.memory)
        self.violations: list[Exception] = []
        self.raises_for: set[str] = set()
        self.sick: set[str] = set()
        self.glitches = 0
        self.pool: PagePool
        self._expected = expected

    def execute(self, plan: StepPlan) -> StepResult:
        if self.glitches:
            self.glitches -= 1
            raise RuntimeError("a passing fault")
        try:
            self._check(plan)
            return self._run(plan)
        except (AssertionError, LookupError) as error:
            self.violations.append(error)
            raise

    def close(self) -> None:
        pass

    def _check(self, plan: StepPlan) -> None:
        rows = plan.rows
        assert 0 < len(rows) <= self.config.max_num_seqs
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len({row.request_id for row in rows}) == len(rows), "a request has two rows"
        single = [len(row.tokens) == 1 for row in rows]
        assert single == sorted(single), "a decode row before a prefill row"
        for kind in (True, False):
            slots = [row.slot for row, one in zip(rows, single, strict=True) if one is kind]
            assert len(list(itertools.groupby(slots))) == len(set(slots)), f"rows of a slot are apart: {slots}"
        if all(single):
            assert plan.bucket is not None
            assert plan.bucket >= len(rows)
            assert plan.bucket in DecodeBuckets(self.config.max_num_seqs).sizes
        else:
            assert plan.bucket is None
        assert len(set(map(id, plan.adapters))) == len(plan.adapters)
        assert {row.slot for row in rows} - {BASE_SLOT} == set(range(len(plan.adapters))), "a slot without rows"
        self._check_pages(plan)

    def _check_pages(self, plan: StepPlan) -> None:
        owner: dict[int, str] = {PagePool.DUMMY: "padding"}
        for adapter in plan.adapters:
            assert adapter.references > 0
            assert len(adapter.pages) == adapter.num_pages, f"{adapter} is not resident"
            for index, page in enumerate(adapter.pages):
                assert self.pool.kind(page) is PageKind.ADAPTER
                assert owner.setdefault(page, adapter.name) == adapter.name
                assert self.memory[page, 0] == (adapter.manifest.path, index), f"{adapter} was overwritten"
        for row in plan.rows:
            assert row.tokens
            assert row.kv_len <= len(row.pages) * self.config.block_tokens, "pages do not cover the tokens"
            assert len(row.pages) <= self.layout.pages_for_tokens(MAX_MODEL_LEN)
            for page in row.pages:
                assert page not in owner, f"page {page} of {row.request_id} is also {owner[page]}'s"
                assert self.pool.kind(page) is PageKind.KV
                owner[page] = row.request_id

    def _run(self, plan: StepPlan) -> StepResult:
        result = StepResult()
        for row in plan.rows:
            expected = self._expected[row.request_id]
            if row.request_id in self.raises_for:
                raise RuntimeError(f"a fault of {row.request_id}")
            path = None if row.slot == BASE_SLOT else plan.adapters[row.slot].manifest.path
            assert path == expected.adapter, f"{row.request_id} runs on {path}, was accepted on {expected.adapter}"
            for position, token in enumerate(row.tokens, row.start):
                self.memory[self._place(row.pages, position)] = (row.request_id, position, token)
            kv = [self.memory[self._place(row.pages, position)] for position in range(row.kv_len)]
            tokens = expected.tokens
            want = [(row.request_id, position, token) for position, token in enumerate(tokens[: row.kv_len])]
            assert kv == want, f"KV of {row.request_id} was lost or overwritten"
            assert (row.sampling is not None) == (row.kv_len == len(tokens)), "a token is drawn at the wrong place"
            if row.sampling is None:
                continue
            assert row.sampling == expected.params
            if row.request_id in self.sick:
                result.errors[row.request_id] = "not finite"
            else:
                seed = row.seed if row.sampling.temperature else None
                result.tokens[row.request_id] = next_token(str(path), tokens, seed)
        return result

    def _place(self, pages: list[int], position: int) -> tuple[int, int]:
        page, offset = divmod(position, self.config.block_tokens)
        return pages[page], offset


@dataclass
class Expected:
    """A request as it was accepted, and what has come of it."""

    adapter: Path | None
    prompt: list[int]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    seed: int | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    def alone(self) -> tuple[list[int], FinishReason]:
        """What the request gets when nothing disturbs it."""
        output: list[int] = []
        seed = self.seed if self.params.temperature else None
        while True:
            token = next_token(str(self.adapter), self.prompt + output, seed)
            output.append(token)
            if token in self.params.stop_token_ids or (token in EOS and not self.params.ignore_eos):
                return output, FinishReason.STOP
            if len(output) == self.params.max_tokens or len(self.prompt) + len(output) == MAX_MODEL_LEN:
                return output, FinishReason.LENGTH


class EngineMachine(RuleBasedStateMachine):
    """Requests come and go, adapters are loaded, replaced and broken, steps fail; every promise holds all along."""

    @initialize(
        block_tokens=st.sampled_from([1, 2, 4, 8]),
        kv_tokens=st.sampled_from([24, MAX_MODEL_LEN, 64, 100]),
        adapter_pages=st.lists(st.integers(1, 9), min_size=len(NAMES), max_size=len(NAMES)),
        max_num_seqs=st.sampled_from([1, 2, 3, 4, 6, 9]),
        spare_tokens=st.sampled_from([0, 1, 5, 40]),
        chunked=st.sampled_from([True, True, False]),
    )
    def build(self, block_tokens, kv_tokens, adapter_pages, max_num_seqs, spare_tokens, chunked):
        """The arena holds little more than one long request and the largest adapter, so that all compete."""
        self.config = EngineConfig(
            model=Path("fake"),
            num_pages=1 - (-kv_tokens // block_tokens) + max(adapter_pages),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_tokens if chunked else MAX_MODEL_LEN + spare_tokens,
            chunked_prefill=chunked,
            block_tokens=block_tokens,
            seed=5,
        )
        self.requests: dict[str, Expected] = {}
        self.executor = CheckingExecutor(self.config, self.requests)
        ticks = itertools.count()
        self.engine = Engine(self.config, self.executor, clock=lambda: float(next(ticks)))
        self.executor.pool = self.engine._pool
        self.current: dict[str, Path] = {}
        self.aborted: set[str] = set()
        self.ids = itertools.count()
        for name, pages in zip(NAMES, adapter_pages, strict=True):
            self.register(name, pages)

    # -- requests

    @rule(
        names=st.lists(st.sampled_from([None, *NAMES]), min_size=1, max_size=6),
        length=st.integers(1, 30),
        max_tokens=st.integers(1, 30),
        ignore_eos=st.booleans(),
        stop=st.sets(st.integers(0, VOCAB - 1), max_size=1),
    )
    def add(self, names, length, max_tokens, ignore_eos, stop):
        """A few requests of similar length."""
        for index, name in enumerate(names):
            temperature, seed = (0.0, 1.0)[index % 2], (None, 3)[index // 2 % 2]
            self._add(name, length + index, max_tokens, temperature, ignore_eos, stop, seed)

    @rule(name=st.sampled_from([None, *NAMES]), length=st.integers(0, MAX_MODEL_LEN + 1), max_tokens=st.integers(1, 60))
    def add_what_may_not_fit(self, name, length, max_tokens):
        self._add(name, length, max_tokens, 0.0, True, (), None)

    def _add(self, name, length, max_tokens, temperature, ignore_eos, stop, seed):
        request_id = f"r{next(self.ids)}"
        prompt = [zlib.crc32(f"{request_id} {i}".encode()) % VOCAB for i in range(length)]
        params = SamplingParams(
            max_tokens, temperature, seed=seed, stop_token_ids=tuple(sorted(stop)), ignore_eos=ignore_eos
        )
        request = Request(request_id, prompt, params, name)
        try:
            self.engine.add_request(request)
        except InvalidRequest as error:
            assert self._refusal(name, length, max_tokens) == error.field
            return
        assert self._refusal(name, length, max_tokens) is None
        self.requests[request_id] = Expected(self.current.get(name), prompt, request.params, seed=request.seed)

    def _refusal(self, name, length, max_tokens):
        """The field that a request must be refused for."""
        total = min(MAX_MODEL_LEN, length + max_tokens)
        if not 0 < length < MAX_MODEL_LEN:
            return "prompt"
        if not self.config.chunked_prefill and total > self.config.max_num_batched_tokens:
            return "prompt"
        if name is not None and name not in self.current:
            return "model"
        pages = self.executor.adapters.num_pages[self.current[name]] if name else 0
        return "max_tokens" if pages - (-total // self.config.block_tokens) > self.config.num_pages - 1 else None

    def _active(self):
        return sorted(set(self.requests) - self.aborted - {r for r, e in self.requests.items() if e.reason})

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        assert self.engine.abort(request_id) == (request_id in self._active())
        if not self.requests[request_id].reason:
            self.aborted.add(request_id)

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            self._step()

    def _step(self):
        outputs = self.engine.step()
        if self.executor.violations:
            raise self.executor.violations[0]
        for output in outputs:
            expected = self.requests[output.request_id]
            assert output.request_id not in self.aborted, "output of an aborted request"
            assert expected.reason is None, "output after the end"
            expected.output += output.token_ids
            expected.reason = output.finish_reason
            assert (output.error is not None) == (output.finish_reason is FinishReason.ERROR)
            if expected.reason is not None:
                self._check_end(output.request_id, expected)
        self.engine.check_integrity()

    def _check_end(self, request_id, expected):
        tokens, reason = expected.alone()
        if expected.reason is FinishReason.ERROR:
            assert (
                request_id in self.executor.raises_for | self.executor.sick
                or expected.adapter in self.executor.adapters.broken
            ), "an innocent request failed"
            assert expected.output == tokens[: len(expected.output)]
        else:
            assert (expected.output, expected.reason) == (tokens, reason)

    # -- adapters

    @rule(name=st.sampled_from(NAMES), num_pages=st.integers(1, 9))
    def register(self, name, num_pages):
        path = Path(f"version-{next(self.ids)}")
        self.executor.adapters.num_pages[path] = num_pages
        try:
            self.engine.store.register(name, path)
        except AdapterFormatError:
            assert num_pages >= self.config.num_pages - 1
        else:
            assert num_pages < self.config.num_pages - 1
            self.current[name] = path

    @rule(name=st.sampled_from(NAMES))
    def register_what_cannot_be_read(self, name):
        with pytest.raises(AdapterFormatError):
            self.engine.store.register(name, Path("nowhere"))
        assert self.engine.store.names() == sorted(self.current)

    @rule(name=st.sampled_from(NAMES))
    def unregister(self, name):
        if name in self.current:
            self.engine.store.unregister(name)
            del self.current[name]
        else:
            with pytest.raises(UnknownAdapter):
                self.engine.store.unregister(name)

    @rule()
    def evict_idle(self):
        idle = [info for info in self.engine.store.describe() if info.tier == "device" and info.references == 0]
        assert self.engine.store.evict_idle() == len(idle)
        assert not any(info.tier == "device" and info.references == 0 for info in self.engine.store.describe())

    @precondition(lambda self: self.current)
    @rule(data=st.data())
    def break_adapter(self, data):
        """Its next load fails; while it is resident nobody notices."""
        self.executor.adapters.broken.add(self.current[data.draw(st.sampled_from(sorted(self.current)))])

    # -- failing steps

    @precondition(lambda self: self._active())
    @rule(data=st.data(), how=st.sampled_from(["raises_for", "sick"]))
    def make_a_request_fail(self, data, how):
        getattr(self.executor, how).add(data.draw(st.sampled_from(self._active())))

    @precondition(lambda self: not self.executor.glitches)
    @rule()
    def let_the_next_step_fail_once(self):
        """The step as a whole fails and its rows succeed when they run alone: nobody notices."""
        if self.engine.has_work():
            self.executor.glitches = 1
            before = self.engine.stats().num_steps
            self._step()
            assert self.executor.glitches == 0 or self.engine.stats().num_steps == before
            self.executor.glitches = 0

    # -- always

    @invariant()
    def books_add_up(self):
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats.num_running <= self.config.max_num_seqs
        assert stats.num_running + stats.num_waiting == len(self._active())
        assert stats.num_free_pages + stats.num_kv_pages + stats.num_adapter_pages == self.config.num_pages - 1
        assert stats.num_kv_pages == 0 or stats.num_running > 0

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        remaining = sum(len(e.prompt) + e.params.max_tokens for e in self.requests.values())
        for _ in range(remaining * (1 + len(self.requests)) + 10):
            if not self.engine.has_work():
                break
            self._step()
        assert not self.engine.has_work(), "requests starve"
        for request_id, expected in self.requests.items():
            assert (expected.reason is None) == (request_id in self.aborted)
        assert self.engine.stats().num_kv_pages == 0
        for name in list(self.current):
            self.engine.store.unregister(name)
        assert self.engine.stats().num_free_pages == self.config.num_pages - 1
        self.engine.check_integrity()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=150, stateful_step_count=30)
