"""LoRA launches of a product of more projections than one launch takes: several launches, one after the other.

Tests: tests/ops/lora/test_in_parts.py, tests/core/executors/test_cuda_families_interpreted.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import dependent_launch
from .sgmv_schedule import MAX_TARGETS

Modules = Sequence[tuple[int, int, int]]
"""(module id, first column, width) of projections with adjacent outputs."""


class InParts:
    """Launches for some of a product's projections each. They share scratch memory, so none begins early."""

    def __init__(self, modules: Modules, make: Callable[[Modules], Any]) -> None:
        """make: the launch for up to `MAX_TARGETS` projections, whose columns begin at 0."""
        self._parts = []
        with dependent_launch.only(False):
            for first in range(0, len(modules), MAX_TARGETS):
                own = modules[first : first + MAX_TARGETS]
                begin = own[0][1]
                launch = make([(module, column - begin, width) for module, column, width in own])
                self._parts.append((begin, launch))

    def use_arena(self, arena: torch.Tensor) -> None:
        """See `Sgmv.use_arena`."""
        for _, launch in self._parts:
            launch.use_arena(arena)

    def __call__(self, y: torch.Tensor, *arguments: Any, **options: Any) -> None:
        """As of each launch, of its columns of y."""
        for begin, launch in self._parts:
            launch(y[:, begin:], *arguments, **options)

    def shrink(self, *_: Any, **__: Any) -> None:
        """No GEMM takes the second half of several launches into its own."""


def launch_for(modules: Modules, make: Callable[[Modules], Any]) -> Any:
    """One launch for these projections if they are few enough for one, else several."""
    return make(modules) if len(modules) <= MAX_TARGETS else InParts(modules, make)
