"""Shares of the slots: which requests begin though every slot is taken, and which are descheduled for them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chorus.core.config import EngineConfig
from chorus.core.merging.modes import leaves_tenant_out
from chorus.core.policies import Policies
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.scheduling.allocator import Allocator
from chorus.core.scheduling.queues import Running, WaitingQueue
from chorus.core.scheduling.service import WINDOW_SECONDS, Service, TokenCounters
from chorus.core.scheduling.step_builder import StepBuilder

from .test_scheduling import CheckedEngine, HeldReads


def flooded(prompt_tokens=4, **config):
    """One tenant takes every slot, and more of its requests wait."""
    checked = CheckedEngine(**config)
    for index in range(8):
        checked.add(f"many {index}", prompt=[5] * prompt_tokens, max_tokens=30, tenant="many")
    for _ in range(3):
        checked.step()
    return checked


def rows(checked):
    return [name for name, _ in checked.plans[-1]]


class TestWhoIsLeftOut:
    def test_keeps_what_it_holds_while_those_who_run_alone_take_the_rows(self):
        checked = flooded(adapters=["one"])
        for index in range(6):
            checked.add(f"one {index}", "one", max_tokens=12, tenant="many")
        checked.step()
        assert sorted(rows(checked)) == [f"many {index}" for index in range(4)], "every slot is taken"
        scheduler = checked.engine.scheduler
        many = {name: list(scheduler.get(name).block_table.pages) for name in rows(checked)}
        scheduler.eligible_adapters = frozenset({scheduler.get("one 0").adapter})
        for _ in range(3):
            checked.step()
        assert sorted(rows(checked)) == ["one 0", "one 1", "one 2", "one 3"], "all rows of the step are theirs"
        assert len(scheduler.running) == 8, "slots go as far as memory does"
        assert many == {name: list(scheduler.get(name).block_table.pages) for name in many}
        scheduler.eligible_adapters = None
        for _ in range(2):
            checked.step()
        assert sorted(rows(checked)) == [f"many {index}" for index in range(4)], "who began first has the rows"
        checked.drain()
        assert checked.engine.stats().num_preemptions == 0
        assert checked.computed == 8 * 33 + 6 * 14, "nothing is computed twice"

    def test_takes_the_row_of_a_request_that_ends_in_the_step_under_way(self):
        """The next step is planned before the one under way has ended."""
        checked = CheckedEngine(max_num_seqs=2, is_async=True)
        for index in range(2):
            checked.add(f"many {index}", max_tokens=24, tenant="many")
        for _ in range(4):
            checked.step()
        checked.add("one", max_tokens=4, tenant="one")
        while (
            checked.engine.scheduler.running != checked.engine.scheduler.running[:2] or checked.engine.scheduler.waiting
        ):
            checked.step()
        begun = next(index for index, plan in enumerate(checked.plans) if "one" in dict(plan))
        assert all(len(plan) == 2 for plan in checked.plans[begun : begun + 12]), checked.plans
        checked.drain()

    def test_goes_on_at_once_though_its_next_token_is_its_last(self):
        """It has no row of the step under way: it is none of the requests that this step ends."""
        checked = CheckedEngine(max_num_seqs=2, is_async=True)
        checked.add("long", max_tokens=24, tenant="many")
        checked.add("paused", max_tokens=6, tenant="many")
        for _ in range(4):
            checked.step()
        checked.add("one", max_tokens=30, tenant="one")
        for _ in range(2):  # of its prompt, and of decoding
            checked.step()
        assert sorted(rows(checked)) == ["long", "one"]
        assert checked.engine.async_steps.plan is not None
        assert checked.asked["paused"].request.num_tokens == checked.asked["paused"].request.max_length - 1
        checked.engine.abort("one")
        checked.step()
        assert sorted(rows(checked)) == ["long", "paused"]
        checked.drain()

    def test_makes_no_room_without_somebody_left_out(self):
        checked = flooded(adapters=["one"])
        checked.add("one", "one", tenant="many")
        for _ in range(3):
            checked.step()
        assert len(checked.engine.scheduler.running) == 4

    def test_waits_for_a_turn_where_its_tenant_has_nothing_that_runs(self):
        checked = CheckedEngine(adapters=["one", "other"])
        for name in ("one", "other"):
            checked.add(f"own {name}", name, max_tokens=12, tenant="own")
        checked.step()
        scheduler = checked.engine.scheduler
        one = frozenset({scheduler.get("own one").adapter})
        assert not leaves_tenant_out(scheduler, one), "there is no other tenant"
        checked.add("their one", "one", max_tokens=12, tenant="theirs")
        checked.step()
        assert not leaves_tenant_out(scheduler, one), "each has a request that runs"
        checked.add("last other", "other", max_tokens=12, tenant="last")
        assert leaves_tenant_out(scheduler, one)
        checked.drain()


class TestNewcomer:
    def test_begins_at_once_beside_a_tenant_that_has_every_slot(self):
        checked = flooded()
        checked.add("new", tenant="few")
        checked.step()
        assert sorted(rows(checked)) == ["many 0", "many 1", "many 2", "new"], "the newest sits out"
        checked.step()
        checked.step()
        assert checked.asked["new"].told.reason is not None
        checked.step()
        assert sorted(rows(checked)) == [f"many {index}" for index in range(4)]
        checked.drain()
        assert checked.computed == 8 * 33 + 5, "nothing is computed twice"
        assert checked.engine.stats().num_preemptions == 0

    @pytest.mark.parametrize(
        ("prompt_tokens", "running", "config"),
        [(4, 4, {"max_num_batched_tokens": 4}), (36, 2, {"max_num_batched_tokens": 8, "max_num_seqs": 2})],
        ids=["decode rows", "a prompt"],
    )
    def test_begins_though_others_take_all_tokens_of_a_step(self, prompt_tokens, running, config):
        checked = flooded(prompt_tokens, **config)
        while len(checked.engine.scheduler.running) < running:
            checked.step()
        checked.add("new", tenant="few")
        checked.step()
        assert "new" in rows(checked)
        checked.drain()

    def test_whose_adapter_is_not_here_takes_nobodys_row(self):
        reads = HeldReads()
        checked = flooded(reads=reads, adapters=["cold"], max_load_stall_seconds=0)
        checked.add("new", "cold", tenant="few")
        checked.step()
        assert sorted(rows(checked)) == [f"many {index}" for index in range(4)]
        reads.finish()
        for _ in range(2):
            checked.step()
        assert "new" in rows(checked)
        checked.drain()

    def test_has_its_adapter_read_though_others_have_sent_more_than_are_looked_at(self):
        checked = CheckedEngine(adapters=["cold"], lookahead=2, max_load_stall_seconds=0)
        for index in range(12):
            checked.add(f"many {index}", max_tokens=30, tenant="many")
        for _ in range(3):
            checked.step()
        checked.add("new", "cold", tenant="few")
        for _ in range(3):
            checked.step()
        assert "new" in rows(checked)
        checked.drain()

    def test_gets_as_many_rows_as_anybody_and_no_more(self):
        checked = flooded()
        for tenant, index in itertools.product(("a", "b"), range(3)):
            checked.add(f"{tenant} {index}", max_tokens=30, tenant=tenant)
        tenants = Counter()
        for _ in range(4):
            checked.step()
            tenants = Counter(name.split()[0] for name in rows(checked))
            assert sum(tenants.values()) == 4
            assert max(tenants.values()) == 2
        assert tenants.keys() == {"many", "a", "b"}
        checked.drain()

    def test_of_more_weight_gets_more_rows(self):
        checked = flooded(weights={"heavy": 3.0})
        for index in range(4):
            checked.add(f"heavy {index}", max_tokens=30, tenant="heavy")
        for _ in range(4):
            checked.step()
        assert Counter(name.split()[0] for name in rows(checked)) == {"heavy": 3, "many": 1}
        checked.drain()

    def test_waits_for_an_end_where_each_row_is_another_tenants(self):
        checked = CheckedEngine(max_num_seqs=2)
        for tenant in "abc":
            checked.add(tenant, max_tokens=9, tenant=tenant)
        for _ in range(9):
            checked.step()
            assert sorted(rows(checked)) == ["a", "b"]
        checked.step()
        assert rows(checked) == ["c"]
        checked.drain()


class TestRoom:
    def test_who_sits_out_yields_its_pages(self):
        """Room for the flood and one newcomer: a second one takes the pages of the one descheduled for the first."""
        checked = flooded(num_pages=1 + 4 * 9 + 4)
        for _ in range(20):
            checked.step()
        checked.add("new", max_tokens=12, tenant="few")
        checked.step()
        assert "new" in rows(checked)
        checked.add("newer", prompt=[7] * 30, max_tokens=9, tenant="fewer")
        for _ in range(3):
            checked.step()
        assert "newer" in rows(checked)
        assert checked.engine.stats().num_preemptions > 0
        checked.drain()

    def test_who_made_way_does_not_begin_again_in_that_step(self):
        """A request sent back is charged for less, so it would come next, into the slot that it has just left."""
        checked = CheckedEngine(num_pages=1 + 30)
        for index in range(2):
            checked.add(f"rich {index}", prompt=[5] * 4, max_tokens=16, tenant="rich")
        checked.add("many 0", prompt=[6] * 4, max_tokens=12, tenant="many")
        checked.add("many 1", prompt=[7] * 24, max_tokens=16, tenant="many")
        checked.step()
        checked.add("first", prompt=[8] * 4, max_tokens=12, tenant="first")
        checked.step()
        assert "many 1" not in rows(checked)
        checked.add("many 2", tenant="many")
        checked.add("second", prompt=[9] * 30, max_tokens=9, tenant="second")
        checked.step()
        assert checked.engine.stats().num_preemptions == 1
        assert sorted(rows(checked)) == ["first", "many 0", "rich 0", "second"]
        checked.drain()

    @pytest.mark.parametrize("limit", [{"max_turn_steps": 10}, {"max_turn_seconds": 0.015}])
    def test_who_is_late_for_its_turn_gets_pages_of_who_has_more(self, limit):
        checked = CheckedEngine(num_pages=1 + 20, max_num_seqs=8, **limit)
        for index in range(2):
            checked.add(f"many {index}", prompt=[5] * 20, max_tokens=16, tenant="many")
        checked.step()
        checked.add("new", prompt=[6] * 30, max_tokens=9, tenant="few")
        for _ in range(12):
            checked.step()
        assert checked.engine.stats().num_preemptions == 1
        assert checked.asked["new"].told.tokens, "it began long before the others' ends"
        checked.drain()

    def test_that_is_late_is_not_passed_over_for_small_ones_however_many_pages_it_needs(self):
        """Another's request lacks pages first: from then on, tenants begin no more than their shares of the pages."""
        checked = CheckedEngine(num_pages=1 + 14, max_num_seqs=8, max_turn_steps=3)
        for index in range(2):
            checked.add(f"large {index}", prompt=[5] * 24, max_tokens=16, tenant="large")
        checked.step()
        late = checked.add("late", prompt=[6] * 28, max_tokens=4, tenant="late")
        checked.add("small", max_tokens=2, tenant="small")
        for _ in range(4):
            checked.step()
        small = [checked.add(f"small {index}", max_tokens=2, tenant="small") for index in range(8)]
        while late.start_time is None:
            assert not any(each.start_time for each in small)
            checked.step()
        checked.drain()

    def test_that_gave_pages_waits_for_them_only_until_the_request_begins_that_they_were_taken_for(self):
        checked = CheckedEngine(num_pages=1 + 20, max_num_seqs=8, max_overtake_seconds=1000.0)
        for index in range(3):
            checked.add(f"many {index}", prompt=[5] * 16, max_tokens=8, tenant="many")
        checked.step()
        few = checked.add("few", prompt=[6] * 24, max_tokens=8, tenant="few")
        checked.step()
        assert checked.engine.stats().num_preemptions == 1
        while few.start_time is None:
            checked.step()
        checked.engine.scheduler.lifecycle.preempt(few)
        checked.add("few 1", prompt=[6] * 12, max_tokens=8, tenant="few")
        checked.step()
        assert "many 2" in rows(checked), "it came before, and is charged no more"
        checked.drain()

    def test_who_has_just_begun_yields_no_pages(self):
        """Two are late in one step: the first begins, the second lacks pages and would take them from it."""
        checked = CheckedEngine(num_pages=1 + 14, max_turn_steps=3)
        checked.add("first 0", prompt=[5] * 4, max_tokens=20, tenant="first")
        checked.add("other", prompt=[6] * 30, max_tokens=6, tenant="other")
        checked.step()
        checked.add("first 1", prompt=[7] * 28, tenant="first")
        checked.add("second", prompt=[8] * 32, tenant="second")
        while "first 1" not in rows(checked):
            checked.step()
        assert checked.engine.stats().num_preemptions == 0
        assert "second" not in rows(checked)
        checked.drain()

    def test_as_many_sit_out_as_memory_holds(self):
        most = {}
        for num_pages in (1 + 60, 1 + 1000):
            checked = CheckedEngine(max_num_seqs=4, num_pages=num_pages)
            most[num_pages] = 0
            for wave in range(6):
                for index in range(4):
                    checked.add(f"{wave} {index}", max_tokens=37, tenant=f"{wave}")
                for _ in range(3):
                    checked.step()
                    most[num_pages] = max(most[num_pages], len(checked.engine.scheduler.running))
            assert len({name.split()[0] for name in rows(checked)}) == 4
            checked.drain(20_000)
        assert most[1 + 60] < 8 <= most[1 + 1000]


