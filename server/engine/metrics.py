"""Metrics of the server, in Prometheus's text format."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...core.engine_stats import EAGER_REASONS, METRICS, STEP_SIZES
from ...core.engine_stats import Metric as EngineMetric
from .adapter_metrics import AdapterCostSeries, adapter_families
from .base_after_load import BaseAfterLoad
from .engine_view import EngineView
from .metric_families import ENGINE, MODEL_LABELS, histogram, label, with_samples
from .request_metrics import Ended, RequestMetrics
from .shared_counts import SharedCounts
from .top_names import OTHER, TopNames
from .usage import Spent, Usage
from .usage_metrics import ModelUsage, TenantBudgets, TenantUsage

if TYPE_CHECKING:
    from ...core.engine_stats import EngineStats

ITL_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1, 2)
E2E_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200)

MODEL_NAMES = ("model", "adapter", "adapter_name")
"""Labels with the name of one model as their value."""

MAX_TENANT_SERIES = 100
"""Most tenants, or adapters, with their own series; the ones with the most requests in progress come first."""

Write = Callable[[CollectorRegistry], bytes]
"""Writes a registry in a format that the scraper accepts."""


class Metrics:
    """Request metrics of one app, in its own registry, together with the engine's state at the time of the scrape.

    The model label is always a name that the engine has accepted, so clients can't make up new series.
    """

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        view: Callable[[], EngineView],
        base: str,
        directory: Path | None = None,
        *,
        usage: Usage | None = None,
        most_series: int = MAX_TENANT_SERIES,
        budgets: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """directory: shared by all processes that serve the same clients; their requests are added up. usage: the
        account of requests. most_series: most adapters, and most tenants, with series of their own. budgets: tokens
        that tenants may still use.
        """
        self.usage = usage or Usage()
        names, tenants = TopNames(most_series, always=[label(base)]), TopNames(most_series)
        everything = self.everything = label(base), ENGINE
        """Labels of series that vLLM adds up over all models."""
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(stats, view, everything, names))
        self.counted = registry = self.registry if directory is None else CollectorRegistry()
        """Series about this process's requests; the engine's state is the same in all processes."""
        counted_tenants = self.tenants = CollectorRegistry()
        """Series that name tenants, which not every caller may see."""
        self.shared: SharedCounts | None = None
        self._shared_tenants: SharedCounts | None = None
        if directory is not None:
            counted_tenants = CollectorRegistry()
            self.shared = SharedCounts(registry, directory)
            self._shared_tenants = SharedCounts(counted_tenants, directory / "tenants")
            self.registry.register(self.shared)
            self.tenants.register(self._shared_tenants)
        registry.register(ModelUsage(self.usage, names, everything))
        counted_tenants.register(TenantUsage(self.usage, tenants))
        self.tenants.register(TenantBudgets(budgets, most_series))
        self.first_tokens: list[float] | None = None  # filled if there is a reader
        """Seconds to first tokens since the operator's page last read them; None while no page is open."""
        self._base = base
        self.rejected = (
            Counter(
                "vllm:admission_rejections",
                "Requests refused with 429: the queue was full",
                ("model_name", "reason"),
                registry=registry,
            )
            .labels(label(base), "max_num_queued_reqs")
            .inc
        )
        """Count a request that finds the queue full."""
        self._itl = _Seconds("inter_token_latency", "Time between two tokens of a request", ITL_BUCKETS, self)
        self._e2e = _Seconds("request", "Time from arrival to the end", E2E_BUCKETS, self, "e2e_request_latency")
        self._calls = RequestMetrics(everything, registry)
        self.base_after_load = BaseAfterLoad(registry)
        self.request_ended = self._calls.request_ended

    def start(self) -> None:
        """Begin to share counts with the other processes, if there are any."""
        for shared in (self.shared, self._shared_tenants):
            if shared is not None:
                shared.start()

    def stop(self) -> None:
        for shared in (self.shared, self._shared_tenants):
            if shared is not None:
                shared.stop()

    def accepted(self, model: str, tenant: str, num_choices: int, prompt_tokens: int) -> Spent:
        """The engine accepted a request; the result is for the calls that follow."""
        return self.usage.accepted(model, tenant, num_choices, prompt_tokens)

    def generated(self, spent: Spent, tokens: int, seconds: float, *, first: bool) -> None:
        """New tokens came, `seconds` after the request's arrival (first tokens) or after its previous tokens."""
        self.usage.generated(spent, tokens)
        if first:
            self.usage.began(spent, seconds)
            if self.first_tokens is not None:
                self.first_tokens.append(seconds)
        else:
            self._itl.observe(seconds / tokens, tokens)

    def ended(self, spent: Spent, model: str, finish_reason: str, one: Ended) -> None:
        """A choice of an accepted request ended. model: as the request named it."""
        self.usage.ended(spent, model, finish_reason, one)
        self._e2e.observe(one.seconds)
        self._calls.ended(one)

    def forget_all_but(self, models: Collection[str]) -> None:
        """Count models that are neither among these nor the base under `OTHER`. models: their labels."""
        kept = {*models, label(self._base), OTHER}
        if self.shared is not None:
            self.shared.forget_all_but(kept)
        self.usage.forget_all_but(kept)

    def render(self, write: Write, allows: Callable[[str], bool] | None = None) -> bytes:
        """The text of all series, or only of series that name a model accepted by `allows`."""
        return write(self.registry if allows is None else _Allowed(self.registry, MODEL_NAMES, allows))

    def render_tenants(self, write: Write, shown: Callable[[str], bool] | None = None) -> bytes:
        """The text of what tenants have used, of all or of those that the caller may see."""
        return write(self.tenants if shown is None else _Allowed(self.tenants, ("tenant",), shown))


