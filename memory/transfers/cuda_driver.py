"""The few CUDA calls that copies need, as an object that tests can replace.

Tests: tests/memory/transfers/test_dma.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch

from .transfer import ExecutorLost

_NOT_READY = 600  # cudaErrorNotReady
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_PORTABLE, _MAPPED = 1, 2  # flags of cudaHostRegister: for every context, and for the device's own accesses

#: The driver's library: CuPy has no calls for memory values in a stream.
_LIBCUDA = "libcuda.so.1"
_WAIT_UNTIL_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: the counts may wrap around


class MissingCupy(ImportError):
    """CuPy is not installed."""


def cupy_module() -> Any:
    """Import CuPy, or raise MissingCupy, which names the extra to install."""
    try:
        import cupy  # pyright: ignore[reportMissingImports]  # installed only for GPUs
    except ImportError as error:
        major = (torch.version.cuda or "13").split(".")[0]
        raise MissingCupy(
            f"copies that overlap compute need CuPy ({error}); run: pip install 'chorus-lora[cuda{major}]'"
        ) from error
    return cupy


class CupyCalls:
    """CuPy calls for one device, even if it is not the calling thread's current device, as in a reader's thread.

    index: the device's index; None for calls that need no device. failure: returns the reason why the device no longer
    works for this process, or None. An error after such a failure becomes ExecutorLost.
    """

    def __init__(self, index: int | None, failure: Callable[[], str | None] = lambda: None) -> None:
        self._cuda = cupy_module().cuda
        self._runtime = self._cuda.runtime
        self._index = index
        self._failure = failure

    @contextmanager
    def _device(self) -> Iterator[None]:
        try:
            with nullcontext() if self._index is None else self._cuda.Device(self._index):
                yield
        except Exception as error:
            if (failure := self._failure()) is not None:
                raise ExecutorLost(f"the device failed: {failure}") from error
            raise


class CupyDriver(CupyCalls):
    """CUDA calls through CuPy. CuPy and torch use the device's primary context, so their handles are interchangeable.

    A stream is its handle; an event is the object that `new_event` returns. Any call may raise ExecutorLost.
    """

    def __init__(self, index: int, failure: Callable[[], str | None] = lambda: None) -> None:
        super().__init__(index, failure)
        self._streams: list[Any] = []  # a handle is valid while its stream object lives

    def new_stream(self) -> int:
        """Create a stream for copies that never waits for the default stream."""
        with self._device():
            # The default priority is the lowest. Copies don't compete with kernels for cores in any case.
            self._streams.append(self._cuda.Stream(non_blocking=True))
        return self._streams[-1].ptr

    def compute_stream(self) -> int:
        """Return the stream on which the calling thread launches compute."""
        # 0 is torch's default stream; its other name is valid whichever default stream CuPy uses
        return torch.cuda.current_stream(self._index).cuda_stream or self._runtime.streamLegacy

    def new_event(self) -> Any:
        with self._device():
            return self._cuda.Event(disable_timing=True)

    def record(self, event: Any, stream: int) -> None:
        """Make `event` fire when all work given to `stream` so far is complete."""
        with self._device():
            self._runtime.eventRecord(event.ptr, stream)

    def wait_event(self, stream: int, event: Any) -> None:
        """Make work given to `stream` from now on wait for `event`. The host does not wait."""
        with self._device():
            self._runtime.streamWaitEvent(stream, event.ptr)

    def query(self, event: Any) -> bool:
        """True if `event` has fired. Raises if the device is in error, because the event would never fire."""
        status = self._runtime.eventQuery(event.ptr)
        if status not in (0, _NOT_READY):
            with self._device():
                raise self._runtime.CUDARuntimeError(status)
        return status == 0

    def synchronize(self, event: Any) -> None:
        """Make the host wait for `event`."""
        with self._device():
            self._runtime.eventSynchronize(event.ptr)

    def memcpy_async(self, target: int, source: int, num_bytes: int, to_device: bool, stream: int) -> None:
        """Copy between a host address and a device address."""
        kind = self._runtime.memcpyHostToDevice if to_device else self._runtime.memcpyDeviceToHost
        with self._device():
            self._runtime.memcpyAsync(target, source, num_bytes, kind, stream)

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin whole pages of host memory, which the device then sees at the host's addresses. Raises MemoryError if the
        system grants no more.
        """
        try:
            with self._device():
                self._runtime.hostRegister(address, num_bytes, _PORTABLE | _MAPPED)
        except self._runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise
            raise MemoryError(str(error)) from error

    def unpin(self, address: int) -> None:
        """Unpin memory of `pin`; no copy may be using it."""
        with self._device():
            self._runtime.hostUnregister(address)

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Make `stream` write a uint32 to an address, once all its work so far is complete and visible."""
        self._of_values("cuStreamWriteValue32_v2", stream, address, value, 0)

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """Make work given to `stream` from now on wait until the uint32 at an address is at least `value`."""
        self._of_values("cuStreamWaitValue32_v2", stream, address, value, _WAIT_UNTIL_AT_LEAST)

    @cached_property
    def _library(self) -> ctypes.CDLL:
        """Opened once: a step with exchanges makes hundreds of calls, and opening takes longer than a call."""
        return ctypes.CDLL(_LIBCUDA)

    def _of_values(self, name: str, stream: int, address: int, value: int, flags: int) -> None:
        with self._device():
            status = getattr(self._library, name)(
                ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(flags)
            )
            if status:
                raise self._cuda.driver.CUDADriverError(status)
