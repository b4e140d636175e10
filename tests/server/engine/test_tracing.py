"""Spans of requests; their export needs the extra `otel`."""

from __future__ import annotations

import builtins

import pytest

from chorus.server.engine.tracing import ENDPOINTS, NoTracing, Tracer

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_nothing_is_traced_without_an_endpoint(monkeypatch):
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert Tracer.of(None) is None


def test_what_is_missing_is_named(monkeypatch):
    plain = builtins.__import__

    def without(name, *rest):
        if name.startswith("opentelemetry"):
            raise ImportError(f"No module named {name!r}")
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(NoTracing, match="chorus-lora\\[otel\\]"):
        Tracer.of("http://127.0.0.1:4318/v1/traces")


@pytest.mark.integration
def test_each_request_has_a_span_below_its_callers(start, fake_engine):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    live = start(fake_engine, tracer=Tracer(provider))
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    body = {"model": "alice", "prompt": "abc", "n": 2, "max_tokens": 8, "temperature": 0.5}
    assert live.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    live.post("/v1/chat/completions", model="base", messages=[{"role": "user", "content": "hi"}], stream=True)
    live.wait_until(lambda: len(spans.get_finished_spans()) == 3)
    first, second, third = spans.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in (first, second)} == {TRACE}
    assert f"{first.parent.span_id:016x}" == SPAN and third.parent is None
    told = dict(first.attributes)
    assert told.pop("gen_ai.request.id").startswith("cmpl-")
    times = {name: told.pop(name) for name in list(told) if name.startswith("gen_ai.latency.")}
    assert told == {
        "gen_ai.response.model": "alice",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.prompt_tokens": 4,
        "gen_ai.usage.cached_tokens": 0,
        "gen_ai.usage.completion_tokens": 4,
        "gen_ai.response.finish_reasons": ("stop",),
        "chorus.adapter": "alice",
        "chorus.tenant": "at-127.0.0.1",
        "chorus.kv_page_seconds": 0.0,
    }
    assert times.pop("gen_ai.latency.time_per_output_token") >= 0
    assert times.pop("gen_ai.latency.time_in_queue") == 2.0**-20
    assert first.end_time - first.start_time == round(times["gen_ai.latency.e2e"] * 1e9)
    parts = times["gen_ai.latency.time_in_model_prefill"] + times["gen_ai.latency.time_in_model_decode"]
    assert times["gen_ai.latency.time_in_model_inference"] == pytest.approx(parts)
    assert third.attributes["gen_ai.response.model"] == "base"


@pytest.mark.integration
def test_spans_go_to_the_endpoint(start, fake_engine):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    came = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            came.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    tracer = Tracer.of(f"http://127.0.0.1:{collector.server_port}/v1/traces")
    live = start(fake_engine, tracer=tracer)
    live.post(model="alice", prompt="abc")
    tracer.stop()
    collector.shutdown()
    ((path, body),) = came
    assert path == "/v1/traces" and b"llm_request" in body and b"alice" in body and b"chorus" in body
