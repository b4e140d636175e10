"""What answers of each adapter take on average, as dLoRA's planner estimates the execution time of a request."""

from __future__ import annotations

WEIGHT = 0.1
"""Weight of an answer that has ended, beside the mean of the answers before it."""


class AnswerSeconds:
    """Means that follow the latest answers. default: of an adapter of which no answer has ended."""

    def __init__(self, default: float) -> None:
        self._default = default
        self._means: dict[str | None, float] = {}

    def note(self, adapter: str | None, seconds: float) -> None:
        mean = self._means.get(adapter, seconds)
        self._means[adapter] = mean + WEIGHT * (seconds - mean)

    def of(self, adapter: str | None) -> float:
        return self._means.get(adapter, self._default)
