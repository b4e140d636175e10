"""Reads a checkpoint's `config.json` by its family.

Tests: tests/core/model/test_model_config.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .base_rows import CheckpointRows
from .config import ModelConfig, UnsupportedModel
from .config_json import ConfigJson
from .families import FAMILIES
from .quantization.registry import read_format

_TEXT = "text_config"


def read_model_config(directory: Path) -> ModelConfig:
    """Read `directory/config.json` (and `generation_config.json` for the end-of-sequence ids, where present).

    Raises UnsupportedModel for what is missing, of the wrong type, or would not be computed as transformers does.
    """
    raw = ConfigJson.read(directory / "config.json")
    architecture = (raw.texts("architectures") or ["none named"])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedModel(
            f"{raw.path}: architecture {architecture} is not supported; supported: {', '.join(FAMILIES)}"
        )
    text = raw.text_part(_TEXT).with_defaults(family.defaults)
    weight_format = read_format(raw) or read_format(text)
    model = family.read(text)
    eos = _eos_token_ids(raw, directory) or model.eos_token_ids
    model = replace(
        model,
        architecture=architecture,
        eos_token_ids=eos,
        tensors=family.tensors,
        weight_format=weight_format,
    )
    return replace(model, base_rows=CheckpointRows(directory, model))


def _eos_token_ids(raw: ConfigJson, directory: Path) -> tuple[int, ...]:
    """Return the generation configuration's end-of-sequence ids, or else the model's own."""
    path = directory / "generation_config.json"
    if path.is_file() and (ids := ConfigJson.read(path).token_ids("eos_token_id")):
        return ids
    return raw.token_ids("eos_token_id")
