"""Converts a GGUF file to a Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.model.checkpoints.load_progress import progress
from ...memory.files.tokens.torchvision import mend_torchvision


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

    config: config.json of the model. Quantized weights are dequantized. Raises MissingGguf, or ValueError for tensors
    that the model does not have.
    """
    require_gguf()
    import torch
    from safetensors.torch import save_file

    mend_torchvision()
    from transformers import AutoTokenizer

    from ...core.model.checkpoints.gguf_checkpoint import GgufCheckpoint
    from ...core.model.read_config import read_model_config
    from ...core.model.weights.tensor_parts import sources

    _write_json(target / "config.json", config)
    wanted = {source.name for source in sources(read_model_config(target), ()).values()}
    checkpoint, weights = GgufCheckpoint(source, wanted), {}
    with progress("converting", len(checkpoint.names())) as advance:
        for name in checkpoint.names():
            advance(1)
            if name not in wanted:
                raise ValueError(f"tensor {name} is not part of the model that config.json describes")
            weights[name] = torch.empty(checkpoint[name].shape, dtype=torch.bfloat16)
            checkpoint.read_into(weights[name], name)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    _write_json(target / "generation_config.json", generation)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(value), indent=2) + "\n", encoding="utf-8")
