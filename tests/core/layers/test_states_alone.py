"""Models without a layer of attention: tokens take no page, and the prefix cache keeps checkpoints of states.

For paths, see `paths`.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from chorus.core.model.specs.config import UnsupportedModel
from chorus.memory.files.error import AdapterFormatError

from ...kept import kept_files
from ..tiny_families import ADAPTERS, Tiny, load_model, load_peft, save_family, save_tiny

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("qwen3.5", {"layer_types": ["linear_attention"] * 3, "num_hidden_layers": 3}),
    "lfm2": ("lfm2", {"layer_types": ["conv"] * 3, "num_hidden_layers": 3}),
    "granite-4-h": ("granite-4-h", {"layer_types": ["mamba"] * 3, "num_hidden_layers": 3}),
    "bamba": ("bamba", {"attn_layer_indices": [], "num_hidden_layers": 3}),
    "nemotron-h": ("nemotron-h", {"hybrid_override_pattern": "M-M"}),
}
"""Hybrids of which no layer has attention: a family, and fields of its configuration."""


@cache
def without_attention(name: str) -> Tiny:
    family, changes = HYBRIDS[name]

    def save(root: Path) -> None:
        save_tiny(family, root, changes)

    root = kept_files(f"{name} without attention", save)
    return Tiny(root / "model", {adapter: root / adapter for adapter in ADAPTERS}, load_peft)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_may_have_no_attention(drive, name):
    it, want = without_attention(name), {}
    driver = drive(it, block_tokens=8, max_num_batched_tokens=24, max_num_seqs=4, state_checkpoint_tokens=16)
    assert driver.engine.executor.layout.groups == ()
    for turn in range(2):
        for index, adapter in enumerate((None, "r3-all", "r8-qv")):
            prompt, tokens = it.case(adapter, 41, seed=index)
            want[f"{turn}.{index}"] = tokens
            driver.add(f"{turn}.{index}", adapter, prompt, max_tokens=len(tokens))
        driver.drain()
    assert {key: driver.answers[key].tokens for key in want} == want
    assert driver.engine.stats().num_prefix_hit_tokens >= 3 * 32


@cache
def with_steps(name: str) -> Tiny:
    """A family of Mamba 1 with adapters on time steps, too, of whose B one is zero, as training leaves it."""
    root = kept_files(f"{name} with adapters of time steps", partial(_save_with_steps, name))
    return Tiny(root / "model", {"untrained": root / "untrained", "other": root / "other"}, load_peft)


def _save_with_steps(name: str, root: Path) -> None:
    from peft import LoraConfig, get_peft_model

    save_family(name, root / "model")
    for adapter in ("untrained", "other"):
        torch.manual_seed(0)
        lora = LoraConfig(target_modules=["in_proj", "x_proj", "dt_proj"], init_lora_weights=False)
        model = get_peft_model(load_model(root / "model"), lora)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if adapter == "untrained" and "dt_proj.lora_B" in key:
                    parameter.zero_()
        model.save_pretrained(root / adapter)


@pytest.mark.parametrize("name", ["mamba-1", "falcon-mamba"])
def test_adapters_of_time_steps_are_served_if_they_are_zero(drive, name):
    it, want = with_steps(name), {}
    driver = drive(it, adapters={"untrained": it.adapters["untrained"]})
    for index, adapter in enumerate((None, "untrained")):
        prompt, want[f"{index}"] = it.case(adapter, 30, seed=index)
        driver.add(f"{index}", adapter, prompt, max_tokens=8)
    driver.drain()
    assert {key: driver.answers[key].tokens for key in want} == want
    with pytest.raises(AdapterFormatError, match="of dt_proj of layer 0, is not zero"):
        driver.engine.store.register("other", it.adapters["other"])


def test_adapters_of_time_steps_change_nothing_in_transformers():
    """Training leaves B at zero: nothing depends on it."""
    model = with_steps("mamba-1").use("untrained")
    for _, parameter in model.named_parameters():
        parameter.requires_grad_(True)
    model(torch.arange(3, 20)[None], use_cache=False).logits.square().mean().backward()
    found = {key: parameter.grad for key, parameter in model.named_parameters() if "lora_B" in key}
    assert all(grad is None or not grad.any() for key, grad in found.items() if "dt_proj" in key)
    assert all(grad.any() for key, grad in found.items() if "untrained" in key and "x_proj" in key)


@pytest.fixture(params=["mamba-2", "mamba-1"])
def it(tiny, request):
    return tiny(request.param)


def test_tokens_take_no_page(drive, it):
    """A request of many tokens holds as many pages as one of few."""
    driver = drive(it, max_model_len=256, prefix_cache=False, block_tokens=16)
    layout = driver.engine.executor.layout
    held = []
    for length in (3, 200):
        prompt, want = it.case(None, length, seed=0)
        driver.add(f"{length}", None, prompt, max_tokens=8)
        driver.step()
        held.append(driver.engine.stats().num_kv_pages)
        driver.drain()
        assert driver.answers[f"{length}"].tokens == want
    assert held == [layout.state_slots * layout.state_pages] * 2


def test_as_many_requests_run_as_have_room_for_states(drive, it):
    """Two states each, and no more is needed by the longest."""
    pages = drive(it, prefix_cache=False).engine.executor.layout.pages_for_tokens(1)
    driver = drive(it, num_pages=1 + 3 * pages, prefix_cache=False, adapters={}, max_num_seqs=8)
    want = {}
    for index in range(5):
        prompt, want[f"{index}"] = it.case(None, 20 + index, seed=index)
        driver.add(f"{index}", None, prompt, max_tokens=8)
    most = 0
    while driver.engine.has_work():
        driver.step()
        most = max(most, len(driver.engine.scheduler.running))
    assert most == 3
    assert {name: driver.answers[name].tokens for name in want} == want
    assert driver.engine.stats().num_preemptions == 0


def test_blocks_are_known_up_to_the_last_checkpoint(drive, it):
    limits = {"block_tokens": 8, "state_checkpoint_tokens": 16, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    driver = drive(it, host_prefix_cache="off", **limits)
    prompt, want = it.case(None, 45, seed=3)
    for turn, cached in enumerate((0, 40)):
        driver.add(f"{turn}", None, prompt, max_tokens=len(want))
        driver.drain()
        assert driver.answers[f"{turn}"].tokens == want
        assert driver.answers[f"{turn}"].num_cached_tokens == cached
    found = list(driver.engine.prefix.roots())
    for block in found:
        found += block.children.values()
    assert max(block.depth for block in found if block.checkpoint) == max(block.depth for block in found)
    driver.engine.reclaimer.reclaim_all()
    assert list(driver.engine.prefix.roots()) == []


def test_checkpoints_come_back_from_host_memory(drive, it):
    """Of prompts that are asked in turn, the pool has room for few checkpoints, and host memory for all."""
    probe = drive(it, adapters={}).engine.executor.layout
    pages = 1 + probe.pages_for_tokens(1) + 3 * probe.state_pages
    driver = drive(it, adapters={}, num_pages=pages, host_prefix_cache="on", block_tokens=8, state_checkpoint_tokens=16)
    driver.engine.memory.copies.costs.prefix_page = 1e3
    for turn in range(2):
        for index in range(5):
            prompt, want = it.case(None, 45, seed=index)
            driver.add(f"{turn}.{index}", None, prompt, max_tokens=len(want))
            driver.drain()
            assert driver.answers[f"{turn}.{index}"].tokens == want
    stats = driver.engine.stats()
    assert stats.num_host_hit_tokens >= 3 * 40
    driver.engine.reset_prefix_cache()
    assert list(driver.engine.prefix.roots()) == []


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"kv_cache_dtype": "fp8"}, "no layer of the model has keys and values; set it to 'auto'"),
        ({"kv_cache_dir": "files", "kv_cache_disk_bytes": 1 << 20}, "no layer of the model has any; leave it out"),
    ],
)
def test_settings_of_keys_and_values_are_refused(drive, it, tmp_path, settings, match):
    if "kv_cache_dir" in settings:
        settings = {**settings, "kv_cache_dir": tmp_path / "files"}
    with pytest.raises((UnsupportedModel, ValueError), match=match):
        drive(it, **settings)
