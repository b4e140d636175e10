"""Cost models: the papers' formulas, fits that find the truth, and profiles that say where every number is from."""

from __future__ import annotations

import itertools
import json
import operator
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.core.costs.fit import FitError, fit
from chorus.core.costs.models import (
    CostModel,
    DiskCost,
    Kernel,
    OverheadCost,
    StepCost,
    StepWork,
    TransferCost,
)
from chorus.core.costs.profile import ProfileError, load_profile, parse_profile, shipped_profiles
from chorus.core.costs.work import STEP_TERMS, step_work, term_values
from chorus.core.expert_share import share_of_experts
from chorus.core.model.specs.feed_forward import Experts, Routing
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import ScheduledSequence, StepPlan
from chorus.graphs.runner import DecodeBuckets
from chorus.memory.adapters.adapter import Adapter
from chorus.memory.files.manifest import AdapterManifest
from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart
from chorus.memory.pages.layer_projections import attention_projections, gated_projections
from chorus.memory.pages.projections import Projection, Projections

from ...tables import hybrid_table

PAPERS = ["a10-llama2-7b-bgmv", "a10-llama2-7b-mbgmv", "a100-llama2-7b", "h100-llama-70b-int4", "h200-llama3.1-8b"]


def row(name, lora_index, start, count):
    tokens = [1] * (start + count)
    return ScheduledSequence(
        name, lora_index, tokens[start:], start, [1], RequestParams(), 0, True, tokens, start + count
    )


def adapter(name, rank):
    part = AdapterPart(rank, 1.0, (0,), ("q_proj",))
    return Adapter(name, 1, AdapterManifest(Path(name), (part,)), AdapterLayout((), rank, 1, 1))


# -- the papers' numbers


def test_caraserve_figure_5_and_its_choice():
    """Decode latencies of its two instances as printed, and where a new request of rank 64 keeps the SLO of 36 ms."""
    first, second = [32] * 24, [64] * 16
    padded = load_profile("a10-llama2-7b-bgmv").costs()
    ragged = load_profile("a10-llama2-7b-mbgmv").costs()
    printed = 0.05e-3  # half of its last digit
    assert padded.decode_seconds(first) == pytest.approx(34.8e-3, abs=printed)
    assert padded.decode_seconds(second) == pytest.approx(35.8e-3, abs=printed)
    assert padded.decode_seconds([*second, 64]) <= 36e-3 < padded.decode_seconds([*first, 64])
    assert ragged.decode_seconds(first) == pytest.approx(35.3e-3, abs=printed)
    assert ragged.decode_seconds(second) == pytest.approx(35.9e-3, abs=printed)
    assert ragged.decode_seconds([*first, 64]) <= 36e-3 < ragged.decode_seconds([*second, 64])


@pytest.mark.parametrize(("batch", "length", "published"), [(1, 128, 11), (32, 128, 13), (1, 2048, 17), (32, 2048, 34)])
def test_punica_figure_1(batch, length, published):
    """The batching effect of the decode stage, printed in whole milliseconds, for short and for long sequences."""
    costs = load_profile("a100-llama2-7b").costs()
    seconds = costs.decode_seconds([0] * batch, batch * length, length - 1)
    assert seconds == pytest.approx(published * 1e-3, abs=0.5e-3)


def test_punicas_adapters_and_link():
    punica = load_profile("a100-llama2-7b")
    costs = punica.costs()
    assert costs.decode_seconds([16] * 32) - costs.decode_seconds([0] * 32) == pytest.approx(2e-3)
    assert punica.geometry.adapter_bytes(16) == pytest.approx(80e6, rel=0.01)
    assert costs.link.seconds(punica.geometry.adapter_bytes(16)) == pytest.approx(80e6 / 31.5e9, rel=0.01)


