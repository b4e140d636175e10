"""Heavy grammars next to other requests: by an injected clock, on which only grammars take time."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from chorus.core.requests.grammar_work import GrammarState, GrammarWork
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.scheduling.step_time import ALONE_SECONDS, LEAST_SECONDS, MAX_DEBT, GrammarBudget
from chorus.server.demo.builtin import BUILTIN_MODEL

STEP = 2e-3
"""Seconds of a step without grammars: the budget is `LEAST_SECONDS`."""


class Clock:
    """Time that goes by when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def request(name: str, tenant: str = "") -> Request:
    found = Request(name, [1], RequestParams())
    found.fairness_key = tenant
    return found


class Steps:
    """Steps of requests, of which some have heavy grammars."""

    def __init__(self, costs: dict[Request, float], others: int = 1, threads: int = 1) -> None:
        self.clock, self.costs, self.threads = Clock(), costs, threads
        self.budget = GrammarBudget(self.clock, threads)
        self.others = [request(f"other{index}") for index in range(others)]
        self.taken: Counter[str] = Counter()
        self.spent: list[float] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            candidates = [*self.costs, *self.others]
            chosen = self.budget.choose(candidates) or candidates
            assert set(self.others) <= set(chosen), "a step left out a request without a heavy grammar"
            assert chosen == [each for each in candidates if each in chosen]
            costs = {each: cost for each, cost in self.costs.items() if each in chosen}
            self.taken.update(each.id for each in costs)
            self.spent.append(max(max(costs.values(), default=0), sum(costs.values()) / self.threads))
            self.clock.now += STEP + self.spent[-1]
            self.budget.note(costs)


def test_heavy_grammars_take_the_budget_and_no_more():
    steps = Steps({request(f"heavy{index}"): 6e-3 for index in range(16)})
    steps.run(1)
    assert steps.spent == [pytest.approx(16 * 6e-3)], "nothing is known of them before their first token"
    steps.run(MAX_DEBT)
    steps.taken.clear()
    steps.spent.clear()
    steps.run(960)
    assert max(steps.spent) == 6e-3, "one a step, as one is more than the budget"
    assert sum(steps.spent) / len(steps.spent) == pytest.approx(LEAST_SECONDS, rel=0.05)
    assert set(steps.taken.values()) <= {9, 10, 11}, "they take turns"


def test_threads_compute_as_many_as_fit():
    steps = Steps({request(f"heavy{index}"): 5e-4 for index in range(16)}, threads=4)
    steps.run(200)
    assert steps.spent[-100:] == pytest.approx([LEAST_SECONDS] * 100)
    assert steps.taken["heavy0"] - steps.taken["heavy15"] <= 1


def test_tenants_take_turns_whatever_their_number_of_requests():
    steps = Steps({request(f"many{index}", "many"): 1e-3 for index in range(15)} | {request("one", "one"): 1e-3})
    steps.run(1000)
    many = sum(count for name, count in steps.taken.items() if name != "one")
    assert steps.taken["one"] == pytest.approx(many, rel=0.05)


def test_a_longer_step_has_room_for_more():
    steps = Steps({request(f"heavy{index}"): 1e-3 for index in range(16)})
    steps.clock.now = 1.0
    for _ in range(20):
        steps.clock.now += 20e-3
        steps.budget.note(dict.fromkeys(steps.costs, 1e-3))
    assert steps.budget.seconds == pytest.approx(0.4 * (20e-3 - 16e-3))
    for _ in range(20):
        steps.clock.now += 20e-3
        steps.budget.note({})
    assert steps.budget.seconds == pytest.approx(8e-3)


def test_without_other_requests_steps_stay_short_for_those_who_come():
    steps = Steps({request(f"heavy{index}"): 2e-3 for index in range(16)}, others=0)
    steps.run(100)
    assert steps.spent[1:] == pytest.approx([2 * 2e-3] * 99) and ALONE_SECONDS >= 2 * 2e-3
    assert max(steps.taken.values()) - min(steps.taken.values()) <= 1


def test_requests_that_end_or_become_light_are_forgotten():
    one, two = request("one"), request("two")
    steps = Steps({one: 6e-3, two: 6e-3})
    steps.run(3)
    assert steps.budget.heavy
    one.finish_reason = "stop"
    steps.budget.note({two: 0.0})
    assert not steps.budget.heavy and steps.budget.choose([one, two, *steps.others]) is None


