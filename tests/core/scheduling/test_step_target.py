"""The time of a step in which a tenant's prompts are computed beside another tenant's answers is bounded."""

from __future__ import annotations

from collections.abc import Set
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import ScheduledSequence, StepPlan
from chorus.core.scheduling.step_target import (
    DECODE_STEPS,
    EFFICIENT,
    LEAST_TOKENS,
    PROMPT_TOKENS,
    RECENT_SECONDS,
    RECENT_STEPS,
    PromptTimes,
    StepPrompts,
    StepTarget,
)
from chorus.core.scheduling.step_time import MAX_DEBT

from ...simulation.checked_engine import CheckedEngine

DECODE, ANY, TOKEN, SCORED = 1.0, 0.5, 0.01, 0.05


def plan(*counts: int, is_scored: bool = False, drafts: int = 0) -> StepPrompts:
    """A step of such counts of tokens, whose prompts are those of tenant b."""
    rows: Any = [
        SimpleNamespace(
            request_id="b",
            tokens=[1] * count,
            drafts=drafts,
            is_prompt=count - drafts > 1,
            wants_prompt_logprobs=is_scored and count > 1,
        )
        for count in counts
    ]
    step = cast(StepPlan, SimpleNamespace(sequences=rows, bucket=1 if max(counts) == 1 else None))
    asking = Request("b", [1], RequestParams(), None)
    asking.fairness_key = "b"
    return StepPrompts.of(step, {"b": asking})


def efficient(token: float) -> float:
    """The tokens of one prompt in the shortest step that does not mostly wait, by the price of a token."""
    any_seconds = ANY - PROMPT_TOKENS * token
    return EFFICIENT * (DECODE + any_seconds) / token - PROMPT_TOKENS


def note(target: StepTarget, step: StepPrompts, seconds: float) -> None:
    target.note(step, seconds)


def request(**params: Any) -> Request:
    return Request("r", [5] * 1000, RequestParams(**params), None)


def learned(seconds: float | None = None) -> StepTarget:
    target = StepTarget(seconds)
    for _ in range(5):
        note(target, plan(1, 1), DECODE)
        for count in (20, 100, 500):
            note(target, plan(count, 1), DECODE + ANY + count * TOKEN)
            note(target, plan(count, is_scored=True), DECODE + ANY + count * (TOKEN + SCORED))
    return target


def test_a_step_takes_as_long_as_its_target():
    target = learned(20.0)
    work = target.work_beside(["a"], {"b"}, (), 0.0)
    assert work is not None
    assert work.most(request(), 10_000) == pytest.approx((20 - DECODE - ANY) / TOKEN, abs=1)
    assert work.room == work.most(request(), 10_000)
    assert work.most(request(), 7) == 7
    scored = work.most(request(prompt_logprobs=1), 10_000)
    assert scored == pytest.approx(
        (20 - DECODE - ANY + PROMPT_TOKENS * TOKEN) / (TOKEN + SCORED) - PROMPT_TOKENS, abs=1
    )
    work.take(request(prompt_logprobs=1), scored)
    assert work.most(request(), 100) == pytest.approx(0, abs=6)


def test_a_step_with_prompts_is_not_so_short_that_it_computes_little():
    work = learned().work_beside(["a"], {"b"}, (), 0.0)
    assert work is not None
    assert work.most(request(), 10_000) == pytest.approx(efficient(TOKEN), abs=1)


@pytest.mark.parametrize("seconds", [None, 2.5, 9.0])
def test_the_target_is_the_mean_of_steps(seconds):
    """Whatever prompts want, and whatever a step with them takes at least."""
    target, taken, num_tokens = learned(seconds), [], 0
    for _ in range(400):
        work = target.work_beside(["a"], {"b"}, (), 0.0)
        assert work is not None
        count = 0 if "b" in work.held else work.most(request(), 10_000)
        took = DECODE + (ANY + count * TOKEN if count else 0.0)
        target.settle(plan(1, count) if count else plan(1), took)
        taken.append(took)
        num_tokens += count
    wanted = DECODE_STEPS * DECODE if seconds is None else seconds
    assert 0.6 * wanted < sum(taken) / len(taken) < 1.05 * wanted
    assert num_tokens * TOKEN > 0.8 * (sum(taken) - len(taken) * DECODE), "most of what is not decoding is prompts"


def held(target: StepTarget, decoding: list[str], prompts: set[str], now: float = 0.0) -> Set[str]:
    work = target.work_beside(decoding, prompts, (), now)
    assert work is not None
    return work.held


def test_nobody_waits_for_a_tenant_that_does_not_decode_now():
    target = learned()
    assert held(target, ["a"], {"b"}) == set()
    target.settle(plan(100), 100.0)
    assert held(target, ["a"], {"b"}, 0.1) == {"b"}
    assert held(target, [], {"b"}, 0.2) == set()
    assert target.work_beside(["b"], {"b"}, (), 5.0) is None
    assert held(target, ["a"], {"b"}, 5.0) == set(), "nobody waited"


