"""Other ways to compute a batch's LoRA products: gathered weights and bmm, a loop over adapters.

Each holds its weights as it needs them, stacked per projection; ranks that differ are padded where they must be.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from .lora_case import LoraCase


class Rival:
    """Weights per layer, group and projection: A `[adapters, rank, in]` and B `[adapters, out, rank]`, up to the
    largest rank; zero beyond an adapter's own.
    """

    def __init__(self, case: LoraCase) -> None:
        self._case = case
        self._rank, count = max(case.ranks), len(case.ranks)
        x = case.groups[0].x
        live = torch.arange(self._rank)[None, :] < torch.tensor(case.ranks)[:, None]
        live = live.to(x.device)

        def pair(d_in: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = x.new_empty(count, self._rank, d_in), x.new_empty(count, width, self._rank)
            return a.normal_(0, 0.02) * live[:, :, None], b.normal_(0, 0.02) * live[:, None, :]

        self.weights = [
            [[pair(group.d_in, width) for _, _, width in group.modules] for group in case.groups]
            for _ in range(case.layers)
        ]
        counts = torch.tensor(case.lengths)
        self._index = torch.repeat_interleave(torch.arange(count), counts).to(x.device)  # adapter of each token


class PerProjection(Rival, ABC):
    """One projection after another."""

    def run(self) -> None:
        for layer in self.weights:
            for group, modules in zip(self._case.groups, layer, strict=True):
                for (_, column, width), (a, b) in zip(group.modules, modules, strict=True):
                    self._add(group.y[:, column : column + width], group.x, a, b)

    @abstractmethod
    def _add(self, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add one projection's product to y."""


class GatherBmm(PerProjection):
    """Weights gathered per token, then two batched products (Punica §7.1's Gather-BMM)."""

    def _add(self, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        h = torch.bmm(a[self._index], x[:, :, None])
        y += torch.bmm(b[self._index], h)[:, :, 0]


class Loop(PerProjection):
    """Two products per adapter, of its own rank."""

    def _add(self, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        begin = 0
        for index, (length, rank) in enumerate(zip(self._case.lengths, self._case.ranks, strict=True)):
            rows = slice(begin, begin + length)
            y[rows].addmm_(x[rows] @ a[index, :rank].T, b[index, :, :rank].T)
            begin += length


RIVALS = {"gather_bmm": GatherBmm, "loop": Loop}
