"""Adapters of llama.cpp of mixtures and of Gated DeltaNet are the same in pages as PEFT's."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from chorus.core.model.read_config import read_model_config
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.gguf_form import _ARCHITECTURES, _EXPERTS

from ..tiny_families import make_tiny
from ..tiny_mixtures import make_mixture
from .test_expert_adapters import values_of

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

RANK, ALPHA = 2, 6.0

#: Paths in a layer, and llama.cpp's names (tensor_mapping.py of its package gguf).
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.in_proj_ba": "ssm_ba",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}


def drawn(config):
    """A and B of everything in every layer, by layer and path; with a dimension of experts where there are."""
    generator, found = torch.Generator().manual_seed(0), {}
    for layer, projections in enumerate(config.projections.layers):
        for each in projections:
            of_all = (each.experts,) if each.experts else ()
            a = torch.randn(*of_all, RANK, each.inputs, generator=generator)
            found[layer, each.path] = a, torch.randn(*of_all, each.outputs, RANK, generator=generator)
    return found


def as_peft(path: Path, pairs) -> Path:
    """With experts as Tinker has them, whose tokens are PEFT's: see `test_expert_adapters.py`."""
    path.mkdir()
    tensors = {
        f"base_model.model.model.layers.{layer}.{module}.lora_{side}.weight": tensor
        for (layer, module), pair in pairs.items()
        for side, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    (path / "adapter_config.json").write_text(json.dumps(fields))
    return path


def as_llama_cpp(path: Path, pairs, architecture: str) -> Path:
    path.mkdir()
    writer = gguf.GGUFWriter(path / "lora.gguf", architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", ALPHA)
    for (layer, module), pair in pairs.items():
        for side, tensor in zip("ab", pair, strict=True):
            name = f"blk.{layer}.{NAMES[module]}.weight.lora_{side}"
            writer.add_tensor(name, tensor.contiguous().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def turned(tensor, dim, k_heads, v_per_k, size):
    """As llama.cpp's converter: heads of values by their number within a head of keys, then by that head."""
    parts = tensor.unflatten(dim, (k_heads, v_per_k, size))
    return parts.transpose(dim, dim + 1).flatten(dim, dim + 2).contiguous()


def with_turned_heads(config, pairs):
    """The pairs of Gated DeltaNet as the converter writes those of Qwen3.5."""
    joined, values = config.projections["in_proj_qkv"], config.projections["in_proj_b"].outputs
    k_heads, v_per_k = joined.units, values // joined.units
    size = joined.sections[2] // values
    keys = 2 * joined.sections[0]
    found = dict(pairs)
    for (layer, module), (a, b) in pairs.items():
        if module == "linear_attn.in_proj_qkv":
            b = torch.cat([b[:keys], turned(b[keys:], 0, k_heads, v_per_k, size)])
        elif module == "linear_attn.in_proj_z":
            b = turned(b, 0, k_heads, v_per_k, size)
        elif module in ("linear_attn.in_proj_a", "linear_attn.in_proj_b"):
            b = turned(b, 0, k_heads, v_per_k, 1)
        elif module == "linear_attn.out_proj":
            a = turned(a, 1, k_heads, v_per_k, size)
        found[layer, module] = a, b
    return found


def interleaved(config, pairs):
    """The pairs as the converter's `permute` writes rows of q and k: halves of rotary pairs next to each other."""
    found = dict(pairs)
    for (layer, module), (a, b) in pairs.items():
        if module in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.projections[module.rpartition(".")[2]].units
            found[layer, module] = a, b.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
    return found


def same(tmp_path, config, pairs, given, architecture):
    peft, want = values_of(as_peft(tmp_path / "peft", pairs), config, None)
    own, found = values_of(as_llama_cpp(tmp_path / "own", given, architecture), config, None)
    assert own.parts == peft.parts
    assert torch.equal(found, want) and found.any()
    return own


def named(config, pairs):
    """The pairs by the model's own names, under which PEFT saves them."""
    names = {config.projections[module].path: path for module, path in config.module_paths.renamed}
    return {(layer, names.get(module, module)): pair for (layer, module), pair in pairs.items()}


def shared_a(pairs, path, parts):
    """The pairs with those of `parts`, whose rows follow one another at `path` in PEFT's adapter, sharing an A."""
    found, joined = dict(pairs), {key: pair for key, pair in pairs.items() if key[1] not in parts}
    for layer in {layer for layer, module in pairs if module in parts}:
        a = pairs[layer, parts[0]][0]
        found |= {(layer, part): (a, pairs[layer, part][1]) for part in parts}
        joined[layer, path] = a, torch.cat([pairs[layer, part][1] for part in parts])
    return found, joined


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("qwen3-moe", "qwen3moe"),
        ("qwen2-moe", "qwen2moe"),
        ("olmoe", "olmoe"),
        ("deepseek-v2", "deepseek2"),
        ("deepseek-v3", "deepseek2"),
        ("glm-4.7-flash", "deepseek2"),
        ("glm-5", "glm-dsa"),
        ("glm-4-moe", "glm4moe"),
        ("dots-1", "dots1"),
        ("ernie-4.5-moe", "ernie4_5-moe"),
        ("hunyuan-moe", "hunyuan-moe"),
        ("minimax-m2", "minimax-m2"),
        ("lfm2-moe", "lfm2moe"),
    ],
)
def test_mixtures(tmp_path, family, architecture):
    config = read_model_config(make_mixture(family).model)
    pairs = drawn(config)
    own = same(tmp_path, config, named(config, pairs), pairs, architecture)
    assert "experts.gate_proj" in own.targets


@pytest.mark.parametrize(
    ("family", "architecture", "turns"),
    [("mixtral", "llama", True), ("granite-moe", "granitemoe", True), ("gpt-oss", "gpt-oss", False)],
)
@pytest.mark.parametrize("experts", [True, False])
def test_mixtures_whose_experts_may_be_in_one_tensor(tmp_path, family, architecture, turns, experts):
    """Of which the converter takes no experts."""
    config = read_model_config(make_mixture(family).model)
    pairs = {key: pair for key, pair in drawn(config).items() if experts or ".experts." not in key[1]}
    same(tmp_path, config, named(config, pairs), interleaved(config, pairs) if turns else pairs, architecture)


def test_rows_by_part(tmp_path):
    """GPT-NeoX has them by head, which llama.cpp sorts."""
    config = read_model_config(make_tiny("gpt-neox").model)
    parts = [f"self_attn.{each}_proj" for each in "qkv"]
    _, by_part = shared_a(drawn(config), "self_attn.qkv_proj", parts)
    heads = config.projections["q_proj"].units
    by_head = {
        (layer, "attention.query_key_value" if module == "self_attn.qkv_proj" else module): (
            (a, b.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2).contiguous())
            if module == "self_attn.qkv_proj"
            else (a, b)
        )
        for (layer, module), (a, b) in by_part.items()
    }
    same(tmp_path, config, named(config, by_head), by_part, "gptneox")