def test_an_tenant_with_a_request_held_back_does_not_come_anew():
    """It keeps its turn: it waits for a prompt that another request computes."""

    class Arrivals(TokenCounters):
        seen = []

        def arrive(self, tenant, waiting, least):
            self.seen.append(tenant)
            super().arrive(tenant, waiting, least)

    checked = CheckedEngine(
        policies=Policies(Arrivals()), prefix_cache=True, share_prefix_cache=True, max_num_batched_tokens=8
    )
    prompt = [5] * 30
    checked.add("leader", prompt=prompt, tenant="a")
    checked.step()
    checked.add("follower", prompt=prompt, tenant="b")
    checked.step()
    assert "b" not in checked.engine.scheduler.waiting.tenants
    checked.add("later", prompt=[6] * 9, tenant="b")
    checked.drain()
    assert Arrivals.seen == ["a", "b"]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def made(tenant, index, decodes=True, cost=1.0):
    request = Request(f"{tenant} {index}", [5] * (1 if decodes else 9), RequestParams())
    request.fairness_key, request.charged = tenant, cost
    return request


class Planted(TokenCounters):
    """Charges the amounts that the test has planted in `charged`."""

    def charge(self, request, length):
        pass

    def settle(self, request):
        pass


def service_of(slots):
    limits, clock = EngineConfig(model=Path("fake"), max_num_seqs=slots), Clock()
    service = Service(limits, Running(), WaitingQueue(), Planted(), lambda: (clock(), 0))
    return service, clock


