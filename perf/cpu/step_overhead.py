"""Times of an engine's decode steps: inside the model's forward pass, and around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median
from types import SimpleNamespace, TracebackType
from typing import Any

from ...core.engine import Engine
from ...core.requests.types import StepPlan

#: Stages that `StepTimer` reports, in the order of a step. native: the part of forward spent in the compiled decoder.
STAGES = ("schedule", "prepare", "forward", "native", "draw", "update", "other", "step")


class StepTimer:
    """Times the stages of every step while it is entered, by wrapping the engine's own methods.

    prepare: from the plan to the model's inputs. draw: from logits to tokens. other: what is left of the step.
    clock: seconds; `time.process_time` leaves out what other processes took.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._clock = clock
        self._spans: dict[str, tuple[float, float]] = {}
        self._rows = 0
        self._steps: list[tuple[int, dict[str, float]]] = []
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> StepTimer:
        engine = self._engine
        model = engine.executor.decoder
        self._wrap(engine, "step")
        self._wrap(engine.scheduler, "schedule")
        self._wrap(engine.scheduler, "update")
        self._wrap(engine.executor, "execute")
        self._wrap(model, "forward")
        if decoder := getattr(model, "_decoder", None):
            self._wrap_native(decoder)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for undo in reversed(self._undo):
            undo()

    def summary(self, rows: int, pick: Callable[[Iterable[float]], float] = median) -> dict[str, float]:
        """Microseconds per stage of decode steps of `rows` rows.

        pick: which of all steps' times stands for a stage; `min` is what noise disturbs least.
        """
        steps = [stages for count, stages in self._steps if count == rows]
        if not steps:
            raise ValueError(f"no decode step of {rows} rows was seen")
        return {stage: pick(step[stage] for step in steps) * 1e6 for stage in STAGES if stage in steps[0]}

    def _wrap(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)
        setattr(owner, name, self._timed(inner, name))
        self._undo.append(lambda: delattr(owner, name))

    def _wrap_native(self, decoder: Any) -> None:
        library = decoder._library  # noqa: SLF001 - what is compiled is called from there alone
        decoder._library = SimpleNamespace(  # noqa: SLF001
            chorus_decoder_forward=self._timed(library.chorus_decoder_forward, "native"),
            chorus_decoder_destroy=library.chorus_decoder_destroy,
        )
        self._undo.append(lambda: setattr(decoder, "_library", library))

    def _timed(self, inner: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            if name == "execute":
                self._rows = _decode_rows(args[0])
            began = self._clock()
            result = inner(*args)
            self._spans[name] = began, self._clock()
            if name == "step":
                self._end_step()
            return result

        return timed

    def _end_step(self) -> None:
        spans, self._spans = self._spans, {}
        if self._rows and "forward" in spans:
            took = {name: end - began for name, (began, end) in spans.items()}
            took["prepare"] = spans["forward"][0] - spans["execute"][0]
            took["draw"] = spans["execute"][1] - spans["forward"][1]
            took["other"] = took["step"] - took["schedule"] - took["execute"] - took["update"]
            self._steps.append((self._rows, took))
        self._rows = 0


def _decode_rows(plan: StepPlan) -> int:
    """Rows of a pure decode step; 0 when the plan holds a prefill."""
    return len(plan.rows) if all(len(row.tokens) == 1 for row in plan.rows) else 0
