"""Turns of adapters in the batch: no request waits for an answer of another adapter to end."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from chorus.core.scheduling.allocator import Allocator
from chorus.perf.inline_reads import InlineReads

from ...simulation.checked_engine import CheckedEngine

pytestmark = pytest.mark.wide

OVERTAKE = 1.0
STEP = 0.02
LONG = 36


class Stream:
    """Requests of one adapter without end: as many as `count` are in progress at any time."""

    def __init__(self, checked: CheckedEngine, adapter: str, count: int, **params):
        self.checked, self.adapter, self.count, self.params = checked, adapter, count, params
        self.numbers = itertools.count()

    def go_on(self):
        asked = self.checked.asked
        mine = [each for name, each in asked.items() if name.startswith(f"{self.adapter} stream")]
        for _ in range(self.count - sum(each.told.reason is None for each in mine)):
            self.checked.add(
                f"{self.adapter} stream {next(self.numbers)}", self.adapter, max_tokens=LONG, **self.params
            )


def first_token(checked: CheckedEngine, name: str, *streams: Stream, within: float) -> float:
    """Return the seconds until a request's first token."""
    start = checked.clock.now
    while not checked.asked[name].told.tokens:
        assert checked.clock.now - start <= within, f"{name} waits for {checked.clock.now - start:.2f} s"
        for stream in streams:
            stream.go_on()
        checked.step()
        checked.clock.now += STEP
    return checked.clock.now - start


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("count", [2, 4, 9])
@pytest.mark.parametrize("tenant", ["", "other"])
def test_neither_adapter_waits_for_an_answer_of_the_other_to_end(is_async, count, tenant):
    checked = CheckedEngine(
        InlineReads(),
        "ab",
        max_adapters_per_step=1,
        max_num_seqs=4,
        max_overtake_seconds=OVERTAKE,
        num_pages=400,
        is_async=is_async,
    )
    stream = Stream(checked, "a", count)
    for _ in range(10):
        stream.go_on()
        checked.step()
        checked.clock.now += STEP
    checked.add("b", "b", max_tokens=LONG, tenant=tenant)
    first_token(checked, "b", stream, within=OVERTAKE + 0.2)
    checked.add("a again", "a", tenant=tenant or "another")  # it waits for none of its own adapter
    first_token(checked, "a again", stream, within=OVERTAKE + 0.2)
    checked.drain()


def test_requests_of_an_adapter_in_the_batch_begin_beside_an_overdue_one_of_another():
    """An overdue request reserved its adapter's place, and all later ones waited with it."""
    checked = CheckedEngine(InlineReads(), "ab", max_adapters_per_step=1, max_num_seqs=4, max_overtake_seconds=OVERTAKE)
    checked.add("a", "a", max_tokens=LONG)
    checked.step()
    checked.add("b", "b", max_tokens=LONG)
    checked.clock.now += 2 * OVERTAKE
    checked.step()
    assert checked.plans[-1] == [("b", 3)], "a is descheduled"
    checked.add("a too", "a")
    checked.clock.now += 1.5 * OVERTAKE
    checked.step()
    assert {name for name, _ in checked.plans[-1]} == {"a", "a too"}, "all of the adapter share its turn"
    assert checked.engine.stats().num_running == 3
    assert checked.engine.scheduler.lifecycle.num_preemptions == 0


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("slots", [2, 4, 16])
@pytest.mark.parametrize("is_async", [False, True])
def test_each_of_many_adapters_has_its_turn(most, slots, is_async):
    """More adapters than have their turn one after another: each waits for the bound and a round of the others."""
    names = "abcdefgh"
    checked = CheckedEngine(
        InlineReads(),
        names,
        max_adapters_per_step=most,
        max_num_seqs=slots,
        max_overtake_seconds=OVERTAKE,
        num_pages=800,
        is_async=is_async,
    )
    streams = [Stream(checked, name, 1) for name in names]
    last = dict.fromkeys(names, checked.clock.now)
    rows = Counter()
    for _ in range(800):
        for stream in streams:
            stream.go_on()
        checked.step()
        checked.clock.now += STEP
        for name, _ in checked.plans[-1]:
            last[name[0]] = checked.clock.now
            rows[name[0]] += 1
        oldest = checked.clock.now - min(last.values())
        assert oldest <= 2 * OVERTAKE + 2 * len(names) * STEP, f"{oldest:.2f} s without a step"
    assert max(rows.values()) <= 2 * min(rows.values()), f"turns are uneven: {rows}"


@pytest.mark.parametrize("is_async", [False, True])
def test_an_adapter_whose_prompts_get_no_tokens_does_not_keep_its_turn(is_async):
    """Prompts of the base model took all tokens of the steps in which it had its turn, beside which no other adapter
    decoded: another tenant's answers stopped until these prompts were computed.
    """
    checked = CheckedEngine(
        InlineReads(),
        "ab",
        max_adapters_per_step=1,
        max_num_seqs=3,
        max_num_batched_tokens=4,
        max_overtake_seconds=0.0,
        is_async=is_async,
    )
    for name in ("a", "a too"):
        checked.add(name, "a", prompt=[3, 4], max_tokens=30, tenant="x")
    for _ in range(3):
        checked.step()
        checked.clock.now += STEP
    checked.add("b", "b", prompt=[3] * 8, tenant="y", choice_group="c")
    for name in ("long", "long too"):
        checked.add(name, prompt=[3] * 35, tenant="y")
    without = [0]
    while checked.engine.has_work():
        checked.step()
        checked.clock.now += STEP
        without = [*without, 0 if any(name[0] == "a" for name, _ in checked.plans[-1]) else without[-1] + 1]
        if checked.asked["a"].told.reason is not None:
            break
    assert max(without) <= 3
    checked.drain()


@dataclass(frozen=True)
class Named:
    """An adapter."""

    name: str
    version: int = 1


class Waiting(list):
    """Waiting requests, and their adapters."""

    @property
    def by_adapter(self):
        return {request.adapter: {} for request in self}


def test_adapters_that_preempt_each_other_do_not_keep_a_third_from_its_turn():
    """In each step one of two adapters runs and the other waits, with one that waits longer and lacks pages."""
    holder, third, *pair, longest = map(Named, "abcde")
    request = {each.name: SimpleNamespace(adapter=each, arrival_time=0.0) for each in (holder, third, *pair, longest)}
    waiting = Waiting()
    running = SimpleNamespace(by_adapter=lambda: {holder: [], third: []})
    limits = SimpleNamespace(max_num_seqs=8, max_adapters_per_step=1, max_overtake_seconds=0.0, weights={})
    turns = Allocator(limits, SimpleNamespace(order=list), running, waiting, None, None)
    for now, each in enumerate((*pair, third, holder), start=1):
        turns.note_step([each], float(now))
    for step in range(8):
        now = 9.0 + step
        one, other = pair if step % 2 else pair[::-1]
        waiting[:] = [request[longest.name], request[other.name]]
        chosen = turns.with_index([request[each.name] for each in (holder, third, one)], now)
        if chosen[0].adapter is not holder:
            break
        turns.note_step([holder], now)
    assert chosen[0].adapter is not holder, "it keeps its index"