def taken(slots, requests):
    """The service of each tenant after a step of the requests, none of them descheduled, and the clock."""
    service, clock = service_of(slots)
    running = service._running  # noqa: SLF001
    for request in requests:
        running.append(request)
        service.begin(request, 0)
    return service, builder_of(service), clock


def allocator_of(limits, service, running):
    return Allocator(limits, service, running, WaitingQueue(), None, None)


def builder_of(service):
    running = service._running  # noqa: SLF001
    limits = EngineConfig(model=Path("fake"), max_num_seqs=service.max_num_seqs)
    builder = StepBuilder(
        limits=limits,
        lifecycle=SimpleNamespace(service=service, preempt=running.remove),
        allocator=allocator_of(limits, service, running),
        running=running,
        candidates=list(running),
        now=0.0,
        all_decode=True,
    )
    builder.begin_admission()
    return builder


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 9)), min_size=1, max_size=24), st.integers(4, 12))
def test_whoever_was_given_most_gives_first_and_the_oldest_keep_their_rows(asked, slots):
    requests = [made(tenant, index, cost=float(cost)) for index, (tenant, cost) in enumerate(asked)]
    service, *_ = taken(slots, requests)
    dealt = service.choose(requests)
    assert len(dealt) == min(slots, len(requests))
    had, have = (Counter(request.fairness_key for request in each) for each in (requests, dealt))
    assert have.keys() == had.keys(), "each keeps a row"
    for tenant in had:
        own = [request for request in requests if request.fairness_key == tenant]
        assert [request for request in dealt if request.fairness_key == tenant] == own[: have[tenant]]
        if have[tenant] < had[tenant]:
            richer = [each for each in had if service.served_cost(each) > service.served_cost(tenant)]
            assert all(have[each] == 1 for each in richer)


