"""Weights of a model, handed out part by part as packed projections.

Tests: tests/core/model/test_weight_loader.py, tests/core/model/test_dummy_weights.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import linear

from ...memory.pages.projections import Group
from ...ops.elementwise import rms_norm
from ...ops.float8_kv import UNSCALED, KvScales
from ...ops.recurrent import RecurrentWeights
from .config import ModelConfig
from .experts import ExpertPack, ListedExperts
from .layer_weights import LayerWeights
from .layers import Experts, MixerBeside
from .narrow_bytes import bytes_saved_by_stacks
from .quantization.group_scaled import GroupScaled
from .quantization.groups import part_of, plain, stacked
from .quantization.round_to_nearest import RoundToNearest
from .quantization.rounded_inputs import Float8Inputs, RoundedInputs
from .recurrent import RecurrentSpec
from .shard import WHOLE, Part, Shard
from .tensor_names import CORRECTION
from .tensor_parts import (
    EMBED,
    EXPERT_FACTORS,
    INPUT_NORM,
    INPUT_PROJECTION,
    INPUT_TABLE,
    LAYER,
    LM_HEAD,
    LM_HEAD_BIAS,
    LOW_RANK_NORM,
    MEDIA_NORM,
    MEDIA_PROJECTION,
    MEDIA_ROWS,
    NORM,
    OUTPUT_GATE,
    OUTPUT_NORM,
    OUTPUT_PROJECTION,
    ROUTER,
    ROUTER_NORM,
    SCALAR,
    SHARED,
    SHARED_GATE,
    SINKS,
    STREAM_CORRECTION,
    STREAM_IN,
    STREAM_OUT,
    STREAM_PREDICTION,
    STREAM_ROUTER,
    STREAM_ROUTER_NORM,
    STREAM_SCALE,
    XIELU,
    bias_of,
    expert_inputs,
    kept_bytes,
    norms_of,
    shard_shape,
    tensor_shapes,
)

#: Makes the kept form of a projection's weight `[out, in]`; a tensor is overwritten by the next one.
Pack = Callable[[torch.Tensor | GroupScaled], Any]


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
        self._shapes = tensor_shapes(config)
        self._embed_name = EMBED

    @property
    def num_bytes_kept(self) -> int:
        """Bytes that the weights take once they are read, at least: stored values may have to be dequantised."""
        num_bytes = sum(map(self._dense_bytes, self._shapes))
        of = self._config, self._dtype.itemsize, self._shard
        if self.keeps is not None and self.quantiser is not None:
            num_bytes += kept_bytes(*of, self.quantiser) - kept_bytes(*of)
        if self.keeps is not None:
            num_bytes -= bytes_saved_by_stacks(*of, self.quantiser)
        return num_bytes

    @property
    def rounds_inputs(self) -> bool:
        """True if a CPU rounds activations for some projections."""
        return self.quantiser is not None and isinstance(self.quantiser.inputs, RoundedInputs)

    @property
    def asks_float8_inputs(self) -> bool:
        """True if the form of some projections asks for activations in FP8."""
        return self.quantiser is not None and isinstance(self.quantiser.inputs, Float8Inputs)

    float8_inputs = False
    """Activations are rounded to FP8 for the projections whose form asks for it."""

    def _dense_bytes(self, name: str) -> int:
        """Bytes of the rank's share of a part, dequantised."""
        return self._shape([name]).numel() * self._dtype.itemsize

    def embed(self) -> torch.Tensor:
        """Token embeddings `[vocab, hidden]`."""
        return self._read(self._embed_name)

    keeps: Callable[[GroupScaled], bool] | None = None
    """Which projections that are stored as narrow values with scales are packed as such; None: all are dequantised."""

    def layers(self, pack: Pack | None = None, pack_expert: ExpertPack | None = None) -> Iterator[LayerWeights]:
        """The layers in order. With `pack`, every projection is read into the same memory and packed out of it; with
        `pack_expert`, every matrix of experts is packed before the next one is read.
        """
        for i in range(self._config.num_layers):
            yield self._layer(i, pack, pack_expert)

    def layer_inputs(self, pack: Pack | None = None) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """The table, the projection and the norm of `LayerInputs`, for a model that has them."""
        return self._read(INPUT_TABLE), self._whole(INPUT_PROJECTION, pack), self._norm(INPUT_NORM)

    def media(self) -> torch.Tensor | None:
        """Embeddings of `ModelConfig.media`, `[tokens, hidden]`; None where there are none."""
        found = []
        for each in self._config.media:
            rows = self._read(MEDIA_ROWS.format(each.module))[: each.count]
            rows = rms_norm(rows, self._norm(MEDIA_NORM.format(each.module)), each.eps)
            rows = linear(rows, self._read(MEDIA_PROJECTION.format(each.module)))
            found.append(rms_norm(rows, torch.ones(rows.shape[1], device=rows.device), each.eps))
        return torch.cat(found) if found else None

    def streams(self, pack: Pack | None = None) -> tuple[list[Any], list[Any]]:
        """The matrices that make all streams but the first of embeddings, and those that streams go through behind all
        layers; none for a model of one stream.
        """
        others = range(0 if self._config.streams is None else self._config.streams.count - 1)
        made, joined = ([self._whole(name.format(at), pack) for at in others] for name in (STREAM_IN, STREAM_OUT))
        return made, joined

    def projection(self, layer: int, path: str) -> torch.Tensor:
        """One projection's weight `[out, in]`, dequantised, in memory of its own."""
        return self._projection([f"{LAYER.format(layer)}{path}.weight"], None)

    def bias(self, layer: int, path: str) -> torch.Tensor:
        """One projection's bias `[out]`, which it must have."""
        return self._read(f"{LAYER.format(layer)}{path}.bias")

    def kv_scales(self) -> list[KvScales]:
        """The scales of an FP8 KV cache, of each layer with attention."""
        return [UNSCALED] * len(self._config.kv_layers)

    def norm(self) -> torch.Tensor:
        """The final norm `[hidden]`."""
        return self._norm(NORM)

    def lm_head(self, embed: torch.Tensor) -> torch.Tensor:
        """The rank's rows of the output projection `[vocab, hidden]`; where the two are tied, of `embed`."""
        return self._read(LM_HEAD) if LM_HEAD in self._shapes else self._tied(embed)

    def kept_lm_head(self, embed: torch.Tensor) -> torch.Tensor | GroupScaled:
        """The output projection, quantised if the quantiser's setting says so."""
        head = self.lm_head(embed)
        if self.quantiser is None or not self.quantiser.lm_head:
            return head
        return self.quantiser(head, LM_HEAD, self.quantises_on)

    def lm_head_bias(self) -> torch.Tensor | None:
        """The bias of the rank's rows of the output projection, `[vocab]` float32; None: there is none."""
        return self._read(LM_HEAD_BIAS, dtype=torch.float32) if LM_HEAD_BIAS in self._shapes else None

    def _tied(self, embed: torch.Tensor) -> torch.Tensor:
        return embed if self._shard.size == 1 else embed[self._shard.of_vocab(self._config)]

    def _norm(self, name: str) -> torch.Tensor:
        """A norm's weight, in float32 where products with it are rounded once; with a bias `[2, hidden]` of both."""
        spec = self._config.norm
        if spec.weightless:
            return torch.ones(self._config.hidden_size, dtype=torch.float32 if spec.wide else self._dtype)
        weight = self._read(name)
        weight = weight.float() if spec.wide else weight
        weight = weight + 1 if spec.one_plus else weight
        bias = bias_of(name)
        return torch.stack((weight, self._read(bias).float())) if bias in self._shapes else weight

    def _first_rank(self, name: str) -> torch.Tensor | None:
        """A tensor that only the first rank has."""
        return None if self._shard.rank else self._read(name)

    def _layer(self, index: int, pack: Pack | None, pack_expert: ExpertPack | None) -> LayerWeights:
        """Ranks add up the outputs of o and down: the first has their biases."""
        at, spec, hidden = LAYER.format(index), self._config.layers[index], self._config.hidden_size

        def projection(*names: str) -> Any:
            return self._projection([f"{at}{name}.weight" for name in names], pack)

        def norm(name: str) -> torch.Tensor | None:
            return self._norm(f"{at}{name}.weight") if name in norms or f"{at}{name}.weight" in self._shapes else None

        def part(name: str) -> torch.Tensor | None:
            return self._read(at + name) if at + name in self._shapes else None

        def bias(*names: str) -> torch.Tensor | None:
            return self._biases([f"{at}{name}" for name in names])

        def first_rank_bias(name: str) -> torch.Tensor | None:
            return self._first_rank(f"{at}{name}.bias") if f"{at}{name}.bias" in self._shapes else None

        paths: dict[Group, list[str]] = {}
        for each in spec.projections(hidden):
            paths.setdefault(each.group, []).append(each.path)
        inputs, outputs = paths.get(Group.MIXER_IN, []), paths.get(Group.MIXER_OUT, [])
        gate_up, second = paths.get(Group.GATE_UP, []), spec.mixer_beside
        second_in, second_out = paths.get(Group.BESIDE_IN, []), paths.get(Group.BESIDE_OUT, [])
        norms, nothing = norms_of(spec), torch.empty(0, dtype=self._dtype)
        return LayerWeights(
            attention_norm=norm("attention_norm"),
            qkv=projection(*inputs) if inputs else nothing,
            qkv_bias=bias(*inputs),
            q_norm=norm("self_attn.q_norm"),
            k_norm=norm("self_attn.k_norm"),
            q_up=projection(*paths[Group.QUERY_UP]) if Group.QUERY_UP in paths else None,
            kv_up=self.projection(index, *paths[Group.KV_UP]) if Group.KV_UP in paths else None,
            sinks=part(SINKS),
            decay_up=projection(*paths[Group.DECAY_UP]) if Group.DECAY_UP in paths else None,
            output_gate_up=projection(*paths[Group.OUTPUT_GATE_UP]) if Group.OUTPUT_GATE_UP in paths else None,
            input_gate=projection(OUTPUT_GATE) if spec.input_size else None,
            input_projection=projection(OUTPUT_PROJECTION) if spec.input_size else None,
            input_norm=norm(OUTPUT_NORM),
            scalar=self._read(at + SCALAR) if spec.scaled else None,
            beside_in=projection(*second_in) if second_in else None,
            beside_in_bias=bias(*second_in),
            beside_factors=None if second is None else self._column_factors(second),
            beside_out=projection(*second_out) if second_out else None,
            beside_out_bias=first_rank_bias(*second_out) if second_out else None,
            low_rank_down=projection(*paths[Group.LOW_RANK_DOWN]) if spec.streams else None,
            low_rank_up=projection(*paths[Group.LOW_RANK_UP]) if spec.streams else None,
            low_rank_norm=norm(LOW_RANK_NORM),
            stream_router=part(STREAM_ROUTER),
            stream_router_norm=self._router_norm(at + STREAM_ROUTER_NORM, hidden**-1.0) if spec.streams else None,
            stream_prediction=part(STREAM_PREDICTION),
            stream_correction=part(STREAM_CORRECTION),
            stream_scale=part(STREAM_SCALE) if spec.streams and spec.streams.scaled else None,
            recurrent=None if spec.recurrent is None else self._recurrent(at, spec.recurrent),
            o=projection(*outputs) if outputs else nothing,
            o_bias=first_rank_bias(*outputs) if outputs else None,
            attention_out_norm=norm("attention_out_norm"),
            mlp_norm=norm("mlp_norm"),
            gate_up=nothing if spec.dense is None else projection(*gate_up),
            gate_up_bias=bias(*gate_up) if gate_up else None,
            xielu=self._xielu(at),
            down=nothing if spec.dense is None else projection("mlp.down_proj"),
            down_bias=first_rank_bias("mlp.down_proj"),
            mlp_out_norm=norm("mlp_out_norm"),
            dense_out_norm=norm("dense_out_norm"),
            experts_norm=norm("experts_norm"),
            experts_out_norm=norm("experts_out_norm"),
            router_norm=None if spec.beside is None else self._router_norm(at + ROUTER_NORM, hidden**-0.5),
            experts=None if spec.experts is None else self._experts(at, spec.experts, pack_expert),
        )

    def _column_factors(self, second: MixerBeside) -> torch.Tensor | None:
        """See `MixerBeside.column_factors`; the rank's."""
        return second.share(self._shard.size).column_factors(self._config.hidden_size)

    def _biases(self, paths: Sequence[str]) -> torch.Tensor | None:
        """The biases of projections one below the other, 0 for those without; None if none has any."""
        names = [f"{path}.bias" for path in paths]
        biased = [name for name in names if name in self._shapes]
        if len(biased) == len(names):
            return self._read(*names) if names else None
        if not biased:
            return None
        found = {name: self._read(name) for name in biased}
        rows = [self._shape([f"{path}.weight"])[0] for path in paths]
        absent = next(iter(found.values())).new_zeros(max(rows))
        return torch.cat([found.get(name, absent[:count]) for name, count in zip(names, rows, strict=True)])

    def _router_norm(self, name: str, factor: float) -> torch.Tensor:
        """The norm of a router's input, with the factor of what is normed."""
        return self._read(name, dtype=torch.float32) * factor

    def _xielu(self, at: str) -> torch.Tensor | None:
        """The parameters of a layer's activation; None if that has none."""
        names = [at + name for name in XIELU]
        return self._read(*names, dtype=torch.float32) if names[0] in self._shapes else None

    def _experts(self, at: str, spec: Experts, pack: ExpertPack | None) -> ListedExperts:
        """A layer's experts; their router is float32 whatever the model's dtype. See `_layer`
        for biases of down.
        """

        def matrix(path: str, *names: str) -> Any:
            names = tuple(f"{at}{path}.{name}.weight" for name in names)
            return self._projection(names, None) if pack is None else pack(self._expert(names, pack.keeps))

        def biases(*names: str, first_rank: bool = False) -> list[torch.Tensor] | None:
            if not spec.biased or (first_rank and self._shard.rank):
                return None
            return [self._read(*(f"{at}{path}.{name}.bias" for name in names)) for path in paths]

        paths, inputs = [f"mlp.experts.{number}" for number in range(spec.count)], expert_inputs(spec)
        return ListedExperts(
            router=self._read(f"{at}{ROUTER}.weight", dtype=torch.float32),
            gate_up=[matrix(path, *inputs) for path in paths],
            down=[matrix(path, "down_proj") for path in paths],
            correction=self._read(at + CORRECTION, dtype=torch.float32).flatten() if spec.routing.corrected else None,
            factors=self._read(at + EXPERT_FACTORS, dtype=torch.float32) if spec.routing.scaled else None,
            shared_gate_up=matrix(SHARED, *inputs) if spec.shared_size else None,
            shared_down=matrix(SHARED, "down_proj") if spec.shared_size else None,
            shared_gate=self._read(f"{at}{SHARED_GATE}.weight", dtype=torch.float32) if spec.shared_gate else None,
            router_bias=self._read(f"{at}{ROUTER}.bias", dtype=torch.float32) if spec.routing.bias else None,
            gate_up_bias=biases(*inputs),
            down_bias=biases("down_proj", first_rank=True),
        )

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
                start, stop, _ = rows.indices(self._shapes[name][0])
                shares.append(part_of(whole, slice(first + start, first + stop), columns))
            first += self._shapes[name][0]
        return stacked(shares)

    def _recurrent(self, at: str, spec: RecurrentSpec) -> RecurrentWeights:
        """The tensors of a mixer other than its projections, in float32 whatever the model's dtype."""
        tensors = {path: self._read(at + path, dtype=torch.float32) for path in spec.tensors}
        return spec.share(self._shard.size).weights(tensors)

    def _parts(self, name: str) -> tuple[Part, ...]:
        """The rank's share of a tensor; embeddings are whole, whatever their name."""
        return ((),) if name == self._embed_name else self._shard.of_tensor(name, self._config)

    def _shape(self, names: Sequence[str], whole: bool = False) -> torch.Size:
        """Shape of the rank's shares of tensors, or of whole ones, stacked along their first dimension."""
        shapes = [shard_shape(self._shapes[name], ((),) if whole else self._parts(name)) for name in names]
        return torch.Size((sum(shape[0] for shape in shapes), *shapes[0][1:]))

    @abstractmethod
    def _read(
        self, *names: str, reuse: bool = False, dtype: torch.dtype | None = None, whole: bool = False
    ) -> torch.Tensor:
        """The rank's shares of tensors, stacked along their first dimension. reuse: the memory may be that of the last
        tensor so read. dtype: None: the model's. whole: all ranks' shares.
        """
