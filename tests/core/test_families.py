"""Every supported architecture is in the tables, and is configured as transformers does it. For paths, see `paths`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model.decoder import DecoderModel
from chorus.core.model.families.reading import ON_OPERATORS
from chorus.core.model.families.registry import FAMILIES as SERVED
from chorus.core.model.program.native_decoder import why_unsupported
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.ops.library import native_library

from .model.program import golden
from .tiny_families import (
    ADAPTERS,
    BY_ANOTHER,
    EVERY,
    EXPERTS,
    FAMILIES,
    HYBRIDS,
    OF_CLASSES,
    RENAMED,
    SHAPES,
    SKIPPED,
    TWO_MIXERS,
    save_family,
)

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


def test_the_notes_tell_whom_the_native_decoder_does_not_compute(tmp_path):
    golden.make_configs(tmp_path)
    wrong, mixed = [], set[str]()
    for path in sorted(tmp_path.iterdir()):
        config = golden.model_of(path)
        title, notes = SERVED[config.architecture].title, SERVED[config.architecture].notes
        if why_unsupported(config, torch.float32) is None:
            mixed |= {title} if ON_OPERATORS in notes else set()
        elif ON_OPERATORS not in notes:
            wrong.append(path.name)
    assert not wrong
    told = {"Mistral Large 4 (text)"}
    assert mixed == told, "their notes say which of them"


@pytest.mark.native
@pytest.mark.skipif(not native_library.levels(), reason="needs the native library")
@pytest.mark.parametrize("family", [name for name, (_, changes, _) in EVERY.items() if "expert" not in f"{changes}"])
def test_the_native_decoder_computes_all_families_without_experts(tmp_path, family):
    save_family(family, tmp_path)
    config = read_model_config(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        reason = why_unsupported(config, dtype)
        assert reason is None or (family == "gemma-3n-biased" and reason.startswith("it needs even sizes"))


def test_every_architecture_is_covered():
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as MODELS

    every = {f[0] for f in {**FAMILIES, **SHAPES, **HYBRIDS, **TWO_MIXERS, **SKIPPED, **EXPERTS, **RENAMED}.values()}
    models = {MODELS[getattr(transformers, name)] for name in every - set(OF_CLASSES)}
    models |= {getattr(transformers, OF_CLASSES[name]) for name in every & set(OF_CLASSES)}
    seeing = {name for name, family in SERVED.items() if family.tensors.left_out}  # see test_text_parts.py
    named = {*BY_ANOTHER.values(), "PhiMoEForCausalLM", "MPTForCausalLM"}  # the last ones by checkpoints alone
    assert {model.__name__ for model in models} - seeing | named == set(SERVED) - seeing


def logits_of(executor: CpuExecutor, prompts: list[list[int]], **config: Any) -> torch.Tensor:
    """Logits `[prompts, vocab]` of each prompt's last token, all in one step."""
    seen: list[torch.Tensor] = []
    forward = executor.decoder.forward
    executor.decoder.forward = lambda batch: seen.append(forward(batch)) or seen[-1]
    engine = Engine(EngineConfig(model=".", **config), executor)
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(str(index), prompt, RequestParams(1, temperature=0, logprobs=0)))
    engine.step()
    return seen[0].clone()


OWN_ROPES = {"gpt-j", "codegen"}
"""Families whose layers rotate by code of their own in transformers."""

KV_HEADS = {
    **dict.fromkeys(("gpt-2", "gpt-bigcode-heads", "gpt-neo", "gpt-j", "codegen", "falcon-heads"), 4),
    **dict.fromkeys(("opt", "biogpt", "xglm", "bloom", "mpt", "gpt-neox-japanese"), 4),
    **dict.fromkeys(("persimmon", "persimmon-plain", "openai-gpt", "openai-gpt-relu"), 4),
    **dict.fromkeys(("bloom-heads", "mpt-clipped"), 6),
    **dict.fromkeys(("gpt-bigcode", "falcon-7b"), 1),
}
"""Of families that have no field `num_key_value_heads`."""


