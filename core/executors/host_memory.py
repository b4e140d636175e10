"""Default sizes of host memory: the CPU's arena, and images of adapters and of swapped KV."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from ...memory.pages.layout import PageLayout
from ..config import LEAST_HOST_CACHE_BYTES
from ..control_groups import control_groups

logger = logging.getLogger(__name__)

#: The least arena if the machine has the memory: enough for adapters and short requests with any model length.
LEAST_BYTES = 256 << 20
#: Number of requests of the greatest length that fit.
LONG_REQUESTS = 4
#: The arena's share of the memory that the weights leave.
SHARE = 0.25
#: The share of the machine's memory for the arena and for copies of the weights in float32.
WIDE_SHARE = 0.5
#: The images' share of the memory that is free at the start.
HOST_CACHE_SHARE = 0.125
#: Memory for sampling, in addition to the logits.
SAMPLING_BYTES = 32 << 20


def default_arena_bytes(
    layout: PageLayout, max_model_len: int, weights: int, logits: int, available: int | None = None
) -> int:
    """Room for a few requests of the greatest length, within a share of the memory that weights and sampling leave.

    weights: their bytes. logits: number of logits, in as many rows as a step may sample from. available: bytes that
    this process may still take; by default, read from the system.
    """
    if available is None:
        available = available_bytes()
    wanted = LEAST_BYTES + LONG_REQUESTS * layout.pages_for_tokens(max_model_len) * layout.page_bytes
    sampling = 4 * logits + SAMPLING_BYTES
    return max(2 * layout.page_bytes, min(wanted, int(SHARE * max(0, available - weights - sampling))))


def default_host_cache_bytes(available: int | None = None) -> int:
    """Host memory for images: a share of the memory that this process may still take, by default the system's."""
    return max(LEAST_HOST_CACHE_BYTES, int(HOST_CACHE_SHARE * (available_bytes() if available is None else available)))


def available_bytes(proc: Path = Path("/proc")) -> int:
    """Memory available without swapping: the minimum over the machine and the process's control groups."""
    known = [_meminfo("MemAvailable", proc), *(most - taken for most, taken in _groups(proc))]
    return max(0, min((each for each in known if each is not None), default=4 * LEAST_BYTES))


def total_bytes(proc: Path = Path("/proc")) -> int:
    """Memory of the machine, or the least limit of the process's control groups: the same at every start."""
    known = [_meminfo("MemTotal", proc), *(most for most, _ in _groups(proc))]
    return min((each for each in known if each is not None), default=_physical_bytes())


def warn_of_more_than_all(setting: str, num_bytes: int) -> None:
    """Log a warning if a setting asks for more memory than the machine has. setting: its name and value."""
    if num_bytes > (most := total_bytes()):
        logger.warning(
            "%s, but the machine has %s of memory: the system may end this process once so much is in use; lower it",
            setting,
            gib(most),
        )


def gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"


def _physical_bytes() -> int:
    """Physical memory on systems without /proc, such as macOS."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _meminfo(wanted: str, proc: Path) -> int | None:
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == wanted:
            return int(value.split()[0]) << 10
    return None


def _groups(proc: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of each of the process's control groups that has a limit; cached files don't count as used."""
    for group, version in control_groups("memory", proc / "self"):
        limit, used = (
            ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        most, taken = _lines(group / limit), _lines(group / used)
        if most and taken and most[0].isdigit() and taken[0].isdigit():
            stat = _lines(group / "memory.stat")
            cached = next((int(line.split()[1]) for line in stat if line.startswith("file ")), 0)
            yield int(most[0]), int(taken[0]) - cached


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