def test_a_tenant_does_not_wait_for_what_another_has_taken():
    target = learned()
    target.settle(plan(100), 10 * DECODE)
    assert held(target, ["a"], {"b", "c"}) == {"b"}
    target.settle(StepPrompts({"b": 1, "c": 3}), 9 * DECODE)
    assert target.debts == {"b": 6 * DECODE, "c": 3 * DECODE}
    assert held(target, ["a", "b"], {"b", "c"}) == {"b", "c"}
    assert held(target, ["b"], {"b", "c"}) == {"c"}


def test_steps_pay_off_the_debts_of_all_tenants_alike():
    target = learned()
    target.debts = {"b": 1.0, "c": 3.0}
    target.settle(plan(1), DECODE)
    assert target.debts == {"c": pytest.approx(3.0 - (DECODE_STEPS - 1) * DECODE / 2)}
    target.settle(plan(1), 100.0)
    assert target.debts == {"c": pytest.approx(1.0)}, "nobody's prompts took that long"
    target.settle(plan(1), DECODE)
    assert target.debts == {}


def test_a_debt_is_paid_off_whatever_the_target_is():
    target = learned(1e-9)
    target.settle(plan(100), 1000 * DECODE)
    for _ in range(int(2 * MAX_DEBT)):
        target.settle(plan(1), DECODE)
    assert target.debts == {}


def test_short_steps_do_not_make_tokens_look_dear():
    """A bounded step has few tokens for the time that any prompt takes."""
    target, count = learned(3.0), 0
    for _ in range(100):
        work = target.work_beside(["a"], {"b"}, (), 0.0)
        assert work is not None
        count = work.most(request(), 10_000)
        note(target, plan(count, 1), DECODE + ANY + count * TOKEN)
    assert count == pytest.approx(efficient(TOKEN), abs=1)


