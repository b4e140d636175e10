"""The parts of a tiny model that sees: text, tower, image processor, and the text's marks around images."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.4,
}
CLIP = {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8, **TOWER}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8, **TOWER}
PIXTRAL = {"model_type": "pixtral", "image_size": 64, "patch_size": 8, "head_dim": 16, **TOWER}


@dataclass(frozen=True)
class Seeing:
    """A tiny model that sees; names are those of transformers' classes."""

    name: str
    """Of its classes of configuration and model, without their ends."""
    text: dict[str, Any]
    tower: dict[str, Any]
    images: tuple[str, dict[str, Any]]
    """The image processor's class, and its settings."""
    processor: tuple[str, dict[str, Any]]
    """The class of the processor of text and images, and its arguments."""
    mark: str = "<image>"
    """The token at rows' places."""
    place: str = ""
    """What a chat template writes for an image, where it is something else."""
    around: tuple[str, ...] = ()
    """Other tokens of images."""
    named: dict[str, str] = field(default_factory=dict)
    """Those that the tokenizer has attributes for."""
    config: dict[str, Any] = field(default_factory=dict)
    sized: bool = False
    """The configuration of the whole has the vocabulary's size, too."""
    marks: tuple[str, tuple[str, ...]] | None = None
    """A field of the configuration with tokens, and these tokens."""
    original: bool = True
    """transformers saves its tensors under the names that published checkpoints have."""
    nested: bool = True
    """transformers' processor takes a list of each prompt's images."""
    videos: tuple[str, dict[str, Any]] | None = None
    """The processor of videos, where the whole processor needs one."""
    sound: str = ""
    """The class of the processor of sound, likewise."""
    projector: str = "multi_modal_projector"
    """The module that adapters may have whole."""
    tower_linear: str = r".*(vision_tower.*(q_proj|v_proj|fc1|out_proj|patch_embedding)|multi_modal_projector.*linear)"
    """A pattern of modules of the tower and the projector."""
    tower_dora: str = r".*vision_tower.*(q_proj|fc2)|.*language_model.*v_proj"
    text_linear: str = r".*language_model.*\.(q_proj|v_proj|down_proj)"
    seven: str | None = None
    """A pattern in place of the seven usual names, where peft refuses these."""
    excluded: str = ""
    """A pattern of modules that adapters may not change."""
    matrix: str = ""
    """A parameter of the projector that adapters may change."""
    adds: tuple[str, ...] = ()
    """Tokens that the whole processor adds to the tokenizer."""
    step: dict[str, int] = field(default_factory=lambda: {"max_num_batched_tokens": 37})
    """Settings with which chunks end inside images, or else before and behind them: in some models a step has all of an
    image, or of a prompt with images."""
    typed: bool = False
    """transformers is told of each token whether it is a prompt's."""
    most: int = 4
    """Images of a request."""
    refused: tuple[str, ...] = ()
    """Sizes of images that the processor or the tower does not take."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of modules' names, as they are now and as transformers 4 had them."""
