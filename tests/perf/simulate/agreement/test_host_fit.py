"""Work of a cluster's processes, found again from loads like the measured ones."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from chorus.core.config import EngineConfig
from chorus.core.costs.fit import fit
from chorus.core.costs.profile import load_profile
from chorus.perf.simulate.adapters import SimAdapters
from chorus.perf.simulate.agreement.fleet import Fleet
from chorus.perf.simulate.agreement.host_fit import TERMS, loads, rest_of
from chorus.perf.simulate.engine import MODEL
from chorus.perf.simulate.machine import LONGEST_REST, HostWork, Works
from chorus.perf.workload.request import TraceRequest

PROFILE = load_profile("a100-llama2-7b")
WORK = HostWork(2e-3, 5e-6, 1e-4, 4e-5, 1e-2)


def fleet():
    config = EngineConfig(model=MODEL, num_pages=2000, prefix_cache=False, max_num_seqs=16, max_waiting=None)
    adapters = SimAdapters(PROFILE.geometry, config.block_tokens)
    return Fleet(config, {"lora-0": 8, "lora-1": 8}, adapters, PROFILE, 1)


def samples():
    """Requests, prompts' tokens, steps, rows and rest of all loads, and the seconds that a process needs for them."""
    traces = [trace for repeat in range(3) for trace in loads(fleet(), repeat)]
    rows = []
    for trace in traces:
        tokens = sum(each.output_tokens for each in trace)
        beside = len(trace) if trace[0].output_tokens > 100 else 1  # rows of a step
        prompts = sum(each.prompt_tokens for each in trace)
        rest = rest_of((each.arrival, each.arrival + 1e-3 * each.output_tokens) for each in trace)
        rows.append((len(trace), prompts, tokens / beside, tokens, rest))
    terms = astuple(WORK)
    return rows, [sum(a * b for a, b in zip(terms, row, strict=True)) for row in rows]


def test_the_work_of_a_process_is_found_again():
    found = fit(TERMS, *samples()).terms
    for name in TERMS:
        assert found[name] == pytest.approx(getattr(WORK, name), rel=1e-3), name


def test_a_load_whose_steps_are_priced_too_high_does_not_decide_the_replicas_work():
    """A profile is measured, too: one load's simulated steps may take longer than its replica did."""
    rows, beside = samples()
    steps = [2.5e-4 * row[2] for row in rows]
    spent = [one + other for one, other in zip(steps, beside, strict=True)]
    worst = max(range(len(rows)), key=lambda index: steps[index] / beside[index])
    steps[worst] = 1.02 * spent[worst]
    found = fit(TERMS, rows, spent, steps).terms
    per_token = found["per_step"] + found["per_row"]
    assert per_token == pytest.approx(WORK.per_step + WORK.per_row, rel=0.15)


def test_the_loads_of_a_repeat_are_its_own_and_the_same_every_time():
    one, other = (loads(fleet(), repeat) for repeat in (0, 1))
    assert one == loads(fleet(), 0)
    assert [len(trace) for trace in one[:10]] == [*[24] * 5, 1, 2, 4, 8, 16] == [len(trace) for trace in other[:10]]
    assert all(a != b and len({each.adapter for each in a}) == 2 for a, b in zip(one[10:], other[10:], strict=True))


@pytest.mark.parametrize(
    ("requests", "rest"),
    [
        ([(0.0, 1.0)], 0.0),
        ([(0.0, 1.0), (1.0, 2.0)], 0.0),
        ([(0.0, 1.0), (1.03, 2.0)], 0.03),
        ([(0.0, 3.0), (1.0, 2.0), (3.02, 4.0)], 0.02),  # one within another
        ([(0.0, 1.0), (9.0, 10.0), (20.0, 21.0)], 2 * LONGEST_REST),
    ],
)
def test_rest_is_the_time_without_a_request_up_to_a_limit_each(requests, rest):
    assert rest_of(requests) == pytest.approx(rest)


@pytest.mark.parametrize("work", [HostWork(), HostWork(3e-3, 0.0, 2e-3, 1e-4), HostWork(0.0, 0.0, 0.0, 5e-4)])
def test_a_replicas_work_makes_its_steps_longer(work):
    trace, tokens = [TraceRequest(0, 0.0, None, 20, 11)], 10
    (found, busy), (alone, less) = (
        fleet().simulate(trace, "first-fit", works=each) for each in (Works(replica=work), None)
    )
    per_token, first = work.per_step + work.per_row, work.per_step + work.per_row + work.per_prompt
    ttft, e2e = ((found.column(name) - alone.column(name))[0] for name in ("ttft", "e2e"))
    assert ttft == pytest.approx(first, abs=1e-6)
    assert e2e == pytest.approx(first + tokens * per_token, abs=1e-6)
    assert busy - less == pytest.approx(first + tokens * per_token, abs=1e-6)
