"""What works on each token by itself.

Tests: tests/core/paths, tests/core/model/program/test_native_ops.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ...specs.feed_forward import GatedActivation, UngatedActivation
from ..op import LAYER_EMBEDDING, PER_LAYER, NoNativeOp, Op, Read

if TYPE_CHECKING:
    from ..lowering import Lowering
    from ..native_registers import Held
    from ..torch_step import OpContext, Run, Step


@dataclass(frozen=True, slots=True)
class Concat(Op):
    """Columns of several buffers, side by side."""

    READS = ("parts",)
    WRITES = ("out",)

    parts: tuple[Read, ...]
    out: str

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        import torch

        reads = [at.reader(part) for part in self.parts]

        def run(step: Step) -> None:
            step.names[self.out] = torch.cat([read(step.names) for read in reads], 1)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        out, reads = to.out(to.written(at)), [to.read(at, part) for part in self.parts]
        for (x, column, width), to_column in zip(reads, accumulate((it[2] for it in reads), initial=0), strict=False):
            to.emit("Copy", x=x, column=column, width=width, out=out, out_column=to_column)

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return sum(given)


@dataclass(frozen=True, slots=True)
class Activate(Op):
    """`activation(gate) · up` of the halves of x, or `activation(x)` without a gate. parameters: of xIELU."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("parameters",)

    x: Read
    out: str
    activation: GatedActivation | UngatedActivation
    parameters: str | None = None

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from .....ops.elementwise.elementwise import xielu
        from ...moe.experts import activated

        read, index, slot = at.reader(self.x), at.index, self.parameters

        def run(step: Step) -> None:
            x = read(step.names)
            if slot is not None:
                step.names[self.out] = xielu(x, step.layers[index][slot])
            else:
                step.names[self.out] = activated(x, self.activation)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        x, out = to.read(at, self.x)[0], to.out(to.written(at))
        to.emit("Activate", x=x, out=out, **self.native_arguments(out.value.width))

    def native_arguments(self, size: int) -> dict[str, Any]:
        """Arguments of the library's ops that activate. size: columns of what is written."""
        from ...native_names import native_gating
        from ..native_binding import weight_of

        if (gating := native_gating(self.activation)) is None:
            raise NoNativeOp(f"activation {self.activation}")
        xielu = None if self.parameters is None else weight_of(self.parameters)
        numbers = {"alpha": gating.alpha, "limit": gating.limit} if gating.limit else {}
        return {"size": size, "activation": gating.activation, "xielu": xielu, **numbers}

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return given[0] if isinstance(self.activation, UngatedActivation) else given[0] // 2

    def detail(self) -> str:
        """See `Op.detail`."""
        return str(self.activation)


@dataclass(frozen=True, slots=True)
class Sum(Op):
    """`out = x + y`."""

    READS = ("x", "y")
    WRITES = ("out",)

    x: str
    y: str
    out: str

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""

        def run(step: Step) -> None:
            step.names[self.out] = step.names[self.x] + step.names[self.y]

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        x, y = to.held(at, self.x), to.held(at, self.y)
        to.give(at, lambda out, _: to.emit("Sum", x=x, y=y, width=x.value.width, out=to.shared_or_out(out)))


@dataclass(frozen=True, slots=True)
class Scale(Op):
    """`out = x · factor`, where that is a number or a weight of the layer; x itself is changed if out is its buffer."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("weight",)

    x: Read
    out: str
    factor: float = 1.0
    weight: str | None = None

    in_place: bool = False
    """The memory of x is changed."""

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        read, index, slot = at.reader(self.x), at.index, self.weight

        def run(step: Step) -> None:
            x = read(step.names)
            factor = self.factor if slot is None else step.layers[index][slot]
            if self.in_place:
                x.mul_(factor)
            else:
                step.names[self.out] = x * factor

        return run

    @property
    def is_in_place(self) -> bool:
        """See `Op.is_in_place`."""
        return self.in_place

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        from ..native_binding import number_of, weight_of

        x, column, width = to.read(at, self.x)
        if self.in_place:
            factor = self.factor if self.weight is None else number_of(self.weight)
            to.emit("Scale", x=x, column=column, width=width, out=x, out_column=column, factor=factor)
            return
        last, factor = self._folded(to, at)
        if self.weight is None and isinstance(self.x, str) and to.is_added(last, to.written(last)):
            to.emit("Add", x=to.stream, y=x, width=width, factor=factor)
            to.done.add(last + 1)
            return
        own = {"factor": factor, "weights": None if self.weight is None else weight_of(self.weight)}

        def emit(out: Held, _: bool) -> None:
            to.emit("Scale", x=x, column=column, width=width, out=to.shared_or_out(out), out_column=0, **own)

        to.give(last, emit)

    def _folded(self, to: Lowering, at: int) -> tuple[int, float]:
        """The last of the ops behind this one that only scale its output once more, and the factor of all."""
        from numpy import float32

        factor = float32(self.factor)
        while self.weight is None and isinstance(op := to.next(at), Scale):
            value = to.written(at)
            if op.weight is not None or op.in_place or op.x != value.name or not to.is_alone(value):
                break
            at += 1
            to.done.add(at)
            factor = float32(factor * float32(op.factor))
        return at, float(factor)

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"times {self.weight or f'{self.factor:g}'}"


@dataclass(frozen=True, slots=True)
class Clip(Op):
    """x becomes at least -limit and at most limit, in place."""

    READS = ("x",)
    WRITES = ("x",)
    IN_PLACE = True

    x: str
    limit: float

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""

        def run(step: Step) -> None:
            step.names[self.x].clamp_(-self.limit, self.limit)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        to.need("OpKind.kClip", "clipping")
        x, column, width = to.read(at, self.x)
        to.emit("Clip", x=x, column=column, width=width, limit=self.limit)

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"within ±{self.limit:g}"


@dataclass(frozen=True, slots=True)
class TakeLayerEmbedding(Op):
    """`out = embeddings[:, layer]`."""

    READS = ("embeddings",)
    WRITES = ("out",)

    out: str = LAYER_EMBEDDING
    embeddings: str = PER_LAYER

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        index, layers = at.index, at.model.num_layers

        def run(step: Step) -> None:
            embeddings = step.names[self.embeddings]
            step.names[self.out] = embeddings.view(len(embeddings), layers, -1)[:, index]

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        to.need("OpKind.kLookUp", "per-layer embeddings")
        x, out = to.read(at, self.embeddings)[0], to.out(to.written(at))
        width = out.value.width
        to.emit("Copy", x=x, column=to.index * width, width=width, out=out, out_column=0)

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return given[0] // to.num_layers
