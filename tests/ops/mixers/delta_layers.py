"""Random layers of Gated DeltaNet for tests of its kernels."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch

from chorus.ops.mixers.gated_delta import DeltaWeights
from chorus.ops.mixers.recurrent import RecurrentState


class DeltaLayer:
    """Random weights, states and rows."""

    def __init__(
        self, k_heads: int, v_heads: int, k_dim: int, v_dim: int, conv_size: int, by_channel: bool = False
    ) -> None:
        """by_channel: see `DeltaWeights`."""
        self._random = torch.Generator().manual_seed(0)
        self.channels = 2 * k_heads * k_dim + v_heads * v_dim
        decays = v_heads * k_dim if by_channel else v_heads
        self.width = self.channels + v_heads * v_dim + v_heads + decays
        self.shapes = (conv_size - 1, self.channels), (v_heads, k_dim, v_dim)
        """Of a sequence's state: what the convolution keeps, and the recurrent state."""
        self.draft_size = self.channels + v_heads + decays
        self.weights = DeltaWeights(
            self.normal(conv_size, self.channels),
            self.normal(decays),
            self.normal(v_heads),
            1 + 0.2 * self.normal(v_dim),
            eps=1e-6,
            by_channel=by_channel,
        )

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random)

    def state(self, sequences: int, drafts: int = 0) -> RecurrentState:
        """drafts: the most that a state has the inputs of."""
        kept = torch.full((sequences, drafts, self.draft_size), torch.nan) if drafts else None
        return RecurrentState(*(self.normal(sequences, *shape) for shape in self.shapes), kept)

    def rows(self, lengths: Sequence[int]) -> list[torch.Tensor]:
        return [self.normal(length, self.width) for length in lengths]


class ModuleLayer:
    """A module of transformers, and the same as `DeltaWeights`."""

    module: Any
    weights: DeltaWeights

    @torch.no_grad()
    def want(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.module(hidden[None])[0]

    def run(self, mixed: Sequence[torch.Tensor], state: RecurrentState) -> list[torch.Tensor]:
        """One step of sequences with these rows."""
        indptr = [0, *itertools.accumulate(map(len, mixed))]
        out = self.weights.mix(torch.cat(list(mixed)), state, indptr)
        return list(out.split([len(rows) for rows in mixed]))


def copy(state: RecurrentState) -> RecurrentState:
    drafts = None if state.drafts is None else state.drafts.clone()
    return RecurrentState(state.conv.clone(), state.recurrent.clone(), drafts)


Step = tuple[list[torch.Tensor], list[int], list[int]]
"""Of each sequence: its tokens' rows, the accepted drafts of the step before, and how many of its tokens are drafts."""


def verified_steps(
    layer: DeltaLayer, lengths: Sequence[int], most: int, seed: int
) -> tuple[list[torch.Tensor], list[Step]]:
    """Return the rows of sequences of these lengths, and steps that compute them with up to `most` drafts each.

    Of a step's drafts, some are the rows that follow; after them come others, which are rejected. A sequence that has
    ended goes on with random rows.
    """
    rng, rows = random.Random(seed), layer.rows(lengths)
    done, accepted, steps = [0] * len(rows), [0] * len(rows), list[Step]()
    while any(at < len(own) for at, own in zip(done, rows, strict=True)):
        parts, before, drafts = [], accepted, []
        accepted, has_drafts = [], rng.random() < 0.7
        for index, own in enumerate(rows):
            known, at = (rng.randint(1, 3) if not done[index] else 1), done[index]
            count = rng.randint(1, most) if has_drafts else 0
            right = min(rng.randint(0, count), max(0, len(own) - at - known))
            wrong = layer.normal(count - right, layer.width)
            padded = torch.cat((own[at : at + known + right], layer.normal(max(0, at + known - len(own)), layer.width)))
            parts.append(torch.cat((padded, wrong)))
            drafts.append(count)
            accepted.append(right)
            done[index] += known + right
        steps.append((parts, before, drafts))
    return rows, steps
