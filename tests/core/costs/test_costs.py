"""Cost models: the papers' formulas, fits that find the truth, and profiles that say where every number is from."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.core.costs.fit import FitError, fit
from chorus.core.costs.models import CostModel, DecodeCost, DiskCost, Kernel, OverheadCost, PrefillCost, TransferCost
from chorus.core.costs.profile import ProfileError, load_profile, parse_profile, shipped_profiles
from chorus.core.costs.work import DECODE_TERMS, PREFILL_TERMS, StepWork, term_values
from chorus.core.requests.sampling_params import SamplingParams
from chorus.core.requests.types import ScheduledRow, StepPlan
from chorus.memory.adapters.adapter import Adapter
from chorus.memory.files.format import AdapterManifest
from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart

PAPERS = ["a10-llama2-7b-bgmv", "a10-llama2-7b-mbgmv", "a100-llama2-7b", "h100-llama-70b-int4", "h200-llama3.1-8b"]


def row(name, slot, start, count):
    tokens = [1] * (start + count)
    return ScheduledRow(name, slot, tokens[start:], start, [1], SamplingParams(), 0, True, tokens, start + count)


def adapter(name, rank):
    part = AdapterPart(rank, 1.0, (0,), ("q_proj",))
    return Adapter(name, 1, AdapterManifest(Path(name), (part,)), AdapterLayout((), rank, 1, 1))


# -- the papers' numbers


def test_caraserve_figure_5_and_its_choice():
    """Decode latencies of its two instances, and where a new request of rank 64 breaks the objective of 36 ms."""
    padded = load_profile("a10-llama2-7b-bgmv").costs()
    ragged = load_profile("a10-llama2-7b-mbgmv").costs()
    first, second = [32] * 24, [64] * 16
    assert padded.decode_seconds(first) == pytest.approx(34.8e-3)
    assert padded.decode_seconds(second) == pytest.approx(35.8e-3)
    assert ragged.decode_seconds(first) == pytest.approx(35.3e-3)
    assert ragged.decode_seconds(second) == pytest.approx(35.9e-3)
    assert padded.decode_seconds([*first, 64]) > 36e-3
    assert padded.decode_seconds([*second, 64]) == pytest.approx(36e-3, abs=1e-4)
    assert ragged.decode_seconds([*first, 64]) < 36e-3 < ragged.decode_seconds([*second, 64])


def test_punica_and_article_numbers():
    punica = load_profile("a100-llama2-7b")
    costs = punica.costs()
    assert costs.decode_seconds([0] * 32, 32 * 128) - costs.decode_seconds([0], 128) == pytest.approx(2e-3)
    assert costs.decode_seconds([16] * 32) - costs.decode_seconds([0] * 32) == pytest.approx(2e-3)
    assert costs.link.seconds(punica.geometry.adapter_bytes(16)) == pytest.approx(2e-3, rel=0.01)
    article = load_profile("h100-llama-70b-int4")
    costs = article.costs()
    assert costs.decode_seconds([0] * 128) == pytest.approx(28.5e-3)
    assert costs.decode.seconds(128, 0, 128 * 16, 40 * 16) == pytest.approx((28.5 + 3.1) * 1e-3)
    assert costs.link.seconds(160_000_000) == pytest.approx(5.7e-3, rel=0.01)


def test_rank_64_on_three_attention_projections_is_about_100_mib():
    geometry = load_profile("a10-llama2-7b-bgmv").geometry
    assert geometry.adapter_bytes(64, ("q_proj", "k_proj", "v_proj")) == 96 << 20
    assert geometry.page_layout(16).page_bytes == 8 << 20


def test_llama_3_page_is_2_mib():
    assert load_profile("h200-llama3.1-8b").geometry.page_layout(16).page_bytes == 2 << 20


# -- formulas


@given(ranks=st.lists(st.sampled_from([0, 8, 16, 64]), min_size=1, max_size=40), kv=st.integers(0, 9999))
def test_decode_follows_the_kernel(ranks, kv):
    decode = DecodeCost(base=3.0, per_row=0.5, per_kv_token=0.01, per_rank=0.25)
    using = [rank for rank in ranks if rank]
    plain = 3.0 + 0.5 * len(ranks) + 0.01 * kv
    for kernel, work in ((Kernel.SGMV, sum(using)), (Kernel.BGMV, len(using) * max(using, default=0))):
        costs = CostModel(kernel, PrefillCost(), decode, DiskCost(), TransferCost())
        assert costs.decode_seconds(ranks, kv) == pytest.approx(plain + 0.25 * work)


def test_rows_cost_more_beyond_the_knee():
    decode = DecodeCost(base=3.0, per_row=0.5, per_row_beyond=0.25, knee=8.0)
    assert decode.seconds(8, 0) == pytest.approx(7.0)
    assert decode.seconds(12, 0) == pytest.approx(10.0)


def test_overhead_counts_prompts():
    overhead = OverheadCost(base=1.0, per_row=0.1, per_prompt=0.5)
    assert overhead.seconds(4) == pytest.approx(1.4)
    assert overhead.seconds(4, 2) == pytest.approx(2.4)


@given(seconds=st.floats(0.001, 1.0), left=st.floats(0.0, 1.0), contention=st.floats(0.0, 0.9))
def test_a_step_beside_a_read_loses_a_share_of_the_time_they_share(seconds, left, contention):
    delay = DiskCost(contention=contention).delay(seconds, left)
    shared = min(left, seconds + delay)
    assert delay == pytest.approx(contention * shared)


def test_adapters_that_requests_share_are_read_once():
    decode = DecodeCost(base=1.0, lora=0.5, per_rank=0.01, per_adapter_rank=0.1)
    assert decode.seconds(4, 0, rank_work=64, adapter_ranks=16) == pytest.approx(1.0 + 0.5 + 0.64 + 1.6)
    assert decode.seconds(4, 0) == 1.0


def test_prefill_has_a_floor_and_a_quadratic_term():
    prefill = PrefillCost(floor=2.0, base=1.0, per_token=0.01, per_pair=0.001, per_rank=0.0001)
    assert prefill.seconds(10, 1, 55.0) == 2.0
    costs = CostModel(Kernel.SGMV, prefill, DecodeCost(), DiskCost(), TransferCost())
    assert costs.prefill_seconds(100, 8) == pytest.approx(1.0 + 1.0 + 0.001 * 5050 + 0.0001 * 800)
    assert costs.migrate_seconds(100, 8) == costs.prefill_seconds(100, 8)


def test_work_of_a_plan():
    adapters = [adapter("a", 8), adapter("b", 64)]
    decode = StepPlan(1, [row("x", -1, 9, 1), row("y", 0, 4, 1), row("z", 1, 6, 1), row("w", 1, 2, 1)], adapters, 8)
    work = StepWork.of(decode, Kernel.SGMV)
    assert dataclasses.astuple(work) == (True, 8, 4, 25, 25, 8 + 64 + 64, 72)
    assert StepWork.of(decode, Kernel.BGMV).rank_work == 3 * 64
    mixed = StepPlan(2, [row("x", 0, 3, 5), row("y", -1, 7, 1)], adapters[:1])
    work = StepWork.of(mixed, Kernel.SGMV)
    assert dataclasses.astuple(work) == (False, 2, 6, 16, sum(range(4, 9)) + 8, 5 * 8, 8)
    base = StepWork.of(StepPlan(3, [row("x", -1, 3, 1)], [], 1), Kernel.BGMV)
    assert (base.rank_work, base.adapter_ranks) == (0, 0)


@given(st.lists(st.floats(0.1, 9.0), min_size=15, max_size=15))
def test_terms_are_what_seconds_sums(values):
    decode = DecodeCost(**dict(zip(DECODE_TERMS, values[:7], strict=True)), knee=1.0)
    prefill = PrefillCost(**dict(zip(PREFILL_TERMS, values[7:], strict=True)))
    costs = CostModel(Kernel.SGMV, prefill, decode, DiskCost(), TransferCost())
    for adapters, bucket, count in (([], 2, 1), ([adapter("a", 8)], 2, 1), ([adapter("a", 8)], None, 7), ([], None, 3)):
        work = StepWork.of(StepPlan(1, [row("x", len(adapters) - 1, 5, count)], adapters, bucket), Kernel.SGMV)
        model = decode if bucket else prefill
        terms = DECODE_TERMS if bucket else PREFILL_TERMS
        total = sum(getattr(model, name) * value for name, value in zip(terms, term_values(work, 1.0), strict=True))
        assert work.seconds(costs) == pytest.approx(total)


# -- fitting


@given(
    seed=st.integers(0, 10_000),
    truth=st.lists(st.sampled_from([0.0, 0.0, 1e-6, 3e-3, 0.2]), min_size=4, max_size=4).filter(
        lambda terms: any(terms[1:])
    ),
)
def test_fit_finds_the_terms_that_made_the_samples(seed, truth):
    generator = np.random.default_rng(seed)
    rows = np.column_stack([np.ones(60), generator.uniform(1, [9, 5000, 100], size=(60, 3))])
    found = fit(("a", "b", "c", "d"), rows.tolist(), (rows @ truth).tolist())
    assert list(found.terms.values()) == pytest.approx(truth, rel=1e-6, abs=1e-9)
    assert found.r2 == pytest.approx(1.0)
    assert found.mean_error < 1e-6


def test_fit_never_goes_below_zero_and_reports_what_is_left():
    generator = np.random.default_rng(3)
    x = generator.uniform(1, 10, 300)
    y = 20.0 - 0.5 * x + generator.normal(0, 0.5, 300)
    found = fit(("base", "slope"), np.column_stack([np.ones(300), x]).tolist(), y.tolist())
    assert found.terms["slope"] == 0.0
    assert found.terms["base"] == pytest.approx(len(y) / (1 / y).sum()), "the mean with weights of 1 / seconds"
    assert found.r2 == pytest.approx(0.0, abs=0.01)
    noisy = fit(("base", "slope"), np.column_stack([np.ones(300), x]).tolist(), (3 + 2 * x + y - y.mean()).tolist())
    assert 0.9 < noisy.r2 < 1.0


def test_a_term_without_samples_is_zero():
    assert fit(("base", "none"), [[1.0, 0.0]] * 5, [2.0] * 5).terms == {"base": pytest.approx(2.0), "none": 0.0}


@pytest.mark.parametrize(
    ("rows", "seconds", "message"),
    [
        ([[1.0, 2.0]] * 2, [1.0] * 2, "2 samples can't determine 2 terms"),
        ([[1.0, float("nan")]] * 3, [1.0] * 3, "finite"),
        ([[1.0, 2.0]] * 3, [1.0, 0.0, 1.0], "more than 0 seconds"),
    ],
)
def test_useless_samples_are_refused(rows, seconds, message):
    with pytest.raises(FitError, match=message):
        fit(("a", "b"), rows, seconds)


# -- profiles


def test_shipped_profiles():
    assert shipped_profiles() == sorted(PAPERS)


@pytest.mark.parametrize("name", PAPERS)
def test_a_shipped_profile_is_complete(name):
    profile = load_profile(name)
    assert profile.name == name
    assert len(profile.source) > 40
    costs = profile.costs()
    assert 0.1e-3 < costs.decode_seconds([16] * 8, 8 * 500) < 1.0
    assert costs.prefill_seconds(2000, 16) > costs.prefill_seconds(100, 16) > 0.1e-3
    assert profile.memory_bytes.value > 100 * profile.geometry.page_layout(16).page_bytes


def test_the_h200s_numbers_are_called_what_they_are():
    raw = load_profile("h200-llama3.1-8b").model_dump()
    assert "roofline" in raw["source"]
    assert "not measured" in raw["decode"]["terms"]["base"]["source"]


def test_save_and_load(tmp_path):
    profile = load_profile("a100-llama2-7b")
    profile.save(tmp_path / "copy.json")
    assert load_profile(tmp_path / "copy.json") == profile


def without(raw, *path):
    *parents, last = path
    for key in parents:
        raw = raw[key]
    del raw[last]


def changed(raw, value, *path):
    *parents, last = path
    for key in parents:
        raw = raw[key]
    raw[last] = value


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda raw: without(raw, "geometry", "head_dim"), r"geometry\.head_dim: Field required"),
        (lambda raw: without(raw, "decode", "terms", "base", "source"), r"decode\.terms\.base\.source: Field required"),
        (lambda raw: changed(raw, -1.0, "decode", "terms", "base", "value"), r"decode\.terms\.base\.value is -1.0"),
        (lambda raw: changed(raw, "1", "decode", "terms", "base", "value"), r"decode\.terms\.base\.value is '1'"),
        (lambda raw: changed(raw, float("nan"), "decode", "terms", "base", "value"), r"base\.value is nan"),
        (lambda raw: changed(raw, 2, "format"), r"format is 2"),
        (lambda raw: changed(raw, "mbgmv", "kernel"), r"kernel is 'mbgmv'.*'bgmv' or 'sgmv'"),
        (lambda raw: changed(raw, 1, "speed"), r"speed is 1: Extra"),
        (
            lambda raw: changed(raw, {"value": 1.0, "source": "made up"}, "decode", "terms", "per_layer"),
            r"decode\.terms\.per_layer is no term; known ones are base, per_row",
        ),
    ],
)
def test_a_wrong_profile_is_refused_with_its_field(edit, message):
    raw = load_profile("a100-llama2-7b").model_dump(exclude_none=True)
    edit(raw)
    with pytest.raises(ProfileError, match=message):
        parse_profile(json.dumps(raw).encode(), "file.json")


@pytest.mark.parametrize(("data", "message"), [(b"{", "no JSON"), (b"[1]", "the file"), (b'{"a": 1, "a": 2}', "twice")])
def test_what_is_no_profile_is_refused(data, message):
    with pytest.raises(ProfileError, match=rf"file\.json: .*{message}"):
        parse_profile(data, "file.json")


def test_an_unknown_name_lists_the_shipped_ones(tmp_path):
    with pytest.raises(ProfileError, match=r"neither a file nor a shipped profile.*a100-llama2-7b"):
        load_profile("a1000")
    with pytest.raises(ProfileError, match="cannot be read"):
        load_profile(tmp_path)


def test_costs_need_neither_torch_nor_numpy():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from chorus.core.costs.profile import load_profile; from chorus.core.costs import work\n"
        "print(load_profile('a100-llama2-7b').costs().decode_seconds([16]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