class _Allowed(CollectorRegistry):
    """The series of a registry that name what `allows` accepts; sums over several names are hidden."""

    def __init__(self, whole: CollectorRegistry, labels: Sequence[str], allows: Callable[[str], bool]) -> None:
        """labels: the labels that hold such names."""
        super().__init__()
        self._whole, self._labels, self._allows = whole, labels, allows

    def collect(self) -> Iterator[Metric]:
        for family in self._whole.collect():
            shown = Metric(family.name, family.documentation, family.type, family.unit)
            for sample in family.samples:
                names = [sample.labels[one] for one in self._labels if one in sample.labels]
                if names and all(name != OTHER and self._allows(name) for name in names):
                    shown.samples.append(sample)
            if shown.samples:
                yield shown


class _Seconds(Collector):
    """A histogram under our name and under vLLM's, observed once."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], of: Metrics, gateway_name: str = "") -> None:
        self._name, self._text, self._bounds = f"chorus_{name}_seconds", text, buckets
        self._gateway_name, self._everything = f"vllm:{gateway_name or name}_seconds", of.everything
        self._counts, self._sum = [0] * (len(buckets) + 1), 0.0  # the library's take six times as long
        of.counted.register(self)

    def observe(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum += times * seconds

    def collect(self) -> Iterator[Metric]:
        for name, labels, values in ((self._name, (), ()), (self._gateway_name, MODEL_LABELS, self._everything)):
            yield histogram(
                name,
                text=self._text,
                labels=labels,
                values=values,
                bounds=self._bounds,
                counts=self._counts,
                total=self._sum,
            )


class _EngineCollector(Collector):
    def __init__(
        self,
        stats: Callable[[], EngineStats],
        view: Callable[[], EngineView],
        everything: tuple[str, str],
        names: TopNames,
    ) -> None:
        self._stats, self._view = stats, view
        self._everything = everything
        self._costs = AdapterCostSeries(names, everything)

    def describe(self) -> list[Metric]:
        return []

    def _under_all_names(self, one: EngineMetric, value: float) -> Iterator[Metric]:
        """A value under our name, under the one that it had until the last release, and under vLLM's."""
        family = CounterMetricFamily if one.grows else GaugeMetricFamily
        yield family(f"chorus_{one.name}", one.text, value)
        if one.old_name:
            yield family(f"chorus_{one.old_name}", f"The old name of chorus_{one.name}", value)
        if one.gateway:
            theirs = family(f"vllm:{one.gateway}", one.text, labels=MODEL_LABELS)
            yield with_samples(theirs, (self._everything, value))

    def collect(self) -> Iterator[Metric]:
        stats, view = self._stats(), self._view()
        for field, one in METRICS.items():
            if one.name:
                yield from self._under_all_names(one, getattr(stats, field))
        pages = (
            ("free", stats.num_free_pages),
            ("kv", stats.num_kv_pages),
            ("adapter", stats.num_adapter_pages),
            ("cached", stats.num_cached_pages),
            ("shadow", stats.num_shadow_pages),
        )
        yield with_samples(
            GaugeMetricFamily("chorus_pages", "Pages of the pool by content", labels=("kind",)),
            *(((kind,), count) for kind, count in pages),
        )
        yield with_samples(
            GaugeMetricFamily("chorus_merged_adapter", "1 for the merged adapter", labels=("adapter",)),
            *(((label(name),), 1) for name in (stats.merged_adapter,) if name is not None),
        )
        for noun, text in (("requests", "Requests"), ("adapters", "Distinct adapters"), ("tokens", "Tokens")):
            value = getattr(stats.last_step, f"num_{noun}") if stats.last_step is not None else 0
            yield GaugeMetricFamily(f"chorus_last_step_{noun}", f"{text} in the latest step", value)
        yield from adapter_families(view, self._everything)
        yield from self._costs.families(view.costs())
        usage = "Share of the pages not used by adapters that hold KV of running requests; 1 is all"
        yield with_samples(
            GaugeMetricFamily("vllm:kv_cache_usage_perc", usage, labels=MODEL_LABELS),
            (self._everything, stats.kv_usage),
        )
        eager = (
            "Steps on a GPU that ran eagerly, without CUDA graphs. off: graphs are off, or attention has none; "
            "tokens: more tokens than mixed_graph_tokens; tiles: adapters of many parts; offload: CPU LoRA offload; "
            "experts: prompts of adapters on mixtures of experts; latents: adapters on `kv_b_proj`; images: prompts' "
            "images"
        )
        yield with_samples(
            CounterMetricFamily("chorus_steps_eager", eager, labels=("reason",)),
            *zip([(reason,) for reason in EAGER_REASONS], stats.eager_steps, strict=False),
        )
        counts = stats.step_sizes or [0] * (len(STEP_SIZES) + 1)
        yield histogram(
            "vllm:iteration_tokens_total",
            text="Tokens in a step",
            labels=MODEL_LABELS,
            values=self._everything,
            bounds=STEP_SIZES,
            counts=counts,
            total=stats.num_step_tokens,
        )
        cache = ("engine", "block_size", "num_gpu_blocks", "cache_dtype")
        yield with_samples(
            GaugeMetricFamily("vllm:cache_config_info", "The KV cache", labels=cache),
            ((ENGINE, str(view.block_tokens), str(stats.num_pages), "auto"), 1),
        )


def tenants_text(view: EngineView, write: Write, shown: Callable[[str], bool] | None = None) -> bytes:
    """Series of the tenants, or adapters, that the caller may see and that have the most requests in progress."""
    tenants = [each for each in view.tenants if shown is None or shown(each.name)][:MAX_TENANT_SERIES]
    registry = CollectorRegistry()
    for name, text, attribute in (
        ("requests_running", "Running requests of a tenant, or adapter", "num_running"),
        ("requests_waiting", "Queued requests of a tenant, or adapter", "num_waiting"),
        ("standing", "Cost served to a tenant, or adapter, divided by its weight; the smallest is next", "standing"),
    ):
        gauges = [
            Gauge(f"chorus_tenant_{name}", text, ("tenant",), registry=registry),
            Gauge(f"chorus_account_{name}", f"The old name of chorus_tenant_{name}", ("account",), registry=registry),
        ]
        for each in tenants:
            for gauge in gauges:
                gauge.labels(label(each.name)).set(getattr(each, attribute))
    return write(registry)
