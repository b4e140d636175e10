"""Measuring a cost model: the made-up steps are steps that an engine could take, and they tell the terms apart."""

from __future__ import annotations

import itertools
from dataclasses import asdict

import numpy as np
import pytest

from chorus.core.config import EngineConfig
from chorus.core.costs.fit import fit
from chorus.core.costs.machine import TimedExecutor, device_name, geometry_of, measure_machine
from chorus.core.costs.measure import (
    MeasureError,
    Samples,
    StepProfiler,
    fit_steps,
    fit_transfer,
    r2_of,
    steady,
    typical,
)
from chorus.core.costs.models import Kernel, StepCost, StepWork
from chorus.core.costs.profile import Geometry, load_profile
from chorus.core.costs.work import STEP_TERMS, step_work
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model.read_config import read_model_config
from chorus.graphs.runner import DecodeBuckets

from ..tiny_families import save_family

SEQS, TOKENS = 8, 96


@pytest.fixture(scope="module")
def gqa(subject):
    return subject("gqa")


def config(gqa, **more):
    defaults = {
        "adapters": gqa.model.parent / "adapters",
        "memory_bytes": 8 << 20,
        "max_num_seqs": SEQS,
        "max_num_batched_tokens": TOKENS,
        "threads": 1,
    }
    return EngineConfig(model=gqa.model, **{**defaults, **more})


@pytest.fixture(scope="module")
def executor(gqa):
    executor = CpuExecutor(config(gqa))
    yield executor
    executor.close()


@pytest.fixture
def profiler(gqa, executor):
    return StepProfiler(executor, list(gqa.adapters.values()), max_num_seqs=SEQS, max_num_batched_tokens=TOKENS)


def check_plan(plan, executor):
    """The order that every executor relies on."""
    assert {row.lora_index for row in plan.sequences} - {-1} == set(range(len(plan.adapters)))
    single = [len(row.tokens) == 1 for row in plan.sequences]
    assert single == sorted(single)
    for kind in (True, False):
        lora_indices = [row.lora_index for row, one in zip(plan.sequences, single, strict=True) if one is kind]
        assert lora_indices == sorted(lora_indices)
    used = [page for row in plan.sequences for page in row.pages]
    adapters = {page for adapter in plan.adapters for page in adapter.pages}
    assert len(set(used)) == len(used)
    assert not adapters & set(used)
    assert max(used) < executor.num_pages
    assert min(used) > 0
    for row in plan.sequences:
        assert row.kv_len <= min(len(row.pages) * executor.layout.block_tokens, executor.model.max_model_len)
    assert len(plan.sequences) <= SEQS
    assert plan.num_tokens <= TOKENS


def test_decode_batches_are_mixed(profiler, executor):
    profiler.place_adapters()
    plans = profiler.decode_plans(100)
    for plan in plans:
        check_plan(plan, executor)
        assert plan.bucket == DecodeBuckets(SEQS).pick(len(plan.sequences))
        assert all(row.samples and len(row.tokens) == 1 for row in plan.sequences)
    assert {len(plan.sequences) for plan in plans} == set(range(1, SEQS + 1))
    assert {plan.num_adapters for plan in plans} >= {0, 1, 2, 3, 4}
    assert len({frozenset(adapter.rank for adapter in plan.adapters) for plan in plans}) > 40
    kv = [step_work(plan, Kernel.SGMV).kv_tokens / len(plan.sequences) for plan in plans]
    assert min(kv) < 10 < 100 < max(kv)


def test_prefill_steps_are_mixed(profiler, executor):
    plans = profiler.prefill_plans(60)
    for plan in plans:
        check_plan(plan, executor)
        assert plan.bucket is None
        assert len(plan.sequences[0].tokens) > 1
    assert any(len(plan.sequences[-1].tokens) == 1 for plan in plans), "none beside decoding requests"
    assert any(row.start > 0 for plan in plans for row in plan.sequences[:1]), "no later chunk"
    assert max(plan.num_tokens for plan in plans) > TOKENS / 2


def test_a_plan_draws_the_pages_that_it_has_and_not_those_of_the_arena(profiler, executor, monkeypatch):
    monkeypatch.setattr(executor, "num_pages", 1 << 40)
    for plan in profiler.decode_plans(10) + profiler.prefill_plans(10):
        check_plan(plan, executor)


