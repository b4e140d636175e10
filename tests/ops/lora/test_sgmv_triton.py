"""The Triton SGMV kernels without a GPU: values in Triton's interpreter against `sgmv_ref`, over random steps and a
seeded grid, and an offline compile; a process for each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chorus.ops.lora.sgmv import AdapterRows, Segments
from chorus.ops.lora.sgmv_schedule import Schedule, decode, prefill
from chorus.ops.lora.sgmv_tables import SgmvTables, TableSizes

from ...processes import run_python
from .sgmv_ref import sgmv_ref

LAYERS = 3
RANKS = (1, 16, 3, 64, 17, 2, 33, 256, 8, 5, 128, 15, 31, 7, 100, 255, 4, 32, 65, 127)

#: Largest difference, as a share of the largest output.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

#: (inputs, (outputs per module)) of a group of projections that share x; odd widths end within a block.
GROUPS = ((40, (24, 8, 16)), (56, (33, 21)), (72, (50,)), (32, (24, 12, 4, 4)))

#: An adapter's most elements per rank-row.
SLAB_ELEMS = 200
TABLE = 18
"""Modules of a table."""

#: 16 bytes, more than any row, and as many as the records of places hold.
PAGE_VECTORS = (1, 3, 5, 16, 64, 301)


@dataclass(frozen=True)
class Case:
    """A step: parts of adapters, and segments (tokens, adapter) of which -1 is the base model.

    minus: the adapter that is taken off all tokens that have one, -1 for none.
    """

    seed: int
    ranks: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]
    layers: tuple[tuple[int, ...], ...]
    skipped: tuple[int, ...]
    segments: tuple[tuple[int, int], ...]
    page_vectors: int
    group: int
    minus: int = -1


def small(schedule: Schedule) -> Schedule:
    """The same programs over smaller blocks: several chunks, splits and blocks even in small shapes."""
    tile = 16 if schedule.tensor_cores else 1
    return replace(schedule, tile_tokens=tile, block_r=16, expand_r=16, block_k=16, block_n=16, max_splits=2, lanes=2)


def schedules() -> dict[str, Schedule]:
    """Those of serving, and the same over small blocks."""
    real = {"decode": decode(64, 256), "prefill": prefill(64, 256)}
    return real | {f"{name}, small": small(schedule) for name, schedule in real.items()}


def cases(seed: int, count: int) -> Iterator[Case]:
    """`count` steps that go through all of RANKS, with pages of one vector up to more than any row."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for index in range(count):
        group = index % len(GROUPS)
        modules = range(len(GROUPS[group][1]))
        ranks = tuple(RANKS[(3 * index + i) % len(RANKS)] for i in range(3))
        targets = tuple(tuple(m for m in modules if draw(0, 3)) or (modules[-1],) for _ in ranks)
        layers = tuple(((0, 1, 2), (1,), (0, 1))[draw(0, 2)] for _ in ranks)
        segments = [(draw(0, 3), draw(-1, 2)) for _ in range(3)]
        segments.insert(draw(0, 3), (0, draw(0, 2)))
        segments.insert(draw(0, 3), (1, draw(0, 2)))
        if not index % 5:
            segments.append((21, ranks.index(min(ranks))))  # longer than a tile
        yield Case(
            seed=draw(0, 1 << 30),
            ranks=ranks,
            targets=targets,
            layers=layers,
            skipped=tuple(draw(0, 6) for _ in ranks),
            segments=tuple(segments),
            page_vectors=PAGE_VECTORS[draw(0, 5)],
            group=group,
            minus=index % 4 - 1,
        )


