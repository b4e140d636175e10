"""The architecture of a checkpoint, read from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ...memory.pages.layout import ModuleDims, module_dims
from .config_json import ConfigJson, UnsupportedModel
from .layers import AttentionSpec, GatedSpec, HeadNorm, LayerSpec, NormSpec
from .rope_config import RopeConfig

if TYPE_CHECKING:
    import torch

__all__ = ["SUPPORTED_ARCHITECTURES", "ModelConfig", "UnsupportedModel"]


@dataclass(frozen=True, slots=True)
class _Family:
    """Differences of an architecture from the others.

    bias, mlp_bias: whether config.json's `attention_bias` and `mlp_bias` mean anything. qkv_bias: always there.
    out_bias: the field that says whether o_proj has one. defaults: what transformers assumes where config.json is
    silent.
    """

    defaults: Mapping[str, int] = field(default_factory=dict)
    bias: bool = False
    out_bias: str = "attention_bias"
    mlp_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family({"max_position_embeddings": 2048}, bias=True, mlp_bias=True),
    "MistralForCausalLM": _Family(
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": _Family(
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
        qkv_bias=True,
    ),
    "Qwen3ForCausalLM": _Family(
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28,
         "head_dim": 128},
        bias=True, qk_norm=True,
    ),
    "SeedOssForCausalLM": _Family(
        {"num_key_value_heads": 8, "max_position_embeddings": 524288, "head_dim": 128, "attention_bias": True},
        bias=True, out_bias="attention_out_bias", mlp_bias=True,
    ),
}  # fmt: skip

SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a Llama-family decoder.

    qkv_bias, o_bias, mlp_bias: which projections have biases. qk_norm: q and k heads are normalised before rotation.
    sliding_window: tokens that a layer with windowed attention sees, None when every layer sees all. A model is served
    within its window (`max_context`), where windowed and full attention are the same.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    sliding_window: int | None
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def max_context(self) -> int:
        """The most tokens a request may have: `max_position_embeddings`, or the sliding window where it is less."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)

    def inverse_frequencies(self) -> torch.Tensor:
        """Rotary frequencies `[head_dim / 2]` float32."""
        return self.rope.inverse_frequencies()

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What the layers are made of."""
        mixer = AttentionSpec(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            scale=self.head_dim**-0.5,
            rope=self.rope,
            head_norm=HeadNorm.EACH if self.qk_norm else None,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
        )
        return (LayerSpec(mixer, GatedSpec(self.intermediate_size, bias=self.mlp_bias)),) * self.num_layers

    @property
    def norm(self) -> NormSpec:
        return NormSpec(self.rms_norm_eps)

    embedding_multiplier: ClassVar[float] = 1.0
    logits_scale: ClassVar[float] = 1.0
    logits_softcap: ClassVar[float | None] = None

    @property
    def module_dims(self) -> ModuleDims:
        """(in_features, out_features) of every projection that an adapter may target."""
        return module_dims(self.hidden_size, self.intermediate_size, self.q_size, self.kv_size)

    @classmethod
    def read(cls, directory: Path) -> ModelConfig:
        """Read `directory/config.json` (and `generation_config.json` for the end-of-sequence ids, where present).

        Raises UnsupportedModel for what is missing, of the wrong type, or would not be computed as transformers does.
        """
        raw = ConfigJson.read(directory / "config.json")
        architecture = (raw.texts("architectures") or ["none named"])[0]
        if architecture not in _FAMILIES:
            raise UnsupportedModel(
                f"{raw.path}: architecture {architecture} is not supported; "
                f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        return _parse(raw, architecture, _eos_token_ids(raw, directory))


def _parse(raw: ConfigJson, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    family = _FAMILIES[architecture]
    if raw.raw.get("quantization_config"):
        raise raw.refuse("quantization_config", "quantized checkpoints are not supported; use the original one")
    if raw.text("hidden_act", "silu") != "silu":
        raise raw.refuse("hidden_act", "not supported; supported: silu")
    hidden, layers, heads = (raw.integer(f) for f in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    # A field that is absent takes the architecture's default; one that is null means "as many as query heads".
    grouped = "num_key_value_heads" in raw.raw
    kv_heads = raw.integer(
        "num_key_value_heads", heads if grouped else family.defaults.get("num_key_value_heads", heads)
    )
    if heads % kv_heads:
        raise raw.refuse("num_key_value_heads", f"num_attention_heads, {heads}, must be a multiple of it")
    head_dim = raw.integer("head_dim", family.defaults.get("head_dim", hidden // heads), least=2)
    if head_dim % 2:
        raise UnsupportedModel(f"{raw.path}: head_dim is {head_dim}; rotary embedding needs an even one")
    positions = raw.integer("max_position_embeddings", family.defaults["max_position_embeddings"])
    attention_bias = family.bias and raw.boolean("attention_bias", bool(family.defaults.get("attention_bias")))
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=raw.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
        rope=_rope(raw, head_dim, positions),
        max_position_embeddings=positions,
        sliding_window=_sliding_window(raw, architecture, layers),
        tie_word_embeddings=raw.boolean("tie_word_embeddings"),
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=family.bias and raw.boolean(family.out_bias, attention_bias and family.out_bias == "attention_bias"),
        mlp_bias=family.mlp_bias and raw.boolean("mlp_bias"),
        qk_norm=family.qk_norm,
        dtype=_dtype(raw),
        bos_token_id=next(iter(raw.token_ids("bos_token_id")), None),
        eos_token_ids=eos_token_ids,
    )


def _rope(raw: ConfigJson, dim: int, positions: int) -> RopeConfig:
    """The rotary embedding, from `rope_parameters` or the older `rope_scaling` and `rope_theta`."""
    scaling = (
        raw.object("rope_scaling") or raw.object("rope_parameters") or ConfigJson(raw.path, {}, "rope_parameters.")
    )
    theta = scaling.number("rope_theta", raw.number("rope_theta", 10000.0))
    if nested := [name for name, value in scaling.raw.items() if isinstance(value, dict)]:
        raise scaling.refuse(nested[0], "rotary embeddings that differ between layers are not supported")
    type_field = "rope_type" if "rope_type" in scaling.raw else "type"
    rope_type = scaling.text(type_field, "default")
    if rope_type not in (served := ("default", "linear", "llama3")):
        raise scaling.refuse(type_field, f"rope type not supported; supported: {', '.join(served)}")
    for holder in (scaling, raw):
        for name in ("partial_rotary_factor", "attention_factor"):
            if holder.number(name, 1.0) != 1.0:
                raise holder.refuse(name, "not supported; only 1.0 is")
    if rope_type == "default":
        return RopeConfig(dim, theta)
    if rope_type == "linear":
        return RopeConfig(dim, theta, rope_type, factor=scaling.number("factor"))
    original = "original_max_position_embeddings"
    rope = RopeConfig(
        dim,
        theta,
        rope_type,
        factor=scaling.number("factor"),
        original_max_position_embeddings=raw.integer(original, scaling.integer(original, positions)),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise scaling.refuse("high_freq_factor", f"it must be above low_freq_factor, {rope.low_freq_factor}")
    return rope


def _sliding_window(raw: ConfigJson, architecture: str, layers: int) -> int | None:
    """Return the sliding window of the layers that have one; None when none has."""
    defaults = _FAMILIES[architecture].defaults
    if "sliding_window" not in defaults:
        return None
    if "sliding_window" in raw.raw and raw.raw["sliding_window"] is None:
        return None
    window = raw.integer("sliding_window", defaults["sliding_window"])
    if architecture == "MistralForCausalLM":
        return window
    types = raw.texts("layer_types")
    if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise raw.refuse("layer_types", f"{unknown[0]} is not supported; supported: full_attention, sliding_attention")
    if not raw.boolean("use_sliding_window"):
        return None
    windowed = "sliding_attention" in types or (
        not types and raw.integer("max_window_layers", defaults["max_window_layers"], least=0) < layers
    )
    return window if windowed else None


def _dtype(raw: ConfigJson) -> str:
    name = "dtype" if raw.raw.get("dtype") is not None else "torch_dtype"
    dtype = raw.text(name, "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise raw.refuse(name, f"not supported; supported: {', '.join(_DTYPES)}")
    return dtype


def _eos_token_ids(raw: ConfigJson, directory: Path) -> tuple[int, ...]:
    """Return the generation configuration's end-of-sequence ids, or else the model's own."""
    path = directory / "generation_config.json"
    if path.is_file() and (ids := ConfigJson.read(path).token_ids("eos_token_id")):
        return ids
    return raw.token_ids("eos_token_id")
