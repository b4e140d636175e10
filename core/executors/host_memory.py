"""Default size of the CPU's arena."""

from __future__ import annotations

from pathlib import Path

from ...memory.pages.layout import PageLayout

#: At least this, where the machine has it: what adapters and short requests want whatever the model's length.
LEAST_BYTES = 256 << 20
#: Requests of the greatest length that find room.
LONG_REQUESTS = 4
#: Of the memory that is left beside the weights, what the arena may take.
SHARE = 0.25
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


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that can be had without swapping: the least of what the machine and the process's groups leave."""
    found = [_meminfo(root / "proc/meminfo"), *_groups(root)]
    known = [each for each in found if each is not None]
    return max(0, min(known)) if known else 4 * LEAST_BYTES


def _meminfo(path: Path) -> int | None:
    for line in _lines(path):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return None


def _groups(root: Path) -> list[int | None]:
    """Bytes that the limits of the process's control groups, and of those above them, leave."""
    found: list[int | None] = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, name = line.split(":", 2)
        if not controllers:
            top, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = [part for part in name.split("/") if part not in ("", "..")]
        found += [_left(top.joinpath(*parts[:depth]), limit, used) for depth in range(len(parts) + 1)]
    return found


def _left(group: Path, limit: str, used: str) -> int | None:
    """None where the group has no limit, or none that can be read. Files that it has cached can be had."""
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
