"""The engine in virtual time, and many of its steps at once that are the same as the serving scheduler's one by one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chorus.core.config import EngineConfig
from chorus.core.costs.models import StepWork
from chorus.core.costs.profile import Number, Terms, load_profile
from chorus.core.engine import Engine
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import FinishReason
from chorus.memory.adapters.adapter import Tier
from chorus.memory.files.error import AdapterFormatError
from chorus.perf.simulate.adapters import SimAdapters
from chorus.perf.simulate.engine import MODEL, SimEngine, SimExecutor, StepPrice, simulated_engine
from chorus.perf.simulate.link import VirtualClock
from chorus.perf.simulate.scheduler import SimRequest

PROFILE = load_profile("a100-llama2-7b").model_copy(update={"overhead": None})  # the executor's price alone
LAYERS = PROFILE.geometry.num_layers
PAGE_BYTES = PROFILE.geometry.page_layout(16).page_bytes


def terms(**values):
    return Terms(terms={name: Number(value=value, source="made up") for name, value in values.items()})


def with_disk(**values):
    return PROFILE.model_copy(update={"disk": terms(**values)})


class Run:
    """A simulated engine that gets requests at their times; records its output with times.

    engine_type: `Engine` for the serving scheduler, which decides every step and tells every token.
    """

    def __init__(
        self,
        profile=PROFILE,
        *,
        adapters=(),
        stream=True,
        mix=True,
        most_prompts=None,
        most_rows=None,
        engine_type=SimEngine,
        **config,
    ):
        config = EngineConfig(model=MODEL, **{"prefix_cache": False, **config})
        self.clock = VirtualClock()
        self.catalogue = SimAdapters(profile.geometry, config.block_tokens)
        if engine_type is SimEngine:
            self.engine, self.executor = simulated_engine(
                profile,
                self.catalogue,
                config,
                self.clock,
                stream=stream,
                mix=mix,
                most_prompts=most_prompts,
                most_rows=most_rows,
            )
        else:
            self.executor = SimExecutor(profile, self.catalogue, config, self.clock, stream=stream)
            self.engine = engine_type(config, self.executor, self.clock, self.executor.adapters.reads)
        for name, rank, pages in adapters:
            page = self.executor.layout.page_bytes
            self.engine.store.register(name, self.catalogue.add(name, rank, pages * page))
        self.outputs: dict[str, list[tuple[float, int]]] = {}
        self.finished: dict[str, float] = {}
        self.history: list[tuple] = []
        self.num_calls = 0
        self.request_type = SimRequest if engine_type is SimEngine else Request

    def request(self, name, prompt, max_tokens, adapter=None):
        tokens = prompt if isinstance(prompt, list) else [1] * prompt
        params = RequestParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return self.request_type(name, tokens, params, adapter, self.clock.now)

    def add(self, *args):
        request = self.request(*args)
        self.engine.add_request(request)
        self.outputs[request.id] = []
        return request

    def step(self):
        before = self.clock.now
        outputs = self.engine.step()
        self.num_calls += 1
        for output in outputs:
            assert output.error is None
            self.outputs[output.request_id].append((self.clock.now, len(output.token_ids)))
            if output.finish_reason is not None:
                assert output.finish_reason is FinishReason.LENGTH
                self.finished[output.request_id] = self.clock.now
        return self.clock.now - before

    def serve(self, arrivals):
        """arrivals: (time, arguments of `add`), in order of time."""
        queue = list(arrivals)
        while queue or self.engine.has_work():
            while queue and queue[0][0] <= self.clock.now:
                self.add(*queue.pop(0)[1:])
            self.executor.horizon = queue[0][0] if queue else float("inf")
            if not self.engine.has_work():
                self.clock.now = queue[0][0]
                continue
            self.step()
            stats = self.engine.stats()
            if queue and queue[0][0] <= self.clock.now:  # both ways have just stopped here
                self.history.append((len(queue), stats.num_steps, stats.num_kv_pages, stats.num_adapter_pages))
        self.engine.check_integrity()
        return self


# -- steps together are the same as steps one by one

ADAPTERS = [("a", 8, 2), ("b", 16, 3), ("c", 64, 5), ("d", 8, 2)]


@st.composite
def traces(draw):
    """Arrivals with prompts, lengths and adapters, for arenas that are roomy or tight."""
    arrivals, now = [], 0.0
    for index in range(draw(st.integers(1, 20))):
        now += draw(st.sampled_from([0.0, 0.0, 0.0031, 0.0473, 0.31, 2.07]))
        prompt = draw(st.integers(1, 70))
        shared = draw(st.sampled_from([0, 16, 64]))
        tokens = [*range(3, 3 + min(shared, prompt)), *[100 + index] * max(0, prompt - shared)]
        adapter = draw(st.sampled_from([None, "a", "b", "c", "d"]))
        arrivals.append((now, f"r{index}", tokens, draw(st.integers(1, 120)), adapter))
    return arrivals


def test_repeated_steps_leave_requests_at_what_they_have_computed():
    """The scheduler goes on from there: once it did not, and the next repeat was of fewer than no steps."""
    run = Run()
    request = run.request("long", 20, 200)
    run.engine.add_request(request)
    repeats = 0
    for _ in range(20):
        before, plan = run.engine.scheduler.num_steps, run.engine.begin_step()
        if plan is None:
            break
        run.engine.end_step(plan)
        count = run.engine.scheduler.num_steps - before
        assert count >= 1
        if request.sequence is not None and count > 1:
            repeats += 1
            assert request.num_computed_tokens == request.num_tokens - 1 == request.sequence.start
    assert repeats or request.finish_reason is not None
    assert run.engine.scheduler.num_steps == 200, "a step for each token, the prompt's first"


@pytest.mark.slow
@given(
    arrivals=traces(),
    num_pages=st.sampled_from([20, 26, 40, 120]),
    max_num_seqs=st.sampled_from([1, 3, 16]),
    block_tokens=st.sampled_from([2, 4, 16]),
    prefix_cache=st.booleans(),
    stream=st.booleans(),
    disk=st.sampled_from([0.0, 0.07]),
    link=st.sampled_from([0.0, 0.045]),
    max_adapters=st.sampled_from([None, None, 1]),
    max_overtake=st.sampled_from([0.03, 0.2, 5.0]),
    prefetch=st.sampled_from([0, 3]),
    fair_by=st.sampled_from(["tenant", "adapter"]),
)
@example(
    [
        (0.0, "a", [9] * 120, 68, None),
        (0.0, "b", [8] * 60, 12, None),
        (0.005, "y", [7] * 17, 20, "c"),
        (0.01, "x", [6] * 180, 5, None),
    ],
    *(20, 16, 16, False, True, 0.0, 0.0, None, 0.3, 0, "tenant"),
)  # x, which needs no adapter, doesn't fit and is before y, until y has been overtaken for long enough
@example(
    [(0.0, f"r{i}", [3] * 16, 100, None) for i in range(4)], 40, 16, 4, True, False, 0.0, 0.0, None, 1.0, 0, "tenant"
)  # equal prompts and answers: the first one to register a block decides the cache's content
@example(
    [*((0.0, f"r{i}", [3] * 16, 100, "a") for i in range(3)), (0.31, "new", [4] * 40, 20, None)],
    *(120, 3, 16, False, True, 0.0, 0.0, None, 5.0, 0, "adapter"),
)  # new takes a row of one that decodes: the step has as many rows as before, and a prompt among them
@settings(max_examples=50)
def test_steps_together_are_the_same_as_steps_one_by_one(
    arrivals,
    num_pages,
    max_num_seqs,
    block_tokens,
    prefix_cache,
    stream,
    disk,
    link,
    max_adapters,
    max_overtake,
    prefetch,
    fair_by,
):
    profile = PROFILE.model_copy(update={"disk": terms(latency=disk, contention=0.3), "link": terms(latency=link)})

    def run(engine_type):
        return Run(
            profile,
            adapters=ADAPTERS,
            stream=stream,
            engine_type=engine_type,
            num_pages=num_pages * 16 // block_tokens,
            block_tokens=block_tokens,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=48,
            prefix_cache=prefix_cache,
            max_model_len=190,
            max_adapters_per_step=max_adapters,
            host_cache_bytes=7 * PAGE_BYTES,
            max_overtake_seconds=max_overtake,
            prefetch=prefetch,
            fair_by=fair_by,
        ).serve(arrivals)

    one, many = run(Engine), run(SimEngine)
    assert many.num_calls <= one.num_calls
    assert list(many.finished) == list(one.finished)
    assert many.finished == pytest.approx(one.finished, rel=1e-9)
    assert many.history == one.history
    for name, outputs in one.outputs.items():
        told = many.outputs[name]
        assert 1 <= len(told) <= len(outputs) and {count for _, count in told} == {1}
        assert told[0][0] == pytest.approx(outputs[0][0], rel=1e-9), "the first token comes alone"
        assert told[-1][0] == pytest.approx(outputs[-1][0], rel=1e-9)
    assert replace(many.engine.stats(), last_step=None) == replace(one.engine.stats(), last_step=None)
    assert many.executor.stalled_seconds == pytest.approx(one.executor.stalled_seconds)
    assert many.executor.busy_seconds == pytest.approx(one.executor.busy_seconds)


def test_steps_are_taken_together():
    run = Run(max_num_seqs=8)
    run.serve([(0.0, f"r{i}", 100, 500 + i, None) for i in range(8)])
    assert run.engine.stats().num_steps > 500
    assert run.num_calls <= 10


def test_steps_are_not_taken_together_past_a_block_that_lets_a_request_in():
    """Eight requests leave less of the step's budget than the ninth needs, until one has computed the block that both
    begin with.
    """

    def run(engine_type):
        run = Run(
            prefix_cache=True,
            chunked_prefill=False,
            max_num_batched_tokens=64,
            max_num_seqs=16,
            engine_type=engine_type,
        )
        answers = [(0.0, f"r{index}", [1 if index == 0 else 5] * 8, 40, None) for index in range(8)]
        return run.serve([*answers, (0.0, "long", [1] * 60, 2, None)])

    one, many = run(Engine), run(SimEngine)
    assert many.finished == pytest.approx(one.finished, rel=1e-9)
    assert many.engine.stats().num_prefix_hit_tokens == one.engine.stats().num_prefix_hit_tokens == 16
    assert many.finished["long"] < many.finished["r0"]


def test_steps_are_not_taken_together_past_the_end_of_a_load():
    """An adapter loaded ahead for a request that left keeps its pages until all of it is there; then another fits."""
    link = terms(per_byte=0.3 / (10 * PAGE_BYTES))

    def run(engine_type):
        run = Run(
            PROFILE.model_copy(update={"link": link, "disk": terms()}),
            adapters=[("a", 16, 10)],
            num_pages=21,
            prefetch=1,
            engine_type=engine_type,
        )
        run.add("running", 20, 60)
        run.step()
        run.add("aborted", 150, 5, "a")
        run.executor.horizon = run.clock.now
        run.step()
        assert run.engine.store.loads.under_way
        assert run.engine.abort("aborted")
        run.executor.horizon = float("inf")
        run.add("waiting", 12 * 16, 2)
        while run.engine.has_work():
            run.step()
        return run

    one, many = run(Engine), run(SimEngine)
    assert many.finished == pytest.approx(one.finished, rel=1e-9)
    assert 0.3 < many.finished["waiting"] < many.finished["running"]
    assert many.num_calls < one.num_calls


def test_a_plan_that_was_never_run_is_decided_again():
    run = Run()
    run.add("x", 20, 5)
    run.step()
    run.add("y", 30, 5)
    steps: list[Any] = [run.engine.begin_step() for _ in range(2)]
    plans = [[(row.request_id, row.start, len(row.tokens)) for row in step.sequences] for step in steps]
    assert plans == [[("y", 0, 30), ("x", 20, 1)]] * 2
    while run.engine.has_work():
        run.step()
    assert sorted(run.finished) == ["x", "y"]


@given(
    first=st.floats(1e-6, 1.0),
    growth=st.sampled_from([0.0, 1e-12, 1e-7, 1e-3]),
    count=st.integers(1, 5000),
    share=st.floats(0.001, 0.999),
)
def test_the_number_of_steps_until_a_time(first, growth, count, share):
    price = StepPrice(first, growth)
    middle = price.total(count - 1) + share * (price.total(count) - price.total(count - 1))
    assert price.count_until(middle, 1 << 20) == count
    assert price.count_until(middle, 3) == min(count, 3)
    assert price.total(count) == pytest.approx(sum(first + growth * i for i in range(count)))


@pytest.mark.parametrize("engine_type", [Engine, SimEngine])
@pytest.mark.parametrize("num_steps", range(1, 8))
def test_an_abort_just_when_a_page_is_wanted(num_steps, engine_type):
    run = Run(engine_type=engine_type)
    run.add("goes", 12, 20)
    stays = run.add("stays", 12, 20)
    for _ in range(num_steps):  # the fifth draws token 17, which wants a second page
        run.executor.horizon = run.clock.now
        run.step()
    run.executor.horizon = float("inf")
    assert run.engine.abort("goes")
    while run.engine.has_work():
        run.step()
        run.engine.check_integrity()
    assert stays.num_output_tokens == 20
    assert "goes" not in run.finished


# -- costs and time


def test_a_step_costs_what_the_model_says():
    run = Run(adapters=[("a", 16, 10)])
    run.add("x", 50, 3, "a")
    run.add("y", 20, 3)
    costs = run.executor.costs
    link = costs.link.seconds(10 * PAGE_BYTES)
    prefill = costs.step.seconds(StepWork(70, 2, 70, 0, 16, 50 * 16, 16, 50 * 51 / 2 + 20 * 21 / 2, True))
    stall = max(link / LAYERS, link + prefill / LAYERS - prefill)
    assert run.step() == pytest.approx(prefill + stall)
    assert run.executor.stalled_seconds == pytest.approx(stall)
    run.executor.horizon = run.clock.now
    assert run.step() == pytest.approx(costs.step.seconds(StepWork(2, 2, 72, 50, 16, 16, 16)))
    assert run.step() == pytest.approx(costs.step.seconds(StepWork(2, 2, 74, 51, 16, 16, 16)))
    assert run.finished == {"x": run.clock.now, "y": run.clock.now}


def test_loading_without_overlap_holds_everything_up():
    fast, slow = (Run(adapters=[("a", 16, 100)], stream=stream) for stream in (True, False))
    for run in (fast, slow):
        run.add("x", 500, 2, "a")
        run.step()
    link = slow.executor.costs.link.seconds(100 * PAGE_BYTES)
    assert slow.executor.stalled_seconds == pytest.approx(link)
    assert fast.executor.stalled_seconds == pytest.approx(link / LAYERS)
    assert slow.clock.now - fast.clock.now == pytest.approx(link * (1 - 1 / LAYERS))


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_interrupts_decoding_unless_they_mix(stream):
    """CaraServe's Fig. 2: load, prefill, then decoding goes on; the newcomer's first token waits for no decode step."""
    run = Run(adapters=[("a", 16, 30)], stream=stream, mix=False)
    for index in range(4):
        run.add(f"r{index}", 100, 50)
    run.step()
    run.executor.horizon = run.clock.now  # a step at a time
    before = run.step()
    run.add("new", 20, 3, "a")
    told = {name: len(outputs) for name, outputs in run.outputs.items()}
    costs = run.executor.costs
    alone = costs.prefill_seconds(20, 16)
    link = costs.link.seconds(30 * PAGE_BYTES)
    stall = max(link / LAYERS, link + alone / LAYERS - alone) if stream else link
    assert run.step() == pytest.approx(alone + stall), "layers come under the prefill alone"
    assert run.outputs["new"] == [(run.clock.now, 1)]
    assert {name: len(outputs) for name, outputs in run.outputs.items()} == {**told, "new": 1}, "nobody else drew"
    after = run.step()
    expected = costs.step.seconds(StepWork(8, 5, 4 * 102 + 21, 101, 16, 16, 16))
    assert after == pytest.approx(expected), "a decode step of all five"
    assert after > before
    while run.engine.has_work():
        run.executor.horizon = float("inf")
        run.step()
    assert sorted(run.finished) == ["new", "r0", "r1", "r2", "r3"]
    run.engine.check_integrity()


@pytest.mark.wide
@settings(max_examples=30)
@given(arrivals=traces(), num_pages=st.sampled_from([20, 40, 120]), stream=st.booleans())
def test_prompts_apart_serve_the_same_requests(arrivals, num_pages, stream):
    """No step holds both; whoever decodes goes on after the prompts."""
    run = Run(
        adapters=ADAPTERS,
        stream=stream,
        mix=False,
        num_pages=num_pages,
        max_num_batched_tokens=48,
        max_model_len=190,
        max_num_seqs=16,
    )
    price, seen = run.executor.price, []

    def watched(plan):
        seen.append({len(row.tokens) > 1 for row in plan.sequences})
        return price(plan)

    run.executor.price = watched
    run.serve(arrivals)
    assert all(len(kinds) == 1 for kinds in seen)
    assert len(run.finished) == len(arrivals)


def test_a_step_begins_no_more_prompts_than_it_may():
    """Punica §5: one prompt together with the decode rows of a step; the others follow in the steps after it."""
    begun = {}
    for most in (None, 1, 2):
        run = Run(most_prompts=most)
        for index in range(4):
            run.add(f"r{index}", 20, 5)
        run.executor.horizon = run.clock.now
        while run.engine.has_work():
            run.step()
        times = [outputs[0][0] for outputs in run.outputs.values()]
        begun[most] = [times.count(time) for time in sorted(set(times))]
    assert begun == {None: [4], 1: [1, 1, 1, 1], 2: [2, 2]}


def test_a_step_has_no_more_rows_than_it_may_and_the_oldest_requests_take_them():
    """dLoRA's artifact: who gives way to others keeps its KV, and no row."""
    run = Run(most_rows=2, adapters=[("a", 8, 2), ("b", 8, 2)])
    for name, adapter in (("0", "a"), ("1", "b"), ("2", "b"), ("3", "a"), ("4", "b")):
        run.add(name, 4, 40, adapter)
        run.clock.now += 0.001
    run.executor.horizon = 0.0  # one step at a time
    scheduler = run.engine.scheduler

    def rows(only=None):
        scheduler.eligible_adapters = only and {scheduler.get(each).adapter for each in only}
        plan = run.engine.begin_step()
        assert plan is not None
        run.engine.end_step(plan)
        return sorted(row.request_id for row in plan.sequences)

    assert [rows() for _ in range(3)][1:] == [["0", "1"]] * 2
    assert rows(only="1") == ["1", "2"], "the first has given way"
    assert rows(only="1") == ["1", "2"]
    counts, oldest = scheduler.count_by_adapter(2)
    assert sum(counts.values()) == 5
    assert sum(oldest.values()) == len(oldest) == 2, "0 and 1, though 0 has no row"
    assert rows() == ["0", "1"], "2 gives way though it runs"
    assert run.engine.stats().num_running == 3
    scheduler.eligible_adapters = None
    while run.engine.has_work():
        plan = run.engine.begin_step()
        assert plan is None or len(plan.sequences) <= 2
        run.engine.end_step(plan)
    run.engine.check_integrity()


