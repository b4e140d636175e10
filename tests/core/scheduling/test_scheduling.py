"""The order in which requests run: slow adapters, several tenants, equal prompts, a short arena, a full queue."""

from __future__ import annotations

import gc
import math
import sys
from collections import Counter
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.core.config import EngineConfig
from chorus.core.engine_stats import tenants_of
from chorus.core.policies import Policies
from chorus.core.requests.request import Request, RequestState
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import FinishReason
from chorus.core.scheduling.admission import DOUBT_SECONDS
from chorus.core.scheduling.allocator import Allocator
from chorus.core.scheduling.overload import Overloaded
from chorus.core.scheduling.queues import Running, WaitingQueue
from chorus.core.scheduling.service import OutputLengths, TokenCounters, max_min_level
from chorus.core.scheduling.step_builder import SlotSource, StepBuilder
from chorus.memory.adapters.adapter import Tier
from chorus.perf.inline_reads import InlineReads

from ...memory.fakes import SlowReads
from ...simulation.checked_engine import CheckedEngine
from ..speculation import stand_ins

pytestmark = pytest.mark.wide


class HeldReads(InlineReads):
    """Reads that are under way until the test lets them end. begins: else they wait for a thread."""

    def __init__(self, begins=True):
        self._begins = begins
        self._pending = []

    def submit(self, read, group=""):
        future = Future()
        if self._begins:
            future.set_running_or_notify_cancel()
        self._pending.append((future, read))
        return future

    def wait(self, pending, timeout):
        """No time goes by."""

    def begin(self):
        for future, _ in self._pending:
            future.set_running_or_notify_cancel()

    def finish(self):
        for future, read in self._pending:
            read()
            future.set_result(None)
        self._pending.clear()


# -- slow adapters


def test_overdue_requests_whose_adapters_never_come_keep_nobody_waiting():
    """Today's admission ended at the first of them, with slots free."""
    checked = CheckedEngine(HeldReads(), "abcdef", max_num_seqs=4, max_overtake_seconds=0.1, max_load_stall_seconds=0)
    for name in "abcdef":
        checked.add(f"slow {name}", name)
    checked.step()
    checked.clock.now += 5
    for index in range(8):
        checked.add(f"base {index}")
    for _ in range(10):
        checked.step()
    assert all(checked.asked[f"base {index}"].told.reason for index in range(8))
    assert checked.plans[0] == [(f"base {index}", 3) for index in range(4)], "every slot was taken at once"


def test_a_request_whose_adapter_is_late_gives_its_slot_and_pages():
    reads = HeldReads()
    checked = CheckedEngine(reads, "a", max_num_seqs=1)
    slow = checked.add("slow", "a")
    checked.step()  # asks for the read
    checked.first_layer("a")
    checked.step()  # begins, as it should soon be there, and is computed in vain
    assert slow.state is RequestState.LATE
    assert checked.engine.stats().num_running == checked.engine.stats().num_kv_pages == 0
    checked.add("base")
    checked.step()
    assert checked.plans[-1] == [("base", 3)]
    for _ in range(5):
        checked.step()
    assert checked.asked["base"].told.reason is not None
    assert slow.state is RequestState.LATE
    assert sum(name == "slow" for plan in checked.plans for name, _ in plan) == 1, "it was computed in vain once only"
    reads.finish()
    checked.drain()
    assert slow.state is RequestState.DONE
    assert checked.asked["slow"].told.reason is not None


def test_a_late_adapters_pages_are_given_to_who_needs_them():
    checked = CheckedEngine(HeldReads(), "a", num_pages=1 + 10, max_num_seqs=2)
    checked.add("slow", "a")
    checked.step()
    checked.first_layer("a")
    checked.step()
    assert checked.engine.stats().num_adapter_pages == 2
    checked.add("base", prompt=range(2, 38), max_tokens=4)
    checked.step()
    assert checked.plans[-1] == [("base", 36)]
    assert checked.engine.stats().num_adapter_pages == 0


