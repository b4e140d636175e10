"""Adapters' vectors on a GPU: one launch for the projections that share an input; the counterpart of `vectors`.

Import this module lazily: it needs triton.
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch_triton import KernelLauncher
from .sgmv_triton import _block_of, _column_of, _find_module, _module_of, _width_of
from .vectors_schedule import vector_blocks, vector_constants, vector_options
from .vectors_tables import VectorTables


class Vectors(NamedTuple):
    """What the kernel reads, as one argument: tensors on the host, pointers in a kernel.

    arena: float32 [num_pages, page]. rows: int32 [tokens]. The others are those of `VectorTables`.
    """

    arena: torch.Tensor
    rows: torch.Tensor
    first: torch.Tensor
    pages: torch.Tensor


@triton.jit
def _load_vector(arena, pages, begin, column, own, PAGE: tl.constexpr):
    """Load values `begin + column` of an adapter. Vectors and pages begin at multiples of 16 bytes."""
    value = begin + column
    page = tl.load(pages + value // PAGE, mask=own, other=0).to(tl.int64)
    at = tl.max_contiguous(tl.multiple_of(page * PAGE + value % PAGE, 4), 4)
    return tl.load(arena + at, mask=own, other=1.0)


@triton.jit(do_not_specialize=["layer", "layers", "max_pages"])
def scale_rows(y, vectors, layer, layers, max_pages, y_stride, C: tl.constexpr):
    """y[t, n] = scale · y[t, n] + offset; with C.undo (y[t, n] - offset) / scale.

    Grid (blocks of outputs of all modules, tokens). y: [tokens, ≥ Σ widths], rows y_stride apart. vectors: see
    `Vectors`. layers, max_pages: lengths of rows of first and pages. C: `VectorConstants`.
    """
    BLOCK: tl.constexpr = C.block_n
    PAGE: tl.constexpr = C.page
    block, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(vectors.rows + token).to(tl.int64)
    if row < 0:
        return
    group = _find_module(block, C)
    module = _module_of(group, C)
    begin = tl.load(vectors.first + (row * layers + layer) * C.table + module)
    if begin < 0:
        return
    width = _width_of(group, C)
    column = (block - _block_of(group, C)) * BLOCK + tl.arange(0, BLOCK)
    own = column < width
    pages = vectors.pages + row * max_pages
    scale = _load_vector(vectors.arena, pages, begin, column, own, PAGE)
    offset = _load_vector(vectors.arena, pages, begin + (width + 3) // 4 * 4, column, own, PAGE)
    target = y + token * y_stride + _column_of(group, C) + column
    before = tl.load(target, mask=own, other=0.0).to(tl.float32)
    after = (before - offset) / scale if C.undo else before * scale + offset
    tl.store(target, after.to(y.dtype.element_ty), mask=own)


class ScaleRows:
    """Applies, or undoes, the vectors of the projections that share an input."""

    def __init__(
        self, arena: torch.Tensor, tables: VectorTables, modules: Sequence[tuple[int, int, int]], *, undo: bool
    ) -> None:
        """arena: `[num_pages, page_elems]`. modules: at most four of (module id, first column in y, width), adjacent in
        y.
        """
        constants = vector_constants(modules, arena.shape[1] * arena.itemsize, tables.first.shape[2], undo=undo)
        self._launch = KernelLauncher(scale_rows, {"C": constants, **vector_options()})
        self._blocks = vector_blocks(modules)
        self._tables, self._undo = tables, undo
        self.use_arena(arena)

    def use_arena(self, arena: torch.Tensor) -> None:
        """From now on, read vectors from another arena of the same layout."""
        its = self._tables
        rows = its.undone if self._undo else its.applied
        self._vectors = Vectors(arena.view(torch.float32), rows, its.first, its.pages)
        self._free = its.first.shape[1], its.pages.shape[1]

    def __call__(self, y: torch.Tensor, layer: int, *, compile_only: bool = False) -> None:
        """Change y `[tokens, out]`, the packed outputs, in place.

        compile_only: compile the kernel, in parallel within `launch_triton.compiling`, and launch nothing.
        """
        if y.stride(1) != 1:
            raise ValueError("rows of y must be contiguous")
        changed, free, strides = (y, self._vectors), (layer, *self._free), (y.stride(0),)
        if compile_only:
            self._launch.compile(changed, free, strides)
        else:
            self._launch((self._blocks, len(y), 1), changed, free, strides)


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportPrivateUsage=false
# pyright: reportAttributeAccessIssue=false
