"""Other ways to compute a batch's LoRA products: gathered weights and bmm, a loop over adapters, vLLM's kernels.

Each holds its weights as it needs them, stacked per projection; ranks that differ are padded where they must be.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

import torch

from .lora_case import LoraCase


class RivalAbsent(RuntimeError):
    """It can't run here."""


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


class VllmKernels(Rival):
    """vLLM's Triton shrink and expand over its stacked weights; RivalAbsent where vllm can't be imported."""

    def __init__(self, case: LoraCase) -> None:
        try:
            ops: Any = import_module("vllm.lora.ops.triton_ops")
            self._shrink, self._expand, meta_type = ops.lora_shrink, ops.lora_expand, ops.LoRAKernelMeta
        except (ImportError, AttributeError, OSError, RuntimeError) as error:
            raise RivalAbsent(f"vllm's LoRA kernels can't be imported: {type(error).__name__}: {error}") from error
        super().__init__(case)
        x = case.groups[0].x
        meta = meta_type.make(len(case.ranks), case.tokens, x.device)
        meta.prepare_tensors(self._index.to(torch.int32))
        takes = inspect.signature(meta.meta_args).parameters
        specialised = {"specialize_active_lora": True} if "specialize_active_lora" in takes else {}
        self._meta = meta.meta_args(case.tokens, **specialised)
        self._h = [
            torch.empty(len(group.modules), case.tokens, self._rank, dtype=torch.float32, device=x.device)
            for group in case.groups
        ]

    def run(self) -> None:
        for layer in self.weights:
            for group, modules, h in zip(self._case.groups, layer, self._h, strict=True):
                self._shrink(group.x, [a for a, _ in modules], h, *self._meta, 1.0)
                self._expand(h, [b for _, b in modules], group.y, *self._meta, offset_start=0, add_inputs=True)


RIVALS = {"gather_bmm": GatherBmm, "loop": Loop, "vllm": VllmKernels}
