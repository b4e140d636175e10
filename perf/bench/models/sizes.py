"""Model shapes that the benchmark fills with random weights, for Llama's architecture."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ....core.model.checkpoints.quantization.round_to_nearest import RoundToNearest
from ....memory.pages.layer_projections import dense_projections
from ....memory.pages.layout import PageLayout
from ....memory.pages.projections import Projections
from .families import fields_of

#: Names of a layer's products. The LoRA products of projections that share an input are one pair of launches.
GROUPS = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class Geometry:
    """Shapes of a Llama-architecture model with untied embeddings."""

    hidden: int = 768
    ffn: int = 2048
    layers: int = 12
    heads: int = 12
    kv_heads: int = 4
    vocab: int = 32000
    positions: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @cached_property
    def projections(self) -> Projections:
        """The projections that adapters may change."""
        return dense_projections(
            self.layers, self.hidden, self.ffn, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim
        )

    @property
    def groups(self) -> dict[str, tuple[int, tuple[tuple[int, int, int], ...]]]:
        """Per group: inputs, and (module id, first column, width) of its projections, in order."""
        gemms = zip(GROUPS, self.projections.gemm_shapes, strict=True)
        return {name: (each.inputs, each.modules) for name, each in gemms}

    @property
    def layer_params(self) -> int:
        """Parameters of all layers' projections."""
        return self.projections.num_weights

    def layer_bytes(self, itemsize: int, quantiser: RoundToNearest | None) -> int:
        """Bytes of all layers' projections, as they are kept."""
        if quantiser is None:
            return itemsize * self.layer_params
        return sum(
            quantiser.num_bytes(each.outputs, each.inputs) for layer in self.projections.layers for each in layer
        )

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def rank_params(self) -> int:
        """Parameters of one rank of an adapter on all projections."""
        return self.projections.rank_elems()

    @property
    def kv_elems_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim

    def page_layout(self, itemsize: int, block_tokens: int = 16) -> PageLayout:
        return PageLayout(self.layers, self.kv_heads, self.head_dim, block_tokens, itemsize)

    def step(
        self, itemsize: int, rows: int, count: int, before: int, ranks: Iterable[int] = (), *, kv_itemsize: int = 0
    ) -> tuple[int, int]:
        """Bytes that a step reads, each once, and its floating-point operations.

        kv_itemsize: bytes of an element of KV; 0: `itemsize`. rows: of `count` tokens each, with KV of `before` tokens;
        a sequence's last token has logits. ranks: of the sequences' adapters, in rotation.
        """
        ranks = tuple(ranks)[:rows]
        of_rows = sum(ranks[row % len(ranks)] for row in range(rows)) if ranks else 0
        params = self.layer_params + self.head_params + sum(ranks) * self.rank_params
        kv_elems = rows * (before + count) * self.kv_elems_per_token
        num_bytes = itemsize * params + (kv_itemsize or itemsize) * kv_elems
        keys = rows * sum(range(before + 1, before + count + 1))
        products = count * (rows * self.layer_params + of_rows * self.rank_params) + rows * self.head_params
        return num_bytes, 2 * products + 4 * self.layers * self.hidden * keys  # scores and values

    def config(self, dtype: str, **more: Any) -> dict[str, Any]:
        """config.json of the model; more: fields that the shapes don't determine."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": dtype,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "eos_token_id": 2,
            **more,
        }


_ROPE = {"rope_theta": 10000.0}

_LLAMA3_ROPE = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@dataclass(frozen=True)
class ModelSize:
    """A named geometry."""

    name: str
    geometry: Geometry
    rope: dict[str, Any]
    """Fields of config.json that the geometry does not determine."""

    family: str = "llama"
    """One of `FAMILIES`."""

    def write_config(self, directory: Path, dtype: str) -> Path:
        """Make `directory` a checkpoint without weights, and return it."""
        directory.mkdir(parents=True, exist_ok=True)
        more = fields_of(self.family, self.geometry.layers, self.geometry.heads, self.geometry.head_dim)
        config = self.geometry.config(dtype, **{**self.rope, **more})
        if (text := config.pop("text_config", None)) is not None:
            whole = {name: config.pop(name) for name in ("architectures", "model_type")}
            config = {**whole, "text_config": {**config, **text}}
        (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        return directory


TINY = "tiny"

#: Shapes after `tiny` are those of models in use, `wide` with fewer layers.
SIZES = {
    "llama-3.1-8b": ModelSize(
        "llama-3.1-8b",
        Geometry(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, vocab=128256, positions=131072),
        _LLAMA3_ROPE,
    ),
    **{
        name: ModelSize(name, geometry, _ROPE)
        for name, geometry in {
            TINY: Geometry(hidden=128, ffn=256, layers=2, heads=2, kv_heads=1, vocab=512),
            "125m": Geometry(),
            "135m": Geometry(hidden=576, ffn=1536, layers=30, heads=9, kv_heads=3, vocab=49152),
            "170m": Geometry(hidden=1024, layers=12, heads=16),
            "360m": Geometry(hidden=960, ffn=2560, layers=32, heads=15, kv_heads=5),
            "500m": Geometry(hidden=896, ffn=4864, layers=24, heads=14, kv_heads=2, vocab=151936),
            "1b": Geometry(hidden=2048, ffn=8192, layers=16, heads=32, kv_heads=8),
            "wide": Geometry(hidden=2048, ffn=5632, layers=8, heads=32, kv_heads=4),
        }.items()
    },
}


def is_smoke(device: str, size: str) -> bool:
    """True for a run that tests the benchmark itself, with a model too small for measurements, on a CPU."""
    return device == "cpu" and size == TINY
