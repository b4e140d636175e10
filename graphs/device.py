"""The device that steps run on: a stream, copies through pinned memory, events, graphs and memory figures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from itertools import pairwise
from statistics import median
from typing import Any
from weakref import WeakSet

import torch

#: The most views of a block that are cached, by shape and dtype.
_KEPT_PARTS = 256


class DeviceError(RuntimeError):
    """The requested device can't be used; the message says how to fix it."""


class CudaDevice:
    """A GPU and one of its streams, which runs work in order and, unless stated otherwise, asynchronously to the host.

    Raises DeviceError if there is no GPU with that index.
    """

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            built = "" if torch.version.cuda else "; this PyTorch was built without CUDA, install one that has it"
            raise DeviceError(f"device is 'cuda', but PyTorch finds no GPU{built}; use device 'cpu' or 'auto'")
        if index >= (count := torch.cuda.device_count()):
            raise DeviceError(f"device is 'cuda:{index}', but there are {count} GPUs, the last is 'cuda:{count - 1}'")
        self.torch_device = torch.device("cuda", index)
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # the graphs that share the pool
        with torch.cuda.device(self.torch_device):
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()

    def scope(self) -> AbstractContextManager[Any]:
        """Inside this context, work of the calling thread goes to this device's stream."""
        return torch.cuda.stream(self._stream)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Allocate host memory, uint8 `[num_bytes]`, that asynchronous copies can read and write."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target.copy_(source)` in stream order. Host memory must be pinned, and unchanged until the copy is done."""
        target.copy_(source, non_blocking=True)

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """Run `work` once, capture it, and return the replay function.

        `work` must write its results into static tensors; tensors that it allocates are invalid after the next replay
        of any graph. All graphs share one memory pool as long as one of them lives. The first run compiles kernels and
        allocates workspaces, which must not happen during capture. Other threads may allocate during capture, as the
        threads that read adapters into pinned memory do.
        """
        with self.scope():
            work()
            torch.cuda.synchronize(self.torch_device)
            if not self._graphs:  # torch drops a pool with its last graph, and refuses to capture into it
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # the stream must leave capture mode; the first error is the useful one
                    graph.capture_end()
                raise
            graph.capture_end()
        self._graphs.add(graph)
        return graph.replay

    def seconds(self, work: Callable[[], object], count: int = 5) -> float:
        """Measure the device time of `work`, captured: the median of `count` replays after one warm-up, by events."""
        replay = self.capture(work)
        with self.scope():
            replay()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
            events[0].record()
            for event in events[1:]:
                replay()
                event.record()
            self.synchronize()
        return median(before.elapsed_time(after) / 1e3 for before, after in pairwise(events))

    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes."""
        return torch.cuda.mem_get_info(self.torch_device)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Return the peak of the bytes that `work` allocates, beyond the bytes allocated before it."""
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        work()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.torch_device) - before

    def is_done(self) -> bool:
        """True if all work of the stream is done, without waiting. Raises RuntimeError if the device is in error."""
        return self._stream.query()

    def synchronize(self) -> None:
        """Wait until all work is done."""
        torch.cuda.synchronize(self.torch_device)

    def failure(self) -> str | None:
        """Return the reason why the device is lost to this process; None while it works.

        Fatal errors (an illegal address, a failed assertion in a kernel, an ECC error, …) are reported by every later
        call until the process ends, by any library and under any name. A leftover error of an earlier call is reported
        once, so only an error that is reported twice counts.
        """
        found = None
        for _ in range(2):
            try:
                self.synchronize()
            except RuntimeError as error:  # torch.AcceleratorError is one
                found = str(error).partition("\n")[0]
            else:
                return None
        return found

    def release(self) -> None:
        """Return unreferenced memory to the device. Graphs captured earlier share no memory with later ones."""
        self.synchronize()
        torch.cuda.empty_cache()
        self._graphs.clear()  # later graphs share no pool with these


class Blocks:
    """Two pinned blocks used in turn, each guarded by an event: no block is overwritten before its copy is done."""

    def __init__(self, device: CudaDevice, num_bytes: int) -> None:
        self._blocks = [(device.pinned(num_bytes), device.event()) for _ in range(2)]
        self._turn = 0
        self._parts: dict[tuple[int, torch.Size, torch.dtype], torch.Tensor] = {}

    def next(self, shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """Return the next block's beginning as a tensor, and its event; record the event after each copy."""
        self._turn = 1 - self._turn
        block, event = self._blocks[self._turn]
        key = self._turn, shape, dtype
        if (part := self._parts.get(key)) is None:
            num_bytes = shape.numel() * dtype.itemsize
            if num_bytes > len(block):
                raise ValueError(f"a copy of {num_bytes} bytes does not fit in a block of {len(block)} bytes")
            if len(self._parts) >= _KEPT_PARTS:
                self._parts.clear()
            part = self._parts[key] = block[:num_bytes].view(dtype).view(shape)
        return part, event


class DeviceUpload:
    """Copies host values into device tensors asynchronously, through `Blocks`."""

    def __init__(self, device: CudaDevice, num_bytes: int) -> None:
        """num_bytes: size of the largest copy."""
        self._device = device
        self._blocks = Blocks(device, num_bytes)

    def __call__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target.copy_(source)` in stream order; source may change as soon as this returns.

        target: contiguous, with source's shape and dtype. Raises ValueError if source is larger than the blocks.
        """
        staged, event = self._blocks.next(source.shape, source.dtype)
        event.synchronize()
        staged.copy_(source)
        self._device.copy(target, staged)
        event.record()


class Download:
    """Fetches device values: a fetch begins in stream order, and the host sleeps when it waits for it later.

    It uses `Blocks`, so a fetch may begin before the previous one has been waited for.
    """

    def __init__(self, device: CudaDevice, num_bytes: int) -> None:
        """num_bytes: size of the largest fetch."""
        self._device = device
        self._blocks = Blocks(device, num_bytes)

    def __call__(self, source: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to fetch the values of a contiguous source; the returned function waits for them.

        Their memory is overwritten when the next fetch but one begins.
        """
        staged, event = self._blocks.next(source.shape, source.dtype)
        self._device.copy(staged, source)
        event.record()

        def values() -> torch.Tensor:
            event.synchronize()
            return staged

        return values
