"""Adapters in MLX's, llama.cpp's and other trainers' files give the tokens of PEFT's own, in one batch with them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine

from ...memory.conftest import Draft
from ...memory.files.test_adapter_forms import write_gguf, write_mlx
from .adapter_zoo import Zoo, kept_zoo

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def zoo():
    return kept_zoo()


def draft_of(path):
    return Draft(json.loads((path / "adapter_config.json").read_text()), load_file(path / "adapter_model.safetensors"))


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_other_forms_of_one_adapter(zoo, drive, tmp_path):
    it = draft_of(zoo.adapters["plain"])
    unnamed = Draft(it.config, {name.replace(".weight", ".default.weight"): each for name, each in it.tensors.items()})
    heads = {
        name: json.loads((zoo.model / "config.json").read_text())[f"num_{kind}_heads"]
        for name, kind in (("q_proj", "attention"), ("k_proj", "key_value"))
    }
    forms = {
        "plain": zoo.adapters["plain"],
        "mlx": write_mlx(it, tmp_path / "mlx"),
        "gguf": write_gguf(it, tmp_path / "gguf", heads=heads),
        "unnamed": unnamed.write(tmp_path / "unnamed"),
    }
    driver = drive(zoo, adapters=forms, max_num_seqs=8, max_num_batched_tokens=24)
    want = {}
    for seed in range(2):
        for name in forms:
            prompt, tokens = zoo.case("plain", 20 + seed, 8, seed)
            driver.add(f"{name} {seed}", name, prompt, max_tokens=8)
            want[f"{name} {seed}"] = tokens
    answered = driver.drain()
    assert {name: answered[name].tokens for name in want} == want


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_dora_of_mlx(zoo, drive, tmp_path):
    path = write_mlx(draft_of(zoo.adapters["dora"]), tmp_path / "mlx")
    driver = drive(zoo, adapters={"mlx": path}, max_num_seqs=8, max_num_batched_tokens=24)
    want = {}
    for seed in range(2):
        prompt, want[str(seed)] = zoo.case("dora", 20 + seed, 8, seed)
        driver.add(str(seed), "mlx", prompt, max_tokens=8)
    answered = driver.drain()
    assert {name: answered[name].tokens for name in want} == want


def test_a_directory_of_adapters_in_several_forms(zoo, tmp_path):
    """Files are served under their names without the suffix."""
    it, root = draft_of(zoo.adapters["plain"]), tmp_path / "adapters"
    it.write(root / "peft")
    write_mlx(it, root / "mlx")
    write_gguf(it, root / "gguf")
    write_gguf(it, root, name="file.v1.gguf")
    (root / "empty").mkdir()
    settings = {"memory_bytes": 8 << 20, "dtype": "float32", "threads": 1, "cpu_kernels": "torch"}
    engine = Engine.from_config(EngineConfig(model=zoo.model, adapters=root, **settings))
    try:
        assert engine.store.names() == ["file.v1", "gguf", "mlx", "peft"]
        assert not engine.adapters.quarantine
    finally:
        engine.close()


@pytest.mark.parametrize("kernels", ["native"])
def test_an_adapter_of_fused_projections(zoo, drive, tmp_path):
    """PEFT has the same adapter with A once for each projection."""
    it = draft_of(zoo.adapters["plain"])
    fused = {name: each for name, each in it.tensors.items() if ".self_attn." not in name or "o_proj" in name}
    for layer in range(3):
        own = f"base_model.model.model.layers.{layer}.self_attn"
        a = it.tensors[f"{own}.q_proj.lora_A.weight"]
        names = ("q_proj", "k_proj", "v_proj")
        fused[f"{own}.qkv_proj.lora_A.weight"] = a
        fused[f"{own}.qkv_proj.lora_B.weight"] = torch.cat([it.tensors[f"{own}.{n}.lora_B.weight"] for n in names])
        it.tensors |= {f"{own}.{name}.lora_A.weight": a.clone() for name in names}
    separate = it.write(tmp_path / "separate")
    targets = ["qkv_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    path = tmp_path / "fused"
    path.mkdir()
    save_file(fused, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({**it.config, "target_modules": targets}))
    driver = drive(zoo, adapters={"fused": path, "separate": separate})
    prompt = [20, 31, 12, 44, 25, 16, 37]
    tokens, _ = Zoo(zoo.model, {"separate": separate}).greedy("separate", prompt, 8)
    for name in ("fused", "separate"):
        assert driver.run(name, name, prompt, max_tokens=8).tokens == tokens