def test_a_prompt_that_has_begun_is_computed_to_its_end():
    requests = [made("a", 0), made("a", 1), made("a", 2, decodes=False)]
    assert [request.id for request in service_of(2)[0].choose(requests)] == ["a 0", "a 2"]


def test_what_was_given_is_forgotten_once_it_has_ended():
    service, builder, clock = taken(4, [made("a", 0, cost=8.0), made("a", 1, cost=4.0)])
    running = builder.running
    clock.now = 1000.0
    assert service.served_cost("a") == 12.0, "however long they run"
    ended = running[0]
    running.remove(ended)
    service.end(ended)
    assert service.served_cost("a") == 12.0
    clock.now += WINDOW_SECONDS
    assert service.served_cost("a") == pytest.approx(4.0 + 8.0 / math.e)


def test_a_burst_of_one_that_was_given_little_goes_before_what_another_has_beyond_a_row():
    """Next to a tenant that had much lately, with no more rows than it has now."""
    checked = flooded()
    while checked.engine.scheduler.waiting:
        checked.step()
    for index in range(3):
        checked.add(f"few {index}", max_tokens=4, tenant="few")
    for _ in range(3):
        checked.step()
    assert Counter(name.split()[0] for name in rows(checked)) == {"many": 1, "few": 3}
    checked.drain()


