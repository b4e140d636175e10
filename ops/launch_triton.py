"""Launches of Triton kernels that are made again and again, with what does not change between them looked up once.

Import this module lazily: it needs triton.
"""

# The base class of drivers names nothing of what they have.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import JITFunction, driver

#: Triton takes it that an address is a multiple of so many bytes once one was, and compiles anew for another.
_ALIGN = 16

_LARGEST = (1 << 31) - 1  # of an integer that Triton takes as 32 bits wide


class KernelLauncher:
    """A kernel with its constants and options.

    A launch by Triton itself asks for the options, for every argument's type and for what else the kernel is compiled
    for: about 20 µs of Python. Here the compiled kernel is kept by what it depends on, and launched as Triton launches
    it (`JITFunction.run`, of one form from 3.4 to 3.9). That is: the device, the tensors' types and alignment, and the
    very values of integers that it may have been compiled for. Tensors that are not all aligned, integers beyond 32
    bits, hooks of a profiler, and interpreted kernels go Triton's way.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any]) -> None:
        """kernel: takes tensors first, then numbers, then constants. constants: with the options of the launch."""
        self._kernel = kernel
        self._constants = constants
        self._found: dict[Hashable, _Found] = {}
        self._values = ()  # of the constants, in the kernel's order
        if isinstance(kernel, JITFunction):
            self._values = tuple(constants[param.name] for param in kernel.params if param.is_constexpr)

    def __call__(
        self, grid: tuple[int, int, int], tensors: tuple[torch.Tensor, ...], free: tuple[float, ...],
        strides: tuple[int, ...],
    ) -> None:  # fmt: skip
        """Launch on the current stream of the tensors' device, which is the current device.

        free: numbers that the kernel is not specialized for, floats or `do_not_specialize`. strides: numbers that it
        may be specialized for.
        """
        kind = tensors[0].get_device(), strides, *[tensor.dtype for tensor in tensors]
        found = self._found.get(kind)
        if found is None:
            self._launch_first(kind, grid, tensors, free, strides)
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        hook = knobs.runtime.launch_enter_hook
        if bits % _ALIGN or max(free, default=0) > _LARGEST or getattr(hook, "calls", hook):
            self._kernel[grid](*tensors, *free, *strides, **self._constants)
            return
        stream = driver.active.get_current_stream(kind[0])
        found.run(
            *grid, stream, found.function, found.metadata, None, None, None, *addresses, *free, *strides, *self._values
        )  # fmt: skip

    def compile(self, tensors: tuple[torch.Tensor, ...], free: tuple[float, ...], strides: tuple[int, ...]) -> None:
        """Have it compiled for such arguments, and launch nothing."""
        self._kernel.warmup(*tensors, *free, *strides, grid=(1, 1, 1), **self._constants)

    def _launch_first(
        self, kind: Hashable, grid: tuple[int, int, int], tensors: tuple[torch.Tensor, ...], free: tuple[float, ...],
        strides: tuple[int, ...],
    ) -> None:  # fmt: skip
        kernel = self._kernel[grid](*tensors, *free, *strides, **self._constants)
        if not isinstance(self._kernel, JITFunction) or kernel is None:
            return
        is_plain = all(tensor.data_ptr() % _ALIGN == 0 for tensor in tensors) and max(free, default=0) <= _LARGEST
        if is_plain and driver.active.get_current_device() == tensors[0].get_device():
            self._found[kind] = _Found(kernel, kernel.run, kernel.function, kernel.packed_metadata)


@contextmanager
def compiling(threads: int) -> Iterator[None]:
    """Inside, what is only compiled is so on `threads` threads; leaving waits for all of it, and raises what failed.

    The compiler's parts run outside Python. Before triton 3.5, kernels are compiled one after another.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        yield
        return
    with ThreadPoolExecutor(threads) as pool, mode(pool):
        yield


class _Found(NamedTuple):
    """A compiled kernel, which lives as long as its handles are used."""

    kernel: Any
    run: Any
    function: Any
    metadata: Any