def test_older_requests_that_have_no_slot_keep_nobody_from_a_row():
    """Else nothing would ever run: who runs gives way to those that can't begin."""
    run = Run(most_rows=2, max_num_seqs=2, adapters=[("a", 8, 2), ("b", 8, 2)])
    for name, adapter in (("0", "a"), ("1", "a"), ("2", "b"), ("3", "b")):
        run.add(name, 4, 40, adapter)
        run.clock.now += 0.001
    run.executor.horizon = 0.0
    scheduler = run.engine.scheduler
    scheduler.eligible_adapters = {scheduler.get("2").adapter}
    run.engine.end_step(run.engine.begin_step())
    assert {request.id for request in scheduler.running} == {"2", "3"}
    scheduler.eligible_adapters = None
    plan = run.engine.begin_step()
    assert plan is not None and sorted(row.request_id for row in plan.sequences) == ["2", "3"]
    run.engine.end_step(plan)
    while run.engine.has_work():
        run.engine.end_step(run.engine.begin_step())


def test_a_prefetched_adapter_is_there_when_its_request_may_run():
    """The second request waits for the slot; its adapter comes during the first one's steps."""
    stalls = {}
    for prefetch in (0, 4):
        run = Run(adapters=[("a", 16, 100)], stream=False, max_num_seqs=1, prefetch=prefetch)
        run.serve([(0.0, "x", [3] * 100, 50, None), (0.0, "y", [4] * 100, 5, "a")])
        stalls[prefetch] = run.executor.stalled_seconds
        assert run.engine.store.num_hits == (1 if prefetch else 0), "loaded before its request was admitted"
    assert stalls[0] == pytest.approx(run.executor.costs.link.seconds(100 * PAGE_BYTES))
    assert stalls[4] == 0


