"""The parts of a model by name: their shapes, where a checkpoint has each of them, and the bytes that they take.

Tests: tests/core/model/test_weight_loader.py, tests/core/model/test_shares.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Container, Mapping, Sequence
from typing import NamedTuple

import torch

from ...memory.pages.projections import Group, UnitRows
from .config import ModelConfig, UnsupportedModel
from .layers import AttentionSpec, Experts, HeadNorm, LayerSpec, Norms, UngatedActivation
from .quantization.round_to_nearest import RoundToNearest
from .recurrent import RecurrentSpec
from .shard import WHOLE, Part, Shard
from .tensor_names import BIASES, CORRECTION, PACKED, STACKED_EXPERTS, TensorNames

EMBED, NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LM_HEAD_BIAS = "lm_head.bias"
_MODEL, LAYER = "model.", "model.layers.{}."
_TEXT_PART = "language_model."
IN_LAYER = re.compile(
    r"^model\.(layers\.\d+\.)(.+)\.(weight|bias|sinks|dt_bias|A_log|D|e_score_correction_bias|alpha_[pn]|beta|eps)$"
)
_EXPERT = re.compile(r"^(mlp\.experts\.)(\d+)\.(.+)$")

#: Parts of a layer with experts.
ROUTER = "mlp.gate"
SHARED, SHARED_GATE = "mlp.shared_expert", "mlp.shared_expert_gate"
_MATRICES = ("gate_proj", "up_proj", "down_proj")

_OF_EXPERTS = re.compile(rf"\.(mlp\.experts\.\d+|{re.escape(SHARED)})\.")

#: Of several streams: a layer's, and by number the model's.
STREAM_ROUTER, STREAM_ROUTER_NORM = "altup.modality_router.weight", "altup.router_norm.weight"
STREAM_PREDICTION, STREAM_CORRECTION = "altup.prediction_coefs.weight", "altup.correction_coefs.weight"
STREAM_SCALE = "altup.correct_output_scale"
LOW_RANK_NORM = "laurel.post_laurel_norm"
STREAM_IN, STREAM_OUT = "model.altup_projections.{}.weight", "model.altup_unembed_projections.{}.weight"

#: A router is quantised only where it is stored so: many tools leave it out without a word. So are small matrices of
#: streams.
ROUTERS = (
    f".{ROUTER}.weight",
    f".{SHARED_GATE}.weight",
    *(f".{name}" for name in (STREAM_ROUTER, STREAM_PREDICTION, STREAM_CORRECTION)),
)

SINKS, SCALAR = "self_attn.sinks", "layer_scalar"

#: Never multiplied as one matrix, so always dequantised: see `LayerWeights.kv_up`.
KV_UP = ".self_attn.kv_b_proj.weight"

#: Parameters of xIELU, each one number.
XIELU = tuple(f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps"))
#: Of further inputs of layers: the model's, and a layer's.
INPUT_TABLE, INPUT_PROJECTION = "model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight"
INPUT_NORM, OUTPUT_GATE = "model.per_layer_projection_norm.weight", "per_layer_input_gate"
OUTPUT_PROJECTION, OUTPUT_NORM = "per_layer_projection", "input_norm"

#: Of `MediaTokens`, by the module, which is beside the text part.
MEDIA_ROWS, MEDIA_NORM = "{}.embedding.weight", "{}.hard_embedding_norm.weight"
MEDIA_PROJECTION = "{}.embedding_projection.weight"

#: Of a router beside a gated part: weights of its input's norm, and factors of experts.
ROUTER_NORM, EXPERT_FACTORS = "router.scale", "router.per_expert_scale"

#: Norms of experts beside a gated part.
_BESIDE_NORMS = ("dense_out_norm", "experts_norm", "experts_out_norm")

#: Norms that a layer may have, by where they stand.
NORMS = {
    Norms.BEFORE: ("attention_norm", "mlp_norm"),
    Norms.AFTER: ("attention_out_norm", "mlp_out_norm"),
    Norms.AROUND: ("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm"),
    Norms.PARALLEL: ("attention_norm",),
    Norms.PARALLEL_APART: ("attention_norm", "mlp_norm"),
}


def norms_of(layer: LayerSpec) -> tuple[str, ...]:
    """The norms that a layer has of `NORMS`: those of its parts."""
    absent = ("attention_",) * (layer.mixer is None) + ("mlp_",) * (layer.feed_forward is None)
    return tuple(norm for norm in NORMS[layer.norms] if not norm.startswith(absent))


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every part of a model of `config`, under the names that Llama's checkpoints have for it but for the norms of
    layers, which are named as in `LayerWeights`; a tied `lm_head.weight` is not among them.
    """
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, hidden), **_norm_shapes([NORM], config)}
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    if config.head_bias and config.has_lm_head:
        shapes[LM_HEAD_BIAS] = (config.vocab_size,)
    if (inputs := config.layer_inputs) is not None:
        width = config.num_layers * inputs.size
        shapes |= {INPUT_TABLE: (inputs.vocab, width), INPUT_PROJECTION: (width, hidden), INPUT_NORM: (inputs.size,)}
    shapes |= dict.fromkeys(stream_parts(config), (hidden, hidden))
    for media in config.media:
        shapes[MEDIA_ROWS.format(media.module)] = (media.rows, media.width)
        shapes[MEDIA_NORM.format(media.module)] = (media.width,)
        shapes[MEDIA_PROJECTION.format(media.module)] = (hidden, media.width)
    for index, layer in enumerate(config.layers):
        at = LAYER.format(index)
        shapes |= {at + part: shape for part, shape in _layer_shapes(layer, hidden).items()}
        shapes |= _norm_shapes([f"{at}{norm}.weight" for norm in norms_of(layer)], config)
    return shapes


