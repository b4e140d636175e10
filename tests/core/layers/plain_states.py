"""The states of a step's sequences as tensors of their own, without pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from chorus.core.model.specs.config import ModelConfig
from chorus.ops.mixers.recurrent import RecurrentState, RecurrentWeights


class PlainStates:
    """States of sequences by their names: zeros where a name is new."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.recurrent is not None
        self._spec = config.recurrent
        self._layers = [index for index, layer in enumerate(config.layers) if layer.recurrent]
        self._kept: dict[str, Mapping[int, RecurrentState]] = {}

    def step(self, names: Sequence[str], qo_indptr: Sequence[int]) -> StepStates:
        """For a step of these sequences."""
        for name in names:
            self._kept.setdefault(name, {layer: self._zeros() for layer in self._layers})
        return StepStates([self._kept[name] for name in names], qo_indptr)

    def _zeros(self) -> RecurrentState:
        conv, recurrent = (torch.zeros(1, *each) for each in (self._spec.conv_shape, self._spec.recurrent_shape))
        return RecurrentState(conv, recurrent, fresh=torch.ones(1, dtype=torch.bool))


class StepStates:
    """States of a step's sequences; see `core.model.batch.StepStates`."""

    def __init__(self, sequences: Sequence[Mapping[int, RecurrentState]], qo_indptr: Sequence[int]) -> None:
        self._sequences, self._qo_indptr = sequences, qo_indptr

    def mix(self, layer: int, mixed: torch.Tensor, weights: RecurrentWeights, ranks: None) -> torch.Tensor:
        state = self._of(layer)
        out = weights.mix(mixed, state, self._qo_indptr, ranks=ranks)
        self._write(layer, state)
        return out

    def _of(self, layer: int) -> RecurrentState:
        states = [sequence[layer] for sequence in self._sequences]
        conv, recurrent, fresh = (
            torch.cat([getattr(state, name) for state in states]) for name in ("conv", "recurrent", "fresh")
        )
        return RecurrentState(conv, recurrent, fresh=fresh)

    def _write(self, layer: int, state: RecurrentState) -> None:
        for index, sequence in enumerate(self._sequences):
            own = state.of(slice(index, index + 1))
            sequence[layer].conv.copy_(own.conv)
            sequence[layer].recurrent.copy_(own.recurrent)
            sequence[layer].fresh.copy_(own.fresh)