@pytest.mark.parametrize("seqs", [1, SEQS])
def test_no_step_is_longer_than_the_model(gqa, seqs):
    """A step may have more tokens than a request: then it has several prompts, as far as it has rows."""
    limit = 24
    settings = config(gqa, max_num_seqs=seqs, max_model_len=limit)
    executor = CpuExecutor(settings)
    profiler = StepProfiler(executor, list(gqa.adapters.values()), max_num_seqs=seqs, max_num_batched_tokens=TOKENS)
    profiler.place_adapters()
    plans = profiler.prefill_plans(60)
    for plan in plans + profiler.decode_plans(40):
        check_plan(plan, executor)
        assert len(plan.sequences) <= seqs
    assert max(plan.num_tokens for plan in plans) > min(TOKENS, limit * seqs) / 2
    assert any(len(row.tokens) == limit for plan in plans for row in plan.sequences)
    executor.execute(max(plans, key=lambda plan: plan.num_tokens))
    executor.close()


def test_the_steps_tell_the_terms_apart(profiler):
    """If a machine's times follow a cost model exactly, the profiler finds that model."""
    truth = StepCost(
        base=3e-3,
        ragged=1e-3,
        weights=4 * 3e-4,
        per_token=3e-4,
        per_row=2e-4,
        per_padding=1.5e-4,
        per_kv_token=1e-6,
        per_pair=4e-7,
        lora=3e-4,
        per_rank=2e-6,
        per_token_rank=1e-6,
        per_adapter_rank=1e-5,
    )
    decodes, prefills = profiler.decode_plans(200), profiler.prefill_plans(80)
    work = [step_work(plan, Kernel.SGMV) for plan in decodes + prefills]
    exact = Samples(work, [truth.seconds(each) for each in work], 0.0)
    found = fit_steps(exact)
    assert found.r2 == pytest.approx(1.0)
    assert found.terms == pytest.approx({name: getattr(truth, name) for name in (*STEP_TERMS, "weights")}, rel=1e-4)
    generator = np.random.default_rng(1)
    noisy = Samples(work, [seconds * (1 + generator.exponential(0.02)) for seconds in exact.seconds], 0.0)
    found = fit_steps(noisy)
    assert found.r2 > 0.97
    assert r2_of(StepCost(**found.terms), Samples(work[:200], noisy.seconds[:200], 0.0)) > 0.97
    assert min(found.terms.values()) >= 0, "so that more work never takes less time"


def test_a_fit_finds_what_experts_take(profiler):
    """A token goes to 2 of 16 experts; more tokens go to more of them, and to no more than all."""
    truth = StepCost(base=1e-3, per_token=1e-5, per_row=1e-5, experts=4e-3, expert_share=1 / 8)
    decodes, prefills = profiler.decode_plans(200), profiler.prefill_plans(80)
    work = [step_work(plan, Kernel.SGMV) for plan in decodes + prefills]
    found = fit_steps(Samples(work, [truth.seconds(each) for each in work], 0.0), 1 / 8)
    assert found.r2 == pytest.approx(1.0)
    assert found.terms["experts"] == pytest.approx(4e-3, rel=1e-3)
    assert StepCost(**found.terms).seconds(work[0]) == pytest.approx(truth.seconds(work[0]))
    one, two, many = (truth.seconds(StepWork(count, count)) - 1e-3 - 2e-5 * count for count in (1, 2, 1000))
    assert (one, two, many) == pytest.approx((4e-3 / 8, 4e-3 * 15 / 64, 4e-3))


def test_transfers_leave_the_adapters_in_the_arena(profiler, executor):
    profiler.place_adapters()
    transfers = profiler.measure_transfers(2)
    page = executor.layout.page_bytes
    assert transfers.num_bytes == [adapter.num_pages * page for adapter in profiler.adapters]
    assert all(seconds > 0 for seconds in transfers.read + transfers.place)
    assert all(len(adapter.pages) == adapter.num_pages for adapter in profiler.adapters)


def test_one_size_of_adapters_gives_a_rate_only():
    assert fit_transfer([100, 100, 100], [1.0, 2.0, 3.0]).terms == {"latency": 0.0, "per_byte": pytest.approx(0.02)}
    assert fit_transfer([100, 200, 400], [2.0, 3.0, 5.0]).terms == pytest.approx({"latency": 1.0, "per_byte": 0.01})


def test_measure_runs_every_step_in_every_round(profiler):
    profiler.place_adapters()
    plans = profiler.decode_plans(10)
    steps = itertools.count(1)
    samples = profiler.measure(plans, Kernel.SGMV, 3, lambda: next(steps))
    assert next(steps) == 31
    assert len(samples.work) == len(samples.seconds) == 10
    assert all(seconds > 0 for seconds in samples.seconds)
    assert samples.noise >= 0
    assert fit(("base",), [(1.0,)] * 10, samples.seconds).terms["base"] > 0


def test_a_timed_executor_runs_the_same_steps(profiler, executor):
    profiler.place_adapters()
    plan = profiler.decode_plans(3)[2]
    timed = TimedExecutor(executor)
    assert timed.execute(plan) == executor.execute(plan)
    assert timed.seconds > 0


