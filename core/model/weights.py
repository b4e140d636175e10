"""Weights of a checkpoint, handed out part by part as packed projections."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .checkpoint import Checkpoint
from .config import ModelConfig, UnsupportedModel
from .shard import WHOLE, Shard

logger = logging.getLogger(__name__)

#: Makes what is kept of a projection's weight `[out, in]`; the argument is overwritten by the next one.
Pack = Callable[[torch.Tensor], torch.Tensor]

EMBED, NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_LAYER = "model.layers.{}."
_IGNORED = re.compile(r"^model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq$")  # old Llama checkpoints


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. qkv: `[q + 2·kv, hidden]`; gate_up: `[2·ffn, hidden]`; o, down: `[hidden, in]`.

    Biases are as long as their projection has rows, q_norm and k_norm `[head_dim]`; None where the model has none.
    """

    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    attention_out_norm: torch.Tensor | None = None
    mlp_out_norm: torch.Tensor | None = None


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of `config` must have; a tied `lm_head.weight` is not among them."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, hidden), NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    biased = {"q_proj": config.qkv_bias, "k_proj": config.qkv_bias, "v_proj": config.qkv_bias, "o_proj": config.o_bias}
    for i in range(config.num_layers):
        at = _LAYER.format(i)
        shapes[at + "input_layernorm.weight"] = shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        for name, (d_in, d_out) in config.module_dims.items():
            part = "self_attn" if name in biased else "mlp"
            shapes[f"{at}{part}.{name}.weight"] = (d_out, d_in)
            if biased.get(name, config.mlp_bias):
                shapes[f"{at}{part}.{name}.bias"] = (d_out,)
        if config.qk_norm:
            shapes[at + "self_attn.q_norm.weight"] = shapes[at + "self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def num_weights(config: ModelConfig, shard: Shard = WHOLE) -> int:
    """Elements that a rank keeps of all tensors of `tensor_shapes`; the biases of o and down are the first rank's."""
    return sum(
        _shard_shape(shape, shard.of_tensor(name, config)).numel()
        for name, shape in tensor_shapes(config).items()
        if not (shard.rank and name.endswith(("o_proj.bias", "down_proj.bias")))
    )


def _shard_shape(shape: Sequence[int], of: Sequence[slice]) -> torch.Size:
    """Shape of these slices of a tensor; further dimensions are whole."""
    lengths = [len(range(*part.indices(length))) for part, length in zip(of, shape, strict=False)]
    return torch.Size((*lengths, *shape[len(of) :]))


class Weights(ABC):
    """Hands out a rank's share of a model's weights part by part, in `dtype`. config: the whole model's."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE) -> None:
        self._config = config
        self._dtype = dtype
        self._shard = shard
        self._shapes = tensor_shapes(config)
        self._embed_name = EMBED

    @property
    def num_bytes_kept(self) -> int:
        """Bytes that the weights take once they are read."""
        return sum(self._shape([name]).numel() for name in self._shapes) * self._dtype.itemsize

    def embed(self) -> torch.Tensor:
        """Token embeddings `[vocab, hidden]`."""
        return self._read(self._embed_name)

    def layers(self, pack: Pack | None = None) -> Iterator[LayerWeights]:
        """The layers in order. With `pack`, every projection is read into the same memory and packed out of it."""
        for i in range(self._config.num_layers):
            yield self._layer(_LAYER.format(i), pack)

    def norm(self) -> torch.Tensor:
        """The final norm `[hidden]`."""
        return self._read(NORM)

    def lm_head(self, embed: torch.Tensor) -> torch.Tensor:
        """The rank's rows of the output projection `[vocab, hidden]`; where the two are tied, of `embed`."""
        return self._read(LM_HEAD) if LM_HEAD in self._shapes else self._tied(embed)

    def _tied(self, embed: torch.Tensor) -> torch.Tensor:
        return embed if self._shard.size == 1 else embed[self._shard.of_vocab(self._config)]

    def _first_rank(self, name: str) -> torch.Tensor | None:
        """A tensor that only the first rank has."""
        return None if self._shard.rank else self._read(name)

    def _layer(self, at: str, pack: Pack | None) -> LayerWeights:
        """Ranks add up the outputs of o and down: the first has their biases."""
        config = self._config

        def projection(*names: str) -> torch.Tensor:
            names = tuple(f"{name}.weight" for name in names)
            return self._read(*names) if pack is None else pack(self._read(*names, reuse=True))

        q, k, v, o = (f"{at}self_attn.{name}_proj" for name in "qkvo")
        gate, up, down = (f"{at}mlp.{name}_proj" for name in ("gate", "up", "down"))
        return LayerWeights(
            attention_norm=self._read(at + "input_layernorm.weight"),
            qkv=projection(q, k, v),
            qkv_bias=self._read(*(f"{name}.bias" for name in (q, k, v))) if config.qkv_bias else None,
            q_norm=self._read(at + "self_attn.q_norm.weight") if config.qk_norm else None,
            k_norm=self._read(at + "self_attn.k_norm.weight") if config.qk_norm else None,
            o=projection(o),
            o_bias=self._first_rank(f"{o}.bias") if config.o_bias else None,
            mlp_norm=self._read(at + "post_attention_layernorm.weight"),
            gate_up=projection(gate, up),
            gate_up_bias=self._read(f"{gate}.bias", f"{up}.bias") if config.mlp_bias else None,
            down=projection(down),
            down_bias=self._first_rank(f"{down}.bias") if config.mlp_bias else None,
        )

    def _part(self, name: str) -> tuple[slice, ...]:
        """The rank's share of a tensor, by dimension; embeddings are whole, whatever their name."""
        return () if name == self._embed_name else self._shard.of_tensor(name, self._config)

    def _shape(self, names: Sequence[str]) -> torch.Size:
        """Shape of the rank's shares of tensors, stacked along their first dimension."""
        shapes = [_shard_shape(self._shapes[name], self._part(name)) for name in names]
        return torch.Size((sum(shape[0] for shape in shapes), *shapes[0][1:]))

    @abstractmethod
    def _read(self, *names: str, reuse: bool = False) -> torch.Tensor:
        """The rank's shares of tensors, stacked along their first dimension. reuse: the memory may be that of the last
        tensor so read.
        """


class WeightLoader(Weights):
    """Reads a checkpoint one part at a time, so that memory holds what was kept and little more than one projection.

    advance: called with the bytes read. Raises UnsupportedModel when made if a tensor is missing, of another shape or
    unknown: a weight that would go unused means that the model is not what its configuration says.
    """

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        advance: Callable[[int], None] = lambda _: None,
        shard: Shard = WHOLE,
    ) -> None:
        super().__init__(config, dtype, shard)
        self.advance = advance
        self._scratch = torch.empty(0, dtype=dtype)
        self._checkpoint = Checkpoint(directory)
        if config.tie_word_embeddings and LM_HEAD in self._checkpoint:
            if EMBED not in self._checkpoint:  # tied weights may be stored under either name
                self._embed_name = LM_HEAD
                del self._shapes[EMBED]
            self._shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
        self._checkpoint.check(self._shapes)
        for name in self._checkpoint.names():
            if name not in self._shapes and not _IGNORED.match(name):
                raise UnsupportedModel(f"{self._checkpoint[name].path}: tensor {name} has no place in this model")

    @property
    def num_bytes(self) -> int:
        """Bytes to read in all."""
        return sum(self._checkpoint[name].num_bytes for name in self._shapes)

    def lm_head(self, embed: torch.Tensor) -> torch.Tensor:
        tied = self._tied(embed)
        if self._embed_name == LM_HEAD:
            return tied
        head = super().lm_head(embed)
        if LM_HEAD in self._shapes and self._config.tie_word_embeddings:
            if torch.equal(head, tied):
                return tied
            logger.warning("tie_word_embeddings is true, but %s differs from %s; serving both", LM_HEAD, EMBED)
        return head

    def _read(self, *names: str, reuse: bool = False) -> torch.Tensor:
        """Each is read straight into its place."""
        shape = self._shape(names)
        if reuse:
            if self._scratch.numel() < shape.numel():
                self._scratch = torch.empty(0, dtype=self._dtype)  # gone before its successor comes
                self._scratch = torch.empty(shape.numel(), dtype=self._dtype)
            target = self._scratch[: shape.numel()].view(shape)
        else:
            target = torch.empty(shape, dtype=self._dtype)
        for name, part in zip(names, target.split([self._shape([name])[0] for name in names]), strict=True):
            self._checkpoint.read_into(part, name, self._part(name))
            self.advance(self._checkpoint[name].num_bytes)
        return target
