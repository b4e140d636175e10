"""Merged mode: greedy tokens equal the reference's whichever adapter is in the weights, and whenever that changes."""

from __future__ import annotations

import itertools
import random
from contextlib import suppress

import pytest
import torch

from chorus.core.engine import Engine
from chorus.core.merging.learned_prices import LearnedPrices
from chorus.core.merging.mode_policy import ModeChoice, ModePolicy
from chorus.core.model.weights.shadow import MOST_GROWTH
from chorus.core.policies import Policies
from chorus.core.requests.types import CannotMerge
from chorus.graphs.runner import StepMode
from chorus.memory.adapters.store import UnknownAdapter
from chorus.memory.pages.pool import PageKind
from chorus.perf.inline_reads import InlineReads

from ...conftest import ATTENTION, MLP, Subject, save_adapter
from ...tables import LAYER_MATRICES
from ..conftest import ticking
from ..test_parity import MODELS, add_all, check, make_cases, make_families

pytestmark = pytest.mark.wide


def load(driver, *names):
    """Have adapters resident and idle."""
    for name in names:
        driver.run(f"load {name}", name, [3], max_tokens=1)


def merge(driver, name, prompt=(5, 6, 7)):
    """Get an adapter merged while a request of the base model runs."""
    load(driver, name)
    driver.engine.merge(name)
    driver.add(f"beside {name}", None, list(prompt), max_tokens=60)
    while driver.engine.merging.is_under_way:
        driver.step()
    assert driver.engine.stats().merged_adapter == name
    driver.engine.abort(f"beside {name}")
    driver.plans.clear()


def some(subject, *names):
    """Those of the adapters."""
    return {name: subject.adapters[name] for name in names}


def modes(driver):
    return {plan.mode for plan in driver.plans}


@pytest.mark.parametrize("model", MODELS)
def test_requests_of_the_merged_adapter_alone(subject, drive, model):
    """Each adapter is merged into one of the models, and all are served next to each other in `test_mixture`."""
    it, models = subject(model), list(MODELS)
    for name in list(it.adapters)[models.index(model) :: len(models)]:
        driver = drive(it)
        merge(driver, name)
        cases = make_cases(it, 4, adapters=[name], seed=31, tokens=(4, 8))
        add_all(driver, cases)
        check(driver, cases)
        assert modes(driver) == {StepMode.MERGED}
        lora = driver.executor.rank._lora  # noqa: SLF001 - the step's input
        assert not lora.in_layers.segments.rows, "rows of the merged adapter pay for it"


@pytest.mark.parametrize(
    ("model", "name"),
    [*zip(MODELS, ["r1-all", "r2-qv", "r33-all", "r16-down"], strict=True), ("gqa", "r33-all"), ("mha", "r1-all")],
)
def test_mixture(subject, drive, model, name):
    """Ranks and targets differ, chunks of prompts and decode rows share steps, and base rows are among them."""
    it = subject(model)
    driver = drive(it, max_num_batched_tokens=56)
    merge(driver, name)
    cases = make_cases(it, 18, seed=32, longest=60, tokens=(20, 28))
    add_all(driver, cases)
    check(driver, cases)
    assert modes(driver) == {StepMode.MERGED}
    assert max(plan.num_adapters for plan in driver.plans) == len(it.adapters)
    assert any(plan.bucket is None and len(plan.sequences[-1].tokens) == 1 for plan in driver.plans), "no mixed step"


@pytest.mark.parametrize("names", [[None], ["r5-ko"], [None, "r5-ko"]], ids=str)
def test_nobody_uses_the_merged_adapter(subject, drive, names):
    it = subject("gqa")
    driver = drive(it)
    merge(driver, "r8-attention")
    cases = make_cases(it, 8, adapters=names, seed=33)
    add_all(driver, cases)
    check(driver, cases)
    assert modes(driver) == {StepMode.MERGED}


def test_an_adapter_of_several_ranks_and_of_some_layers(subject, drive, tmp_path):
    it = subject("gqa")
    patterns = {"rank_pattern": {"layers.1.self_attn.q_proj": 3}, "alpha_pattern": {"v_proj": 5}}
    save_adapter(it.model, tmp_path / "pattern", 6, 8, ["q_proj", "v_proj", "up_proj"], True, 7, **patterns)
    save_adapter(it.model, tmp_path / "layers", 4, 8, ATTENTION + MLP, False, 8, layers_to_transform=[1])
    it = Subject(it.model, {"pattern": tmp_path / "pattern", "layers": tmp_path / "layers"})
    for name in it.adapters:
        driver = drive(it)
        merge(driver, name)
        cases = make_cases(it, 9, seed=34)
        add_all(driver, cases)
        check(driver, cases)


