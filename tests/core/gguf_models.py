"""Writes GGUF files of tiny models as llama.cpp's `convert_hf_to_gguf.py` does, and the values that they hold."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open

Json = dict[str, Any]

#: Numbers of YaRN that a file has under names of its own: `rope.scaling.yarn_beta_fast`, and so on.
YARN = {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25}

GEMMA_3_ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}

#: Families of `tiny_families` → llama.cpp's architecture, and changes that it or a file's blocks need.
MODELS: dict[str, tuple[str, Json]] = {
    "llama2": ("llama", {}),
    "llama-linear-rope": ("llama", {}),
    "llama-yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, **YARN}}),
    "mistral": ("llama", {"head_dim": 16}),
    "qwen2-untied": ("qwen2", {}),
    "qwen3": ("qwen3", {"hidden_size": 64}),
    "gemma": ("gemma", {}),
    "gemma-2": ("gemma2", {"query_pre_attn_scalar": 32}),
    "gemma-3": ("gemma3", {"query_pre_attn_scalar": 32, "rope_parameters": GEMMA_3_ROPE}),
    "phi-3": ("phi3", {}),
    "phi-4-mini": ("phi3", {}),
    "granite": ("granite", {}),
    "smollm3": ("smollm3", {}),
    "olmo-2": ("olmo2", {}),
    "mixtral": ("llama", {}),
    "qwen3-moe": ("qwen3moe", {"moe_intermediate_size": 64}),
}

#: The same of architectures that need the original model's config.json beside the file.
BESIDE = {
    "olmoe": "olmoe",
    "ministral-3": "mistral3",
    "exaone-4": "exaone4",
    "cohere-2": "cohere2",
    "glm": "chatglm",
    "glm-4": "glm4",
    "seed-oss": "seed_oss",
    "olmo-3": "olmo2",
    "arcee": "arcee",
    "cohere": "command-r",
    "ernie-4.5": "ernie4_5",
    "exaone-3": "exaone",
    "nemotron": "nemotron",
    "olmo-1": "olmo",
    "phi-2": "phi2",
    "stablelm": "stablelm",
    "starcoder-2": "starcoder2",
}

#: `LlamaModel` of the converter, from which these derive, interleaves rotary pairs.
_PERMUTES = {"llama", "arcee", "granite", "mistral3", "olmo", "smollm3"}


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The converter's own `LlamaModel.permute`."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


_OF_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, with those of all experts in one."""
    found, matrices = {}, defaultdict(dict)
    for name, weight in tensors.items():
        match = _OF_EXPERT.search(name)
        if match is None:
            found[name] = weight
        else:
            matrices[_OF_EXPERT.sub(".experts.", name)][int(match[1])] = weight
    stacks = {name: torch.stack([each[number] for number in sorted(each)]) for name, each in matrices.items()}
    return {**found, **stacks}


def apart(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor of `together` under the names that it had."""
    if weight.ndim < 3 or ".experts." not in name:
        return {name: weight}
    return {name.replace(".experts.", f".experts.{number}."): each for number, each in enumerate(weight)}


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    return found


def write_gguf(
    model: Path,
    file: Path,
    architecture: str,
    kind: str = "F32",
    spoil: Callable[[Json, dict[str, Any]], object] = lambda fields, tensors: None,
) -> dict[str, torch.Tensor]:
    """Write a checkpoint's weights, matrices as `kind`; return the values that the file holds, under their own names.

    spoil: changes metadata and tensors before they are written.
    """
    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    table = gguf.get_tensor_name_map(
        {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}[architecture], config["num_hidden_layers"]
    )
    held: dict[str, torch.Tensor] = {}
    stored: dict[str, Any] = dict(_rope_tensors(config))
    for name, weight in together(tensors_of(model)).items():
        new = table.get_name(name.replace("e_score_correction_bias", "e_score_correction.bias"), (".weight", ".bias"))
        if new is None:  # of an architecture that is not served
            continue
        module, of = name.split(".")[-2], weight
        if architecture in _PERMUTES and module in ("q_proj", "k_proj"):
            of = permute(weight, heads if module == "q_proj" else kv_heads)
        if (architecture.startswith("gemma") or architecture == "nemotron") and name.endswith("norm.weight"):
            of = weight + 1
        is_quantised = (
            weight.ndim > 1 and not weight.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
        )
        quantisation = gguf.GGMLQuantizationType[kind if is_quantised else "F32"]
        data = gguf.quantize(of.numpy(), quantisation)
        stored[new] = data, quantisation
        back = torch.from_numpy(gguf.dequantize(data, quantisation).astype("float32"))
        if of is not weight and module in ("q_proj", "k_proj"):  # the rows that the permutation moved, moved back
            rows = permute(torch.arange(len(weight)).unsqueeze(1), heads if module == "q_proj" else kv_heads).flatten()
            held[name] = torch.empty_like(back)
            held[name][rows] = back
        else:
            held |= apart(name, back - 1 if of is not weight and weight.ndim == 1 and "norm" in name else back)
    fields = metadata(config, architecture)
    spoil(fields, stored)
    writer = gguf.GGUFWriter(file, architecture)
    for name, value in fields.items():
        _add(writer, name, value)
    for name, (data, quantisation) in stored.items():
        writer.add_tensor(name, data, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(name, value)


def _rope_tensors(config: Json) -> dict[str, Any]:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    names = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
    kind = gguf.GGMLQuantizationType.F32
    return {
        name: (torch.tensor(scaling[field], dtype=torch.float32).numpy(), kind)
        for name, field in names.items()
        if field in scaling
    }


def metadata(config: Json, architecture: str) -> Json:
    """What the converter tells of a configuration."""
    rope = config.get("rope_parameters") or {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta = rope.get("rope_theta") or rope.get("full_attention", {}).get("rope_theta", 10000.0)
    found = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", 1e-5)),
        "rope.freq_base": float(theta),
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
        found["rope.scaling.original_context_length"] = original
        yarn = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
        found |= {f"rope.scaling.{name}": rope[field] for name, field in yarn.items() if field in rope}
    if architecture in _PERMUTES:
        found |= {"vocab_size": config["vocab_size"], "rope.dimension_count": head_dim}
    if architecture == "gemma3":
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if architecture in ("gemma2", "gemma3", "phi3") and config.get("sliding_window"):
        found["attention.sliding_window"] = config["sliding_window"]
    if architecture == "gemma2":
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        found |= {name: float(config[name]) for name in caps}
    if architecture == "phi3":
        found["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        found["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
    if config.get("num_experts_per_tok"):
        found["expert_count"] = config.get("num_experts") or config.get("num_local_experts") or 0
        found["expert_used_count"] = config["num_experts_per_tok"]
    if architecture == "qwen3moe":
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if architecture == "granite":
        names = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier"}
        names |= {"residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
        found |= {name: float(config[field]) for name, field in names.items()}
    found = {f"{architecture}.{name}": value for name, value in found.items()}
    ids = {"bos": "bos_token_id", "eos": "eos_token_id"}
    return found | {f"tokenizer.ggml.{name}_token_id": config[field] for name, field in ids.items()}
