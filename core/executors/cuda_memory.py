"""Size of a GPU's arena, and the error, with its numbers, when the GPU is too small."""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 1 << 30

#: Most pages of an arena sized by the free memory: for the small pages of a small model, the bookkeeping of more pages
#: would cost more than they gain.
MAX_PAGES = 1 << 18


class OutOfDeviceMemory(RuntimeError):
    """The model does not fit the GPU as configured; the text says what takes how much, and how to fix it."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a device before its arena is made.

    free, total: as the device says, with weights and static buffers in place. weights: they and the static buffers.
    activations: what a step allocates at most. graphs: what captured steps will take, an estimate.
    """

    free: int
    total: int
    weights: int
    activations: int
    graphs: int

    def arena_bytes(self, utilization: float) -> int:
        """Bytes left for the arena when all of this process and others take that share of the device; may be < 0."""
        return int(self.total * utilization) - (self.total - self.free) - self.activations - self.graphs

    def __str__(self) -> str:
        return (
            f"of {gib(self.total)}, weights and static buffers take {gib(self.weights)}, the activations of a step "
            f"{gib(self.activations)}, graphs {gib(self.graphs)}, and {gib(self.free)} are free now"
        )


def gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"


def check_weights(weights: int, free: int, total: int) -> None:
    """OutOfDeviceMemory, before anything is read, when the weights alone are too large."""
    if weights > free:
        raise OutOfDeviceMemory(
            f"the weights take {gib(weights)}, {gib(free)} of the device's {gib(total)} are free; use a larger or an "
            "emptier GPU, or a smaller dtype"
        )


def num_pages(use: MemoryUse, page_bytes: int, pages_needed: int, utilization: float) -> int:
    """Pages of an arena that takes all that it may. pages_needed: for one request of the longest length, and the dummy.

    OutOfDeviceMemory when there are fewer.
    """
    room = use.arena_bytes(utilization)
    pages = max(0, room) // page_bytes
    if pages < pages_needed:
        raise OutOfDeviceMemory(
            f"the arena may take {gib(max(0, room))} ({pages} pages), one request of max_model_len needs "
            f"{gib(pages_needed * page_bytes)} ({pages_needed} pages): {use}; lower max_model_len, "
            f"max_num_batched_tokens or max_num_seqs, or raise gpu_memory_utilization ({utilization:g})"
        )
    return min(pages, MAX_PAGES)


def check_pages(use: MemoryUse, page_bytes: int, pages: int) -> None:
    """OutOfDeviceMemory when an arena of a configured size does not fit."""
    room = use.free - use.activations - use.graphs
    if pages * page_bytes > room:
        raise OutOfDeviceMemory(
            f"memory_bytes or num_pages ask for an arena of {gib(pages * page_bytes)}, there is room for "
            f"{gib(max(0, room))}: {use}; lower it, or leave it out to take what there is"
        )
