"""Programmatic dependent launch: a kernel begins while the previous one on its stream ends.

See the CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; compute capability 9.0 and
later. Such a kernel may read data that no earlier kernel writes, and must wait before it reads or writes anything else.
Every path through it must wait, because a kernel that waits for it assumes that all earlier kernels have ended, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

logger = logging.getLogger(__name__)

#: The least major compute capability on which launches begin early by default.
LEAST_MAJOR = 9

#: Options of a launch that begins early; the kernel's constant PDL is then 1.
OPTIONS = {"launch_pdl": True}

#: Steps must take this many times as long with early launches to have none; smaller differences are noise, as where
#: GEMM backends and attention are chosen. Base steps of up to 16 rows took 0.97 to 0.99 of the time without on an H100
#: (perf/results), those with adapters more.
_NEAR = 1.02

_allowed = True


def allow(wanted: bool) -> None:
    """Let launches begin early where they can, or never, from now on; captured launches stay as they are."""
    global _allowed
    _allowed = wanted
    begins_early.cache_clear()


@contextmanager
def only(wanted: bool) -> Iterator[None]:
    """Within this context, launches begin early only if `wanted` and allowed; captured ones stay so."""
    before = _allowed
    allow(wanted and before)
    try:
        yield
    finally:
        allow(before)


def better_late(sizes: Iterable[int], seconds: Callable[[int], float]) -> set[int]:
    """Return the sizes of steps that take less time if none of their launches begins early. seconds: of a step."""
    found, notes = set[int](), list[str]()
    for size in sizes:
        with only(True):
            early = seconds(size)
        with only(False):
            late = seconds(size)
        if early > _NEAR * late:
            found.add(size)
        notes.append(f"{size} {1e6 * early:.0f} / {1e6 * late:.0f}")
    logger.info(
        "steps of the base model in which no launch begins early, by rows: %s (rows, and µs a step, early / late: %s)",
        sorted(found) or "none",
        ", ".join(notes),
    )
    return found


@cache
def begins_early(device: torch.device) -> bool:
    """True if launches on a device begin early; cached, because every launch asks."""
    return _allowed and device.type == "cuda" and is_supported(_capability(device))


def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def is_supported(capability: int) -> bool:
    """True if a GPU supports it and this Triton compiles it."""
    if capability // 10 < LEAST_MAJOR:
        return False
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from .wait_triton import wait_alone

    try:
        target = GPUTarget("cuda", capability, 32)
        triton.compile(ASTSource(wait_alone, {}, {}), target=target, options={"enable_fp_fusion": True, **OPTIONS})
    except Exception as error:  # from any part of the compiler
        reason = type(error.__cause__ or error).__name__
        logger.warning("no kernel begins before another ends: Triton %s: %s", triton.__version__, reason)
        return False
    return True


def options(early: bool) -> dict[str, bool]:
    """Options of a launch. early: it may begin before the previous launch has ended."""
    return OPTIONS if early else {}
