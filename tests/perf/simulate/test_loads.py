"""Loads that engine and simulator both serve: the same every time, and at the load that was asked for."""

from __future__ import annotations

import pytest

from chorus.core.costs.profile import load_profile
from chorus.perf.simulate.loads import OUTPUT_TOKENS, PROMPT_TOKENS, Load, Recorded, prompt_of
from chorus.perf.workload.request import TraceRequest


def test_a_load_is_the_same_every_time():
    profile = load_profile("a100-llama2-7b")
    load = Load(300, 0.5, seed=3)
    trace = load.trace(profile, 4, ["a", "b"])
    assert trace == load.trace(profile, 4, ["a", "b"])
    assert [r.arrival for r in trace] == sorted(r.arrival for r in trace)
    assert {r.adapter for r in trace} == {None, "a", "b"}
    assert all(PROMPT_TOKENS[0] <= r.prompt_tokens <= PROMPT_TOKENS[1] for r in trace)
    assert all(OUTPUT_TOKENS[0] <= r.output_tokens <= OUTPUT_TOKENS[1] for r in trace)
    prompts = [prompt_of(request, 100) for request in trace[:20]]
    assert [len(prompt) for prompt in prompts] == [r.prompt_tokens for r in trace[:20]]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 20
    assert all(16 <= token < 100 for prompt in prompts for token in prompt)
    twice = Load(300, 1.0, seed=3).trace(profile, 4, ["a", "b"])
    assert twice[-1].arrival == pytest.approx(trace[-1].arrival / 2)


def test_a_recorded_load_keeps_the_pattern_and_cuts_what_is_too_long():
    profile = load_profile("a100-llama2-7b")
    requests = [TraceRequest(n, 100 + n**1.5, "acme" if n % 3 else None, 10 * n + 1, 5000) for n in range(200)]
    trace = Recorded(requests, 0.5, 1000).trace(profile, 4, ["b", "a"])
    assert [each.id for each in trace] == list(range(200))
    assert trace[0].arrival == 0
    ratios = [each.arrival / n**1.5 for n, each in enumerate(trace) if n]
    assert ratios == pytest.approx([ratios[0]] * 199)
    assert {each.prompt_tokens for each in trace[80:]} == {750}
    assert {each.output_tokens for each in trace} == {250}
    assert {each.adapter for each in trace if each.id % 3} == {trace[1].adapter} <= {"a", "b"}
    twice = Recorded(requests, 1.0, 1000).trace(profile, 4, ["b", "a"])
    assert twice[-1].arrival == pytest.approx(trace[-1].arrival / 2)
