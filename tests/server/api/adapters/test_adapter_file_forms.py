"""Adapters in other forms are loaded over HTTP, and answer as PEFT's own."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from tests.memory.conftest import Draft
from tests.memory.files.test_adapter_forms import write_gguf, write_mlx

COUNT = 6


@pytest.fixture(scope="module")
def reference(subject):
    return subject("wide_heads")


@pytest.fixture
def live(start, reference, tmp_path):
    root, source = tmp_path / "root", reference.adapters["r8-attention"]
    it = Draft(
        json.loads((source / "adapter_config.json").read_text()), load_file(source / "adapter_model.safetensors")
    )
    model = json.loads((reference.model / "config.json").read_text())
    heads = {"q_proj": model["num_attention_heads"], "k_proj": model["num_key_value_heads"]}
    write_mlx(it, root / "mlx", num_layers=model["num_hidden_layers"])
    write_gguf(it, root / "gguf", heads=heads)
    shutil.copyfile(root / "gguf" / "lora.gguf", root / "alone.gguf")
    (root / "broken.gguf").write_bytes((root / "alone.gguf").read_bytes()[:-500])
    settings = {"memory_bytes": 8 << 20, "threads": 1, "cpu_kernels": "torch"}
    return start(Engine.from_config(EngineConfig(model=reference.model, **settings)), adapter_roots=(root,))


def test_load_and_ask(live, reference):
    prompt = reference.prompt("r8-attention", 9, COUNT, 3)
    want = reference.greedy("r8-attention", prompt, COUNT)
    body = {"prompt": prompt, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    for path in ("mlx", "gguf", "gguf/lora.gguf", "alone.gguf"):
        name = path.replace("/", "-")
        response = live.post("/v1/load_lora_adapter", lora_name=name, lora_path=path)
        assert response.status_code == 200, response.text
        assert live.post(**body, model=name).json()["choices"][0]["token_ids"] == want
        assert live.client.get(f"/v1/adapters/{name}").json()["content_hash"]


def test_refusals(live):
    for path, status, words in (
        ("broken.gguf", 400, "cut off or corrupt"),
        ("nothing.gguf", 404, "no such directory"),
        ("mlx/adapters.safetensors", 404, "no such directory"),
    ):
        response = live.post("/v1/load_lora_adapter", lora_name="x", lora_path=path)
        assert (response.status_code, words in response.text) == (status, True), response.text
