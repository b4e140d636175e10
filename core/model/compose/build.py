"""Writes one layer: ops in order, each with its weights.

A layer's program, its slots and its projections are views of what was written, so that no two of them can disagree.

Tests: tests/core/model/compose/test_build.py, tests/core/model/program/test_golden.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from ....memory.pages.projections import MODEL_ROLES, Projection, Role
from ..program.layer_program import Kept, LayerProgram
from ..program.op import STREAM, STREAMS, Op, Read, name_of
from ..program.ops.gates import GateOutput
from ..program.ops.linear import Gemm
from ..program.ops.norm import Norm
from ..program.ops.residual import Add, AllReduce
from ..program.ops.rows import Activate, Concat, Scale, Sum
from ..program.ops.spans import Begin, End
from ..specs.feed_forward import GatedActivation, UngatedActivation
from ..specs.norms import NormSpec
from ..specs.products import Proj
from ..weights.layer_weights import MakesPart
from ..weights.slot import Keep, Slot, SlotTensor, bias_tensor, weight_tensor


class Value(str):
    """A buffer's name, with the shape of one token's share of it."""

    __slots__ = ("kind", "shape")

    shape: tuple[int, ...]

    kind: str
    """`index` (int32) or `wide` (float32); empty: the model's dtype."""

    def __new__(cls, name: str, *shape: int, kind: str = "") -> Value:
        found = super().__new__(cls, name)
        found.shape, found.kind = shape, kind
        return found

    @property
    def width(self) -> int:
        """Elements of one token's share."""
        return math.prod(self.shape)


def width_of(read: Read) -> int:
    """Elements of what an op reads of one token."""
    name = name_of(read)
    assert isinstance(name, Value), f"{name} is a name without a shape"
    return name.width if isinstance(read, str) else len(range(name.width)[read.begin : read.end])


