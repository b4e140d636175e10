"""Adapters with rank, alpha and layer patterns, rsLoRA and regular expressions, against transformers + peft."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.perf.inline_reads import InlineReads

from ...greedy import MIN_MARGIN, token_by_token

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]

#: name → arguments of `LoraConfig`. Patterns that overlap are in sorted order, in which peft saves them.
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION + MLP},
    "ranks": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ATTENTION + MLP,
        "rank_pattern": {r".*\.2\.self_attn\..*": 9, "down_proj": 33, "layers.1.mlp.up_proj": 17, "q_proj": 1},
    },
    "alphas": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "alpha_pattern": {"v_proj": 1, "model.layers.0.mlp.up_proj": 24},
    },
    "rslora": {"r": 9, "lora_alpha": 4, "target_modules": ATTENTION, "use_rslora": True},
    "rslora-patterns": {
        "r": 5,
        "lora_alpha": 3,
        "target_modules": ATTENTION + MLP,
        "use_rslora": True,
        "rank_pattern": {"mlp.*": 2, "k_proj": 11},
        "alpha_pattern": {"layers.[02].self_attn.q_proj": 9},
    },
    "layers": {"r": 6, "lora_alpha": 18, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0, 2]},
    "last-layer": {
        "r": 20,
        "lora_alpha": 60,
        "target_modules": MLP,
        "layers_to_transform": 2,
        "layers_pattern": "layers",
    },
    "regex": {"r": 7, "lora_alpha": 14, "target_modules": r".*\.layers\.(0\.self_attn\.[qk]|1\.mlp\.(gate|up))_proj"},
    "all-linear": {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"},
    "attention-of-all": {"r": 3, "lora_alpha": 9, "target_modules": "all-linear"},
    "excluding": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ATTENTION + MLP,
        "exclude_modules": r".*layers\.1\..*|.*\.v_proj",
    },
    "every-rank": {
        "r": 1,
        "lora_alpha": 3,
        "target_modules": ATTENTION + MLP,
        "rank_pattern": {
            f"layers.{layer}.*{module}": 1 + 7 * layer + number
            for layer in range(3)
            for number, module in enumerate(ATTENTION + MLP)
        },
    },
}


def leave_out(path: Path, module: str) -> None:
    """Leave a module's tensors out of an adapter, as a trainer does that was told not to train it. Its configuration
    says "all-linear", where PEFT writes names.
    """
    file, config = path / "adapter_model.safetensors", path / "adapter_config.json"
    save_file({name: tensor for name, tensor in load_file(file).items() if f".{module}." not in name}, file)
    raw = {**json.loads(config.read_text()), "init_lora_weights": True, "target_modules": "all-linear"}
    config.write_text(json.dumps(raw))


@dataclass(eq=False)
class PatternSubject:
    """A tiny model, its adapters on disk, and transformers with peft to ask."""

    model: Path
    adapters: dict[str, Path]
    reference: Any

    def greedy(self, adapter: str, prompt: list[int], count: int) -> tuple[list[int], float]:
        """The tokens that follow, and how clear the least clear choice was."""
        self.reference.set_adapter(adapter)
        return token_by_token(self.reference, prompt, count)

    @cache  # noqa: B019 - a subject is freed with its module
    def case(self, adapter: str, length: int, count: int, seed: int) -> tuple[list[int], list[int]]:
        """A prompt whose greedy continuation is clear, and the continuation."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            prompt = torch.randint(3, 150, (length,), generator=generator).tolist()
            tokens, margin = self.greedy(adapter, prompt, count)
            if margin >= MIN_MARGIN:
                return prompt, tokens


@pytest.fixture(scope="module")
def pattern_subject(tmp_path_factory: pytest.TempPathFactory) -> PatternSubject:
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("patterns")
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=150,
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.25,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(root / "model")
    for seed, (name, fields) in enumerate(ADAPTERS.items()):
        torch.manual_seed(seed)
        lora = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **fields)
        model = peft.get_peft_model(LlamaForCausalLM.from_pretrained(root / "model"), lora)
        model.save_pretrained(root / "adapters" / name)
    leave_out(root / "adapters" / "attention-of-all", "mlp")
    reference: Any = LlamaForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    paths = {name: root / "adapters" / name for name in ADAPTERS}
    for name, path in paths.items():
        if isinstance(reference, peft.PeftModel):
            reference.load_adapter(path, adapter_name=name)
        else:
            reference = peft.PeftModel.from_pretrained(reference, path, adapter_name=name)
    return PatternSubject(root / "model", paths, reference.eval())


def run(it: PatternSubject, kernels: str, requests: list[tuple[str, list[int], int]], **config: Any) -> list[list[int]]:
    """All requests at once; the pool's accounting is checked after every step."""
    defaults = {"dtype": "float32", "threads": 1, "memory_bytes": 8 << 20, "cpu_kernels": kernels}
    # The test that counts evictions does not leave it to the disk which adapters are read in time.
    reads = InlineReads() if config.get("num_pages") else None
    engine = Engine.from_config(EngineConfig(model=it.model, **{**defaults, **config}), reads)
    for name, path in it.adapters.items():
        engine.store.register(name, path)
    answers: list[list[int]] = [[] for _ in requests]
    for number, (adapter, prompt, count) in enumerate(requests):
        params = RequestParams(count, temperature=0, ignore_eos=True)
        engine.add_request(Request(str(number), prompt, params, adapter))
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            answers[int(output.request_id)] += output.token_ids
        engine.check_integrity()
    if config.get("num_pages"):
        assert engine.stats().num_adapter_evictions > 3, "there was room for all"
    engine.close()
    return answers


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_one_adapter_speaks_as_with_peft(pattern_subject, adapter, kernels):
    prompt, tokens = pattern_subject.case(adapter, 9, 12, seed=1)
    assert run(pattern_subject, kernels, [(adapter, prompt, 12)]) == [tokens]


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize(
    "config",
    [{}, {"max_num_batched_tokens": 40}, {"num_pages": 44}, {"block_tokens": 64}],
    ids=["roomy", "chunked", "evicting", "large pages"],
)
def test_all_of_them_in_one_batch(pattern_subject, kernels, config):
    cases = [
        (adapter, *pattern_subject.case(adapter, length, 8, seed=length))
        for length, adapter in enumerate([*ADAPTERS, *ADAPTERS], start=3)
    ]
    answers = run(pattern_subject, kernels, [(adapter, prompt, 8) for adapter, prompt, _ in cases], **config)
    assert answers == [tokens for *_, tokens in cases]


def test_the_reference_tells_them_apart(pattern_subject):
    prompt = list(range(5, 15))
    assert len({tuple(pattern_subject.greedy(name, prompt, 10)[0]) for name in ADAPTERS}) == len(ADAPTERS)
