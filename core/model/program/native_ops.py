"""Turns a layer's program into the native decoder's ops.

An op of the program is one of the library's, but for what one kernel does together: gate, up and their activation;
queries, keys, attention and its gates; a GEMM and the sum that it is added to.

Tests: tests/core/model/program/test_native_ops.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch

from ....memory.pages.projections import GemmShape, Group, Projections
from ....ops.library import native_library
from ....ops.library.native_descriptors import NativeOutputGate
from ....ops.library.native_program import NativeOp
from ..moe.experts import what_native_lacks
from ..native_names import native_activation, native_norm
from ..specs.attention import HeadNorm, OutputGate
from ..specs.feed_forward import UngatedActivation
from ..weights.slots import RECURRENT
from .layer_program import LayerProgram
from .native_attention import attend_arguments, latent_arguments
from .native_binding import Late, LayerBinding, filled, weight_of
from .native_buffers import Buffers, NoNativeOp, columns_of, reads_rounded
from .native_registers import Held, Registers, Value
from .ops import (
    EMBEDDED,
    LATE,
    STREAM,
    Activate,
    Add,
    AddMedia,
    AllReduce,
    Attend,
    Begin,
    Clip,
    Concat,
    End,
    GateOutput,
    Gemm,
    Heads,
    LatentAttend,
    Latents,
    Mix,
    Moe,
    Norm,
    Op,
    Read,
    Replace,
    ResizeHeads,
    Scale,
    SubtractHeads,
    Sum,
    name_of,
)

_OUTPUT_GATES = {
    None: NativeOutputGate.NONE,
    OutputGate.BESIDE_QUERIES: NativeOutputGate.BESIDE_QUERIES,
    OutputGate.OF_HEADS: NativeOutputGate.OF_HEADS,
    OutputGate.APART: NativeOutputGate.APART,
}


class NativeProgram:
    """The ops of all layers of a model, or of a TP rank's share."""

    def __init__(
        self,
        layers: Sequence[LayerProgram],
        hidden: int,
        table: Projections,
        *,
        has_ranks: bool = False,
    ) -> None:
        """hidden: width of the residual stream. table: of the layers' projections. has_ranks: the layers are one TP
        rank's shares, whose outputs are summed.

        Raises NoNativeOp.
        """
        keeps = any(EMBEDDED in op.reads for layer in layers for op in layer.ops)
        self._registers, self._ops = Registers(hidden, keeps_embeddings=keeps), []
        number = 0
        for index, layer in enumerate(layers):
            lowering = _Lowering(index, layer.ops, self._registers, table, has_ranks)
            ops = self._registers.placed(lowering.run(number))
            number += sum(op.kind in ("Gemm", "GateUp") for op in ops)
            self._ops.append(ops)

    @property
    def registers(self) -> Sequence[Any]:
        """What ops read and write."""
        return self._registers.all

    def ops(self, bindings: Sequence[LayerBinding]) -> list[NativeOp]:
        """All layers' ops, with the weights of these bindings."""
        return [filled(op, at) for ops, at in zip(self._ops, bindings, strict=True) for op in ops]


