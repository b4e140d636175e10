"""A family of checkpoints: how its `config.json`, its tensors and its adapters' modules are read.

Each family is a file in `families/`, of data and one reading function, or a folder that has its layers and ops, too;
nothing else in the program knows its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ..config_json import ConfigJson
from .config import ModelConfig
from .tensor_names import LLAMA_TENSORS, TensorNames
from .vision import VisionSpec

#: Fields that may be null in every family that has them, and those of ropes.
NULLS = frozenset(
    {
        "activation_sparsity_pattern",
        "attention_chunk_size",
        "attention_factor",
        "attn_layer_indices",
        "attn_logit_softcapping",
        "beta_fast",
        "beta_slow",
        "bos_token_id",
        "clip_qkv",
        "dim_model_base",
        "dtype",
        "eos_token_id",
        "factor",
        "layer_rope_theta",
        "layer_types",
        "layers_block_type",
        "mlp_layer_types",
        "mlp_only_layers",
        "moe_latent_size",
        "moe_layers",
        "mscale",
        "mscale_all_dim",
        "no_rope_layers",
        "position_embedding_type",
        "q_lora_rank",
        "rope_parameters",
        "rope_scaling",
        "scale_depth",
        "sliding_window",
        "torch_dtype",
        "use_bidirectional_attention",
    }
)


@dataclass(frozen=True, slots=True)
class Family:
    """A family of checkpoints."""

    title: str
    """Its name for users."""

    architectures: tuple[str, ...]
    """Values of `architectures` in `config.json`."""

    read: Callable[[ConfigJson], ModelConfig]
    """Reads the configuration; raises UnsupportedModel for values that would not be computed as transformers does."""

    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """transformers' defaults for fields that `config.json` leaves out; see `families/defaults.py`."""

    tensors: TensorNames = LLAMA_TENSORS

    notes: str = ""
    """The parts that are not served, for the documentation."""

    model_types: tuple[str, ...] = ()
    """Values of `model_type` of checkpoints that transformers saves under another family's architecture."""

    nulls: tuple[str, ...] = ()
    """Fields that may be null besides `NULLS`, as in transformers' class."""

    text_part: str = "text_config"
    """The field of `config.json` that describes the text part, where a model has others; of a part of a part, both with
    a dot between them.
    """

    vision: VisionSpec | None = None
    """The vision part, where images are served; None: a checkpoint that has one is served for text alone."""

    why_text_alone: str = ""
    """Why images are not served, where more is to be said than that nobody has tried."""

    head_part: str = ""
    """The field of the part whose class has the output projection, and says whether it is tied. Empty: that is the
    whole model. See `TensorNames.head_part`, too.
    """
