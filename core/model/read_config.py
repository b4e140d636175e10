"""Reads a checkpoint's `config.json` by its family.

Tests: tests/core/model/specs/test_model_config.py, tests/core/model/specs/test_published_configs.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...memory.files.tokens.base_tokens import BaseTokens
from ..requests.blocks import Blocks
from .checkpoints.quantization.registry import read_format
from .config_json import ConfigJson
from .families.defaults import of_text_alone
from .families.plugins import plugin
from .families.registry import FAMILIES, OF_TYPES
from .families.unserved import UNSERVED
from .specs.config import ModelConfig, UnsupportedModel
from .specs.family import NULLS, Family
from .specs.tensor_names import LLAMA_TENSORS
from .specs.vision import TOKEN_FIELDS, VisionSpec
from .weights.base_rows import CheckpointRows

#: Ends of transformers' names of architectures: with an output projection, with a score head, and without any head.
_GENERATOR, CLASSIFIER, BARE = "ForCausalLM", "ForSequenceClassification", "Model"

#: Ends of architectures, and the kind that each is of. `AutoModel` of a family with a vision tower is a `TextModel`.
_ENDS = {CLASSIFIER: CLASSIFIER, "TextModel": BARE, BARE: BARE}


def read_model_config(directory: Path, tokenizer: Path | None = None) -> ModelConfig:
    """Read `directory/config.json` (and `generation_config.json` for the end-of-sequence ids, where present).

    tokenizer: the directory of its tokenizer, if that is another. Raises UnsupportedModel for fields that are missing,
    of the wrong type, or would not be computed as transformers does.
    """
    raw = ConfigJson.read(directory / "config.json")
    architecture = (raw.texts("architectures") or ["none named"])[0]
    family, kind = family_of(architecture)
    family = family and OF_TYPES.get(raw.text("model_type", ""), family)
    if kind == CLASSIFIER and (raw.has("classifier_from_token") or raw.has("is_original_qwen3_reranker")):
        kind = ""  # a generator, whose output projection scores
    if family is None:
        why = UNSERVED.get(architecture)
        more = f"; supported: {', '.join(sorted(FAMILIES))}" if why is None else f": {why}"
        raise UnsupportedModel(f"{raw.path}: architecture {architecture} is not supported{more}")
    text = raw
    for name in family.text_part.split("."):
        text = text.text_part(name, has_head=name == family.head_part)
    text = text.with_defaults(of_text_alone(family.defaults) if text is raw else family.defaults)
    for part in (raw, text):
        if part.raw.get("is_causal", True) is not True:  # as of some embedding models
            raise part.refuse("is_causal", "only causal attention is supported")
    weight_format = read_format(raw) or read_format(text)
    model = _read(family, text.with_nulls(NULLS | {*family.nulls}))
    if kind:  # without an output projection, its place is taken by the embeddings, and no token is sampled
        is_classifier = kind == CLASSIFIER
        model = replace(model, tie_word_embeddings=True, has_lm_head=False, is_classifier=is_classifier)
    eos = _eos_token_ids(raw, directory) or model.eos_token_ids
    model = replace(
        model,
        architecture=architecture,
        model_type=raw.text("model_type", "") or None,
        eos_token_ids=eos,
        tensors=family.tensors if model.tensors is LLAMA_TENSORS else model.tensors,
        weight_format=weight_format,
        vision=family.vision,
        why_text_alone=family.why_text_alone,
        image_token=_image_token(raw, family.vision),
        image_marks=_image_marks(raw, family.vision),
        image_ends=_image_ends(raw, family.vision),
        media_layers=_media_layers(raw, family.vision),
        image_blocks=_blocks(text, family.vision),
        image_lookup=text.integer("pad_token_id", 0, least=0) if family.vision and family.vision.pads_lookups else None,
    )
    return replace(model, base_rows=CheckpointRows(directory, model), base_tokens=BaseTokens(tokenizer or directory))


def _image_token(raw: ConfigJson, vision: VisionSpec | None) -> int | None:
    """The token at images' positions, of a model that sees."""
    if vision is None:
        return None
    named = (raw.optional(name) for name in TOKEN_FIELDS)
    return next((token for token in named if token is not None), vision.token)


def _image_marks(raw: ConfigJson, vision: VisionSpec | None) -> tuple[int, ...]:
    """See `VisionSpec.marks`."""
    if vision is None or not vision.marks:
        return ()
    return raw.indices("visual_indicator_token_ids") or vision.marks


def _image_ends(raw: ConfigJson, vision: VisionSpec | None) -> tuple[int, int] | None:
    """See `VisionSpec.ends`."""
    if vision is None or vision.ends is None:
        return None
    first, last = vision.ends
    return raw.integer("image_start_token_id", first, least=0), raw.integer("image_end_token_id", last, least=0)


def _read(family: Family, fields: ConfigJson) -> ModelConfig:
    for name in ("layer_types", "mlp_layer_types"):
        if fields.raw.get(name) == []:
            raise fields.refuse(name, "a type for each layer is needed; leave the field out for the family's default")
    return family.read(fields)


def _media_layers(raw: ConfigJson, vision: VisionSpec | None) -> tuple[int, ...]:
    """See `VisionSpec.additions` and `VisionSpec.has_layers`."""
    if vision is None:
        return ()
    if vision.has_layers:
        pairs = raw.raw.get("deepstack_layer_map") or ()
        before = [*(each[-1] for each in pairs), *(raw.raw.get("spatial_target_layers") or (12, 15, 18, 21))]
        if not all(isinstance(layer, int) and layer >= 0 for layer in before):
            raise raw.refuse("deepstack_layer_map", "pairs of layers are needed, and layers in spatial_target_layers")
        return tuple(layer - 1 for layer in sorted({*before}) if layer)
    if not vision.additions:
        return ()
    own = raw.object("vision_config")
    named = own is not None and own.has("deepstack_visual_indexes")
    return tuple(range(len(own.indices("deepstack_visual_indexes") if own is not None and named else vision.additions)))


def _blocks(text: ConfigJson, vision: VisionSpec | None) -> Blocks | None:
    """See `VisionSpec.blocks`. text: the text part."""
    if vision is None or (vision.blocks_are_optional and text.raw.get("use_bidirectional_attention") != "vision"):
        return None
    return vision.blocks


def family_of(architecture: str) -> tuple[Family | None, str]:
    """Return the family of an architecture, and what replaces its output projection: `CLASSIFIER`, `BARE` or "".

    Raises UnsupportedModel for one of another distribution that can't be used.
    """
    ends = ((end, kind) for end, kind in _ENDS.items() if architecture.endswith(end))
    names = {architecture: "", **{architecture.removesuffix(end) + _GENERATOR: kind for end, kind in ends}}
    for find in (FAMILIES.get, plugin):
        for name, kind in names.items():
            if (family := find(name)) is not None:
                return family, kind
    return None, ""


def _eos_token_ids(raw: ConfigJson, directory: Path) -> tuple[int, ...]:
    """Return the generation configuration's end-of-sequence ids, or else the model's own."""
    path = directory / "generation_config.json"
    if path.is_file() and (ids := ConfigJson.read(path).token_ids("eos_token_id")):
        return ids
    return raw.token_ids("eos_token_id")
