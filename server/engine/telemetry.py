"""Where the calls of a server are recorded: metrics, and where wanted a file of requests and traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from ...core.scheduling.overload import Overloaded

if TYPE_CHECKING:
    from .metrics import Metrics
    from .recorder import Recorder
    from .tracing import CallTrace, Tracer


class RequestRecords(NamedTuple):
    """Records of one call."""

    metrics: Metrics | None = None
    recorder: Recorder | None = None
    trace: CallTrace | None = None
    spend: Callable[[int], None] | None = None
    """Called with the tokens of prompts that are taken, and then of answers."""


class Telemetry(NamedTuple):
    """Records of all calls; by default none."""

    metrics: Metrics | None = None
    recorder: Recorder | None = None
    tracer: Tracer | None = None

    def call(
        self, headers: Mapping[str, str], model: str, num_choices: int, spend: Callable[[int], None] | None
    ) -> RequestRecords:
        """The records of a call that begins."""
        trace = None if self.tracer is None else self.tracer.call(headers, model, num_choices)
        return RequestRecords(self.metrics, self.recorder, trace, spend)

    @contextmanager
    def counting_rejections(self) -> Iterator[None]:
        """Count a call that finds the queue full."""
        try:
            yield
        except Overloaded:
            if self.metrics is not None:
                self.metrics.rejected()
            raise
