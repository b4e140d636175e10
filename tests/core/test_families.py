"""Every supported architecture answers as transformers + peft do: tiny random models of transformers' own classes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model.config import UnsupportedModel
from chorus.core.model.decoder import DecoderModel
from chorus.core.model.families import FAMILIES as SERVED
from chorus.core.model.native_decoder import NativeDecoderModel, why_unsupported
from chorus.core.model.read_config import read_model_config
from chorus.core.requests.request import Request
from chorus.core.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.numerics

MIN_MARGIN = 1e-3
"""Greedy choices closer than this would test rounding."""

BF16_LOGITS_ERROR = 3e-2
"""Relative L2 error of bfloat16 logits that is taken for rounding; measured: at most 2.1e-2 (Llama: 1.1e-2)."""

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 16.0, "beta_slow": 2.0,
}  # fmt: skip

GRANITE = {
    "embedding_multiplier": 12.0, "logits_scaling": 2.0, "residual_multiplier": 0.22, "attention_multiplier": 0.25,
}  # fmt: skip

#: With larger embeddings, a tied model answers with its last token.
GRANITE_TIED = {**GRANITE, "embedding_multiplier": 1.5, "residual_multiplier": 0.9}

LONGROPE = {
    "max_position_embeddings": 1024, "original_max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.3, 1.4, 2.0, 2.5], "long_factor": [1.0, 1.5, 3.0, 8.0, 16.0, 30.0],
    },
}  # fmt: skip

#: name → (transformers' configuration class, its arguments, largest shard)
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4}, "50GB"),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}, "20KB"),
    "llama-linear-rope": (
        "LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}}, "50GB",
    ),
    "llama-biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}, "50GB"),
    "mistral": ("MistralConfig", {"head_dim": 24, "sliding_window": None}, "50GB"),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True, "hidden_size": 56, "num_key_value_heads": 1}, "20KB"),
    "qwen2-untied": ("Qwen2Config", {"rms_norm_eps": 1e-5, "num_hidden_layers": 3}, "50GB"),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "hidden_size": 40, "tie_word_embeddings": True}, "50GB"),
    "qwen3-biased": ("Qwen3Config", {"head_dim": 16, "attention_bias": True, "hidden_size": 48}, "20KB"),
    "seed-oss": ("SeedOssConfig", {"head_dim": 16, "num_key_value_heads": 1}, "50GB"),
    "seed-oss-out-bias": ("SeedOssConfig", {"head_dim": 32, "attention_out_bias": True, "mlp_bias": True}, "20KB"),
    "llama-dynamic-rope": (
        "LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}}, "50GB",
    ),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN}, "50GB"),
    "mistral-window": ("MistralConfig", {"head_dim": 16, "sliding_window": 24}, "50GB"),
    "qwen2-window": (
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}, "50GB",
    ),
    "ministral": (
        "MinistralConfig",
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16},
        "50GB",
    ),
    "granite": ("GraniteConfig", {**GRANITE, "attention_multiplier": 0.11}, "50GB"),
    "granite-biased": (
        "GraniteConfig",
        {**GRANITE_TIED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        "20KB",
    ),
    "granite-4": (
        "GraniteMoeHybridConfig",
        {**GRANITE_TIED, "layer_types": ["attention", "attention"], "num_local_experts": 0,
         "shared_intermediate_size": 96,
         "position_embedding_type": "rope", "tie_word_embeddings": True, "mamba_n_heads": 4, "mamba_d_head": 32},
        "50GB",
    ),
    "granite-4-nope": (
        "GraniteMoeHybridConfig",
        {**GRANITE, "layer_types": ["attention", "attention"], "num_local_experts": 0, "shared_intermediate_size": 80,
         "position_embedding_type": None, "attention_bias": True, "mamba_n_heads": 4, "mamba_d_head": 32},
        "20KB",
    ),
    "phi-3": ("Phi3Config", {"pad_token_id": 0, "sliding_window": 30}, "50GB"),
    "phi-4-mini": ("Phi3Config", {"pad_token_id": 0, "tie_word_embeddings": True, **LONGROPE}, "20KB"),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 5, "pad_token_id": 0}, "50GB"),
    "smollm3-untied": (
        "SmolLM3Config",
        {"no_rope_layers": [0, 1, 0], "num_hidden_layers": 3, "tie_word_embeddings": False, "attention_bias": True,
         "use_sliding_window": True, "sliding_window": 20, "pad_token_id": 0},
        "20KB",
    ),
    "olmo-2": ("Olmo2Config", {}, "50GB"),
    "olmo-2-tied": ("Olmo2Config", {"tie_word_embeddings": True, "num_key_value_heads": 4, "hidden_size": 48}, "20KB"),
    "olmo-3": ("Olmo3Config", {"num_hidden_layers": 5, "sliding_window": 16}, "50GB"),
    "olmo-3-yarn": (
        "Olmo3Config",
        {"num_hidden_layers": 4, "sliding_window": 20, "rope_parameters": {
            "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}},
        "20KB",
    ),
    "glm": ("GlmConfig", {"head_dim": 16, "pad_token_id": 0}, "50GB"),
    "glm-4": ("Glm4Config", {"head_dim": 16, "pad_token_id": 0}, "50GB"),
    "glm-4-tied": (
        "Glm4Config",
        {"head_dim": 32, "hidden_size": 48, "attention_bias": False, "pad_token_id": 0, "tie_word_embeddings": True},
        "20KB",
    ),
    "gemma": ("GemmaConfig", {"head_dim": 24}, "50GB"),
    "gemma-2": (
        "Gemma2Config",
        {"head_dim": 32, "num_hidden_layers": 4, "sliding_window": 18, "query_pre_attn_scalar": 24},
        "50GB",
    ),
    "gemma-2-untied": (
        "Gemma2Config",
        {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 24, "attn_logit_softcapping": 5.0,
         "final_logit_softcapping": None, "tie_word_embeddings": False, "hidden_size": 48},
        "20KB",
    ),
    "gemma-3": ("Gemma3TextConfig", {"head_dim": 32, "num_hidden_layers": 7, "sliding_window": 20}, "50GB"),
    "gemma-3-scaled": (
        "Gemma3TextConfig",
        {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 16, "hidden_size": 48, "tie_word_embeddings": False,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        "20KB",
    ),
    "exaone-4": ("Exaone4Config", {"num_hidden_layers": 5, "sliding_window": 20}, "50GB"),
    "exaone-4-whole": (
        "Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
        "20KB",
    ),
    "cohere-2": (
        "Cohere2Config", {"num_hidden_layers": 5, "sliding_window": 20, "head_dim": 16, "pad_token_id": 0}, "50GB",
    ),
    "cohere-2-untied": (
        "Cohere2Config",
        {"sliding_window": 28, "head_dim": 32, "hidden_size": 48, "tie_word_embeddings": False, "attention_bias": True,
         "logit_scale": 0.5, "layer_types": ["full_attention", "sliding_attention"], "pad_token_id": 0},
        "20KB",
    ),
}  # fmt: skip

ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
#: name → (rank, alpha, targets)
ADAPTERS = {
    "r3-all": (3, 6, ATTENTION + MLP),
    "r8-qv": (8, 16, ["q_proj", "v_proj"]),
    "r17-o-mlp": (17, 8, ["o_proj", *MLP]),
}


@dataclass(eq=False)
class Tiny:
    """A model with three adapters, and what transformers + peft make of it."""

    model: Path
    adapters: dict[str, Path]
    reference: Any

    def use(self, adapter: str | None) -> Any:
        if adapter is None:
            self.reference.base_model.disable_adapter_layers()
        else:
            self.reference.base_model.enable_adapter_layers()
            self.reference.set_adapter(adapter)
        return self.reference

    @cache  # noqa: B019 - a subject lives as long as its module
    def case(self, adapter: str | None, length: int, seed: int, count: int = 8) -> tuple[list[int], list[int]]:
        """A random prompt and its `count` greedy tokens, all clear choices."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            prompt = torch.randint(3, 150, (length,), generator=generator).tolist()
            tokens, margin = self.greedy(adapter, prompt, count)
            if margin >= MIN_MARGIN:
                return prompt, tokens

    def greedy(self, adapter: str | None, prompt: list[int], count: int) -> tuple[list[int], float]:
        model, tokens, margin, cache, inputs = self.use(adapter), [], float("inf"), None, prompt
        with torch.inference_mode():
            for _ in range(count):
                output = model(torch.tensor([inputs]), past_key_values=cache, use_cache=True)
                best = output.logits[0, -1].topk(2)
                margin = min(margin, float(best.values[0] - best.values[1]))
                inputs, cache = [int(best.indices[0])], output.past_key_values
                tokens += inputs
        return tokens, margin


