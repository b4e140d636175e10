"""Choices of one request next to other requests: no long waits, nothing is lost, and a neighbour keeps its rate."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import StepResult
from chorus.core.scheduling.queues import Running, WaitingQueue
from chorus.core.scheduling.step_time import LONGEST_STEP, MAX_DEBT, NUM_SAMPLES, SHARE, ChoiceBudget
from chorus.perf.bench.schedule_time import FakeExecutor

pytestmark = pytest.mark.wide

MAX_ROWS = 64


class Clock:
    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


def make_running(sizes, num_lone):
    running = Running()
    for call, size in enumerate(sizes):
        for index in range(size):
            running.append(Request(f"{call}-{index}", [1], RequestParams(), choice_group=f"call {call}"))
    for index in range(num_lone):
        running.append(Request(f"lone {index}", [1], RequestParams()))
    return running


@pytest.mark.wide
@given(
    sizes=st.lists(st.integers(2, 40), min_size=1, max_size=4),
    num_lone=st.integers(0, 6),
    fixed=st.sampled_from([0.0, 1.0, 10.0]),
    each=st.sampled_from([0.0, 0.01, 1.0, 30.0]),
    is_async=st.booleans(),
)
@settings(max_examples=25)
def test_everybody_has_turns_and_none_is_lost(sizes, num_lone, fixed, each, is_async):
    running, clock = make_running(sizes, num_lone), Clock()
    under_way = 0.0
    everybody, order = set(running), list(running)
    shares, waiting = ChoiceBudget(MAX_ROWS, clock), WaitingQueue()
    last: dict[Request, int] = defaultdict(int)
    smallest = [] if num_lone else [size for size in sizes if size == min(sizes)]  # groups that always run whole
    most = max(MAX_ROWS, sum(smallest) + (smallest != sizes))  # the scheduler chooses among more
    bound, longest = 2 * len(running) * (MAX_DEBT / SHARE + 2), 0
    for step in range(1, min(3000, int(1.2 * bound) + 100)):
        chosen = shares.choose(running, waiting, is_async=is_async)
        taking_part = running if chosen is None else chosen
        assert len(set(taking_part)) == len(taking_part) <= most or chosen is None
        assert set(taking_part) >= set(running.single_requests)
        for request in taking_part:
            longest = max(longest, step - last[request])
            last[request] = step
        took = fixed + each * len(taking_part)
        clock.now += under_way if is_async else took
        under_way = took
    assert max(longest, *(step - last[request] for request in running)) <= bound, "a request starves"
    assert list(running) == order
    assert {
        *running.single_requests,
        *(one for members in running.choice_groups.values() for one in members),
    } == everybody


@given(st.integers(2, MAX_ROWS), st.floats(0, 10))
def test_a_call_that_is_alone_runs_whole(size, seconds):
    running, clock = make_running([size], 0), Clock()
    shares = ChoiceBudget(MAX_ROWS, clock)
    for _ in range(100):
        assert shares.choose(running, WaitingQueue()) is None
        clock.now += seconds


def test_where_rows_cost_nothing_everybody_runs():
    running, clock = make_running([40], 3), Clock()
    shares = ChoiceBudget(MAX_ROWS, clock)
    taking_part = []
    for _ in range(1000):
        chosen = shares.choose(running, WaitingQueue())
        taking_part.append(len(running if chosen is None else chosen))
        clock.now += 1.0
    assert sum(taking_part[500:]) > 0.98 * 500 * len(running)


def test_steps_that_compute_prompts_are_no_measure():
    running, clock = make_running([40], 1), Clock()
    shares, waiting = ChoiceBudget(MAX_ROWS, clock), WaitingQueue()
    for _ in range(100):
        shares.choose(running, waiting)
        clock.now += 1.0
    for _ in range(100):
        shares.choose(running, waiting)
        shares.ignore()
        clock.now += 50.0
    taking_part = 0
    for _ in range(100):
        chosen = shares.choose(running, waiting)
        taking_part += len(running if chosen is None else chosen)
        clock.now += 1.0
    assert taking_part > 0.9 * 100 * len(running)


def test_a_pause_of_the_machine_keeps_nobody_waiting_for_long():
    running, clock = make_running([40], 1), Clock()
    shares, waiting = ChoiceBudget(MAX_ROWS, clock), WaitingQueue()
    without = 0
    for step in range(2000):
        chosen = shares.choose(running, waiting)
        without += chosen is not None and len(chosen) == 1
        clock.now += 1e6 if step == 500 else 1.0
    assert without <= MAX_DEBT / SHARE + 2 * NUM_SAMPLES + 20


def test_calls_of_as_many_answers_all_run():
    running, clock = make_running([16, 16], 0), Clock()
    shares = ChoiceBudget(MAX_ROWS, clock)
    for _ in range(100):
        assert shares.choose(running, WaitingQueue()) is None
        clock.now += len(running)


@pytest.mark.parametrize("is_async", [False, True])
def test_no_step_is_much_longer_than_one_without_the_larger_calls(is_async):
    running, clock = make_running([60], 1), Clock()
    shares = ChoiceBudget(MAX_ROWS, clock)
    sizes = [1]
    for _ in range(2000):
        chosen = shares.choose(running, WaitingQueue(), is_async=is_async)
        sizes.append(len(running if chosen is None else chosen))
        clock.now += 1.0 + 0.5 * sizes[-1 - is_async]
    assert max(sizes[500:]) > 1
    assert 1.0 + 0.5 * max(sizes[500:]) <= (1 + LONGEST_STEP) * 1.5


class PricedExecutor(FakeExecutor):
    """Steps take time: so much each, and so much per row. Keeps who took part in them."""

    def __init__(self, clock, fixed, each):
        super().__init__(num_pages=4000)
        self.clock, self.fixed, self.each = clock, fixed, each
        self.steps = []

    def execute(self, plan):
        self.clock.now += self.fixed + self.each * plan.num_tokens
        self.steps.append([row.request_id for row in plan.sequences])
        return super().execute(plan)


class PricedDevice(PricedExecutor):
    """Steps take this time one after another, from their launch on, while the host continues."""

    def __init__(self, clock, fixed, each):
        super().__init__(clock, fixed, each)
        self.free_at, self.num_ahead = 0.0, 0
        self.start = self.launch

    def launch(self, plan):
        launched = self.clock.now
        self.clock.now = max(launched, self.free_at)
        result = self.execute(plan)
        self.clock.now, self.free_at = launched, self.clock.now
        self.num_ahead += plan.sources is not None
        return PricedStep(self.clock, self.free_at, result)


@dataclass
class PricedStep:
    clock: Clock
    ends_at: float
    outcome: StepResult

    def sample(self):
        pass

    def result(self):
        self.clock.now = max(self.clock.now, self.ends_at)
        return self.outcome


def make_engine(fixed, each, slots=32, is_async=False):
    clock = Clock()
    executor = (PricedDevice if is_async else PricedExecutor)(clock, fixed, each)
    config = EngineConfig(model=Path("none"), max_num_seqs=slots, num_pages=4000, max_waiting=None)
    return Engine(config, executor, clock=clock), executor, clock


def request(name, max_tokens, choice_group=""):
    return Request(
        name, [1, 2], RequestParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True), choice_group=choice_group
    )


@pytest.mark.parametrize(("fixed", "each"), [(1.0, 0.2), (1.0, 0.02), (1.0, 2.0), (0.1, 1.0)])
@pytest.mark.parametrize("count", [8, 31, 128])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_neighbour_keeps_half_of_its_rate_beside_many_answers_of_one_call(fixed, each, count, is_async):
    engine, executor, clock = make_engine(fixed, each, is_async=is_async)
    for index in range(count):
        engine.add_request(request(f"many {index}", 2000, choice_group="many"))
    for _ in range(5):
        engine.step()
    engine.add_request(request("neighbour", 1000))
    while not engine.scheduler.get("neighbour").num_output_tokens:
        engine.step()
    for _ in range(200):  # until the cost of turns has been measured
        engine.step()
    began, before = clock.now, engine.scheduler.get("neighbour").num_output_tokens
    for _ in range(500):
        engine.step()
    rate = (engine.scheduler.get("neighbour").num_output_tokens - before) / (clock.now - began)
    assert rate * (fixed + each) > 0.5
    assert not is_async or executor.num_ahead > 690, "steps were not ahead"


@pytest.mark.parametrize("is_async", [False, True])
def test_prompts_of_a_larger_call_are_charged_to_it(is_async):
    """Its answers are short: in most steps one ends, and the prompt of another is computed in the next."""
    fixed, each = 1.0, 0.2
    engine, _executor, clock = make_engine(fixed, each, slots=32, is_async=is_async)
    engine.add_request(request("neighbour", 4000))
    engine.step()
    for index in range(1000):
        engine.add_request(request(f"many {index}", 1 + index % 3, choice_group="many"))
    began, before = clock.now, engine.scheduler.get("neighbour").num_output_tokens
    for _ in range(300):
        engine.step()
    rate = (engine.scheduler.get("neighbour").num_output_tokens - before) / (clock.now - began)
    assert engine.stats().num_running > 1
    assert rate * (fixed + each) > 0.5


@pytest.mark.parametrize("is_async", [False, True])
def test_a_new_call_has_a_place_though_one_call_has_all_slots(is_async):
    engine, executor, _ = make_engine(1.0, 0.0, slots=4, is_async=is_async)
    for index in range(10):
        engine.add_request(request(f"many {index}", 50, choice_group="many"))
    for _ in range(3):
        engine.step()
    assert engine.stats().num_running == 4
    for index in range(2):
        engine.add_request(request(f"new {index}", 5))
    for _ in range(12):
        engine.step()
    assert {"new 0", "new 1"} <= {name for step in executor.steps[3:8] for name in step}
    assert max(map(len, executor.steps)) <= 4
    while engine.has_work():
        engine.step()
    engine.check_integrity()
    assert sum(len(step) for step in executor.steps) == 10 * 50 + 2 * 5


def test_a_call_that_comes_anew_has_one_place_beyond_the_slots():
    engine, _executor, _ = make_engine(1.0, 0.0, slots=4)
    for call in ("one", "two"):
        for index in range(6):
            engine.add_request(request(f"{call} {index}", 50, choice_group=call))
        for _ in range(4):
            engine.step()
    running = engine.scheduler.running
    assert {call: len(members) for call, members in running.choice_groups.items()} == {"one": 4, "two": 1}


@pytest.mark.parametrize("adapter", [None, "r1-all"])
def test_answers_that_take_turns_are_those_that_each_gives_alone(subject, drive, adapter):
    clock = Clock()

    def take_time(plan):
        clock.now += len(plan.sequences)

    driver = drive(subject("gqa"), max_num_seqs=8, clock=clock, before=take_time)
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    asked = [{"temperature": 1.0, "seed": seed, "logprobs": 2, "max_tokens": 20, **penalties} for seed in range(7)]
    prompt = [5, 6, 7, 8]
    alone = [told(driver.run(f"alone {i}", adapter, prompt, **params)) for i, params in enumerate(asked)]
    seen = len(driver.plans)
    driver.add("neighbour", None, [9, 10], max_tokens=60)
    for index, params in enumerate(asked):
        driver.add(f"r{index}", adapter, prompt, choice_group="call", **params)
    answers = driver.drain()
    assert [told(answers[f"r{index}"]) for index in range(7)] == alone
    sizes = {len(plan.sequences) for plan in driver.plans[seen + 2 : seen + 40]}
    assert len(sizes & {2, 3, 4, 5, 6, 7}) > 0, "nobody sat out"


def told(answer):
    """An answer without its log-probabilities, whose last bits may depend on the other rows of a step."""
    return answer.tokens, answer.finish_reason, [score.token_id for score in answer.logprobs]


@pytest.mark.parametrize("is_async", [False, True])
def test_time_without_calls_is_charged_to_no_later_call(is_async):
    engine, executor, _ = make_engine(1.0, 0.01, is_async=is_async)
    engine.add_request(request("neighbour", 4000))
    for call, count in (("one", 60), ("two", 60)):
        for index in range(4):
            engine.add_request(request(f"{call} {index}", count, choice_group=call))
        while len(engine.scheduler.running) < 5:
            engine.step()
        begun = len(executor.steps)
        while len(engine.scheduler.running) > 1:
            engine.step()
        for _ in range(300):
            engine.step()
    taken = sum(name.startswith("two") for step in executor.steps[begun : begun + 80] for name in step)
    assert taken == 4 * 59
