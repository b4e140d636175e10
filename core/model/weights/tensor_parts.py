"""The parts of a model by name: their shapes, and where a checkpoint has each of them.

Tests: tests/core/model/weights/test_weight_loader.py, tests/core/model/weights/test_shares.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterator, Mapping
from typing import NamedTuple

from ....memory.pages.projections import UnitRows
from ..specs.config import ModelConfig, UnsupportedModel
from ..specs.layers import LayerSpec
from ..specs.tensor_names import BIASES, PACKED, STACKED_EXPERTS, TensorNames
from .slot import Keep, Slot, SlotTensor

EMBED, NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LM_HEAD_BIAS = "lm_head.bias"
MODEL, LAYER = "model.", "model.layers.{}."
_TEXT_PART = "language_model."
_EXPERT = re.compile(r"^(.+[._]experts\.)(\d+)\.(.+)$")
_OUTPUTS = "down_proj"

#: Learned factor and summand of embeddings' elements: see `ModelConfig.scales_embeddings`.
EMBED_SCALES = ("model.input_hidden_states_scale", "model.input_hidden_states_bias")

POSITIONS, EMBED_NORM = "model.position_table.weight", "model.embed_norm.weight"

#: Logarithms of factors of the rope's frequencies.
ROPE_FACTORS = "model.rotary_emb.alpha"

#: Of per-layer embeddings.
PER_LAYER_TABLE, PER_LAYER_PROJECTION = "model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight"
PER_LAYER_NORM = "model.per_layer_projection_norm.weight"

#: Of `MediaTokens`, by the module, which is beside the text part.
MEDIA_ROWS, MEDIA_NORM = "{}.embedding.weight", "{}.hard_embedding_norm.weight"
MEDIA_PROJECTION = "{}.embedding_projection.weight"

#: Slots of matrices that checkpoints store quantised. Others are so only where they are stored so: many tools leave out
#: routers, and small matrices of streams, without a word.
_QUANTISED = (Keep.MATRIX, Keep.EXPERT, Keep.DENSE)


def slots_of(config: ModelConfig) -> Iterator[tuple[str, Slot]]:
    """The slots of all layers, each with the beginning of its parts' names; what layers share once, in the first."""
    every = ((index, slot) for index, layer in enumerate(config.layers) for slot in config.composed(layer).slots)
    return ((LAYER.format(index), slot) for index, slot in every if slot.shared in (None, index))


def end_slots(config: ModelConfig) -> tuple[Slot, ...]:
    """The slots of what layers have before all of them, and behind."""
    return config.split.slots + config.join.slots


def model_parts(config: ModelConfig) -> dict[str, SlotTensor]:
    """The parts of a model that are of no layer, by name; a tied `lm_head.weight` is not among them."""
    vocab, hidden = config.vocab_size, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBED: (vocab, hidden)}
    if config.embedding_rows_scaled:
        shapes[EMBED_NORM] = (hidden,)
    for norm in (NORM,) * config.has_last_norm + (EMBED_NORM,) * config.embedding_norm:
        if not config.norm.weightless:
            shapes |= dict.fromkeys((norm, bias_of(norm)) if config.norm.biased else (norm,), (hidden,))
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (vocab, hidden)
    if config.head_bias and config.has_lm_head:
        shapes[LM_HEAD_BIAS] = (vocab,)
    shapes |= _of_positions(config)
    if config.scales_embeddings:
        shapes |= dict.fromkeys(EMBED_SCALES, (hidden,))
    if (spec := config.per_layer_embeddings) is not None:
        width = config.num_layers * spec.size
        shapes |= {PER_LAYER_TABLE: (spec.vocab, width), PER_LAYER_PROJECTION: (width, hidden)}
        shapes[PER_LAYER_NORM] = (spec.size,)
    shapes |= _around_layers(config)
    for media in config.media:
        shapes[MEDIA_ROWS.format(media.module)] = (media.rows, media.width)
        shapes[MEDIA_NORM.format(media.module)] = (media.width,)
        shapes[MEDIA_PROJECTION.format(media.module)] = (hidden, media.width)
    return {name: model_part(name, shape) for name, shape in shapes.items()}


