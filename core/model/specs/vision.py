"""What a family's vision part is called in transformers; it needs neither torch nor Pillow.

Families whose image positions are ordinary causal tokens need nothing else. What others need beside is a further field
here and in a step: positions on three axes (`grid`, and `StepBatch.axes`), additions behind layers (`additions`,
further parts of `MediaRows`, and the op `AddMedia`), blocks of positions that see each other (`blocks`,
`AttentionSpec.blocks`, `Request.blocks`, and `BlockSpans` of a step), and experts of images' positions
(`LayerSpec.seeing`, and `StepBatch.image_tokens`).

Tests: tests/core/media/test_served_images.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ...requests.blocks import Blocks

TOKEN_FIELDS = ("image_token_id", "image_token_index")
"""Fields of `config.json` with the placeholder's token; a checkpoint has at most one of them."""


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """The vision part of a family."""

    modules: tuple[str, ...]
    """Names, within the model's `model`, of what makes rows of an image: the tower and its projector."""

    arguments: tuple[str, ...]
    """Those of the image processor's tensors that `get_image_features` takes."""

    copied: tuple[str, ...] = ()
    """Names of modules inside those that adapters may have whole (`modules_to_save`), besides them."""

    token: int | None = None
    """The placeholder's token where `config.json` names none: transformers leaves out what equals its default."""

    parameters: tuple[str, ...] = ()
    """Names, within the model's `model`, of parameters of its own that rows are made with."""

    matrices: tuple[str, ...] = ()
    """Names of parameters, within the model's `model`, by which rows are multiplied without a module around them;
    adapters may change them (`target_parameters`). No other parameter of their modules may be."""

    unused: tuple[str, ...] = ()
    """Names of modules inside those that no row depends on; adapters' tensors there have no effect."""

    marks: tuple[int, ...] = ()
    """Tokens around an image's rows whose embeddings the tower makes, too, where `config.json` names no others in
    `visual_indicator_token_ids`. At their places in an image's text they are rows of it."""

    least_rows: int = 1
    """Rows that an image must have: transformers' module fails for fewer."""

    ends: tuple[int, int] | None = None
    """Tokens before an image's rows and behind them that experts of images take as they take rows, where `config.json`
    names no others (`image_start_token_id`, `image_end_token_id`). None: there are none."""

    most_images: int | None = None
    """Of a prompt; None: any number. One where transformers makes other rows of an image that is not alone."""

    additions: tuple[int, ...] = ()
    """Layers of the tower whose rows are added behind the text part's first layers, one behind each, where
    `vision_config` names no others in `deepstack_visual_indexes`. Empty: nothing is added."""

    has_layers: bool = False
    """Rows come with the layers of the text part before which they are added, which `config.json` names; where an
    embedding is there are those before the first layer, or zeros."""

    grid: str = ""
    """The image processor's tensor of patches by time, height and width, of a family whose positions have these axes
    (`RopeConfig.axes`). Empty: they have one, on which each row has the next position."""

    blocks: Blocks | None = None
    """None: image positions are causal, as text is."""

    blocks_are_optional: bool = False
    """There are blocks only in layers with windows, and only where the text part's `use_bidirectional_attention` is
    `vision`."""

    pads_lookups: bool = False
    """Where rows of images are, per-layer embeddings are those of the padding token."""

    renamed: tuple[tuple[str, str], ...] = ()
    """Beginnings of modules' names in adapters that earlier versions of transformers trained, and their names now."""


SEES = "text and images; no video"
"""The notes of a family whose images are served."""

PROJECTED = VisionSpec(
    ("vision_tower", "multi_modal_projector"),
    ("pixel_values", "image_sizes"),
    copied=("linear_1", "linear_2"),
    unused=("vision_tower.head",),  # SigLIP's, which pools
    renamed=(("vision_tower.vision_model", "vision_tower"),),
)
"""A tower and a projector under the names that most families give them."""
