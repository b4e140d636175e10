"""Triton's launches on a fake GPU: the host does all of its work, and nothing is computed.

Import this module lazily: it needs triton, which must not interpret.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from triton import compiler
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import DriverConfig

from ...core.model.program import torch_gemm, torch_norm
from ...ops.elementwise import elementwise, elementwise_triton
from ...ops.elementwise.elementwise import RotaryEmbedding, Rotation

#: Called instead of every launch; Triton keeps kernels beyond the context that they were compiled in.
_launched: Callable[..., object] = lambda *_: None  # noqa: E731

#: Compute capability of the fake GPU.
_CAPABILITY = 90


@contextmanager
def idle_compiler(launched: Callable[..., object] = lambda *_: None) -> Iterator[None]:
    """In this `with` block, Triton compiles every kernel to nothing, for a fake GPU that tensors in host memory seem to
    be on.

    launched: called instead of every launch, with the kernel, which has its name, and the arguments of Triton's
    launcher.
    """

    class Nothing(compiler.CompiledKernel):
        """A kernel in Triton's form that is loaded and does nothing."""

        def __init__(self, source: Any, *_: Any, **__: Any) -> None:
            self.module, self.function, self.name, self.src, self.packed_metadata = 1, 0, source.name, None, ()
            self._run = lambda *launch: _launched(self, *launch)

        def __del__(self) -> None: ...

    driver = SimpleNamespace(
        get_current_device=lambda: -1,  # the device of a tensor in host memory
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", _CAPABILITY, 32),
    )
    with (
        patch.object(DriverConfig, "active", driver),
        patch.object(compiler, "compile", Nothing),
        patch(f"{__name__}._launched", launched),
    ):
        yield


@contextmanager
def idle_kernels(launched: Callable[[str], object] = lambda _: None) -> Iterator[None]:
    """In this `with` block, `DecoderModel.forward` runs a GPU's launches over tensors in host memory.

    Its kernels are launched as usual, but compiled to nothing. Matrix products and look-ups return tensors of the right
    shape without computing them. Attention is the caller's. See `idle_compiler`.

    launched: called with the name of every launch: one of our kernels, or `product` for one of the library's.
    """

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        launched("product")
        return x.new_zeros(len(x), len(weight))

    def mm(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        launched("product")
        return out.zero_()  # logits, which must be numbers

    with ExitStack() as stack:
        stack.enter_context(idle_compiler(lambda kernel, *_: launched(kernel.name)))
        for owner, name in (
            (torch_norm, "rms_norm"),
            (torch_norm, "add_rms_norm"),
            (torch_gemm, "silu_and_mul"),
            (elementwise, "silu_and_mul"),
            (elementwise, "rotate_and_write"),
        ):
            stack.enter_context(patch.object(owner, name, getattr(elementwise_triton, name)))
        for owner, name, value in (
            (torch_gemm, "linear", linear),
            (torch_gemm, "mm", mm),
            (functional, "embedding", _embedding),
            (RotaryEmbedding, "at", _at),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def _embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.new_empty(len(ids), weight.shape[1])


def _at(self: RotaryEmbedding, positions: torch.Tensor, _: object = None) -> Rotation:
    return Rotation(self._cos, self._sin, positions)