def test_the_articles_steps_and_adapters():
    article = load_profile("h100-llama-70b-int4")
    costs = article.costs()
    assert costs.decode_seconds([0] * 128) == pytest.approx(28.5e-3, rel=1e-4)
    with_40 = costs.step.seconds(StepWork(128, 128, 0, 0, 128 * 16, 128 * 16, 40 * 16))
    assert with_40 == pytest.approx((28.5 + 3.1) * 1e-3, rel=1e-4)
    assert costs.link.seconds(160_000_000) == pytest.approx(5.7e-3, rel=0.01)
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert article.geometry.adapter_bytes(16, attention) == 131_072_000, "K and V have 8 heads of 64"


#: Bytes and operations per second of each profile's datasheet, and the share of the latter that it takes for reached.
DEVICES = {
    "a10-llama2-7b-bgmv": (0.6e12, 0.5 * 125e12),
    "a10-llama2-7b-mbgmv": (0.6e12, 0.5 * 125e12),
    "a100-llama2-7b": (2.039e12, 0.5 * 312e12),
    "h200-llama3.1-8b": (4.8e12, 989e12),
}


@pytest.mark.parametrize("name", DEVICES)
def test_rooflines_follow_from_the_shapes(name):
    """Weights, LM head and embeddings count once and only where they are computed."""
    profile, (bandwidth, rate) = load_profile(name), DEVICES[name]
    shapes, step = profile.geometry, profile.costs().step
    weights = shapes.projections.num_weights
    head = shapes.hidden_size * shapes.vocab_size
    kv_bytes = shapes.page_layout(1).page_bytes
    assert step.weights == pytest.approx(2 * weights / bandwidth, rel=1e-5)
    assert step.per_token == pytest.approx(2 * weights / rate, rel=1e-5)
    assert step.head == pytest.approx(2 * head / bandwidth, rel=1e-5)
    assert step.per_logits == pytest.approx(2 * head / rate, rel=1e-5)
    assert step.per_kv_token == pytest.approx(kv_bytes / bandwidth, rel=1e-5)
    attended = 4 * shapes.num_layers * shapes.num_heads * shapes.head_dim
    assert step.per_pair == pytest.approx(attended / rate, rel=1e-5)


def test_rank_64_on_three_attention_projections_is_about_100_mib():
    geometry = load_profile("a10-llama2-7b-bgmv").geometry
    assert geometry.adapter_bytes(64, ("q_proj", "k_proj", "v_proj")) == 96 << 20
    assert geometry.page_layout(16).page_bytes == 8 << 20


def test_llama_3_page_is_2_mib():
    assert load_profile("h200-llama3.1-8b").geometry.page_layout(16).page_bytes == 2 << 20


# -- formulas


@given(ranks=st.lists(st.sampled_from([0, 8, 16, 64]), min_size=1, max_size=40), kv=st.integers(0, 9999))
def test_decode_follows_the_kernel(ranks, kv):
    step = StepCost(base=3.0, per_row=0.5, per_kv_token=0.01, per_longest=0.002, per_rank=0.25)
    using = [rank for rank in ranks if rank]
    plain = 3.0 + 0.5 * len(ranks) + 0.01 * kv + 0.002 * 7
    for kernel, work in ((Kernel.SGMV, sum(using)), (Kernel.BGMV, len(using) * max(using, default=0))):
        costs = CostModel(kernel, step, DiskCost(), TransferCost())
        assert costs.decode_seconds(ranks, kv, 7) == pytest.approx(plain + 0.25 * work)


def test_products_take_the_longer_of_reading_and_multiplying():
    step = StepCost(base=1.0, weights=8.0, per_token=0.5, head=2.0, per_logits=1.0)
    assert [step.seconds(StepWork(tokens, 1)) for tokens in (1, 16, 20)] == [11.0, 11.0, 13.0]
    assert [step.seconds(StepWork(16, rows)) for rows in (1, 2, 3)] == [11.0, 11.0, 12.0]


