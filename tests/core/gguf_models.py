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

from .gguf_changes import Converted, by_part, keys_and_values, permute, unpermute, without_heads
from .gguf_recorded import RECORDED, head_counts, prepared, recorded

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
    "deepseek-v2": "deepseek2",
    "deepseek-v2-groups": "deepseek2",
    "deepseek-v3": "deepseek2",
    "glm-4.7-flash": "deepseek2",
    "youtu": "deepseek2",
    "glm-5": "glm-dsa",
    "dots-1": "dots1",
    "glm-4-moe": "glm4moe",
    "glm-4-moe-groups": "glm4moe",
    "solar-open": "glm4moe",
    "gpt-neox": "gptneox",
    "granite-moe": "granitemoe",
    "granite-moe-shared": "granitemoe",
    "lfm2": "lfm2",
    "lfm2-moe": "lfm2moe",
    "qwen3-next": "qwen3next",
    "ernie-4.5-moe": "ernie4_5-moe",
    "qwen2-moe": "qwen2moe",
    "mamba-1": "mamba",
    "mamba-2": "mamba2",
    "mamba-2-biased": "mamba2",
    "jamba": "jamba",
    "dots-3-note": "dots3note",
    "minimax-m3": "minimax-m3",
    "step-3.7": "step35",
    "deepseek-v3.2": "deepseek32",
    "hy-v4": "hy_v4",
    "glm-5.3-flash": "glm5-next",
    "nemotron-h": "nemotron_h_moe",  # as transformers saves its configuration, which has experts' fields
    "nemotron-3-super": "nemotron_h_moe",
    "laguna": "laguna",
    "mimo-v2-flash": "mimo2",
    "dbrx": "dbrx",
    "hunyuan": "hunyuan-dense",
    "hunyuan-moe": "hunyuan-moe",
    "hunyuan-3": "hy_v3",
    "minimax-m2": "minimax-m2",
    "bloom": "bloom",
    "mpt": "mpt",
    "falcon-7b": "falcon",
    "falcon-40b": "falcon",
    "gpt-2": "gpt2",
    "gpt-bigcode": "starcoder",
    "falcon-mamba": "mamba",
}

#: `LlamaModel` of the converter, from which these derive, interleaves rotary pairs.
_PERMUTES = {"llama", "arcee", "granite", "granitemoe", "mistral3", "olmo", "smollm3"}

#: Changes that models of `BESIDE` need: llama.cpp has no dense layers of these.
CHANGES: dict[str, Json] = {
    "qwen3-next": {"mlp_only_layers": []},
    "qwen2-moe": {"mlp_only_layers": []},
    "falcon-7b": {"num_kv_heads": 1},  # as published
    "dots-3-note": {"swa_q_lora_rank": 24},  # as in other layers
}

#: Beginnings of architectures whose norms have 1 added.
_ONE_PLUS = ("gemma", "nemotron", "qwen3next")


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
    if weight.ndim < 3 or ".experts." not in name or not name.endswith(".weight"):
        return {name: weight}
    return {name.replace(".experts.", f".experts.{number}."): each for number, each in enumerate(weight)}


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    return found


