"""Processors that this process may use: their kind, the affinity mask, and the quota of the control groups."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

from .control_groups import PROC, control_groups

#: Features, as /proc/cpuinfo names them, any one of which makes torch's products in 16 bits faster than in float32.
FAST_GEMMS = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),  # the last is ARM's
    "float16": frozenset({"avx512_fp16", "amx_fp16"}),
}


def available_cpus(proc: Path = PROC) -> int:
    """Processors of the affinity mask, or the whole processors of the CPU quota if these are fewer; at least one.

    A thread beyond the quota gains nothing: once the group's time is spent, all its threads stand still until the next
    period begins.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(proc)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def reading_threads(proc: Path = PROC) -> int:
    """Threads that read adapters at once: one reads from the page cache at a few GB/s, less than a GPU's link takes; of
    the processors half are left to everything else.
    """
    return min(8, max(2, available_cpus(proc) // 2))


def cpu_quota(proc: Path = PROC) -> float | None:
    """Processors' worth of time that this process's group, or one that it is nested in, may use; None: no limit.

    proc: the process's directory in /proc, or one that looks like it.
    """
    limits = (_limit(group, version) for group, version in control_groups("cpu", proc))
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(group: Path, version: int) -> float | None:
    """Limit in a group's own files."""
    try:
        if version == 2:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return float(quota) / float(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError, ZeroDivisionError):
        return None  # no such file in a hierarchy's root, or without the controller


def has_fast_gemms(dtype: str, proc: Path = Path("/proc")) -> bool:
    """True if the processor multiplies matrices of `dtype` as fast as float32's: by its features, never by a timing."""
    wanted = FAST_GEMMS.get(dtype)
    return wanted is None or not wanted.isdisjoint(features(proc))


def features(proc: Path = Path("/proc")) -> frozenset[str]:
    """Instruction sets of the processor, as /proc/cpuinfo names them; none where the system does not say."""
    found = _cpuinfo(proc)
    return frozenset((found.get("flags") or found.get("Features") or "").split())


def processor_name(proc: Path = Path("/proc")) -> str:
    """Return the processor's model, for people."""
    return _cpuinfo(proc).get("model name") or platform.processor() or platform.machine()


@cache
def _cpuinfo(proc: Path) -> dict[str, str]:
    """The entry of the first processor in /proc/cpuinfo."""
    try:
        lines = (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): " ".join(value.split()) for name, _, value in (line.partition(":") for line in lines)}
