"""Other ways to compute a batch's LoRA products: gathered weights and bmm, a loop over adapters, vLLM's kernels.

They hold weights as those ways want them, stacked per projection; ranks that differ are padded where they must be.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from .lora_case import LoraCase


class RivalAbsent(RuntimeError):
    """It can't run here."""


class _Stacked:
    """A `[adapters, rank, in]` and B `[adapters, out, rank]` per layer, group and projection, up to the largest rank;
    zero beyond an adapter's own.
    """

    def __init__(self, case: LoraCase) -> None:
        self._case = case
        self._rank = max(case.ranks)
        options = {"dtype": case.groups[0].x.dtype, "device": case.groups[0].x.device}
        live = torch.arange(self._rank)[None, :] < torch.tensor(case.ranks)[:, None]
        live = live.to(options["device"])
        count = len(case.ranks)
        self._weights = [
            [
                [
                    (
                        torch.empty(count, self._rank, group.d_in, **options).normal_(0, 0.02) * live[:, :, None],
                        torch.empty(count, width, self._rank, **options).normal_(0, 0.02) * live[:, None, :],
                    )
                    for _, _, width in group.modules
                ]
                for group in case.groups
            ]
            for _ in range(case.layers)
        ]


class _PerProjection(_Stacked, ABC):
    """One projection after another."""

    def run(self) -> None:
        for layer in self._weights:
            for group, modules in zip(self._case.groups, layer, strict=True):
                for (_, column, width), (a, b) in zip(group.modules, modules, strict=True):
                    self._add(group.y[:, column : column + width], group.x, a, b)

    @abstractmethod
    def _add(self, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None: ...


class GatherBmm(_PerProjection):
    """Weights gathered per token, then two batched products (Punica §7.1's Gather-BMM)."""

    def __init__(self, case: LoraCase) -> None:
        super().__init__(case)
        self._index = _adapter_of_token(case.lengths, case.groups[0].x.device)

    def _add(self, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        h = torch.bmm(a[self._index], x[:, :, None])
        y += torch.bmm(b[self._index], h)[:, :, 0]


class Loop(_PerProjection):
    """Two products per adapter, of its own rank."""

    def _add(self, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        begin = 0
        for index, (length, rank) in enumerate(zip(self._case.lengths, self._case.ranks, strict=True)):
            rows = slice(begin, begin + length)
            y[rows].addmm_(x[rows] @ a[index, :rank].T, b[index, :, :rank].T)
            begin += length


class VllmKernels(_Stacked):
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
        meta.prepare_tensors(_adapter_of_token(case.lengths, x.device).to(torch.int32))
        specialised = {"specialize_active_lora": True} if _takes(meta.meta_args, "specialize_active_lora") else {}
        self._meta = meta.meta_args(case.tokens, **specialised)
        self._h = [
            torch.empty(len(group.modules), case.tokens, self._rank, dtype=torch.float32, device=x.device)
            for group in case.groups
        ]

    def run(self) -> None:
        for layer in self._weights:
            for group, modules, h in zip(self._case.groups, layer, self._h, strict=True):
                self._shrink(group.x, [a for a, _ in modules], h, *self._meta, 1.0)
                self._expand(h, [b for _, b in modules], group.y, *self._meta, offset_start=0, add_inputs=True)


RIVALS = {"gather_bmm": GatherBmm, "loop": Loop, "vllm": VllmKernels}


def _adapter_of_token(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Index of each token's adapter, int64."""
    counts = torch.tensor(lengths)
    return torch.repeat_interleave(torch.arange(len(lengths)), counts).to(device)


def _takes(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters
