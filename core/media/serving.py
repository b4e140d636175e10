"""Whether a model's images are served, and what encodes them.

Tests: tests/core/media/test_lacking.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...ops.attention.blocks import BlockMask
from ..requests.blocks import Blocks
from .lacking import why_lacking

if TYPE_CHECKING:
    import torch

    from ..config import EngineConfig
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
        return f"{model.architecture} is served for text alone"
    if not config.limit_mm_per_prompt.get("image", 0):
        return "limit_mm_per_prompt allows no image"
    if on_gpu:
        return "images are served on CPUs so far, and this server computes on a GPU"
    if config.tensor_parallel_size > 1:
        return "images are served by one rank so far; set tensor_parallel_size to 1"
    if config.load_format != "auto":
        return f"load_format is {config.load_format!r}, which has no weights of a vision tower"
    if model.weight_format is not None:
        return "the checkpoint's weights are quantised, and its vision tower is read only as transformers saves it"
    if not any((config.model / name).is_file() for name in _PROCESSORS):
        return f"the model has no {_PROCESSORS[0]}, which says how images are prepared"
    return why_lacking()


def with_tower(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """The model with the modules of its tower, for adapters, and with what images need of its layers: additions of
    their rows, and masks of their blocks.
    """
    from .tower_adapter import CheckpointTower

    assert model.vision is not None, "the model sees"
    added = range(model.num_media_additions)
    layers = tuple(replace(each, media_part=at + 1) if at in added else each for at, each in enumerate(model.layers))
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

    def __init__(self, directory: Path, model: ModelConfig, dtype: torch.dtype) -> None:
        from .processor import ImageProcessor
        from .tower import Tower

        assert model.vision is not None, "the model sees"
        self._processor = ImageProcessor(directory)
        self._tower = Tower(directory, model.architecture, model.vision, dtype)
        self._factor = model.embedding_factor(dtype) if model.scales_image_rows else 1.0

    def prepare(self, item: MediaItem) -> Prepared:
        return self._processor.of_file(item.data, item.settings)

    def changes(self, bound: BoundVersion) -> TowerChanges | None:
        from .tower_adapter import read_changes

        return read_changes(bound.manifest)

    def encode(self, prepared: Prepared, changes: TowerChanges | None) -> torch.Tensor:
        rows = self._tower.encode(prepared.tensors, changes)
        return rows if self._factor == 1.0 else rows * self._factor


def open_encoder(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, wake: Callable[[], None]
) -> ImageEncoder:
    """The encoder of a model whose images are served; it reads the tower with the first image."""
    from .encoder import ImageEncoder

    return ImageEncoder(
        lambda: CheckpointRows(config.model, model, dtype),
        config.encoder_cache_bytes,
        config.encoder_threads,
        wake,
        share=config.share_prefix_cache,
    )
