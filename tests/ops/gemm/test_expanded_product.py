"""Adapters expanded in the launch of a small GEMM, without a GPU: Triton's interpreter against the definition in
float64, and batch invariance; a process for each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import pytest
import torch

from chorus.core.cpus import available_cpus
from chorus.ops.elementwise.elementwise import silu_and_mul
from chorus.ops.gemm.small_gemm_schedule import MAX_EXPANDED_ROWS
from chorus.ops.lora.sgmv import AdapterRows, Segments
from chorus.ops.lora.sgmv_schedule import decode
from chorus.ops.lora.sgmv_tables import SgmvTables, TableSizes

from ...processes import run_python
from ..lora.test_sgmv_triton import LAYERS, SLAB_ELEMS, TABLE, Case, _adapters
from .test_small_gemm_triton import TOLERANCE

if TYPE_CHECKING:
    from chorus.ops.lora.sgmv_triton import Shrunk

#: (inputs, outputs per module, if the activation follows them): grouped-query attention's qkv, one whose modules end
#: within a program's columns, gate and up, o or down, one that a warp's share of the inputs does not hold.
GROUPS = (
    (40, (64, 16, 16), False),
    (24, (33, 12, 8), False),
    (56, (36, 36), True),
    (72, (50,), False),
    (264, (40,), False),
    (24, (40, 12, 4, 4), False),
)

#: Ranks of three adapters; a page is a vector, less than a row, or as many as records of places hold.
RANKS = ((4, 8, 16), (64, 1, 17), (3, 33, 65), (8, 5, 100))
PAGE_VECTORS = (1, 5, 64, 301)

MAX_RANK = 128


class World:
    """A weight, and three adapters in pages, of one part or two; a step is its rows' adapters, -1 for none."""

    def __init__(self, index: int, dtype: torch.dtype, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(index)
        self.dtype, self.device = dtype, device
        self.d_in, self.widths, self.silu = GROUPS[index % len(GROUPS)]
        self.modules = [(module, sum(self.widths[:module]), width) for module, width in enumerate(self.widths)]
        every = tuple(range(len(self.widths)))
        vector = 16 // dtype.itemsize
        case = Case(
            seed=index,
            ranks=RANKS[index % len(RANKS)],
            targets=(every, every[-1:], every[: 1 + index % len(every)]),
            layers=((0, 1, 2), (1,), (0, 1) if index % 2 else (1, 2)),
            skipped=(0, 3, 1),
            segments=(),
            page_vectors=PAGE_VECTORS[(index // 2) % 4],
            group=0,
        )
        page_elems = case.page_vectors * vector
        self.arena, self.adapters = _adapters(case, self.d_in, self.widths, page_elems, vector, dtype, generator)
        rows = sum(self.widths)
        self.weight = (torch.randn(rows, self.d_in, generator=generator) / self.d_in**0.5).to(dtype)
        self.bias = torch.randn(rows, generator=generator).to(dtype) if index % 3 else None
        self.x = torch.randn(MAX_EXPANDED_ROWS, self.d_in + 3, generator=generator).to(dtype)[:, : self.d_in]
        sizes = TableSizes(
            table_rows=9, layers=LAYERS, max_pages=1 << 15, max_rank=MAX_RANK, max_tiles=64,
            scratch=SgmvTables.scratch_elems(splits=2, tokens=64, modules=4, max_rank=MAX_RANK), page_elems=page_elems,
            slab_elems=max(SLAB_ELEMS, 3 * (self.d_in + max(self.widths) + 2 * vector)), modules=TABLE,
        )  # fmt: skip
        self.tables = SgmvTables(sizes, device)

    def segments(self, used: Sequence[int]) -> Segments:
        segments = Segments()
        for row, adapter in enumerate(used):
            for rows in self.adapters[adapter] if adapter >= 0 else ():
                segments.add(row, row + 1, rows)
        return segments

    def product(self, used: Sequence[int], x: torch.Tensor, layer: int = 1, more: int = 0) -> torch.Tensor:
        """By the kernels, with `more` tiles without work; all but rank-rows is NaN before."""
        self.tables.h.fill_(math.nan)
        num_tiles = self.tables.plan(self.segments(used), 1) + more
        return self._launch(x, layer, num_tiles).cpu()

    def compile(self, rows: int) -> None:
        """Compile the kernels that `product` launches for so many rows, and the GEMM without adapters."""
        x = self.x[:rows]
        self._launch(x, 1, rows, compile_only=True)
        self.base(x, compile_only=True)

    def base(self, x: torch.Tensor, *, compile_only: bool = False) -> torch.Tensor:
        """The product without adapters, by the kernel."""
        return self._multiply(x.to(self.device), None, compile_only=compile_only)

    def _launch(self, x: torch.Tensor, layer: int, num_tiles: int, *, compile_only: bool = False) -> torch.Tensor:
        from chorus.ops.lora.sgmv_triton import Sgmv

        x = x.to(self.device)
        sgmv = Sgmv(self.arena.to(self.device), self.tables, self.modules, self.d_in, decode(len(x), MAX_RANK))
        tiles = self.tables.tiles
        shrunk = sgmv.shrink(x, layer, tiles, num_tiles, compile_only=compile_only)
        return self._multiply(x, shrunk, compile_only=compile_only)

    def _multiply(self, x: torch.Tensor, shrunk: Shrunk | None, *, compile_only: bool) -> torch.Tensor:
        from chorus.ops.gemm.small_gemm_triton import multiply

        weight, bias = self.weight.to(self.device), None if self.bias is None else self.bias.to(self.device)
        return multiply(x, weight, bias, silu=self.silu, shrunk=shrunk, compile_only=compile_only)

    def definition(self, used: Sequence[int], x: torch.Tensor, layer: int = 1) -> torch.Tensor:
        """In float64, rounded where a launch after the other rounds."""
        y = x.double() @ self.weight.double().T
        y = (y if self.bias is None else y + self.bias.double()).to(self.dtype)
        for row, adapter in enumerate(used):
            for rows in self.adapters[adapter] if adapter >= 0 else ():
                for module, column, width in self.modules:
                    self._add(y[row, column : column + width], x[row], rows, layer, module)
        return silu_and_mul(y) if self.silu else y

    def _add(self, y: torch.Tensor, x: torch.Tensor, rows: AdapterRows, layer: int, module: int) -> None:
        a, b = rows.matrices(self.arena, layer, module, self.d_in, len(y))
        if a is not None and b is not None:
            y.copy_(y.double() + rows.scale * (x.double() @ a.double().T) @ b.double())


def steps() -> Iterator[tuple[int, list[int]]]:
    """Rows' adapters of steps of one to all rows, which one tile holds or the other: all of them, some, one, none."""
    generator = torch.Generator().manual_seed(5)
    for index in range(20):
        rows = (1, 17, 5, 32, 16, 3, 25)[index % 7]
        yield index, torch.randint(-1, 3, (rows,), generator=generator).tolist()
    yield 20, [0] * MAX_EXPANDED_ROWS
    yield 21, [-1] * 4
    yield 22, [2, 1, 2, 2] * 8  # more tiles than rows


def interpret() -> None:
    """Run in a process of its own."""
    from ..bf16_interpreter import fix_bf16

    fix_bf16()
    check_values([*TOLERANCE], "cpu")


def check_values(dtypes: Sequence[torch.dtype], device: str) -> None:
    tiles = set()
    given = [(*step, World(step[0], dtype, device)) for step, dtype in zip(steps(), cycle(dtypes), strict=False)]
    compile_ahead((world, len(used)) for _, used, world in given)
    for index, used, world in given:
        x, dtype = world.x[: len(used)], world.dtype
        for layer in (0, 1):
            got, want = world.product(used, x, layer, more=index % 3), world.definition(used, x, layer)
            assert got.dtype is dtype and got.shape == want.shape
            error = float((got.float() - want.float()).abs().max() / want.float().abs().max())
            assert error <= TOLERANCE[dtype], f"{index} {used} {dtype}, layer {layer}: differs by {error:.1e}"
        tiles.add(len(world.segments(used).rows))
    assert max(tiles) > MAX_EXPANDED_ROWS, "a row's adapter in several parts"


def compile_ahead(cases: Iterable[tuple[World, int]]) -> None:
    """Compile the kernels of these cases for so many rows, if they are on a GPU: one by one it takes minutes."""
    from chorus.ops.launch_triton import compiling

    with compiling(available_cpus()):
        for world, rows in cases:
            if world.device != "cpu":
                world.compile(rows)


def interpret_companies() -> None:
    """A row's bits are the same alone, elsewhere, next to rows of other ranks, and without adapter as if no row had
    one. Values that are not finite in an adapter stay with its rows. Runs in a process of its own.
    """
    from ..bf16_interpreter import fix_bf16, multiply_row_by_row

    fix_bf16()
    multiply_row_by_row()
    check_companies("cpu")


def check_companies(device: str) -> None:
    worlds = [World(index, torch.bfloat16, device) for index in range(len(GROUPS))]
    compile_ahead(itertools.product(worlds, (7, 16, 21)))
    orders = [6, 5, 4, 3, 2, 1, 0], [3], [2, 2], [0, 1], [1, 4, 6], [*range(7), *[3] * 9]
    for index in range(len(GROUPS)):
        _check_company(World(index, torch.bfloat16, device), [0, -1, 1, 2, 0, 2, -1], orders, f"{index}")
    used = [0, -1, 1, 2, 0, 2, -1] * 3  # in the larger tile, of several times as many rows as are expanded at once
    every = list(range(len(used)))
    orders = every[::-1], [3] * 17, [*every[4:]], [*every, *[5] * 11], [1, 4, 6] * 6
    for index in range(len(GROUPS)):
        _check_company(World(index, torch.bfloat16, device), used, orders, f"{index} of 21 rows")


def _check_company(world: World, used: Sequence[int], orders: Sequence[list[int]], name: str) -> None:
    x = world.x[: len(used)].contiguous()
    whole = world.product(used, x)
    for chosen in orders:
        got = world.product([used[row] for row in chosen], x[chosen], more=1)
        assert torch.equal(got, whole[chosen]), f"{name}: rows {chosen} have other bits"
    base = world.base(x).cpu()
    plain = [row for row, adapter in enumerate(used) if adapter < 0]
    assert torch.equal(base[plain], whole[plain]), f"{name}: rows of the base model changed"
    assert not torch.equal(base[0], whole[0])
    for rows in world.adapters[2]:
        world.arena[rows.pages] = (math.nan, math.inf)[len(world.widths) % 2]
    broken = world.product(used, x)
    others = [row for row, adapter in enumerate(used) if adapter != 2]
    assert torch.equal(broken[others], whole[others]), f"{name}: another adapter's rows changed"
    assert not broken[[row for row, adapter in enumerate(used) if adapter == 2]].isfinite().all()


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.timeout(1200)
def test_values_equal_the_definition():
    result = run_python("-m", "tests.ops.gemm.test_expanded_product", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.timeout(1200)
def test_bits_of_a_row_do_not_depend_on_its_company():
    command = "from tests.ops.gemm.test_expanded_product import *; interpret_companies()"
    result = run_python("-c", command, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.triton
def test_refuses_modules_that_are_not_the_weights_and_more_rows_than_are_expanded():
    from chorus.ops.gemm.small_gemm_triton import multiply
    from chorus.ops.lora.sgmv_schedule import ExpandShape
    from chorus.ops.lora.sgmv_triton import Shrunk

    shape = ExpandShape((0, 1), (16, 8), 1, 64, 2, 16, 1, 2)
    with pytest.raises(ValueError, match=r"widths \(16, 8\) must add up to the weight's 32 rows"):
        multiply(torch.zeros(2, 8), torch.zeros(32, 8), shrunk=Shrunk(shape, None, ()))
    with pytest.raises(ValueError, match="adapters of 33 rows can't be expanded in a GEMM; at most 32 rows can"):
        multiply(torch.zeros(33, 8), torch.zeros(24, 8), shrunk=Shrunk(shape, None, ()))


if __name__ == "__main__":
    interpret()
