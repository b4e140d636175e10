"""Turns programs of layers into the native decoder's ops.

An op of the program is one of the library's, but for what one kernel does together: gate, up and their activation;
queries, keys, attention and its gates; a GEMM and the sum that it is added to.

Tests: tests/core/model/program/test_native_ops.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ....memory.pages.projections import Projections
from ....ops.library.native_program import NativeOp
from .layer_program import Kept, LayerProgram
from .lowering import OF_ENDS, Lowering
from .native_binding import LayerBinding, filled
from .native_registers import Registers
from .op import Op, name_of
from .ops.spans import Begin, End


class NativeProgram:
    """The ops of all layers of a model, or of a TP rank's share."""

    def __init__(
        self,
        layers: Sequence[LayerProgram],
        hidden: int,
        table: Projections,
        *,
        has_ranks: bool = False,
        lasting: Iterable[Kept] = (),
        before: Sequence[Op] = (),
        behind: Sequence[Op] = (),
    ) -> None:
        """hidden: width of the residual stream. table: of the layers' projections. has_ranks: the layers are one TP
        rank's shares, whose outputs are summed. lasting: buffers that may outlive layers. before, behind: ops of
        the model's ends, between embeddings and layers, and between layers and the last norm.

        Raises NoNativeOp.
        """
        earlier = set[str]().union(*map(_of_earlier, (*(layer.ops for layer in layers), behind)))
        self._registers, self._ops = Registers(hidden, (each for each in lasting if each.name in earlier)), []
        self.before = self._listed(OF_ENDS, before, table, 0, has_ranks=has_ranks)
        number = 0
        for index, layer in enumerate(layers):
            listed = self._listed(index, layer.ops, table, number, has_ranks=has_ranks)
            number += sum(op.kind in ("Gemm", "GateUp") for op in listed)
            self._ops.append(listed)
        self.behind = self._listed(OF_ENDS, behind, table, number, has_ranks=has_ranks)

    def _listed(
        self, index: int, ops: Iterable[Op], table: Projections, number: int, *, has_ranks: bool
    ) -> list[NativeOp]:
        own = [op for op in ops if not isinstance(op, Begin | End)]
        return self._registers.placed(Lowering(index, own, self._registers, table, has_ranks).run(number))

    @property
    def registers(self) -> Sequence[Any]:
        """What ops read and write."""
        return self._registers.all

    def ops(self, bindings: Sequence[LayerBinding], ends: LayerBinding | None = None) -> list[NativeOp]:
        """All ops, with the weights of these bindings. ends: of the model's ends, where these have ops."""
        found = [filled(op, at) for ops, at in zip(self._ops, bindings, strict=True) for op in ops]
        if ends is None:
            return found
        return [*(filled(op, ends) for op in self.before), *found, *(filled(op, ends) for op in self.behind)]


def _of_earlier(ops: Iterable[Op]) -> set[str]:
    """Buffers that a layer reads before it writes them."""
    found, written = set[str](), set[str]()
    for op in ops:
        found |= set(map(name_of, op.reads)) - written
        written |= set(op.writes)
    return found
