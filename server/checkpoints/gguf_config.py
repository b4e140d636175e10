"""Makes config.json of a GGUF file's metadata.

Tests: tests/server/checkpoints/test_gguf_model.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...core.model.checkpoints.gguf_file import MEND, GgufFile
from ...core.model.config_json import UnsupportedModel

#: Parameters of Llama 3's rope scaling but for the factor; the file has the scaled frequencies alone.
_LOW, _HIGH = 1.0, 4.0
_LLAMA3_POSITIONS = 8192

#: Layers of the largest Gemma 2 and Gemma 3, whose scores have another scale; the metadata lacks it.
_GEMMA_2_27B, _GEMMA_3_27B = 46, 62

#: Metadata that has no effect on what a model computes, or on one of these architectures.
_NO_EFFECT = {
    "attention.layer_norm_epsilon",
    "pooling_type",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_ext_factor",  # transformers has none
    "tensor_data_layout",
    "vocab_size",
}

_BESIDE = "put config.json of the original model beside the file"


def config_of(file: GgufFile) -> dict[str, Any]:
    """The configuration of a file's model. Raises UnsupportedModel for an architecture that is not supported."""
    make = _ARCHITECTURES.get(file.architecture)
    if make is None:
        raise UnsupportedModel(
            f"{file.path}: general.architecture is {file.architecture!r}; supported: {', '.join(_ARCHITECTURES)}; "
            f"or {_BESIDE}"
        )
    config = _common(file) | make(file)
    _check_common(file, config["head_dim"])
    return config


def _refuse(file: GgufFile, name: str, why: str) -> UnsupportedModel:
    """The error for a value of the metadata."""
    value = file.get("{arch}." + name)
    return UnsupportedModel(f"{file.path}: {file.architecture}.{name} is {value}: {why}; {_BESIDE}")


def _check_common(file: GgufFile, head_dim: int) -> None:
    """Refuse metadata that changes what a model computes and that no field of config.json was made of."""
    if file.architecture != "phi3" and file.get("{arch}.rope.dimension_count", head_dim) != head_dim:
        raise _refuse(file, "rope.dimension_count", f"a head has {head_dim} elements, and all of them must rotate")
    if file.get("{arch}.attention.value_length", head_dim) != head_dim:
        raise _refuse(file, "attention.value_length", f"keys have {head_dim} elements, and values must have as many")
    if not file.get("{arch}.attention.causal", True):
        raise _refuse(file, "attention.causal", "attention to later tokens is not supported")
    if others := file.of_others():
        raise UnsupportedModel(
            f"{file.path}: has {others[0]}, and is of {file.architecture}: the metadata is damaged; {MEND}"
        )
    for name, value in file.never_asked().items():
        field = name.removeprefix(f"{file.architecture}.")
        if value and field not in _NO_EFFECT:
            raise _refuse(file, field, "unknown field")


def _number(file: GgufFile, name: str, default: float | None = None) -> Any:
    """A number of the metadata. Raises UnsupportedModel if there is none."""
    value = file.get("{arch}." + name, default)
    if value is None:
        raise UnsupportedModel(f"{file.path}: {file.architecture}.{name} is missing; convert the model to GGUF again")
    return value


def _integer(file: GgufFile, name: str, default: int | None = None, least: int = 1) -> int:
    """A whole number of the metadata."""
    value = _number(file, name, default)
    if type(value) is not int or value < least:
        raise _refuse(file, name, f"a whole number of at least {least} is needed")
    return value


def _real(file: GgufFile, name: str, default: float | None = None) -> float:
    """A number that files store as a float: one of another type is damaged."""
    value = _number(file, name, default)
    if type(value) is not float or not math.isfinite(value):
        raise _refuse(file, name, "a number stored as a float is needed")
    return _shortest(value)


def _theta(file: GgufFile, name: str) -> float:
    theta = _real(file, name, 10000.0)
    if theta < 1:
        raise _refuse(file, name, "it is at least 1")
    return theta


def _epsilon(file: GgufFile) -> float:
    epsilon = _real(file, name := "attention.layer_norm_rms_epsilon")
    if not 0 <= epsilon < 1:
        raise _refuse(file, name, "it is below 1, and not negative")
    return epsilon


def _shortest(value: float) -> float:
    """A number as it was before it was stored as float32."""
    return float(str(np.float32(value)))