def check(case: Case, schedule: Schedule, dtype: torch.dtype, name: str, kept: Kept) -> tuple[float, str]:
    """Run a step. Returns the largest difference as a share of the largest output, and a description of each error."""
    generator = torch.Generator().manual_seed(case.seed)
    d_in, widths = GROUPS[case.group]
    vector = 16 // dtype.itemsize
    page_elems = case.page_vectors * vector
    modules = [(index, sum(widths[:index]), width) for index, width in enumerate(widths)]
    arena, adapters = _adapters(case, d_in, widths, page_elems, vector, dtype, generator)
    segments, tokens = Segments(), 0
    minus = [replace(rows, scale=-0.5 * rows.scale) for rows in adapters[case.minus]] if case.minus >= 0 else []
    for length, adapter in case.segments:
        for rows in adapters[adapter] + minus if adapter >= 0 else ():
            segments.add(tokens, tokens + length, rows)
        tokens += length
    x = torch.randn(tokens, d_in, generator=generator).to(dtype)
    before = torch.randn(tokens, sum(widths), generator=generator).to(dtype)
    got, want = before.clone(), before.clone()
    tables = kept[name, dtype, page_elems]
    tables.h.fill_(math.nan)
    num_tiles = tables.plan(segments, schedule.tile_tokens)
    _run(got, x, arena, tables, 1, modules, schedule, num_tiles + 2, tables.terms)
    sgmv_ref(want, x, arena, segments, 1, modules)
    if not torch.equal(got[want == before], before[want == before]) and dtype is torch.float32:
        return math.inf, "an output without an adapter changed"
    if not tokens:
        return 0.0, ""
    error = float((got.float() - want.float()).abs().max() / want.float().abs().max())
    return error, "" if error <= TOLERANCE[dtype] else f"differs by {error:.1e} of the largest output"


def _run(
    y: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    tables: SgmvTables,
    layer: int,
    modules: Sequence[tuple[int, int, int]],
    schedule: Schedule,
    num_tiles: int,
    terms: int = 1,
    first_tile: int = 0,
) -> None:
    from chorus.ops.lora.sgmv_triton import Sgmv

    tiles = tables.tiles[first_tile * terms :]
    Sgmv(arena, tables, modules, x.shape[1], schedule, terms)(y, x, layer, tiles, num_tiles)


