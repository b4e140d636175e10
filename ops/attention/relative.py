"""Learned numbers that are added to scores by the distance of key and query (Inkling), by PyTorch's operators.

Tests: tests/ops/attention/test_relative.py
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Relative(NamedTuple):
    """What a layer adds to scores: of each query and distance, a product of the query's state and of a profile."""

    states: torch.Tensor
    """`[tokens, heads, dim]`, or `[rows, heads, tokens, dim]`."""

    profiles: torch.Tensor
    """`[dim, distances]`: nothing is added to the scores of keys that are farther away."""

    def of_chunk(self, tokens: slice) -> Relative:
        """Of the tokens of one row."""
        return self._replace(states=self.states[tokens].transpose(0, 1)[None])

    def of_rows(self, first: int) -> Relative:
        """Of rows of one token each, from the token `first` on."""
        return self._replace(states=self.states[first:].unsqueeze(2))

    def split(self, tokens: int) -> list[Relative]:
        """Of so many tokens of each row at a time."""
        return [self._replace(states=each) for each in self.states.split(tokens, dim=2)]

    def biases(self, own: torch.Tensor, keys: int) -> torch.Tensor:
        """What is added to scores of so many keys, `[rows, heads, tokens, keys]` float32.

        own: each token's place among the keys, `[rows, tokens]`.
        """
        distances, known = self.profiles.shape[1], min(self.profiles.shape[1], keys)
        by_distance = self.states.float() @ self.profiles[:, :known].float()
        ages = own[:, None, :, None] - torch.arange(keys, device=own.device)
        at = ages.clamp(0, known - 1).expand(*by_distance.shape[:3], keys)
        return by_distance.gather(3, at).masked_fill_((ages < 0) | (ages >= distances), 0)
