"""Decoder on the native CPU kernels; takes the batches and gives the logits of `DecoderModel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ...memory.pages import hugepages
from ...memory.pages.arena import Arena
from ...memory.pages.layout import PageGroup, PageLayout
from ...memory.pages.projections import Group
from ...ops import native, native_integers, native_library, native_model
from ...ops.elementwise import rotary_table
from ...ops.float8_kv import KvScales
from ...ops.lora_offload import Offloading
from ...ops.native_descriptors import PROJECTIONS, NativeActivation, NativeHeadNorm, NativeOutputGate
from ...ops.ranks import Ranks
from ...ops.sampling import RowSamplingParams
from ...ops.sgmv import AdapterRows, Segments
from ..requests.types import CannotMerge
from .batch import StepBatch
from .config import ModelConfig
from .experts import ExpertKernels, ListedExperts, what_native_lacks
from .kept_weights import expert_packs
from .layer_weights import LayerWeights
from .layers import (
    PARALLEL,
    Activation,
    AttentionSpec,
    Experts,
    GatedSpec,
    HeadNorm,
    LayerSpec,
    Norms,
    OutputGate,
    UngatedActivation,
    UngatedSpec,
)
from .lora_state import LoraState, lora_groups
from .mixture_lora import mixture_modules
from .paged_states import PagedStates
from .quantization.group_scaled import GroupScaled
from .quantization.groups import is_packable, pack_scaled, plain
from .recurrent import RecurrentSpec
from .rope_config import RopeConfig
from .shadow import INPUTS_ARE_ROUNDED
from .slots import EXPERTS, MERGED_MATRICES
from .weight_plan import PACKED
from .weights import Weights

_ACTIVATIONS = {
    Activation.SILU: NativeActivation.SILU,
    Activation.GELU_TANH: NativeActivation.GELU,
}

_HEAD_NORMS = {
    None: NativeHeadNorm.EACH,
    HeadNorm.EACH: NativeHeadNorm.EACH,
    HeadNorm.BARE: NativeHeadNorm.EACH,
    HeadNorm.ROTATED: NativeHeadNorm.EACH,
    HeadNorm.ALL: NativeHeadNorm.ALL,
    HeadNorm.OWN: NativeHeadNorm.OWN,
}

OUTPUT_GATES = {
    None: NativeOutputGate.NONE,
    OutputGate.BESIDE_QUERIES: NativeOutputGate.BESIDE_QUERIES,
    OutputGate.OF_HEADS: NativeOutputGate.OF_HEADS,
    OutputGate.APART: NativeOutputGate.APART,
}

#: Of feed-forward parts without a gate. Their names are those of others.
_UNGATED = {
    UngatedActivation.GELU_TANH: NativeActivation.GELU_ALONE,
    UngatedActivation.GELU: NativeActivation.GELU_BY_ERF,
    UngatedActivation.RELU_SQUARED: NativeActivation.RELU_SQUARED,
    UngatedActivation.XIELU: NativeActivation.XIELU,
}


def why_unsupported(config: ModelConfig, dtype: torch.dtype) -> str | None:
    """Return the reason why the native decoder can't run a model in `dtype` here; None if it can."""
    for part, has in (_parts_of_mixtures(config) | _other_parts(config)).items():
        if has:
            return f"it has no {part}, and this model's layers have {has if isinstance(has, str) else 'it'}"
    if config.recurrent is not None and config.recurrent.native_shape() is None:
        return f"it has no {config.recurrent.native_lack}, which this model has"
    pair = 4 // dtype.itemsize
    parts = [layer.dense.size for layer in config.layers if layer.dense is not None]
    inner = sorted({config.hidden_size, *parts, *(mixer.q_size for mixer in config.attention_shapes)})
    inner += [size for it in config.layers if it.experts for size in (it.experts.size, it.experts.shared_size)]
    inner += [] if config.recurrent is None else [config.recurrent.out_size]
    if reason := native_library.why_unavailable(dtype):
        return reason
    heads = [mixer.head_dim for mixer in config.attention_shapes]
    if any(k % pair for k in inner) or any(size % 2 for size in heads):
        return f"it needs even sizes, and this model's are {heads} of heads, {inner} of rows of weights"
    return None


