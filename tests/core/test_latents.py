"""Latent attention answers as transformers + peft do over every path of an engine.

Its families have mixtures of experts, too; what all mixtures have in common is tested in `test_experts.py`.
"""

from __future__ import annotations

import json
import random
import shutil
import time

import pytest

from chorus.core.model.config import UnsupportedModel
from chorus.core.policies import Policies
from chorus.graphs.runner import StepMode
from chorus.memory.files.error import AdapterFormatError

from .executors.slow_link import slow_down
from .executors.test_lora_offload import Link
from .merging.test_merged import merge
from .speculation.stand_ins import Drawn, Free, Right
from .speculation.test_speculation import same
from .test_family_paths import answers, told
from .test_hybrid_paths import speculating
from .tiny_families import ADAPTERS, make_tiny

pytestmark = [pytest.mark.numerics, pytest.mark.wide]

V2, V3, FLASH = FAMILIES = ("deepseek-v2", "deepseek-v3", "glm-4.7-flash")
DENSE = "youtu"
"""A family without experts."""


@pytest.fixture(params=[pytest.param("native", marks=pytest.mark.native), "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(("family", "chunk"), [(V2, 1), (V3, 7), (FLASH, 64)])
def test_chunks_of_any_size_and_prefixes_from_the_cache(tiny, drive, family, chunk):
    it = tiny(family)
    driver = drive(it, max_num_seqs=min(4, chunk), max_num_batched_tokens=chunk, block_tokens=8)
    for _ in range(2):
        want = answers(it, driver, 5, seed=1)
        assert told(driver, want) == want
        driver.answers.clear()
    assert driver.engine.stats().num_prefix_hit_tokens > 40


@pytest.mark.native
@pytest.mark.parametrize("family", [V2, V3])
def test_two_ranks(tiny, drive, family):
    """Each has the heads of its own, and all latents."""
    it = tiny(family)
    driver = drive(it, tensor_parallel_size=2, max_num_seqs=8, max_num_batched_tokens=24)
    want = answers(it, driver, 6, seed=6)
    assert told(driver, want) == want


def test_merged_weights_beside_other_adapters(tiny, drive):
    it = tiny(V3)
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24)
    merge(driver, "r3-all")
    want = answers(it, driver, 8, seed=5)
    assert told(driver, want) == want
    assert {plan.mode for plan in driver.plans} == {StepMode.MERGED}


@pytest.fixture(scope="module")
def dora():
    return make_tiny(V3, use_dora=True)


@pytest.mark.parametrize("is_merged", [False, True], ids=["lora", "merged"])
def test_dora(dora, drive, is_merged):
    """Its scales are of outputs of kv_b_proj, which nothing computes."""
    driver = drive(dora, max_num_seqs=8, max_num_batched_tokens=24)
    if is_merged:
        merge(driver, "r3-all")
    want = answers(dora, driver, 8, seed=5)
    assert told(driver, want) == want
    assert (StepMode.MERGED in {plan.mode for plan in driver.plans}) == is_merged


def test_preempted_requests_swap_and_go_on(tiny, drive_crowded):
    it = tiny(FLASH)
    driver = drive_crowded(it)
    want = answers(it, driver, 12, seed=4, lengths=(5, 20), tokens=30)
    assert told(driver, want) == want
    assert driver.engine.stats().num_swaps_out > 0


def test_drafts(tiny, drive):
    it, want = tiny(V2), {}

    def answer(request):
        return want.get(request.id, [])

    for proposer in (Right(answer), Drawn(answer, random.Random(0))):
        policies = Policies(proposer=proposer)
        driver = drive(it, speculation="ngram", policies=policies, max_num_seqs=4, max_num_batched_tokens=40)
        driver.engine.speculation.cost = Free()
        want |= answers(it, driver, 4, seed=6, tokens=16)
        assert told(driver, want) == want
        assert driver.engine.stats().num_proposed_tokens > 0


@pytest.mark.native
@pytest.mark.parametrize("kernels", ["native"])
@pytest.mark.parametrize("family", [V2, DENSE])
def test_a_layer_is_waited_for_until_its_adapter_is_late(tiny, drive, family):
    """A row that misses its adapter of kv_b_proj is void, and runs again; others are not."""
    it = tiny(family)
    driver = drive(it, max_load_stall_seconds=0.0, clock=time.monotonic, max_num_batched_tokens=200)
    driver.has_stalled_link = True
    executor, link = driver.executor.inner, Link()
    slow_down(executor.adapters, executor.arena.pages, link)
    want = answers(it, driver, 1, seed=1, adapters=("r8-qv",)) | answers(it, driver, 1, seed=2, adapters=(None,))
    driver.step()
    (plan,) = driver.plans
    assert executor.steps._lora.late_requests(plan.sequences) == ["1.0"]  # noqa: SLF001
    link.let(1000)
    assert told(driver, want) == want


@pytest.mark.native
@pytest.mark.parametrize("kernels", ["native"])
@pytest.mark.parametrize("family", [V3, DENSE])
def test_outputs_are_those_without_speculation(tiny, drive, family):
    """To the bit, beside adapters on all parts."""
    it, rng = tiny(family), random.Random(family)
    asked = [
        ([None, *ADAPTERS][index % 4], [rng.randrange(3, 150) for _ in range(rng.randint(3, 30))]) for index in range(8)
    ]
    limits = {"dtype": "bfloat16", "max_num_seqs": 6, "max_num_batched_tokens": 40, "max_model_len": 128, "threads": 2}

    def ask(driver):
        for index, (adapter, prompt) in enumerate(asked):
            driver.add(f"r{index}", adapter, prompt, max_tokens=24, logprobs=2)
        return driver.drain()

    want = ask(drive(it, **limits))

    def answer(request):
        return want[request.id].tokens

    for proposer in (Right(answer), Drawn(answer, random.Random(7))):
        driver = speculating(drive, it, proposer, **limits)
        same(ask(driver), want, "native")
        assert driver.engine.stats().num_accepted_tokens > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_pages_keep_latents_alone(tiny, drive, family):
    driver = drive(tiny(family), adapters={}, block_tokens=8)
    layout, model = driver.engine.executor.layout, driver.executor.rank.config
    assert layout.page_bytes == 8 * model.num_layers * (32 + 8) * 4
    k, v = driver.executor.rank.arena.kv_layers[-1]
    assert (k.shape[2:], v.shape[2:]) == ((1, 40), (1, 32))
    assert k.data_ptr() == v.data_ptr()


def test_latents_in_float8_are_refused(tiny, drive):
    with pytest.raises(UnsupportedModel, match="kv_cache_dtype is 'fp8', but the model's layers keep latents"):
        drive(tiny(V2), kv_cache_dtype="fp8")


def test_adapters_target_what_makes_latents_and_what_reads_them(tiny, drive):
    store = drive(tiny(V3)).engine.store
    targets = {name: set(store.get(name).manifest.targets) for name in ADAPTERS}
    assert targets["r3-all"] >= {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    assert targets["r8-qv"] == {"kv_b_proj"}


def test_an_activated_adapter_on_keys_and_values_of_latents_is_refused(tiny, drive, tmp_path):
    """Tokens before its invocation would have its keys and values for a query after it."""
    shutil.copytree(tiny(V3).adapters["r8-qv"], tmp_path / "alora")
    config = tmp_path / "alora" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "alora_invocation_tokens": [5, 6]}))
    store = drive(tiny(V3), adapters={}).engine.store
    with pytest.raises(AdapterFormatError, match="the adapter is on kv_b_proj, which makes keys and"):
        store.register("alora", tmp_path / "alora")