def test_after_one_late_adapter_no_step_waits_for_another():
    """Estimates know only of reads that have ended."""
    checked = CheckedEngine(HeldReads(), "abcd", max_num_seqs=8)
    checked.add("base", max_tokens=30)
    for name in "abcd":
        checked.add(f"slow {name}", name)
        checked.step()
        checked.first_layer(name)
        for _ in range(3):
            checked.step()
    tried = {name for plan in checked.plans for name, _ in plan if name.startswith("slow")}
    assert tried == {"slow a"}


def test_a_failed_load_of_a_replaced_version_ends_its_own_request_alone():
    """Its last request takes the version with it, before the load is cleared away."""
    reads = HeldReads()
    checked = CheckedEngine(reads, "a", max_load_stall_seconds=10.0)
    slow, base = checked.add("slow", "a"), checked.add("base", max_tokens=9)
    checked.step()  # asks for the read
    checked.first_layer("a")
    checked.engine.begin_step()
    assert slow.is_running
    checked.load("a")
    reads.finish()  # the directory has changed
    for _ in range(3):
        checked.step()
    assert slow.finish_reason is FinishReason.ERROR
    assert base.is_running
    checked.drain()


@pytest.mark.parametrize("begins", [True, False])
def test_nothing_starts_whose_read_brings_nothing(begins):
    """Its step would wait in vain, and whoever comes meanwhile would wait, too, though the engine is idle."""
    reads = HeldReads(begins)
    checked = CheckedEngine(reads, "ab", adapter_read_seconds=1000)
    checked.add("slow a", "a")
    checked.step()
    checked.step()
    checked.add("slow b", "b")
    while checked.clock.now < 5 * DOUBT_SECONDS:
        checked.step()
        checked.clock.now += 0.05
    if not begins:
        reads.begin()
    checked.step()
    assert not checked.plans


def test_who_asks_again_for_a_late_adapter_waits_for_its_read():
    """Its pages are there, but not its bytes."""
    reads = HeldReads()
    checked = CheckedEngine(reads, "a")
    for attempt in range(4):
        checked.add(f"slow {attempt}", "a")
        for index in range(3):
            checked.step()
            if attempt == index == 0:
                checked.first_layer("a")  # the next step begins, as the rest should soon be there
            else:
                checked.clock.now += 1
        checked.engine.abort(f"slow {attempt}")
        checked.add(f"base {attempt}")
        checked.step()
    assert sum(name.startswith("slow") for plan in checked.plans for name, _ in plan) == 1
    checked.add("last", "a")
    reads.finish()
    checked.drain()
    assert checked.asked["last"].told.reason is not None


# -- the limit on adapters


def test_an_overdue_request_takes_an_adapters_index_and_others_run_beside_it():
    checked = CheckedEngine(InlineReads(), "ab", max_adapters_per_step=1, max_num_seqs=3, max_overtake_seconds=0.1)
    checked.add("first", "a", max_tokens=20)
    checked.step()
    checked.step()
    checked.add("overdue", "b")
    checked.step()
    assert checked.plans[-1] == [("first", 1)], "it is not overdue yet"
    checked.clock.now += 1
    checked.add("same", "a", max_tokens=20)
    checked.add("base")
    checked.add("base too")
    checked.step()
    running = {name for name, _ in checked.plans[-1]}
    assert running == {"overdue", "base", "base too"}, "the first is descheduled, and its row is free"
    checked.drain()
    order = list(dict.fromkeys(name for plan in checked.plans for name, _ in plan))
    assert order.index("overdue") < order.index("same")


# -- tenants


def test_a_newcomer_is_not_behind_everything_that_another_has_queued():
    checked = CheckedEngine(max_num_seqs=2, max_overtake_seconds=0.01, max_waiting=None)
    for index in range(300):
        checked.add(f"many {index}", tenant="many")
    for _ in range(4):
        checked.step()
    checked.clock.now += 10
    checked.add("new", tenant="new")
    for _ in range(4):
        checked.step()
    assert checked.asked["new"].told.tokens, "everything of the other was overdue, and still it is the newcomer's turn"


def test_a_newcomers_adapter_is_not_read_behind_all_that_another_has_asked_for():
    reads = SlowReads()
    checked = CheckedEngine(reads, "abcdef", max_num_seqs=2)
    for name in "abcde":
        checked.add(f"many {name}", name, tenant="many")
    checked.step()
    checked.add("new", "f", tenant="new")
    checked.step()
    assert len(reads.pending) == 6, "none has begun"
    reads.finish()
    reads.finish()
    tiers = {name: checked.engine.store.tier(checked.engine.store.get(name)) for name in "abcdef"}
    assert [name for name, tier in tiers.items() if tier is Tier.HOST] == ["a", "f"], "they take turns"


