"""Ops as the native library reads them.

Tests: tests/ops/library/test_described_ops.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import Array
from typing import Any

import torch

from .native_integers import IntegerPanels, described_integers
from .native_layout import NativeLayout
from .native_program import NativeOp, Register

#: Structures of ops' arguments that are not called as their kind; None: it has none.
_ARGUMENTS = {"Combine": "MoeOp", "Meet": None}


class DescribedOps:
    """A list of ops as the library reads it, and all that it points to."""

    def __init__(self, ops: Sequence[NativeOp], layout: NativeLayout) -> None:
        self._kept: list[Any] = []
        self._layout = layout
        self._array = layout.array("OpDesc", [{}] * len(ops))
        for at, op in enumerate(ops):
            self._array[at].kind = layout.number(f"OpKind.k{op.kind}")
            name = _ARGUMENTS.get(op.kind, f"{op.kind}Op")
            if name is not None:
                arguments = layout.filled(name, **self._readable(op.arguments))
                self._array[at].arguments = ctypes.addressof(arguments)
                self._kept.append(arguments)
        self.address, self.count = ctypes.addressof(self._array), len(ops)

    def _readable(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments with addresses in place of tensors and of what has an address."""
        found: dict[str, Any] = {}
        for name, value in arguments.items():
            if isinstance(value, Mapping):
                found[name] = self._readable(value)
            elif isinstance(value, IntegerPanels):
                found[name], found["integers"] = self._address(value.data), described_integers(value)
                self._kept.append(value)
            elif isinstance(value, torch.Tensor):
                found[name] = self._address(value)
            elif isinstance(value, ctypes.Array):
                found[name] = ctypes.addressof(value)
                self._kept.append(value)
            elif hasattr(value, "address"):
                found[name] = value.address
                self._kept.append(value)
            else:
                found[name] = value
        return found

    def _address(self, tensor: torch.Tensor) -> int:
        if not tensor.is_contiguous():
            raise ValueError("the native decoder needs contiguous tensors")
        self._kept.append(tensor)
        return tensor.data_ptr()


def described_registers(registers: Sequence[Register], layout: NativeLayout) -> Array[Any]:
    """Registers as the library reads them."""
    return layout.array("RegisterDesc", [{"memory": f"k{each.memory}", "width": each.width} for each in registers])
