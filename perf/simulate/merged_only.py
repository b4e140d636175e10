"""Merged-only, dLoRA's strawman (§7.3): always merged inference, one adapter at a time."""

from __future__ import annotations

from ...core.merging.mode_policy import ModeChoice, ModeState


class MergedOnly:
    """Serves one adapter until it has no requests left, then the first eligible one of `ModeState.fcfs`.

    oldest: that of the oldest request of all, in every step, as the authors' code has it (LLMServe/dLoRA-artifact,
    vllm/core/scheduler.py, `_always_merge_schedule`). It takes others' seats, so steps must have a limit of rows apart
    from these (`SimScheduler.limit_rows`).
    """

    prices = None

    def __init__(self, *, oldest: bool = False) -> None:
        self._oldest = oldest

    def choose(self, state: ModeState) -> ModeChoice:
        merged = state.merged
        if self._oldest or merged is None or not state.requests.get(merged):
            merged = next(
                (adapter for adapter in state.fcfs if adapter is not None and adapter in state.eligible), None
            )
        return ModeChoice() if merged is None else ModeChoice.alone(merged)