@pytest.mark.parametrize(("count", "each"), [(4, 1), (5, 2), (6, 3), (4, 4)])
def test_experts_of_a_step_are_those_that_its_tokens_choose_on_average(count, each):
    """Over all choices of all tokens, each as likely as any other."""
    choices = [frozenset(chosen) for chosen in itertools.combinations(range(count), each)]
    for tokens in range(1, 4):
        unions = [len(frozenset().union(*chosen)) for chosen in itertools.product(choices, repeat=tokens)]
        assert share_of_experts(each / count, tokens) == pytest.approx(sum(unions) / len(unions) / count)


@given(share=st.floats(0.001, 1.0), tokens=st.integers(0, 500), more=st.integers(1, 500), rows=st.integers(0, 64))
def test_tokens_read_ever_fewer_further_experts(share, tokens, more, rows):
    """The first as many as it chooses, all together no more than there are."""
    step = StepCost(base=1.0, experts=8.0, expert_share=share)
    seconds = [step.seconds(StepWork(count, 1)) for count in (tokens, tokens + more, tokens + 2 * more)]
    first, second = (after - before for before, after in itertools.pairwise(seconds))
    assert first >= second - 1e-12 >= -2e-12
    assert step.seconds(StepWork(1, 1)) == pytest.approx(1.0 + 8.0 * share)
    assert seconds[-1] <= 9.0
    with_prompt = step.with_prompt(tokens, rows, more)
    assert with_prompt == pytest.approx((seconds[0], seconds[1]))


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
    step = StepCost(base=1.0, lora=0.5, per_rank=0.01, per_token_rank=0.001, per_adapter_rank=0.1)
    assert step.seconds(StepWork(4, 4, 0, 0, row_ranks=64, token_ranks=64, adapter_ranks=16)) == pytest.approx(3.804)
    assert step.seconds(StepWork(4, 4)) == 1.0


def test_a_prompt_alone():
    step = StepCost(
        base=1.0,
        ragged=0.5,
        weights=0.8,
        per_token=0.01,
        per_pair=0.001,
        per_kv_token=0.002,
        per_rank=0.03,
        per_token_rank=0.0001,
    )
    costs = CostModel(Kernel.SGMV, step, DiskCost(), TransferCost())
    expected = 1.0 + 0.5 + 1.0 + 0.001 * 5050 + 0.002 * 100 + 0.03 * 8 + 0.0001 * 800
    assert costs.prefill_seconds(100, 8) == pytest.approx(expected)
    assert costs.migrate_seconds(100, 8) == costs.prefill_seconds(100, 8)


@given(
    prompts=st.lists(st.tuples(st.integers(1, 300), st.sampled_from([0, 8, 64])), min_size=1, max_size=5),
    kernel=st.sampled_from(Kernel),
)
def test_a_queue_is_its_prompts_in_one_step(prompts, kernel):
    """Prompts of one length and one rank cost as in a plan, except for attention and the shared part of a step."""
    costs = CostModel(
        kernel, StepCost(1.0, 0.5, 0.8, 0.01, per_rank=0.03, per_token_rank=1e-4), DiskCost(), TransferCost()
    )
    count, rank = prompts[0]
    adapters = [adapter("a", rank)] if rank else []
    plan = StepPlan(1, [row(f"r{i}", len(adapters) - 1, 0, count + 1) for i in range(len(prompts))], adapters)
    tokens = (count + 1) * len(prompts)
    found = costs.queue_seconds(tokens, len(prompts), tokens * rank, rank)
    assert found == pytest.approx(costs.step.seconds(step_work(plan, kernel)))


def test_work_of_a_plan():
    adapters = [adapter("a", 8), adapter("b", 64)]
    decode = StepPlan(1, [row("x", -1, 9, 1), row("y", 0, 4, 1), row("z", 1, 6, 1), row("w", 1, 2, 1)], adapters, 8)
    ranks = 8 + 64 + 64
    assert step_work(decode, Kernel.SGMV) == StepWork(8, 4, 25, 9, ranks, ranks, 72)
    assert step_work(decode, Kernel.BGMV) == StepWork(8, 4, 25, 9, 3 * 64, 3 * 64, 72)
    mixed = StepPlan(2, [row("x", 0, 3, 5), row("y", -1, 7, 1), row("z", 1, 1, 1)], adapters)
    work = step_work(mixed, Kernel.SGMV)
    assert work == StepWork(7, 3, 18, 7, 72, 5 * 8 + 64, 72, sum(range(4, 9)), True)
    work = step_work(mixed, Kernel.BGMV)
    assert (work.row_ranks, work.token_ranks) == (2 * 64, 6 * 64)
    base = step_work(StepPlan(3, [row("x", -1, 3, 1)], [], 1), Kernel.BGMV)
    assert (base.row_ranks, base.adapter_ranks) == (0, 0)


