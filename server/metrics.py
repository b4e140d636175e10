"""Metrics of the server, in Prometheus's text format."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .engine_view import EngineView

if TYPE_CHECKING:
    from ..core.engine_stats import EngineStats

TTFT_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40)
ITL_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1, 2)
E2E_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200)

MAX_MODEL_SERIES = 1000
"""Models that get series of their own; what the others do is counted under `OTHERS`."""

OTHERS = "(others)"

ENGINE = "0"
"""vLLM's number of an engine; there is one here."""


def label(name: str) -> str:
    """A name as a label's value: what UTF-8 does not have is written as an escape."""
    return name.encode("utf-8", "backslashreplace").decode()


def listed(names: Iterable[str]) -> str:
    """Names joined by commas, as gateways split them: a comma in a name is %2C, a per cent sign %25."""
    return ",".join(label(name).replace("%", "%25").replace(",", "%2C") for name in names)


class Metrics:
    """Request metrics of one app, in a registry of its own, beside the engine's state at the time of the scrape.

    The model label is always a name the engine has accepted, so clients can't make up new series; the first thousand
    have series of their own, and those of adapters that are gone go with them.
    """

    def __init__(self, stats: Callable[[], EngineStats], view: Callable[[], EngineView], base: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(stats, view, base))
        self._base = base
        self._models: set[str] = set()
        self._finish_reasons: dict[str, set[str]] = {}
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
        self._gateways = _GatewayMetrics(self.registry, base)

    def accepted(self, model: str, prompt_tokens: int) -> None:
        """The engine took a request."""
        self._prompt_tokens.labels(self._series(model)).inc(prompt_tokens)
        self._gateways.prompt_tokens.inc(prompt_tokens)

    def generated(self, model: str, tokens: int, seconds: float, *, first: bool) -> None:
        """New tokens came, so long after the request's arrival (the first ones) or after its previous tokens."""
        self._generated_tokens.labels(self._series(model)).inc(tokens)
        self._gateways.generation_tokens.inc(tokens)
        if first:
            self._ttft.observe(seconds)
            self._gateways.ttft.observe(seconds)
        else:
            for _ in range(tokens):
                self._itl.observe(seconds / tokens)
                self._gateways.itl.observe(seconds / tokens)

    def ended(self, model: str, finish_reason: str, seconds: float) -> None:
        """A request ended, so long after its arrival."""
        series = self._series(model)
        self._finish_reasons.setdefault(series, set()).add(finish_reason)
        self._requests.labels(series, finish_reason).inc()
        self._e2e.observe(seconds)
        self._gateways.e2e.observe(seconds)
        self._gateways.success.labels(self._gateways.model, ENGINE, finish_reason).inc()

    def forget_all_but(self, names: Collection[str]) -> None:
        """Drop the series of models that are none of these, nor the base model."""
        kept = {label(name) for name in names} | {label(self._base), OTHERS}
        for series in self._models - kept:
            self._models.discard(series)
            for counter in (self._prompt_tokens, self._generated_tokens):
                with suppress(KeyError):
                    counter.remove(series)
            for reason in self._finish_reasons.pop(series, ()):
                with suppress(KeyError):
                    self._requests.remove(series, reason)

    def _series(self, model: str) -> str:
        series = label(model)
        if series not in self._models:
            if len(self._models) >= MAX_MODEL_SERIES and model != self._base:
                return OTHERS
            self._models.add(series)
        return series

    def render(self) -> bytes:
        return generate_latest(self.registry)


_NAME = ("adapter",)


class _GatewayMetrics:
    """The names under which gateways and dashboards made for vLLM look for the same."""

    def __init__(self, registry: CollectorRegistry, base: str) -> None:
        self.model = label(base)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(f"vllm:{name}", text, ("model_name", "engine"), buckets=buckets, registry=registry)
            return made.labels(self.model, ENGINE)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, ("model_name", "engine"), registry=registry).labels(self.model, ENGINE)

        self.ttft = histogram("time_to_first_token_seconds", "From arrival to the first token", TTFT_BUCKETS)
        self.itl = histogram("inter_token_latency_seconds", "Between two tokens of a request", ITL_BUCKETS)
        self.e2e = histogram("e2e_request_latency_seconds", "From arrival to the end", E2E_BUCKETS)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests")
        self.generation_tokens = counter("generation_tokens", "Tokens generated")
        self.success = Counter(
            "vllm:request_success", "Requests ended", ("model_name", "engine", "finished_reason"), registry=registry
        )


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats], view: Callable[[], EngineView], base: str) -> None:
        self._stats = stats
        self._view = view
        self._base = base

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
        yield from self._for_gateways(stats)

    def _for_gateways(self, stats: EngineStats) -> Iterator[Metric]:
        room = stats.num_pages - stats.num_adapter_pages
        values = (
            ("num_requests_running", "Requests in the running batch", stats.num_running),
            ("num_requests_waiting", "Requests that wait for a place", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of the pages that adapters leave which hold running requests' KV; 1 is all",
             stats.num_kv_pages / room if room > 0 else 1.0),
        )  # fmt: skip
        names = ("model_name", "engine")
        for name, text, value in values:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=names)
            gauge.add_metric((label(self._base), ENGINE), value)
            yield gauge
        counts = (
            ("prefix_cache_queries", "Tokens looked up in the prefix cache", stats.num_prefix_query_tokens),
            ("prefix_cache_hits", "Tokens whose KV the prefix cache had", stats.num_prefix_hit_tokens),
            ("num_preemptions", "Requests put back to make room", stats.num_preemptions),
        )
        for name, text, value in counts:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=names)
            counter.add_metric((label(self._base), ENGINE), value)
            yield counter
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache", labels=("engine", "block_size", "num_gpu_blocks", "cache_dtype")
        )
        info.add_metric((ENGINE, str(self._view().block_tokens), str(stats.num_pages), "auto"), 1)
        yield info

    def _adapters(self) -> Iterator[Metric]:
        view = self._view()
        counts = GaugeMetricFamily("chorus_adapters", "Adapters, by where their bytes are", labels=("tier",))
        for tier, count in view.tier_counts.items():
            counts.add_metric((tier,), count)
        yield counts
        yield GaugeMetricFamily(
            "chorus_adapters_quarantined", "Adapters that are not served, see /v1/adapters", view.num_quarantined
        )
        tiers = GaugeMetricFamily(
            "chorus_adapter_tier", "1 for the tier of an adapter that is not only on disk", labels=("adapter", "tier")
        )
        for name, tier in view.tiers.items():
            tiers.add_metric((label(name), tier), 1)
        yield tiers
        ranks = GaugeMetricFamily("chorus_adapter_rank", "Rank of an adapter that is not only on disk", labels=_NAME)
        pinned = GaugeMetricFamily("chorus_adapter_pinned", "1 if it is kept resident", labels=_NAME)
        loads = GaugeMetricFamily(
            "chorus_adapter_load_seconds", "How long its latest load from host memory took", labels=_NAME
        )
        for one in view.adapters:
            name = (label(one.name),)
            ranks.add_metric(name, one.rank)
            pinned.add_metric(name, int(one.pinned))
            if one.load_seconds is not None:
                loads.add_metric(name, one.load_seconds)
        yield from (ranks, pinned, loads)
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters in use, in vLLM's words; the value is the time",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        info.add_metric((str(view.max_adapters), listed(view.running), listed(view.waiting)), time.time())
        yield info
