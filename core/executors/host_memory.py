"""Default sizes of what lies in host memory: the CPU's arena, and images of adapters and of swapped KV."""

from __future__ import annotations

from pathlib import Path

from ...memory.pages.layout import PageLayout
from ..config import LEAST_HOST_CACHE_BYTES
from ..control_groups import control_groups

#: At least this, where the machine has it: what adapters and short requests want whatever the model's length.
LEAST_BYTES = 256 << 20
#: Requests of the greatest length that find room.
LONG_REQUESTS = 4
#: Of the memory that is left beside the weights, what the arena may take.
SHARE = 0.25
#: Of the memory that is left at the start, what images may take.
HOST_CACHE_SHARE = 0.125
#: Beside the logits that tokens are drawn from, what drawing them takes.
DRAWING_BYTES = 32 << 20


def default_arena_bytes(
    layout: PageLayout, max_model_len: int, checkpoint: Path, logits: int, available: int | None = None
) -> int:
    """Room for a few requests of the greatest length, within a share of the memory that weights and drawing leave.

    logits: in as many rows as a step may draw tokens from. available: bytes that this process may still take; read from
    the system if left out.
    """
    if available is None:
        available = available_bytes()
    wanted = LEAST_BYTES + LONG_REQUESTS * layout.pages_for_tokens(max_model_len) * layout.page_bytes
    weights = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    drawing = 4 * logits + DRAWING_BYTES
    return max(2 * layout.page_bytes, min(wanted, int(SHARE * max(0, available - weights - drawing))))


def default_host_cache_bytes(available: int | None = None) -> int:
    """Host memory for images: a share of what this process may still take; read from the system if left out."""
    return max(LEAST_HOST_CACHE_BYTES, int(HOST_CACHE_SHARE * (available_bytes() if available is None else available)))


def available_bytes(proc: Path = Path("/proc")) -> int:
    """Memory that can be had without swapping: the least of what the machine and the process's groups leave."""
    groups = (_left(group, version) for group, version in control_groups("memory", proc / "self"))
    known = [each for each in (_meminfo(proc / "meminfo"), *groups) if each is not None]
    return max(0, min(known)) if known else 4 * LEAST_BYTES


def _meminfo(path: Path) -> int | None:
    for line in _lines(path):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return None


def _left(group: Path, version: int) -> int | None:
    """None where the group has no limit, or none that can be read. Files that it has cached can be had."""
    limit, used = (
        ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    most, taken = _lines(group / limit), _lines(group / used)
    if not most or not taken or not most[0].isdigit() or not taken[0].isdigit():
        return None
    cached = next((int(line.split()[1]) for line in _lines(group / "memory.stat") if line.startswith("file ")), 0)
    return int(most[0]) - int(taken[0]) + cached


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
