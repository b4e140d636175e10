"""An adapter's way from its directory into an image, or the reason why it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chorus.memory.adapters.image import ImageForm, read_image
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.host.buffers import HostBuffers
from chorus.memory.host.image import HostImage
from chorus.memory.pages.adapter_layout import AdapterLayout

from ...tables import TINY, TINY_PATHS

PAGE_ELEMS = 1024
LAYERS = 3
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Q0_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q0_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def load(path: Path, dtype: torch.dtype = torch.float32, page_elems: int = PAGE_ELEMS):
    """Register and read, as the store does."""
    manifest = inspect_adapter(path, TINY_PATHS)
    layout = AdapterLayout.build(manifest.parts, TINY, page_elems, dtype.itemsize, vectors=manifest.vectors)
    image = HostImage()
    read_image(manifest, ImageForm(layout, TINY, page_elems, dtype), image, HostBuffers())
    assert image.stream.num_ready == LAYERS
    return manifest, layout, image.data


def refusal(path: Path, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(AdapterFormatError) as caught:
        load(path, dtype)
    return str(caught.value)