def test_a_machine_is_measured_into_a_profile(gqa, tmp_path):
    done = []
    measured = measure_machine(config(gqa), batches=16, rounds=1, progress=lambda *at: done.append(at))
    profile = measured.profile
    assert done[-1] == (56, 56)
    assert profile.step.fit.samples == 56
    assert profile.step.fit.decode_r2 is not None and profile.step.fit.decode_r2 <= 1
    assert profile.geometry.num_layers == 3
    assert (8 << 20) * 0.99 < profile.memory_bytes.value <= 8 << 20
    assert "measured on this machine" in profile.step.terms["base"].source
    profile.save(tmp_path / "here.json")
    costs = load_profile(tmp_path / "here.json").costs()
    assert costs.decode_seconds([8] * 4, 100) >= 0
    assert costs.overhead.seconds(4) > 0
    assert 0 <= costs.disk.contention < 1


@pytest.mark.wide
def test_a_mixture_is_measured_with_the_share_of_experts_that_a_token_goes_to(tiny, tmp_path):
    it = tiny("qwen3-moe")
    profile = measure_machine(config(it, adapters=it.model.parent), batches=16, rounds=1).profile
    profile.save(tmp_path / "here.json")
    found = load_profile(tmp_path / "here.json")
    step, table = found.costs().step, found.geometry.projections
    assert step.expert_share == 4 / 16
    assert step.experts >= 0
    assert table["experts.up_proj"].experts == 16
    without = step.seconds(StepWork(8, 8)) - StepCost(**{**asdict(step), "experts": 0.0}).seconds(StepWork(8, 8))
    assert without == pytest.approx(step.experts * (1 - 0.75**8))


def test_what_cannot_be_measured(gqa, executor, tmp_path):
    with pytest.raises(MeasureError, match="no adapters to measure with"):
        StepProfiler(executor, [], max_num_seqs=SEQS, max_num_batched_tokens=TOKENS)
    with pytest.raises(MeasureError, match="no adapters to measure with"):
        measure_machine(EngineConfig(model=gqa.model))
    with pytest.raises(MeasureError, match="no adapters to measure with"):
        measure_machine(config(gqa, adapters=tmp_path))
    with pytest.raises(MeasureError, match="raise memory_bytes"):
        measure_machine(config(gqa, num_pages=60))


def test_the_device_has_a_name():
    assert len(device_name("cpu")) > 2


def test_a_spike_hardly_counts():
    assert typical([1.0, 2.0, 3.0]) == pytest.approx(2.0)
    assert typical([1.0, 1.0, 1.0, 1000.0]) == pytest.approx(4.5 / 4)
    assert typical([1.0, 1000.0]) == pytest.approx(1.25)


def test_what_disturbs_one_round_of_a_thing_is_shared_by_all():
    quiet = steady([[1.0, 1.0, 1.0], [3.0, 3.0, 3.0]])
    assert quiet == [1.0, 3.0]
    disturbed = steady([[1.0, 1.0, 1.3], [3.0, 3.0, 3.0]])
    assert disturbed == pytest.approx([1.025, 3.075])
    assert sum(disturbed) == pytest.approx((1.0 + 1.0 + 1.3 + 9.0) / 3)


def test_rows_without_a_knee_have_none():
    work = [StepWork(rows, rows, 10 * rows + kv, 0, 0, 0, 0) for rows in (1, 2, 4, 8) for kv in (0, 5, 70)]
    flat = StepCost(1e-3, per_row=2e-4, per_kv_token=1e-6)
    found = fit_steps(Samples(work, [flat.seconds(each) for each in work], 0.0))
    assert found.terms["weights"] == 0.0
    assert found.mean_error < 1e-9


@pytest.mark.wide
@pytest.mark.parametrize(
    "family",
    [
        *("glm-5.3-flash", "ling-2.6", "kimi-linear", "olmo-hybrid", "diffllama", "jetmoe"),
        *("minimax-m3", "mimo-v2-flash", "ax-k2", "gemma-4-inputs"),
    ],
)
def test_a_geometry_has_pages_as_the_executor_has_them(tmp_path, family):
    """Linear attention has projections to keys that pages don't keep; gates of pools are kept behind index keys."""
    save_family(family, tmp_path)
    executor = CpuExecutor(EngineConfig(model=tmp_path, memory_bytes=4 << 20, threads=1))
    geometry = geometry_of(read_model_config(tmp_path), executor)
    for each in (geometry, Geometry.model_validate_json(geometry.model_dump_json())):
        found = each.page_layout(16).layer_shapes
        assert [shape[:2] for shape in found] == [shape[:2] for shape in executor.layout.layer_shapes]
    executor.close()
