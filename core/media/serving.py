"""Whether a model's images are served, and what encodes them.

Tests: tests/core/media/test_lacking.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...memory.host.daemon_pool import wait_wanted
from ...ops.attention.blocks import BlockMask
from ..requests.blocks import Blocks
from .decoder import image_threads
from .lacking import why_lacking

if TYPE_CHECKING:
    import torch

    from ...memory.host.budget import HostBudget
    from ..config import EngineConfig
    from ..model.checkpoints.checkpoint import TensorEntry
    from ..model.specs.config import ModelConfig
    from ..model.specs.layers import LayerSpec
    from ..model.specs.vision import VisionSpec
    from ..requests.media import MediaItem
    from ..requests.request import BoundVersion
    from .encoder import ImageEncoder
    from .linear import TowerChanges
    from .processor import Prepared

_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def why_blind(config: EngineConfig, model: ModelConfig, *, on_gpu: bool) -> str | None:
    """Why images are refused; None if they are served."""
    if model.vision is None or model.image_token is None:
        why = model.why_text_alone and f": {model.why_text_alone}"
        return f"{model.architecture} is served for text alone{why}"
    if not config.limit_mm_per_prompt.get("image", 0):
        return "limit_mm_per_prompt allows no image"
    if on_gpu and model.image_blocks is not None and config.attention != "torch":
        return (
            "tokens of this model's images see each other, which the attention kernels of GPUs don't compute; set "
            "attention to 'torch', or device to 'cpu'"
        )
    if on_gpu and (lack := next(filter(None, (layer.LACKS_ON_GPU for layer in model.layers)), "")):
        return f"images of this model {lack}, which steps on GPUs don't compute; set device to 'cpu'"
    if config.load_format != "auto":
        return f"load_format is {config.load_format!r}, which has no weights of a vision tower"
    if model.weight_format is not None and (narrow := _quantised_tensor(config.model, model)) is not None:
        name, dtype = narrow
        return (
            f"the vision tower is quantised, too: its tensor {name} is stored as {dtype}; use a checkpoint whose tower "
            "is left as it was"
        )
    if not any((config.model / name).is_file() for name in _PROCESSORS):
        return f"the model has no {_PROCESSORS[0]}, which says how images are prepared"
    return why_lacking()


def _tensors(directory: Path, model: ModelConfig) -> Iterator[tuple[str, TensorEntry]]:
    """The tensors of a checkpoint's tower."""
    from ..model.checkpoints.checkpoint import Checkpoint
    from .tower_adapter import CheckpointTower

    assert model.vision is not None, "the model sees"
    tower, checkpoint = CheckpointTower(directory, model.architecture, model.vision), Checkpoint(directory)
    return ((name, checkpoint[name]) for name in checkpoint.names() if tower.has(name))


def _quantised_tensor(directory: Path, model: ModelConfig) -> tuple[str, str] | None:
    """A tensor of the tower that a checkpoint stores in fewer bits, and its dtype; None if it has none."""
    for name, entry in _tensors(directory, model):
        if not entry.is_plain and entry.dtype != "I64":  # which is of indices
            return name, entry.dtype
    return None


def tower_bytes(directory: Path, model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a tower's weights."""
    return sum(math.prod(entry.shape) for _, entry in _tensors(directory, model)) * dtype.itemsize


def with_tower(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """The model with the modules of its tower, for adapters, and with what images need of its layers: additions of
    their rows, experts of their positions, and masks of their blocks.
    """
    from .tower_adapter import CheckpointTower

    assert model.vision is not None, "the model sees"
    parts = {layer: part for part, layer in enumerate(model.media_layers, 1)}
    layers = tuple(replace(each.seeing(), media_part=parts.get(at, 0)) for at, each in enumerate(model.layers))
    if model.image_blocks is not None:
        layers = tuple(_with_blocks(each, model.image_blocks, model.vision) for each in layers)
    return replace(model, layers=layers, tower=CheckpointTower(config.model, model.architecture, model.vision))


def _with_blocks(layer: LayerSpec, blocks: Blocks, vision: VisionSpec) -> LayerSpec:
    """The layer with the mask of images' blocks, if it has one."""
    mixer = layer.attention
    if mixer is None or (vision.blocks_are_optional and mixer.window is None):
        return layer
    mask = BlockMask.WHOLE if blocks is Blocks.PROMPT else BlockMask.IN_WINDOW
    return replace(layer, mixer=replace(mixer, blocks=mask))


class CheckpointRows:
    """A checkpoint's image processor and tower; see `RowMaker`."""

    def __init__(self, directory: Path, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        from .processor import ImageProcessor
        from .tower import Tower

        assert model.vision is not None, "the model sees"
        self._processor = ImageProcessor(directory)
        self._tower = Tower(directory, model.architecture, model.vision, dtype, device)
        self._factor = model.embedding_factor(dtype) if model.scales_image_rows else 1.0

    def prepare(self, item: MediaItem) -> Prepared:
        if item.ready is not None and (ready := item.ready.take()) is not None:
            return ready
        return wait_wanted(image_threads().submit(self._processor.of_file, item.data, item.settings))

    def changes(self, bound: BoundVersion) -> TowerChanges | None:
        from .tower_adapter import read_changes

        return read_changes(bound.manifest)

    def encode(self, prepared: Prepared, changes: TowerChanges | None) -> torch.Tensor:
        rows = self._tower.encode(prepared.tensors, changes, prepared.marks)
        return rows if self._factor == 1.0 else rows * self._factor


def open_encoder(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    wake: Callable[[], None],
    budget: HostBudget,
    device: torch.device,
) -> ImageEncoder:
    """The encoder of a model whose images are served; it reads the tower with the first image. device: the tower's."""
    from .encoder import ImageEncoder

    return ImageEncoder(
        lambda: CheckpointRows(config.model, model, dtype, device),
        config.encoder_cache_bytes,
        config.encoder_threads,
        wake,
        budget,
        share=config.share_prefix_cache,
    )
