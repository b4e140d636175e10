"""The architecture of a checkpoint, read from its `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..memory.layout import ModuleDims

if TYPE_CHECKING:
    import torch

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)


class UnsupportedModel(ValueError):
    """A checkpoint that can't be served; the message names the file, the field and what would be accepted."""


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a Llama-architecture decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def inverse_frequencies(self) -> torch.Tensor:
        """Rotary frequencies `[head_dim / 2]` float32."""
        import torch

        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        return 1.0 / self.rope_theta**exponents

    @property
    def module_dims(self) -> ModuleDims:
        """(in_features, out_features) of every projection that an adapter may target."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        return {
            "q_proj": (hidden, self.q_size),
            "k_proj": (hidden, self.kv_size),
            "v_proj": (hidden, self.kv_size),
            "o_proj": (self.q_size, hidden),
            "gate_proj": (hidden, ffn),
            "up_proj": (hidden, ffn),
            "down_proj": (ffn, hidden),
        }

    @classmethod
    def read(cls, directory: Path) -> ModelConfig:
        """Read `directory/config.json` (and `generation_config.json` for the end-of-sequence ids, where present)."""
        path = directory / "config.json"
        raw = _read_json(path)
        architectures = raw.get("architectures") or ["none named"]
        if architectures[0] not in SUPPORTED_ARCHITECTURES:
            raise UnsupportedModel(
                f"{path}: architecture {architectures[0]} is not supported; "
                f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        _refuse_unsupported(raw, path)
        try:
            return _parse(raw, _eos_token_ids(raw, directory))
        except KeyError as error:
            raise UnsupportedModel(f"{path}: field {error} is missing") from None


def _parse(raw: dict[str, Any], eos_token_ids: tuple[int, ...]) -> ModelConfig:
    heads = raw["num_attention_heads"]
    rope = raw.get("rope_parameters") or {}
    return ModelConfig(
        architecture=raw["architectures"][0],
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=eos_token_ids,
    )


def _refuse_unsupported(raw: dict[str, Any], path: Path) -> None:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type != "default":
        raise UnsupportedModel(f"{path}: rope type {rope_type!r} is not supported; supported: default")
    for name in ("attention_bias", "mlp_bias", "quantization_config"):
        if raw.get(name):
            raise UnsupportedModel(f"{path}: {name} is {raw[name]!r}, which is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"{path}: hidden_act {raw['hidden_act']!r} is not supported; supported: silu")


def _eos_token_ids(raw: dict[str, Any], directory: Path) -> tuple[int, ...]:
    generation = directory / "generation_config.json"
    value = raw.get("eos_token_id")
    if generation.is_file():
        value = _read_json(generation).get("eos_token_id", value)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModel(f"{path}: not found; a Hugging Face checkpoint directory is needed") from None
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path}: a JSON object is needed")
    return value
