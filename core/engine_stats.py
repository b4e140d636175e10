"""Snapshot of an engine for metrics. Each field names its metric, and the place of its value in the engine.

Tests: tests/server/engine/test_metrics.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import Any

from ..graphs.runner import EagerReason, StepMode
from ..memory.pages.pool import PageKind
from .requests.types import StepInfo

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets of tokens per step, as in vLLM; the last bucket has no bound."""

EAGER_REASONS = tuple(EagerReason)


@dataclass(frozen=True, slots=True)
class Metric:
    """The metric of a field of `EngineStats`."""

    name: str = ""
    """Name of the metric, after `chorus_`."""
    text: str = ""
    of: str = ""
    """Path to the value from the engine; empty: `stats_of` finds it."""
    gateway: str = ""
    """Name of the same metric in vLLM."""
    old_name: str = ""
    """Former name, which is exported, too, for one release."""
    grows: bool = False
    """True for a counter, False for a gauge."""
    largest: bool = False
    """With several engines, report the largest value instead of the sum."""


def _field(*args: Any, **kwargs: Any) -> Any:
    return field(default=0, metadata={Metric: Metric(*args, **kwargs)})


_now: Callable[..., Any] = _field
_counted: Callable[..., Any] = partial(_field, grows=True)


@dataclass(slots=True)  # not frozen: made for each step, which would take four times as long
class EngineStats:
    """Counts and seconds of an engine at one moment; nothing changes them."""

    num_running: int = _now("requests_running", "Running requests", gateway="num_requests_running")
    num_waiting: int = _now("requests_waiting", "Requests in the queue", gateway="num_requests_waiting")
    num_pages: int = _now("pool_pages", "Pages in the pool", "pool.num_usable", old_name="arena_pages")
    num_free_pages: int = _now(of="pool.num_free")
    num_kv_pages: int = _now()
    num_adapter_pages: int = _now()
    num_cached_pages: int = _now()
    num_shadow_pages: int = _now()
    num_generated_tokens: int = _counted(of="scheduler.num_generated_tokens")
    num_step_tokens: int = _counted(of="scheduler.num_step_tokens")
    num_steps: int = _counted("steps", "Engine steps", "scheduler.num_steps")
    num_async_steps: int = _counted(
        "async_steps",
        "Steps launched before the tokens of the previous step were read",
        old_name="steps_ahead",
    )
    num_proposed_tokens: int = _counted(
        "speculation_proposed_tokens",
        "Proposed tokens that steps have verified",
        "scheduler.num_proposed_tokens",
    )
    num_accepted_tokens: int = _counted(
        "speculation_accepted_tokens",
        "Proposed tokens that were accepted",
        "scheduler.num_accepted_tokens",
    )
    num_preemptions: int = _counted(
        "preemptions", "Preemptions", "scheduler.lifecycle.num_preemptions", "num_preemptions"
    )
    num_swapped: int = _now("swapped_requests", "Preempted requests whose KV is in host memory")
    swapped_bytes: int = _now("swapped_bytes", "Host memory used by swapped KV", "swapped.num_bytes")
    num_swaps_out: int = _counted("swaps_out", "Preemptions that swapped KV to host memory", "swapped.num_out")
    num_swaps_in: int = _counted("swaps_in", "Times that swapped KV was copied back", "swapped.num_in")
    swapped_bytes_out: int = _counted("swapped_out_bytes", "Bytes of KV copied to host memory", "swapped.num_bytes_out")
    swapped_bytes_in: int = _counted("swapped_in_bytes", "Bytes of KV copied back", "swapped.num_bytes_in")
    num_swaps_dropped: int = _counted("swaps_dropped", "Swapped KV discarded without use", "swapped.num_dropped")
    num_adapter_hits: int = _counted("adapter_hits", "Admissions whose adapter was resident", "store.num_hits")
    num_adapter_loads: int = _counted("adapter_loads", "Adapters loaded into the page pool", "store.num_loads")
    num_streamed_loads: int = _counted(
        "adapter_streamed_loads", "Loads that a request used layer by layer while they ran", "store.num_streamed"
    )
    num_waited_starts: int = _counted(
        "cold_starts_waited", "Cold starts that waited for the whole adapter", "starts.num_waited"
    )
    num_streamed_starts: int = _counted(
        "cold_starts_streamed",
        "Cold starts that used the adapter layer by layer; counted only with CPU LoRA offload",
        "starts.num_streamed",
    )
    num_offloaded_starts: int = _counted(
        "cold_starts_assisted",
        "Cold starts with CPU LoRA offload for the first layers",
        "starts.num_offloaded",
    )
    cold_start_regret: float = _counted(
        "cold_start_regret_seconds",
        "Seconds that steps with cold starts took beyond the best choice",
        "starts.regret_seconds",
    )
    num_reads: int = _now("adapter_reads", "Adapters being read from disk")
    oldest_read_seconds: float = _now(
        "adapter_read_stalled_seconds", "Longest time that a current adapter read has made no progress", largest=True
    )
    num_waiting_for_images: int = _now("requests_waiting_for_images", "Requests whose images are being encoded")
    num_encoded_images: int = _counted("images_encoded", "Images encoded")
    num_found_images: int = _counted("images_found", "Images of requests whose rows were there already")
    image_rows_bytes: int = _now("image_rows_bytes", "Host memory used by rows for the next use of an image")
    num_failed_reads: int = _counted("adapter_failed_reads", "Adapter reads that failed")
    num_timed_out_reads: int = _counted(
        "adapter_timed_out_reads", "Adapter reads that timed out", old_name="adapter_given_up_reads"
    )
    num_adapter_evictions: int = _counted("adapter_evictions", "Adapters evicted", "store.num_evictions")
    num_merges: int = _counted("merges", "Adapters merged into a copy of the weights", "merging.num_merges")
    num_mode_switches: int = _counted("mode_switches", "Switches to merged weights and back", "merging.num_switches")
    merge_seconds: float = _now(
        "merge_seconds", "Duration of the latest merge, over all of its steps", "merging.merge_seconds"
    )
    longest_merge_pause: float = _now(
        "merge_longest_pause_seconds",
        "Longest time that a step waited for a merge",
        "merging.longest_pause",
        largest=True,
    )
    predicted_step_seconds: float = _counted(
        "mode_predicted_seconds", "Duration of decode steps as predicted by the mode policy"
    )
    measured_step_seconds: float = _counted("mode_measured_seconds", "Duration of the same steps as measured")
    wrong_step_seconds: float = _counted(
        "mode_wrong_seconds", "Sum of the absolute differences between predicted and measured steps"
    )
    num_steps_leaving_out: int = _counted("mode_steps_leaving_out", "Steps in which the mode policy left requests out")
    num_prefix_query_tokens: int = _counted(
        "prefix_query_tokens", "Tokens looked up in the prefix cache", "prefix.num_query_tokens", "prefix_cache_queries"
    )
    num_prefix_hit_tokens: int = _counted(
        "prefix_hit_tokens", "Tokens found in the prefix cache", "prefix.num_hit_tokens", "prefix_cache_hits"
    )
    num_host_hit_tokens: int = _counted(
        "prefix_host_hit_tokens", "Prefix tokens copied from host memory", "memory.copies.num_hit_tokens"
    )
    num_recomputed_tokens: int = _counted(
        "prefix_recomputed_tokens",
        "Prefix tokens in host memory that were computed again, because that takes less time",
        "memory.copies.num_recomputed_tokens",
    )
    fetch_seconds: float = _counted(
        "prefix_fetch_seconds", "Time of copies of prefixes from host memory", "memory.copies.seconds"
    )
    host_cached_bytes: int = _now("prefix_host_bytes", "Host memory used by cached prefixes")
    num_ahead_pages: int = _counted(
        "prefix_ahead_pages", "Pages of cached prefixes that a GPU began to copy to host memory before evicting them"
    )
    num_void_ahead_pages: int = _counted(
        "prefix_ahead_void_pages", "Such pages that were evicted before their copy had ended"
    )
    num_disk_hit_tokens: int = _counted("prefix_disk_hit_tokens", "Prefix tokens read from files")
    disk_read_seconds: float = _counted("prefix_disk_read_seconds", "Time of reads of prefixes from files")
    disk_bytes: int = _now("prefix_disk_bytes", "Bytes in kv_cache_dir, of all servers that use it", largest=True)
    disk_bytes_read: int = _counted("prefix_disk_read_bytes", "Bytes of prefixes read from files")
    disk_bytes_written: int = _counted("prefix_disk_written_bytes", "Bytes of prefixes written to files")
    num_disk_failures: int = _counted("prefix_disk_failures", "Files of prefixes that could not be read or written")
    num_bad_files: int = _counted("prefix_disk_bad_files", "Files of prefixes that were damaged or forged, and removed")
    num_kv_events: int = _counted("kv_events", "KV events published to routers")
    num_dropped_kv_events: int = _counted("kv_events_dropped", "KV events dropped because the publisher lagged")
    last_step: StepInfo | None = None
    mode: StepMode = StepMode.LORA
    """MERGED while an adapter is merged, else LORA."""
    merged_adapter: str | None = None
    step_sizes: tuple[int, ...] = ()
    """Number of steps in each bucket of `STEP_SIZES`."""
    eager_steps: tuple[int, ...] = ()
    """Number of steps on a GPU that were not captured, for each of `EAGER_REASONS`."""

    @property
    def kv_usage(self) -> float:
        """Share of the pages not used by adapters that holds KV of running requests."""
        room = self.num_pages - self.num_adapter_pages
        return self.num_kv_pages / room if room > 0 else 1.0