def _other_parts(config: ModelConfig) -> dict[str, bool | str]:
    """Parts that the native decoder does not have, and whether a model has them, or what of them."""
    mixers = config.attention_layers
    return {
        "latent attention": any(mixer.latent is not None for mixer in mixers),
        "further input of layers": config.layer_inputs is not None,
        "attention with another layer's keys": len(config.kv_layers) < len(mixers),
    } | _parts_of_few(config)


def _parts_of_mixtures(config: ModelConfig) -> dict[str, bool | str]:
    """Parts of mixtures of experts that the native decoder lacks, as `_other_parts`."""
    mixtures = dict.fromkeys(layer.experts for layer in config.layers if layer.experts)
    found: dict[str, bool | str] = {lack: True for it in mixtures if (lack := what_native_lacks(it)) is not None}
    return found | {"mixture of experts beside a dense part": any(layer.beside is not None for layer in config.layers)}


def _parts_of_few(config: ModelConfig) -> dict[str, bool | str]:
    """Parts that it lacks and one family each has, as `_other_parts`."""
    gated = [(it.norms, it.dense) for it in config.layers if isinstance(it.dense, GatedSpec)]
    return {
        "norm of all heads of keys that are values": any(
            mixer.keys_are_values and mixer.head_norm is HeadNorm.ALL for mixer in config.attention_layers
        ),
        "embedding of tokens of images and sound": bool(config.media),
        "residual of several streams": config.streams is not None,
        "factor of a part before its norm": any(
            it.factor != 1.0 and norms in (Norms.AFTER, Norms.AROUND) for norms, it in gated
        ),
        "sparse gate": any(it.sparsity for _, it in gated),
    }