def test_a_full_queue_refuses_and_one_client_cannot_fill_it():
    checked = CheckedEngine(max_num_seqs=1, max_waiting=8)
    for index in range(4):
        checked.add(f"many {index}", tenant="many")
    with pytest.raises(Overloaded, match="4 of your generations wait") as caught:
        checked.add("one more", tenant="many")
    assert caught.value.retry_after == 1.0
    for index in range(4):
        checked.add(f"new {index}", tenant=f"new {index}")
    with pytest.raises(Overloaded, match="8 generations wait, the queue holds 8"):
        checked.add("last", tenant="last")
    checked.drain()
    checked.add("again", tenant="many")
    checked.drain()
    assert checked.engine.stats().num_running == 0


def test_who_is_not_known_may_fill_the_queue_and_the_rate_says_when_to_try_again():
    checked = CheckedEngine(max_num_seqs=1, max_waiting=40)
    for index in range(40):
        checked.add(str(index), max_tokens=1)
    for _ in range(10):
        checked.step()
        checked.clock.now += 2.0
        checked.add(f"more {checked.clock.now}", max_tokens=1)
    with pytest.raises(Overloaded) as caught:
        checked.add("refused")
    assert 20 <= caught.value.retry_after <= 25, "one each 2 seconds: ten take about 20"


# -- equal prompts


@pytest.mark.parametrize("budget", [64, 12])
def test_answers_of_one_prompt_compute_it_once(budget):
    checked = CheckedEngine(prefix_cache=True, max_num_seqs=8, max_num_batched_tokens=budget)
    prompt = [5 + index for index in range(30)]
    for index in range(8):
        checked.add(f"answer {index}", prompt=prompt, max_tokens=2, seed=index)
    checked.drain()
    prefill = 30 + 7 * (30 - 28)
    assert checked.computed == prefill + 8


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_nothing_keeps_a_request_that_has_ended(max_tokens):
    """Nor its images, until another request comes, however late."""
    checked = CheckedEngine(prefix_cache=True, max_num_batched_tokens=64)
    for index in range(3):
        checked.add(f"ended {index}", prompt=[5 + index] * 30, max_tokens=max_tokens)

    def kept():
        return sum(isinstance(each, Request) and each.id.startswith("ended") for each in gc.get_objects())

    assert kept() == 3
    checked.drain()
    checked.asked.clear()
    gc.collect()
    assert not kept()


def test_followers_go_on_when_the_leader_is_aborted_and_one_of_them_leads():
    checked = CheckedEngine(prefix_cache=True, max_num_batched_tokens=8)
    prompt = [5 + index for index in range(30)]
    requests = [checked.add(f"answer {index}", prompt=prompt, max_tokens=2) for index in range(4)]
    checked.step()
    assert [request.state for request in requests] == [RequestState.RUNNING] + 3 * [RequestState.WAITING]
    assert checked.engine.abort("answer 0")
    assert checked.engine.abort("answer 2")
    checked.drain()
    assert checked.asked["answer 1"].told.reason is checked.asked["answer 3"].told.reason is not None
    assert checked.computed == 8 + (30 - 8) + (30 - 28) + 2, "what the leader had computed was kept"


def test_who_waits_for_another_prompt_does_not_keep_others_waiting():
    checked = CheckedEngine(prefix_cache=True, max_num_batched_tokens=16, max_num_seqs=3)
    prompt = [5 + index for index in range(30)]
    for index in range(2):
        checked.add(f"twin {index}", prompt=prompt)
    checked.add("other", prompt=[9, 8, 7])
    checked.step()
    checked.step()
    assert {name for name, _ in checked.plans[1]} == {"twin 0", "other"}


def test_tenants_do_not_wait_for_each_others_prompts():
    checked = CheckedEngine(prefix_cache=True, max_num_batched_tokens=64)
    prompt = [5 + index for index in range(30)]
    checked.add("one", prompt=prompt, tenant="one")
    checked.add("two", prompt=prompt, tenant="two")
    checked.step()
    assert checked.plans[0] == [("one", 30), ("two", 30)]


