"""Decoder on the native CPU kernels; takes the batches and gives the logits of `DecoderModel`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ....memory.pages import hugepages
from ....memory.pages.arena import Arena
from ....memory.pages.layout import PageLayout
from ....memory.pages.projections import Role
from ....ops.cpu import native
from ....ops.cpu.lora_offload import Offloading
from ....ops.library import native_integers, native_library, native_model
from ....ops.library.native_program import NativeOp
from ....ops.lora.merge import merge
from ....ops.lora.sgmv import AdapterRows, Segments
from ....ops.moe.native_mixture import NativeMixture
from ....ops.ranks.ranks import Ranks
from ....ops.sampling.sampling import RowSamplingParams
from ...requests.types import CannotMerge
from ..batch import StepBatch
from ..checkpoints.quantization.group_scaled import GroupScaled
from ..checkpoints.quantization.groups import is_packable, pack_scaled, plain
from ..lora.lora_state import LoraState
from ..moe.experts import ExpertKernels
from ..moe.listed_experts import ListedExperts
from ..moe.mixture_lora import mixture_columns, mixture_modules
from ..native_names import native_norm
from ..paged_states import PagedStates
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.feed_forward import Experts
from ..specs.layers import LayerSpec, has_axes
from ..specs.recurrent import RecurrentSpec
from ..weights.end_weights import around_weights
from ..weights.kept_weights import expert_packs
from ..weights.layer_weights import LayerWeights
from ..weights.shadow import INPUTS_ARE_ROUNDED
from ..weights.slot import Keep, Slot
from ..weights.slots import EXPERTS
from ..weights.weight_plan import PACKED
from ..weights.weights import Weights
from .ends import cap_of, end_gemms, end_programs
from .native_attention import latent_shape
from .native_binding import LayerBinding, Tables, layer_bindings
from .native_buffers import check_native
from .native_program import NativeProgram
from .op import NoNativeOp
from .ops.embed import EmbedMedia


def why_unsupported(config: ModelConfig, dtype: torch.dtype) -> str | None:
    """Return the reason why the native decoder can't run a model in `dtype` here; None if it can."""
    if (lack := why_lacking(config)) is not None:
        return f"it has no {lack}, and this model has it"
    pair = 4 // dtype.itemsize
    inner = _rows_of_weights(config)
    if reason := native_library.why_unavailable(dtype):
        return reason
    heads = [mixer.head_dim for mixer in config.attention_shapes]
    if any(k % pair for k in inner) or any(size % 2 for size in heads):
        return f"it needs even sizes, and this model's are {heads} of heads, {inner} of rows of weights"
    return None


def why_lacking(config: ModelConfig) -> str | None:
    """What a model, or a rank's share, has that the native library does not compute; None: it computes all."""
    try:
        _program(config)
    except NoNativeOp as error:
        return str(error)
    return None


def _rows_of_weights(config: ModelConfig) -> list[int]:
    """Widths of rows of the model's matrices."""
    parts = [layer.dense.size for layer in config.layers if layer.dense is not None]
    gemms = (shape.inputs for shape in config.projections.gemm_shapes)
    own = (size for it in config.attention_shapes for size in _inputs_of(it))
    inner = sorted({config.hidden_size, *parts, *own, *gemms})
    experts = [layer.experts for layer in config.layers if layer.experts is not None]
    inner += [size for it in experts for size in (it.size, it.shared_size)]
    inner += [it.latent.size for it in experts if it.latent is not None]
    if (recurrent := config.recurrent) is not None:
        inner += [recurrent.out_size, *(recurrent.input_parts or ())[1::2]]
        inner += [] if recurrent.inner is None else [recurrent.inner.rank]
    return inner


def _program(config: ModelConfig) -> NativeProgram:
    """The ops of a model, or of a TP rank's share. Raises NoNativeOp."""
    of_share = config.num_ranks > 1
    ends = end_programs(config)
    for op in ends.embed:
        check_native(op)
    media = tuple(op for op in ends.embed if isinstance(op, EmbedMedia))
    if media and ends.embed[-1:] != media:
        raise NoNativeOp("embeddings of images and sound to which something else is done")
    found = NativeProgram(
        config.programs,
        config.hidden_size,
        config.projections,
        has_ranks=of_share,
        lasting=ends.lasting,
        before=media + ends.per_layer + ends.split,
        behind=ends.join,
    )
    if not config.has_last_norm:
        raise NoNativeOp("final states without a norm")
    return found