class _Lowering:
    """Lists a layer's ops for the library."""

    def __init__(
        self,
        index: int,
        ops: Sequence[Op],
        registers: Registers,
        table: Projections,
        has_ranks: bool,
    ) -> None:
        self._index, self._table, self._has_ranks = index, table, has_ranks
        self._ops = [op for op in ops if not isinstance(op, Begin | End)]
        self._stream = registers.stream
        self._buffers = Buffers(self._ops, [each.value for each in registers.lasting], self._width)
        self._found: list[NativeOp] = []
        if index == 0 and registers.embedded is not None:
            own = {"x": self._stream, "column": 0, "width": self._stream.value.width}
            self._emit("Copy", **own, out=registers.embedded, out_column=0)
        self._done: set[int] = set()
        self._rounded: dict[Value, Held] = {}
        self._routed: Value | None = None
        self._number = 0
        self._has_arrived = index == 0  # every step waits for the first layer before its embeddings

    def run(self, number: int) -> list[NativeOp]:
        """The ops. number: of the model's GEMMs before them."""
        self._number = number
        for at, op in enumerate(self._ops):
            if at in self._done:
                continue
            self._LOWERED[type(op)](self, at, op)
        return self._found

    def _emit(self, kind: str, **arguments: Any) -> None:
        self._found.append(NativeOp(kind, arguments))

    def _gemm_shape(self, op: Gemm) -> tuple[int, GemmShape]:
        number = self._table.gemm_shape_in[self._index][op.group]
        return number, self._table.gemm_shapes[number]

    def _width(self, op: Op, own: Mapping[str, Value]) -> int:
        """Columns of what an op writes."""
        if isinstance(op, Gemm):
            return self._gemm_shape(op)[1].outputs
        if isinstance(op, Heads):
            return op.attention.q_size
        if isinstance(op, Latents):
            return op.attention.num_heads * op.attention.query_dim
        if isinstance(op, Attend | LatentAttend):
            return op.attention.num_heads * op.attention.attended_dim
        if isinstance(op, Mix):
            return op.out_size
        if isinstance(op, Concat):
            return sum(columns_of(part, own[name_of(part)])[1] for part in op.parts)
        read = op.reads[0]
        width = columns_of(read, own[name_of(read)])[1]
        if isinstance(op, ResizeHeads):
            return op.columns(width)
        if isinstance(op, SubtractHeads):
            return width // 2
        is_gated = isinstance(op, Activate) and not isinstance(op.activation, UngatedActivation)
        return width // 2 if is_gated else width

    def _read(self, at: int, read: Read) -> tuple[Held, int, int]:
        """What an op of rows reads: the value in float32, the first column and their number."""
        held, column, width = self._columns(at, read)
        rounded = self._rounded.get(held.value)
        if rounded is not None and rounded.value is held.value:  # it is in no other memory
            self._emit("Widen", x=rounded, width=held.value.width, out=held)
        return held, column, width

    def _columns(self, at: int, read: Read) -> tuple[Held, int, int]:
        """As `_read`, of a value that is in float32 unless all that read it are products."""
        value = self._buffers.reads[at][name_of(read)]
        return Held(value), *columns_of(read, value)

    def _read_rounded(self, at: int, read: Read) -> Held:
        """What a GEMM reads, of the type that it does."""
        held, column, width = self._columns(at, read)
        if isinstance(read, str) and (found := self._rounded.get(held.value)) is not None:
            return found
        to = Held(Value(held.value.name, width), "Rounded")
        self._emit("Copy", x=held, column=column, width=width, out=to, out_column=0)
        if held.value is not self._stream.value and isinstance(read, str):
            self._rounded[held.value] = to
        return to

    def _out(self, value: Value) -> Held:
        """Where an op of rows writes a value: as GEMMs read it if they alone do."""
        readers = self._buffers.readers.get(value, [])
        if readers and all(reads_rounded(op, value.name) for op in readers):
            self._rounded[value] = Held(value, "Rounded")
            return self._rounded[value]
        return Held(value)

    def _written(self, at: int, value: Value) -> Value:
        return next(iter(self._buffers.writes[at].values()), value)

    def _is_alone(self, value: Value) -> bool:
        """Only one op reads the value."""
        return len(self._buffers.readers.get(value, [])) == 1

    def _next(self, at: int) -> Op | None:
        return self._ops[at + 1] if at + 1 < len(self._ops) else None

    def _added(self, at: int, value: Value) -> bool:
        """The next op does nothing but add the value to the residual stream."""
        op = self._next(at)
        return isinstance(op, Add) and op.x == STREAM and op.y == value.name and self._is_alone(value)

    def _give(self, at: int, emit: Callable[[Held, bool], None], *, adds: bool = False) -> None:
        """Have `emit(out, accumulate)` list what gives an op's value, and what becomes of it with several ranks.

        adds: it can be added to the residual stream by the op itself, if that is what comes next.
        """
        (value,) = self._buffers.writes[at].values()
        reduced = isinstance(self._next(at), AllReduce)
        last = at + reduced
        if reduced:
            self._done.add(last)
            (value,) = self._buffers.writes[last].values()
        added = adds and self._added(last, value)
        if added:
            self._done.add(last + 1)
        out = self._stream if added else Held(value)
        if not reduced or not self._has_ranks:
            emit(out, added)
            return
        emit(Held(Value(value.name, value.width), "Shared"), False)
        self._emit("Meet")
        self._emit("Reduce", out=out, width=value.width, accumulate=int(added))

    def _arrive(self) -> None:
        """Wait for what adapters have in the layer, before the first op that needs it."""
        if not self._has_arrived:
            self._emit("Arrive", layer=self._index)
            self._has_arrived = True

    def _gemm_arguments(self, at: int, op: Gemm, out: Held, *, accumulate: bool) -> dict[str, Any]:
        number, _ = self._gemm_shape(op)
        found = {
            "x": self._read_rounded(at, op.x),
            "out": out,
            "accumulate": int(accumulate),
            "shape": number,
            "layer": self._index,
            "number": self._number,
            "w": weight_of(op.weight),
            "bias": weight_of(op.bias),
        }
        self._number += 1
        self._arrive()
        return found

    def _gemm(self, at: int, op: Gemm) -> None:
        if op.group is Group.GATE_UP and self._gate_up(at, op):
            return
        self._give(
            at, lambda out, added: self._emit("Gemm", **self._gemm_arguments(at, op, out, accumulate=added)), adds=True
        )

    def _gate_up(self, at: int, op: Gemm) -> bool:
        """List gate, up and their activation as one op; False if something else comes between them."""
        last, factor = at + 1, 1.0
        scale = self._ops[last]
        if isinstance(scale, Scale) and scale.in_place and scale.weight is None and name_of(scale.x) == op.out:
            last, factor = last + 1, scale.factor
        activate = self._ops[last]
        if not isinstance(activate, Activate) or activate.x != op.out:
            return False
        (gates,), (value,) = self._buffers.writes[at].values(), self._buffers.writes[last].values()
        act = self._rounded[value] = Held(value, "Rounded")
        gemm = self._gemm_arguments(at, op, Held(gates, "Gates"), accumulate=False)
        self._emit("GateUp", gemm=gemm, act=act, factor=factor, **_activation(activate, value.width))
        self._done |= set(range(at + 1, last + 1))
        return True

    def _norm(self, at: int, op: Norm) -> None:
        x, column, width = self._read(at, op.x)
        out, norm = self._out(self._buffers.writes[at][op.out]), op.norm
        kind = native_norm(norm.kind)
        if native_library.lacks(f"NormKind.{kind}"):
            raise NoNativeOp(f"norm of the kind {norm.kind}")
        own = {"norm": kind, "eps": norm.eps}
        self._emit("Norm", x=x, column=column, width=width, out=out, weight=weight_of(op.weight), **own)
        self._route_next(out)

    def _route_next(self, out: Held) -> None:
        """Give the value to the router that will read it: best in the pass over tokens that has made it."""
        readers = self._buffers.readers.get(out.value, [])
        if out.memory == "Rounded" and any(isinstance(op, Moe) and _routed(op) == out.value.name for op in readers):
            self._emit("Route", x=out)
            self._routed = out.value

    def _scale(self, at: int, op: Scale) -> None:
        x, column, width = self._read(at, op.x)
        if op.in_place:
            factor = op.factor if op.weight is None else _number_of(op.weight)
            self._emit("Scale", x=x, column=column, width=width, out=x, out_column=column, factor=factor)
            return
        last, factor = at, np.float32(op.factor)
        while op.weight is None and self._folds(last):
            last += 1
            self._done.add(last)
            factor = np.float32(factor * np.float32(self._ops[last].factor))  # pyright: ignore[reportAttributeAccessIssue]
        value = self._written(last, x.value)
        if op.weight is None and isinstance(op.x, str) and self._added(last, value):
            self._emit("Add", x=self._stream, y=x, width=width, factor=float(factor))
            self._done.add(last + 1)
            return
        weights = None if op.weight is None else weight_of(op.weight)

        def emit(out: Held, _: bool) -> None:
            own = out if out.memory == "Shared" else self._out(out.value)
            self._emit(
                "Scale", x=x, column=column, width=width, out=own, out_column=0, factor=float(factor), weights=weights
            )

        self._give(last, emit)

    def _folds(self, at: int) -> bool:
        """The next op only scales the value once more."""
        op, value = self._next(at), self._written(at, self._stream.value)
        is_scale = isinstance(op, Scale) and op.weight is None and not op.in_place and op.x == value.name
        return is_scale and self._is_alone(value)

    def _add(self, at: int, op: Add) -> None:
        y = self._buffers.reads[at][op.y]
        x = Held(self._buffers.reads[at][op.x])
        self._emit("Add", x=x, y=Held(y), width=y.width, factor=1.0)

    def _replace(self, at: int, op: Replace) -> None:
        y, x = (Held(self._buffers.reads[at][name]) for name in (op.y, op.x))
        self._emit("Copy", x=y, column=0, width=y.value.width, out=x, out_column=0)

    def _add_media(self, at: int, op: AddMedia) -> None:
        if native_library.lacks("OpKind.kAddMedia"):
            raise NoNativeOp("addition of images' rows")
        x = self._buffers.reads[at][op.x]
        self._emit("AddMedia", x=Held(x), width=x.width, part=op.part)

    def _clip(self, at: int, op: Clip) -> None:
        if native_library.lacks("OpKind.kClip"):
            raise NoNativeOp("clipping of queries, keys and values")
        x, column, width = self._read(at, op.x)
        self._emit("Clip", x=x, column=column, width=width, limit=op.limit)

    def _sum(self, at: int, op: Sum) -> None:
        x, y = (self._buffers.reads[at][name_of(each)] for each in (op.x, op.y))

        def emit(out: Held, _: bool) -> None:
            own = out if out.memory == "Shared" else self._out(out.value)
            self._emit("Sum", x=Held(x), y=Held(y), width=x.width, out=own)

        self._give(at, emit)

    def _heads(self, at: int, op: Heads) -> None:
        attend = self._ops[at + 1]
        if not isinstance(attend, Attend) or attend.q != op.q:
            raise NoNativeOp("queries that something else than attention reads")
        mixer = op.attention
        if mixer.keys_are_values and mixer.head_norm is HeadNorm.ALL:
            raise NoNativeOp("norm of all heads of keys that are values")
        gate = next((i for i in range(at + 2, len(self._ops)) if isinstance(self._ops[i], GateOutput)), None)
        last = at + 1 if gate is None or op.gates is None else gate
        (out,) = self._buffers.writes[last].values()
        q = self._buffers.writes[at][op.q]
        x, _, _ = self._read(at, op.x)
        self._rounded[out] = Held(out, "Rounded")
        self._emit(
            "Attend",
            x=x,
            q=Held(q, "Rounded"),
            out=self._rounded[out],
            output_gate=_OUTPUT_GATES[mixer.output_gate],
            softplus_gates=int(mixer.softplus_gates),
            **attend_arguments(mixer, op.norm),
        )
        self._done |= {at + 1, last}

    def _latents(self, at: int, op: Latents) -> None:
        """Write latents to their pages right after the GEMM that makes them, and attend over them."""
        attend = self._ops[at + 1]
        if not isinstance(attend, LatentAttend) or attend.q != op.q:
            raise NoNativeOp("queries that something else than attention reads")
        if attend.sinks is not None:
            raise NoNativeOp("sink of latent attention")
        ((module, _, _),) = self._table.columns(self._index, Group.KV_UP)
        latent = latent_arguments(op.attention, op.latent, module)
        if op.kept is None:
            raise NoNativeOp("latents of an earlier layer")
        x, column, _ = self._read(at, op.kept)
        made = next(i for i, each in enumerate(self._found) if each.arguments.get("out") == x)
        self._found.insert(made + 1, NativeOp("Keep", {"x": x, "column": column, "latent": latent}))
        (out,) = self._buffers.writes[at + 1].values()
        self._rounded[out] = Held(out, "Rounded")
        q, column, _ = self._read(at, op.x)
        own = {"column": column, "layer": self._index, "latent": latent}
        self._emit("LatentAttend", q=q, out=self._rounded[out], **own)
        self._done.add(at + 1)

    def _resize_heads(self, at: int, op: ResizeHeads) -> None:
        if native_library.lacks("OpKind.kResize"):
            raise NoNativeOp("values of another width than keys")
        x, column, width = self._read(at, op.x)
        out = self._out(self._buffers.writes[at][op.out])
        if op.begin:
            self._emit("Copy", x=x, column=column, width=op.begin, out=out, out_column=0)
        first, heads = column + op.begin, len(op.order) or (width - op.begin) // op.width
        order = torch.tensor(op.order, dtype=torch.int32) if op.order else None
        shape = {"heads": heads, "width": op.width, "to": op.to, "order": order}
        self._emit("Resize", x=x, column=first, out=out, out_column=op.begin, **shape)

    def _subtract_heads(self, at: int, op: SubtractHeads) -> None:
        if native_library.lacks("OpKind.kSubtract"):
            raise NoNativeOp("differences between heads")
        x, column, width = self._read(at, op.x)
        out, spec, head = self._out(self._buffers.writes[at][op.out]), op.difference, op.attention.head_dim
        vectors = weight_of(op.factors)
        own = {
            "factor": lambda at: float(spec.factor(vectors(at))),
            "weight": torch.full((head,), 1 - spec.first),
            "eps": op.eps,
        }
        self._emit("Subtract", x=x, column=column, heads=width // head // 2, width=head, out=out, **own)

    def _mix(self, at: int, op: Mix) -> None:
        if (lack := op.mixer.no_native) is not None:
            raise NoNativeOp(lack)
        if op.mixer.native_shape() is None:
            raise NoNativeOp(op.mixer.title)
        (out,) = self._buffers.writes[at].values()
        held = Held(out)
        if not op.is_first:
            self._rounded[out] = held = Held(out, "Rounded")
        x, _, _ = self._read(at, op.x)
        own = {"is_first": 1} if op.is_first else {}
        self._emit("Mix", x=x, out=held, state_layer=lambda at: at.state_layer, weights=_mixer_weights, **own)

    def _concat(self, at: int, op: Concat) -> None:
        out, reads = self._out(self._buffers.writes[at][op.out]), [self._read(at, part) for part in op.parts]
        for (x, column, width), to in zip(reads, accumulate((each[2] for each in reads), initial=0), strict=False):
            self._emit("Copy", x=x, column=column, width=width, out=out, out_column=to)

    def _activate(self, at: int, op: Activate) -> None:
        x, _, _ = self._read(at, op.x)
        out = self._out(self._buffers.writes[at][op.out])
        self._emit("Activate", x=x, out=out, **_activation(op, out.value.width))

    def _moe(self, at: int, op: Moe) -> None:
        if (lack := what_native_lacks(op.spec)) is not None:
            raise NoNativeOp(lack)
        if op.out == LATE:
            raise NoNativeOp("mixture that is added behind the next layer")
        x = self._read_rounded(at, op.x)
        routed = x if op.routed is None else self._read_rounded(at, op.routed)
        if self._routed is not routed.value:
            self._emit("Route", x=routed)
        self._arrive()
        own = {"layer": self._index, "experts": _mixture_address, "targets": _mixture_targets}
        self._emit("Moe", x=x, **own)

        def emit(out: Held, _: bool) -> None:
            self._emit("Combine", out=out, **own)

        self._give(at, emit)

    _LOWERED: ClassVar[dict[type[Op], Callable[[_Lowering, int, Any], None]]] = {
        Activate: _activate,
        Add: _add,
        AddMedia: _add_media,
        Clip: _clip,
        Concat: _concat,
        Gemm: _gemm,
        Heads: _heads,
        Latents: _latents,
        Mix: _mix,
        Moe: _moe,
        Norm: _norm,
        Replace: _replace,
        ResizeHeads: _resize_heads,
        Scale: _scale,
        SubtractHeads: _subtract_heads,
        Sum: _sum,
    }


def _routed(op: Moe) -> str:
    return name_of(op.x if op.routed is None else op.routed)


def _activation(op: Activate, size: int) -> dict[str, Any]:
    if (activation := native_activation(op.activation)) is None:
        raise NoNativeOp(f"activation {op.activation}")
    xielu = None if op.parameters is None else weight_of(op.parameters)
    return {"size": size, "activation": activation, "xielu": xielu}


def _number_of(slot: str) -> Late:
    weight = weight_of(slot)
    return lambda at: float(weight(at))


def _mixer_weights(at: LayerBinding) -> Mapping[str, Any]:
    return at.weights[RECURRENT].native_tensors


def _mixture_address(at: LayerBinding) -> Any:
    return None if at.mixture is None else at.mixture.weights


def _mixture_targets(at: LayerBinding) -> Any:
    return None if at.mixture is None else at.mixture.targets