@pytest.mark.parametrize(("family", "architecture"), [("glm-4", "glm4"), ("glm", "chatglm")])
def test_gate_and_up_in_one(tmp_path, family, architecture):
    config = read_model_config(make_tiny(family).model)
    _, joined = shared_a(drawn(config), "mlp.gate_up_proj", ["mlp.gate_proj", "mlp.up_proj"])
    same(tmp_path, config, joined, joined, architecture)


def test_two_products_of_gated_delta_net_in_one(tmp_path):
    """Qwen3-Next's, of which llama.cpp keeps one, and the order of all heads."""
    config = read_model_config(make_mixture("qwen3-next").model)
    given = {key: pair for key, pair in drawn(config).items() if not key[1].endswith(("in_proj_qkv", "in_proj_z"))}
    _, joined = shared_a(given, "linear_attn.in_proj_ba", ["linear_attn.in_proj_b", "linear_attn.in_proj_a"])
    same(tmp_path, config, joined, joined, "qwen3next")


def test_names_are_those_of_the_package():
    """Every name is one that the architecture has there."""
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    for architecture, names in _ARCHITECTURES.items():
        if architecture not in numbers:
            continue
        tensors = gguf.MODEL_TENSORS[numbers[architecture]]
        known = {gguf.TENSOR_NAMES[each].removeprefix("blk.{bid}.") for each in tensors}
        own = {name for name, path in names.items() if _EXPERTS.get(name) != path}
        assert own <= known, architecture


@pytest.mark.parametrize(
    ("family", "architecture", "is_interleaved"),
    [
        ("arcee", "arcee", True),
        ("cohere-2", "cohere2", False),
        ("cohere", "command-r", False),
        ("ernie-4.5", "ernie4_5", False),
        ("exaone-4", "exaone4", False),
        ("ministral-3", "mistral3", True),
        ("olmo-1", "olmo", True),
        ("seed-oss", "seed_oss", False),
        ("exaone-3", "exaone", False),
        ("hunyuan", "hunyuan-dense", False),
        ("lfm2", "lfm2", False),
        ("nemotron", "nemotron", False),
        ("phi-2", "phi2", False),
        ("stablelm", "stablelm", False),
        ("starcoder-2", "starcoder2", False),
    ],
)
def test_families_with_llama_s_modules(tmp_path, family, architecture, is_interleaved):
    config = read_model_config(make_tiny(family).model)
    pairs = drawn(config)
    given = interleaved(config, pairs) if is_interleaved else pairs
    same(tmp_path, config, named(config, pairs), given, architecture)


@pytest.mark.parametrize(("family", "architecture"), [("qwen3.5", "qwen35"), ("qwen3.5-moe", "qwen35moe")])
def test_gated_delta_net(tmp_path, family, architecture):
    """Whose heads of values llama.cpp has in another order, where there are more of them than heads of keys."""
    config = read_model_config((make_tiny if architecture == "qwen35" else make_mixture)(family).model)
    pairs = drawn(config)
    given = with_turned_heads(config, pairs)
    joined = config.projections["in_proj_qkv"]
    assert config.projections["in_proj_b"].outputs > joined.units > 1
    same(tmp_path, config, pairs, given, architecture)


def test_another_model_s_adapter_is_refused(tmp_path):
    config = read_model_config(make_tiny("qwen3.5").model)
    pairs = {key: pair for key, pair in drawn(config).items() if key[1] == "linear_attn.in_proj_z"}
    (layer, module), (a, b) = next(iter(pairs.items()))
    pairs[layer, module] = a, b[:-1]
    with pytest.raises(AdapterFormatError, match=r"tensor blk\.0\.attn_gate\.weight\.lora_b has shape"):
        inspect_adapter(as_llama_cpp(tmp_path / "own", pairs, "qwen35"), config.module_paths)
