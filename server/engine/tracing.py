"""An OpenTelemetry span for each finished request; needs the extra `otel`."""

# OpenTelemetry is an extra: types are checked without it, too.
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from ...core.requests.request import Request
    from .request_metrics import Ended

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

NAME = "llm_request"
"""vLLM's name of the span."""


class NoTracing(ValueError):
    """Spans can't be exported; the text says which package is missing."""


class Tracer:
    """Exports a span for each request, with vLLM's attributes, as a child of the caller's span."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.propagate import extract

        self._provider, self._extract = provider, extract
        self._tracer = provider.get_tracer("chorus")

    @classmethod
    def of(cls, endpoint: str | None) -> Tracer | None:
        """The tracer to an OTLP endpoint, or to the one of OpenTelemetry's own variables; None without either.

        These variables also configure everything else (protocol, headers, sampler, resource). Raises NoTracing.
        """
        if endpoint is None and not any(os.environ.get(name) for name in ENDPOINTS):
            return None
        protocol = next((os.environ[name] for name in PROTOCOLS if os.environ.get(name)), "http/protobuf")
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            kind = "grpc" if protocol == "grpc" else "http"
            exporters = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter")
        except ImportError as error:
            raise NoTracing(f"spans need OpenTelemetry ({error}); pip install 'chorus-lora[otel]'") from None
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        resource = Resource.create({} if named else {"service.name": "chorus"})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # this waits for a silent endpoint
        provider.add_span_processor(BatchSpanProcessor(exporters.OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def call(self, headers: Mapping[str, str], model: str, n: int) -> CallTrace:
        """The spans of a request. headers: may hold its `traceparent`. n: choices per prompt."""
        return CallTrace(self._tracer, self._extract(headers), {"gen_ai.response.model": model, "gen_ai.request.n": n})

    def stop(self) -> None:
        """Export the remaining spans."""
        self._provider.shutdown()


class CallTrace:
    """The spans of one API request's choices."""

    def __init__(self, tracer: Any, context: Any, attributes: Mapping[str, Any]) -> None:
        self._tracer, self._context, self._attributes = tracer, context, attributes

    def ended(self, request: Request, one: Ended, finish_reason: str) -> None:
        """A choice of the request ended now."""
        from opentelemetry.trace import SpanKind, StatusCode

        params, now = request.params, time.time_ns()
        first, queue = one.first_seconds, one.queue_seconds
        decode = None if first is None else one.last_seconds - first
        prefill = None if first is None or queue is None else max(first - queue, 0.0)
        attributes = {
            **self._attributes,
            "gen_ai.request.id": request.id,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": one.num_prompt_tokens,
            "gen_ai.usage.cached_tokens": one.num_cached_tokens,
            "gen_ai.usage.completion_tokens": one.num_generated_tokens,
            "gen_ai.response.finish_reasons": (finish_reason,),
            "chorus.adapter": request.adapter_name,
            "chorus.tenant": request.tenant or None,
            "chorus.kv_page_seconds": one.page_seconds,
            "gen_ai.latency.e2e": one.seconds,
            "gen_ai.latency.time_in_queue": queue,
            "gen_ai.latency.time_to_first_token": first,
            "gen_ai.latency.time_per_output_token": one.token_seconds,
            "gen_ai.latency.time_in_model_prefill": prefill,
            "gen_ai.latency.time_in_model_decode": decode,
            "gen_ai.latency.time_in_model_inference": None if prefill is None or decode is None else prefill + decode,
        }
        span = self._tracer.start_span(
            NAME,
            context=self._context,
            kind=SpanKind.SERVER,
            start_time=now - round(one.seconds * 1e9),
            attributes={name: value for name, value in attributes.items() if value is not None},
        )
        if finish_reason == "error":
            span.set_status(StatusCode.ERROR)
        span.end(now)
