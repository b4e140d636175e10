"""Processors that this process may use: its affinity mask, and the quota of the control groups that it is in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_PROC = Path("/proc/self")


def available_cpus(proc: Path = _PROC) -> int:
    """Processors of the affinity mask, or the whole ones of the CPU quota if those are fewer; at least one.

    A thread beyond the quota gains nothing: once the group's time is spent, all its threads stand still until the next
    period begins.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(proc)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cpu_quota(proc: Path = _PROC) -> float | None:
    """Processors' worth of time that this process's group, or one that it is nested in, may use; None: no limit.

    proc: the process's directory in /proc, or one that looks like it.
    """
    limits = [limit for group, version in _groups(proc) if (limit := _limit(group, version)) is not None]
    return min(limits, default=None)


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


def _groups(proc: Path) -> Iterator[tuple[Path, int]]:
    """Directories of the process's groups that may have a CPU quota, and of all that these are nested in."""
    try:
        memberships = (proc / "cgroup").read_text().splitlines()
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:
        return
    for membership in memberships:
        number, controllers, path = membership.split(":", 2)
        version = 2 if number == "0" else 1
        if version == 1 and "cpu" not in controllers.split(","):
            continue
        for root, at, kind, options in map(_mount, mounts):
            if kind == ("cgroup2" if version == 2 else "cgroup") and (version == 2 or "cpu" in options.split(",")):
                inside = PurePosixPath(path)
                inside = inside.relative_to(root) if inside.is_relative_to(root) else PurePosixPath()
                group = Path(at) / inside
                yield from ((parent, version) for parent in (group, *group.parents) if parent.is_relative_to(at))


def _mount(fields: list[str]) -> tuple[str, str, str, str]:
    """A mount's root within its file system, where it is mounted, its kind and its own options; see proc(5)."""
    after = fields.index("-")
    return fields[3], fields[4], fields[after + 1], fields[after + 3]