def _inputs_of(mixer: AttentionSpec) -> tuple[int, ...]:
    """Rows of what attention multiplies with besides its input GEMM: weights, and keys of an indexer."""
    indexer = mixer.indexer or mixer.block_indexer
    own = () if indexer is None else (indexer.key_dim,)
    if (latent := mixer.latent) is None:
        return (mixer.out_size, *own)
    return mixer.num_heads * latent.value_dim, latent.q_rank, latent.key_dim, latent.kv_rank, *own


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
        *,
        image_tokens: int = 0,
    ) -> None:
        """ranks: see `DecoderModel`. image_tokens: the most tokens of a step that stand for rows of images."""
        self.config = config
        self._ranks = ranks
        embed = weights.embed()
        packed, weights.plan = PackedWeights(embed.dtype), PACKED
        kv_scales = weights.kv_scales() if arena.layout.float8_kv else ()
        pack_expert, keep = expert_packs(ExpertKernels.NATIVE, PACKED, embed.dtype, embed.device)
        read = zip(weights.layers(packed.add, pack_expert), config.layers, strict=True)
        self.layers = [native_layer(layer, spec, config.composed(spec).slots) for layer, spec in read]
        for layer in self.layers:
            if isinstance(experts := layer.get(EXPERTS), ListedExperts):
                layer[EXPERTS] = keep(experts)
        self._mixtures = _native_mixtures(config, self.layers)
        spare = image_tokens if has_axes(config.layers) else 0
        self._tables = Tables.of(config.layers, max_model_len, spare, weights.rope_factors())
        self._kv_scales = kv_scales
        self._program, self._layout = _program(config), arena.layout
        self._ends = _native_ends(config, weights, packed)
        self._planes = [int(keys.storage_offset() - arena.pages.storage_offset()) for keys, _ in arena.kv_layers]
        head = weights.quantised_head(embed)
        self._share = vocab = len(head.values if isinstance(head, GroupScaled) else head)
        model = native_model.NativeModel(
            hidden=config.hidden_size, vocab=vocab, num_layers=config.num_layers,
            ops=self._ops(self.layers), registers=self._program.registers,
            block_tokens=arena.layout.block_tokens, eps=config.final_norm.eps,
            norm_kind=native_norm(config.final_norm.kind),
            float8_kv=arena.layout.float8_kv,
            gemm_shapes=config.projections.gemm_shapes, gemm_shape_of=config.projections.gemm_shape_of,
            positions=max_model_len + spare, page_groups=arena.layout.pages_per_block, embed=embed,
            lm_head=packed.add(head), norm=weights.norm().float(), arena=arena.pages,
            position_table=None if (table := weights.position_table()) is None else table.float(),
            head_bias=weights.lm_head_bias(),
            embedding_norm=None if (own := weights.embedding_norm()) is None else own.float(),
            embedding_multiplier=config.embedding_factor(embed.dtype), logits_scale=cap_of(config).scale,
            logits_softcap=cap_of(config).cap or 0.0,
            recurrent=_native_recurrent(config.recurrent, arena.layout),
            embed_module=_module(config, Role.EMBEDDING), head_module=_module(config, Role.HEAD),
            embed_rows_module=_module(config, Role.EMBEDDING_ROWS),
            head_rows_module=_module(config, Role.HEAD_ROWS),
            first_token=0 if ranks is None else config.vocab_size * ranks.rank // config.num_ranks,
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
            positions=batch.positions if batch.axes is None else self._tables.by_axes(batch.positions, batch.axes),
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
            media=batch.media,
        )
        return self._gathered(logits)

    bias_dtype = torch.float32

    def merged_form(self, layer: int, product: str) -> tuple[torch.Size, torch.dtype]:
        """See `MergeableModel.merged_form`."""
        origin = self.layers[layer][product]
        if product == Role.KV_UP:
            return origin.shape, origin.dtype
        if isinstance(origin, native_integers.IntegerPanels) and origin.input_bits == 8:
            raise CannotMerge(INPUTS_ARE_ROUNDED)
        projection = self.config.projections.gemm_shapes[self.config.projections.gemm_shape_of[layer][product]]
        dtype = self._arena.pages.dtype
        return torch.Size(native_model.packed_shape(projection.outputs, projection.inputs, dtype)), dtype

    def merge(self, layer: int, product: str, rows: Sequence[AdapterRows], origin: Any, out: torch.Tensor) -> float:
        """See `MergeableModel.merge`."""
        mixer = self.config.layers[layer].attention
        if product == Role.KV_UP and mixer is not None and mixer.latent is not None:
            shape, columns = latent_shape(mixer, mixer.latent), self.config.projections.columns(layer, Role.KV_UP)
            dense = shape.unpack(origin)
            found = torch.empty_like(dense)
            growth = merge(dense, found, self._arena.pages, layer, parts=rows, modules=columns)
            shape.pack(found, out)
            return growth
        return self._decoder.merge(layer, product, rows, origin, out)

    def offload(self, offloading: Offloading) -> None:
        """Have offload workers compute what `offloading` chooses of steps with adapters on their way."""
        self._decoder.offloading = offloading

    def use_merged(self, layers: Sequence[LayerWeights] | None) -> None:
        """Have steps that say so take these layers; None: there are none."""
        self._decoder.use_merged(None if layers is None else self._ops(layers))

    def _ops(self, layers: Sequence[LayerWeights]) -> list[NativeOp]:
        """All layers' ops, with these weights."""
        bindings = layer_bindings(
            self.config.layers, layers, self._tables, self._layout, self._kv_scales, self._mixtures, self._planes
        )
        return self._program.ops(bindings, LayerBinding(self._ends, self._tables))

    def close(self) -> None:
        self._decoder.close()