class NativeDecoderModel:
    """Reads and packs `weights` projection by projection, so that the unpacked model is never in memory."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        arena: Arena,
        max_model_len: int,
        threads: int | None,
        ranks: Ranks | None = None,
    ) -> None:
        """ranks: see `DecoderModel`."""
        self.config = config
        self._ranks = ranks
        embed = weights.embed()
        packed, weights.plan = PackedWeights(embed.dtype), PACKED
        kv_scales = weights.kv_scales() if arena.layout.float8_kv else ()
        values = layer_values(config.layers, max_model_len, arena.layout, kv_scales)
        for own, mixer in zip(values, (layer.attention for layer in config.layers), strict=True):
            if mixer is not None:
                own.heads, own.kv_heads, own.head_dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
        pack_expert, keep = expert_packs(ExpertKernels.NATIVE, PACKED, embed.dtype, embed.device)
        read = zip(weights.layers(packed.add, pack_expert), config.layers, values, strict=True)
        self.layers = [native_layer(*each) for each in read]
        for layer in self.layers:
            if isinstance(experts := layer.get(EXPERTS), ListedExperts):
                layer[EXPERTS] = keep(experts)
        mixtures, mixture_ids = _native_mixtures(config, self.layers)
        head = weights.quantised_head(embed)
        self._share = vocab = len(head.values if isinstance(head, GroupScaled) else head)
        model = native_model.NativeModel(
            hidden=config.hidden_size, heads=config.num_heads,
            kv_heads=config.num_kv_heads, head_dim=config.head_dim, vocab=vocab,
            block_tokens=arena.layout.block_tokens, eps=config.norm.eps,
            centered=config.norm.centered, biased=config.norm.biased,
            layers=self.layers, values=values,
            float8_kv=arena.layout.float8_kv,
            products=config.projections.products, product_of=config.projections.product_in,
            positions=max_model_len, page_groups=arena.layout.pages_per_block, embed=embed,
            lm_head=packed.add(head), norm=weights.norm().float(), arena=arena.pages,
            head_bias=weights.lm_head_bias(), embedding_norm=config.embedding_norm,
            embedding_multiplier=config.embedding_factor(embed.dtype), logits_scale=config.logits_scale,
            logits_softcap=config.logits_softcap or 0.0,
            output_gate=OUTPUT_GATES[config.attention.output_gate],
            kv_copies=config.attention.kv_copies,
            recurrent=_native_recurrent(config.recurrent, arena.layout),
            embed_module=_module(config, Group.EMBEDDING), head_module=_module(config, Group.HEAD),
            embed_rows_module=_module(config, Group.EMBEDDING_ROWS),
            head_rows_module=_module(config, Group.HEAD_ROWS),
            first_token=0 if ranks is None else config.vocab_size * ranks.rank // config.num_ranks,
            mixtures=mixtures, mixture_ids=mixture_ids,
        )  # fmt: skip
        self._arena = arena
        self._decoder = native.NativeDecoder(model, threads or torch.get_num_threads(), ranks)
        self._every: dict[int, torch.Tensor] = {}
        self._no_segments = Segments()

    def new_attention(self) -> native.NativeRows:
        return native.NativeRows()

    def new_states(self) -> PagedStates | None:
        """See `DecoderModel.new_states`."""
        return None if self.config.recurrent is None else PagedStates(self.config, self._arena)

    @property
    def best(self) -> list[int]:
        """For each row of the last step's logits its argmax or sampled token, -1 where the logits are not finite."""
        return self._decoder.best

    @property
    def sampling(self) -> native.NativeSampling:
        """Draws from logits with the decoder's threads."""
        return self._decoder.sampling

    def keep_logits(
        self, rows: Sequence[int] | None, row_params: Mapping[int, RowSamplingParams] = MappingProxyType({})
    ) -> None:
        """Of which tokens steps from now on give logits, None: of all; `best` is always there.

        row_params: of which tokens `best` is drawn.
        """
        self._decoder.kept, self._decoder.row_params = rows, row_params

    def prompt_logits(self, begin: int, end: int) -> torch.Tensor:
        """Logits `[end - begin, vocab + added]` float32 of some of the last step's prompt-logprob tokens, until the
        next call; see `NativeDecoder.forward`.
        """
        return self._gathered(self._decoder.prompt_logits(begin, end))

    def hidden_states(self, begin: int, end: int) -> torch.Tensor:
        """Final hidden states `[end - begin, hidden]` float32 of some of the last step's kept tokens."""
        return self._decoder.hidden_states(begin, end)

    def _gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """All ranks' columns, see `Ranks.gather`. Ranks agree on how many rows they keep."""
        if self._ranks is None:
            return logits
        self._ranks.check()
        if not len(logits):
            return logits
        own, added = logits.split((self._share, logits.shape[1] - self._share), 1)
        gathered = self._ranks.gather(own, self.config.vocab_size)
        return torch.cat((gathered, added), 1) if added.shape[1] else gathered

    def forward(self, batch: StepBatch[native.NativeRows, LoraState]) -> torch.Tensor:
        """Compute the step's tokens and write their KV; logits `[kept, vocab + added]` float32, until the next step."""
        logit_tokens = batch.logit_tokens
        if logit_tokens is None:
            tokens = len(batch.token_ids)
            logit_tokens = self._every.get(tokens)
            if logit_tokens is None:
                logit_tokens = self._every[tokens] = torch.arange(tokens)
        lora = batch.lora
        segments = self._no_segments if lora is None else lora.in_layers.segments
        states = batch.states if isinstance(batch.states, PagedStates) else None
        logits = self._decoder.forward(
            token_ids=batch.token_ids,
            positions=batch.positions,
            page=batch.page,
            offset=batch.offset,
            rows=batch.attention,
            logit_tokens=logit_tokens,
            segments=segments,
            max_stall=0.0 if lora is None else lora.max_stall,
            kept_tokens=batch.kept_tokens,
            merged=batch.merged,
            states=states,
            model_segments=None if lora is None else lora.of_model.segments,
            mixture_segments=None if lora is None else lora.of_mixtures.segments,
        )
        return self._gathered(logits)

    bias_dtype = torch.float32

    def merged_form(self, layer: int, group: int) -> tuple[torch.Size, torch.dtype]:
        """See `MergeableModel.merged_form`."""
        origin = self.layers[layer][MERGED_MATRICES[group]]
        if isinstance(origin, native_integers.IntegerPanels) and origin.input_bits == 8:
            raise CannotMerge(INPUTS_ARE_ROUNDED)
        projection = self.config.projections.products[self.config.projections.product_in[layer][group]]
        dtype = self._arena.pages.dtype
        return torch.Size(native_model.packed_shape(projection.outputs, projection.inputs, dtype)), dtype

    def merge(self, layer: int, group: int, rows: Sequence[AdapterRows], origin: Any, out: torch.Tensor) -> float:
        """See `MergeableModel.merge`."""
        return self._decoder.merge(layer, group, rows, origin, out)

    def offload(self, offloading: Offloading) -> None:
        """Have other processes compute what `offloading` chooses of steps with adapters on their way."""
        self._decoder.offloading = offloading

    def use_merged(self, layers: Sequence[LayerWeights] | None) -> None:
        """Have steps that say so take these layers; None: there are none."""
        self._decoder.use_merged(layers)

    def close(self) -> None:
        self._decoder.close()