def converted(
    name: str, weight: torch.Tensor, config: Json, architecture: str, table: gguf.TensorNameMap | None, *, older: bool
) -> Converted | None:
    """What the converter's `modify_tensors` makes of a tensor; None for an architecture that is not served.

    older: what its earlier versions made: latents' keys and values, and Qwen3-Next's q, k, v and z, in one tensor.
    """
    if architecture in RECORDED:
        return recorded(name, weight, config, architecture)
    module, heads = name.split(".")[-2], config["num_attention_heads"]
    layer = re.search(r"layers\.(\d+)\.", name)
    at = f"blk.{layer[1]}." if layer else ""
    if name.endswith("kv_b_proj.weight") and not older:
        return keys_and_values(weight, config, at)
    if name.endswith("in_proj_qkvz.weight") and not older:
        return by_part(weight, config, at)
    if name.endswith(("shared_mlp.input_linear.weight", "block_sparse_moe.input_linear.weight")):
        end = "shexp" if "shared_mlp" in name else "exps"
        gate, up = weight.chunk(2, dim=-2)
        return Converted(
            {f"{at}ffn_gate_{end}.weight": gate, f"{at}ffn_up_{end}.weight": up}, lambda found: torch.cat(found, -2)
        )
    for own, new in (
        ("e_score_correction_bias", "e_score_correction.bias"),
        (".expert_bias", ".expert_bias.bias"),
        (".dt_bias", ".dt_proj.bias"),
    ):
        name = name.replace(own, new)
    if "feed_forward.experts." in name and architecture == "lfm2moe":
        name = name.removeprefix("model.")
    assert table is not None, "the package knows the architecture"
    if (new := table.get_name(name, (".weight", ".bias"))) is None:
        return None
    if architecture in _PERMUTES and module in ("q_proj", "k_proj"):
        count = heads if module == "q_proj" else config["num_key_value_heads"]
        return Converted({new: permute(weight, count)}, lambda found: unpermute(found[0], count))
    if "query_key_value" in name:
        return without_heads(new, weight, heads)
    if name.endswith(".A_log"):
        shape = (-1, 1) if architecture == "mamba2" else weight.shape
        return Converted({new: -torch.exp(weight).view(shape)}, lambda found: torch.log(-found[0]).view(weight.shape))
    if architecture == "mamba2" and name.endswith((".D", ".mixer.norm.weight")):
        rows = len(weight) if name.endswith(".D") else config["n_groups"]
        return Converted({new: weight.view(rows, -1)}, lambda found: found[0].flatten())
    if name.endswith((".conv.conv.weight", ".conv1d.weight")):
        return Converted({new: weight.squeeze(1)}, lambda found: found[0].unsqueeze(1))
    is_plain = name.endswith("linear_attn.norm.weight")
    if name.endswith("norm.weight") and not is_plain and architecture.startswith(_ONE_PLUS):
        return Converted({new: weight + 1}, lambda found: found[0] - 1)
    return Converted({new: weight})


def write_gguf(
    model: Path,
    file: Path,
    architecture: str,
    kind: str = "F32",
    spoil: Callable[[Json, dict[str, Any]], object] = lambda fields, tensors: None,
    *,
    older: bool = False,
) -> dict[str, torch.Tensor]:
    """Write a checkpoint's weights, matrices as `kind`; return the values that the file holds, under their own names.

    spoil: changes metadata and tensors before they are written. older: see `converted`.
    """
    text = (model / "config.json").read_text()
    config, by_name = json.loads(text), {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}
    table = None
    if architecture not in RECORDED:
        table = gguf.get_tensor_name_map(by_name[architecture], config["num_hidden_layers"])
    held: dict[str, torch.Tensor] = {}
    stored: dict[str, Any] = dict(_rope_tensors(config))
    for name, weight in together(prepared(architecture, tensors_of(model))).items():
        made = converted(name, weight, config, architecture, table, older=older)
        if made is None:  # of an architecture that is not served
            continue
        found = []
        for new, part in made.parts.items():
            data, quantisation = stored[new] = _stored(part, kind)
            found.append(torch.from_numpy(gguf.dequantize(data, quantisation).astype("float32")))
        held |= apart(name, made.back(found))
    fields = metadata(config, architecture) if table is not None else head_counts(text, architecture)
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


def _stored(weight: torch.Tensor, kind: str) -> tuple[Any, gguf.GGMLQuantizationType]:
    """A tensor as the file has it: as `kind`, if it is a matrix whose rows are whole blocks."""
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    is_quantised = weight.ndim > 1 and not weight.shape[-1] % block
    quantisation = gguf.GGMLQuantizationType[kind if is_quantised else "F32"]
    return gguf.quantize(weight.contiguous().numpy(), quantisation), quantisation


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
    if architecture == "qwen3next":
        found["ssm.group_count"] = config["linear_num_key_heads"]
    if architecture == "granite":
        names = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier"}
        names |= {"residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
        found |= {name: float(config[field]) for name, field in names.items()}
    found = {f"{architecture}.{name}": value for name, value in found.items()}
    ids = {"bos": "bos_token_id", "eos": "eos_token_id"}
    return found | {f"tokenizer.ggml.{name}_token_id": config[field] for name, field in ids.items()}