def test_tenants_that_were_given_something_are_forgotten():
    service, builder, clock = taken(4, [])
    running = builder.running
    for index in range(5000):
        request = made(f"{index}", index)
        running.append(request)
        service.begin(request, 0)
        running.remove(request)
        service.end(request)
        clock.now += 1.0
    assert service.served_cost("10") == 0
    assert service.served_cost("4999") > 0


@given(st.lists(st.sampled_from("abcdef"), min_size=4, max_size=4), st.lists(st.sampled_from("abcdef"), max_size=30))
def test_no_more_tenants_run_than_a_step_has_rows(holders, comers):
    _, builder, _ = taken(4, [made(tenant, index) for index, tenant in enumerate(holders)])
    for index, tenant in enumerate(comers):
        if builder.allocator.may_take_slot(tenant):
            builder.admit(made(tenant, 10 + index), 1, 0)
    assert len(builder.running.tenants) <= 4


@given(
    st.lists(st.sampled_from("ab"), min_size=1, max_size=8),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 9)), max_size=24),
)
@example(["a"] * 3, [("b", 1), ("b", 1), ("c", 1)])
def test_whoever_begins_has_a_row_of_the_step_and_leaves_each_tenant_one(holders, comers):
    service, builder, _ = taken(len(holders), [made(tenant, index, cost=9.0) for index, tenant in enumerate(holders)])
    begun = []
    for index, (tenant, cost) in enumerate(comers):
        if builder.allocator.may_take_slot(tenant):
            begun.append(made(tenant, 10 + index, cost=float(cost)))
            builder.admit(begun[-1], 1, 0)
    assert len(begun) < max(2, len(holders)), "the row of whoever has just begun is nobody's to take"
    dealt = service.choose(builder.running, begun)
    assert len(dealt) == len(holders)
    assert {*begun} <= {*dealt}
    assert {request.fairness_key for request in dealt} == builder.running.tenants.keys()


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=8),
    st.lists(st.one_of(st.integers(0, 7), st.tuples(st.sampled_from("abcd"), st.integers(1, 9))), max_size=24),
)
@example(["a", "a", "a", "b", "b", "b"], [("c", 1), ("c", 1), ("c", 1), 1, ("c", 1), 1, ("c", 1)])
def test_preempting_who_gave_its_row_makes_no_second_one_free(holders, events):
    """A number: pages are short, and that one of the requests which ran before is preempted, unless it is its tenant's
    only one. A request begins in a free slot, or in one that another tenant gives.
    """
    service, builder, _ = taken(len(holders), [made(tenant, index, cost=9.0) for index, tenant in enumerate(holders)])
    begun, running = [], builder.running
    for index, event in enumerate(events):
        if isinstance(event, int):
            left = [each for each in running if running.tenants[each.fairness_key] > 1 and each not in begun]
            for victim in left[event : event + 1]:
                builder.preempt(victim)
        elif len(running) < len(holders) or builder.allocator.may_take_slot(event[0]):
            begun.append(made(event[0], 10 + index, cost=float(event[1])))
            builder.admit(begun[-1], 1, 0)
    dealt = service.choose(running, begun)
    assert {*begun} <= {*dealt}
    assert len(dealt) <= len(holders)
    assert {request.fairness_key for request in dealt} == running.tenants.keys()