def test_prefetching_evicts_nothing_that_is_waited_for():
    """Two of three adapters fit: the third is not loaded in place of one whose request comes before its own."""
    run = Run(adapters=[(name, 16, 30) for name in "abc"], stream=False, max_num_seqs=1, prefetch=8, num_pages=75)
    run.serve([(0.0, "x", [3] * 20, 50, None), *((0.0, name, [4] * 20, 5, name) for name in "abc")])
    store = run.engine.store
    assert (store.num_loads, store.num_hits, store.num_evictions) == (3, 3, 1), "each was loaded before its request"


def test_a_step_does_not_wait_longer_than_it_may():
    """The request whose adapter is late computes in vain, others don't notice but for the stall."""
    profile = PROFILE.model_copy(update={"link": terms(per_byte=0.5 / (10 * PAGE_BYTES))})
    run = Run(profile, adapters=[("a", 16, 10)], max_load_stall_seconds=0.02)
    x = run.add("x", 40, 4)
    run.step()
    run.add("y", 40, 4, "a")
    run.executor.horizon = run.clock.now
    costs = run.executor.costs
    assert run.step() == pytest.approx(costs.step.seconds(StepWork(41, 2, 81, 40, 16, 640, 16, 820, True)) + 0.02)
    assert x.num_output_tokens == 2
    assert run.outputs["y"] == []
    while not run.outputs["y"]:
        run.step()
    assert 0.5 < run.clock.now < 0.55
    assert run.finished["x"] < 0.2


