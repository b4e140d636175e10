"""Roofline of a case of the CPU benchmark on a machine of given limits. Arithmetic only.

Prefill is bounded by floating-point work or by one pass over the weights, a decode step by the bytes it must read:
weights once, every active adapter once, the KV of all requests; or by its own work where that takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from .workload import Workload


@dataclass(frozen=True)
class Bound:
    """The least time of a case's two parts, in seconds, and what they were computed from."""

    prefill_seconds: float
    decode_seconds: float
    prefill_flops: float
    step_bytes: float
    output_tokens: int
    requests: int
    prompt_tokens: int

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second until every request has its first token."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_rate(self) -> float:
        """Tokens per second of the decode steps alone; the first token of a request is the prefill's."""
        return (self.output_tokens - self.requests) / self.decode_seconds

    def to_json(self) -> dict[str, float]:
        return {
            "rate": self.tokens_per_second, "seconds": self.seconds, "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds, "prefill_gflop": self.prefill_flops / 1e9,
            "prefill_rate": self.prefill_rate, "step_mb": self.step_bytes / 1e6, "decode_rate": self.decode_rate,
        }  # fmt: skip


def bound(workload: Workload, case: str, read_bytes_per_s: float, flops_per_s: float) -> Bound:
    """The bound of one run of `case`: all prompts at once, then `output_tokens - 1` decode steps."""
    shape, item, count = workload.geometry, workload.itemsize, workload.requests
    chosen = [0 if adapter is None else workload.adapter_params(adapter) for adapter in workload.assignment(case)]
    active = {adapter for adapter in workload.assignment(case) if adapter is not None}
    adapter_params = sum(map(workload.adapter_params, active))
    weight_params = shape.layer_params + shape.head_params + adapter_params

    prompt = workload.prompt_tokens
    per_token = [2 * (shape.layer_params + params) for params in chosen]
    attention = 4 * shape.layers * shape.hidden  # per (token, earlier token) pair: scores and values
    prefill_flops = prompt * sum(per_token) + count * (2 * shape.head_params + attention * prompt * (prompt + 1) / 2)
    prefill = max(prefill_flops / flops_per_s, weight_params * item / read_bytes_per_s)

    steps = workload.output_tokens - 1
    mean_length = prompt + (steps + 1) / 2
    step_bytes = item * (weight_params + count * mean_length * shape.kv_elems_per_token)
    step_flops = sum(per_token) + count * (2 * shape.head_params + attention * mean_length)
    step = max(step_bytes / read_bytes_per_s, step_flops / flops_per_s)
    return Bound(
        prefill, steps * step, prefill_flops, step_bytes, count * workload.output_tokens, count, count * prompt
    )