class Build:
    """A layer as it is written: `weight` declares a slot, `put` appends an op, and all others do both."""

    def __init__(self, hidden: int, norm: NormSpec) -> None:
        self.hidden = hidden
        """Width of the residual stream."""

        self.norm_spec = norm
        """How the model normalises."""

        self.x = Value(STREAM, hidden)
        """The residual stream."""

        self._ops: list[Op] = []
        self._written: list[dict[str, Value]] = []
        self._slots: dict[str, Slot] = {}
        self._projections: list[Projection] = []
        self._layers: tuple[int | None, int | None] = None, None  # see `shared_with` and `stored_in`

        self.parts: dict[str, MakesPart] = {}
        """Parts whose weights are one object, in order, and what makes it."""

        self._lasting: list[Value] = []

    # ---- weights

    def weight(
        self,
        name: str,
        *tensors: SlotTensor,
        keep: Keep = Keep.PLAIN,
        first_rank: bool = False,
        factor: float | None = None,
        count: int = 0,
    ) -> str:
        """Declare a slot, which is the first one of its name; returns the name. See `Slot`."""
        self._slots.setdefault(name, Slot(name, tensors, keep, first_rank, factor, count, *self._layers))
        return name

    def part(self, name: str, made: MakesPart) -> str:
        """Declare that the weights of slots `name.…` are one object, which ops read by this name; returns the name."""
        self.parts.setdefault(name, made)
        return name

    def vector(self, name: str, path: str, width: int, keep: Keep = Keep.NORM, *, factor: float | None = None) -> str:
        """Declare a weight of one dimension."""
        return self.weight(name, SlotTensor(path, (width,)), keep=keep, factor=factor)

    def norm_weight(self, name: str, width: int, norm: NormSpec, path: str) -> str:
        """Declare the weight of a norm, and its bias where norms have one. path: of the norm."""
        ends = ("weight", "bias") if norm.biased and not norm.weightless else ("weight",)
        made = (1.0,) if norm.weightless else ()
        return self.weight(name, *(SlotTensor(f"{path}.{end}", (width,), made=made) for end in ends), keep=Keep.NORM)

    def product(
        self, slot: str, inputs: int, *own: Proj, rows: bool = False, merges: bool = True, keep: Keep = Keep.MATRIX
    ) -> str:
        """Declare a product, which is named as the slot of its matrices side by side, and their biases where one has
        it. rows, merges: see `linear`.
        """
        is_taken = slot in MODEL_ROLES or (slot == Role.KV_UP) is not (keep is Keep.DENSE)
        if is_taken or "." in slot or not self._slots.keys().isdisjoint((slot, f"{slot}_bias")):
            raise ValueError(f"a layer can't write a product {slot!r}: something else has this name")
        found = tuple(each.of(slot, inputs, rows=rows, merges=merges) for each in own)
        self._projections += found
        self.weight(slot, *map(weight_tensor, found), keep=keep)
        if any(each.bias for each in own):
            biases = (bias_tensor(one, is_stored=each.bias) for one, each in zip(found, own, strict=True))
            self.weight(f"{slot}_bias", *biases, first_rank=rows)
        return slot

    def adapted(self, *found: Projection) -> None:
        """Declare projections whose weights an op multiplies by in its own way."""
        self._projections += found

    @contextmanager
    def shared_with(self, first: int | None) -> Iterator[None]:
        """Weights that are declared within are those of the layer `first`; None: of this one alone."""
        before, self._layers = self._layers, (first, None)
        yield
        self._layers = before

    @contextmanager
    def stored_in(self, layer: int) -> Iterator[None]:
        """Weights that are declared within are this layer's, and a checkpoint has them in another one."""
        before, self._layers = self._layers, (None, layer)
        yield
        self._layers = before

    # ---- ops

    def put(self, op: Op, *shape: int) -> Value:
        """Append an op that writes one buffer, of this shape; returns it."""
        return self.put_all(op, Value(op.writes[0], *shape))[0]

    def put_all(self, op: Op, *written: Value) -> tuple[Value, ...]:
        """Append an op that writes these."""
        self._ops.append(op)
        self._written.append({str(each): each for each in written})
        return written

    def lasting(self, name: str, *shape: int, kind: str = "") -> Value:
        """A buffer that outlives the layer: it is left to later ones."""
        found = Value(name, *shape, kind=kind)
        self._lasting.append(found)
        return found

    def norm(self, slot: str, x: Read, out: str = "n", norm: NormSpec | None = None, path: str = "") -> Value:
        """The norm of x, with weights of its own. path: of the norm, if it is not its slot's name."""
        norm, width = norm or self.norm_spec, width_of(x)
        return self.put(Norm(x, out, self.norm_weight(slot, width, norm, path or slot), norm), width)

    def linear(
        self,
        slot: str,
        x: Read,
        out: str,
        *own: Proj,
        rows: bool = False,
        merges: bool = True,
        inputs: int | None = None,
    ) -> Value:
        """One product, `x · wᵀ + bias`, whose outputs are those of these projections, side by side.

        rows: TP ranks split the inputs (row-parallel), so their outputs must be summed by `reduce`. merges: adapters
        may be merged into its matrices; False for small ones, of which a copy gains nothing. inputs: width of x, if its
        buffer is not that wide.
        """
        self.product(slot, width_of(x) if inputs is None else inputs, *own, rows=rows, merges=merges)
        return self.put(Gemm(x, out, slot), sum(each.outputs for each in own))

    def reduce(self, y: Value) -> Value:
        """The sum over TP ranks, in its place."""
        return self.put(AllReduce(y), *y.shape)

    def add(self, y: Value) -> None:
        """Add to the residual stream."""
        self.put(Add(self.x, y), self.hidden)

    def sum(self, x: Value, y: Value, out: str) -> Value:
        """`x + y`."""
        return self.put(Sum(x, y, out), *x.shape)

    def scale(self, x: Value, factor: float, out: str = "") -> Value:
        """`factor · x`, in x's place unless it has another name; x itself where the factor is 1."""
        return x if factor == 1.0 else self.put(Scale(x, out or x, factor), *x.shape)

    def concat(self, out: str, *parts: Read) -> Value:
        """Buffers, or parts of them, side by side."""
        return self.put(Concat(parts, out), sum(map(width_of, parts)))

    def gate(self, x: Value, gates: Value, *, softplus: bool = False) -> Value:
        """`x · sigmoid(gates)`, in x's place. softplus: see `AttentionSpec.softplus_gates`."""
        return self.put(GateOutput(x, gates, x, softplus), *x.shape)

    def activate(
        self, x: Value, activation: GatedActivation | UngatedActivation, out: str = "f", parameters: str | None = None
    ) -> Value:
        """An activation of x, or of its first half times its second. parameters: the slot of xIELU's."""
        halves = 1 if isinstance(activation, UngatedActivation) else 2
        return self.put(Activate(x, out, activation, parameters), x.width // halves)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Name the ops that are appended within as one span in profiles."""
        self.put_all(Begin(name))
        yield
        self.put_all(End())

    # ---- what was written

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops in order."""
        return tuple(self._ops)

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Its weights."""
        return tuple(self._slots.values())

    @cached_property
    def projections(self) -> tuple[Projection, ...]:
        """What adapters may change."""
        return tuple(self._projections)

    @cached_property
    def shared(self) -> dict[str, int]:
        """The first layer with each of the slots that layers share, by name."""
        return {slot.name: slot.shared for slot in self.slots if slot.shared is not None}

    @cached_property
    def biased(self) -> frozenset[str]:
        """Paths of the projections that have a bias in the checkpoint."""
        names = {f"{each.product}_bias" for each in self._projections if not each.is_of_mixture}
        own = (each for slot in self.slots if slot.name in names for each in slot.tensors if not each.made)
        return frozenset(each.path.removesuffix(".bias") for each in own)

    @cached_property
    def program(self) -> LayerProgram:
        """Its ops, in segments: each ends with what reads the past, and tells what lives across that."""
        cuts = [at for at, op in enumerate(self._ops) if op.IS_CUT]
        ends = [at + 1 for at in cuts if at + 1 not in cuts]
        lasting = tuple(map(_kept, self._lasting))
        if not ends:
            return LayerProgram((), (), tuple(self._ops), lasting=lasting)
        found, begin = None, 0
        for end in ends:
            first = next(at for at in cuts if at >= begin)
            after = tuple(self._ops[end:]) if end == ends[-1] else ()
            reads, mixed = (self._kept(*cut, self._live(cut[1])) for cut in ((begin, first), (first, end)))
            parts = tuple(self._ops[begin:first]), tuple(self._ops[first:end]), after
            found = LayerProgram(*parts, reads, mixed, lasting, found)
            begin = end
        assert found is not None, "there is a cut"
        return found

    def _live(self, at: int) -> set[str]:
        """Buffers that ops from there on read before they write them."""
        live, written = set[str](), set[str]()
        for op in self._ops[at:]:
            live |= {str(name_of(read)) for read in op.reads} - written
            written |= set(map(str, op.writes))
        return live

    def _kept(self, begin: int, end: int, live: set[str]) -> tuple[Kept, ...]:
        """Buffers that these ops write, and that live behind them in the layer alone."""
        live = live - {STREAM, STREAMS} - set(map(str, self._lasting))
        every = {name: each for written in self._written[begin:end] for name, each in written.items()}
        return tuple(_kept(each) for name, each in every.items() if name in live)


def _kept(value: Value) -> Kept:
    return Kept(str(value), value.shape, value.kind == "index", value.kind == "wide")
