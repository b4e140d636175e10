"""Weights of a checkpoint, read tensor by tensor into packed projections."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .model_config import ModelConfig, UnsupportedModel


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. qkv: `[q + 2·kv, hidden]`; gate_up: `[2·ffn, hidden]`; o, down: `[hidden, in]`."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    post_attention_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(slots=True)
class ModelWeights:
    """embed, lm_head: `[vocab, hidden]`, the same tensor when tied."""

    embed: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    lm_head: torch.Tensor


class Checkpoint:
    """The safetensors files of a model directory as one mapping from tensor name to tensor."""

    def __init__(self, directory: Path) -> None:
        self._stack = ExitStack()
        self._files = {}
        index = directory / "model.safetensors.index.json"
        try:
            if index.is_file():
                names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                paths = sorted(directory / name for name in names)
            else:
                paths = [directory / "model.safetensors"]
            for path in paths:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                self._files.update(dict.fromkeys(file.keys(), file))
        except FileNotFoundError as error:
            raise UnsupportedModel(f"{directory}: no model.safetensors, nor its shards: {error}") from None
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise UnsupportedModel(f"{directory}: weights cannot be read: {error}") from error
        self._directory = directory

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read_into(self, target: torch.Tensor, name: str) -> None:
        """Copy tensor `name` into `target`, casting to its dtype. UnsupportedModel when absent or of another shape."""
        if name not in self._files:
            raise UnsupportedModel(f"{self._directory}: tensor {name} is missing")
        tensor = self._files[name].get_tensor(name)
        if tensor.shape != target.shape:
            raise UnsupportedModel(
                f"{self._directory}: tensor {name} has shape {list(tensor.shape)}, "
                f"config.json needs {list(target.shape)}"
            )
        target.copy_(tensor)


def load_weights(directory: Path, config: ModelConfig, dtype: torch.dtype) -> ModelWeights:
    """Read every weight in `dtype`; q, k, v and gate, up are packed as they are read, without a second copy."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    with Checkpoint(directory) as checkpoint:

        def read(name: str, *shape: int) -> torch.Tensor:
            target = torch.empty(shape, dtype=dtype)
            checkpoint.read_into(target, name)
            return target

        def packed(names: list[str], widths: list[int]) -> torch.Tensor:
            target = torch.empty(sum(widths), hidden, dtype=dtype)
            for name, part in zip(names, target.split(widths), strict=True):
                checkpoint.read_into(part, name)
            return target

        def layer(i: int) -> LayerWeights:
            at = f"model.layers.{i}."
            return LayerWeights(
                input_norm=read(at + "input_layernorm.weight", hidden),
                qkv=packed(
                    [f"{at}self_attn.{name}_proj.weight" for name in "qkv"],
                    [config.q_size, config.kv_size, config.kv_size],
                ),
                o=read(at + "self_attn.o_proj.weight", hidden, config.q_size),
                post_attention_norm=read(at + "post_attention_layernorm.weight", hidden),
                gate_up=packed([f"{at}mlp.{name}_proj.weight" for name in ("gate", "up")], [ffn, ffn]),
                down=read(at + "mlp.down_proj.weight", hidden, ffn),
            )

        embed = read("model.embed_tokens.weight", config.vocab_size, hidden)
        tied = config.tie_word_embeddings
        return ModelWeights(
            embed=embed,
            layers=[layer(i) for i in range(config.num_layers)],
            norm=read("model.norm.weight", hidden),
            lm_head=embed if tied else read("lm_head.weight", config.vocab_size, hidden),
        )
