"""Finds which value each op of a layer's program reads and writes, for the native decoder.

Tests: tests/core/model/program/test_native_ops.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .native_registers import Value
from .op import NoNativeOp, Op, Read, View, name_of


class Buffers:
    """What each op of a list reads and writes: names are bound anew by each write but for those in place."""

    def __init__(
        self, ops: Sequence[Op], lasting: Sequence[Value], widths: Callable[[Op, str, Mapping[str, Value]], int]
    ) -> None:
        """lasting: the residual stream, and what else outlives layers."""
        self.reads: list[dict[str, Value]] = []
        self.writes: list[dict[str, Value]] = []
        self.readers: dict[Value, list[Op]] = {}
        names, outlive = {each.name: each for each in lasting}, {each.name: each for each in lasting}
        for op in ops:
            check_native(op)
            own = {name: _known(names, name, op) for name in map(name_of, op.reads)}
            for value in own.values():
                self.readers.setdefault(value, []).append(op)
            self.reads.append(own)
            written = {}
            for name in op.writes:
                keeps = name in own and op.is_in_place
                value = own[name] if keeps else outlive.get(name) or Value(name, widths(op, name, own))
                names[name] = written[name] = value
            self.writes.append(written)


def check_native(op: Op) -> None:
    """Raise NoNativeOp for an op of a kind that the library has no function for."""
    if op.LACKS:
        raise NoNativeOp(op.LACKS)


def _known(names: Mapping[str, Value], name: str, op: Op) -> Value:
    if name not in names:
        raise NoNativeOp(f"{type(op).__name__} of {name!r}")
    return names[name]


def columns_of(read: Read, value: Value) -> tuple[int, int]:
    """The first column that is read, and their number."""
    if not isinstance(read, View):
        return 0, value.width
    first, last, _ = slice(read.begin, read.end).indices(value.width)
    return first, last - first