# -- a short arena


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("max_tokens", [20, 36])
def test_little_is_computed_twice_when_the_arena_is_short(prefix_cache, max_tokens):
    checked = CheckedEngine(num_pages=1 + 22, max_num_seqs=16, prefix_cache=prefix_cache)
    for index in range(40):
        checked.add(str(index), prompt=[2 + index, 3, 4, 5], max_tokens=max_tokens)
    checked.drain()
    needed = 40 * (4 + max_tokens - 1)
    assert checked.computed <= 1.2 * needed
    assert max(len(plan) for plan in checked.plans) >= 2, "and requests still run together"


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("lengths", [[4, 60], [8, 16, 32, 64], [4, 4, 4, 44], [1, 1, 1, 44]])
@pytest.mark.parametrize("stops", [(), (7, 11, 13), tuple(range(20))])
def test_little_is_computed_twice_whatever_the_lengths_and_wherever_answers_end(prefix_cache, lengths, stops):
    checked = CheckedEngine(num_pages=1 + 40, max_num_seqs=16, prefix_cache=prefix_cache)
    requests = []
    for index in range(60):
        prompt, count = [2 + index % 40, 3, 4, 5], lengths[index * 7 % len(lengths)]
        requests.append(checked.add(str(index), prompt=prompt, max_tokens=count, stop_token_ids=stops))
    checked.drain()
    needed = sum(request.num_tokens - 1 for request in requests)
    assert checked.computed <= 1.2 * needed
    assert max(len(plan) for plan in checked.plans) >= 4, "and requests still run together"


def test_room_that_others_give_back_in_time_is_given_again():
    """Two are near their end when a third comes: the third grows into the pages that they hold now."""
    checked = CheckedEngine(num_pages=1 + 22, max_num_seqs=4)
    for name in "ab":
        checked.add(name, prompt=range(2, 14), max_tokens=21)
    for _ in range(15):
        checked.step()
    checked.add("long", prompt=range(2, 14), max_tokens=30)
    checked.step()
    assert "long" in {name for name, _ in checked.plans[-1]}
    checked.drain()
    assert checked.engine.stats().num_preemptions == 0


class Free(TokenCounters):
    """One tenant's requests cost nothing."""

    def charge(self, request, length):
        super().charge(request, length)
        request.charged *= request.fairness_key != "free"

    def settle(self, request):
        request.charged = 0.0


@pytest.mark.parametrize(("policy", "victim"), [(TokenCounters(), "a1"), (Free(), "b1")])
def test_the_victim_is_of_who_was_served_most_by_the_queue_policy(monkeypatch, policy, victim):
    checked = CheckedEngine(num_pages=1 + 12, max_num_seqs=4, policies=Policies(policy))
    monkeypatch.setattr(OutputLengths, "final_lengths", lambda _, some: [each.num_tokens for each in some])
    for name, prompt, tenant in (("a0", 12, "free"), ("b0", 5, "b"), ("a1", 14, "free"), ("b1", 7, "b")):
        checked.add(name, prompt=[5] * prompt, max_tokens=20, tenant=tenant)
    while not checked.engine.stats().num_preemptions:
        checked.step()
    assert [request.id for request in checked.engine.scheduler.waiting] == [victim]
    checked.drain()


def test_answers_that_their_limit_cut_off_do_not_make_longer_ones_look_short():
    lengths = OutputLengths()
    request = Request("long", [1, 2], RequestParams(44))
    request.max_length = 46
    for _ in range(50):
        lengths.end(1, was_cut=True)
    assert lengths.final_length(request) == 46, "nothing is known of what goes on"
    for _ in range(50):
        lengths.end(9, was_cut=False)
    assert lengths.final_length(request) == 2 + (50 * 1 + 50 * 9) // 50 + 1, "ten tokens were drawn for every end"
    request.token_ids += [3] * 9
    assert lengths.final_length(request) == 2 + 9 + 9 // 4 + 1, "none of those that ended got so far"


# -- plans


