"""Rules of a schedule, so that kernels compile from it and don't spill registers."""

from __future__ import annotations

from .sgmv_schedule import Schedule

#: Most shared memory of a program: two fit beside each other even on sm_80, which has 164 KiB.
SHARED_LIMIT = 80 * 1024

#: Most float32 of a block of sums per thread; the operands take about as many registers again.
SUMS_PER_THREAD = 64

#: Least inputs that the programs of a decode shrink go through at once: blocks of inputs beyond are unrolled.
LEAST_DECODE_INPUTS = 2048

_BLOCKS = ("tile_tokens", "block_r", "expand_r", "block_k", "block_n")
_MOST = {"max_splits": 64, "warps": 16, "stages": 8}


def check_schedule(schedule: Schedule, max_rank: int, itemsize: int) -> None:
    """ValueError that names the field, unless the schedule serves tables of that rank and elements of that size."""
    least = 16 if schedule.tensor_cores else 1
    for name in (*_BLOCKS, "max_splits", "lanes", "warps", "stages"):
        value = getattr(schedule, name)
        if value < 1:
            raise ValueError(f"{name} is {value}; at least 1")
        if name in (*_BLOCKS, "warps") and value & (value - 1):
            raise ValueError(f"{name} is {value}; a power of two")
        if name in _BLOCKS and value < least:
            raise ValueError(f"{name} is {value}; tensor cores need at least {least}")
        if value > _MOST.get(name, value):
            raise ValueError(f"{name} is {value}; at most {_MOST[name]}")
    for name in ("block_k", "block_n"):
        if getattr(schedule, name) * itemsize < 16:
            raise ValueError(f"{name} is {getattr(schedule, name)}; a load needs 16 bytes")
    if schedule.lanes > (most := -(-max_rank // schedule.block_r)):
        raise ValueError(f"lanes is {schedule.lanes}; {most} take all rank-rows of rank {max_rank}")
    inputs = schedule.block_k * schedule.max_splits
    if not schedule.tensor_cores and inputs < LEAST_DECODE_INPUTS:
        raise ValueError(f"block_k times max_splits is {inputs}; decode needs at least {LEAST_DECODE_INPUTS}")
    for name, sums in _sums(schedule).items():
        if sums > SUMS_PER_THREAD * 32 * schedule.warps:
            raise ValueError(
                f"{name} make {sums} sums in {schedule.warps} warps; at most {SUMS_PER_THREAD} per thread fit registers"
            )
    if (shared := shared_bytes(schedule, itemsize)) > SHARED_LIMIT:
        raise ValueError(f"stages is {schedule.stages}: {shared} bytes of shared memory; at most {SHARED_LIMIT}")


def shared_bytes(schedule: Schedule, itemsize: int) -> int:
    """Estimate of the tiles that a program on tensor cores keeps in shared memory, the larger of shrink and expand."""
    if not schedule.tensor_cores:
        return 0
    shrink = (schedule.tile_tokens + schedule.block_r) * schedule.block_k * schedule.stages
    expand = schedule.expand_r * (schedule.tile_tokens + schedule.block_n * schedule.stages)
    return max(shrink, expand) * itemsize


def _sums(schedule: Schedule) -> dict[str, int]:
    """float32 sums of a program, by the fields that make them."""
    if schedule.tensor_cores:
        return {
            "tile_tokens and block_r": schedule.tile_tokens * schedule.block_r,
            "tile_tokens and block_n": schedule.tile_tokens * schedule.block_n,
        }
    return {
        "block_r and block_k": schedule.block_r * schedule.block_k,
        "expand_r and block_n": schedule.expand_r * schedule.block_n,
    }