@given(st.lists(st.floats(0.1, 9.0), min_size=11, max_size=11), st.sampled_from([0, 1, 4]))
def test_terms_are_what_seconds_sums(values, knee):
    terms = dict(zip(STEP_TERMS, values, strict=True))
    step = StepCost(**terms, weights=knee * terms["per_token"])
    for adapters, bucket, count in (([], 2, 1), ([adapter("a", 8)], 2, 1), ([adapter("a", 8)], None, 7), ([], None, 3)):
        work = step_work(StepPlan(1, [row("x", len(adapters) - 1, 5, count)], adapters, bucket), Kernel.SGMV)
        total = sum(map(operator.mul, values, term_values(work, knee)))
        assert step.seconds(work) == pytest.approx(total)


# -- more work never takes less time

RANKS = (8, 16, 32, 64)
positive = st.floats(0.0, 1.0)
steps = st.one_of(
    st.sampled_from([load_profile(name).costs().step for name in PAPERS]), st.builds(StepCost, *[positive] * 17)
)
chunk = st.tuples(st.integers(-1, 3), st.integers(0, 2000), st.integers(2, 300))
decode_row = st.tuples(st.integers(-1, 3), st.integers(1, 2000), st.just(1))


def plan_of(*rows):
    """rows: (number of an adapter, tokens in its KV, tokens to compute)."""
    rows = sorted(rows, key=lambda each: each[2] == 1)
    used = sorted({number for number, _, _ in rows} - {-1})
    lora_indices = {number: lora_index for lora_index, number in enumerate(used)} | {-1: -1}
    made = [row(f"r{i}", lora_indices[number], start, count) for i, (number, start, count) in enumerate(rows)]
    bucket = len(rows) if all(count == 1 for _, _, count in rows) else None
    return StepPlan(1, made, [adapter(f"a{number}", RANKS[number]) for number in used], bucket)


@given(
    step=steps,
    kernel=st.sampled_from(Kernel),
    chunks=st.lists(chunk, max_size=3),
    decodes=st.lists(decode_row, max_size=40),
    more=st.one_of(chunk, decode_row),
)
def test_a_row_or_a_token_never_makes_a_step_cheaper(step, kernel, chunks, decodes, more):
    def price(*rows):
        return step.seconds(step_work(plan_of(*rows), kernel)) if rows else 0.0

    rows = [*chunks, *decodes]
    before = price(*rows)
    least = before * (1 - 1e-12)  # sums round
    assert price(*rows, more) >= least
    assert before >= max(price(*chunks), price(*decodes)) * (1 - 1e-12)
    for index, (number, start, count) in enumerate(rows):
        rows[index] = number, start, count + 1
        assert price(*rows) >= least
        rows[index] = number, start, count


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("count", [1, 5, 9, 31, 63, 65, 97, 129, 250, 257])
def test_a_prompt_beside_a_padded_batch(name, count):
    """A step with a prompt runs unpadded; below the knee, padding is free in every shipped profile."""
    costs = load_profile(name).costs()
    rows = [row(f"r{i}", -1, 1000, 1) for i in range(count)]
    alone = costs.step.seconds(step_work(StepPlan(1, rows, [], DecodeBuckets(512).pick(count)), costs.kernel))
    for tokens in (2, 20, 500):
        prompt = row("new", -1, 0, tokens)
        mixed = costs.step.seconds(step_work(StepPlan(1, [prompt, *rows], []), costs.kernel))
        assert mixed >= max(alone, costs.prefill_seconds(tokens))


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


