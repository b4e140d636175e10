"""Interface of executors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ...memory.adapters.adapter import AdapterBackend
from ...memory.pages.layout import PageLayout
from ..requests.types import ExecutorLost, StepPlan, StepResult

if TYPE_CHECKING:
    from ...graphs.device import Device


@contextmanager
def watched(device: Device) -> Iterator[None]:
    """Scope of a device's work; raises ExecutorLost instead of an error that has ended the device."""
    try:
        with device.scope():
            yield
    except Exception as error:
        if (failure := device.failure()) is not None:
            raise ExecutorLost(f"the device failed: {failure}") from error
        raise


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
        """Run one step. Running the same plan again gives the same result: a step only writes its own KV slots.

        Raises ExecutorLost where that and all else is in vain.
        """
        ...

    def close(self) -> None: ...