def test_steps_of_the_same_decodes_reuse_the_rows_of_their_plan():
    """Until one comes, ends or is preempted, or only some of them share the step."""
    checked = CheckedEngine(None, "ab", max_num_seqs=4)
    plans = []
    checked.executor.on_plan = plans.append

    def step():
        checked.step()
        return plans[-1]

    for name, adapter in (("base", None), ("one", "a"), ("two", "b"), ("other", "a")):
        checked.add(name, adapter, max_tokens=40)
    first, second = step(), step()
    assert (first.bucket, second.bucket) == (None, 4)
    for _ in range(9):  # pages are added meanwhile
        plan = step()
        assert plan.sequences is second.sequences
        assert plan.adapters is second.adapters
    checked.engine.abort("one")
    checked.asked.pop("one")
    plan = step()
    assert [row.request_id for row in plan.sequences] == ["base", "two", "other"]
    assert step().sequences is plan.sequences
    checked.add("late", "b", max_tokens=5)
    assert [len(row.tokens) for row in step().sequences] == [3, 1, 1, 1]
    after = step()
    assert sorted(row.request_id for row in after.sequences) == ["base", "late", "other", "two"]
    assert after.sequences is not plan.sequences
    assert step().sequences is after.sequences
    checked.drain()


def test_a_step_ahead_of_rows_that_go_on_calls_nothing_for_each_though_others_wait():
    """The host plans the next step while the device runs one. Counts calls, which need no quiet machine."""

    def fewest_calls(rows):
        checked = CheckedEngine(max_num_seqs=rows, max_num_batched_tokens=8 * rows, num_pages=1000, is_async=True)
        plan_ahead, counts = checked.engine.scheduler.plan_ahead, []

        def counted(plan):
            calls = []
            sys.setprofile(lambda frame, event, argument: calls.append(event) if "call" in event else None)
            try:
                return plan_ahead(plan)
            finally:
                sys.setprofile(None)
                counts.append(len(calls))

        for index in range(rows + 3):
            checked.add(str(index), max_tokens=20)
        with patch.object(checked.engine.async_steps, "_plan_ahead", counted):
            for _ in range(12):
                checked.step()
        assert len(checked.engine.scheduler.waiting) == 3
        return min(counts)

    assert fewest_calls(8) == fewest_calls(64) < 300


