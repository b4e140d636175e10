"""Latent attention: pages, what adapters are on, and what is refused. For paths, see `paths`."""

from __future__ import annotations

import json
import random
import shutil
import time

import pytest

from chorus.core.model.specs.config import UnsupportedModel
from chorus.memory.files.error import AdapterFormatError

from ..executors.slow_link import slow_down
from ..executors.test_lora_offload import Link
from ..paths.asked import answers, told
from ..speculation.stand_ins import Drawn, Right
from ..speculation.test_speculation import same
from ..tiny_families import ADAPTERS
from .test_hybrid_paths import speculating

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

V2, V3, FLASH = FAMILIES = ("deepseek-v2", "deepseek-v3", "glm-4.7-flash")
DENSE = "youtu"
"""A family without experts."""


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
