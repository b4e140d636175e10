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
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .workload import ALL, Workload, target_modules

if TYPE_CHECKING:
    import torch

VERSION = 1
_SPECIAL = ("<unk>", "<s>", "</s>")
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def checkpoint(workload: Workload, work_dir: Path) -> Path:
    """Directory of the model; made on first use."""
    key = _digest(workload.to_json()["geometry"], workload.dtype, workload.seed)
    return _once(work_dir / f"model-{key}", lambda path: _write_model(workload, path))


def adapters(workload: Workload, work_dir: Path) -> dict[str, Path]:
    """Directory of each adapter by name; made on first use."""
    made = {}
    for index, (name, rank) in enumerate(zip(workload.adapter_names(), workload.ranks, strict=True)):
        targets = workload.targets_of(index)
        parts = [] if targets == ALL else [targets]
        key = _digest(workload.to_json()["geometry"], workload.dtype, workload.seed, index, rank, *parts)
        made[name] = _once(
            work_dir / f"adapter-{key}" / name,
            lambda path, index=index, rank=rank: _write_adapter(workload, index, rank, path),
        )
    return made


def _write_model(workload: Workload, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    shape = workload.geometry
    dtype = getattr(torch, workload.dtype)
    generator = torch.Generator().manual_seed(workload.seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / math.sqrt(columns)).to(dtype)

    def norm() -> torch.Tensor:
        return (0.75 + 0.5 * torch.rand(shape.hidden, generator=generator)).to(dtype)

    tensors = {
        "model.embed_tokens.weight": weight(shape.vocab, shape.hidden),
        "lm_head.weight": weight(shape.vocab, shape.hidden) * 4,  # clear winners: greedy tokens can be compared
        "model.norm.weight": norm(),
    }
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        tensors |= {f"{at}{name}.weight": weight(d_out, d_in) for name, (d_in, d_out) in shape.module_dims.items()}
        tensors |= {f"{at}{name}_layernorm.weight": norm() for name in ("input", "post_attention")}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = shape.config(
        workload.dtype, rope_theta=10000.0, attention_bias=False, mlp_bias=False, bos_token_id=1, eos_token_id=2
    )
    _write_json(path / "config.json", config)
    write_tokenizer(shape.vocab, path)


def _write_adapter(workload: Workload, index: int, rank: int, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    shape = workload.geometry
    dtype = getattr(torch, workload.dtype)
    generator = torch.Generator().manual_seed(1 + workload.seed * 1000 + index)
    modules = target_modules(shape, workload.targets_of(index))
    tensors = {}
    for layer in range(shape.layers):
        for name in modules:
            d_in, d_out = shape.module_dims[name]
            at = f"base_model.model.model.layers.{layer}.{name}."
            a = torch.randn(rank, d_in, generator=generator) / math.sqrt(d_in)
            b = torch.randn(d_out, rank, generator=generator) / math.sqrt(rank)
            tensors |= {f"{at}lora_A.weight": a.to(dtype), f"{at}lora_B.weight": (0.5 * b).to(dtype)}
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "random", "r": rank,
        "lora_alpha": rank, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "target_modules": sorted(name.partition(".")[2] for name in modules),
    }  # fmt: skip
    _write_json(path / "adapter_config.json", config)


def write_tokenizer(vocab_size: int, path: Path) -> None:
    """A BPE with byte fallback in the form of Llama 2's: made-up pieces, but one that every converter knows."""
    pieces = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *_ALPHABET]
    if vocab_size < len(pieces):
        raise ValueError(
            f"a vocabulary of {vocab_size} is too small for a tokenizer; at least {len(pieces)} are needed"
        )
    merges: list[str] = []
    longer = [*_ALPHABET]
    while len(pieces) < vocab_size:
        pairs = list(product(longer, _ALPHABET))[: vocab_size - len(pieces)]
        merges += [f"{left} {right}" for left, right in pairs]
        longer = [left + right for left, right in pairs]
        pieces += longer
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for index, token in enumerate(_SPECIAL)
        ],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True,
                  "vocab": {piece: index for index, piece in enumerate(pieces)}, "merges": merges},
    }  # fmt: skip
    _write_json(path / "tokenizer.json", tokenizer)
    unk, bos, eos = _SPECIAL
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": unk, "bos_token": bos, "eos_token": eos}
    _write_json(path / "tokenizer_config.json", {**settings, "clean_up_tokenization_spaces": False})


def _once(path: Path, write: Callable[[Path], None]) -> Path:
    """`path`, written by `write` unless it is there; an interrupted write leaves nothing behind under that name."""
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


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps([VERSION, *parts], sort_keys=True).encode()).hexdigest()[:12]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