def switching(driver, rng, names):
    """Something happens to the mode before nearly every step."""
    what = rng.random()
    if what < 0.1:
        driver.engine.reclaimer.reclaim_all()
    elif driver.engine.merging.is_under_way:  # a pause makes a matrix here, of up to twelve
        return
    elif what < 0.5 and driver.engine.stats().merged_adapter:
        driver.engine.unmerge()
    else:
        with suppress(CannotMerge):  # it is not resident
            driver.engine.merge(rng.choice(names))


@pytest.mark.parametrize("seed", range(2))
def test_random_switches_before_every_step(subject, drive, seed):
    it = subject("gqa")
    rng = random.Random(seed)
    driver = drive(it, max_num_batched_tokens=48, clock=lambda: 1.0)
    load(driver, *it.adapters)
    cases = make_cases(it, 24, seed=40 + seed, longest=60, tokens=(20, 40))
    add_all(driver, cases)
    names = rng.sample(list(it.adapters), 2)
    while driver.engine.has_work():
        if rng.random() < 0.7:
            switching(driver, rng, names)
        driver.step()
    check(driver, cases)
    stats = driver.engine.stats()
    assert stats.num_merges >= 2
    assert stats.num_mode_switches >= 5
    assert modes(driver) >= {StepMode.MERGED, StepMode.LORA}


def test_cached_prefixes_are_shared_by_the_modes(subject, drive):
    it = subject("gqa")
    names = ["r8-attention", "r3-mlp", None]
    driver = drive(it, max_num_seqs=4, memory_bytes=16 << 20)
    merge(driver, "r8-attention")
    for seed, unmerge in enumerate([False, True, False]):
        if unmerge:
            driver.engine.unmerge()
        else:
            driver.engine.merge("r8-attention")
        cases = make_families(it, adapters=names, stems=[64], seed=50, tokens=(8, 12))
        before = driver.engine.stats().num_prefix_hit_tokens
        add_all(driver, cases)
        check(driver, cases)
        assert driver.engine.stats().num_prefix_hit_tokens > before
        assert (StepMode.MERGED in modes(driver)) == (not unmerge), seed
        driver.answers.clear()
        driver.plans.clear()


def weights_of(driver):
    layers = driver.executor.rank.decoder.layers
    weights = [layer[name] for layer in layers for name in LAYER_MATRICES]
    return [weight.to_dense() if weight.is_mkldnn else weight.clone() for weight in weights]


def test_hundreds_of_switches_leave_no_trace(subject, drive):
    it = subject("gqa")
    driver = drive(it, prefix_cache=False)
    load(driver, "r33-all", "r2-qv")
    before = weights_of(driver)
    prompt = it.prompt("r1-all", 20, 12, seed=60)
    first = driver.run("first", "r1-all", prompt, max_tokens=12, logprobs=3)
    switches = 0
    for index in range(30):
        driver.engine.merge("r33-all" if index % 20 < 10 else "r2-qv")
        driver.add(f"a{index}", None, prompt[:3], max_tokens=40)
        while driver.engine.merging.is_under_way:
            driver.step()
        for _ in range(5):
            driver.engine.unmerge()
            driver.engine.merge("r33-all" if index % 20 < 10 else "r2-qv")
            driver.step()
            assert driver.plans[-1].mode is StepMode.MERGED
        driver.engine.abort(f"a{index}")
        driver.engine.unmerge()
        switches = driver.engine.stats().num_mode_switches
    assert switches >= 300
    assert all(torch.equal(one, other) for one, other in zip(before, weights_of(driver), strict=True))
    again = driver.run("again", "r1-all", prompt, max_tokens=12, logprobs=3)
    assert (again.tokens, again.logprobs) == (first.tokens, first.logprobs)


def test_every_pause_makes_a_matrix_and_no_more_than_there_is_time_for(subject, drive):
    """Time stands still here: each step makes one matrix."""
    it = subject("gqa")
    driver = drive(it, clock=lambda: 1.0)
    load(driver, "r3-mlp")
    driver.engine.merge("r3-mlp")
    driver.plans.clear()
    driver.add("one", "r3-mlp", [5, 6, 7], max_tokens=12)
    while driver.engine.merging.is_under_way:
        driver.step()
    layers, groups = 3, 2  # gate and up together, and down
    assert [plan.mode for plan in driver.plans] == [StepMode.LORA] * (layers * groups - 1) + [StepMode.MERGED]
    driver.drain()


