"""An op of a layer: one kernel, with the buffers that it reads and writes, its weights and its arguments.

A buffer is a name for what an op wrote last under it, no memory of its own. The residual stream is `x`, or `s` where it
is several streams; both are changed in place.

Tests: tests/core/model/program/test_builder.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from .lowering import Lowering
    from .torch_step import OpContext, Run

#: The residual stream `[tokens, hidden]`.
STREAM = "x"

#: Several residual streams `[tokens, streams, hidden]`.
STREAMS = "s"

#: Embeddings of tokens `[tokens, hidden]`, where layers read them again.
EMBEDDED = "e0"

#: The tokens that queries attend to, as the last indexer chose them `[tokens, top_k]` int32; or blocks of tokens.
CHOSEN = "chosen"

#: What a router's small network begins with, for that of the next layer `[tokens, size]`.
ROUTER_STATE = "router_state"

#: Per-layer embeddings of all layers `[tokens, layers · size]`, and the layer's `[tokens, size]`.
PER_LAYER, LAYER_EMBEDDING = "per_layer", "layer_embedding"


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


class NoNativeOp(Exception):
    """The library has no function for an op with its arguments; says what a model has in its place."""


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

    IN_PLACE: ClassVar[bool] = False
    """True if what it writes is what it reads, changed."""

    ROUNDED: ClassVar[bool] = False
    """True if it reads all of a buffer in the model's dtype, as products do."""

    LACKS: ClassVar[str] = ""
    """What models with it have that the native library does not compute; empty: it computes the op."""

    SUMS: ClassVar[bool] = False
    """True if it does nothing but sum over ranks."""

    @property
    def adds(self) -> str | None:
        """The buffer that it adds to the residual stream, if it does nothing else."""
        return None

    @property
    def is_in_place(self) -> bool:
        """See `IN_PLACE`."""
        return self.IN_PLACE

    def torch(self, at: OpContext) -> Run:
        """The function that runs it in a step, by PyTorch's operators or a GPU's kernels."""
        raise NotImplementedError("spans begin and end around other ops: see `TorchProgram`")

    def native(self, to: Lowering, at: int) -> None:
        """List it for the native library, as op number `at` of its layer. Raises NoNativeOp."""
        raise NoNativeOp(self.LACKS or f"{type(self).__name__} by itself")

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """Columns of what it writes, in the native decoder. given: those of what it reads."""
        return given[0]

    def columns_of(self, write: str, given: Sequence[int], to: Lowering) -> int:
        """Likewise, of one of several buffers that it writes."""
        del write
        return self.columns(given, to)

    def formula(self) -> str:
        """It as `q, gates ← heads in`, for people."""
        words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in type(self).__name__)
        reads = " ".join(map(str, self.reads))
        return f"{', '.join(self.writes)} ← {words.removeprefix('_')} {reads}".rstrip()

    def detail(self) -> str:
        """What it computes with, for people: shapes of weights, kinds and numbers."""
        return ""

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
