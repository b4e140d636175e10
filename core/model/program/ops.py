"""Ops of a layer: each is one kernel, with the buffers that it reads and writes, its weights and its arguments.

A buffer is a name for what an op wrote last under it, no memory of its own. The residual stream is `x`, or `s` where it
is several streams; both are changed in place.

Tests: tests/core/model/program/test_builder.py
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from ....memory.pages.projections import Group
from ..specs.attention import AttentionSpec, DifferenceSpec, LatentSpec
from ..specs.feed_forward import Experts, GatedActivation, UngatedActivation
from ..specs.norms import NormSpec
from ..specs.recurrent import RecurrentSpec

#: The residual stream `[tokens, hidden]`.
STREAM = "x"

#: Several residual streams `[tokens, streams, hidden]`.
STREAMS = "s"

#: Embeddings of tokens `[tokens, hidden]`, where layers read them again.
EMBEDDED = "e0"

#: The tokens that queries attend to, as the last indexer chose them `[tokens, top_k]` int32; or blocks of tokens.
CHOSEN = "chosen"

#: What a mixture of experts gives, up to the end of the next layer `[tokens, hidden]`.
LATE = "late"

#: What a router's small network begins with, for that of the next layer `[tokens, size]`.
ROUTED = "routed"

#: Further inputs of all layers `[tokens, layers · size]`, and the layer's `[tokens, size]`.
INPUTS, FURTHER = "inputs", "input"


@dataclass(frozen=True, slots=True)
class View:
    """Some columns of a buffer."""

    name: str
    begin: int
    end: int | None = None

    copied: bool = False
    """They are copied, so that they lie side by side in memory."""

    def __str__(self) -> str:
        return f"{self.name}[{self.begin or ''}:{'' if self.end is None else self.end}]"


#: What an op reads: a buffer by name, or some of its columns.
Read = str | View


def name_of(read: Read) -> str:
    """The buffer that is read."""
    return read if isinstance(read, str) else read.name


@dataclass(frozen=True, slots=True)
class Op:
    """An op: the buffers that it reads and writes, its weights, and its arguments."""

    READS: ClassVar[tuple[str, ...]] = ()
    """Its fields that are buffers which it reads."""

    WRITES: ClassVar[tuple[str, ...]] = ()
    """Its fields that are buffers which it writes; one that is also read is changed in place."""

    SLOTS: ClassVar[tuple[str, ...]] = ()
    """Its fields that are weights, by their names in a layer's."""

    IS_CUT: ClassVar[bool] = False
    """True if it reads what is different in every step: steps with prompts are captured between such ops."""

    @property
    def reads(self) -> tuple[Read, ...]:
        return self._of(self.READS)

    @property
    def writes(self) -> tuple[str, ...]:
        return self._of(self.WRITES)

    @property
    def slots(self) -> tuple[str, ...]:
        return self._of(self.SLOTS)

    def _of(self, names: tuple[str, ...]) -> tuple:
        found = (getattr(self, name) for name in names)
        flat = (each if isinstance(each, tuple) else (each,) for each in found if each is not None)
        return tuple(each for some in flat for each in some)

    @property
    def arguments(self) -> dict[str, object]:
        """What sets the op apart from others of its kind, other than buffers and weights."""
        others = {*self.READS, *self.WRITES, *self.SLOTS}
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in others}


@dataclass(frozen=True, slots=True)
class Norm(Op):
    """`out = norm(x)`, with statistics in float32. With `added` (a peephole's), x becomes `x + added` first."""

    READS = ("x", "added")
    WRITES = ("out",)
    SLOTS = ("weight",)

    x: Read
    out: str
    weight: str
    norm: NormSpec
    added: str | None = None


@dataclass(frozen=True, slots=True)
class Gemm(Op):
    """`out = x · wᵀ + bias` of the projections of a group, side by side, and what adapters add to them. With `silu` (a
    peephole's), out is `silu(gate) · up` of the two halves of that.
    """

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("weight",)

    group: Group
    x: Read
    out: str
    weight: str
    silu: bool = False

    @property
    def bias(self) -> str:
        """The slot of its bias, if the layer has one; merged weights may have one where the model's have none."""
        return f"{self.weight}_bias"


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


@dataclass(frozen=True, slots=True)
class Latents(Op):
    """Rotate the queries of latent attention; normalise, rotate and write the latent and key that all heads share.

    x: queries `[tokens, heads · (key + rotated)]`. kept: `[tokens, kv_rank + rotated]`.
    """

    READS = ("x", "kept")
    WRITES = ("q",)
    SLOTS = ("k_norm",)

    x: Read
    kept: Read | None
    """None: they are another layer's."""

    q: str
    attention: AttentionSpec
    latent: LatentSpec
    k_norm: str = "k_norm"


@dataclass(frozen=True, slots=True)
class Attend(Op):
    """Attention of q over the pages: `[tokens, heads · head_dim]`."""

    READS = ("q", "chosen", "relative")
    WRITES = ("out",)
    IS_CUT = True
    SLOTS = ("sinks", "slopes", "profiles")

    q: str
    out: str
    attention: AttentionSpec
    sinks: str = "sinks"
    slopes: str = "slopes"
    profiles: str = "profiles"
    chosen: str | None = None
    """The blocks that queries attend to; None: all that they see."""

    relative: str | None = None
    """The queries' states that numbers added to scores are made of: see `RelativeSpec`."""


