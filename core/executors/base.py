"""Interface of executors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ...memory.adapters.adapter import AdapterBackend
from ...memory.pages.layout import PageLayout
from ..requests.types import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of the model that callers need."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


class Executor(Protocol):
    """Owns the model's weights and the arena, and runs steps; it knows nothing of queues."""

    @property
    def model(self) -> ModelInfo: ...
    @property
    def layout(self) -> PageLayout: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def adapters(self) -> AdapterBackend: ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Running the same plan again gives the same result: a step only writes its own KV slots."""
        ...

    def close(self) -> None: ...
