"""Logits of a quantised checkpoint have the bits of its dequantised twin's, on the native decoder within a bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.ops.library.native_integers import IntegerPanels
from chorus.perf.inline_reads import InlineReads

from ...tables import LAYER_MATRICES
from ..model.checkpoints.quantization.forms import FORMS
from ..model.checkpoints.quantization.twins import CONFIG, write_twins
from ..test_gguf import make

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

#: Forms with integers in even groups.
PACKED = ("awq", "gptq", "gptq 2 bits", "bnb int8", "compressed packed, zero points", "compressed int8")

PROMPTS = {None: [3, 7, 11, 4], "a": [9, 2], "b": [5, 5, 8], "c": [1, 30, 20, 10, 6]}


def write_adapter(path: Path, rank: int, seed: int, hidden: int, inner: int) -> Path:
    """A PEFT adapter of two modules of two layers."""
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for module, inputs, outputs in (("self_attn.o_proj", hidden, hidden), ("mlp.down_proj", inner, hidden)):
            name = f"base_model.model.model.layers.{layer}.{module}.lora_{{}}.weight"
            tensors |= {name.format("A"): torch.randn(rank, inputs), name.format("B"): torch.randn(outputs, rank)}
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["o_proj", "down_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def logits_of(model: Path, adapters: dict[str, Path], **config: object) -> torch.Tensor:
    """Logits `[prompts, vocab]` of the base and every adapter, in one step."""
    options = {"dtype": "bfloat16", "memory_bytes": 4 << 20, "threads": 1, **config}
    engine = Engine.from_config(EngineConfig.model_validate({"model": model, **options}), InlineReads())
    seen: list[torch.Tensor] = []
    decoder = engine.executor.decoder
    forward = decoder.forward
    decoder.forward = lambda batch: seen.append(forward(batch).clone()) or seen[-1]
    for name, path in adapters.items():
        engine.store.register(name, path)
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        params = RequestParams(1, temperature=0, logprobs=0)
        engine.add_request(Request(str(index), prompt, params, name))
    while engine.has_work():
        engine.step()
    engine.close()
    assert [len(each) for each in seen] == [len(PROMPTS)], "they are not one batch"
    return seen[0]


@pytest.mark.parametrize("form", FORMS)
def test_base_and_three_adapters_answer_as_on_the_twin(tmp_path, form):
    assert_same(tmp_path, *write_twins(tmp_path, FORMS[form]), CONFIG["hidden_size"], CONFIG["intermediate_size"])


@pytest.mark.parametrize("family", ["llama2", "granite", "phi-3"])
def test_gguf_files_answer_as_their_twin(tmp_path, family):
    assert_same(tmp_path, *make(tmp_path, family, "Q4_0"), 64, 96)


def assert_same(root: Path, quantised: Path, twin: Path, hidden: int, inner: int) -> None:
    """The logits of the base and of three adapters have the same bits on both, by PyTorch's operators. The native
    decoder multiplies integers as they are; in float32 its logits are near.
    """
    adapters = {name: write_adapter(root / name, 2 + seed, seed, hidden, inner) for seed, name in enumerate("abc")}
    found, want = (logits_of(path, adapters, cpu_kernels="torch") for path in (quantised, twin))
    assert torch.equal(found, want)
    assert found.std() > 0
    found, want = (logits_of(path, adapters, dtype="float32") for path in (quantised, twin))
    assert (found - want).norm() < 1e-4 * want.norm()


@pytest.mark.native
@pytest.mark.parametrize("form", PACKED)
def test_the_native_decoder_keeps_integers(tmp_path, form):
    quantised, _ = write_twins(tmp_path, FORMS[form])
    config = EngineConfig(model=quantised, dtype="bfloat16", memory_bytes=4 << 20, threads=1, cpu_kernels="native")
    executor = CpuExecutor(config)
    kept = [layer[name] for layer in executor.decoder.layers for name in LAYER_MATRICES]
    executor.close()
    assert any(isinstance(each, IntegerPanels) for each in kept)
