"""Angles of tokens whose positions differ between axes, against those of transformers' own rotary embeddings."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from chorus.core.model.config_json import UnsupportedModel
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.rope_config import RopeConfig
from chorus.memory.files.tokens.torchvision import mend_torchvision
from chorus.ops.elementwise.elementwise import RotaryEmbedding, rotary_table, rows_of_axes

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}
FAMILIES = {
    "qwen2_vl": ("Qwen2VL", 128),
    "qwen2_5_vl": ("Qwen2_5_VL", 128),
    "qwen3_vl": ("Qwen3VL", 128),
    "qwen3_vl_moe": ("Qwen3VLMoe", 128),
    "qwen3_5": ("Qwen3_5", 256),
    "qwen3_5_moe": ("Qwen3_5Moe", 256),
    "glm4v": ("Glm4v", 64),
    "glm_ocr": ("GlmOcr", 64),
    "glm4v_moe": ("Glm4vMoe", 128),
    "paddleocr_vl": ("PaddleOCRVL", 128),
    "ernie4_5_vl_moe": ("Ernie4_5_VLMoe", 128),
}
SHARES = {"qwen3_5": 0.25, "qwen3_5_moe": 0.25, "glm4v_moe": 0.5}
"""The parts of heads that rotate, where not all does."""


def saved(name: str, path: Path, rope: dict[str, Any], head_dim: int) -> Any:
    """A configuration, written to a directory."""
    mend_torchvision()
    import transformers

    text = {**SIZES, "head_dim": head_dim, "hidden_size": 2 * head_dim, "rope_parameters": rope}
    config = getattr(transformers, f"{name}Config")(text_config=text)
    config.architectures = [f"{name}ForConditionalGeneration"]
    config.save_pretrained(path)
    return config


def rope_of(path: Path) -> RopeConfig:
    (rope,) = {layer.rope for layer in read_model_config(path).layers if layer.rope is not None}
    return rope


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sections", [None, [4, 3, 9], [8, 5, 3]], ids=str)
def test_angles_are_those_of_transformers(family: str, sections: list[int] | None, tmp_path: Path) -> None:
    name, head_dim = FAMILIES[family]
    shared: dict[str, Any] = {"rope_type": "default", "rope_theta": 5000.0}
    if sections is not None and family == "ernie4_5_vl_moe":  # as many of height as of width
        least = min(sections)
        sections = [least, least, sum(sections) - 2 * least]
    if sections is not None:
        head_dim, shared["mrope_section"] = 32, sections
    if (share := SHARES.get(family)) is not None:
        shared["partial_rotary_factor"] = share if sections is None else 1.0
    config = saved(name, tmp_path, shared, head_dim)
    rope = rope_of(tmp_path)
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kind = next(
        value for title, value in vars(module).items() if title.endswith("RotaryEmbedding") and "Vision" not in title
    )
    positions = torch.randint(0, 200, (3, 1, 9), generator=torch.Generator().manual_seed(1))
    wanted = kind(config.text_config)(torch.zeros(1), positions)
    places = torch.arange(9)
    tables = RotaryEmbedding(rope.angles(200), 200, torch.float32, interleaved=rope.interleaved, axes=rope.element_axes)
    found = tables.at(places, (places, positions[:, 0]))
    for own, want in zip((found.cos, found.sin), wanted, strict=True):
        torch.testing.assert_close(own, want[0])
    plain = tables.at(places)
    assert not torch.equal(plain.cos, found.cos)


def test_sections_that_are_missing_are_refused(tmp_path: Path) -> None:
    saved("Qwen3VL", tmp_path, {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [4, 3]}, 32)
    with pytest.raises(UnsupportedModel, match="three sections are needed"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("interleaved", [False, True])
def test_elements_have_the_axes_of_their_frequencies(interleaved: bool) -> None:
    rope = RopeConfig(8, axes=(0, 1, 2, 1), interleaved=interleaved)
    frequencies = rope.inverse_frequencies()
    table, _ = rotary_table(frequencies, 20, interleaved=interleaved)
    positions = torch.tensor([[3, 4], [5, 9], [17, 0]])
    found = rows_of_axes(table, torch.tensor(rope.element_axes), positions)
    for element in range(8):
        frequency = element // 2 if interleaved else element % 4
        wanted = (positions[rope.axes[frequency]] * frequencies[frequency]).cos()
        assert torch.allclose(found[:, element], wanted)