def executor_of(model: Path, **config: Any) -> CpuExecutor:
    return CpuExecutor(EngineConfig(model=model, memory_bytes=4 << 20, **{"threads": 1, **config}))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 150, (length,), generator=generator).tolist() for length in (5, 17, 40, 90)]


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


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_longrope_beyond_its_original_positions(tiny, drive, kernels):
    """Prompts longer than 256 tokens get transformers' tokens, which takes the long factors for them."""
    it = tiny("phi-4-mini")
    driver = drive(it, cpu_kernels=kernels, max_num_seqs=3, max_num_batched_tokens=100, max_model_len=512)
    want = {}
    for index, (adapter, length) in enumerate([(None, 300), (next(iter(ADAPTERS)), 257), (None, 420)]):
        prompt, want[str(index)] = it.case(adapter, length, seed=index)
        driver.add(str(index), adapter, prompt, max_tokens=8)
    answers = driver.drain()
    assert {name: answer.tokens for name, answer in answers.items()} == want


def test_longrope_begins_with_the_long_factors_where_requests_may_be_long(tiny):
    it = tiny("phi-4-mini")
    rotary = it.reference.base_model.model.model.rotary_emb
    rope = read_model_config(it.model).attention.rope
    short = rotary.original_inv_freq
    assert torch.equal(rope.inverse_frequencies(256), short)
    rotary(torch.zeros(1, 1, 1), torch.tensor([[256]]))  # a request of 257 tokens
    assert torch.equal(rope.inverse_frequencies(257), rotary.inv_freq)
    assert not torch.equal(rotary.inv_freq, short)


@pytest.mark.parametrize("family", FAMILIES)
def test_configuration_and_frequencies_are_transformers_own(tiny, family):
    import transformers

    it = tiny(family)
    config = read_model_config(it.model)
    want = transformers.AutoConfig.from_pretrained(it.model)
    base = it.reference.get_base_model().base_model
    rotary = getattr(getattr(base, "model", base), "rotary_emb", None)  # Llama 4's names its own class
    assert (rotary is None) == all(layer.rope is None for layer in config.layers) or family in OWN_ROPES
    types = getattr(want, "layer_types", None) or [""] * config.num_layers
    for layer, kind in zip(config.layers, types, strict=True):
        prefix = f"{kind}_" if hasattr(rotary, f"{kind}_original_inv_freq") else ""
        if (rope := layer.mixer.rope) is not None and family not in OWN_ROPES:
            assert torch.equal(rope.inverse_frequencies(), getattr(rotary, f"{prefix}original_inv_freq"))
            assert rope.attention_factor == getattr(rotary, f"{prefix}attention_scaling")
    kv_heads = KV_HEADS.get(family, getattr(want, "num_key_value_heads", want.num_attention_heads))
    assert (config.num_kv_heads, config.tie_word_embeddings) == (kv_heads, want.tie_word_embeddings)
    assert config.max_context == 256


# -- families whose layers are other families'


@pytest.mark.parametrize("family", RENAMED)
def test_paths_of_modules_are_known_under_new_names(tiny, family):
    """What PEFT's all-linear reaches in families whose layers others have."""
    from torch import nn

    it = tiny(family)
    modules = read_model_config(it.model).module_paths
    base = it.reference.get_base_model()
    linear = {name for name, module in base.base_model.named_modules() if isinstance(module, nn.Linear)}
    names = {name.replace(".base_layer", "") for name in linear if ".lora_" not in name}
    names = names if modules.numbers is None else set(map(modules.numbers.own, names))
    names = {name for name in names if not f"model.{name}.".startswith(modules.left_out)}
    for index in range(base.config.num_hidden_layers):
        begin = f"{modules.layers}.{index}."
        paths = {name.removeprefix(begin) for name in names if name.startswith(begin)}
        assert paths, "the layer has modules"
        known = {*modules.in_layer(index), *modules.usual}
        never_called = {path for path in paths if modules.without_number(index, path) is None}
        assert paths - never_called <= known
