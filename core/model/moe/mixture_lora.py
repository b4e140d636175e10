"""What a step's adapters add in a layer's mixture of experts: to its router, its shared expert, and its experts.

Tests: tests/core/test_experts.py, tests/core/model/moe/test_experts.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ....memory.pages.projections import MIXTURE_ROLES, Projections, Role
from ....ops.lora.sgmv import Segments, sgmv
from ....ops.moe.native_mixture import MixtureModules, NativeMixtureLora

Columns = Mapping[Role, Sequence[tuple[int, int, int]]]
"""By product: (module id, first column, width) of its projections."""

Going = Sequence[tuple[int, Sequence[int]]]
"""Experts, each with the step's tokens that go to it, in rising order."""


_NATIVE_ROLES = (
    Role.ROUTER,
    Role.SHARED_GATE,
    Role.SHARED_GATE_UP,
    Role.SHARED_DOWN,
    Role.EXPERT_GATE_UP,
    Role.EXPERT_DOWN,
)
"""The products of `MixtureModules`."""

_SHARED = (Role.SHARED_GATE, Role.SHARED_GATE_UP, Role.SHARED_DOWN)


def mixture_columns(projections: Projections) -> list[Columns]:
    """What adapters change of each layer's mixture; nothing where it has none."""
    layers = range(projections.num_layers)
    return [{role: projections.columns(layer, role) for role in MIXTURE_ROLES} for layer in layers]


def mixture_modules(columns: Columns) -> MixtureModules:
    """What adapters change of a layer's mixture, for the native library."""
    return MixtureModules(*(columns[role] for role in _NATIVE_ROLES))


class MixtureLora:
    """Adds LoRA products to those of a layer's mixture of experts, through the arena `[pages, page_elems]`."""

    def __init__(self, arena: torch.Tensor, segments: Segments, layer: int, columns: Columns) -> None:
        self._arena, self._segments, self._layer, self._columns = arena, segments, layer, columns
        self._routed: tuple[Going, Segments] = (), Segments()

    @classmethod
    def of(cls, arena: torch.Tensor, segments: Segments, layer: int, columns: Columns) -> MixtureLora | None:
        """None if no segment changes the layer's mixture."""
        modules = [module for role in MIXTURE_ROLES for module, _, _ in columns[role]]
        own = (rows.a_offset for rows in segments.rows if rows.first_elem[layer] >= 0)
        if any(offsets[module] >= 0 for offsets in own for module in modules):
            return cls(arena, segments, layer, columns)
        return None

    def of_rows(self, tokens: Sequence[int], *, has_experts: bool) -> MixtureLora:
        """The same for rows that are only some of the step's tokens, in rising order. has_experts: they go to the
        experts that adapters change; else adapters change the shared one alone.
        """
        kept = self._columns.items()
        columns = self._columns if has_experts else {at: own if at in _SHARED else () for at, own in kept}
        return MixtureLora(self._arena, self._segments.of_rows(tokens), self._layer, columns)

    @property
    def native(self) -> NativeMixtureLora:
        """The same for the native library."""
        targets = mixture_modules(self._columns).described()
        return NativeMixtureLora(self._arena, self._segments, self._layer, targets)

    def add(self, role: Role, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add to products y `[tokens, out]` of all of the step's tokens x `[tokens, in]`, by rows of y's dtype."""
        sgmv(y, x.to(y.dtype), self._arena, self._segments, self._layer, modules=self._columns[role])

    def add_of_experts(self, role: Role, y: torch.Tensor, x: torch.Tensor, going: Going) -> None:
        """Likewise, of experts. Rows are the tokens that go to each of them, expert after expert."""
        if self._routed[0] is not going:
            self._routed = going, self._segments.of_experts(going, self._layer)
        sgmv(y, x, self._arena, self._routed[1], self._layer, modules=self._columns[role])