def test_shadow_pages_are_counted_and_go_when_they_are_wanted(subject, drive):
    it = subject("gqa")
    cases = make_cases(it, 16, adapters=["r8-attention", "r5-ko", None], seed=70, longest=40, tokens=(30, 40))
    driver = drive(it, num_pages=60, adapters=some(it, "r8-attention", "r5-ko"))
    merge(driver, "r8-attention")
    stats = driver.engine.stats()
    assert stats.num_shadow_pages == driver.engine.pool.count(PageKind.SHADOW) > 5
    assert stats.mode is StepMode.MERGED
    add_all(driver, cases)
    check(driver, cases)
    assert modes(driver) >= {StepMode.MERGED, StepMode.LORA}, "it was never given up, or at once"
    stats = driver.engine.stats()
    assert (stats.num_shadow_pages, stats.merged_adapter, stats.mode) == (0, None, StepMode.LORA)


def test_what_fits_the_arena_fits_it_beside_a_shadow(subject, drive):
    """The longest request that is taken runs to its end, though shadow and merged adapter hold most pages."""
    it = subject("gqa")
    driver = drive(it, num_pages=30, prefix_cache=False, adapters=some(it, "r8-attention"))
    merge(driver, "r8-attention")
    longest = it.prompt(None, 200, 40, seed=71)
    want = it.greedy(None, longest, 40)
    assert driver.run("long", None, longest, max_tokens=40).tokens == want


@pytest.mark.parametrize("gone", ["unregister", "register"])
@pytest.mark.parametrize("requests", [True, False])
def test_the_merged_adapter_is_unloaded_or_replaced(subject, drive, gone, requests):
    it = subject("gqa")
    driver = drive(it)
    merge(driver, "r8-attention")
    cases = make_cases(it, 9, adapters=["r8-attention", "r3-mlp", None], seed=72, tokens=(20, 20))
    for_it = [case for case in cases if requests or case.adapter != "r8-attention"]
    add_all(driver, for_it)
    driver.step()
    old = driver.engine.store.get("r8-attention")
    if gone == "unregister":
        driver.engine.store.unregister("r8-attention")
    else:
        driver.engine.store.register("r8-attention", it.adapters["r1-all"])
    assert driver.engine.stats().merged_adapter is None
    assert driver.engine.stats().num_shadow_pages == 0
    check(driver, for_it)
    assert not old.pages
    assert not old.requests
    if gone == "unregister":
        with pytest.raises(UnknownAdapter):
            driver.engine.merge("r8-attention")
    else:
        with pytest.raises(CannotMerge, match="not resident"):
            driver.engine.merge("r8-attention")


def test_what_is_not_resident_is_not_merged(subject, drive):
    it = subject("gqa")
    driver = drive(it)
    with pytest.raises(CannotMerge, match="'r2-qv' is not resident"):
        driver.engine.merge("r2-qv")
    with pytest.raises(UnknownAdapter):
        driver.engine.merge("nobody")
    driver.engine.unmerge()


def test_an_executor_without_merged_mode(subject, drive):
    it = subject("gqa")
    driver = drive(it)
    driver.executor.shadow = None
    engine = Engine(driver.engine.config, driver.executor, ticking(), InlineReads())
    engine.store.register("r2-qv", it.adapters["r2-qv"])
    with pytest.raises(CannotMerge, match="this executor has no merged mode"):
        engine.merge("r2-qv")
    engine.unmerge()


def test_no_room_for_a_shadow(subject, drive):
    it = subject("gqa")
    driver = drive(it, num_pages=12, adapters=some(it, "r1-all"))
    load(driver, "r1-all")
    with pytest.raises(CannotMerge, match=r"needs \d+ pages for merged weights, in \d+ runs"):
        driver.engine.merge("r1-all")
    cases = make_cases(it, 2, adapters=["r1-all"], seed=73)
    add_all(driver, cases)
    check(driver, cases)


def test_an_adapter_that_outweighs_the_weights_is_served_unmerged(subject, drive, tmp_path):
    """Rounding the sum of both would make noise for everybody else."""
    it = subject("gqa")
    save_adapter(it.model, tmp_path / "loud", 4, 1 << 24, ["o_proj"], False, 9)
    driver = drive(it, adapters={**it.adapters, "loud": tmp_path / "loud"})
    load(driver, "loud")
    driver.engine.merge("loud")
    cases = make_cases(it, 6, adapters=[None, "r1-all"], seed=74)
    add_all(driver, cases)
    check(driver, cases)
    assert StepMode.MERGED not in modes(driver)
    assert driver.engine.stats().num_shadow_pages == 0
    with pytest.raises(CannotMerge, match=rf"times as large, but rounding allows {MOST_GROWTH[4]:g}"):
        driver.engine.merge("loud")


class MostRequests(ModePolicy):
    """The adapter with most requests."""

    def __init__(self, prices=None):
        self.states = []
        self.prices = prices

    def choose(self, state):
        self.states.append(state)
        counts = {adapter: count for adapter, count in state.requests.items() if adapter is not None}
        return ModeChoice(max(counts, key=lambda adapter: (counts[adapter], adapter.name)) if counts else None)


def test_a_policy_chooses(subject, drive):
    it = subject("gqa")
    policy = MostRequests()
    driver = drive(it, policies=Policies(mode=policy), max_num_seqs=8)
    cases = make_cases(it, 9, adapters=["r3-mlp", "r5-ko", "r3-mlp"], seed=75, tokens=(30, 30))
    add_all(driver, cases)
    driver.step()
    first = policy.states[0]
    assert {a.name: count for a, count in first.requests.items()} == {"r3-mlp": 6, "r5-ko": 3}
    assert (sum(first.fcfs.values()), first.merged, first.step_seconds) == (8, None, 0.0)
    check(driver, cases)
    assert {plan.merged.name for plan in driver.plans if plan.merged} == {"r3-mlp"}
    assert policy.states[-1].context
    assert policy.states[-1].step_seconds > 0


class MergesAreSeen(LearnedPrices):
    def __init__(self):
        super().__init__()
        self.merges = []

    def observe_merge(self, adapter, seconds):
        self.merges.append((adapter.name, seconds))


def test_the_first_matrix_tells_what_the_merge_takes(subject, drive):
    """Each pause makes one of six matrices, the larger one of each layer first, and takes a tick of the clock."""
    it = subject("gqa")
    policy = MostRequests(prices := MergesAreSeen())
    driver = drive(it, policies=Policies(mode=policy), clock=ticking(1e-9))
    driver.add("one", "r3-mlp", [5, 6, 7], max_tokens=20)
    driver.drain()
    made = [state.share_made for state in policy.states if state.is_under_way]
    origin = driver.executor.rank.shadow._origin  # noqa: SLF001 - of shares of ranks rows of zeros are a part, too
    gate_up, down = (origin(0, product).numel() for product in ("gate_up", "down"))
    assert gate_up > down
    done = [*itertools.accumulate([gate_up, down] * 3)]
    assert made == pytest.approx([elems / done[-1] for elems in done[:-1]])
    expected = [pauses * 1e-9 / share for pauses, share in enumerate(made, 1)]
    assert prices.merges == [("r3-mlp", pytest.approx(seconds)) for seconds in [*expected, 6e-9]]
    assert {state.share_made for state in policy.states if state.merged is not None} == {1.0}


class Drawn(ModePolicy):
    """Any mode of any adapter, and any of them left out, before every step."""

    prices = None

    def __init__(self, rng):
        self.rng = rng

    def choose(self, state):
        rng = self.rng
        if state.is_under_way and rng.random() < 0.9:
            return ModeChoice(state.shadowed)
        adapters = [each for each in state.eligible if rng.random() < 0.5]
        merged = state.merged if rng.random() < 0.5 or not adapters else rng.choice(adapters)
        if rng.random() < 0.5:
            return ModeChoice(merged)
        return ModeChoice(merged, frozenset(rng.sample(list(state.requests), rng.randint(0, len(state.requests)))))


@pytest.mark.parametrize("seed", range(2))
def test_any_policy_gives_the_same_tokens(subject, drive, seed):
    it = subject("gqa")
    driver = drive(it, max_num_batched_tokens=48, clock=ticking(), policies=Policies(mode=Drawn(random.Random(seed))))
    cases = make_cases(it, 18, seed=90 + seed, longest=60, tokens=(12, 24))
    add_all(driver, cases)
    check(driver, cases)
    assert modes(driver) >= {StepMode.MERGED, StepMode.LORA}
    assert driver.engine.modes.num_left_out


