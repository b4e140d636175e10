"""Samples of steps: their work and their time, for prices that are learned outside of the engine.

Tests: tests/core/merging/test_step_samples.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...memory.adapters.adapter import Adapter
from ..requests.types import StepPlan
from .mode_policy import Batch
from .modes import batch_of, context_of


@dataclass(slots=True)
class StepSample:
    """What a step computed, and how long it took. batch, merged, context: as `LearnedPrices` takes them."""

    batch: Batch
    merged: Adapter | None
    context: float
    num_sequences: int
    num_tokens: int
    seconds: float = 0.0

    @classmethod
    def of(cls, plan: StepPlan) -> StepSample:
        """The sample of a step that has not begun: once it runs, the next plan may renumber its sequences' adapters."""
        return cls(batch_of(plan), plan.merged, context_of(plan), len(plan.sequences), plan.num_tokens)


@dataclass(slots=True)
class StepSamples:
    """The latest samples that nobody has taken: at most one decode step and one prefill step.

    The engine samples a step only if the slot for its kind is empty, so it pays for two samples per report.
    """

    decode: StepSample | None = None
    """A decode step without drafts."""

    prefill: StepSample | None = None
    """A step with a block of tokens per sequence or more."""

    def take_decode(self) -> StepSample | None:
        """The first decode step since the last call; None if there was none."""
        taken, self.decode = self.decode, None
        return taken

    def take_prefill(self) -> StepSample | None:
        """The same of prefill steps."""
        taken, self.prefill = self.prefill, None
        return taken