METRICS: dict[str, Metric] = {one.name: one.metadata[Metric] for one in fields(EngineStats) if one.metadata}
"""The metric of each field."""

_PATHS = {name: metric.of for name, metric in METRICS.items() if metric.of}
_at_paths = attrgetter(*_PATHS.values())


def stats_of(engine: Any) -> EngineStats:
    """Return the counts of an `Engine` as they are now. Called in every step."""
    scheduler, merging, modes, events = engine.scheduler, engine.merging, engine.modes, engine.kv_events
    reads, count = engine.store.images.counts(), engine.pool.count
    encoder = engine.encoder
    stats = EngineStats(
        **dict(zip(_PATHS, _at_paths(engine), strict=True)),
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_kv_pages=count(PageKind.KV),
        num_adapter_pages=count(PageKind.ADAPTER),
        num_cached_pages=count(PageKind.CACHED),
        num_shadow_pages=count(PageKind.SHADOW),
        num_swapped=len(engine.swapped),
        num_reads=reads.num_under_way,
        num_failed_reads=reads.num_failed,
        num_waiting_for_images=0 if encoder is None else encoder.num_pending,
        num_encoded_images=0 if encoder is None else encoder.num_encoded,
        num_found_images=0 if encoder is None else encoder.num_found,
        image_rows_bytes=0 if encoder is None else encoder.cache.num_bytes,
        num_timed_out_reads=reads.num_given_up,
        oldest_read_seconds=reads.oldest_seconds,
        num_async_steps=engine.async_steps.num_async if engine.async_steps else 0,
        last_step=scheduler.last_step,
        step_sizes=tuple(scheduler.step_sizes),
        eager_steps=tuple([engine.executor.eager_steps.get(reason, 0) for reason in EAGER_REASONS]),
    )
    if engine.host is not None:
        stats.host_cached_bytes = engine.host.num_bytes
        if (ahead := engine.host.ahead) is not None:
            stats.num_ahead_pages, stats.num_void_ahead_pages = ahead.num_begun_pages, ahead.num_void_pages
    if (disk := engine.disk) is not None:
        folder = disk.folder
        disk.look()
        stats.num_disk_hit_tokens, stats.disk_read_seconds = disk.num_hit_tokens, disk.read_seconds
        stats.disk_bytes, stats.disk_bytes_read = folder.known_bytes, folder.num_read_bytes
        stats.disk_bytes_written = folder.num_written_bytes
        stats.num_disk_failures, stats.num_bad_files = folder.num_failed, folder.num_bad
    if merging.merged is not None:
        stats.mode, stats.merged_adapter = StepMode.MERGED, merging.merged.name
    if modes is not None:
        stats.predicted_step_seconds, stats.measured_step_seconds = modes.predicted_seconds, modes.measured_seconds
        stats.wrong_step_seconds, stats.num_steps_leaving_out = modes.wrong_seconds, modes.num_left_out
    if events is not None:
        stats.num_kv_events, stats.num_dropped_kv_events = events.num_recorded, events.num_dropped
    return stats


@dataclass(frozen=True, slots=True)
class TenantStats:
    """Requests of a tenant, or of an adapter, and its standing in the queue: the lowest standing has the next turn."""

    name: str
    num_running: int
    num_waiting: int
    standing: float


def tenants_of(scheduler: Any) -> list[TenantStats]:
    """Return the tenants with requests in progress, most requests first."""
    running, waiting = (
        Counter(each.fairness_key for each in queue) for queue in (scheduler.running, scheduler.waiting)
    )
    standing = scheduler.lifecycle.service.policy.standing
    names = sorted(running | waiting, key=lambda name: (-running[name] - waiting[name], name))
    return [TenantStats(name, running[name], waiting[name], standing(name)) for name in names]


def adapter_names_of(scheduler: Any) -> tuple[list[str], list[str]]:
    """Return the sorted adapter names of running and of waiting requests."""
    running, waiting = (
        {request.adapter_name for request in requests if request.adapter_name is not None}
        for requests in (scheduler.running, scheduler.waiting)
    )
    return sorted(running), sorted(waiting)
