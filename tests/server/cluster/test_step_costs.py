"""A replica learns the times of its steps, and API servers price requests by them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from chorus.core.merging.step_samples import StepSample, StepSamples
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import BASE_LORA_INDEX, ScheduledSequence, StepPlan
from chorus.server.cluster.report import LearnedCosts, mean_costs

PAGE = 1 << 16


def engine():
    costs = SimpleNamespace(prefix_page=16e-4, disk_adapter_page=1e-3, host_adapter_page=1e-4)
    executor = SimpleNamespace(layout=SimpleNamespace(page_bytes=PAGE))
    return SimpleNamespace(samples=StepSamples(), costs=costs, executor=executor, pages_per_token=1 / 16)


def sample_of(step, seconds):
    sample = StepSample.of(step)
    sample.seconds = seconds
    return sample


def run_decode(replica, step, seconds):
    replica.samples.decode = sample_of(step, seconds)


def run_prefill(replica, step, seconds):
    replica.samples.prefill = sample_of(step, seconds)


def plan(rows, start, tokens=1):
    made = [
        ScheduledSequence(
            f"r{index}", BASE_LORA_INDEX, [1] * tokens, start, [], RequestParams(), 0, True, [1], start + tokens
        )
        for index in range(rows)
    ]
    return StepPlan(1, made, [], bucket=rows if tokens == 1 else None)


def test_steps_teach_their_price():
    replica, learned, draw = engine(), LearnedCosts(), random.Random(0)
    assert learned.observe(replica) == {}
    told = {}
    for _ in range(300):
        rows = draw.randint(1, 32)
        run_decode(replica, plan(rows, 100), 0.01 + 0.001 * rows)
        told = learned.observe(replica)
    assert learned.observe(replica) == told, "without another step it learns nothing"
    model = mean_costs([told])
    for rows in (1, 16, 32):
        assert model.batch_seconds(rows, 0, 0, 0, 100 * rows) == pytest.approx(0.01 + 0.001 * rows, rel=0.1)
    assert model.step.per_token == pytest.approx(1e-4)
    assert model.disk.seconds(PAGE) == pytest.approx(1e-3) and model.link.seconds(PAGE) == pytest.approx(1e-4)


def test_a_prompts_token_is_priced_beside_the_step_that_it_is_in():
    """Of a short prompt most is the step's own time, which a token must not pay for again."""
    replica, learned, draw = engine(), LearnedCosts(), random.Random(0)
    told = {}
    for _ in range(300):
        rows, prompts, tokens = draw.randint(1, 32), draw.randint(1, 4), draw.randint(16, 64)
        run_decode(replica, plan(rows, draw.randint(1, 400)), 0.01 + 0.001 * rows)
        seconds = 0.01 + 0.001 * prompts + 2e-5 * prompts * (tokens - 1)
        run_prefill(replica, plan(prompts, 0, tokens), seconds)
        told = learned.observe(replica)
    model = mean_costs([told])
    assert model.step.per_token == pytest.approx(2e-5, rel=0.3)


def test_prompts_of_one_token_in_blocks_of_one_teach_nothing_of_prompts():
    replica, learned = engine(), LearnedCosts()
    run_decode(replica, plan(2, 100), 0.01)
    before = learned.observe(replica)
    single = plan(2, 0)
    single.bucket = None
    run_prefill(replica, single, 0.01)
    assert learned.observe(replica) == before


def test_a_mixtures_experts_have_a_price_that_prompts_do_not_pay_again():
    """A token goes to an eighth of the experts; a prompt's tokens go to nearly all of them."""
    replica, learned, draw = engine(), LearnedCosts(expert_share=1 / 8), random.Random(0)
    told = {}
    for _ in range(300):
        rows, prompts, tokens = draw.randint(1, 32), draw.randint(1, 4), draw.randint(16, 64)
        run_decode(replica, plan(rows, draw.randint(1, 400)), 0.002 + 0.02 * (1 - (7 / 8) ** rows))
        experts = 0.02 * (1 - (7 / 8) ** (prompts * tokens))
        run_prefill(replica, plan(prompts, 0, tokens), 0.002 + experts + 2e-5 * prompts * (tokens - 1))
        told = learned.observe(replica)
    model = mean_costs([told, told])
    assert (model.step.experts, model.step.expert_share) == (pytest.approx(0.02, rel=0.1), 1 / 8)
    assert model.step.per_token == pytest.approx(2e-5, rel=0.3)
    for rows in (1, 4, 32):
        assert model.batch_seconds(rows, 0, 0, 0, 200 * rows) == pytest.approx(
            0.002 + 0.02 * (1 - (7 / 8) ** rows), rel=0.1
        )


def test_replicas_are_priced_by_their_mean_whatever_else_they_tell():
    model = mean_costs([{"base": 0.01, "disk": 1e-8}, {"base": 0.03, "link": 2e-9, "of a later version": 1.0}])
    assert model.step.base == pytest.approx(0.02)
    assert (model.disk.per_byte, model.link.per_byte) == pytest.approx((5e-9, 1e-9))