def _native_mixtures(config: ModelConfig, layers: Sequence[LayerWeights]) -> list[native_model.LayerMixture | None]:
    """The layers' mixtures in the library's form."""
    modules = [mixture_modules(columns) for columns in mixture_columns(config.projections)]
    found: list[native_model.LayerMixture | None] = []
    for layer, spec, own in zip(layers, config.layers, modules, strict=True):
        if spec.experts is None:
            found.append(None)
            continue
        alone = None
        if spec.experts.latent is not None and spec.experts.shared_size:
            own, of_shared = own.split_shared()
            shared = _packed(layer[EXPERTS].native_shared, spec.experts)
            alone = native_model.LayerMixture(shared, of_shared.described())
        weights = _packed(layer[EXPERTS].native, spec.experts)
        found.append(native_model.LayerMixture(weights, own.described(), alone))
    return found


def _packed(make: Callable[[Experts], NativeMixture | None], spec: Experts) -> NativeMixture:
    if (found := make(spec)) is None:
        raise RuntimeError(f"the native library has not packed all matrices of {spec}")
    return found


def _native_recurrent(
    recurrent: RecurrentSpec | None, layout: PageLayout
) -> tuple[native_model.NativeShape, native_model.NativeStates] | None:
    if recurrent is None or (bindings := layout.states) is None:
        return None
    shape = recurrent.native_shape()
    return shape and (
        shape,
        native_model.NativeStates(
            convs_per_page=bindings.convs_per_page,
            heads_per_page=bindings.heads_per_page,
            conv_pages=bindings.num_conv_pages,
            most_drafts=bindings.shape.most_drafts,
            drafts_per_page=bindings.drafts_per_page,
            draft_page=bindings.first_draft_page,
        ),
    )


def _native_ends(config: ModelConfig, weights: Weights, packed: PackedWeights) -> LayerWeights:
    """What ops of the model's ends read: packed matrices and the table of per-layer embeddings as they are, everything
    else in float32.
    """
    found = around_weights(config, weights, packed.add, torch.device("cpu"))
    if config.per_layer_embeddings is not None:
        found["per_layer_table"], found[Role.PER_LAYER], found["per_layer_norm"] = weights.per_layer_embeddings(
            packed.add
        )
    if config.media:
        found["media"] = weights.media()
    kept = {"per_layer_table", "media", *(slot for slot, _ in end_gemms(config))}
    return LayerWeights({name: part if name in kept else part.float() for name, part in found.items()})


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


def _module(config: ModelConfig, role: Role) -> int:
    found = config.projections.of_role(role)
    return -1 if found is None else found


def native_layer(layer: LayerWeights, spec: LayerSpec, slots: Iterable[Slot]) -> LayerWeights:
    """The layer in the library's form: packed matrices as they are, keys and values of latents packed by head,
    everything else in float32.
    """
    packed = {slot.name for slot in slots if slot.keep in (Keep.MATRIX, Keep.DENSE)}
    for name, part in layer.items():
        if isinstance(part, torch.Tensor) and name not in packed:
            layer[name] = part.float()
    mixer = spec.attention
    if "kv_up" in layer and mixer is not None and mixer.latent is not None:
        layer["kv_up"] = latent_shape(mixer, mixer.latent).pack(layer["kv_up"])
    return layer