def test_steps_beside_a_read_take_longer():
    run = Run(with_disk(latency=0.2, contention=0.25), adapters=[("a", 8, 2)], max_load_stall_seconds=0)
    run.add("base", 40, 40)
    run.step()
    alone = run.step()
    run.add("x", 40, 1, "a")
    longer, shares = 0.0, 0.0
    while run.engine.store.tier(run.engine.store.get("a")) is not Tier.HOST:
        before = run.clock.now
        if run.step() > alone * 1.1:
            longer += run.clock.now - before
            shares += 1
    assert shares * alone == pytest.approx(0.75 * longer, rel=0.1), "a quarter of their time is the read's"


def test_disk_reads_take_their_time_and_threads():
    run = Run(with_disk(latency=0.2), adapters=[(name, 8, 2) for name in "abc"], lookahead=3)
    for name in "abc":
        run.add(name, 10, 1, name)
    store = run.engine.store
    assert [store.tier(store.get(name)) for name in "abc"] == [Tier.LOADING] * 3
    while run.engine.has_work():
        run.step()
    assert 0.2 < run.finished["a"] < 0.25
    assert 0.2 < run.finished["b"] < 0.25
    assert 0.4 < run.finished["c"] < 0.45, "two threads read three adapters"
    run.add("again", 10, 1, "c")
    before = run.clock.now
    run.step()
    assert run.finished["again"] - before < 0.05


