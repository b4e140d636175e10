"""What the server counts and times, in Prometheus's text format."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .engine_view import EngineView

if TYPE_CHECKING:
    from ..core.engine import EngineStats

TTFT_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40)
ITL_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1, 2)
E2E_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200)


class Metrics:
    """Request metrics of one app, in a registry of its own, beside the engine's state at the time of the scrape.

    The model label is always a name the engine has accepted, so clients can't make up new series.
    """

    def __init__(self, stats: Callable[[], EngineStats], view: Callable[[], EngineView]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(stats, view))
        self._requests = Counter(
            "chorus_requests", "Requests ended, by how", ("model", "finish_reason"), registry=self.registry
        )
        self._prompt_tokens = Counter(
            "chorus_prompt_tokens", "Prompt tokens of accepted requests", ("model",), registry=self.registry
        )
        self._generated_tokens = Counter(
            "chorus_generated_tokens", "Tokens generated", ("model",), registry=self.registry
        )
        self._ttft = Histogram(
            "chorus_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=TTFT_BUCKETS,
            registry=self.registry,
        )
        self._itl = Histogram(
            "chorus_inter_token_latency_seconds",
            "Between two tokens of a request",
            buckets=ITL_BUCKETS,
            registry=self.registry,
        )
        self._e2e = Histogram(
            "chorus_request_seconds",
            "From a request's arrival to its end",
            buckets=E2E_BUCKETS,
            registry=self.registry,
        )

    def accepted(self, model: str, prompt_tokens: int) -> None:
        """The engine took a request."""
        self._prompt_tokens.labels(model).inc(prompt_tokens)

    def generated(self, model: str, tokens: int, seconds: float, *, first: bool) -> None:
        """New tokens came, so long after the request's arrival (the first ones) or after its previous tokens."""
        self._generated_tokens.labels(model).inc(tokens)
        if first:
            self._ttft.observe(seconds)
        else:
            for _ in range(tokens):
                self._itl.observe(seconds / tokens)

    def ended(self, model: str, finish_reason: str, seconds: float) -> None:
        """A request ended, so long after its arrival."""
        self._requests.labels(model, finish_reason).inc()
        self._e2e.observe(seconds)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats], view: Callable[[], EngineView]) -> None:
        self._stats = stats
        self._view = view

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        last = stats.last_step
        yield GaugeMetricFamily("chorus_requests_running", "Requests in the running batch", stats.num_running)
        yield GaugeMetricFamily("chorus_requests_waiting", "Requests that wait for a place", stats.num_waiting)
        pages = GaugeMetricFamily("chorus_pages", "Pages of the arena, by what is in them", labels=("kind",))
        pages.add_metric(("free",), stats.num_free_pages)
        pages.add_metric(("kv",), stats.num_kv_pages)
        pages.add_metric(("adapter",), stats.num_adapter_pages)
        pages.add_metric(("cached",), stats.num_cached_pages)
        yield pages
        yield GaugeMetricFamily("chorus_arena_pages", "Pages of the arena in all", stats.num_pages)
        for noun in ("requests", "adapters", "tokens"):
            value = getattr(last, f"num_{noun}") if last is not None else 0
            yield GaugeMetricFamily(f"chorus_last_step_{noun}", f"Different {noun} in the latest step", value)
        yield CounterMetricFamily("chorus_steps", "Engine steps", stats.num_steps)
        yield CounterMetricFamily("chorus_preemptions", "Requests put back to make room", stats.num_preemptions)
        yield CounterMetricFamily("chorus_adapter_hits", "Admissions that found their adapter", stats.num_adapter_hits)
        yield CounterMetricFamily("chorus_adapter_loads", "Adapters brought to the device", stats.num_adapter_loads)
        yield CounterMetricFamily(
            "chorus_adapter_streamed_loads", "Loads that a request followed layer by layer", stats.num_streamed_loads
        )
        yield GaugeMetricFamily("chorus_adapter_reads", "Adapters that are being read", stats.num_reads)
        yield GaugeMetricFamily(
            "chorus_adapter_read_stalled_seconds",
            "The longest that an adapter's read under way has brought nothing",
            stats.oldest_read_seconds,
        )
        yield CounterMetricFamily("chorus_adapter_failed_reads", "Adapters' reads that failed", stats.num_failed_reads)
        yield CounterMetricFamily(
            "chorus_adapter_given_up_reads",
            "Reads that brought nothing for too long",
            stats.num_given_up_reads,
        )
        yield CounterMetricFamily("chorus_adapter_evictions", "Adapters evicted", stats.num_adapter_evictions)
        yield CounterMetricFamily(
            "chorus_prefix_query_tokens", "Tokens looked up in the prefix cache", stats.num_prefix_query_tokens
        )
        yield CounterMetricFamily(
            "chorus_prefix_hit_tokens", "Tokens whose KV the prefix cache had", stats.num_prefix_hit_tokens
        )
        yield from self._adapters()

    def _adapters(self) -> Iterator[Metric]:
        view = self._view()
        counts = GaugeMetricFamily("chorus_adapters", "Adapters, by where their bytes are", labels=("tier",))
        for tier, count in view.tier_counts.items():
            counts.add_metric((tier,), count)
        yield counts
        tiers = GaugeMetricFamily(
            "chorus_adapter_tier", "1 for the tier of an adapter that is not only on disk", labels=("adapter", "tier")
        )
        for name, tier in view.tiers.items():
            tiers.add_metric((name, tier), 1)
        yield tiers
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters in use, in vLLM's words; the value is the time",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        info.add_metric((str(view.max_adapters), ",".join(view.running), ",".join(view.waiting)), time.time())
        yield info
