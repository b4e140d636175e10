"""How a step runs mixtures of experts on a GPU.

Tests: tests/core/test_families.py
"""

from __future__ import annotations

from ....ops.moe.expert_tiles_schedule import ExpertLaunches
from ..batch import GemmBackend, GemmKind
from ..moe.experts import ExpertWeights
from ..moe.stacked_experts import StackedExperts
from .torch_gemm import kind_of
from .torch_step import Step


def kind_of_experts(experts: ExpertWeights) -> GemmKind | None:
    """The kind of GEMM of the experts' gate and up, by which backends are chosen; None: our kernels don't run it."""
    return kind_of(experts.gate_up.data, experts.gate_up.bias) if isinstance(experts, StackedExperts) else None


def backend_of(step: Step, experts: ExpertWeights) -> GemmBackend:
    """The backend of a mixture in a step."""
    backends = step.batch.backends
    kind = kind_of_experts(experts) if backends else None
    return GemmBackend.LIBRARY if kind is None else backends.get(kind, GemmBackend.LIBRARY)


def launches(backend: GemmBackend) -> ExpertLaunches:
    """Those of a mixture."""
    is_wide = backend is GemmBackend.WIDE
    joins, swaps = backend is not GemmBackend.LIBRARY, is_wide or backend is GemmBackend.SWAPPED
    return ExpertLaunches(joins=joins, swaps=swaps, is_wide=is_wide)
