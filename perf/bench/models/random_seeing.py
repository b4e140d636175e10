"""A random checkpoint that sees, with SmolVLM's parts, and random adapters of its vision tower: written once, kept.

The tower is SigLIP's, a connector makes one row of some patches, and the text part is Llama's. An image has one size,
and is one tile.

Tests: tests/perf/bench/test_images.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer

from ....memory.files.tokens.torchvision import mend_torchvision
from .random_model import lora_config, write_tokenizer, written_once
from .sizes import Geometry

MARKS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_RANK = 16
_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


@dataclass(frozen=True)
class SeeingSize:
    """Shapes of the tower, and of the text part."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    pixels: int
    """On each side of an image."""
    patch: int
    merged: int
    """Patches on each side of a square that becomes one row."""
    text: Geometry

    @property
    def rows(self) -> int:
        """Rows of an image."""
        return (self.pixels // self.patch // self.merged) ** 2


SEEING_SIZES = {
    "tiny": SeeingSize(
        32, 64, 2, 2, 64, 16, 2, Geometry(hidden=128, ffn=256, layers=2, heads=2, kv_heads=1, vocab=512)
    ),
    "384px": SeeingSize(768, 3072, 12, 12, 384, 16, 4, Geometry()),
}
"""`384px`: SigLIP's base size at 384 pixels, beside the text model `125m`."""


def seeing_checkpoint(name: str, work_dir: Path) -> Path:
    """Directory of a model, in float32."""
    return written_once(work_dir / f"seeing-{name}", lambda path: _write(SEEING_SIZES[name], path))


def tower_adapters(name: str, count: int, work_dir: Path) -> Path:
    """A directory of adapters of all linear layers of the tower, and of the connector."""
    path = work_dir / f"seeing-{name}-adapters-{count}"
    return written_once(path, lambda draft: _write_adapters(SEEING_SIZES[name], count, draft))


def _write(size: SeeingSize, path: Path) -> None:
    mend_torchvision()
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessor,
        Idefics3Processor,
        PreTrainedTokenizerFast,
    )

    text = size.text
    write_tokenizer(text.vocab, path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    own = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **own)
    edge = {"longest_edge": size.pixels}
    images = Idefics3ImageProcessor(size=edge, max_image_size=edge, do_image_splitting=False)
    Idefics3Processor(images, wrapped, image_seq_len=size.rows).save_pretrained(path)
    config = Idefics3Config(
        text_config=replace(text, vocab=-(-len(wrapped) // 64) * 64).config("float32", bos_token_id=1, pad_token_id=0),
        vision_config={
            "hidden_size": size.hidden,
            "intermediate_size": size.ffn,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "image_size": size.pixels,
            "patch_size": size.patch,
        },
        scale_factor=size.merged,
        image_token_id=wrapped.get_vocab()[MARKS[0]],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).float().save_pretrained(path)


def _write_adapters(size: SeeingSize, count: int, path: Path) -> None:
    fields = lora_config(_RANK, rf".*(vision_model.*({'|'.join(_TARGETS)})|modality_projection.proj)")
    for index in range(count):
        generator, tensors = torch.Generator().manual_seed(1 + index), dict[str, torch.Tensor]()
        for module, d_in, d_out in _modules(size):
            at = f"base_model.model.model.{module}"
            a, b = torch.randn(_RANK, d_in, generator=generator), torch.randn(d_out, _RANK, generator=generator)
            tensors[f"{at}.lora_A.weight"] = a / math.sqrt(d_in)
            tensors[f"{at}.lora_B.weight"] = b / math.sqrt(_RANK)
        one = path / f"t{index}"
        one.mkdir()
        save_file(tensors, one / "adapter_model.safetensors", metadata={"format": "pt"})
        (one / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")


def _modules(size: SeeingSize) -> Iterator[tuple[str, int, int]]:
    """Linear layers of the tower and the connector: names, inputs and outputs."""
    inner: dict[str, Any] = {"fc1": (size.hidden, size.ffn), "fc2": (size.ffn, size.hidden)}
    for layer in range(size.layers):
        for name in _TARGETS:
            part = "mlp" if name in inner else "self_attn"
            yield f"vision_model.encoder.layers.{layer}.{part}.{name}", *inner.get(name, (size.hidden, size.hidden))
    yield "connector.modality_projection.proj", size.hidden * size.merged**2, size.text.hidden
