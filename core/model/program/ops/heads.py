"""Queries, keys and values as heads.

Tests: tests/core/paths
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...specs.attention import AttentionSpec, HeadNorm, OutputGate
from ...specs.norms import NormSpec
from ...specs.rope_config import rope_described
from ..layer_program import Kept
from ..op import NoNativeOp, Op, Read
from .attend import Attend
from .gates import GateOutput

if TYPE_CHECKING:
    from ..lowering import Lowering
    from ..native_registers import Held
    from ..torch_step import OpContext, Run, Step


#: Norms of heads, for people.
_NORMS = {
    None: "",
    HeadNorm.EACH: "each normalised, ",
    HeadNorm.ALL: "normalised together, ",
    HeadNorm.BARE: "each normalised without weights, ",
    HeadNorm.OWN: "each normalised with weights of its own, ",
    HeadNorm.BIASED: "each normalised with weights and biases, ",
    HeadNorm.ROTATED: "each normalised after it is rotated, ",
}


@dataclass(frozen=True, slots=True)
class Heads(Op):
    """Split `x` into queries, keys and values, normalise and rotate them, and write keys and values to their pages.

    q: `[tokens, heads, head_dim]`. gates: of attention's output, where it has any.
    """

    READS = ("x",)
    WRITES = ("q", "gates")
    SLOTS = ("q_norm", "k_norm")

    x: Read
    q: str
    gates: str | None
    attention: AttentionSpec
    norm: NormSpec
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        import torch

        from .....ops.elementwise import elementwise
        from .....ops.elementwise.rotation import KvSlots
        from ...nvtx_spans import span
        from ..torch_heads import SPLITS, caches, head_norms, log_scaling, query_weights

        mixer, read, model, kv = self.attention, at.reader(self.x), at.model, at.model.kv_index[at.index]
        norms, weights = head_norms(at.weights, mixer, self.norm, model), query_weights(at.weights, mixer)
        scaling, eps, q_out = log_scaling(mixer, model), self.norm.eps, Kept(self.q, (mixer.num_heads, mixer.query_dim))
        ones = torch.ones(mixer.head_dim, device=model.device) if mixer.value_norm else None
        cache_of = caches(mixer, model, kv)
        split = None if mixer.output_gate is None else SPLITS[mixer.output_gate]

        def run(step: Step) -> None:
            names, out = step.names, step.kept.get(q_out)
            qkv = read(names)
            with span("attn.rope"):
                if ones is not None and not mixer.shares_kv:
                    copies = mixer.keys_are_values
                    qkv = elementwise.with_normed_values(qkv, mixer.kv_size, ones, eps, keys_are_values=copies)
                rotation = step.rotations[mixer.rope]
                if mixer.shares_kv:
                    rows = qkv.view(-1, mixer.num_heads, mixer.head_dim)
                    names[self.q] = elementwise.rotate(rows, rotation, at.weights.get(self.q_norm), eps, out)
                    return
                if split is not None and self.gates is not None:
                    qkv, names[self.gates] = split(qkv, mixer.num_heads, mixer.head_dim)
                place = step.batch.page[model.page_groups[kv]], step.batch.offset
                slots = KvSlots(*cache_of(), *place, model.kv_scales[kv])
                q = elementwise.rotate_and_write(qkv, rotation, norms, slots, out)
                if weights is not None:
                    q.mul_(weights)
                if scaling is not None:
                    q.mul_(scaling[step.batch.positions])
                names[self.q] = q

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        from ..native_attention import OUTPUT_GATES, attend_arguments

        mixer, own_at = self.attention, next((i for i in range(at, len(to.ops)) if isinstance(to.ops[i], Attend)), at)
        attend = to.ops[own_at]
        if not isinstance(attend, Attend) or attend.q != self.q:
            raise NoNativeOp("queries that something else than attention reads")
        if mixer.keys_are_values and mixer.head_norm is HeadNorm.ALL:
            raise NoNativeOp("norm of all heads of keys that are values")
        gate, x = to.next(own_at), to.read(at, self.x)[0]
        own: dict[str, Any] = {"output_gate": OUTPUT_GATES[mixer.output_gate]}
        own["softplus_gates"] = int(mixer.softplus_gates)
        has_gates = self.gates is not None and isinstance(gate, GateOutput)
        has_gates = has_gates and to.readers(to.written(at, self.gates)) == [gate]  # as no other op changes them
        if self.gates is not None and not has_gates:
            own |= self._kept_gates(to, at, x, self.gates)
        last = own_at + has_gates
        for between in range(at + 1, own_at):  # what chooses the blocks that are attended to
            to.list_op(between)
        q = to.held_as(to.written(at), "Rounded")
        if attend.chosen is not None:
            own["chosen"] = to.held(own_at, attend.chosen, "Indices")
        out = to.rounded(to.written(last))
        to.emit("Attend", x=x, q=q, out=out, **own, **attend_arguments(mixer, self.norm))
        to.done |= {own_at, last}

    def _kept_gates(self, to: Lowering, at: int, x: Held, gates: str) -> dict[str, Any]:
        """Keep gates for a later op. Returns the arguments of attention without gates."""
        from ..native_attention import OUTPUT_GATES

        mixer = self.attention
        if mixer.output_gate is not OutputGate.PER_ELEMENT:
            raise NoNativeOp("gates beside heads that something else than attention reads")
        own = {"x": x, "column": mixer.q_size + 2 * mixer.kv_size, "width": mixer.q_size, "out_column": 0}
        to.emit("Copy", **own, out=to.held_as(to.written(at, gates)))
        return {"output_gate": OUTPUT_GATES[None], "softplus_gates": 0}

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return self.attention.q_size

    def detail(self) -> str:
        """See `Op.detail`."""
        return _described(self.attention)


@dataclass(frozen=True, slots=True)
class ResizeHeads(Op):
    """Heads of `width` elements, behind the first columns of x, become heads of `to` elements: each is cut, or has
    zeros behind it.
    """

    READS = ("x",)
    WRITES = ("out",)

    x: Read
    out: str
    begin: int
    """Columns before the heads, which stay."""

    width: int
    to: int

    order: tuple[int, ...] = ()
    """The heads of x that out has, by number; empty: each, in order."""

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return self.begin + (len(self.order) or (given[0] - self.begin) // self.width) * self.to

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        import torch
        from torch.nn.functional import pad

        read = at.reader(self.x)
        order = torch.tensor(self.order, device=at.model.device) if self.order else None

        def run(step: Step) -> None:
            kept, heads = read(step.names).flatten(1).tensor_split((self.begin,), 1)
            heads = heads.unflatten(1, (-1, self.width))
            heads = heads if order is None else heads.index_select(1, order)
            step.names[self.out] = torch.cat((kept, pad(heads, (0, self.to - self.width)).flatten(1)), 1)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        import torch

        to.need("OpKind.kResize", "values of another width than keys")
        (x, column, width), out = to.read(at, self.x), to.out(to.written(at))
        if self.begin:
            to.emit("Copy", x=x, column=column, width=self.begin, out=out, out_column=0)
        heads = len(self.order) or (width - self.begin) // self.width
        order = torch.tensor(self.order, dtype=torch.int32) if self.order else None
        shape = {"heads": heads, "width": self.width, "to": self.to, "order": order}
        to.emit("Resize", x=x, column=column + self.begin, out=out, out_column=self.begin, **shape)

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"{f'{len(self.order)} ' if self.order else ''}heads of {self.width} → {self.to}"


def _described(a: AttentionSpec) -> str:
    own = f"{a.num_heads} heads of {a.head_dim}"
    norms = f"{_NORMS[a.head_norm]}{rope_described(a.rope)}"
    if a.shares_kv:
        return f"{own}, {norms}; an earlier layer's keys and values"
    values = "; values are keys" * a.keys_are_values + "; values normalised" * a.value_norm
    scaling = "; log-n scaling of queries" if a.log_scaling else ""
    return f"{own}, {a.num_kv_heads} of keys and values, {norms}{values}{scaling}; writes keys and values"
