"""What a family's vision part is called in transformers; it needs neither torch nor Pillow.

Families whose image positions are ordinary causal tokens need nothing else. What others need beside is a further field
here and in a step: positions on three axes (`grid`, and `StepBatch.axes`), additions behind layers (`additions`,
further parts of `MediaRows`, and the op `AddMedia`), and blocks of positions that see each other (in the page groups'
masks, with chunks that end before or behind a block).

Tests: tests/core/media/test_served_images.py
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """The vision part of a family."""

    modules: tuple[str, ...]
    """Names, within the model's `model`, of what makes rows of an image: the tower and its projector."""

    arguments: tuple[str, ...]
    """Those of the image processor's tensors that `get_image_features` takes."""

    copied: tuple[str, ...] = ()
    """Names of modules inside those that adapters may have whole (`modules_to_save`), besides them."""

    token_field: str = "image_token_id"
    """The field of `config.json` with the placeholder's token."""

    additions: tuple[int, ...] = ()
    """Layers of the tower whose rows are added behind the text part's first layers, one behind each, where
    `vision_config` names no others in `deepstack_visual_indexes`. Empty: nothing is added."""

    grid: str = ""
    """The image processor's tensor of patches by time, height and width, of a family whose positions have these axes
    (`RopeConfig.axes`). Empty: they have one, on which each row has the next position."""

    renamed: tuple[tuple[str, str], ...] = ()
    """Beginnings of modules' names in adapters that earlier versions of transformers trained, and their names now."""