def layer_values(
    layers: Sequence[LayerSpec],
    positions: int,
    layout: PageLayout | None = None,
    kv_scales: Sequence[KvScales] = (),
) -> list[native_model.LayerValues]:
    """How the library computes layers, with the angles of that many positions; layers with the same rope share them.

    layout: where their KV is; by default all layers' in each page. kv_scales: of each layer's KV; none: it is
    not in FP8.
    """
    ropes = dict.fromkeys(layer.attention.rope for layer in layers if layer.attention)
    tables = {rope: (None, None) if rope is None else _angles(rope, positions) for rope in ropes}
    groups = (PageGroup(tuple(range(len(layers)))),) if layout is None else layout.groups
    places = {layer: (group, at) for group, each in enumerate(groups) for at, layer in enumerate(each.layers)}
    found, with_kv, with_state = [], 0, 0
    for layer in layers:
        if (mixer := layer.attention) is None:
            found.append(_values_without_attention(layer, with_state))
        else:
            values = _layer_values(layer, mixer, *tables[mixer.rope], *places[with_kv], positions)
            values.state_layer = with_state
            if kv_scales:
                values.k_scale, values.v_scale = kv_scales[with_kv]
            found.append(values)
            with_kv += 1
        _set_factors(found[-1], layer)
        with_state += layer.recurrent is not None
    return found


def _values_without_attention(layer: LayerSpec, state_layer: int) -> native_model.LayerValues:
    """The values of a layer without attention: with a recurrent mixer, or with no mixer."""
    return native_model.LayerValues(
        1.0,
        parallel=layer.norms in PARALLEL,
        page_layer=0,
        residual_multiplier=layer.residual_multiplier,
        activation=_activation(layer),
        state_layer=state_layer,
    )


def _set_factors(values: native_model.LayerValues, layer: LayerSpec) -> None:
    """Those of a gated part, and of two mixers side by side."""
    part, second = layer.dense, layer.mixer_beside
    if isinstance(part, GatedSpec):
        values.gate_factor, values.part_factor = part.gate_factor, part.factor
    if second is not None:
        values.attention_in_factor, values.attention_out_factor = second.attention_in, second.attention_out
        values.beside_in_factor, values.beside_out_factor = second.in_factor, second.out_factor


def _activation(layer: LayerSpec) -> NativeActivation:
    part = layer.dense
    if isinstance(part, UngatedSpec):
        return _UNGATED[part.activation]
    return NativeActivation.SILU if part is None else _ACTIVATIONS[part.activation]


def _native_mixtures(
    config: ModelConfig, layers: Sequence[LayerWeights]
) -> tuple[list[native_model.LayerMixture | None], tuple[int, ...]]:
    """The layers' mixtures in the library's form, and the modules of all of them."""
    modules = [mixture_modules(columns) for columns in lora_groups(config.projections)]
    ids = tuple(dict.fromkeys(module for own in modules for module in own.ids))
    found: list[native_model.LayerMixture | None] = []
    for layer, spec, own in zip(layers, config.layers, modules, strict=True):
        if not isinstance(spec.feed_forward, Experts):
            found.append(None)
            continue
        if (weights := layer[EXPERTS].native(spec.feed_forward)) is None:
            raise RuntimeError(f"the native library has not packed all matrices of {spec.feed_forward}")
        found.append(native_model.LayerMixture(weights, own.described(ids), spec.feed_forward.factor))
    return found, ids