def randomise(model: torch.nn.Module) -> None:
    """Norms that are not one and biases that are not zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)


def save_family(name: str, path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> None:
    import transformers

    config_class, arguments, shard = FAMILIES[name]
    arguments = {
        "vocab_size": 150, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.25, "bos_token_id": 1,
        "eos_token_id": 2, **arguments, **changes,
    }  # fmt: skip
    torch.manual_seed(sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**arguments))
    randomise(model)
    model.to(dtype).save_pretrained(path, max_shard_size=shard)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """`tiny("qwen3")`: the family's model with ADAPTERS, made once."""
    made: dict[str, Tiny] = {}

    def make(name: str) -> Tiny:
        if name not in made:
            from peft import LoraConfig, PeftModel, get_peft_model
            from transformers import AutoModelForCausalLM

            root = tmp_path_factory.mktemp(name)
            save_family(name, root / "model")
            adapters = {adapter: root / adapter for adapter in ADAPTERS}
            paths = read_model_config(root / "model").module_paths.by_path
            for seed, (adapter, (rank, alpha, targets)) in enumerate(ADAPTERS.items()):
                torch.manual_seed(seed)
                here = [path for path, modules in paths.items() if set(modules) & set(targets)]
                config = LoraConfig(
                    r=rank,
                    lora_alpha=alpha,
                    target_modules=[path.rpartition(".")[2] for path in here],
                    init_lora_weights=False,
                    task_type="CAUSAL_LM",
                )
                base = AutoModelForCausalLM.from_pretrained(root / "model")
                get_peft_model(base, config).save_pretrained(adapters[adapter])
            model: Any = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
            for adapter, path in adapters.items():
                if isinstance(model, PeftModel):
                    model.load_adapter(path, adapter_name=adapter)
                else:
                    model = PeftModel.from_pretrained(model, path, adapter_name=adapter)
            made[name] = Tiny(root / "model", adapters, model.eval())
        return made[name]

    return make