class TestInAnEngine:
    """Reported costs, as an executor would report them; tokens don't depend on them."""

    @pytest.fixture(params=[False, True], ids=["", "ahead"])
    def ahead(self, request):
        return request.param

    @pytest.fixture
    def kernels(self):
        return "torch"

    def test_a_neighbour_is_in_every_step_and_all_answers_stay_the_same(self, subject, drive):
        gqa = subject("gqa")
        names = [f"heavy{index}" for index in range(6)]
        prompts = {name: [5, 9, 11 + index] for index, name in enumerate([*names, "neighbour"])}
        driver = drive(gqa)
        update = driver.engine.scheduler.update

        def slow(plan, result):
            result.grammar_seconds = {name: 2e-2 for name in result.tokens if name in names}
            return update(plan, result)

        driver.engine.scheduler.update = slow
        for name in names:
            driver.add(name, "r1-all", prompts[name], max_tokens=6)
        driver.add("neighbour", None, prompts["neighbour"], max_tokens=40)
        answers = driver.drain()
        for name in prompts:
            adapter, most = (None, 40) if name == "neighbour" else ("r1-all", 6)
            assert answers[name].tokens == gqa.greedy(adapter, prompts[name], most)
        rows = [[row.request_id for row in plan.sequences] for plan in driver.plans]
        last = max(index for index, ids in enumerate(rows) if "neighbour" in ids)
        assert all("neighbour" in ids for ids in rows[: last + 1])
        assert all(len(ids) <= 2 for ids in rows[3 : last + 1]), "more than one heavy grammar in a step"
        assert not driver.engine.scheduler.grammars.heavy or not driver.engine.has_work()


class SlowWork(GrammarWork):
    """Whose masks of ordinary requests take a time by the clock."""

    seconds = 0.1

    def compute(self, matchers, masks):
        super().compute(matchers, masks)
        self.time.now += self.seconds


class TestMeasuring:
    """The times of grammars that `GrammarWork` reports."""

    @pytest.fixture
    def tokenizer(self):
        return LLTokenizer((BUILTIN_MODEL / "tokenizer.json").read_text(), n_vocab=259, eos_token=[0])

    @pytest.fixture
    def work(self, tokenizer):
        times = iter([0, 1, 0, 1e-5, 0, 1e-5, 0, 1e-5])  # before and after each mask that is measured
        clock, spare = Clock(), LLMatcher(tokenizer, "", log_level=0)
        work = SlowWork(LLExecutor(1), 1, 9, spare, clock, lambda: next(times))
        work.time = clock
        return work

    def places(self, tokenizer, count):
        grammar = LLMatcher(tokenizer, LLMatcher.grammar_from_regex("[a-z]{1,99}"))
        return [GrammarState(grammar.deep_copy()) for _ in range(count)]

    def test_slow_steps_are_measured_one_by_one_until_they_are_quick_again(self, work, tokenizer):
        places = self.places(tokenizer, 3)
        want = work.masks(places)
        assert all(place.is_watched and not place.seconds for place in places)
        assert np.array_equal(work.masks(places), want)
        assert [(place.is_watched, place.seconds) for place in places] == [(True, 2), (False, 0), (False, 0)]
        work.seconds = 0.0
        assert np.array_equal(work.masks(places), want)
        assert [(place.is_watched, place.seconds) for place in places] == [(False, 0)] * 3

    def test_tokens_are_consumed_wherever_masks_are_computed(self, work, tokenizer):
        places, (alone,) = self.places(tokenizer, 2), self.places(tokenizer, 1)
        allowed = np.unpackbits(work.masks([alone])[0].view(np.uint8), bitorder="little")
        tokens = [int(np.flatnonzero(allowed)[0])] * 5
        alone.matcher.consume_tokens(tokens)
        for place in places:
            place.pending += tokens
        places[1].is_watched = True
        masks = work.masks(places)
        assert np.array_equal(masks[0], masks[1]) and np.array_equal(masks[:1], work.masks([alone]))
        assert not any(place.pending for place in places)
