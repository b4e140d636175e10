"""Finds which value each op of a layer's program reads and writes, for the native decoder.

Tests: tests/core/model/program/test_native_ops.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .native_registers import Value
from .ops import Add, AddMedia, Clip, Gemm, Moe, Op, Read, Replace, Scale, View, name_of

#: Ops that the library has no function for, by what models then have.
_TITLES = {
    "TakeStream": "residual of several streams",
    "ConnectStreams": "residual of several streams",
    "TakeInput": "further input of layers",
    "EmbedMedia": "embedding of tokens of images and sound",
    "SparseGates": "sparse gate",
    "Index": "indexer of sparse attention",
    "IndexBlocks": "indexer of blocks of keys",
    "QueriesOfExperts": "experts of queries",
    "GrowHeads": "learned factors of softmax",
    "TakeGates": "gates of what latent attention gives",
    "SharedExpert": "shared expert beside experts of latents",
    "NormHeads": "norm of each head's output",
    "NormScaled": "norm of a part's output that is scaled first",
    "AddGated": "gated residual stream",
    "NormStreams": "residual of several streams",
    "LookUp": "table of n-grams",
    "AddScaled": "residual stream with learned factors",
    "CarryRouted": "router that goes over layers",
    "ScaleEmbeddings": "learned factor of embeddings",
    "ConvolveStream": "short convolution of a stream",
    "TakeRelative": "relative attention by learned vectors",
    "MoeWithSinks": "mixture with experts of all tokens that its router weighs",
}


class NoNativeOp(Exception):
    """The library has no function for an op with its arguments; says what a model has in its place."""


class Buffers:
    """What each op of a list reads and writes: names are bound anew by each write but for those in place."""

    def __init__(
        self, ops: Sequence[Op], lasting: Sequence[Value], widths: Callable[[Op, Mapping[str, Value]], int]
    ) -> None:
        """lasting: the residual stream, and what else is there before a layer."""
        self.reads: list[dict[str, Value]] = []
        self.writes: list[dict[str, Value]] = []
        self.readers: dict[Value, list[Op]] = {}
        names = {each.name: each for each in lasting}
        for op in ops:
            check_native(op)
            own = {name: _known(names, name, op) for name in map(name_of, op.reads)}
            for value in own.values():
                self.readers.setdefault(value, []).append(op)
            self.reads.append(own)
            written = {}
            for name in op.writes:
                is_in_place = isinstance(op, Add | AddMedia | Clip | Replace) or (isinstance(op, Scale) and op.in_place)
                keeps = name in own and is_in_place
                names[name] = written[name] = own[name] if keeps else Value(name, widths(op, own))
            self.writes.append(written)


def check_native(op: Op) -> None:
    """Raise NoNativeOp for an op of a kind that the library has no function for."""
    if (title := _TITLES.get(type(op).__name__)) is not None:
        raise NoNativeOp(title)


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


def reads_rounded(op: Op, name: str) -> bool:
    """An op reads all of a buffer as GEMMs do."""
    return isinstance(op, Gemm | Moe) and name in op.reads
