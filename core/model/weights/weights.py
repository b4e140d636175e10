"""Weights of a model, handed out part by part as packed projections.

Tests: tests/core/model/weights/test_weight_loader.py, tests/core/model/weights/test_dummy_weights.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from ....ops.elementwise.elementwise import rms_norm
from ....ops.elementwise.float8_kv import UNSCALED, KvScales
from ..checkpoints.quantization.group_scaled import GroupScaled
from ..checkpoints.quantization.groups import part_of, plain, stacked
from ..checkpoints.quantization.round_to_nearest import RoundToNearest
from ..checkpoints.quantization.rounded_inputs import Float8Inputs, RoundedInputs
from ..moe.experts import ExpertPack
from ..specs.config import ModelConfig
from ..specs.norms import NormSpec
from ..specs.positions import sinusoids
from .layer_weights import LayerWeights, PartWeights
from .narrow_bytes import kept_bytes
from .row_table import RowTable
from .shard import WHOLE, Shard
from .slot import Keep, Part, Slot, SlotTensor, shard_shape
from .tensor_parts import (
    EMBED,
    EMBED_NORM,
    EMBED_SCALES,
    LAYER,
    LM_HEAD,
    LM_HEAD_BIAS,
    MEDIA_NORM,
    MEDIA_PROJECTION,
    MEDIA_ROWS,
    MODEL,
    NORM,
    PER_LAYER_NORM,
    PER_LAYER_PROJECTION,
    PER_LAYER_TABLE,
    POSITIONS,
    ROPE_FACTORS,
    bias_of,
    end_slots,
    parts_of,
)
from .weight_plan import LEFT, WeightPlan

#: Makes the kept form of a projection's weight `[out, in]`; a tensor is overwritten by the next one.
Pack = Callable[[torch.Tensor | GroupScaled], Any]


#: Rows of embeddings that are normalised at a time.
_ROWS = 4096


class Weights(ABC):
    """Hands out a rank's share of a model's weights part by part, in `dtype`. config: the whole model's.

    With a `quantiser`, projections are quantised: whole, so that ranks have parts of the same weights.
    """

    quantiser: RoundToNearest | None = None

    quantises_on: torch.device | str = "cpu"
    """The device on which they are quantised, and stay if they are kept so."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE) -> None:
        self._config = config
        self._dtype = dtype
        self._shard = shard
        self._tensors = parts_of(config)
        self._embed_name = EMBED
        self._shared: dict[tuple[int | None, str], Any] = {}  # by layer and slot, what further layers read again

    @property
    def num_bytes_kept(self) -> int:
        """Bytes that the weights take once they are read."""
        return kept_bytes(self._config, self._dtype.itemsize, self.plan, self._shard, self.quantiser)

    @property
    def rounds_inputs(self) -> bool:
        """True if a CPU rounds activations for some projections."""
        return self.quantiser is not None and isinstance(self.quantiser.inputs, RoundedInputs)

    @property
    def asks_float8_inputs(self) -> bool:
        """True if the form of some projections asks for activations in FP8."""
        return self.quantiser is not None and isinstance(self.quantiser.inputs, Float8Inputs)

    def embed(self) -> torch.Tensor:
        """Token embeddings `[vocab, hidden]`."""
        rows = self._read(self._embed_name)
        if (eps := self._config.embedding_rows_eps) is not None:
            weight = self._read(EMBED_NORM) if self._config.embedding_rows_scaled else None
            for some in rows.split(_ROWS):  # in place: the table is large
                some.copy_(rms_norm(some.float(), torch.ones(some.shape[1], device=some.device), eps))
                if weight is not None:
                    some.mul_(weight)
        return rows

    plan: WeightPlan = LEFT
    """How matrices are kept: those that stay narrow are read as they are stored."""

    def layers(self, pack: Pack | None = None, pack_expert: ExpertPack | None = None) -> Iterator[LayerWeights]:
        """The layers in order. With `pack`, every projection is read into the same memory and packed out of it; with
        `pack_expert`, every matrix of experts is packed before the next one is read.
        """
        for i in range(self._config.num_layers):
            yield self._layer(i, pack, pack_expert)

    def per_layer_embeddings(self, pack: Pack | None = None) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """The table, the projection and the norm of per-layer embeddings, for a model whose layers have them."""
        return self._read(PER_LAYER_TABLE), self._whole(PER_LAYER_PROJECTION, pack), self._norm(PER_LAYER_NORM)

    def position_table(self) -> torch.Tensor | None:
        """Position embeddings `[positions, hidden]`, from position 0 on; None: the model has none."""
        if (table := self._config.position_table) is None:
            return None
        every = (
            sinusoids(table.first + table.rows, self._config.hidden_size) if table.is_made else self._read(POSITIONS)
        )
        return every[table.first :].to(self._dtype)

    def rope_factors(self) -> torch.Tensor | None:
        """Learned factors of the rope's frequencies `[dim / 2]` float32; None: there are none."""
        return self._read(ROPE_FACTORS, dtype=torch.float32).exp() if ROPE_FACTORS in self._tensors else None

    def media(self) -> torch.Tensor | None:
        """Embeddings of `ModelConfig.media`, `[tokens, hidden]`; None where there are none."""
        found = []
        for each in self._config.media:
            rows = self._read(MEDIA_ROWS.format(each.module))[: each.count]
            rows = rms_norm(rows, self._norm(MEDIA_NORM.format(each.module)), each.eps)
            rows = linear(rows, self._read(MEDIA_PROJECTION.format(each.module)))
            found.append(rms_norm(rows, torch.ones(rows.shape[1], device=rows.device), each.eps))
        return torch.cat(found) if found else None

    def ends(self, pack: Pack | None = None) -> LayerWeights:
        """Weights, by slot, of what layers have before all of them, and behind."""
        return {slot.name: self._slot(MODEL, slot, pack, None) for slot in end_slots(self._config)}

    def embed_scales(self) -> torch.Tensor | None:
        """The learned factor and summand of embeddings, `[2, hidden]`; None where there are none."""
        if not self._config.scales_embeddings:
            return None
        return self._read(*EMBED_SCALES).view(2, -1)

    def projection(self, layer: int, path: str) -> torch.Tensor:
        """One projection's weight `[out, in]`, dequantised, in memory of its own."""
        return self._projection([f"{self._at(layer, f'{path}.weight')}{path}.weight"], None)

    def bias(self, layer: int, path: str) -> torch.Tensor:
        """One projection's bias `[out]`, which it must have."""
        return self._read(f"{self._at(layer, f'{path}.bias')}{path}.bias")

    def _at(self, layer: int, path: str) -> str:
        """The beginning of the name of a layer's part: of the first layer, where several share it."""
        slots = self._config.composed(self._config.layers[layer]).slots
        every = ((slot, part) for slot in slots for part in slot.tensors)
        shared = next((slot.shared for slot, part in every if part.path == path), None)
        return LAYER.format(layer if shared is None else shared)

    def kv_scales(self) -> list[KvScales]:
        """The scales of an FP8 KV cache, of each layer with attention."""
        return [UNSCALED] * len(self._config.kv_layers)

    def norm(self) -> torch.Tensor:
        """The final norm `[hidden]`."""
        return self._norm(NORM, self._config.final_norm)

    def embedding_norm(self) -> torch.Tensor | None:
        """The norm of embeddings, as `norm`; None: the model has none."""
        return self._norm(EMBED_NORM) if self._config.embedding_norm else None

    def lm_head(self, embed: torch.Tensor) -> torch.Tensor:
        """The rank's rows of the output projection `[vocab, hidden]`; where the two are tied, of `embed`."""
        return self._read(LM_HEAD) if LM_HEAD in self._tensors else self._tied(embed)

    def quantised_head(self, embed: torch.Tensor) -> torch.Tensor | GroupScaled:
        """The output projection, quantised if the quantiser's setting says so."""
        head = self.lm_head(embed)
        if self.quantiser is None or not self.quantiser.lm_head:
            return head
        return self.quantiser(head, LM_HEAD, self.quantises_on)

    def lm_head_bias(self) -> torch.Tensor | None:
        """The bias of the rank's rows of the output projection, `[vocab]` float32; None: there is none."""
        return self._read(LM_HEAD_BIAS, dtype=torch.float32) if LM_HEAD_BIAS in self._tensors else None

    def _tied(self, embed: torch.Tensor) -> torch.Tensor:
        return embed if self._shard.size == 1 else embed[self._shard.of_vocab(self._config)]

    def _norm(self, name: str, of: NormSpec | None = None, width: int | None = None) -> torch.Tensor:
        """A norm's weight, in float32 where products with it are rounded once; with a bias `[2, hidden]` of both. Ones
        where no checkpoint has it, `width` of them, or as many as the residual stream is wide.
        """
        spec = of or self._config.norm
        if name not in self._tensors:
            width = width or self._config.hidden_size
            return torch.ones(width, dtype=torch.float32 if spec.wide else self._dtype)
        weight = self._read(name)
        weight = weight.float() if spec.wide else weight
        weight = weight + 1 if spec.one_plus else weight
        bias = bias_of(name)
        return torch.stack((weight, self._read(bias).float())) if bias in self._tensors else weight

    def _layer(self, index: int, pack: Pack | None, pack_expert: ExpertPack | None) -> LayerWeights:
        at, layer = LAYER.format(index), self._config.composed(self._config.layers[index])
        found: dict[str, Any] = {}
        own: dict[str, dict[str, Any]] = {part: {} for part in layer.parts}
        for slot in layer.slots:
            if slot.shared not in (None, index):
                value = self._shared[slot.shared, slot.name]
            else:
                value = self._slot(at, slot, pack, pack_expert)
            if slot.shared == index:
                self._shared[index, slot.name] = value
            if value is not None:
                part, _, name = slot.name.partition(".")
                (own[part] if name else found)[name or part] = value
        parts: dict[str, Any] = {}
        for part, made in layer.parts.items():
            if own[part]:
                parts[part] = made(PartWeights(own[part], parts, self._shard.size, partial(self._beside, at)))
        return found | parts

    def _slot(self, at: str, slot: Slot, pack: Pack | None, pack_expert: ExpertPack | None) -> Any:
        """What a layer whose parts' names begin with `at` has in a slot; None if another rank has it, or none."""
        if slot.keep is Keep.UNUSED:
            return None
        if slot.first_rank and self._shard.rank:
            return self._left_out(at, slot)
        if slot.count:
            return [self._weight(at, slot, each, pack, pack_expert) for each in slot.items]
        return self._weight(at, slot, slot.tensors, pack, pack_expert)

    def _weight(
        self, at: str, slot: Slot, tensors: Sequence[SlotTensor], pack: Pack | None, pack_expert: ExpertPack | None
    ) -> Any:
        names = [at + each.path for each in tensors]
        match slot.keep:
            case Keep.MATRIX:
                return self._projection(names, pack)
            case Keep.WHOLE:
                return self._whole(names[0], pack)
            case Keep.EXPERT if pack_expert is not None:
                return pack_expert(self._expert(names, pack_expert.keeps))
            case Keep.EXPERT | Keep.DENSE:
                return self._projection(names, None)
            case Keep.TABLE:
                return RowTable(self._table(names[0]))
            case Keep.NORM if slot.factor is not None:
                return self._read(*names, dtype=torch.float32) * slot.factor
            case Keep.NORM:
                return self._norm(names[0], width=tensors[0].shape[0])
            case Keep.PLAIN | Keep.FLOAT32 if any(each.made for each in tensors):
                return self._partly_made(at, tensors)
        return self._read(*names, dtype=torch.float32 if slot.keep is Keep.FLOAT32 else None)

    def _beside(self, at: str, path: str, module: str, name: str) -> torch.Tensor | None:
        """A tensor that no slot has, whole and as it is stored, beside a module around that of a slot's tensor; None if
        there is none.

        at: the beginning of names in the layer. path: of the slot's tensor.
        """
        del at, path, module, name
        return None

    def _table(self, name: str) -> tuple[torch.Tensor, ...]:
        """A tensor whose rows steps fetch, in parts one below the other."""
        return (self._read(name).cpu(),)

    def _partly_made(self, at: str, tensors: Sequence[SlotTensor]) -> torch.Tensor:
        """Vectors one below the other, some of which no checkpoint has; float32 if it has none of them."""
        found = [None if each.made else self._read(at + each.path) for each in tensors]
        like = next((each for each in found if each is not None), torch.empty(0))
        pairs = zip(found, tensors, strict=True)
        return torch.cat([self._made(tensor, like) if each is None else each for each, tensor in pairs])

    def _made(self, tensor: SlotTensor, like: torch.Tensor) -> torch.Tensor:
        """The rank's share of numbers that no checkpoint has."""
        return like.new_tensor(tensor.numbers(self._shard.rank, self._shard.size))

    def _left_out(self, at: str, slot: Slot) -> None:
        """What other ranks have of a slot that only the first rank has: nothing."""
        return

    def _whole(self, name: str, pack: Pack | None) -> Any:
        """A matrix of the model that is not quantised, as projections are kept."""
        return self._read(name) if pack is None else pack(self._read(name))

    def _projection(self, names: Sequence[str], pack: Pack | None) -> Any:
        """The rank's shares of projections, one below the other, as they are kept."""
        if self.quantiser is None:
            return self._read(*names) if pack is None else pack(self._read(*names, reuse=True))
        found = self._quantised_shares(self.quantiser, names)
        return plain(found, self._dtype) if pack is None else pack(found)

    def _expert(self, names: Sequence[str], keeps: Callable[[GroupScaled], bool] | None) -> torch.Tensor | GroupScaled:
        """The rank's shares of an expert's projections, one below the other: narrow values if `keeps` says so of them.
        Activations that go to experts are not rounded.
        """
        if self.quantiser is None or keeps is None:
            return self._projection(names, None)
        found = self._quantised_shares(self.quantiser, names)
        return replace(found, inputs=None) if keeps(found) else plain(found, self._dtype)

    def _quantised_shares(self, quantiser: RoundToNearest, names: Sequence[str]) -> GroupScaled:
        """The rank's shares of projections, one below the other."""
        dense = self._read(*names, reuse=True, whole=True)
        whole, shares, first = quantiser(dense, names[0], self.quantises_on), [], 0
        if self._shard.size == 1:
            return whole
        for name in names:
            for part in self._parts(name):
                rows, columns = (*part, slice(None), slice(None))[:2]
                start, stop, _ = rows.indices(self._tensors[name].shape[0])
                shares.append(part_of(whole, slice(first + start, first + stop), columns))
            first += self._tensors[name].shape[0]
        return stacked(shares)

    def _parts(self, name: str) -> tuple[Part, ...]:
        """The rank's share of a tensor; embeddings are whole, whatever their name."""
        if name == self._embed_name:
            return ((),)
        return self._tensors[name].share(self._shard.rank, self._shard.size)

    def _shape(self, names: Sequence[str], whole: bool = False) -> torch.Size:
        """Shape of the rank's shares of tensors, or of whole ones, stacked along their first dimension."""
        shapes = [shard_shape(self._tensors[name].shape, ((),) if whole else self._parts(name)) for name in names]
        return torch.Size((sum(shape[0] for shape in shapes), *shapes[0][1:]))

    @abstractmethod
    def _read(
        self, *names: str, reuse: bool = False, dtype: torch.dtype | None = None, whole: bool = False
    ) -> torch.Tensor:
        """The rank's shares of tensors, stacked along their first dimension. reuse: the memory may be that of the last
        tensor so read. dtype: None: the model's. whole: all ranks' shares.
        """
