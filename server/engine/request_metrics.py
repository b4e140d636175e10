"""Histograms of finished requests and choices, under the names that vLLM's dashboards use.

Tests: tests/server/engine/test_metrics.py
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

from ..text.output_parts import OutputKind
from .metric_families import MODEL_LABELS

_DIGITS = (1, 2, 5)
TOKEN_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in _DIGITS)
N_BUCKETS = (1, 2, 5, 10, 20)
SECONDS_BUCKETS = (
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
TOKEN_SECONDS_BUCKETS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished choice. Times are seconds from its request's arrival."""

    seconds: float
    queue_seconds: float | None
    """First admission; None if it was never admitted."""
    first_seconds: float | None
    """First token; None without one."""
    last_seconds: float
    """Latest token."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    max_tokens: int | None
    num_preemptions: int = 0
    kinds: frozenset[OutputKind] = frozenset()
    """What its parsed output had; empty if it was not parsed."""
    page_seconds: float = 0.0
    """Pages of KV times the seconds that it held them."""
    is_first_choice: bool = True
    """False for a further choice of the same prompt, whose tokens count once."""

    @property
    def token_seconds(self) -> float | None:
        """Mean seconds of an output token after the first; None without a token."""
        if self.first_seconds is None:
            return None
        return (self.last_seconds - self.first_seconds) / max(self.num_generated_tokens - 1, 1)


class RequestMetrics:
    """Observes each choice when it ends, and each request when its last choice ends."""

    def __init__(self, everything: tuple[str, str], registry: CollectorRegistry) -> None:
        """everything: values of vLLM's labels."""

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, MODEL_LABELS, buckets=buckets, registry=registry).labels(*everything)

        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request", TOKEN_BUCKETS)
        self._computed = histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that the prefix cache did not have",
            TOKEN_BUCKETS,
        )
        self._generated = histogram("request_generation_tokens", "Generated tokens of a request", TOKEN_BUCKETS)
        self._most = histogram(
            "request_max_num_generation_tokens", "Tokens of the longest choice of a request", TOKEN_BUCKETS
        )
        self._preemptions = histogram("request_num_preemptions", "Preemptions of a request", N_BUCKETS)
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens of a request", TOKEN_BUCKETS)
        self._n = histogram("request_params_n", "Choices of a request", N_BUCKETS)
        self._queue = histogram("request_queue_time_seconds", "Time from arrival to admission", SECONDS_BUCKETS)
        self._inference = histogram(
            "request_inference_time_seconds", "Time from admission to the last token", SECONDS_BUCKETS
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "Time from admission to the first token", SECONDS_BUCKETS
        )
        self._decode = histogram(
            "request_decode_time_seconds", "Time from the first token to the last", SECONDS_BUCKETS
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time per output token after the first", TOKEN_SECONDS_BUCKETS
        )

        kinds = Counter(
            "chorus_parsed_outputs",
            "Parsed answers by what they have, each once under each kind: text, reasoning, call, call_in_reasoning, "
            "open_reasoning and open_call (cut off), unparsed (a mark of calls before what is no call)",
            ("kind",),
            registry=registry,
        )
        self._kinds = {kind: kinds.labels(kind.value) for kind in OutputKind}

    def ended(self, one: Ended) -> None:
        for kind in one.kinds:
            self._kinds[kind].inc()
        self._prompt.observe(one.num_prompt_tokens)
        self._generated.observe(one.num_generated_tokens)
        self._preemptions.observe(one.num_preemptions)
        if one.max_tokens is not None:
            self._max_tokens.observe(one.max_tokens)
        if one.first_seconds is None:
            return
        self._computed.observe(one.num_prompt_tokens - one.num_cached_tokens)
        decode = one.last_seconds - one.first_seconds
        self._decode.observe(decode)
        assert one.token_seconds is not None
        self._per_token.observe(one.token_seconds)
        if one.queue_seconds is not None:
            self._queue.observe(one.queue_seconds)
            prefill = max(one.first_seconds - one.queue_seconds, 0.0)  # the times may come from two processes' clocks
            self._prefill.observe(prefill)
            self._inference.observe(prefill + decode)

    def request_ended(self, n: int, num_generated_tokens: int) -> None:
        """All choices of a request have ended. num_generated_tokens: of the longest choice."""
        self._n.observe(n)
        self._most.observe(num_generated_tokens)
