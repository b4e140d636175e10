"""Times of an engine's decode steps: inside the model's forward pass, and around it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from ...core.engine import Engine
from ...core.requests.types import StepPlan

#: What a step has beside the forward pass. execute: from the plan to the tokens, without that. other: what is left.
AROUND = ("schedule", "execute", "update", "other")


class StepTimer:
    """Times the stages of every step while it is entered, by wrapping the engine's own methods.

    clock: seconds; `time.process_time` leaves out what other processes took.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._clock = clock
        self._took: dict[str, float] = {}
        self._rows = 0
        self._steps: list[tuple[int, dict[str, float]]] = []
        self._stack = ExitStack()

    def __enter__(self) -> StepTimer:
        engine = self._engine
        for owner, name in (
            (engine, "step"), (engine.scheduler, "schedule"), (engine.scheduler, "update"),
            (engine.executor, "execute"), (engine.executor.decoder, "forward"),
        ):  # fmt: skip
            self._stack.enter_context(patch.object(owner, name, self._timed(getattr(owner, name), name)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def summary(self, rows: int) -> dict[str, float]:
        """Least seconds of each stage of decode steps of `rows` rows."""
        steps = [stages for count, stages in self._steps if count == rows]
        if not steps:
            raise ValueError(f"no decode step of {rows} rows was seen")
        return {stage: min(step[stage] for step in steps) for stage in ("forward", *AROUND)}

    def _timed(self, inner: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            if name == "execute":
                self._rows = _decode_rows(args[0])
            began = self._clock()
            result = inner(*args)
            self._took[name] = self._clock() - began
            if name == "step":
                self._end_step()
            return result

        return timed

    def _end_step(self) -> None:
        took, self._took = self._took, {}
        if self._rows and "forward" in took:
            took["other"] = took["step"] - took["schedule"] - took["execute"] - took["update"]
            took["execute"] -= took["forward"]
            self._steps.append((self._rows, took))
        self._rows = 0


def _decode_rows(plan: StepPlan) -> int:
    """Rows of a pure decode step; 0 when the plan holds a prefill."""
    return len(plan.rows) if all(len(row.tokens) == 1 for row in plan.rows) else 0