@pytest.mark.parametrize("is_scored", [False, True])
@pytest.mark.parametrize("seconds", [1e3, 1e5])
@pytest.mark.parametrize("size", [1, 2000])
def test_one_slow_step_does_not_change_the_price_of_tokens_for_ever(size, seconds, is_scored):
    """Bounded steps have other sizes than the slow one, such as one in which the machine paused."""
    target, token, counts = StepTarget(None), TOKEN + SCORED * is_scored, []
    note(target, plan(1, 1), DECODE)
    note(target, plan(size + 1, is_scored=is_scored), DECODE + seconds)
    for _ in range(4 * RECENT_STEPS):
        work = target.work_beside(["a"], {"b"}, (), 0.0)
        assert work is not None
        counts.append(work.most(request(prompt_logprobs=1 if is_scored else None), 1000))
        note(target, plan(counts[-1], is_scored=is_scored), DECODE + ANY + counts[-1] * token)
    usual = efficient(token)
    later = sorted(counts[2 * RECENT_STEPS :])
    assert later[len(later) // 2] == pytest.approx(min(1000, usual), abs=2)
    assert sum(count > usual + 2 for count in later) <= 4


def test_prompts_make_progress_whatever_the_target_is():
    target = learned(1e-9)
    for _ in range(20):
        note(target, plan(1, 1), 1e-9)
    target._plain = target._scored = PromptTimes()  # noqa: SLF001 - of which even the least is too much
    for count in (10, 100):
        target._plain.note(count, 1e9 * count)  # noqa: SLF001
    work = target.work_beside(["a"], {"b"}, (), 0.0)
    assert work is not None
    assert work.most(request(), 1000) == LEAST_TOKENS
    work.take(request(), 10)
    assert work.most(request(), 1000) == LEAST_TOKENS - 10
    work.take(request(), LEAST_TOKENS - 10)
    assert work.most(request(), 1000) == 0


def test_a_tenant_is_not_bounded_beside_its_own_answers():
    target = learned()
    assert target.work_beside(["a"], {"a"}, (), 0.0) is None
    assert target.work_beside([], {"a"}, (), RECENT_SECONDS / 2) is None
    assert target.work_beside(["a"], (), {"a", "b"}, 0.0) is not None
    assert target.work_beside(["a", "b"], {"a"}, (), 0.0) is not None
    assert target.work_beside(["a"], (), (), 0.0) is None


def test_a_tenant_that_decoded_just_now_still_counts():
    target = learned()
    assert target.work_beside(["a"], (), (), 0.0) is None
    assert target.work_beside([], (), {"b"}, 0.5 * RECENT_SECONDS) is not None
    assert target.work_beside([], (), {"b"}, 1.5 * RECENT_SECONDS) is None


def test_what_is_not_known_bounds_nothing():
    assert StepTarget(None).work_beside(["a"], {"b"}, (), 0.0) is None
    target = StepTarget(None)
    note(target, plan(1), DECODE)
    work = target.work_beside(["a"], {"b"}, (), 0.0)
    assert work is not None
    assert work.most(request(), 1000) == 1000


def test_time_without_steps_is_no_step():
    target = StepTarget(None)
    target.begin(plan(1), 0.0)
    target.has_plain_last, target.last = False, None  # as by `Scheduler.note_pause`
    target.begin(plan(1), 100.0)
    assert not target.decode_seconds
    target.begin(plan(1), 102.0)
    assert [*target.decode_seconds] == [2.0]


def test_a_decode_step_is_not_slow_because_many_prompts_are_planned_after_it():
    """Decode steps between those of prompts were taken to be as slow, and prompts then filled all that time."""
    target = StepTarget(None)
    for now in (0.0, 1.0):
        target.begin(plan(1), now)
    target.begin(plan(100), 51.0)
    assert [*target.decode_seconds] == [1.0]


def test_drafts_are_no_prompts():
    target = StepTarget(None)
    note(target, plan(4, 4, drafts=3), DECODE)
    work = target.work_beside(["a"], {"b"}, (), 0.0)
    assert work is not None, "a step with drafts alone is a decode step"


def sequence(start: int, count: int, prompt: int = 10, drafts: int = 0) -> ScheduledSequence:
    tokens = [5] * count
    return ScheduledSequence(
        "r", 0, tokens, start, [], RequestParams(), 0, True, [5] * 20, prompt, drafts=drafts
    )  # fmt: skip


@pytest.mark.parametrize(
    ("start", "count", "drafts", "is_prompt"),
    [(0, 10, 0, True), (9, 1, 0, True), (4, 1, 0, True), (10, 1, 0, False), (12, 4, 3, False), (12, 4, 0, True)],
)
def test_the_last_token_of_a_prompt_is_a_prompt(start, count, drafts, is_prompt):
    """The choices of one prompt have no other token of their own: their steps were taken for decode steps."""
    assert sequence(start, count, drafts=drafts).is_prompt == is_prompt


def test_each_prompt_has_a_price():
    """A step of many short prompts takes longer than one long prompt of as many tokens."""
    target = StepTarget(None)
    for _ in range(5):
        note(target, plan(1, 1), DECODE)
        for count in (2, 40):
            note(target, plan(*[2] * count, 1), DECODE + count * (2 + PROMPT_TOKENS) * TOKEN)
    work = target.work_beside(["a"], {"b"}, (), 0.0)
    assert work is not None
    short, left = 0, work.room
    while work.most(request(), 1):
        work.take(request(), 1)
        short += 1
    assert short == pytest.approx((left + PROMPT_TOKENS) / (1 + PROMPT_TOKENS), abs=LEAST_TOKENS)


def checked_target() -> tuple[CheckedEngine, StepTarget]:
    """An engine whose target is known: steps without prompts take 1 ms."""
    checked = CheckedEngine(max_num_seqs=8, max_num_batched_tokens=64, num_pages=400, target_step_ms=5.0)
    target = checked.engine.scheduler.target
    assert target is not None
    target.decode_seconds.extend([0.001] * 8)
    return checked, target


def test_steps_of_prompts_of_one_token_are_no_decode_steps():
    checked, target = checked_target()
    checked.add("answer", tenant="a", max_tokens=30)
    for _ in range(3):
        checked.step()
        checked.clock.now += 0.001
    assert target.has_plain_last
    for number in range(4):
        checked.add(f"b {number}", prompt=[7], tenant="b", max_tokens=1)
    checked.step()
    assert len(checked.plans[-1]) == 5 and not target.has_plain_last
    checked.clock.now += 0.5
    checked.step()
    assert max(target.decode_seconds) < 0.1 and target.debts.keys() == {"b"}


@pytest.mark.parametrize("is_running", [False, True])
def test_a_first_token_does_not_wait_for_a_step_of_those_that_owe_time(is_running):
    checked, target = checked_target()
    target.recent["a"] = checked.clock.now
    for number in range(4):
        checked.add(f"b {number}", prompt=[7] * 35, tenant="b")
    if is_running:
        checked.step()
        assert {name for name, _ in checked.plans[-1]} >= {"b 0"}
    target.debts["b"] = 1.0
    checked.add("answer", tenant="a")
    decoding = {"b 0": 1} if is_running else {}  # all but its prompt
    for count in (3, 1):
        checked.step()
        assert dict(checked.plans[-1]) == {"answer": count, **decoding}
    checked.drain()


def test_those_that_owe_time_go_on_if_nobody_else_can_begin():
    checked, target = checked_target()
    target.recent["a"] = checked.clock.now
    checked.add("b", prompt=[7] * 30, tenant="b")
    target.debts["b"] = 1.0
    checked.step()
    assert checked.plans[-1] == [("b", 30)]
    checked.drain()
