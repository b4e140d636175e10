"""Repeated launches of Triton kernels, with everything that stays the same between launches looked up once.

Import this module lazily: it needs triton.
"""

# The base class of drivers does not declare its drivers' attributes.

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import JITFunction, driver

#: Triton compiles for addresses that are multiples of 16 bytes, and compiles anew for other addresses.
_ALIGN = 16

_LARGEST = (1 << 31) - 1  # the largest integer that Triton passes as 32 bits


#: Tensors of a launch; a kernel takes a tuple of them, such as a NamedTuple, as one argument.
Arguments = tuple[torch.Tensor | tuple[torch.Tensor, ...], ...]


class KernelLauncher:
    """A kernel with its constants and options.

    A launch by Triton itself looks up the options, the type of every argument and the values that the kernel is
    specialized for: about 20 µs of Python. This class keeps the compiled kernel by everything that it depends on, and
    launches it as Triton does (`JITFunction.run`, which is the same from 3.6 to 3.9). A kernel depends on the device,
    on the types and alignment of the tensors, and on the values of integers that it may be specialized for. Launches go
    through Triton itself if a tensor is not aligned, if an integer needs more than 32 bits, if a profiler has hooks, or
    if the kernel is interpreted.

    Tensors may be grouped, numbers may not: Triton specializes every integer of a tuple, whatever `do_not_specialize`
    says, and would compile anew for other layers and other numbers of tokens. A field of a tuple can't be named like an
    attribute of Triton's own tuples (`values`, `type`).
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any]) -> None:
        """kernel: takes tensors first, then numbers, then constants. constants: together with the launch options. A
        constant may be any frozen dataclass: the kernel reads its fields when it is compiled.
        """
        self._kernel = kernel
        self._constants = constants
        self._found: dict[Hashable, _Compiled] = {}
        self._groups: list[tuple[int, slice]] | None = None
        self._values = ()  # values of the constants, in the kernel's order
        if isinstance(kernel, JITFunction):
            self._values = tuple(constants[param.name] for param in kernel.params if param.is_constexpr)

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Arguments,
        free: tuple[float, ...],
        strides: tuple[int, ...],
    ) -> None:
        """Launch on the current stream of the tensors' device, which must be the current device.

        tensors: every launch has its tuples at the same places. free: numbers that the kernel is not specialized for:
        floats, or integers in `do_not_specialize`. strides: numbers that it may be specialized for.
        """
        if (groups := self._groups) is None:
            groups = self._groups = _groups(tensors)
        flat: list[Any] = list(tensors)
        for at, _ in groups:
            flat[at : at + 1] = flat[at]
        kind = flat[0].get_device(), strides, *[tensor.dtype for tensor in flat]
        found = self._found.get(kind)
        if found is None:
            self._launch_first(kind, grid, tensors, flat=flat, free=free, strides=strides)
            return
        addresses: list[Any] = [tensor.data_ptr() for tensor in flat]
        hook = knobs.runtime.launch_enter_hook
        if reduce(or_, addresses) % _ALIGN or max((0, *free)) > _LARGEST or getattr(hook, "calls", hook):
            self._kernel[grid](*tensors, *free, *strides, **self._constants)
            return
        for _, group in groups:
            addresses[group] = [tuple(addresses[group])]
        stream = driver.active.get_current_stream(kind[0])
        found.run(
            *grid, stream, found.function, found.metadata, None, None, None, *addresses, *free, *strides, *self._values
        )

    def compile(self, tensors: Arguments, free: tuple[float, ...], strides: tuple[int, ...]) -> None:
        """Compile the kernel for these arguments without launching it."""
        self._kernel.warmup(*tensors, *free, *strides, grid=(1, 1, 1), **self._constants)

    def _launch_first(
        self,
        kind: Hashable,
        grid: tuple[int, int, int],
        tensors: Arguments,
        *,
        flat: Sequence[torch.Tensor],
        free: tuple[float, ...],
        strides: tuple[int, ...],
    ) -> None:
        kernel = self._kernel[grid](*tensors, *free, *strides, **self._constants)
        if not isinstance(self._kernel, JITFunction) or kernel is None:
            return
        is_plain = all(tensor.data_ptr() % _ALIGN == 0 for tensor in flat) and max(free, default=0) <= _LARGEST
        if is_plain and driver.active.get_current_device() == flat[0].get_device():
            self._found[kind] = _Compiled(kernel, kernel.run, kernel.function, kernel.packed_metadata)


def _groups(tensors: Arguments) -> list[tuple[int, slice]]:
    """Where tuples are among the arguments, and their tensors in the flat list; the last one first."""
    found, end = [], 0
    for at, each in enumerate(tensors):
        begin, end = end, end + (len(each) if isinstance(each, tuple) else 1)
        if isinstance(each, tuple):
            found.append((at, slice(begin, end)))
    return found[::-1]


@contextmanager
def compiling(threads: int) -> Iterator[None]:
    """Compile on `threads` threads all kernels that are only compiled inside this context.

    Leaving it waits for all of them and raises the error of any that failed. The compiler's parts run outside Python.
    """
    from triton.runtime._async_compile import active_mode

    try:
        with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        active_mode.set(None)  # after a kernel that does not compile, Triton 3.6 would refuse all later ones


class _Compiled(NamedTuple):
    """A compiled kernel, kept as long as its handles are used."""

    kernel: Any
    run: Any
    function: Any
    metadata: Any


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportAttributeAccessIssue=false
