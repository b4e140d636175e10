"""Converts a GGUF file of a Llama model to a Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.model.load_progress import progress

if TYPE_CHECKING:
    import torch

_MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class MissingGguf(ImportError):
    """The optional package `gguf` is not installed."""


def require_gguf() -> None:
    """Raise MissingGguf, which says how to install it, unless `gguf` can be imported."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingGguf(f"the package gguf is needed ({error}); run: pip install 'chorus-lora[pull]'") from error


def convert(source: Path, target: Path, config: Mapping[str, Any]) -> None:
    """Write `source` into directory `target`: bf16 weights, configuration, tokenizer and chat template.

    config: config.json of the Llama model. Quantized weights are dequantized. Raises MissingGguf, or ValueError for
    tensors that a Llama model does not have.
    """
    require_gguf()
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    tensors = GGUFReader(source).tensors
    with progress("converting", len(tensors)) as advance:
        for tensor in tensors:
            advance(1)
            if tensor.name == "rope_freqs.weight":  # computed from config.json
                continue
            weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype("float32"))
            kind = tensor.name.split(".")[-2]
            if kind in heads:
                weight = half_split(weight, heads[kind])
            weights[checkpoint_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    _write_json(target / "config.json", config)
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    _write_json(target / "generation_config.json", generation)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def half_split(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's interleaving of rotary pairs: rows of a q or k projection `[heads · head_dim, in]`."""
    pairs = weight.view(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def checkpoint_name(name: str) -> str:
    """`blk.3.attn_q.weight` as `model.layers.3.self_attn.q_proj.weight`."""
    match name.split("."):
        case ["blk", layer, kind, "weight"] if kind in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"
        case [kind, "weight"] if kind in _MODEL_NAMES:
            return f"{_MODEL_NAMES[kind]}.weight"
    raise ValueError(f"tensor {name} is not part of a Llama model")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(value), indent=2) + "\n", encoding="utf-8")