def test_what_is_known_is_not_fitted_again():
    """A sample of which more is known than it took has no more say than the others: both were measured."""
    generator = np.random.default_rng(5)
    rows = np.column_stack([np.ones(40), generator.uniform(1, 100, 40)])
    known = generator.uniform(0.5, 2.0, 40)
    seconds = known + rows @ [0.05, 2e-3]
    found = fit(("a", "b"), rows.tolist(), seconds.tolist(), known.tolist())
    assert list(found.terms.values()) == pytest.approx([0.05, 2e-3])
    assert found.r2 == pytest.approx(1.0) and found.mean_error < 1e-6
    known[7] = 1.1 * seconds[7]
    found = fit(("a", "b"), rows.tolist(), seconds.tolist(), known.tolist())
    assert found.terms["b"] == pytest.approx(2e-3, rel=0.15)


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
    assert "not measured" in raw["step"]["terms"]["weights"]["source"]


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
        (lambda raw: without(raw, "step", "terms", "base", "source"), r"step\.terms\.base\.source: Field required"),
        (lambda raw: changed(raw, -1.0, "step", "terms", "base", "value"), r"step\.terms\.base\.value is -1.0"),
        (lambda raw: changed(raw, "1", "step", "terms", "base", "value"), r"step\.terms\.base\.value is '1'"),
        (lambda raw: changed(raw, float("nan"), "step", "terms", "base", "value"), r"base\.value is nan"),
        (lambda raw: changed(raw, 3, "format"), r"format is 3"),
        (lambda raw: changed(raw, 1, "format"), r"format is 1, in which prefills and decode.*`chorus profile`"),
        (lambda raw: changed(raw, "mbgmv", "kernel"), r"kernel is 'mbgmv'.*'bgmv' or 'sgmv'"),
        (lambda raw: changed(raw, 1, "speed"), r"speed is 1: Extra"),
        (
            lambda raw: changed(raw, {"value": 1.0, "source": "made up"}, "step", "terms", "per_layer"),
            r"step\.terms\.per_layer is no term; known ones are base, ragged",
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


# -- layers of two kinds


def test_modules_of_earlier_versions_have_numbers_of_products(tmp_path):
    """As a version wrote them of layers with a mixture, and without."""
    shapes = {
        "self_attn.q_proj": (0, 16, 16, 2), "self_attn.k_proj": (0, 16, 8, 1), "self_attn.v_proj": (0, 16, 8, 1),
        "self_attn.o_proj": (1, 16, 16, 2), "mlp.gate": (8, 16, 5, 1), "mlp.experts.gate_proj": (12, 16, 24, 24),
        "mlp.experts.up_proj": (12, 16, 24, 24), "mlp.experts.down_proj": (13, 24, 16, 24),
        "mamba.x_proj": (25, 16, 8, 4),
    }  # fmt: skip
    modules = [
        {"path": path, "group": group, "inputs": inputs, "outputs": outputs, "units": units, "sections": [],
         "section_units": [], "experts": 5 * (".experts." in path), "form": "", "layers": [0, 1]}
        for path, (group, inputs, outputs, units) in shapes.items()
    ]  # fmt: skip
    load_profile("a100-llama2-7b").save(path := tmp_path / "p.json")
    raw = json.loads(path.read_text())
    raw["geometry"] |= {"num_layers": 2, "modules": modules}
    table = parse_profile(json.dumps(raw).encode(), "p").geometry.projections
    want = attention_projections(16, 2, 1, 8) + Experts(5, 24, Routing(2)).projections(16)
    assert table.layers == ((*want, Projection("mamba.x_proj", "scan_in", 16, 8, 4, is_row_parallel=True)),) * 2
    for wrong in (4, 48, "qkv", True, -1):
        raw["geometry"]["modules"][0]["group"] = wrong
        with pytest.raises(ProfileError, match=r"geometry.modules.0.*group is .*it must be one of 0, 1"):
            parse_profile(json.dumps(raw).encode(), "p")


def test_bytes_of_adapters_on_experts(tmp_path):
    experts = Experts(5, 24, Routing(2), shared_size=8, shared_gate=True)
    mixture = attention_projections(16, 2, 1, 8) + experts.projections(16)
    dense = attention_projections(16, 2, 1, 8) + gated_projections(16, 32)
    profile, table = load_profile("a100-llama2-7b"), Projections((mixture, dense, mixture))
    geometry = profile.geometry.model_copy(update={"num_layers": 3, "itemsize": 4}).with_projections(table)
    profile.model_copy(update={"geometry": geometry}).save(tmp_path / "p.json")
    found = load_profile(tmp_path / "p.json").geometry
    assert found.projections == table
    assert found.adapter_bytes(4) == 4 * 4 * (3 * (32 + 24 + 24 + 32) + 3 * 48), "experts count where they are named"
    assert found.adapter_bytes(4, ["gate"]) == 4 * 4 * 2 * (16 + 8), "a row of 5 values takes 32 bytes"
    assert found.adapter_bytes(4, ["experts.down_proj"]) == 4 * 4 * 2 * 5 * (24 + 16)
    assert found.adapter_bytes(4, ["shared_expert.up_proj"]) == 4 * 4 * 2 * (16 + 8)


def test_a_geometry_may_have_layers_of_two_kinds(tmp_path):
    profile, table = load_profile("a100-llama2-7b"), hybrid_table("LLAL")
    geometry = profile.geometry.model_copy(update={"num_layers": 4, "itemsize": 4}).with_projections(table)
    profile.model_copy(update={"geometry": geometry}).save(tmp_path / "p.json")
    found = load_profile(tmp_path / "p.json").geometry
    assert found.projections == table
    assert found.adapter_bytes(8) == 4 * 8 * table.rank_elems()
    assert found.adapter_bytes(8, ["q_proj", "in_proj_z"]) == 4 * 8 * (32 + 3 * 32)
    assert found.product_bytes(["q_proj", "in_proj_z"]) == 4 * (16 + 3 * 16)
    assert found.page_layout(16).num_layers == 1, "one layer has keys and values"


def test_a_geometry_may_have_attention_of_two_shapes(tmp_path):
    """Pages have room for one layer of 4 heads of 16, or two of 2 heads of 16; the queries' forms are kept apart."""
    shapes = [(2, ""), (2, ""), (4, "full")]
    layers = [attention_projections(32, 4, heads, 16, form=form) + gated_projections(32, 24) for heads, form in shapes]
    table, profile = Projections(tuple(layers)), load_profile("a100-llama2-7b")
    geometry = profile.geometry.model_copy(update={"num_layers": 3}).with_projections(table)
    profile.model_copy(update={"geometry": geometry}).save(tmp_path / "p.json")
    found = load_profile(tmp_path / "p.json").geometry
    assert found.projections == table
    assert found.page_layout(16).page_bytes == 16 * 2 * 4 * 16 * found.itemsize
    assert [group.layers for group in found.page_layout(16).groups] == [(0, 1), (2,)]


def test_a_model_of_equal_layers_needs_no_list_of_modules():
    geometry = load_profile("a100-llama2-7b").geometry
    assert geometry.with_projections(geometry.projections) is geometry
    assert geometry.modules is None


def test_wrong_modules_of_a_profile_are_named(tmp_path):
    profile, table = load_profile("a100-llama2-7b"), hybrid_table("LLAL")
    geometry = profile.geometry.model_copy(update={"num_layers": 4}).with_projections(table)
    profile.model_copy(update={"geometry": geometry}).save(path := tmp_path / "p.json")
    text = path.read_text()
    path.write_text(text.replace('"num_layers": 4', '"num_layers": 3'))
    with pytest.raises(ProfileError, match="layer 3; layers are 0 to 2"):
        load_profile(path)
    path.write_text(text.replace("self_attn.k_proj", "self_attn.other"))
    with pytest.raises(ProfileError, match="modules have no k_proj"):
        load_profile(path)