def test_every_architecture_is_covered():
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as MODELS

    models = {MODELS[getattr(transformers, f[0])] for f in FAMILIES.values()}
    seeing = {name for name, family in SERVED.items() if family.tensors.left_out}  # see test_text_parts.py
    assert {model.__name__ for model in models} == set(SERVED) - seeing


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batch_equals_transformers_and_peft(tiny, drive, family, kernels):
    it = tiny(family)
    if kernels == "native" and (why := why_unsupported(read_model_config(it.model), torch.float32)):
        pytest.skip(why)
    driver = drive(it, cpu_kernels=kernels, max_num_seqs=8, max_num_batched_tokens=24, max_model_len=128)
    assert isinstance(driver.executor.rank.decoder, NativeDecoderModel if kernels == "native" else DecoderModel)
    rng = random.Random(family)
    want = {}
    for index in range(8):
        adapter = [None, *ADAPTERS][index % 4]
        prompt, want[str(index)] = it.case(adapter, rng.randint(1, 70), seed=index)
        driver.add(str(index), adapter, prompt, max_tokens=8)
    answers = driver.drain()
    assert {name: answer.tokens for name, answer in answers.items()} == want
    chunks = [row for plan in driver.plans for row in plan.sequences if row.start > 0 and len(row.tokens) > 1]
    assert chunks, "no prompt was cut"
    assert any(len(plan.sequences[0].tokens) > 1 and len(plan.sequences[-1].tokens) == 1 for plan in driver.plans), (
        "no mixed step"
    )
    assert max(plan.num_adapters for plan in driver.plans) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_comparisons_mean_something(tiny, family):
    """Answers vary, and every adapter changes them."""
    it = tiny(family)
    cases = [it.case(None, 20, seed) for seed in range(99, 103)]
    outputs = {None: tuple(tuple(base) for _, base in cases)}
    outputs |= {name: tuple(tuple(it.greedy(name, prompt, 8)[0]) for prompt, _ in cases) for name in ADAPTERS}
    assert len(set(outputs.values())) == 4
    assert len({token for base in outputs[None] for token in base}) >= 4


