"""Size of a GPU's arena, and the error, with numbers, if the GPU is too small."""

from __future__ import annotations

from dataclasses import dataclass

from .host_memory import gib as gib

#: The most pages of an arena sized by the free memory. With the small pages of a small model, the bookkeeping for more
#: would cost more than they gain.
MAX_PAGES = 1 << 18


class OutOfDeviceMemory(RuntimeError):
    """The model does not fit the GPU as configured; the message lists the uses of memory, and how to fix it."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a device before its arena is made."""

    free: int
    """As the device reports, with weights and static buffers in place."""
    total: int
    weights: int
    """Weights and static buffers."""
    activations: int
    """The most that a step allocates."""
    graphs: int
    """Estimate for all captured steps."""

    def arena_bytes(self, utilization: float) -> int:
        """Bytes left for the arena if all processes together use this share of the device; may be negative."""
        return int(self.total * utilization) - (self.total - self.free) - self.activations - self.graphs

    def __str__(self) -> str:
        return (
            f"of {gib(self.total)}, weights and static buffers take {gib(self.weights)}, the activations of a step "
            f"{gib(self.activations)}, graphs {gib(self.graphs)}, and {gib(self.free)} are free now"
        )


def check_weights(weights: int, free: int, total: int) -> None:
    """Raise OutOfDeviceMemory, before anything is read, if the weights alone are too large."""
    if weights > free:
        raise OutOfDeviceMemory(
            f"the weights take {gib(weights)}, but {gib(free)} of the device's {gib(total)} are free; use a larger or "
            "emptier GPU, or a smaller dtype"
        )


def num_pages(use: MemoryUse, page_bytes: int, pages_needed: int, utilization: float) -> int:
    """Number of pages of the largest possible arena; raise OutOfDeviceMemory if it is below `pages_needed`.

    pages_needed: for one request of the greatest length, and the dummy page.
    """
    room = use.arena_bytes(utilization)
    pages = max(0, room) // page_bytes
    if pages < pages_needed:
        raise OutOfDeviceMemory(
            f"the page pool may take {gib(max(0, room))} ({pages} pages), but one request of max_model_len needs "
            f"{gib(pages_needed * page_bytes)} ({pages_needed} pages): {use}; lower max_model_len, "
            f"max_num_batched_tokens or max_num_seqs, or raise gpu_memory_utilization ({utilization:g})"
        )
    return min(pages, MAX_PAGES)


def check_pages(use: MemoryUse, page_bytes: int, pages: int) -> None:
    """Raise OutOfDeviceMemory if an arena of the configured size does not fit."""
    room = use.free - use.activations - use.graphs
    if pages * page_bytes > room:
        raise OutOfDeviceMemory(
            f"memory_bytes or num_pages set a page pool of {gib(pages * page_bytes)}, but there is room for "
            f"{gib(max(0, room))}: {use}; lower it, or leave it out to use all free memory"
        )