@pytest.mark.parametrize("name", ["fastest", "dlora-1", "dlora-3", "dlora-artifact"])
@pytest.mark.parametrize("skew", [0.0, 0.6, 1.0])
def test_the_policies_give_the_same_tokens(subject, drive, name, skew):
    it = subject("gqa")
    driver = drive(it, mode_policy=name, max_num_batched_tokens=48)
    rng = random.Random(5)
    others = [None, "r1-all", "r5-ko", "r33-all"]
    adapters = ["r8-attention" if rng.random() < skew else rng.choice(others) for _ in range(24)]
    cases = make_cases(it, 24, adapters=adapters, seed=95, longest=60, tokens=(12, 24))
    add_all(driver, cases)
    check(driver, cases)
    if skew == 1.0:
        assert StepMode.MERGED in modes(driver)


def test_prompts_run_merged_if_most_of_their_tokens_are_the_merged_adapters(subject, drive):
    it = subject("gqa")
    driver = drive(it, policies=Policies(mode=MostRequests()))
    for index in range(3):
        driver.add(f"own {index}", "r8-attention", [5, 6, 7], max_tokens=60)
    while driver.engine.merging.merged is None:
        driver.step()
    of = {}
    for name, adapter in (("base", None), ("other", "r5-ko"), ("own", "r8-attention")):
        driver.add(name, adapter, [5, 6, 7, 8, 9, 10, 11, 12], max_tokens=2)
        driver.step()
        prompt = driver.plans[-1]
        assert prompt.bucket is None and any(row.request_id == name for row in prompt.sequences)
        of[name] = prompt.merged and prompt.merged.name
        driver.step()
        assert driver.plans[-1].merged.name == "r8-attention"
    assert of == {"base": None, "other": None, "own": "r8-attention"}


class OnlyOne(ModePolicy):
    """Runs one adapter's requests alone."""

    prices = None

    def choose(self, state):
        return ModeChoice(None, frozenset(a for a in state.requests if a is not None and a.name == "r8-attention"))


def test_no_tenant_is_left_out_for_longer_than_a_turn(subject, drive):
    it = subject("gqa")
    driver = drive(it, policies=Policies(mode=OnlyOne()), fair_by="adapter", max_turn_steps=5, clock=ticking())
    driver.add("crowd", "r8-attention", [5, 6, 7], max_tokens=60)
    driver.add("other", "r5-ko", [5, 6, 7], max_tokens=20)
    driver.add("base", None, [5, 6, 7], max_tokens=20)
    driver.drain()
    waits = [
        index for index, plan in enumerate(driver.plans) if any(row.request_id == "other" for row in plan.sequences)
    ]
    assert len(waits) == 20
    assert max(after - before for before, after in itertools.pairwise([0, *waits])) <= 6
    assert len(driver.plans) <= 62, "the crowd runs in every step"


def test_a_policy_alone_decides_where_no_tenant_waits_for_a_turn(subject, drive):
    it = subject("gqa")
    driver = drive(it, policies=Policies(mode=OnlyOne()), max_turn_steps=5, clock=ticking())
    driver.add("crowd", "r8-attention", [5, 6, 7], max_tokens=30)
    driver.add("other", "r5-ko", [5, 6, 7], max_tokens=5)
    driver.drain()
    assert [[row.request_id for row in plan.sequences] for plan in driver.plans] == [["crowd"]] * 30 + [["other"]] * 5


@pytest.mark.parametrize("kernels", ["native"])
def test_a_rows_bits_do_not_depend_on_its_company_in_merged_mode(subject, drive, kernels):
    it = subject("gqa")

    def run(name, company):
        driver = drive(it, prefix_cache=False)
        merge(driver, "r8-attention")
        if company:
            add_all(driver, make_cases(it, 20, seed=76, longest=30))
        driver.add("x", name, it.prompt(name, 20, 12, seed=77), max_tokens=12, logprobs=4)
        answers = driver.drain()
        assert modes(driver) == {StepMode.MERGED}
        return answers["x"].logprobs

    for name in (None, "r8-attention", "r33-all"):
        assert run(name, company=True) == run(name, company=False)


def test_the_executor_refuses_a_plan_of_another_shadow(subject, drive):
    it = subject("gqa")
    driver = drive(it)
    merge(driver, "r8-attention")
    driver.add("x", None, [4, 5], max_tokens=3)
    plan = driver.engine.begin_step()
    plan.merged = driver.engine.store.get("r1-all")
    with pytest.raises(RuntimeError, match="not ready for"):
        driver.executor.execute(plan)