def _around_layers(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of what layers have before all of them, and behind."""
    return {MODEL + part.path: part.shape for slot in end_slots(config) for part in slot.tensors}


def _of_positions(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a table of position embeddings, and of what is learned of the rope."""
    found: dict[str, tuple[int, ...]] = {}
    if (table := config.position_table) is not None and not table.is_made:
        found[POSITIONS] = (table.first + table.rows, config.hidden_size)
    if (rope := config.learned_rope) is not None:
        found[ROPE_FACTORS] = (rope.dim // 2,)
    return found


def model_part(name: str, shape: tuple[int, ...]) -> SlotTensor:
    """A part of no layer: ranks share the rows of the output projection alone."""
    return SlotTensor(name, shape, ((shape[0], shape[0]),) if name in (LM_HEAD, LM_HEAD_BIAS) else ())


def parts_of(config: ModelConfig) -> dict[str, SlotTensor]:
    """Every part of a model of `config` that a checkpoint has, under the names that Llama's checkpoints have for it but
    for the norms of layers, which are named as their slots.
    """
    stored = ((at + part.path, part) for at, slot in slots_of(config) for part in slot.tensors if not part.made)
    return model_parts(config) | dict(stored)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of `parts_of`."""
    return {name: part.shape for name, part in parts_of(config).items()}


def quantised_parts(config: ModelConfig) -> set[str]:
    """The parts of layers that are quantised in a quantised checkpoint, unless it lists them."""
    return {at + part.path for at, slot in slots_of(config) if slot.keep in _QUANTISED for part in slot.tensors}


def whole_matrices(config: ModelConfig) -> list[str]:
    """Matrices of no layer that are quantised where a checkpoint stores them so."""
    own = (slot for slot in end_slots(config) if slot.keep is Keep.WHOLE)
    return [PER_LAYER_PROJECTION, *(MODEL + part.path for slot in own for part in slot.tensors)]


def bias_of(weight: str) -> str:
    """The name of the bias of a norm, or of the output projection, by that of its weight."""
    return f"{weight.removesuffix('weight')}bias"


class Source(NamedTuple):
    """Where a checkpoint has a part: rows of a tensor from `first` on."""

    name: str
    first: int = 0

    expert: int | None = None
    """Of a tensor of all experts' matrices: whose rows they are."""

    step: int = 1
    """Every how many-th row of the tensor is of the part."""

    transposed: bool = False
    """The tensor has rows last."""

    units: UnitRows | None = None
    """Which rows of the tensor the part has, where they are by unit; `first` and `step` say nothing then."""


def sources(config: ModelConfig, names: Container[str]) -> dict[str, Source]:
    """Where a checkpoint with tensors of these names has each part of `parts_of`."""
    tensors = config.tensors.of(names)
    first = tensors.norm if config.has_last_norm and not config.norm.weightless else tensors.embeddings
    prefix = next((each for each in tensors.prefixes if f"{each}{first}.weight" in names), tensors.prefixes[0])
    head = next((each for each in tensors.heads if each in names), tensors.heads[0])
    found = {LM_HEAD: Source(head), NORM: Source(f"{prefix}{tensors.norm}.weight")}
    found[EMBED] = Source(f"{prefix}{tensors.embeddings}.weight")
    found[POSITIONS] = Source(f"{prefix}{tensors.positions}.weight")
    found[EMBED_NORM] = Source(f"{prefix}{tensors.embedding_norm}.weight")
    found[ROPE_FACTORS] = Source(f"{prefix}{tensors.rope_factors}")
    biases = {bias_of(each): Source(bias_of(found[each].name)) for each in (NORM, EMBED_NORM, LM_HEAD)}
    for part in model_parts(config):
        around = prefix if part.startswith(MODEL) else prefix.removesuffix(_TEXT_PART)
        own = biases.get(part) or Source(_plain_source(tensors, around, part.removeprefix(MODEL), names))
        found.setdefault(part, own)
    return found | _of_layers(config, tensors, prefix, names)


def _of_layers(config: ModelConfig, tensors: TensorNames, prefix: str, names: Container[str]) -> dict[str, Source]:
    """As `sources`, of parts of layers."""
    found, numbers = dict[str, Source](), tensors.numbers
    names = names if numbers is None else numbers.named(names)
    for index in range(config.num_layers):
        own = _layer_sources(index, config, tensors, f"{prefix}{tensors.layers}.", names)
        if numbers is not None:
            own = {path: source._replace(name=numbers.given(source.name)) for path, source in own.items()}
        found |= own
    return found


def _layer_sources(
    index: int, config: ModelConfig, tensors: TensorNames, begin: str, names: Container[str]
) -> dict[str, Source]:
    """Where a checkpoint has each part of a layer. begin: of all layers' names."""
    layer, units = config.layers[index], config.unit_rows_of(tensors)
    shapes = {part.path: part.shape for _, part in _stored_parts(layer, config)}
    tensors = tensors if layer.invocation is None else tensors.at_invocation(layer.invocation)
    return {
        LAYER.format(index) + part.path: _layer_source(
            tensors, f"{begin}{_stored_at(index, slot)}.", part.path, shapes, units, names
        )
        for slot, part in _stored_parts(layer, config)
    }


def _stored_at(index: int, slot: Slot) -> int:
    """The layer in which a checkpoint has a slot's tensors."""
    own = index if slot.shared is None else slot.shared
    return own if slot.stored_in is None else slot.stored_in


def _stored_parts(layer: LayerSpec, config: ModelConfig) -> Iterator[tuple[Slot, SlotTensor]]:
    """The parts of a layer that a checkpoint has, each with its slot."""
    return ((slot, part) for slot in config.composed(layer).slots for part in slot.tensors if not part.made)


def _layer_source(
    tensors: TensorNames,
    at: str,
    part: str,
    shapes: Mapping[str, tuple[int, ...]],
    units: Mapping[str, UnitRows],
    names: Container[str],
) -> Source:
    """Where a checkpoint has a part of a layer. at: the beginning of names in it. shapes: of its parts. units: see
    `ModelConfig.unit_rows`.
    """
    path, _, kind = part.rpartition(".")
    if (expert := _EXPERT.match(path)) is not None:
        begin, number, matrix = expert.groups()
        return _expert_source(tensors, at, int(number), f"{begin}{{}}.{matrix}", kind, shapes, names)
    own = _plain_source(tensors, at, part, names)
    fused = next((name for name, stack in tensors.fused.items() if path in stack), None)
    transposed = part in tensors.transposed_parts or (tensors.inputs_first and len(shapes[part]) == 2)
    if fused is None or (own in names and f"{at}{fused}.{kind}" not in names):
        return Source(own, transposed=transposed)
    if path in units:
        return Source(f"{at}{fused}.{kind}", transposed=transposed, units=units[path])
    stack = tensors.fused[fused]
    first = sum(shapes[f"{each}.{kind}"][0] for each in stack[: stack.index(path)])
    return Source(f"{at}{fused}.{kind}", first, transposed=transposed)


def _plain_source(tensors: TensorNames, at: str, part: str, names: Container[str]) -> str:
    """The tensor that has a part of a layer, or of the model, and no other part."""
    path, dot, kind = part.rpartition(".")
    given = tensors.names.get(part) or f"{tensors.names.get(path, path)}{dot}{kind}"
    older = tensors.older.get(part) or tensors.older.get(path, path)
    end = "" if part in tensors.older else dot + kind
    others = (f"{at}{each}{end}" for each in ((older,) if isinstance(older, str) else older))
    return next((each for each in (at + given, *others, at + part) if each in names), at + given)


def _either(given: str, own: str, names: Container[str]) -> str:
    """The name that a family gives to a part, unless the checkpoint has it under another name instead."""
    return own if given not in names and own in names else given


def _expert_source(
    tensors: TensorNames,
    at: str,
    number: int,
    path: str,
    kind: str,
    shapes: Mapping[str, tuple[int, ...]],
    names: Container[str],
) -> Source:
    """Where a checkpoint has a matrix of an expert, or its bias. at: the beginning of names in the layer. path: of each
    expert's, by number. shapes: of the layer's parts.
    """
    stacks = {name: tuple(f"mlp.experts.{{}}.{each}" for each in own) for name, own in tensors.stacked_experts.items()}
    for name, order in (stacks | dict(tensors.stacked)).items():
        stored = at + name + (BIASES if kind == "bias" else "")
        if path not in order or not any(stored + end in names for end in ("", *PACKED)):
            continue
        place, is_turned = order.index(path), tensors.transposed or (tensors.flat and path.endswith(_OUTPUTS))
        transposed = is_turned and kind == "weight" and stored in names
        if tensors.alternates:
            return Source(stored, place, number, len(order), transposed)
        first = sum(shapes[f"{each.format(number)}.weight"][0] for each in order[:place])
        return Source(stored, first, number, transposed=transposed)
    own, given = (f"{at}{each.format(number)}.{kind}" for each in (path, tensors.names.get(path, path)))
    return Source(_either(given, own, names))


class ExpertRows(NamedTuple):
    """Rows of one expert in a tensor of all experts' matrices, which may be a tensor of their own."""

    name: str
    """Of that tensor."""
    expert: int
    rows: slice


class StoredProjections(NamedTuple):
    """Where a checkpoint has the projections of layers, without routers."""

    matrices: set[str]
    """Names of tensors `[out, in]`."""

    stacks: dict[str, list[ExpertRows]]
    """Tensors `[experts, out, in]` → the matrices in each."""


def stored_projections(config: ModelConfig, names: Collection[str]) -> StoredProjections:
    """names: of a checkpoint's tensors.

    Raises UnsupportedModel for experts in stacks that other programs read in no other form.
    """
    found, shapes = sources(config, names), tensor_shapes(config)
    quantised = quantised_parts(config)
    alone = sources(config, {name for name in names if not name.endswith(tuple(config.tensors.stacked_experts))})
    stored = StoredProjections(set(), {})
    for part, shape in shapes.items():
        if part not in quantised:
            continue
        name, first, expert, *_ = source = found[part]
        if expert is None and source.transposed:
            raise UnsupportedModel(
                f"tensor {name} is [in, out], and programs that read compressed-tensors take [out, in] alone; serve "
                "the original checkpoint with --quantization"
            )
        if expert is None:
            stored.matrices.add(name)
        elif name.endswith(tuple(STACKED_EXPERTS)) and source == Source(name, first, expert):
            piece = ExpertRows(alone[part].name, expert, slice(first, first + shape[0]))
            stored.stacks.setdefault(name, []).append(piece)
        else:
            raise UnsupportedModel(
                f"tensor {name} has the weights of all experts, and programs that read compressed-tensors take them in "
                "no other form; serve the original checkpoint with --quantization"
            )
    return stored
