"""Processors that this process may use: its affinity mask, and the quota of the control groups that it is in."""

from __future__ import annotations

import os
from pathlib import Path

from .control_groups import PROC, control_groups


def available_cpus(proc: Path = PROC) -> int:
    """Processors of the affinity mask, or the whole ones of the CPU quota if those are fewer; at least one.

    A thread beyond the quota gains nothing: once the group's time is spent, all its threads stand still until the next
    period begins.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(proc)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


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