def logits_of(executor: CpuExecutor, prompts: list[list[int]]) -> torch.Tensor:
    """Logits `[prompts, vocab]` of each prompt's last token, all in one step."""
    seen: list[torch.Tensor] = []
    forward = executor.decoder.forward
    executor.decoder.forward = lambda batch: seen.append(forward(batch)) or seen[-1]
    engine = Engine(EngineConfig(model="."), executor)
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(str(index), prompt, SamplingParams(1, temperature=0, logprobs=0)))
    engine.step()
    return seen[0].clone()


def executor_of(model: Path, **config: Any) -> CpuExecutor:
    return CpuExecutor(EngineConfig(model=model, memory_bytes=4 << 20, threads=1, **config))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 150, (length,), generator=generator).tolist() for length in (5, 17, 40, 90)]


@pytest.mark.native
@pytest.mark.parametrize("family", FAMILIES)
def test_native_bfloat16_is_float32_within_rounding(tmp_path, prompts, family):
    save_family(family, tmp_path, torch.bfloat16, initializer_range=0.1)
    if why := why_unsupported(read_model_config(tmp_path), torch.bfloat16):
        pytest.skip(why)
    want = logits_of(executor_of(tmp_path, dtype="float32", cpu_kernels="torch"), prompts)
    executor = executor_of(tmp_path, cpu_kernels="native")
    assert executor.layout.itemsize == 2, "dtype auto is the checkpoint's"
    got = logits_of(executor, prompts)
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert float(errors.max()) < BF16_LOGITS_ERROR


@pytest.mark.parametrize("family", ["qwen2", "qwen3-biased"])
def test_float16_takes_the_torch_path(tmp_path, prompts, family):
    save_family(family, tmp_path, initializer_range=0.1)
    executor = executor_of(tmp_path, dtype="float16")
    assert isinstance(executor.decoder, DecoderModel)
    want = logits_of(executor_of(tmp_path, dtype="float32", cpu_kernels="torch"), prompts)
    errors = (logits_of(executor, prompts) - want).norm(dim=-1) / want.norm(dim=-1)
    assert float(errors.max()) < 5e-3
    with pytest.raises(UnsupportedModel, match=r"in float16|not built|instruction sets|CHORUS_CPU_ISA"):
        executor_of(tmp_path, dtype="float16", cpu_kernels="native")


@pytest.mark.parametrize("family", FAMILIES)
def test_configuration_and_frequencies_are_transformers_own(tiny, family):
    import transformers

    it = tiny(family)
    config = read_model_config(it.model)
    want = transformers.AutoConfig.from_pretrained(it.model)
    rotary = it.reference.base_model.model.model.rotary_emb
    types = getattr(want, "layer_types", None) or [""] * config.num_layers
    for layer, kind in zip(config.layers, types, strict=True):
        prefix = f"{kind}_" if hasattr(rotary, f"{kind}_inv_freq") else ""
        if (rope := layer.mixer.rope) is not None:
            assert torch.equal(rope.inverse_frequencies(), getattr(rotary, f"{prefix}inv_freq"))
            assert rope.attention_factor == getattr(rotary, f"{prefix}attention_scaling")
    assert (config.num_kv_heads, config.tie_word_embeddings) == (want.num_key_value_heads, want.tie_word_embeddings)
    assert config.max_context == 256
