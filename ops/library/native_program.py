"""The native library's ops: what core lists of a model's layers.

Tests: tests/ops/library/test_described_ops.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Register(NamedTuple):
    """Rows that ops read and write: see `native/program.h`."""

    memory: str
    """`Float`, `Rounded`, `Shared` or `Gates`."""

    width: int


@dataclass(frozen=True, slots=True)
class NativeOp:
    """An op: its kind's name, and its arguments by their names in the library: numbers, registers, tensors."""

    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