def stream_parts(config: ModelConfig) -> list[str]:
    """The model's own matrices of streams: those that make streams, and those that join them."""
    others = range(0 if config.streams is None else config.streams.count - 1)
    return [name.format(stream) for name in (STREAM_IN, STREAM_OUT) for stream in others]


def _norm_shapes(names: Sequence[str], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Weights of norms by these names, and biases, if the model's norms have them."""
    if config.norm.weightless:
        return {}
    biases = [bias_of(name) for name in names] if config.norm.biased else []
    return dict.fromkeys((*names, *biases), (config.hidden_size,))


def bias_of(weight: str) -> str:
    """The name of the bias of a norm, or of the output projection, by that of its weight."""
    return f"{weight.removesuffix('weight')}bias"


def _layer_shapes(layer: LayerSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """The parts of a layer."""
    shapes: dict[str, tuple[int, ...]] = {}
    if layer.input_size:
        shapes[f"{OUTPUT_NORM}.weight"] = (hidden,)
    if layer.beside is not None:
        shapes |= {**dict.fromkeys((f"{norm}.weight" for norm in _BESIDE_NORMS), (hidden,)), ROUTER_NORM: (hidden,)}
    biased = layer.biased
    for projection in layer.projections(hidden):
        if projection.is_of_mixture:
            continue  # see `_expert_shapes`
        shapes[f"{projection.path}.weight"] = (projection.outputs, projection.inputs)
        if projection.path in biased:
            shapes[f"{projection.path}.bias"] = (projection.outputs,)
    if layer.dense is not None and layer.dense.activation is UngatedActivation.XIELU:
        shapes |= dict.fromkeys(XIELU, (1,))
    if layer.experts is not None:
        shapes |= _expert_shapes(layer.experts, hidden)
    if layer.scaled:
        shapes[SCALAR] = (1,)
    if (streams := layer.streams) is not None:
        shapes |= dict.fromkeys((f"{LOW_RANK_NORM}.weight", STREAM_ROUTER_NORM, STREAM_SCALE), (hidden,))
        shapes |= {STREAM_ROUTER: (streams.count, hidden), STREAM_CORRECTION: (streams.count, streams.count)}
        shapes |= {STREAM_PREDICTION: (streams.count**2, streams.count)}
    second = None if layer.mixer_beside is None else layer.mixer_beside.mixer
    return shapes | _mixer_shapes(layer.mixer) | _mixer_shapes(second)


def _mixer_shapes(mixer: AttentionSpec | RecurrentSpec | None) -> dict[str, tuple[int, ...]]:
    """The parts of a mixer besides its projections."""
    if isinstance(mixer, AttentionSpec):
        sinks: dict[str, tuple[int, ...]] = {SINKS: (mixer.num_heads,)} if mixer.sinks else {}
        return _head_norm_shapes(mixer) | sinks
    return {} if mixer is None else {path: tensor.shape for path, tensor in mixer.tensors.items()}


def expert_inputs(experts: Experts) -> tuple[str, ...]:
    """Names of the matrices that an expert's rows are multiplied with first."""
    return _MATRICES[:2] if experts.is_gated else _MATRICES[1:2]


def _expert_shapes(experts: Experts, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{ROUTER}.weight": (experts.count, hidden)}
    if experts.routing.corrected:
        shapes[CORRECTION] = (experts.count,)
    if experts.routing.scaled:
        shapes[EXPERT_FACTORS] = (experts.count,)
    if experts.routing.bias:
        shapes[f"{ROUTER}.bias"] = (experts.count,)
    sizes = {f"mlp.experts.{number}": experts.size for number in range(experts.count)}
    if experts.shared_size:
        sizes[SHARED] = experts.shared_size
    if experts.shared_gate:
        shapes[f"{SHARED_GATE}.weight"] = (1, hidden)
    for path, size in sizes.items():
        shapes |= {f"{path}.{name}.weight": (size, hidden) for name in expert_inputs(experts)}
        shapes[f"{path}.down_proj.weight"] = (hidden, size)
        if experts.biased:
            shapes |= {f"{path}.{name}.bias": (size,) for name in expert_inputs(experts)}
            shapes[f"{path}.down_proj.bias"] = (hidden,)
    return shapes


def _head_norm_shapes(mixer: AttentionSpec) -> dict[str, tuple[int, ...]]:
    if (latent := mixer.latent) is not None:
        queries = {"self_attn.q_norm.weight": (latent.q_rank,)} if latent.q_rank else {}
        return {**queries, "self_attn.k_norm.weight": (latent.kv_rank,)}
    if mixer.head_norm in (None, HeadNorm.BARE):
        return {}
    each = mixer.head_norm not in (HeadNorm.ALL, HeadNorm.OWN)
    shapes: dict[str, tuple[int, ...]] = {"self_attn.q_norm.weight": (mixer.head_dim if each else mixer.q_size,)}
    if not mixer.shares_kv:
        shapes["self_attn.k_norm.weight"] = (mixer.head_dim if each else mixer.kv_size,)
    return shapes


def is_of_expert(name: str) -> bool:
    """True for a part of an expert, or of the shared one, by its name in `tensor_shapes`."""
    return _OF_EXPERTS.search(name) is not None


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
    """Where a checkpoint with tensors of these names has each part of `tensor_shapes`."""
    tensors, shapes, units = config.tensors.of(names), tensor_shapes(config), config.unit_rows
    first = tensors.embeddings if config.norm.weightless else tensors.norm
    prefix = next((each for each in tensors.prefixes if f"{each}{first}.weight" in names), tensors.prefixes[0])
    head = next((each for each in tensors.heads if each in names), tensors.heads[0])
    found = {LM_HEAD: Source(head), NORM: Source(f"{prefix}{tensors.norm}.weight")}
    found[EMBED] = Source(f"{prefix}{tensors.embeddings}.weight")
    biases = {bias_of(each): Source(bias_of(found[each].name)) for each in (NORM, LM_HEAD)}
    for part in shapes:
        match = IN_LAYER.match(part)
        if match is None:
            around = prefix if part.startswith(_MODEL) else prefix.removesuffix(_TEXT_PART)
            found.setdefault(part, biases.get(part) or Source(around + part.removeprefix(_MODEL)))
        else:
            found[part] = _layer_source(tensors, prefix, match, shapes, units, names)
    return found


def _layer_source(
    tensors: TensorNames,
    prefix: str,
    part: re.Match[str],
    shapes: Mapping[str, tuple[int, ...]],
    units: Mapping[str, UnitRows],
    names: Container[str],
) -> Source:
    """Where a checkpoint has a part of a layer. part: by `IN_LAYER`. units: see `ModelConfig.unit_rows`."""
    layer, path, kind = part.groups()
    at = f"{prefix}{tensors.layers}{layer.removeprefix('layers')}"
    if (expert := _EXPERT.match(path)) is not None:
        begin, number, matrix = expert.groups()
        found = {each: shapes.get(f"{_MODEL}{layer}{begin}{number}.{each}.weight") for each in _MATRICES}
        rows = {each: shape[0] for each, shape in found.items() if shape is not None}
        return _expert_source(tensors, at, int(number), matrix, kind, rows=rows, names=names)
    own = _plain_source(tensors, at, path, kind, names)
    fused = next((name for name, stack in tensors.fused.items() if path in stack), None)
    if fused is None or (own in names and f"{at}{fused}.{kind}" not in names):
        return Source(own)
    if path in units:
        return Source(f"{at}{fused}.{kind}", units=units[path])
    stack = tensors.fused[fused]
    first = sum(shapes[f"{_MODEL}{layer}{each}.{kind}"][0] for each in stack[: stack.index(path)])
    return Source(f"{at}{fused}.{kind}", first)


def _plain_source(tensors: TensorNames, at: str, path: str, kind: str, names: Container[str]) -> str:
    """The tensor that has a part of a layer, and no other part."""
    own = f"{path}.{kind}"
    given = tensors.names.get(own) or f"{tensors.names.get(path, path)}.{kind}"
    older = f"{tensors.older.get(path, path)}.{kind}"
    return _either(_either(at + given, at + older, names), at + own, names)


def _either(given: str, own: str, names: Container[str]) -> str:
    """The name that a family gives to a part, unless the checkpoint has it under another name instead."""
    return own if given not in names and own in names else given


def _expert_source(
    tensors: TensorNames,
    at: str,
    number: int,
    matrix: str,
    kind: str,
    rows: Mapping[str, int],
    names: Container[str],
) -> Source:
    """Where a checkpoint has a matrix of an expert, or its bias. at: the beginning of names in the layer. rows: of each
    matrix.
    """
    for name, order in tensors.stacked_experts.items():
        stored = at + name + (BIASES if kind == "bias" else "")
        if matrix not in order or not any(stored + end in names for end in ("", *PACKED)):
            continue
        place, transposed = order.index(matrix), tensors.transposed and kind == "weight" and stored in names
        if tensors.alternates:
            return Source(stored, place, number, len(order), transposed)
        return Source(stored, sum(rows[each] for each in order[:place]), number, transposed=transposed)
    path = f"mlp.experts.{{}}.{matrix}"
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
    alone = sources(config, {name for name in names if not name.endswith(tuple(config.tensors.stacked_experts))})
    stored = StoredProjections(set(), {})
    for part, shape in shapes.items():
        if not IN_LAYER.match(part) or len(shape) != 2 or part.endswith(ROUTERS):
            continue
        name, first, expert, *_ = source = found[part]
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


def num_weights(config: ModelConfig, shard: Shard = WHOLE) -> int:
    """Elements that a rank keeps of all tensors of `tensor_shapes`; the biases of o and down are the first rank's."""
    return sum(
        shard_shape(shape, shard.of_tensor(name, config)).numel()
        for name, shape in tensor_shapes(config).items()
        if not (shard.rank and name.endswith(("o_proj.bias", "out_proj.bias", "down_proj.bias")))
    )


def kept_bytes(
    config: ModelConfig, itemsize: int, shard: Shard = WHOLE, quantiser: RoundToNearest | None = None
) -> int:
    """Bytes of a rank's weights, of `itemsize` each or quantised."""
    num_bytes = itemsize * num_weights(config, shard)
    if quantiser is None:
        return num_bytes
    tokens = shard.of_vocab(config)
    head = (tokens.stop - tokens.start, config.hidden_size)
    every = (each for layer in shard.config(config).projections.layers for each in layer)
    found = [(each.outputs, each.inputs) for each in every if not each.is_of_mixture and each.group is not Group.KV_UP]
    if quantiser.lm_head:
        num_bytes += itemsize * math.prod(head) if config.tie_word_embeddings else 0  # the embeddings stay
        found.append(head)
    return num_bytes + sum(quantiser.num_bytes(*each) - itemsize * math.prod(each) for each in found)


def shard_shape(shape: Sequence[int], parts: Sequence[Part]) -> torch.Size:
    """Shape of parts of a tensor, one after the other in its first dimension."""
    shapes = [part_shape(shape, part) for part in parts]
    return torch.Size((sum(each[0] for each in shapes), *shapes[0][1:]))


def part_shape(shape: Sequence[int], part: Part) -> torch.Size:
    """Shape of a part of a tensor; further dimensions are whole."""
    lengths = [len(range(*own.indices(length))) for own, length in zip(part, shape, strict=False)]
    return torch.Size((*lengths, *shape[len(part) :]))
