"""Requests that engine and simulator both serve, at the load that was asked for."""

from __future__ import annotations

import pytest

from chorus.core.costs.profile import load_profile
from chorus.perf.simulate.loads import at_load, prompt_of
from chorus.perf.workload.request import TraceRequest


def test_prompts_share_no_beginning():
    requests = [TraceRequest(n, 0.0, None, 16 + n, 1) for n in range(20)]
    prompts = [prompt_of(request, 100) for request in requests]
    assert [len(prompt) for prompt in prompts] == [request.prompt_tokens for request in requests]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 20
    assert all(16 <= token < 100 for prompt in prompts for token in prompt)


def test_a_recorded_load_keeps_the_pattern_and_cuts_what_is_too_long():
    profile = load_profile("a100-llama2-7b")
    geometry = profile.geometry.model_copy(update={"max_model_len": 1000})
    profile = profile.model_copy(update={"geometry": geometry})
    requests = [TraceRequest(n, 100 + n**1.5, "acme" if n % 3 else None, 10 * n + 1, 5000) for n in range(200)]
    trace = at_load(requests, 0.5, profile, 4, ["b", "a"])
    assert [each.id for each in trace] == list(range(200))
    assert trace[0].arrival == 0
    ratios = [each.arrival / n**1.5 for n, each in enumerate(trace) if n]
    assert ratios == pytest.approx([ratios[0]] * 199)
    assert {each.prompt_tokens for each in trace[80:]} == {750}
    assert {each.output_tokens for each in trace} == {250}
    assert {each.adapter for each in trace if each.id % 3} == {trace[1].adapter} <= {"a", "b"}
    twice = at_load(requests, 1.0, profile, 4, ["b", "a"])
    assert twice[-1].arrival == pytest.approx(trace[-1].arrival / 2)