def test_a_host_image_that_was_dropped_is_read_again():
    run = Run(
        with_disk(latency=0.2), adapters=[(name, 8, 4) for name in "ab"], host_cache_bytes=5 * PAGE_BYTES, num_pages=8
    )
    for name in ("a", "b", "a"):
        before = run.clock.now
        run.add(f"{name}{before}", 10, 2, name)
        while run.engine.has_work():
            run.step()
        assert run.clock.now - before > 0.2
    assert run.engine.stats().num_adapter_loads == 3


def test_the_arena_is_the_profiles_unless_it_is_set():
    assert Run().executor.num_pages == PROFILE.memory_bytes.value // PAGE_BYTES
    assert Run(memory_bytes=100 * PAGE_BYTES).executor.num_pages == 100
    assert Run(num_pages=77).executor.num_pages == 77
    assert Run(max_model_len=100).executor.model.max_model_len == 100
    assert Run(max_model_len=10**6).executor.model.max_model_len == PROFILE.geometry.max_model_len


def test_an_unknown_adapter_is_refused():
    run = Run()
    with pytest.raises(AdapterFormatError, match="nobody: no such simulated adapter"):
        run.engine.store.register("nobody", MODEL.with_name("nobody"))


def test_the_simulator_imports_no_torch():
    code = """
import sys
from chorus.core.costs.profile import load_profile
from chorus.perf.simulate.adapters import SimAdapters
from chorus.perf.simulate.engine import simulated_engine
from chorus.perf.simulate.scheduler import SimRequest
from chorus.core.requests.request_params import RequestParams
profile = load_profile("h200-llama3.1-8b")
adapters = SimAdapters(profile.geometry, 16)
engine, _ = simulated_engine(profile, adapters)
engine.store.register("a", adapters.add("a", 16, profile.geometry.adapter_bytes(16)))
engine.add_request(SimRequest("r", [1] * 99, RequestParams(max_tokens=50, ignore_eos=True), "a"))
while engine.has_work():
    engine.step()
engine.check_integrity()
assert engine.stats().num_generated_tokens == 50
assert "torch" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_tenant_that_holds_the_pages_keeps_nobody_else_waiting():
    """Requests of 3,000 and 1,000 tokens fill the arena, with five more waiting, late or not. They once stopped
    admission for all, and a small tenant's first tokens took 10 s and more, whatever its weight and `max_turn_seconds`.
    """

    def slowest(num_large):
        config = EngineConfig(model=MODEL, prefix_cache=False, max_num_seqs=32, num_pages=1002)
        clock = VirtualClock()
        catalogue = SimAdapters(PROFILE.geometry, 16)
        engine, executor = simulated_engine(PROFILE, catalogue, config, clock)

        first: dict[str, float] = {}
        sent: dict[str, float] = {}

        def add(name, tokens, count, tenant):
            params = RequestParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            request = SimRequest(name, [1] * tokens, params, None, clock.now)
            request.tenant = tenant
            engine.add_request(request)

        for index in range(num_large):
            add(f"large {index}", 3000, 1000, "large")
        due = [(1.0 + index, f"small {index}") for index in range(30)]
        while due or any(name not in first for name in sent):
            while due and due[0][0] <= clock.now:
                when, name = due.pop(0)
                sent[name] = when
                add(name, 30, 10, "small")
            executor.horizon = due[0][0] if due else float("inf")
            if not engine.has_work():
                clock.now = due[0][0]
                continue
            for output in engine.step():
                first.setdefault(output.request_id, clock.now)
        return max(first[name] - sent[name] for name in sent)

    assert slowest(0) < 0.1
    assert slowest(9) < 1.0