def test_tenants_are_ranked_once_in_a_step_however_many_requests_begin(monkeypatch):
    """Those alone are ranked anew that begin a request or give a row for one."""
    ranked = []
    lately = Service._recent_cost  # noqa: SLF001

    def counted(self, tenant, now):
        ranked.append(tenant)
        return lately(self, tenant, now)

    monkeypatch.setattr(Service, "_recent_cost", counted)
    many, few = [f"many {index}" for index in range(50)], [f"few {index}" for index in range(20)]
    service, builder, _ = taken(100, [made(tenant, index) for index in range(2) for tenant in many])
    ranked.clear()
    for tenant in few:
        assert builder.allocator.any_may_take_slot({tenant: None}.keys())
        builder.admit(made(tenant, 0), 1, 0)
    assert len(service.choose(builder.running, builder.admitted)) == 100
    assert len(ranked) <= len(many) + 2 * len(few) + len(many) + len(few), "once more by those who are dealt rows"


@pytest.mark.parametrize(
    ("running", "victim"),
    [
        (["most"], 0),
        (["least", "least", "least"], 2),
        (["least", "most", "some", "most", "least"], 3),
        (["most", "least"], 1),
        (["most", "some", "least"], 1),
        (["most", "some", "least", "least"], 3),
    ],
)
def test_the_victim_is_the_newest_of_who_was_served_most_but_neither_the_oldest_nor_an_only_one(running, victim):
    costs = {"most": 500.0, "some": 300.0, "least": 100.0}
    requests = [made(tenant, index, cost=costs[tenant]) for index, tenant in enumerate(running)]
    service, *_ = taken(4, requests)
    assert service.last(requests) is requests[victim]
