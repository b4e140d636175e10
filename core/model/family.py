"""A family of checkpoints: how its `config.json`, its tensors and its adapters' modules are read.

Each family is one file in `families/`, of data and one reading function; nothing else in the program knows its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .config import ModelConfig
from .config_json import ConfigJson
from .tensor_names import LLAMA_TENSORS, TensorNames


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
    """transformers' defaults for fields that `config.json` leaves out."""

    tensors: TensorNames = LLAMA_TENSORS

    notes: str = ""
    """The parts that are not served, for the documentation."""

    model_types: tuple[str, ...] = ()
    """Values of `model_type` of checkpoints that transformers saves under another family's architecture."""

    text_part: str = "text_config"
    """The field of `config.json` that describes the text part, where a model has others; of a part of a part, both with
    a dot between them.
    """
