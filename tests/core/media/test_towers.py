"""What is read of a checkpoint for its tower: nothing of the text part."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from safetensors import safe_open

from chorus.core.media import tower as towers
from chorus.core.media.tower import Tower
from chorus.core.model.checkpoints.checkpoint import Checkpoint
from chorus.core.model.read_config import read_model_config
from chorus.core.model.weights.tensor_parts import sources

from . import tiny_mrope
from .seeing_families import SEEING
from .tiny_vision import needs_vision, tiny

pytestmark = [pytest.mark.vision, needs_vision]

FEW = ("smolvlm", "mistral3", "gemma4_inputs", "qwen3_vl_moe", tiny_mrope.ERNIE)
FAMILIES = [
    name if name in FEW else pytest.param(name, marks=pytest.mark.wide) for name in (*SEEING, *tiny_mrope.FAMILIES)
]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_of_the_text_part_is_read(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tiny(family), set[str]()
    model = read_model_config(path)
    assert model.vision is not None

    class Slice:
        def __init__(self, name: str, own: Any) -> None:
            self._name, self._own = name, own

        def __getattr__(self, name: str) -> Any:
            return getattr(self._own, name)

        def __getitem__(self, part: Any) -> torch.Tensor:
            read.add(self._name)
            return self._own[part]

    class File:
        def __init__(self, own: Any) -> None:
            self._own = own

        def get_slice(self, name: str) -> Slice:
            return Slice(name, self._own.get_slice(name))

    @contextmanager
    def opened(*args: Any) -> Any:
        with safe_open(*args) as file:
            yield File(file)

    monkeypatch.setattr(towers, "safe_open", opened)
    Tower(path, model.architecture, model.vision, torch.float32)
    text = {source.name for source in sources(model, Checkpoint(path)).values()}
    assert read and not read & text and read < set(Checkpoint(path).names())
