"""A model's shapes and layers; `read_config` reads them from a checkpoint.

Tests: tests/core/model/specs/test_model_config.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ....memory.files.module_paths import AROUND, ModulePaths
from ....memory.files.tokens.base_tokens import BaseTokens
from ....memory.files.tower_shapes import TowerShapes
from ....memory.files.whole_copies import BaseRows
from ....memory.pages.layer_projections import model_projections
from ....memory.pages.layout import KvShape
from ....memory.pages.projections import Projection, Projections, Role, UnitRows, unit_rows
from ...requests.blocks import Blocks
from ..checkpoints.quantization.format import WeightFormat
from ..compose.build import Build
from ..compose.composed import composed
from ..config_json import UnsupportedModel
from ..program.layer_program import LayerProgram
from .attention import AttentionSpec, LatentSpec
from .feed_forward import Experts
from .layers import LayerSpec, MediaTokens, PerLayerEmbeddingSpec, ResidualStreams, ropes_of
from .norms import NormSpec
from .positions import PositionTable
from .recurrent import RecurrentSpec
from .rope_config import RopeConfig
from .tensor_names import LLAMA_TENSORS, TensorNames
from .vision import VisionSpec

if TYPE_CHECKING:
    import torch

__all__ = ["ModelConfig", "UnsupportedModel"]


#: Projections that transformers has as modules or as parameters, by its version.
_BY_VERSION = (Role.ROUTER,)


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a decoder, and its layers. All layers of a kind have the same shapes, but for attention,
    whose shapes differ by its `form`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]

    norm: NormSpec
    """Kind and eps of the model's norms; `last_norm` may differ."""

    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    embedding_multiplier: float = 1.0
    """Factor of the embeddings, rounded to the dtype that the model is computed in."""

    embedding_norm: bool = False
    """Embeddings are normalised by a norm of the kind of the others, with weights of its own where those have any
    (nanochat, BLOOM).
    """

    has_last_norm: bool = True
    """False: nothing is normalised after all layers (Qwen4-Exp)."""

    last_norm: NormSpec | None = None
    """The norm after all layers, where its eps is another one (Muse Glimmer); None: as `norm`."""

    scales_embeddings: bool = False
    """Embeddings have a learned factor and a learned summand of each element (ZAYA)."""

    embedding_rows_eps: float | None = None
    """The eps of a norm of each token's embedding, without weights, to whose output adapters add: rows are normalised
    when they are read. None: there is none (Muse Glimmer).
    """

    embedding_rows_scaled: bool = False
    """That norm has weights (Inkling)."""

    further_embeddings: int = 0
    """Rows of the checkpoint's embeddings behind those of `vocab_size`: of tokens that stand for images or sound, which
    no logit is of. They are not kept.
    """

    further_logits: int = 0
    """Rows of the checkpoint's output projection behind those of `vocab_size`, likewise (Inkling)."""

    position_table: PositionTable | None = None
    """The table of position embeddings, which are added to the tokens'; None: the model has none."""

    logits_scale: float = 1.0
    """Factor of the logits."""

    logits_softcap: float | None = None
    """Logits l become `softcap · tanh(l / softcap)`."""

    per_layer_embeddings: PerLayerEmbeddingSpec | None = None
    """Per-layer embeddings; None: there are none."""

    has_lm_head: bool = True
    """False for a checkpoint without the output projection, which makes vectors and scores only."""

    head_bias: bool = False
    """The output projection has a bias (Phi 2, Phi-3.5-MoE)."""

    is_classifier: bool = False
    """True if the checkpoint has a score head."""

    model_type: str | None = field(default=None, compare=False)
    """`model_type` of config.json."""

    num_ranks: int = 1
    """TP ranks that share the logits."""

    tensors: TensorNames = field(default=LLAMA_TENSORS, compare=False, repr=False)

    weight_format: WeightFormat | None = field(default=None, compare=False, repr=False)
    """How the checkpoint stores quantised projections. None: nothing is quantised."""

    base_rows: BaseRows | None = field(default=None, compare=False, repr=False)
    """The checkpoint's rows of embeddings and head; None: it is not known where they are."""

    base_tokens: BaseTokens | None = field(default=None, compare=False, repr=False)
    """The tokens of the model's tokenizer; None: it is not known where it is."""

    vision: VisionSpec | None = None
    """The vision part, of a family whose images are served."""

    why_text_alone: str = ""
    """See `Family`."""

    image_token: int | None = None
    """The token that stands at images' positions."""

    image_marks: tuple[int, ...] = ()
    """Tokens around images' rows at whose positions rows stand, too: see `VisionSpec`."""

    image_ends: tuple[int, int] | None = None
    """See `VisionSpec.ends`."""

    media_layers: tuple[int, ...] = ()
    """Layers behind which further parts of images' rows are added, in order, where images are served."""

    image_blocks: Blocks | None = None
    """Which positions of a prompt with images see each other, where images are served."""

    image_lookup: int | None = None
    """The token by which per-layer embeddings are looked up at images' positions; None: there are none."""

    scales_image_rows: bool = False
    """Rows of images take `embedding_multiplier`, as tokens' embeddings do."""

    tower: TowerShapes | None = field(default=None, compare=False, repr=False)
    """The vision part's modules, where images are served."""

    media: tuple[MediaTokens, ...] = ()
    """Tokens with embeddings made by others than the text part, the last of the vocabulary, in order."""

    def __post_init__(self) -> None:
        if not self.has_mixers:
            raise UnsupportedModel("no layer has attention or a recurrent mixer, which is not supported")
        if len({it.chunked for it in self.attention_layers if it.window is not None}) > 1:
            raise UnsupportedModel("some layers have attention windows and others chunks, which is not supported")
        for shapes in (
            *({it.shape for it in self.attention_layers if it.form == of.form} for of in self.attention_shapes),
            {layer.recurrent.common for layer in self.layers if layer.recurrent},
            *(
                {layer.dense.size for layer in self.layers if layer.dense and layer.dense.form == form}
                for form in {layer.dense.form for layer in self.layers if layer.dense}
            ),
            {layer.experts.unbounded for layer in self.layers if layer.experts},
            {layer.streams for layer in self.layers},
        ):
            if len(shapes) > 1:
                raise UnsupportedModel(f"layers of different shapes are not supported: {sorted(map(str, shapes))}")

    @property
    def final_norm(self) -> NormSpec:
        """Of the norm behind all layers."""
        return self.norm if self.last_norm is None else self.last_norm

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_mixers(self) -> bool:
        """True if some layer has attention or a recurrent mixer."""
        return any(layer.mixer is not None for layer in self.layers)

    @cached_property
    def attention_layers(self) -> tuple[AttentionSpec, ...]:
        """The mixers of layers with attention."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @cached_property
    def kv_layers(self) -> tuple[AttentionSpec, ...]:
        """The mixers of layers of which pages keep something: keys and values, or an indexer's keys."""
        return tuple(mixer for mixer in self.attention_layers if mixer.has_pages)

    @property
    def attention(self) -> AttentionSpec:
        """The first layer's that has attention, of a model that has such layers; see `attention_shapes`."""
        return self.attention_layers[0]

    @cached_property
    def attention_shapes(self) -> tuple[AttentionSpec, ...]:
        """Of each form of attention the first layer's; most models have one."""
        found: dict[str, AttentionSpec] = {}
        for mixer in self.attention_layers:
            found.setdefault(mixer.form, mixer)
        return tuple(found.values())

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """The mixer of layers with a state; all are equal in `common`. None where no layer has one."""
        return next((layer.recurrent for layer in self.layers if layer.recurrent is not None), None)

    @property
    def lookup(self) -> RecurrentSpec | None:
        """The first table of n-grams that a layer has; others have other rows alone. None where no layer has one."""
        return next((layer.lookup for layer in self.layers if layer.lookup is not None), None)

    @property
    def num_lookups(self) -> int:
        """Layers with such a table."""
        return sum(layer.lookup is not None for layer in self.layers)

    @property
    def num_recurrent_layers(self) -> int:
        """Layers with a state."""
        return sum(layer.recurrent is not None for layer in self.layers)

    @property
    def learned_rope(self) -> RopeConfig | None:
        """The rope whose frequencies have learned factors; None: none has."""
        return next((rope for rope in ropes_of(self.layers) if rope.is_learned), None)

    @property
    def num_heads(self) -> int:
        """Heads of queries, as `attention` has them; 0 without attention, as of the next two."""
        return self.attention.num_heads if self.attention_layers else 0

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads if self.attention_layers else 0

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim if self.attention_layers else 0

    @property
    def kv_shape(self) -> KvShape:
        """What pages keep of a token in a layer as `attention`."""
        return self.attention.kv_shape if self.attention_layers else KvShape(0, 0)

    @property
    def latent(self) -> LatentSpec | None:
        """The latents of keys and values that attention keeps; None where it keeps none."""
        return self.attention.latent if self.attention_layers else None

    @property
    def one_latent(self) -> LatentSpec | None:
        """These latents where all layers' are alike; None where they differ, too."""
        return self.latent if len({mixer.latent for mixer in self.attention_layers}) == 1 else None

    @property
    def top_k(self) -> int | None:
        """The most tokens that a query attends to in a layer with an indexer; None where no layer has one."""
        mixers = (mixer for mixer in self.attention_layers if mixer.block_indexer is None)
        return max((mixer.top_k for mixer in mixers if mixer.top_k is not None), default=None)

    @property
    def cached_value_dim(self) -> int | None:
        """See `PageLayout.value_dim`."""
        return self.attention.cached_value_dim if self.attention_layers else None

    @property
    def why_no_float8_kv(self) -> str | None:
        """Why keys and values can't be kept in FP8; None if they can."""
        if self.latent is not None:
            return "the model's layers keep latents of keys and values, which are not supported in FP8"
        if any(mixer.block_indexer for mixer in self.attention_layers):
            return "the model's layers keep keys of an indexer, which are not supported in FP8"
        return None if self.attention_layers else "no layer of the model has keys and values"

    @property
    def q_size(self) -> int:
        return self.attention.q_size

    @property
    def kv_size(self) -> int:
        return self.attention.kv_size

    @property
    def experts(self) -> Experts | None:
        """The first mixture of experts of a layer; all are equal, but for `unbounded`. None where no layer has one."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)

    @property
    def streams(self) -> ResidualStreams | None:
        """The streams of the residual, in all layers; None where it is one."""
        return self.layers[0].streams

    @property
    def num_experts(self) -> int:
        """Experts of each layer that has any; 0 where none has."""
        return self.experts.count if self.experts else 0

    @property
    def intermediate_size(self) -> int:
        """Width of gated feed-forward parts; if no layer has one, of the experts that a token uses."""
        dense = (layer.dense.size for layer in self.layers if layer.dense is not None)
        return next(dense, self.experts.active_size if self.experts else 0)

    @property
    def window(self) -> int | None:
        """The smallest attention window of any layer; None where every layer sees all tokens."""
        return min((it.window for it in self.attention_layers if it.window is not None), default=None)

    @property
    def chunked(self) -> bool:
        """True if windows are chunks: see `AttentionSpec.chunked`."""
        return any(it.chunked for it in self.attention_layers)

    @property
    def max_context(self) -> int:
        """The most tokens of a request unless `max_model_len` asks for up to `max_position_embeddings`: within the
        original positions of longrope, other frequencies are better.
        """
        ropes = [it.rope for it in self.attention_layers]
        short = [rope.original_max_position_embeddings for rope in ropes if rope is not None and rope.short_factors]
        return min([self.max_position_embeddings, *short])

    def composed(self, layer: LayerSpec) -> Build:
        """A layer's ops, slots and projections. layer: one of these, or a rank's share of one."""
        return composed(layer, self.norm, self.hidden_size)

    @cached_property
    def split(self) -> Build:
        """What layers have before all of them: see `LayerSpec.begin`."""
        found = Build(self.hidden_size, self.norm)
        for layer in self._classes:
            layer.begin(found)
        return found

    @cached_property
    def join(self) -> Build:
        """What they have behind all of them: see `LayerSpec.finish`."""
        found = Build(self.hidden_size, self.norm)
        for layer in self._classes:
            layer.finish(found)
        return found

    @property
    def _classes(self) -> list[LayerSpec]:
        """Of each class of layers the last one."""
        return list({type(layer): layer for layer in self.layers}.values())

    @property
    def programs(self) -> list[LayerProgram]:
        """What each layer computes."""
        return [self.composed(layer).program for layer in self.layers]

    @cached_property
    def projections(self) -> Projections:
        """The projections that adapters may change. Of a rank's share, the head has room for the largest share."""
        return Projections(
            tuple(self.composed(layer).projections for layer in self.layers),
            model_projections(
                self.vocab_size, self.hidden_size, -(-self.vocab_size // self.num_ranks), self._per_layer_size
            ),
        )

    @property
    def stored_projections(self) -> list[Projection]:
        """Those of layers, each as often as a checkpoint has it: of a block that layers share, its first layer's."""
        pairs = enumerate(map(self.composed, self.layers))
        every = ((at, own.shared.get(each.product, at), each) for at, own in pairs for each in own.projections)
        return [each for at, first, each in every if at == first]

    @property
    def _per_layer_size(self) -> int:
        """Width of the per-layer embeddings of all layers."""
        return 0 if self.per_layer_embeddings is None else self.num_layers * self.per_layer_embeddings.size

    @cached_property
    def unit_rows(self) -> Mapping[str, UnitRows]:
        """Paths of projections whose rows the checkpoint has by unit in a tensor of several, and where."""
        return self.unit_rows_of(self.tensors)

    def unit_rows_of(self, tensors: TensorNames) -> Mapping[str, UnitRows]:
        """The same of a checkpoint by these names."""
        by_path = {projection.path: projection for projection in self.projections}
        found: dict[str, UnitRows] = {}
        for name in tensors.by_unit:
            parts = tensors.fused[name]
            if not by_path.keys().isdisjoint(parts):  # some models have none of them
                rows = unit_rows([by_path[part] for part in parts], tensors.units.get(name))
                found |= zip(parts, rows, strict=True)
        return found

    @cached_property
    def module_paths(self) -> ModulePaths:
        """Where adapters find these projections."""
        names, by_path = self.tensors.names, {projection.path: projection for projection in self.projections}
        fused = (
            (path, tuple((by_path[part].name, by_path[part].outputs) for part in parts))
            for path, parts in self.tensors.fused.items()
            if path not in self.tensors.separate and not by_path.keys().isdisjoint(parts)  # of projections
        )
        renamed = ((each.name, names[each.path]) for each in self.projections if each.path in names)
        biased = tuple(
            tuple(each.name for each in layer if each.path in self.composed(spec).biased)
            for layer, spec in zip(self.projections.layers, self.layers, strict=True)
        )
        experts = [each for each in self.projections if each.experts]
        each_path = {each.name: each.path.replace(".experts.", ".experts.{}.") for each in experts}
        return ModulePaths(
            self.projections,
            tuple(renamed),
            tuple(fused),
            self.tensors.left_out,
            around=tuple(dict.fromkeys((*AROUND, *filter(None, ".".join(self.tensors.prefixes).split("."))))),
            further=tuple(
                (by_path[path].name, name) for path, name in self.tensors.adapter_names.items() if path in by_path
            ),
            expert_names=tuple((name, names[path]) for name, path in each_path.items() if path in names),
            stacked_experts=tuple(
                (path, tuple(f"experts.{part}" for part in parts))
                for path, parts in self.tensors.stacked_experts.items()
                if experts and not self.tensors.flat
            ),
            stacked_alternate=self.tensors.alternates,
            stacked_sides=self.tensors.stacked_sides,
            layers=self.tensors.layers,
            embeddings=self.tensors.embeddings,
            places=tuple(layer.invocation for layer in self.layers),
            shared=self._shared,
            heads=tuple(head.removesuffix(".weight") for head in self.tensors.heads),
            head_has_bias=self.head_bias,
            norms_embeddings=self.embedding_rows_eps is not None,
            model_type=self.model_type,
            vocab_size=self.vocab_size,
            further_embeddings=self.further_embeddings,
            further_logits=self.further_logits,
            hidden_size=self.hidden_size,
            units=tuple(self.unit_rows.items()),
            absent=frozenset(each.name for each in self.projections if each.product in _BY_VERSION),
            biased=biased,
            is_tied=self.tie_word_embeddings,
            no_parameters=self.tensors.no_parameters,
            numbers=self.tensors.numbers,
            head_part=self.tensors.head_part,
            tower=self.tower,
            base_rows=self.base_rows,
            base_tokens=self.base_tokens,
        )

    @property
    def _shared(self) -> tuple[frozenset[str], ...]:
        """By layer, names of the projections that others share, too."""
        found = [self.composed(layer) for layer in self.layers]
        counts = Counter(first for own in found for first in {*own.shared.values()})
        several = [{slot for slot, first in own.shared.items() if counts[first] > 1} for own in found]
        pairs = zip(found, several, strict=True)
        return tuple(frozenset(each.name for each in own.projections if each.product in slots) for own, slots in pairs)

    def embedding_factor(self, dtype: torch.dtype) -> float:
        """`embedding_multiplier` as weights of a dtype have it."""
        import torch

        return float(torch.tensor(self.embedding_multiplier, dtype=dtype))

    def share(self, size: int) -> ModelConfig:
        """Shapes of one of `size` ranks' shares, which are equal."""
        return replace(self, layers=tuple(layer.share(size) for layer in self.layers), num_ranks=size)