class TestTokensOfAStep:
    """Prompts of several tenants share the tokens of a step."""

    def test_a_newcomer_does_not_wait_behind_anothers_long_prompt(self):
        checked = CheckedEngine(max_num_batched_tokens=8)
        checked.add("long", prompt=[5] * 36, tenant="many")
        checked.step()
        checked.add("short", prompt=[6] * 3, tenant="few")
        checked.step()
        assert dict(checked.plans[-1]) == {"long": 5, "short": 3}, "and nothing is left unused"
        checked.drain()

    def test_a_newcomer_that_can_not_come_leaves_its_share_to_others(self):
        reads = HeldReads()
        checked = CheckedEngine(reads, ["cold"], max_num_batched_tokens=8, max_load_stall_seconds=0)
        checked.add("long", prompt=[5] * 36, tenant="many")
        checked.step()
        checked.add("short", "cold", prompt=[6] * 3, tenant="few")
        checked.step()
        assert dict(checked.plans[-1]) == {"long": 8}
        reads.finish()
        checked.drain()

    def test_two_long_prompts_advance_alike(self):
        checked = CheckedEngine(max_num_batched_tokens=8)
        checked.add("one", prompt=[5] * 36, tenant="a")
        checked.step()
        checked.add("other", prompt=[6] * 36, tenant="b")
        checked.add("third", prompt=[6] * 36, tenant="b")
        for _ in range(4):
            checked.step()
            assert dict(checked.plans[-1]) == {"one": 4, "other": 4}
        checked.drain()

    @pytest.mark.parametrize("weight", [0.5, 2.0])
    def test_two_long_prompts_advance_by_their_tenants_weights(self, weight):
        checked = CheckedEngine(max_num_batched_tokens=6, weights={"a": weight})
        for name, tenant in (("first", "a"), ("one", "a"), ("other", "b")):
            checked.add(name, prompt=[5] * 36, tenant=tenant)
            checked.step()
        of_a = 6 * weight / (1 + weight)
        for _ in range(3):
            checked.step()
            assert dict(checked.plans[-1]) == {"first": of_a, "other": 6 - of_a}
        checked.drain()

    def test_a_newcomers_share_is_of_its_weight(self):
        checked = CheckedEngine(max_num_batched_tokens=6, weights={"few": 2.0})
        checked.add("long", prompt=[5] * 36, tenant="many")
        checked.step()
        checked.add("short", prompt=[6] * 36, tenant="few")
        checked.step()
        assert dict(checked.plans[-1]) == {"long": 2, "short": 4}
        checked.drain()

    def test_tokens_that_a_tenant_can_not_use_before_a_checkpoint_are_the_others(self):
        """A prompt stops at its next checkpoint. What it can't use of its tenant's share was left unused."""
        checked = CheckedEngine(
            state_pages=2, state_checkpoint_tokens=4, prefix_cache=True, max_num_batched_tokens=12, max_num_seqs=3
        )
        checked.add("one", prompt=[5] * 36, tenant="a")
        checked.step()
        checked.add("other", prompt=[6] * 36, tenant="b")
        checked.add("third", prompt=[7] * 36, tenant="b")
        for _ in range(4):
            checked.step()
            assert dict(checked.plans[-1]) == {"one": 4, "other": 4, "third": 4}
        checked.drain()

    def test_a_step_that_accepts_drafts_leaves_one_checkpoint(self):
        """Its one state can't be a checkpoint twice, though two are due within its drafts."""
        answer = CheckedEngine()
        answer.add("a", prompt=[5] * 6, max_tokens=30)
        answer.drain()
        right = stand_ins.Right(lambda request: answer.asked["a"].told.tokens)
        checked = CheckedEngine(
            policies=Policies(proposer=right),
            state_pages=2,
            block_tokens=2,
            prefix_cache=True,
            state_checkpoint_tokens=2,
            speculation="ngram",
        )
        checked.engine.speculation.cost = stand_ins.Free()
        for _ in range(2):
            checked.add("a", prompt=[5] * 6, max_tokens=30)
            checked.drain()
        assert max(count for plan in checked.plans for _, count in plan) > 6
        assert checked.engine.stats().num_accepted_tokens > 20
        assert checked.engine.stats().num_prefix_hit_tokens > 0

    @pytest.mark.parametrize("tenants", ["aa", "ab"])
    def test_prompts_that_must_not_be_cut_are_not(self, tenants):
        checked = CheckedEngine(max_num_batched_tokens=64, chunked_prefill=False)
        for name, tenant in zip("xyz", tenants + "a", strict=True):
            checked.add(name, prompt=[5] * 30, tenant=tenant)
        checked.drain()
        prompts = [count for plan in checked.plans for _, count in plan if count > 1]
        assert prompts == [30] * 3


WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([0.25, 0.5, 2.0, 5.0]))


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 100), min_size=1),
    st.integers(1, 200),
    WEIGHTS,
    st.sampled_from([0.0, 1.0, 3.5]),
)
def test_a_split_is_max_min_fair_by_weight(wanted, amount, weights, others):
    """A tenant gets all that it wants, or for its weight no less than any; and nothing is left that is wanted."""
    level = max_min_level(amount, wanted, weights, others)
    shares = {tenant: min(want, level * weights.get(tenant, 1.0)) for tenant, want in wanted.items()}
    left = amount - sum(shares.values())
    if math.isinf(level):
        assert left >= 0 and not others
    else:
        assert left == pytest.approx(level * others, abs=1e-9)
    if not others and any(shares[tenant] < want for tenant, want in wanted.items()):
        assert left == pytest.approx(0, abs=1e-9)


