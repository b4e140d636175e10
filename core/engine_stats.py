"""Snapshot of an engine for metrics."""

from __future__ import annotations

from dataclasses import dataclass

from ..graphs.runner import StepMode
from .requests.types import StepInfo

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens of a step up to which it counts in each bucket but the last: vLLM's."""


@dataclass(slots=True)  # not frozen: made for each step, which would take four times as long
class EngineStats:
    """Counts and seconds of an engine at one moment, which nothing changes; pages are counts."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_kv_pages: int
    num_adapter_pages: int
    num_cached_pages: int
    num_steps: int
    num_preemptions: int
    num_generated_tokens: int
    num_adapter_hits: int
    num_adapter_loads: int
    num_streamed_loads: int
    num_adapter_evictions: int
    num_prefix_hit_tokens: int
    num_prefix_query_tokens: int
    last_step: StepInfo | None
    num_reads: int = 0  # adapters being read
    num_failed_reads: int = 0
    num_given_up_reads: int = 0
    num_swapped: int = 0  # requests with KV in host memory, what is being copied included
    swapped_bytes: int = 0  # that it takes there
    num_swaps_out: int = 0
    num_swaps_in: int = 0
    swapped_bytes_out: int = 0
    swapped_bytes_in: int = 0
    num_swaps_dropped: int = 0  # KV in host memory that came to nothing: lost, in others' way, or cached anyway
    num_shadow_pages: int = 0
    mode: StepMode = StepMode.LORA  # merged, or lora as each step needs it
    merged_adapter: str | None = None
    num_merges: int = 0
    num_mode_switches: int = 0
    merge_seconds: float = 0.0  # that the latest merge took, all pauses together
    longest_merge_pause: float = 0.0
    # by a policy of modes: what decode steps were predicted to take, what they took, the sum of the differences
    predicted_step_seconds: float = 0.0
    measured_step_seconds: float = 0.0
    wrong_step_seconds: float = 0.0
    num_steps_leaving_out: int = 0
    num_steps_ahead: int = 0  # launched before the tokens of the one before were read
    oldest_read_seconds: float = 0.0  # the longest time without progress among reads under way
    num_kv_events: int = 0  # blocks that entered or left the prefix cache, while that is published
    num_dropped_kv_events: int = 0  # dropped, as the publisher was too slow
    # requests' adapters on their way, by how a first step began: when they had been read, beside their copy, or with
    # assistants; and by how much longer steps took than the best choice would have made them
    num_waited_starts: int = 0
    num_streamed_starts: int = 0
    num_assisted_starts: int = 0
    cold_start_regret: float = 0.0
    num_step_tokens: int = 0  # of all steps
    step_sizes: tuple[int, ...] = ()  # numbers of steps with up to each of `STEP_SIZES` tokens, and with more

    @property
    def kv_usage(self) -> float:
        """Share of the pages that adapters leave which hold running requests' KV."""
        room = self.num_pages - self.num_adapter_pages
        return self.num_kv_pages / room if room > 0 else 1.0


@dataclass(frozen=True, slots=True)
class AccountStats:
    """Requests of a tenant, or of an adapter, and its standing in the queue: the lowest has the next turn."""

    name: str
    num_running: int
    num_waiting: int
    standing: float
