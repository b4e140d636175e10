"""Where a GGUF file has a tensor of transformers.

Tests: tests/core/test_gguf.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from .gguf_file import GgufFile, Stored


class GgufSource(NamedTuple):
    """Where a file has a tensor of transformers."""

    parts: tuple[Stored, ...]
    """Tensors whose rows follow one another."""

    shape: tuple[int, ...]
    """The shape of the tensor in transformers."""

    order: Callable[[], torch.Tensor] | None = None
    """Makes the rows of `parts` in transformers' order. None: they are in that order."""

    values: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Makes transformers' values of the file's. None: they are the same."""


class FileTensors(Protocol):
    """Access to a file's tensors for functions that combine several of them; see `gguf_sources.Names`."""

    file: GgufFile

    def shape(self, part: Stored) -> tuple[int, ...]: ...

    def block(self, name: str, tensor: str) -> str | None: ...

    def joined(self, parts: tuple[Stored, ...], order: Callable[[], torch.Tensor] | None = None) -> GgufSource: ...

    def by_unit(self, field: str, sizes: tuple[int, ...]) -> Callable[[], torch.Tensor]: ...

    def number(self, field: str, default: int | None = None) -> int: ...