class TestPreemption:
    def test_who_has_been_served_most_gives_way(self, monkeypatch):
        checked = CheckedEngine(num_pages=1 + 14, max_num_seqs=4)
        monkeypatch.setattr(OutputLengths, "final_lengths", lambda _, some: [each.num_prompt_tokens for each in some])
        for name, tenant in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")):
            checked.add(name, prompt=[5] * 8, max_tokens=30, tenant=tenant)
        checked.step()
        assert len(checked.plans[-1]) == 4
        while not checked.engine.stats().num_preemptions:
            checked.step()
        assert [request.id for request in checked.engine.scheduler.waiting] == ["a3"]
        checked.drain()

    def test_who_is_preempted_does_not_pay_for_it(self):
        checked = CheckedEngine(max_num_seqs=2)
        for name in ("spared", "preempted"):
            checked.add(name, prompt=[5] * 12, max_tokens=9, tenant=name)
        for _ in range(3):
            checked.step()
        checked.engine.scheduler.lifecycle.preempt(checked.asked["preempted"].request)
        checked.step()
        assert [tenant.num_running for tenant in tenants_of(checked.engine.scheduler)] == [1, 1]
        checked.engine.scheduler.lifecycle.preempt(checked.asked["preempted"].request)
        standing = {tenant.name: tenant.standing for tenant in tenants_of(checked.engine.scheduler)}
        assert standing["preempted"] <= 12 + 2 * 3 < standing["spared"]
        checked.drain()


def test_pages_of_an_aborted_request_come_back_without_another_request():
    """It was preempted, and its KV is on the way to host memory."""
    checked = CheckedEngine(swap_seconds=0.1, preemption="swap")
    request = checked.add("preempted", prompt=[5] * 12, max_tokens=9)
    for _ in range(3):
        checked.step()
    checked.engine.scheduler.lifecycle.preempt(request)
    assert checked.engine.abort("preempted")
    checked.clock.advance(1.0)
    checked.drain()
    assert checked.engine.stats().num_kv_pages == 0


@pytest.mark.parametrize(
    ("is_overdue", "runs", "begins"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_a_donor_of_pages_begins_before_the_recipient_only_if_overdue_for_a_turn(is_overdue, runs, begins):
    running = Running()
    if runs:
        running.append(Request("0", [1], RequestParams(), fairness_key="donor"))
    limits = EngineConfig(model=Path("fake"))
    allocator = Allocator(limits, None, running, WaitingQueue(), None, None)
    builder = StepBuilder(
        limits=limits,
        lifecycle=SimpleNamespace(service=None),
        allocator=allocator,
        running=running,
        candidates=[],
        now=0.0,
    )
    builder.begin_admission()
    builder.slot_source, builder.order = SlotSource.FREE, SimpleNamespace(turns=SimpleNamespace(is_overdue=is_overdue))
    allocator.page_donors = {"donor"}
    assert builder.may_begin("donor") == begins
    assert builder.may_begin("another")


def test_tenants_are_told_with_their_requests():
    checked = CheckedEngine(max_num_seqs=1, adapters=["one", "other"], fair_by="adapter")
    for name, adapter in (("a", "one"), ("b", "one"), ("c", "other"), ("d", None)):
        checked.add(name, adapter, tenant="same")
    checked.step()
    told = [(each.name, each.num_running, each.num_waiting) for each in tenants_of(checked.engine.scheduler)]
    assert told == [("one", 1, 1), ("", 0, 1), ("other", 0, 1)]
    checked.drain()
    assert tenants_of(checked.engine.scheduler) == []


# -- counts


@given(
    st.lists(st.tuples(st.sampled_from(["add", "add", "step", "abort", "preempt"]), st.integers(0, 99)), max_size=60),
    st.integers(1, 12),
)
def test_requests_by_adapter_are_counted_as_by_a_walk(events, most):
    checked = CheckedEngine(adapters="abc", max_num_seqs=3, num_pages=40)
    scheduler = checked.engine.scheduler
    for index, (event, number) in enumerate(events):
        if event == "add":
            checked.add(str(index), (None, "a", "b", "c")[number % 4], max_tokens=1 + number % 7)
        elif event == "step":
            checked.step()
        elif event == "abort" and checked.asked:
            checked.engine.abort(list(checked.asked)[number % len(checked.asked)])
        elif event == "preempt" and scheduler.running:
            scheduler.lifecycle.preempt(scheduler.running[number % len(scheduler.running)])
        walk = [request.adapter for request in chain(scheduler.running, scheduler.waiting)]
        requests, first = scheduler.count_by_adapter(most)
        assert requests == Counter(walk)
        assert list(first.items()) == list(Counter(walk[:most]).items()), "in the order of their first requests"
        assert list(requests)[: len(first)] == list(first)
