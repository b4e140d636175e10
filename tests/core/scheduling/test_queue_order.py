"""Resident first, then first come first served, and nobody is overtaken for longer than agreed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.core.config import EngineConfig
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.scheduling import queue_order
from chorus.core.scheduling.queue_order import QueueOrder, SomeTurns, Turns
from chorus.core.scheduling.queues import WaitingQueue
from chorus.core.scheduling.service import TokenCounters
from chorus.memory.adapters.adapter import Tier

from ...simulation.checked_engine import CheckedEngine

RANK = {None: 0, Tier.DEVICE: 0, Tier.HOST: 1, Tier.LOADING: 1, Tier.FAILED: 1}


class FakeAdapter:
    def __init__(self, where: Tier) -> None:
        self.where, self.is_slow = where, False
        self.pages = [1] if where is Tier.DEVICE else []


class FakeStore:
    def near(self, adapters):
        here = [each for each in adapters if each is not None]
        near = Tier.LOADING, Tier.HOST, Tier.FAILED
        return [each for each in here if each.pages], [each for each in here if each.where in near and not each.is_slow]


def waiting(*tiers, tenants=None):
    """Requests in order of arrival, one a second from 0 on, each with an adapter of its own; None: the base model."""
    queue = WaitingQueue()
    for second, tier in enumerate(tiers):
        tenant = "" if tenants is None else tenants[second]
        request = Request(str(second), [5] * 10, RequestParams(), arrival_time=float(second))
        request.fairness_key = tenant
        request.adapter = None if tier is None else FakeAdapter(tier)
        queue.append(request)
    return queue


def request_of(tenant):
    """A request that costs as much as it has tokens."""
    request = Request("x", [5] * 100_000, RequestParams())
    request.fairness_key = tenant
    return request


def turns_of(queue, policy=None, **limits):
    """Turns of those that wait, at second 100 and step 7, since when they do."""
    turns = Turns(EngineConfig(model=Path("fake"), **limits), queue, (policy or TokenCounters()).standing)
    turns.restart(100.0, 7)
    return turns


def order(queue, overdue_before=0.0, policy=None, charge=0):
    """Ids as they are considered when each can be admitted at once."""
    policy = policy or TokenCounters()
    found, candidates = [], QueueOrder(queue, turns_of(queue, policy), FakeStore(), overdue_before=overdue_before)
    while (request := candidates.next()) is not None:
        found.append(int(request.id))
        queue.remove(request)
        candidates.advance()
        if charge:
            policy.charge(request, charge)
    return found


def test_resident_then_on_their_way_without_the_cold():
    requests = waiting(Tier.DISK, Tier.LOADING, Tier.DEVICE, Tier.HOST, None, Tier.DISK, Tier.DEVICE)
    assert order(requests) == [2, 4, 6, 1, 3]


def test_a_read_that_takes_long_is_not_looked_at_before_it_has_ended():
    """There may be any number of them, and every step looks for candidates."""
    requests = waiting(Tier.LOADING, Tier.LOADING, Tier.HOST)
    next(iter(requests)).adapter.is_slow = True
    assert order(requests) == [1, 2]


@pytest.mark.parametrize(
    ("overdue_before", "want"),
    [(0.0, [2, 3, 1]), (0.5, [2, 3, 1]), (1.5, [1, 2, 3]), (9.0, [1, 2, 3])],
)
def test_overdue_requests_go_first_in_order_of_arrival(overdue_before, want):
    assert order(waiting(Tier.DISK, Tier.HOST, Tier.DEVICE, None), overdue_before) == want


@given(st.lists(st.none() | st.sampled_from(list(Tier)), max_size=12), st.floats(-1, 13))
def test_order_is_a_stable_sort_by_class(tiers, overdue_before):
    def key(index):
        return -1 if index < overdue_before else RANK[tiers[index]]

    may = [index for index, tier in enumerate(tiers) if tier is not Tier.DISK]
    assert order(waiting(*tiers), overdue_before) == sorted(may, key=key)


def test_tenants_take_turns_by_the_work_that_each_was_given():
    queue = waiting(*[None] * 8, tenants=["many"] * 6 + ["few"] * 2)
    assert order(queue, charge=10) == [0, 6, 1, 7, 2, 3, 4, 5]


def test_an_tenant_that_has_waited_too_long_has_a_turn_whatever_it_was_given():
    queue = waiting(*[None] * 6, tenants=["a", "a", "b", "b", "c", "c"])
    policy = TokenCounters()
    for tenant, cost in (("a", 1), ("b", 2), ("c", 1000)):
        policy.arrive(tenant, (), None)
        policy.charge(request_of(tenant), cost)
    turns = turns_of(queue, policy)
    for tenant, since in (("c", 93.0), ("b", 94.0), ("a", 100.0)):
        turns.record_turn(tenant, since, 7)
    turns.restart(104.5, 7)
    candidates = QueueOrder(queue, turns, FakeStore(), overdue_before=0.0)
    found = []
    while (request := candidates.next()) is not None:
        found.append(int(request.id))
        assert candidates.turns.is_overdue == (len(found) <= 2)
        queue.remove(request)
        candidates.advance()
        turns.record_turn(request.fairness_key, 104.5, 7)
    assert found == [4, 2, 0, 1, 3, 5], "one turn each, who has waited longest first"


@pytest.mark.parametrize(("seconds", "steps"), [(5.0, 0), (0.0, 50)])
def test_turns_are_awaited_for_so_many_seconds_or_steps(seconds, steps):
    turns = turns_of(waiting(None, None, tenants="ab"), max_turn_seconds=5, max_turn_steps=50)

    def late(now, step):
        turns.restart(now, step)
        found = []
        while (tenant := turns.top()) is not None and turns.is_overdue:
            found.append(tenant)
            turns.pass_over()
        return found

    assert late(100.0 + 0.99 * seconds, 7 + steps - bool(steps)) == []
    assert late(100.0 + seconds, 7 + steps) == ["a", "b"]
    assert late(100.0 + seconds, 7 + steps) == ["a", "b"], "who was passed over is looked at again"
    turns.record_turn("a", 100.0 + seconds, 7 + steps)
    assert late(100.0 + seconds, 7 + steps) == ["b"]


@given(
    st.lists(st.tuples(st.sampled_from("++++-^<>.|"), st.integers(0, 9), st.sampled_from("abcdef"), st.integers(1, 50)))
)
def test_the_least_standing_of_those_that_wait_is_that_of_looking_at_each(changes):
    """While requests come, begin, come back, are held back and let go, and tenants are passed over."""
    queue, policy = WaitingQueue(), TokenCounters()
    turns = turns_of(queue, policy)
    running, held = [], []

    def come(request, add):
        if request.fairness_key not in queue.tenants:
            want = min(map(policy.standing, queue.tenants), default=None)
            assert turns.least(100.0, 7) == want
            policy.arrive(request.fairness_key, queue.tenants, want)
        add(request)

    for what, index, tenant, cost in changes:
        shown = [request for request in queue if request not in held]
        if what == "+":
            come(request_of(tenant), queue.append)
        elif what == "-" and shown:
            request = shown[index % len(shown)]
            queue.remove(request)
            policy.charge(request, cost)
            running.append(request)
        elif what == "^" and running:
            request = running.pop(index % len(running))
            request.num_computed_tokens = cost
            policy.settle(request)
            turns.note(request.fairness_key)
            if cost % 2:
                come(request, queue.append_first)
        elif what == "<" and shown:
            held.append(shown[index % len(shown)])
            queue.hold_back(held[-1])
        elif what == ">" and held:
            queue.release(held.pop())
        elif what == ".":
            turns.restart(100.0, 7)
        elif what == "|" and turns.top() is not None:
            turns.pass_over()
    assert turns.least(100.0, 7) == min(map(policy.standing, queue.tenants), default=None)


def test_turns_forget_tenants_that_wait_no_more():
    queue = waiting(None, tenants=["other"])
    turns = turns_of(queue)
    for index in range(2_000):
        request = request_of(str(index))
        queue.append(request)
        turns.record_turn(str(index), 100.0 + index, index)
        turns.restart(100.0 + index, index)
        assert turns.top()
        turns.pass_over()
        queue.remove(request)
    assert max(len(each) for each in vars(turns).values() if hasattr(each, "__len__")) < 200


def test_a_group_that_cannot_run_is_passed_over_whole():
    queue = waiting(Tier.HOST, None, Tier.HOST)
    candidates = QueueOrder(queue, turns_of(queue), FakeStore(), overdue_before=0.0)
    assert candidates.next().id == "1"
    candidates.pass_over()
    assert candidates.next().id == "0"
    candidates.pass_over()
    assert candidates.next().id == "2"
    candidates.pass_over()
    assert candidates.next() is None


@given(
    st.lists(
        st.tuples(st.sampled_from("++-^<>"), st.integers(0, 9), st.sampled_from("ab"), st.sampled_from(["", "c"])),
        max_size=60,
    )
)
def test_the_queue_is_that_of_its_changes(changes):
    """Requests come, leave, come back before all that have not run, are held back and let go."""
    queue, model, held, known = WaitingQueue(), [], [], 0
    came_back = set()
    for what, index, tenant, call in changes:
        if what == "+":
            known += 1
            request = Request(str(known), [1], RequestParams(), tenant=tenant, choice_group=call)
            queue.append(request)
            model.append(request)
        elif model and what in "-^":
            request = model.pop(index % len(model))
            queue.remove(request)
            held = [other for other in held if other is not request]
            if what == "^":
                queue.append_first(request)
                came_back.add(request)
                model.append(request)
                model.sort(key=lambda other: (other not in came_back, int(other.id)))
        elif model and what == "<":
            request = model[index % len(model)]
            queue.hold_back(request)
            held = [other for other in held if other is not request] + [request]
        elif held:
            queue.release(held.pop(index % len(held)))
        assert list(queue) == model
        assert len(queue) == len(model)
        groups = [group for groups in queue.tenants.values() for group in groups.values()]
        shown = [request for group in groups for request in group]
        lines = [line for group in groups for line in (group, group.first_choices)]
        assert all(list(line) == [it for it in model if it in line] for line in lines)
        assert sorted(map(id, shown)) == sorted(id(request) for request in model if request not in held)
        assert all(groups)
        assert all(list(group.first_choices) == [it for it in group if not it.is_later_choice] for group in groups)
        assert queue.has_first_choices() == any(not request.is_later_choice for request in shown)


class TestEngine:
    """The order as an engine keeps it, over real adapters and a clock that the test turns."""

    @pytest.fixture
    def gqa(self, subject):
        return subject("gqa")

    def started(self, driver):
        """Request ids in the order in which they were first scheduled."""
        return list(dict.fromkeys(row.request_id for plan in driver.plans for row in plan.sequences))

    def make(self, gqa, drive, now, **config):
        """One slot, taken by a request of `r1-all`, which stays resident."""
        driver = drive(gqa, clock=lambda: now[0], max_num_seqs=1, **config)
        driver.add("first", "r1-all", [5] * 4, max_tokens=2)
        driver.step()
        return driver

    def test_resident_adapters_overtake_cold_ones(self, gqa, drive):
        driver = self.make(gqa, drive, [1.0], host_cache_bytes=0, lookahead=1)
        for name, adapter in (("cold", "r2-qv"), ("warm-1", "r1-all"), ("base", None), ("warm-2", "r1-all")):
            driver.add(name, adapter, [6] * 4, max_tokens=2)
        driver.drain()
        assert self.started(driver) == ["first", "warm-1", "base", "warm-2", "cold"]

    def test_overtaking_ends_in_time(self, gqa, drive):
        now = [1.0]
        driver = self.make(gqa, drive, now, max_overtake_seconds=3.0)
        driver.add("cold", "r2-qv", [6] * 4, max_tokens=2)
        for index in range(8):
            driver.add(f"warm-{index}", "r1-all", [6] * 4, max_tokens=2)
            driver.step()
            driver.step()
            now[0] += 1.0
        driver.drain()
        place = self.started(driver).index("cold")
        assert 3 <= place <= 5, "overtaken for 3 seconds, a request of 2 steps a second"

    def test_without_overtaking_it_is_first_come_first_served(self, gqa, drive):
        now = [1.0]
        driver = self.make(gqa, drive, now, max_overtake_seconds=0.0)
        names = ["cold", "warm-1", "colder", "warm-2"]
        for name, adapter in zip(names, ("r2-qv", "r1-all", "r5-ko", "r1-all"), strict=True):
            driver.add(name, adapter, [6] * 4, max_tokens=2)
            now[0] += 0.001
        driver.drain()
        assert self.started(driver) == ["first", *names]

    @pytest.mark.parametrize("most", [1, 2])
    def test_no_more_adapters_run_at_once_than_agreed(self, gqa, drive, most):
        driver = drive(gqa, max_adapters_per_step=most)
        for index in range(12):
            driver.add(str(index), list(gqa.adapters)[index % 4], [6] * 4, max_tokens=5)
        driver.add("base", None, [6] * 4, max_tokens=5)
        driver.drain()
        assert max(plan.num_adapters for plan in driver.plans) == most
        assert {row.request_id for row in driver.plans[0].sequences} >= {"base", "0"}, "the base model is no adapter"


@pytest.mark.wide
@given(
    popular=st.lists(st.integers(1, 6), min_size=20, max_size=40),
    rare=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3)), min_size=1, max_size=4),
    max_num_seqs=st.integers(1, 3),
    max_adapters=st.sampled_from([None, 1]),
    max_overtake=st.sampled_from([0.0, 0.05, 0.2]),
    host_pages=st.sampled_from([0, 2, 100]),
)
@settings(max_examples=20)
def test_nobody_starves(popular, rare, max_num_seqs, max_adapters, max_overtake, host_pages):
    """Requests of a resident adapter come faster than they are served: once its time is up and its adapter is here,
    nobody who came later starts before a cold one. Where adapters take turns, nobody of its own adapter does.
    """
    checked = CheckedEngine(
        None,
        "0123",
        num_pages=60,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=40,
        prefix_cache=True,
        max_adapters_per_step=max_adapters,
        max_overtake_seconds=max_overtake,
        lookahead=1,
        seed=1,
        host_cache_bytes=host_pages * 256,
    )
    engine, clock, asked = checked.engine, checked.clock, checked.asked
    started: dict[str, float] = {}
    here: dict[str, float] = {}  # since when each one's adapter has been in memory
    for step in range(1000):
        if step < len(popular):
            checked.add(f"popular-{step}", "0", max_tokens=popular[step])
        for index, (when, adapter) in enumerate(rare):
            if when == step:
                checked.add(f"rare-{index}", str(adapter), max_tokens=2)
        scheduled = clock.now
        for name, it in asked.items():
            if engine.store.tier(it.adapter) in (Tier.DEVICE, Tier.HOST):
                here.setdefault(name, scheduled)
            elif name not in started:
                here.pop(name, None)
        checked.step()
        for request in engine.scheduler.running:
            started.setdefault(request.id, scheduled)
        for name, it in asked.items():
            if it.told.tokens:
                started.setdefault(name, scheduled)
        clock.now += 0.01
    assert not engine.has_work()
    assert started.keys() == asked.keys()
    for name, it in asked.items():
        arrival = it.request.arrival_time
        since = max(arrival + max_overtake, here[name])
        rivals = [other for other, e in asked.items() if max_adapters is None or e.adapter is it.adapter]
        overtakers = [
            other
            for other in rivals
            if asked[other].request.arrival_time > arrival and since < started[other] < started[name]
        ]
        assert not overtakers, name


@pytest.mark.parametrize("back", [[0, 1, 2], [2, 0, 1], [1, 2, 0], [2, 1, 0]])
def test_who_comes_back_goes_before_who_has_not_run_in_order_of_arrival(back):
    """Whenever each of them came back: of one adapter as of several."""
    for tiers in ([None] * 5, [Tier.DEVICE] * 5):
        queue = waiting(*tiers)
        requests = list(queue)
        for request in requests[:3]:
            queue.remove(request)
        for index in back:
            queue.append_first(requests[index])
        assert [int(request.id) for request in queue] == [0, 1, 2, 3, 4]
        assert order(queue) == [0, 1, 2, 3, 4]
        queue.append_first(requests[4])
        queue.append_first(requests[1])
        assert order(queue) == [1, 4], "again, and from further behind"


@pytest.mark.parametrize("num_tenants", [10, 1000])
def test_where_no_adapter_may_run_no_tenant_is_looked_at(num_tenants):
    """However many wait: each adapter is asked for once, whoever is overdue."""
    asked = []
    queue = waiting(*[Tier.DEVICE] * num_tenants, tenants=[str(each) for each in range(num_tenants)])
    turns = turns_of(queue)
    candidates = QueueOrder(queue, turns, FakeStore(), overdue_before=5.0, is_eligible=lambda *of: asked.append(of))
    assert candidates.next() is None
    assert asked == [(adapter, None) for adapter in queue.by_adapter]


@given(st.data())
def test_only_those_who_can_run_are_looked_at_and_the_order_is_the_same(data):
    """Among many, some of whom have waited too long, while each is charged for the work that it begins."""
    tiers = data.draw(st.lists(st.sampled_from([None, *Tier]), max_size=20))
    tenants = [data.draw(st.sampled_from("abcdefgh")) for _ in tiers]
    costs = {each: data.draw(st.integers(1, 50)) for each in "abcdefgh"}
    since = {each: data.draw(st.sampled_from([91.0, 92.0, 99.0, 100.0])) for each in "abcdefgh"}
    skipped = data.draw(st.sets(st.integers(0, 20)))

    def considered(many):
        queue, policy = waiting(*tiers, tenants=tenants), TokenCounters()
        for tenant, cost in costs.items():
            policy.charge(request_of(tenant), cost)
        turns = turns_of(queue, policy)
        for tenant, then in sorted(since.items(), key=lambda each: each[1]):
            turns.record_turn(tenant, then, 7)
        turns.restart(103.0, 7)
        found = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(queue_order, "MANY", many)
            patch.setattr(queue_order, "SHARE", 0)
            candidates = QueueOrder(queue, turns, FakeStore(), overdue_before=5.0)
        assert isinstance(candidates.turns, SomeTurns) == (many < 99 and bool(tiers))
        while (request := candidates.next()) is not None:
            found.append((request.id, candidates.turns.is_overdue))
            if int(request.id) in skipped:
                candidates.pass_over()
                continue
            queue.remove(request)
            candidates.advance()
            policy.charge(request, 10)
            turns.record_turn(request.fairness_key, 103.0, 7)
        return found

    assert considered(1) == considered(99)
