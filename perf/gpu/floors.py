"""The least time of a step on a device of measured limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..cpu.roofline import bound
from ..cpu.workload import Workload
from .context import Context


@dataclass(frozen=True)
class Floors:
    """Of one case, in seconds. adapters: the part of `decode` that reading the adapters takes."""

    prefill: float
    decode: float
    adapters: float
    prefill_flops: float
    step_bytes: float


def floors(context: Context, requests: int, tokens: int, ranks: tuple[int, ...] = ()) -> Floors:
    """Of `requests` requests with `tokens` tokens each, their adapters of `ranks` in turn; no ranks: the base model.

    A decode step reads weights, KV and every adapter once, at the measured bandwidth; a prefill multiplies at the
    measured rate, or reads the weights where that takes longer.
    """
    workload = Workload(
        context.size.geometry, requests=requests, prompt_tokens=tokens, output_tokens=2, ranks=ranks or (1,),
        dtype=context.dtype_name,
    )  # fmt: skip
    bandwidth, flops = context.bandwidth(), context.limits()["matmul"]["flops_per_s"]
    base = bound(workload, "base", bandwidth, flops)
    found = bound(workload, "mixed", bandwidth, flops) if ranks else base
    return Floors(
        prefill=found.prefill_seconds,
        decode=found.step_bytes / bandwidth,
        adapters=(found.step_bytes - base.step_bytes) / bandwidth,
        prefill_flops=found.prefill_flops,
        step_bytes=found.step_bytes,
    )


def stated(context: Context) -> dict[str, Any]:
    """Inputs of the floors, for the result file."""
    return {
        "bandwidth_bytes_per_s": context.bandwidth(),
        "matmul_flops_per_s": context.limits()["matmul"]["flops_per_s"],
        "decode": "bytes of weights, KV and adapters, each once, at the bandwidth",
        "prefill": "FLOP at the matmul rate, or the bytes of the weights where that takes longer",
    }
