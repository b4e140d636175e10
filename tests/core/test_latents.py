"""Latent attention: pages, what adapters are on, and what is refused. For paths, see `paths`."""

from __future__ import annotations

import json
import shutil

import pytest

from chorus.core.model.config import UnsupportedModel
from chorus.memory.files.error import AdapterFormatError

from .tiny_families import ADAPTERS

pytestmark = [pytest.mark.numerics, pytest.mark.wide]

V2, V3, FLASH = FAMILIES = ("deepseek-v2", "deepseek-v3", "glm-4.7-flash")


@pytest.fixture
def kernels() -> str:
    """The native decoder has no latent attention; the native library computes mixtures, where it is there."""
    return "auto"


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
