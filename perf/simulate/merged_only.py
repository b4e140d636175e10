"""Merged-only, dLoRA's strawman (§7.3): always merged inference, one adapter at a time."""

from __future__ import annotations

from ...core.scheduling.mode_policy import ModeChoice, ModeState


class MergedOnly:
    """Serves the adapter whose requests run, or has the first in the queue, until it has none left.

    As the authors' code has it (LLMServe/dLoRA-artifact, vllm/core/scheduler.py, `_always_merge_schedule`), but that
    there the oldest request of all decides in every step.
    """

    def choose(self, state: ModeState) -> ModeChoice:
        merged = state.merged
        if merged is None or not state.requests.get(merged):
            merged = next(
                (adapter for adapter in state.fcfs if adapter is not None and adapter in state.eligible), None
            )
        return ModeChoice() if merged is None else ModeChoice.alone(merged)
