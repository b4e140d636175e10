"""Gives what the native decoder's ops read and write registers: memory that a value has until it is read last.

Tests: tests/core/model/program/test_native_registers.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ....ops.library.native_program import NativeOp, Register
from .layer_program import Kept
from .op import EMBEDDED, STREAM

#: Kinds of ops that work on each token by itself: what they write may lie where they read.
ROW_OPS = frozenset(
    {"Norm", "Keep", "Copy", "Scale", "Add", "Sum", "Activate", "Reduce", "Route", "Combine", "AddMedia", "Widen"}
)


@dataclass(eq=False, slots=True)
class Value:
    """What an op writes: `[tokens, width]`."""

    name: str
    width: int


@dataclass(frozen=True, slots=True)
class Held:
    """An argument of an op: a value, in the kind of memory that the op reads or writes."""

    value: Value
    memory: str = "Float"


class Registers:
    """The registers of a model, which all layers share: of each kind of memory and width as many as live at once."""

    def __init__(self, hidden: int, lasting: Iterable[Kept] = ()) -> None:
        """lasting: what outlives layers beside the residual stream."""
        self.stream = Held(Value(STREAM, hidden))
        """The residual stream, in the first register."""

        self.lasting = [self.stream, *map(_lasting, lasting)]
        """What outlives a layer, in the first registers."""

        self.embedded = next((each for each in self.lasting if each.value.name == EMBEDDED), None)
        """The embeddings, where layers read them again."""

        self.all = list(map(_register, self.lasting))

    def placed(self, ops: Sequence[NativeOp]) -> list[NativeOp]:
        """A layer's ops, with numbers of registers in place of `Held`."""
        lives = _Lives(self, ops)
        return [NativeOp(op.kind, _numbered(op.arguments, lives.numbers_of(at, op))) for at, op in enumerate(ops)]

    def taken(self, held: Held, free: dict[Register, list[int]]) -> int:
        """A register for a value: one that is free, or another one."""
        register = _register(held)
        if numbers := free.get(register):
            return numbers.pop(0)
        self.all.append(register)
        return len(self.all) - 1


class _Lives:
    """Which registers values have, op after op of a layer."""

    def __init__(self, registers: Registers, ops: Sequence[NativeOp]) -> None:
        self._registers = registers
        self._last = {held: at for at, op in enumerate(ops) for held in _held(op.arguments)}
        self._numbers = {held: number for number, held in enumerate(registers.lasting)}
        self._last |= dict.fromkeys(registers.lasting, len(ops))
        self._free: dict[Register, list[int]] = {}
        for number, register in enumerate(registers.all):
            if number < len(registers.lasting):
                continue
            self._free.setdefault(register, []).append(number)

    def numbers_of(self, at: int, op: NativeOp) -> dict[Held, int]:
        """The registers of an op's values; what is not read after it is free from then on."""
        held = list(dict.fromkeys(_held(op.arguments)))
        own = {each: self._numbers[each] for each in held if each in self._numbers}
        if op.kind in ROW_OPS:
            self._release(at, own)
        for each in held:
            if each not in own:
                own[each] = self._numbers[each] = self._registers.taken(each, self._free)
        self._release(at, held)
        return own

    def _release(self, at: int, held: Iterable[Held]) -> None:
        for each in held:
            if self._last[each] == at and each in self._numbers:
                self._free.setdefault(_register(each), []).insert(0, self._numbers.pop(each))


def _lasting(kept: Kept) -> Held:
    return Held(Value(kept.name, prod(kept.shape)), "Indices" if kept.is_index else "Float")


def _register(held: Held) -> Register:
    return Register(held.memory, held.value.width)


def _held(arguments: Mapping[str, Any]) -> Iterator[Held]:
    for each in arguments.values():
        if isinstance(each, Held):
            yield each
        elif isinstance(each, Mapping):
            yield from _held(each)


def _numbered(arguments: Mapping[str, Any], numbers: Mapping[Held, int]) -> dict[str, Any]:
    def number(each: Any) -> Any:
        if isinstance(each, Held):
            return numbers[each]
        return _numbered(each, numbers) if isinstance(each, Mapping) else each

    return {name: number(each) for name, each in arguments.items()}