def _common(file: GgufFile) -> dict[str, Any]:
    hidden, heads = _integer(file, "embedding_length"), _integer(file, "attention.head_count")
    head_dim = _integer(file, "attention.key_length", hidden // heads)
    config = {
        "hidden_size": hidden,
        "intermediate_size": _integer(file, "feed_forward_length", least=0),
        "num_hidden_layers": _integer(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _epsilon(file),
        "max_position_embeddings": _integer(file, "context_length"),
        "rope_theta": _theta(file, "rope.freq_base"),
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in file.tensors else 0,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "torch_dtype": "bfloat16",
    }
    for name, key in (("bos", "bos"), ("pad", "padding")):
        config[f"{name}_token_id"] = file.get(f"tokenizer.ggml.{key}_token_id")
    ends = [file.get(f"tokenizer.ggml.{each}_token_id") for each in ("eos", "eot", "eom")]
    config["eos_token_id"] = list(dict.fromkeys(each for each in ends if each is not None)) or None
    if (scaling := _rope_scaling(file)) is not None:
        config["rope_scaling"] = scaling
    return config


#: Numbers of YaRN in config.json → their names in the metadata.
_YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}


def _rope_scaling(file: GgufFile) -> dict[str, Any] | None:
    kind = file.get("{arch}.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return _llama3(file)
    if "rope_factors_short.weight" in file.tensors:
        return _longrope(file)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{file.path}: rope.scaling.type is {kind!r}; supported: none, linear, yarn")
    scaling = {"rope_type": kind, "factor": _real(file, "rope.scaling.factor")}
    original = file.get("{arch}.rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    for field, name in _YARN.items() if kind == "yarn" else ():
        if file.get(f"{{arch}}.rope.scaling.{name}") is not None:
            scaling[field] = _real(file, f"rope.scaling.{name}")
    return scaling


def _llama3(file: GgufFile) -> dict[str, Any]:
    """The scaling whose frequencies the file has; others than Llama 3's are refused."""
    found = file.read("rope_freqs.weight", slice(None))
    factor = float(found[-1])
    theta = _theta(file, "rope.freq_base")
    wavelengths = 2 * math.pi * theta ** (torch.arange(len(found), dtype=torch.float64) / len(found))
    smooth = ((_LLAMA3_POSITIONS / wavelengths - _LOW) / (_HIGH - _LOW)).clamp(0, 1)
    want = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(found.double(), want, rtol=1e-3):
        raise UnsupportedModel(f"{file.path}: tensor rope_freqs.weight is not of Llama 3's rope scaling; {_BESIDE}")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _LLAMA3_POSITIONS,
    }


def _longrope(file: GgufFile) -> dict[str, Any]:
    short, long = (file.read(f"rope_factors_{each}.weight", slice(None)).tolist() for each in ("short", "long"))
    scaling = {
        "rope_type": "longrope",
        "short_factor": [_shortest(each) for each in short],
        "long_factor": [_shortest(each) for each in long],
        "original_max_position_embeddings": _integer(file, "rope.scaling.original_context_length"),
    }
    if file.get("{arch}.rope.scaling.attn_factor") is None:
        return scaling
    return {**scaling, "attention_factor": _real(file, "rope.scaling.attn_factor")}


def _llama(file: GgufFile) -> dict[str, Any]:
    if not file.get("{arch}.expert_count"):
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": _integer(file, "expert_count"),
        "num_experts_per_tok": _integer(file, "expert_used_count"),
    }


def _qwen2(_: GgufFile) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def _qwen3(_: GgufFile) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def _qwen3_moe(file: GgufFile) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": _integer(file, "expert_count"),
        "num_experts_per_tok": _integer(file, "expert_used_count"),
        "moe_intermediate_size": _integer(file, "expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma(_: GgufFile) -> dict[str, Any]:
    return {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}


def _gemma_2(file: GgufFile) -> dict[str, Any]:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": _integer(file, "attention.sliding_window", 4096),
        "attn_logit_softcapping": _real(file, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _real(file, "final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(file, _GEMMA_2_27B),
    }


def _gemma_3(file: GgufFile) -> dict[str, Any]:
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": _integer(file, "attention.sliding_window"),
        "query_pre_attn_scalar": _query_scalar(file, _GEMMA_3_27B),
        "rope_local_base_freq": _theta(file, "rope.freq_base_swa"),
    }
    if file.get("{arch}.final_logit_softcapping") is not None:
        config["final_logit_softcapping"] = _real(file, "final_logit_softcapping")
    return config


def _query_scalar(file: GgufFile, layers_of_27b: int) -> int:
    """The square of the scores' divisor: a head's size, but in the largest model."""
    hidden, heads = _integer(file, "embedding_length"), _integer(file, "attention.head_count")
    is_27b = _integer(file, "block_count") == layers_of_27b
    return hidden // heads if is_27b else _integer(file, "attention.key_length", hidden // heads)


def _phi_3(file: GgufFile) -> dict[str, Any]:
    hidden, heads = _integer(file, "embedding_length"), _integer(file, "attention.head_count")
    positions = _integer(file, "context_length")
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "partial_rotary_factor": _integer(file, "rope.dimension_count", hidden // heads) / (hidden // heads),
        "original_max_position_embeddings": file.get("{arch}.rope.scaling.original_context_length", positions),
        "sliding_window": file.get("{arch}.attention.sliding_window") or None,
    }


def _granite(file: GgufFile) -> dict[str, Any]:
    if not file.get("{arch}.rope.scaling.finetuned", True):
        raise _refuse(file, "rope.scaling.finetuned", "Granite without rotary embeddings is not supported as GGUF")
    return {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_multiplier": _real(file, "attention.scale"),
        "embedding_multiplier": _real(file, "embedding_scale"),
        "residual_multiplier": _real(file, "residual_scale"),
        "logits_scaling": _real(file, "logit_scale"),
    }


def _smollm_3(_: GgufFile) -> dict[str, Any]:
    return {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}


def _olmo_2(file: GgufFile) -> dict[str, Any]:
    if file.get("{arch}.attention.sliding_window") is not None:
        raise UnsupportedModel(f"{file.path}: OLMo 3 is not supported as GGUF without its configuration; {_BESIDE}")
    return {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}


_ARCHITECTURES: dict[str, Callable[[GgufFile], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma_2,
    "gemma3": _gemma_3,
    "phi3": _phi_3,
    "granite": _granite,
    "smollm3": _smollm_3,
    "olmo2": _olmo_2,
}