def _adapters(
    case: Case,
    d_in: int,
    widths: Sequence[int],
    page_elems: int,
    vector: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[torch.Tensor, list[list[AdapterRows]]]:
    """An arena that is NaN wherever no rank-row lies, and the adapters in it; the last has a second part where modules
    are left over.
    """
    plans: list[list[tuple[AdapterRows, int]]] = []
    for rank, targets, layers, skipped in zip(case.ranks, case.targets, case.layers, case.skipped, strict=True):
        parts = [_part(rank, targets, layers, skipped * vector, d_in, widths, vector)]
        rest = tuple(module for module in range(len(widths)) if module not in targets)
        if rest:
            parts.append(_part(max(1, rank // 2), rest, (0, 1, 2), parts[0][1], d_in, widths, vector))
        plans.append(parts)
    counts = [-(-parts[-1][1] // page_elems) for parts in plans]
    num_pages = sum(counts) + 2
    free = iter(torch.randperm(num_pages, generator=generator).tolist())
    arena = torch.full((num_pages, page_elems), math.nan, dtype=dtype)
    adapters = []
    for parts, count in zip(plans, counts, strict=True):
        pages = [next(free) for _ in range(count)]
        run = torch.full((count * page_elems,), math.nan)
        for rows, _ in parts:
            rows.pages = pages
            for start, width in _places(rows, d_in, widths):
                run[start : start + width] = torch.randn(width, generator=generator)
        arena[pages] = run.view(count, page_elems).to(dtype)
        adapters.append([rows for rows, _ in parts])
    return arena, adapters


def _part(
    rank: int, targets: Sequence[int], layers: Sequence[int], begin: int, d_in: int, widths: Sequence[int], vector: int
) -> tuple[AdapterRows, int]:
    """Rows from element `begin` on, without pages yet; and the element after them."""
    offset, a_offset, b_offset = 0, [-1] * TABLE, [-1] * TABLE
    for module in targets:
        a_offset[module], b_offset[module] = offset, offset + -(-d_in // vector) * vector
        offset = b_offset[module] + -(-widths[module] // vector) * vector
    first = [begin + layers.index(layer) * rank * offset if layer in layers else -1 for layer in range(LAYERS)]
    return AdapterRows([], rank, rank**-0.5, offset, a_offset, b_offset, first), begin + len(layers) * rank * offset


def _places(rows: AdapterRows, d_in: int, widths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first element, width) of every rank-row."""
    for first in rows.first_elem:
        if first < 0:
            continue
        for i in range(rows.rank):
            for module, width in enumerate(widths):
                if rows.a_offset[module] >= 0:
                    yield first + i * rows.slab_elems + rows.a_offset[module], d_in
                    yield first + i * rows.slab_elems + rows.b_offset[module], width


def make_tables(page_elems: int) -> SgmvTables:
    scratch = SgmvTables.scratch_elems(splits=2, tokens=64, modules=4, max_rank=256, terms=2)
    sizes = TableSizes(
        9, LAYERS, 1 << 15, max_rank=256, max_tiles=64, scratch=scratch, page_elems=page_elems, slab_elems=SLAB_ELEMS,
        modules=TABLE,
    )  # fmt: skip
    return SgmvTables(sizes)


class Kept(dict):
    """Tables per case, of pages of one size each: kept from step to step, as replays of a launch keep them."""

    def __missing__(self, key: tuple[str, torch.dtype, int]) -> SgmvTables:
        self[key] = make_tables(key[2])
        return self[key]


@st.composite
def steps(draw: st.DrawFn) -> Case:
    """Any ranks, targets, layers and segments; a page holds from one row's first 16 bytes up to many rows."""
    group = draw(st.integers(0, len(GROUPS) - 1))
    modules = range(len(GROUPS[group][1]))
    targets = st.sets(st.sampled_from(modules), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    layers = st.sets(st.sampled_from(range(LAYERS)), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    small = [rank for rank in RANKS if rank <= 33]
    count = 3

    def each(strategy: st.SearchStrategy) -> tuple:
        return tuple(draw(strategy) for _ in range(count))

    return Case(
        seed=draw(st.integers(0, 2**32 - 1)),
        ranks=each(st.sampled_from(small)),
        targets=each(targets),
        layers=each(layers),
        skipped=each(st.integers(0, 6)),
        segments=tuple(draw(st.lists(st.tuples(st.integers(0, 5), st.integers(-1, count - 1)), max_size=5))),
        page_vectors=draw(st.sampled_from((*PAGE_VECTORS, 2, 9, 70, 128))),
        group=group,
        minus=draw(st.integers(-1, count - 1)),
    )


def interpret() -> None:
    """Run in a process of its own."""
    from ..bf16_interpreter import fix_bf16

    fix_bf16()
    kept, whiches = Kept(), [(name, dtype) for name in schedules() for dtype in TOLERANCE]

    @settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=steps(), which=st.sampled_from(whiches))
    def equals_its_definition(case: Case, which: tuple) -> None:
        name, dtype = which
        _, problem = check(case, schedules()[name], dtype, name, kept)
        assert not problem, problem

    equals_its_definition()
    for case, which in zip(cases(0, len(whiches)), cycle(whiches), strict=False):
        _, problem = check(case, schedules()[which[0]], which[1], which[0], kept)
        assert not problem, f"{which}: {problem}"
    assert {0} < {tables.place_pages for tables in kept.values()}, "with records of places, and without"


def interpret_broken_rows() -> None:
    """A value that is not finite in a token, or in an adapter, stays with that token, or with the adapter's tokens."""
    from ..bf16_interpreter import fix_bf16

    fix_bf16()
    for index, (case, (name, schedule)) in enumerate(zip(cases(7, 12), cycle(schedules().items()), strict=False)):
        case = replace(case, segments=((2, 0), (3, 1), (2, -1), (4, 1), (1, 2)), minus=-1)
        generator = torch.Generator().manual_seed(case.seed)
        d_in, widths = GROUPS[case.group]
        page_elems, dtype = 4 * case.page_vectors, torch.float32
        modules = [(module, sum(widths[:module]), width) for module, width in enumerate(widths)]
        arena, adapters = _adapters(case, d_in, widths, page_elems, 4, dtype, generator)
        broken_token, broken_adapter = 3, 2  # the second token of adapter 1's first segment; the last segment's adapter
        segments, tokens = Segments(), 0
        for length, adapter in case.segments:
            for rows in adapters[adapter] if adapter >= 0 else ():
                segments.add(tokens, tokens + length, rows)
            tokens += length
        x = torch.randn(tokens, d_in, generator=generator)
        outs = []
        for bad in (None, math.nan, math.inf):
            y, values, pages = torch.zeros(tokens, sum(widths)), x.clone(), arena.clone()
            if bad is not None:
                values[broken_token, index % d_in] = bad
                for rows in adapters[broken_adapter]:
                    pages[rows.pages] = bad
            tables = make_tables(page_elems)
            tables.h.fill_(math.nan)
            num_tiles = tables.plan(segments, schedule.tile_tokens)
            _run(y, values, pages, tables, 1, modules, schedule, num_tiles + 2, tables.terms)
            outs.append(y)
        others = [token for token in range(tokens) if token not in (broken_token, tokens - 1)]
        for y in outs[1:]:
            assert torch.equal(y[others], outs[0][others]), f"{name}: {case}"
            assert torch.equal(y[broken_token].isfinite(), outs[0][broken_token] == 0), f"{name}: {case}"


def interpret_companies() -> None:
    """A row's bits are the same alone, in a larger bucket, in another order, and after a prompt."""
    from ..bf16_interpreter import fix_bf16

    fix_bf16()
    case = replace(next(cases(3, 1)), ranks=(17, 40, 5), page_vectors=301, minus=-1)
    d_in, widths = GROUPS[case.group]
    modules = [(module, sum(widths[:module]), width) for module, width in enumerate(widths)]
    dtype, page_elems = torch.bfloat16, 301 * 8
    generator = torch.Generator().manual_seed(case.seed)
    arena, adapters = _adapters(case, d_in, widths, page_elems, 8, dtype, generator)
    x = torch.randn(40, d_in, generator=generator).to(dtype)
    y = torch.randn(40, sum(widths), generator=generator).to(dtype)

    def launch(out: torch.Tensor, tokens: list[int], tables: SgmvTables, schedule: Schedule, *tiles: int) -> None:
        sgmv_args = x[tokens].contiguous(), arena, tables, 1, modules, schedule, *tiles
        _run(out, *sgmv_args)

    def decoded(*rows: tuple[int, int], bucket: int) -> dict[int, torch.Tensor]:
        """Outputs of (token, adapter) rows in a decode step."""
        segments, tables = Segments(), make_tables(page_elems)
        for index, (_, adapter) in enumerate(rows):
            for part in adapters[adapter]:
                segments.add(index, index + 1, part)
        tables.h.fill_(math.nan)
        schedule, tokens = decode(bucket, 256), [token for token, _ in rows]
        out = y[tokens].contiguous()
        launch(out, tokens, tables, schedule, tables.plan(segments, schedule.tile_tokens), tables.terms)
        return dict(zip(tokens, out, strict=True))

    want = {token: decoded((token, token % 3), bucket=1)[token] for token in (30, 31, 32, 33)}
    rows = [(token, token % 3) for token in want]
    for found in (decoded(*rows, bucket=8), decoded(*rows[::-1], bucket=256)):
        assert all(torch.equal(found[token], want[token]) for token in want)
    segments, tables = Segments(), make_tables(page_elems)
    for part in adapters[0]:
        segments.add(0, 30, part)
    for token, adapter in rows:
        for part in adapters[adapter]:
            segments.add(token, token + 1, part)
    tables.h.fill_(math.nan)
    out, head, tail = y[:34].clone(), prefill(30, 64), decode(4, 256)
    num_tiles = tables.plan(segments, head.tile_tokens, 30, tail.tile_tokens)
    launch(out[:30], list(range(30)), tables, head, num_tiles, tables.terms)
    launch(out[30:], list(want), tables, tail, tables.tail_tiles, tables.terms, num_tiles)
    assert all(torch.equal(out[token], want[token]) for token in want)
    reference = y[:34].clone()
    sgmv_ref(reference, x[:34], arena, segments, 1, modules)
    error = (out.float() - reference.float()).abs().max() / reference.float().abs().max()
    assert error <= TOLERANCE[dtype], error


def interpret_merged() -> None:
    """Rows of a step with merged weights: their bits are the same alone and in a batch, after a prompt and in tiles of
    other launches; a prompt's with the base model's too. Parts of adapters match, or overlap with several of the other.
    """
    from ..bf16_interpreter import fix_bf16

    fix_bf16()
    drawn = next(case for case in cases(3, 6) if len(GROUPS[case.group][1]) > 1)
    d_in, widths = GROUPS[drawn.group]
    targets = (0,), tuple(range(len(widths))), (len(widths) - 1,)
    case = replace(drawn, ranks=(17, 40, 5), targets=targets, layers=((0, 1, 2),) * 3, page_vectors=301)
    modules = [(module, sum(widths[:module]), width) for module, width in enumerate(widths)]
    page_elems, generator = 301 * 8, torch.Generator().manual_seed(case.seed)
    arena, adapters = _adapters(case, d_in, widths, page_elems, 8, torch.bfloat16, generator)
    assert [len(parts) for parts in adapters] == [2, 1, 2]
    x = torch.randn(40, d_in, generator=generator).to(torch.bfloat16)
    y = torch.randn(40, sum(widths), generator=generator).to(torch.bfloat16)

    def run(merged: int, *rows: tuple[int, int, int], bucket: int) -> dict[int, torch.Tensor]:
        """Outputs of (first token, tokens, adapter) rows, the last of which have one token; -1 is the base model."""
        tokens = [token for first, count, _ in rows for token in range(first, first + count)]
        segments, tables, at = Segments(), make_tables(page_elems), 0
        for part in adapters[merged]:
            segments.add(0, len(tokens), replace(part, scale=-part.scale))
        for _, count, adapter in rows:
            for part in adapters[adapter] if adapter >= 0 else ():
                segments.add(at, at + count, part)
            at += count
        tables.h.fill_(math.nan)
        out, border = y[tokens].contiguous(), len(tokens) - sum(count == 1 for _, count, _ in rows)
        head, tail = prefill(max(1, border), 64), decode(bucket, 256)
        num_tiles = tables.plan(segments, head.tile_tokens, border, tail.tile_tokens, terms=2)
        assert tables.terms == 2
        reference = out.clone()
        for schedule, part, first, count in (
            (head, slice(border), 0, num_tiles), (tail, slice(border, None), num_tiles, tables.tail_tiles + 2)
        ):  # fmt: skip
            values = x[tokens[part]].contiguous()
            if len(values):
                _run(out[part], values, arena, tables, 1, modules, schedule, count, 2, first)
        sgmv_ref(reference, x[tokens], arena, segments, 1, modules)
        error = (out.float() - reference.float()).abs().max() / reference.float().abs().max()
        assert error <= TOLERANCE[torch.bfloat16], error
        return dict(zip(tokens, out, strict=True))

    for merged in (0, 1):
        rows = [(30 + at, 1, adapter) for at, adapter in enumerate((1 - merged, -1, 2, -1, 1 - merged))]
        want = {row[0]: run(merged, row, bucket=1)[row[0]] for row in rows}
        prompt = (0, 9, 2), (9, 7, -1)
        prompts = {token: value for row in prompt for token, value in run(merged, row, bucket=1).items()}
        for found in (run(merged, *rows[::-1], bucket=256), run(merged, *prompt, *rows, bucket=8)):
            assert all(torch.equal(found[token], value) for token, value in want.items())
        assert all(torch.equal(found[token], value) for token, value in prompts.items())


def compile_ahead() -> None:
    """Run in a process of its own: the driver is none."""
    import threading
    from tempfile import TemporaryDirectory

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from chorus.ops import launch_triton
    from chorus.ops.lora import sgmv_triton

    class Driver:
        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    driver.set_active(Driver())
    names = "shrink_decode", "expand_decode", "shrink_prefill", "expand_prefill"
    kernels = [getattr(sgmv_triton, name) for name in names]
    threads, inner = set(), triton.compiler.compile

    def compile(*args, **kwargs):
        threads.add(threading.current_thread().name)
        return inner(*args, **kwargs)

    triton.compiler.compile = compile
    tables = make_tables(64)
    y, x, arena = torch.zeros(4, 48), torch.zeros(4, 40), torch.zeros(4, 64)
    modules = [(0, 0, 24), (1, 24, 8), (2, 32, 16)]
    with TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        with launch_triton.compiling(2):
            for schedule in (decode(64, 256), prefill(64, 256, 4)):
                product = sgmv_triton.Sgmv(arena, tables, modules, 40, schedule)
                product(y, x, 1, tables.tiles, 1, compile_only=True)
    for kernel in kernels:
        assert len(kernel.device_caches[0][0]) == 1, f"{kernel} has not been compiled"
    assert threads and all(name.startswith("ThreadPoolExecutor") for name in threads), threads


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.timeout(1200)
def test_values_equal_the_reference():
    result = run_python("-m", "tests.ops.lora.test_sgmv_triton", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.timeout(1200)
def test_what_is_not_finite_stays_in_its_row():
    code = "from tests.ops.lora.test_sgmv_triton import *; interpret_broken_rows()"
    result = run_python("-c", code, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.triton
@pytest.mark.timeout(1200)
def test_bits_of_a_row_do_not_depend_on_its_company():
    result = run_python(
        "-c", "from tests.ops.lora.test_sgmv_triton import *; interpret_companies()", TRITON_INTERPRET="1"
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.triton
@pytest.mark.timeout(1200)
def test_bits_of_a_row_beside_merged_weights_do_not_depend_on_its_company():
    result = run_python("-c", "from tests.ops.lora.test_sgmv_triton import *; interpret_merged()", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.triton
def test_kernels_are_compiled_beside_each_other():
    """For an absent GPU: the kernels are compiled on the pool's threads, and nothing is launched."""
    result = run_python("-c", "from tests.ops.lora.test_sgmv_triton import *; compile_ahead()")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.triton
@pytest.mark.parametrize("name", schedules())
@pytest.mark.parametrize("terms", [1, 2])
def test_both_launches_begin_early_where_launches_do(name, terms, monkeypatch):
    """That neither reads too early is checked on the compiled kernels: below, and by `perf.kernels`."""
    pytest.importorskip("triton")
    from chorus.ops import dependent_launch
    from chorus.ops.launch_triton import KernelLauncher

    launched, tables = [], make_tables(64)
    y, x, arena = torch.zeros(4, 48), torch.zeros(4, 40), torch.zeros(4, 64)

    def note(self, *_):
        launched.append((self._constants["C"].pdl, self._constants.get("launch_pdl", False)))

    monkeypatch.setattr(KernelLauncher, "__call__", note)
    for early in (True, False):
        launched.clear()
        monkeypatch.setattr(dependent_launch, "begins_early", lambda device, early=early: early)
        _run(y, x, arena, tables, 1, [(0, 0, 24), (1, 24, 8), (2, 32, 16)], schedules()[name], 1, terms)
        assert launched == [(early, early)] * 2


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize("group", ["qkv", "merged.qkv"])
def test_expand_of_prompts_asks_for_rank_rows_before_it_waits(group):
    """And for nothing that the launch before it writes; no program of either launch ends without having waited."""
    pytest.importorskip("triton")
    import triton

    from chorus.perf.kernels.ptx import Ptx
    from chorus.perf.kernels.variants import Variant, job_of

    shrink, expand = (
        job_of(Variant(f"{side}_prefill", group, "bf16", 256, 64), "sm_90") for side in ("shrink", "expand")
    )
    for job in (shrink, expand):
        assert job.options["launch_pdl"] and job.constants["C"].pdl
        found = job.compile()
        assert (found.is_early, found.spill_bytes) == (False, 0)
    code = triton.compile(expand._source, target=expand._target, options=dict(expand.options)).asm["ptx"]  # noqa: SLF001
    waits = [
        sum(each.num_bytes for each in block[: at + 1])
        for block in Ptx.parse(code).blocks
        for at, each in enumerate(block)
        if each.op == "griddepcontrol.wait"
    ]
    assert max(waits) >= 16, "bytes that a thread has asked for just before"


@pytest.mark.slow
@pytest.mark.triton
def test_compiles_for_a_gpu_that_is_not_there():
    result = run_python("-m", "chorus.perf.kernels", "--compile", "sm_90", "--only", " o$", "--workers", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = json.loads(result.stdout.splitlines()[-1])["compile"]
    assert {line["kernel"] for line in lines} == {"shrink_decode", "shrink_prefill", "expand_decode", "expand_prefill"}
    for line in lines:
        assert not line["spill_bytes"]
        assert line["wide_loads"], "rank-rows start on 16 bytes; a load that doesn't use it reads them slowly"
        assert line["matrix"].startswith("wgmma") == line["kernel"].endswith("prefill")


def test_the_grid_goes_through_all_ranks():
    assert {rank for case in cases(0, 8) for rank in case.ranks} == set(RANKS)
    assert {1, 256} <= set(RANKS)


if __name__ == "__main__":
    interpret()
