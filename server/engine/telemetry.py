"""Recording of a server's requests: metrics, and optionally a trace file and OpenTelemetry spans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from ...core.scheduling.overload import Overloaded

if TYPE_CHECKING:
    from .metrics import Metrics
    from .recorder import Recorder
    from .tracing import CallTrace, Tracer
    from .usage_file import UsageFile


class RequestRecords(NamedTuple):
    """Recorders of one API request."""

    metrics: Metrics | None = None
    recorder: Recorder | None = None
    trace: CallTrace | None = None
    spend: Callable[[int], None] | None = None
    """Called with the number of accepted prompt tokens, and then of generated tokens."""


class Telemetry(NamedTuple):
    """Recorders of all API requests; by default none."""

    metrics: Metrics | None = None
    recorder: Recorder | None = None
    tracer: Tracer | None = None
    usage_file: UsageFile | None = None
    """Written to by the metrics' account."""

    def call(
        self, headers: Mapping[str, str], model: str, num_choices: int, spend: Callable[[int], None] | None
    ) -> RequestRecords:
        """The recorders of a new API request."""
        trace = None if self.tracer is None else self.tracer.call(headers, model, num_choices)
        return RequestRecords(self.metrics, self.recorder, trace, spend)

    @contextmanager
    def counting_rejections(self) -> Iterator[None]:
        """Count a request that finds the queue full."""
        try:
            yield
        except Overloaded:
            if self.metrics is not None:
                self.metrics.rejected()
            raise


NO_TELEMETRY = Telemetry()
