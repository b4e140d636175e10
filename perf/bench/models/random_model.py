"""A random Llama checkpoint with a tokenizer, and random PEFT adapters for it: seeded, written once, kept.

Written as plain safetensors and JSON, so neither transformers nor peft is needed to make them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from .sizes import Geometry

VERSION = 2
_SPECIAL = ("<unk>", "<s>", "</s>")
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class RandomModel:
    """Values that determine a model's weights, and the weights of an adapter of each of `ranks`."""

    geometry: Geometry
    ranks: tuple[int, ...] = (8, 16, 32, 64, 8, 16, 32, 64)
    dtype: str = "bfloat16"
    seed: int = 0


def checkpoint(model: RandomModel, work_dir: Path) -> Path:
    """Directory of the model; made on first use."""
    return written_once(work_dir / f"model-{_digest(model)}", lambda path: _write_model(model, path))


def adapters(model: RandomModel, work_dir: Path) -> dict[str, Path]:
    """Directory of each adapter by name; made on first use."""
    made = {}
    for index, rank in enumerate(model.ranks):
        name = f"a{index:02d}-r{rank}"
        made[name] = written_once(
            work_dir / f"adapter-{_digest(model, index, rank)}" / name,
            lambda path, index=index, rank=rank: _write_adapter(model, index, rank, path),
        )
    return made


def _write_model(model: RandomModel, path: Path) -> None:
    shape = model.geometry
    dtype = getattr(torch, model.dtype)
    generator = torch.Generator().manual_seed(model.seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / math.sqrt(columns)).to(dtype)

    def norm() -> torch.Tensor:
        return (0.75 + 0.5 * torch.rand(shape.hidden, generator=generator)).to(dtype)

    tensors = {
        "model.embed_tokens.weight": weight(shape.vocab, shape.hidden),
        "lm_head.weight": weight(shape.vocab, shape.hidden) * 4,  # clear winners, so greedy tokens can be compared
        "model.norm.weight": norm(),
    }
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        tensors |= {f"{at}{each.path}.weight": weight(each.outputs, each.inputs) for each in shape.projections}
        tensors |= {f"{at}{name}_layernorm.weight": norm() for name in ("input", "post_attention")}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = shape.config(model.dtype, rope_theta=10000.0, attention_bias=False, mlp_bias=False, bos_token_id=1)
    _write_json(path / "config.json", config)
    write_tokenizer(shape.vocab, path)


def _write_adapter(model: RandomModel, index: int, rank: int, path: Path) -> None:
    shape = model.geometry
    dtype = getattr(torch, model.dtype)
    generator = torch.Generator().manual_seed(1 + model.seed * 1000 + index)
    tensors = {}
    layers, targets = range(shape.layers), sorted(shape.projections.names)
    dims = {f"model.layers.{layer}.{each.path}": each.dims for layer in layers for each in shape.projections}
    for path_in_model, (d_in, d_out) in dims.items():
        at = f"base_model.model.{path_in_model}."
        a = torch.randn(rank, d_in, generator=generator) / math.sqrt(d_in)
        b = torch.randn(d_out, rank, generator=generator) / math.sqrt(rank)
        tensors |= {f"{at}lora_A.weight": a.to(dtype), f"{at}lora_B.weight": (0.5 * b).to(dtype)}
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    plain = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "random"}
    off = {"lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True}
    config = {**plain, "r": rank, "lora_alpha": rank, **off, "target_modules": targets}
    _write_json(path / "adapter_config.json", config)


def write_tokenizer(vocab_size: int, path: Path) -> None:
    """A BPE tokenizer with byte fallback in Llama 2's format: made-up pieces, but every converter supports it."""
    pieces = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *_ALPHABET]
    if vocab_size < len(pieces):
        raise ValueError(
            f"a vocabulary of {vocab_size} is too small for a tokenizer; at least {len(pieces)} are needed"
        )
    merges: list[tuple[str, str]] = []
    longer = [*_ALPHABET]
    while len(pieces) < vocab_size:
        pairs = list(product(longer, _ALPHABET))[: vocab_size - len(pieces)]
        merges += pairs
        longer = [left + right for left, right in pairs]
        pieces += longer
    unk, bos, eos = _SPECIAL
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([*_SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": unk, "bos_token": bos, "eos_token": eos}
    _write_json(path / "tokenizer_config.json", {**settings, "clean_up_tokenization_spaces": False})


def written_once(path: Path, write: Callable[[Path], None]) -> Path:
    """`path`, written by `write` unless it exists; an interrupted write leaves nothing under that name."""
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=path.parent, prefix=".draft-"))
    try:
        write(draft)
        os.replace(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return path


def _digest(model: RandomModel, *more: Any) -> str:
    parts = [VERSION, asdict(model.geometry), model.dtype, model.seed, *more]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
