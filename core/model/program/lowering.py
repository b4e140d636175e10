"""Lists a layer's ops for the native library.

Tests: tests/core/model/program/test_native_ops.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....memory.pages.projections import GemmShape, Projections, Role
from ....ops.library import native_library
from ....ops.library.native_program import NativeOp
from .native_buffers import Buffers, columns_of
from .native_registers import Held, Registers, Value
from .op import NoNativeOp, Op, Read, name_of

#: The number of no layer: ops are of the model's ends.
OF_ENDS = -1


class Lowering:
    """Lists a layer's ops for the library: each lists itself, and says which others are done with it."""

    def __init__(
        self, index: int, ops: Sequence[Op], registers: Registers, table: Projections, has_ranks: bool
    ) -> None:
        self.index, self._table, self.has_ranks = index, table, has_ranks
        self.ops = ops
        """Those of the layer."""
        self.done: set[int] = set()
        """Numbers of ops that others have listed."""
        self.stream = registers.stream
        """The residual stream."""
        self.lasting = {each.value.name: each.value for each in registers.lasting}
        """What outlives layers, by name."""
        self._buffers = Buffers(self.ops, [each.value for each in registers.lasting], self._width)
        self._found: list[NativeOp] = []
        if index == 0 and registers.embedded is not None:
            own = {"x": self.stream, "column": 0, "width": self.stream.value.width}
            self.emit("Copy", **own, out=registers.embedded, out_column=0)
        self._rounded: dict[Value, Held] = {}
        self._routed: Value | None = None
        self._number = 0
        self._has_arrived = index <= 0  # every step waits for the first layer before its embeddings

    def run(self, number: int) -> list[NativeOp]:
        """The ops. number: of the model's products before them."""
        self._number = number
        for at in range(len(self.ops)):
            self.list_op(at)
        return self._found

    def list_op(self, at: int) -> None:
        """List an op, unless it is listed."""
        if at not in self.done:
            self.done.add(at)
            self.ops[at].native(self, at)

    # ---- what is listed

    def emit(self, kind: str, **arguments: Any) -> None:
        """List an op of the library."""
        self._found.append(NativeOp(kind, arguments))

    def emit_behind(self, held: Held, kind: str, **arguments: Any) -> None:
        """List an op right behind the last one that has made a part of a value."""
        made = max(i for i, each in enumerate(self._found) if each.arguments.get("out") == held)
        self._found.insert(made + 1, NativeOp(kind, arguments))

    def give(self, at: int, emit: Callable[[Held, bool], None], *, adds: bool = False) -> None:
        """Have `emit(out, accumulate)` list what gives an op's value, and what becomes of it with several ranks.

        adds: it can be added to the residual stream by the op itself, if that is what comes next.
        """
        value, reduced = self.written(at), (op := self.next(at)) is not None and op.SUMS
        last = at + reduced
        if reduced:
            self.done.add(last)
            value = self.written(last)
        added = adds and self.is_added(last, value)
        if added:
            self.done.add(last + 1)
        out = self.stream if added else Held(value)
        if not reduced or not self.has_ranks:
            emit(out, added)
            return
        emit(Held(Value(value.name, value.width), "Shared"), False)
        self.emit("Meet")
        self.emit("Reduce", out=out, width=value.width, accumulate=int(added))

    def arrive(self) -> None:
        """Wait for what adapters have in the layer, before the first op that needs it."""
        if not self._has_arrived:
            self.emit("Arrive", layer=self.index)
            self._has_arrived = True

    def route(self, held: Held, *, ahead: bool = False) -> None:
        """Have a mixture's router read a value, unless it has. ahead: before the mixture, which won't do it again."""
        if self._routed is not held.value:
            self.emit("Route", x=held)
        if ahead:
            self._routed = held.value

    def need(self, name: str, title: str) -> None:
        """Raise NoNativeOp where the library lacks an enumeration's member. title: what a model has."""
        if native_library.lacks(name):
            raise NoNativeOp(title)

    # ---- values

    def read(self, at: int, read: Read) -> tuple[Held, int, int]:
        """What an op of rows reads: the value in float32, the first column and their number."""
        held, column, width = self._columns(at, read)
        rounded = self._rounded.get(held.value)
        if rounded is not None and rounded.value is held.value:  # it is in no other memory
            self.emit("Widen", x=rounded, width=held.value.width, out=held)
        return held, column, width

    def _columns(self, at: int, read: Read) -> tuple[Held, int, int]:
        """As `read`, of a value that is in float32 unless all that read it are products."""
        value = self._buffers.reads[at][name_of(read)]
        return Held(value), *columns_of(read, value)

    def read_rounded(self, at: int, read: Read) -> Held:
        """What a product reads, of the type that it does."""
        held, column, width = self._columns(at, read)
        if isinstance(read, str) and (found := self._rounded.get(held.value)) is not None:
            return found
        to = Held(Value(held.value.name, width), "Rounded")
        self.emit("Copy", x=held, column=column, width=width, out=to, out_column=0)
        if held.value is not self.stream.value and isinstance(read, str):
            self._rounded[held.value] = to
        return to

    def held(self, at: int, read: Read, memory: str = "Float") -> Held:
        """The buffer that an op reads, in a kind of memory."""
        return Held(self._buffers.reads[at][name_of(read)], memory)

    def held_as(self, value: Value, memory: str = "Float") -> Held:
        """A value in a kind of memory."""
        return Held(value, memory)

    def temporary(self, name: str, width: int) -> Held:
        """Memory for what ops of the library hand over to the next ones alone."""
        return Held(Value(name, width))

    def written(self, at: int, write: str | None = None) -> Value:
        """What an op writes: what it writes first, if no buffer is named."""
        found = self._buffers.writes[at]
        return next(iter(found.values())) if write is None else found[write]

    def out(self, value: Value) -> Held:
        """Where an op of rows writes a value: as products read it if they alone do."""
        readers = self.readers(value)
        is_rounded = bool(readers) and all(op.ROUNDED and value.name in op.reads for op in readers)
        return self.rounded(value) if is_rounded else Held(value)

    def rounded(self, value: Value) -> Held:
        """Where an op writes a value in the type that products read."""
        self._rounded[value] = found = Held(value, "Rounded")
        return found

    def shared_or_out(self, held: Held) -> Held:
        """Where an op of rows writes what `give` has told it to: as `out` does, unless ranks sum it."""
        return held if held.memory == "Shared" else self.out(held.value)

    # ---- what comes next

    def next(self, at: int) -> Op | None:
        """The op behind another one."""
        return self.ops[at + 1] if at + 1 < len(self.ops) else None

    def readers(self, value: Value) -> list[Op]:
        """Ops that read a value."""
        return self._buffers.readers.get(value, [])

    def is_alone(self, value: Value) -> bool:
        """True if only one op reads the value."""
        return len(self.readers(value)) == 1

    def is_added(self, at: int, value: Value) -> bool:
        """True if the next op does nothing but add the value to the residual stream."""
        op = self.next(at)
        return op is not None and op.adds == value.name and self.is_alone(value)

    # ---- products

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self._table.layers)

    def model_product(self, role: Role) -> tuple[int, int, int]:
        """The module of a product of the model's own, its inputs and outputs."""
        module = self._table.of_role(role)
        assert module is not None, "the table has the model's own products"
        return module, *self._table.dims_of(module)

    def gemm_shape(self, product: str) -> tuple[int, GemmShape]:
        """The shape of one of the layer's products, and its number among a model's."""
        number = self._table.gemm_shape_of[self.index][product]
        return number, self._table.gemm_shapes[number]

    def next_product(self) -> int:
        """The number of a product among those of the model."""
        self._number += 1
        return self._number - 1

    def kv_up(self) -> int:
        """The module of the product that makes keys and values of latents."""
        ((module, _, _),) = self._table.columns(self.index, Role.KV_UP)
        return module

    def _width(self, op: Op, write: str, own: Mapping[str, Value]) -> int:
        """Columns of what an op writes."""
        return op.columns_of(write, [columns_of(read, own[name_of(read)])[1] for read in op.reads], self)