@dataclass(frozen=True, slots=True)
class LatentAttend(Op):
    """Attention over latents: q goes through kv_b_proj's keys, and the outputs through its values."""

    READS = ("q", "chosen")
    WRITES = ("out",)
    IS_CUT = True
    SLOTS = ("kv_up", "sinks")

    q: str
    out: str
    attention: AttentionSpec
    latent: LatentSpec
    kv_up: str = "kv_up"

    chosen: str | None = None
    """The tokens that queries attend to; None: all that they see."""

    sinks: str | None = None

    @property
    def bias(self) -> str:
        return f"{self.kv_up}_bias"


@dataclass(frozen=True, slots=True)
class GateOutput(Op):
    """`x · sigmoid(gates)`, or `x · log(1 + e^gates)`."""

    READS = ("x", "gates")
    WRITES = ("out",)

    x: str
    gates: str
    out: str
    softplus: bool = False


@dataclass(frozen=True, slots=True)
class TakeGates(Op):
    """Gates of what latent attention gives, one for each element: the last elements of each head of x, or the only one
    of a head for all of its.
    """

    READS = ("x",)
    WRITES = ("out",)

    x: Read
    out: str
    heads: int
    width: int
    """Elements of a head's output."""


@dataclass(frozen=True, slots=True)
class GrowHeads(Op):
    """Heads of x times `scale · log(position + 1) + bias`, a learned number each for each head."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("weight",)

    x: Read
    out: str
    heads: int
    weight: str


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

    def columns(self, given: int) -> int:
        """Columns of out. given: those of x."""
        return self.begin + (len(self.order) or (given - self.begin) // self.width) * self.to


@dataclass(frozen=True, slots=True)
class SubtractHeads(Op):
    """The difference of each head of x's first half and one of the second: see `DifferenceSpec`."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("factors",)

    x: str
    out: str
    attention: AttentionSpec
    difference: DifferenceSpec
    eps: float
    factors: str = "difference"


@dataclass(frozen=True, slots=True)
class Mix(Op):
    """A recurrent mixer, or one of its two parts; the sequences' states go on."""

    READS = ("x",)
    WRITES = ("out",)
    IS_CUT = True
    SLOTS = ("weights",)

    x: Read
    out: str
    mixer: RecurrentSpec
    weights: str = "recurrent"

    is_first: bool = False
    """It is the first part of a mixer of two: see `RecurrentSpec.inner`."""

    @property
    def out_size(self) -> int:
        """Width of its output."""
        return self.mixer.channels if self.is_first else self.mixer.out_size


@dataclass(frozen=True, slots=True)
class Concat(Op):
    """Columns of several buffers, side by side."""

    READS = ("parts",)
    WRITES = ("out",)

    parts: tuple[Read, ...]
    out: str


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


@dataclass(frozen=True, slots=True)
class SparseGates(Op):
    """The gates of x's first half of which all but the largest become 0; ranks have shares of them."""

    READS = ("x",)
    WRITES = ("out",)

    x: str
    out: str
    sparsity: float


@dataclass(frozen=True, slots=True)
class Moe(Op):
    """A mixture of experts, and what adapters add to them. routed: the router's input, where it is another one."""

    READS = ("x", "routed")
    WRITES = ("out",)
    SLOTS = ("experts",)

    x: Read
    routed: Read | None
    out: str
    spec: Experts
    experts: str = "experts"
    bias: str = "experts_bias"


@dataclass(frozen=True, slots=True)
class SharedExpert(Op):
    """The shared expert of a mixture whose others read latents, and what adapters add to it."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("experts",)

    x: Read
    out: str
    spec: Experts
    experts: str = "experts"


@dataclass(frozen=True, slots=True)
class Add(Op):
    """`x += y`."""

    READS = ("x", "y")
    WRITES = ("x",)

    x: str
    y: str


@dataclass(frozen=True, slots=True)
class Replace(Op):
    """x becomes y, in place."""

    READS = ("x", "y")
    WRITES = ("x",)

    x: str
    y: str


@dataclass(frozen=True, slots=True)
class AddMedia(Op):
    """`x += part` of an image's row, of tokens that stand for one; see `MediaRows`."""

    READS = ("x",)
    WRITES = ("x",)

    x: str
    part: int


@dataclass(frozen=True, slots=True)
class Sum(Op):
    """`out = x + y`."""

    READS = ("x", "y")
    WRITES = ("out",)

    x: str
    y: str
    out: str


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


@dataclass(frozen=True, slots=True)
class Clip(Op):
    """x becomes at least -limit and at most limit, in place."""

    READS = ("x",)
    WRITES = ("x",)

    x: str
    limit: float


@dataclass(frozen=True, slots=True)
class AllReduce(Op):
    """The sum of all ranks' y, on each of them."""

    READS = ("y",)
    WRITES = ("y",)

    y: str


@dataclass(frozen=True, slots=True)
class TakeInput(Op):
    """`out = inputs[:, layer]`."""

    READS = ("inputs",)
    WRITES = ("out",)

    out: str = FURTHER
    inputs: str = INPUTS


@dataclass(frozen=True, slots=True)
class Begin(Op):
    """Ops up to the next `End` are a span of this name in profiles."""

    name: str


@dataclass(frozen=True, slots=True)
class End(Op):
    """See `Begin`."""