def _native_recurrent(
    recurrent: RecurrentSpec | None, layout: PageLayout
) -> tuple[native_model.NativeShape, native_model.NativeStates] | None:
    if recurrent is None or (shape := recurrent.native_shape()) is None or (places := layout.states) is None:
        return None
    return shape, native_model.NativeStates(
        convs_per_page=places.convs_per_page,
        heads_per_page=places.heads_per_page,
        conv_pages=places.num_conv_pages,
        most_drafts=places.shape.most_drafts,
        drafts_per_page=places.drafts_per_page,
        draft_page=places.first_draft_page,
    )


def _layer_values(
    layer: LayerSpec,
    mixer: AttentionSpec,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    page_group: int,
    page_layer: int,
    positions: int,
) -> native_model.LayerValues:
    return native_model.LayerValues(
        _score_scale(mixer),
        cos,
        sin,
        interleaved=mixer.rope is not None and mixer.rope.interleaved,
        window=mixer.window or 0,
        chunked=mixer.chunked,
        keys_are_values=mixer.keys_are_values,
        norms_values=mixer.value_norm,
        softcap=mixer.softcap or 0.0,
        head_norm=_HEAD_NORMS[mixer.head_norm],
        parallel=layer.norms in PARALLEL,
        page_group=page_group,
        page_layer=page_layer,
        query_factors=None if mixer.query_growth is None else mixer.query_growth.factors(positions),
        residual_multiplier=layer.residual_multiplier,
        activation=_activation(layer),
    )


def _angles(rope: RopeConfig, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rotary_table(rope.angles(positions), positions, factor=rope.attention_factor, interleaved=rope.interleaved)


def _score_scale(mixer: AttentionSpec) -> float:
    """The usual scale as float32 arithmetic gives it, which for some head sizes is not head_dim^-0.5 rounded."""
    if mixer.scale == mixer.head_dim**-0.5:
        return float(1 / np.sqrt(np.float32(mixer.head_dim)))
    return mixer.scale


class PackedWeights:
    """Memory for a model's packed projections."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._pieces = hugepages.Pieces()

    def add(self, weight: torch.Tensor | GroupScaled) -> torch.Tensor | native_integers.IntegerPanels:
        """Pack a projection: whole numbers as they are, if they can be multiplied so."""
        if not isinstance(weight, GroupScaled):
            rows, columns = weight.shape
            shape = native_model.packed_shape(rows, columns, weight.dtype)
            return native_model.pack(weight, self._pieces.take(shape, weight.dtype))
        return pack_scaled(weight, self._pieces.take) if is_packable(weight) else self.add(plain(weight, self._dtype))


def _module(config: ModelConfig, group: Group) -> int:
    found = config.projections.of_group(group)
    return -1 if found is None else found


def native_layer(layer: LayerWeights, spec: LayerSpec, values: native_model.LayerValues) -> LayerWeights:
    """The layer in the library's form: packed projections as they are, everything else as float32. Norms of heads that
    have no weights get ones; where heads are normed after they are rotated, so do they, and `values` gets the weights.
    """
    for name, part in layer.items():
        if isinstance(part, torch.Tensor) and name not in PROJECTIONS:
            layer[name] = part.float()
    values.output_factor = 1.0 if (scalar := layer.get("scalar")) is None else float(scalar)
    head_norm = None if spec.attention is None else spec.attention.head_norm
    if head_norm is HeadNorm.ROTATED:
        values.query_weights = layer["q_norm"] * layer["k_norm"]
    if spec.attention is not None and head_norm in (HeadNorm.BARE, HeadNorm.ROTATED):
        layer["q_norm"] = layer["k_norm"] = torch.ones(spec.attention.head_dim)
    return layer
