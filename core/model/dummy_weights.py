"""Random weights made from a configuration alone, on the device: a model of true size without a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from .config import ModelConfig
from .weights import LayerWeights, Pack, tensor_shapes

#: The output projection is this much larger than the others, so that greedy choices are clear ones.
_HEAD_GAIN = 4.0


class DummyWeights:
    """Seeded random weights behind `WeightLoader`'s interface: projections N(0, 1/in), norms in 0.75 … 1.25."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> None:
        self._config = config
        self._options = {"dtype": dtype, "device": device}
        self._generator = torch.Generator(device).manual_seed(seed)

    @property
    def num_bytes_kept(self) -> int:
        """Bytes that the weights take."""
        return sum(math.prod(shape) for shape in tensor_shapes(self._config).values()) * self._options["dtype"].itemsize

    def embed(self) -> torch.Tensor:
        """Token embeddings `[vocab, hidden]`."""
        return self._projection(self._config.vocab_size, self._config.hidden_size)

    def layers(self, pack: Pack | None = None) -> Iterator[LayerWeights]:
        """The layers in order, projections packed with `pack`."""
        config = self._config
        hidden, ffn, rows = config.hidden_size, config.intermediate_size, config.q_size + 2 * config.kv_size

        def projection(d_out: int, d_in: int) -> torch.Tensor:
            weight = self._projection(d_out, d_in)
            return weight if pack is None else pack(weight)

        for _ in range(config.num_layers):
            yield LayerWeights(
                input_norm=self._norm(hidden),
                qkv=projection(rows, hidden),
                qkv_bias=self._bias(rows, config.qkv_bias),
                q_norm=self._norm(config.head_dim) if config.qk_norm else None,
                k_norm=self._norm(config.head_dim) if config.qk_norm else None,
                o=projection(hidden, config.q_size),
                o_bias=self._bias(hidden, config.o_bias),
                post_attention_norm=self._norm(hidden),
                gate_up=projection(2 * ffn, hidden),
                gate_up_bias=self._bias(2 * ffn, config.mlp_bias),
                down=projection(hidden, ffn),
                down_bias=self._bias(hidden, config.mlp_bias),
            )

    def norm(self) -> torch.Tensor:
        """The final norm `[hidden]`."""
        return self._norm(self._config.hidden_size)

    def lm_head(self, embed: torch.Tensor) -> torch.Tensor:
        """The output projection `[vocab, hidden]`: `embed` itself when the two are tied."""
        if self._config.tie_word_embeddings:
            return embed
        return self._projection(self._config.vocab_size, self._config.hidden_size, _HEAD_GAIN)

    def _projection(self, d_out: int, d_in: int, gain: float = 1.0) -> torch.Tensor:
        weight = torch.empty(d_out, d_in, **self._options)
        return weight.normal_(0, gain / math.sqrt(d_in), generator=self._generator)

    def _bias(self, length: int, wanted: bool) -> torch.Tensor | None:
        if not wanted:
            return None
        return torch.empty(length, **self._options).normal_(0, 0.02, generator=self._generator)

    def _norm(self, length: int) -> torch.Tensor:
        return torch.empty(length, **self._options).uniform_(0.75, 1.25, generator=self._generator)
