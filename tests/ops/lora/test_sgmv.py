"""SGMV over paged adapters against its definition."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from chorus.ops.lora.sgmv import AdapterRows, Segments, sgmv, stacked

from .sgmv_ref import sgmv_ref

NUM_MODULES = 7
LAYERS = 3


def build_adapter(free_pages, page_elems, rank, widths, targets, *, before=0, padding=0, layers=range(LAYERS)):
    """An adapter over the next of `free_pages`, `before` elements in; widths: module → (in, out)."""
    offset, a_offset, b_offset = 0, [-1] * NUM_MODULES, [-1] * NUM_MODULES
    for module in targets:
        a_offset[module], b_offset[module] = offset, offset + widths[module][0] + padding
        offset += sum(widths[module]) + 2 * padding
    pages = [next(free_pages) for _ in range(-(-(before + len(layers) * rank * offset) // page_elems))]
    first_elem = [before + layers.index(layer) * rank * offset if layer in layers else -1 for layer in range(LAYERS)]
    return AdapterRows(pages, rank, 1 / rank, offset, a_offset, b_offset, first_elem)


def make_segments(indptr, adapters):
    """Tokens `indptr[i]:indptr[i+1]` use `adapters[i]`, None: the base model."""
    segments = Segments()
    for first, last, adapter in zip(indptr, indptr[1:], adapters, strict=False):
        if adapter is not None:
            segments.add(first, last, adapter)
    return segments


def compare(arena, segments, layer, modules, x, out_width, dtype=torch.float32):
    y = torch.randn(len(x), out_width, generator=torch.Generator().manual_seed(1)).to(dtype)
    got, want = y.clone(), y.clone()
    sgmv(got, x, arena, segments, layer, modules)
    sgmv_ref(want, x, arena, segments, layer, modules)
    if dtype is torch.float32:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    else:
        torch.testing.assert_close(got.float(), want.float(), rtol=5e-2, atol=8e-2)
    return y, got


@pytest.mark.wide
@settings(max_examples=120)
@given(
    seed=st.integers(0, 2**32 - 1),
    segments=st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(0, 3)), min_size=1, max_size=7),
    ranks=st.lists(st.sampled_from([1, 2, 3, 5, 8, 17, 64]), min_size=4, max_size=4),
    targets=st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=4, max_size=4),
    before=st.lists(st.integers(0, 50), min_size=4, max_size=4),
    page_elems=st.sampled_from([5, 19, 60, 240, 2000]),
    layers=st.lists(st.sampled_from([(0, 1, 2), (0, 1, 2), (1,), (0, 2)]), min_size=4, max_size=4),
    layer=st.integers(0, LAYERS - 1),
)
def test_equals_its_definition(seed, segments, ranks, targets, before, page_elems, layers, layer):
    """Ranks, empty and one-row segments, base segments, absent modules and layers, page boundaries anywhere."""
    generator = torch.Generator().manual_seed(seed)
    widths = {0: (8, 6), 1: (8, 3), 2: (8, 5)}
    arena = torch.randn(4 * (LAYERS * 64 * 38 + 50) // page_elems + 4, page_elems, generator=generator)
    free = iter(torch.randperm(len(arena), generator=generator).tolist())
    adapters = [
        build_adapter(free, page_elems, rank, widths, sorted(modules), before=skipped, layers=own)
        for rank, modules, skipped, own in zip(ranks, targets, before, layers, strict=True)
    ]
    indptr = [0, *itertools.accumulate(length for length, _ in segments)]
    used = [None if index is None else adapters[index] for _, index in segments]
    x = torch.randn(indptr[-1], 8, generator=generator)
    group = [(0, 0, 6), (1, 6, 3), (2, 9, 5)]
    y, got = compare(arena, make_segments(indptr, used), layer, group, x, 14)
    for first, last, adapter in zip(indptr, indptr[1:], used, strict=False):
        for module, column, width in group:
            same = torch.equal(got[first:last, column : column + width], y[first:last, column : column + width])
            if adapter is None or adapter.a_offset[module] < 0 or adapter.first_elem[layer] < 0:
                assert same, "outputs without an adapter must not change by a bit"
            elif last > first:
                assert not same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(dtype):
    generator = torch.Generator().manual_seed(0)
    arena = torch.randn(40, 4096, generator=generator).to(dtype) / 8
    adapter = build_adapter(iter(range(40)), 4096, 24, {0: (128, 64)}, [0])
    x = torch.randn(9, 128, generator=generator).to(dtype)
    compare(arena, make_segments([0, 3, 9], [None, adapter]), 1, [(0, 0, 64)], x, 64, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_token_has_twice_on_a_module_is_summed(dtype):
    generator = torch.Generator().manual_seed(7)
    arena = torch.randn(60, 256, generator=generator).to(dtype) / 4
    free = iter(range(60))
    own, merged = (build_adapter(free, 256, rank, {0: (16, 12), 1: (16, 5)}, [0, 1]) for rank in (5, 8))
    minus = replace(merged, scale=-merged.scale)
    segments = make_segments([0, 3, 4], [own, None])
    segments.add(0, 3, minus)
    segments.add(3, 4, minus)
    assert segments.level == [0, 1, 0]
    x = torch.randn(4, 16, generator=generator).to(dtype)
    modules = [(0, 0, 12), (1, 12, 5)]
    compare(arena, segments, 1, modules, x, 17, dtype)


def test_page_that_is_not_the_adapters_is_never_read():
    generator = torch.Generator().manual_seed(0)
    widths = {0: (8, 6)}
    adapter = build_adapter(iter([5, 2, 7, 3]), 30, 2, widths, [0])
    assert adapter.pages == [5, 2, 7], "rows go on from page to page"
    arena = torch.full((9, 30), float("nan"))
    arena[[5, 2, 7]] = torch.randn(3, 30, generator=generator)
    x = torch.randn(4, 8, generator=generator)
    for layer in range(LAYERS):
        _, got = compare(arena, make_segments([0, 4], [adapter]), layer, [(0, 0, 6)], x, 6)
        assert got.isfinite().all()


def test_gaps_between_rows_are_never_read():
    """Alignment leaves elements between rows that belong to nobody."""
    generator = torch.Generator().manual_seed(0)
    widths = {0: (5, 3), 1: (5, 2)}
    adapter = build_adapter(iter(range(20)), 120, 3, widths, [0, 1], padding=3)
    arena = torch.full((20, 120), float("nan"))
    run = torch.full((len(adapter.pages) * 120,), float("nan"))
    for slab in range(LAYERS * adapter.rank):
        for module, (d_in, d_out) in widths.items():
            start = slab * adapter.slab_elems
            for offset, width in ((adapter.a_offset[module], d_in), (adapter.b_offset[module], d_out)):
                run[start + offset : start + offset + width] = torch.randn(width, generator=generator)
    arena[adapter.pages] = run.view(-1, 120)
    x = torch.randn(4, 5, generator=generator)
    _, got = compare(arena, make_segments([0, 4], [adapter]), 2, [(0, 0, 3), (1, 3, 2)], x, 5)
    assert got.isfinite().all()


def test_result_does_not_depend_on_the_other_segments():
    """An adapter's product for a token is the same alone and in a batch."""
    generator = torch.Generator().manual_seed(3)
    arena = torch.randn(60, 256, generator=generator)
    free = iter(range(60))
    widths = {0: (16, 12)}
    adapters = [build_adapter(free, 256, rank, widths, [0]) for rank in (1, 4, 9)]
    x = torch.randn(7, 16, generator=generator)
    together = torch.zeros(7, 12)
    segments = make_segments([0, 2, 3, 3, 7], [adapters[0], adapters[1], None, adapters[2]])
    sgmv(together, x, arena, segments, 1, [(0, 0, 12)])
    for first, last, adapter in ((0, 2, adapters[0]), (2, 3, adapters[1]), (3, 7, adapters[2])):
        alone = torch.zeros(last - first, 12)
        sgmv(alone, x[first:last], arena, make_segments([0, last - first], [adapter]), 1, [(0, 0, 12)])
        torch.testing.assert_close(together[first:last], alone, rtol=1e-5, atol=1e-5)


def test_weights_written_anew_are_seen():
    """Views of rows are kept; they must show the present content of the pages."""
    generator = torch.Generator().manual_seed(4)
    arena = torch.randn(20, 64, generator=generator)
    adapter = build_adapter(iter(range(20)), 64, 3, {0: (8, 6)}, [0])
    x = torch.randn(2, 8, generator=generator)
    segments = make_segments([0, 2], [adapter])
    _, first = compare(arena, segments, 0, [(0, 0, 6)], x, 6)
    arena.mul_(2)
    _, second = compare(arena, segments, 0, [(0, 0, 6)], x, 6)
    assert not torch.equal(first, second)


def test_products_are_of_the_tokens_dtype_whatever_the_arenas():
    generator = torch.Generator().manual_seed(5)
    arena = torch.randn(40, 512, generator=generator).to(torch.bfloat16) / 4
    free = iter(range(40))
    adapters = [build_adapter(free, 512, rank, {0: (16, 12)}, [0]) for rank in (3, 8)]
    x = torch.randn(20, 16, generator=generator)
    segments = make_segments([0, 2, 20], adapters)
    got, want = torch.zeros(20, 12), torch.zeros(20, 12)
    sgmv(got, x, arena, segments, 1, [(0, 0, 12)])
    sgmv_ref(want, x, arena.float(), segments, 1, [(0, 0, 12)])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 8, 16])
def test_decode_rows_of_many_adapters_are_few_products(count, monkeypatch):
    """The calls take most of the time there: as many for 16 adapters as for one."""
    calls = 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal calls
            calls += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_, torch.ops.aten.addmm)
            return func(*args, **(kwargs or {}))

    generator = torch.Generator().manual_seed(6)
    arena = torch.randn(400, 512, generator=generator)
    free = iter(range(400))
    adapters = [build_adapter(free, 512, 1 + rank, {0: (16, 12), 1: (16, 5)}, [0, 1]) for rank in range(count)]
    segments = make_segments(range(count + 1), adapters)
    x = torch.randn(count, 16, generator=generator)
    with Counting():
        sgmv(torch.zeros(count, 17), x, arena, segments, 1, [(0, 0, 12), (1, 12, 5)])
    assert calls == 3, "one with all A, one with all B of each projection"


def test_what_overflows_with_another_adapter_does_not_reach_a_token():
    arena = torch.zeros(8, 64)
    free = iter(range(8))
    large, small = (build_adapter(free, 64, 1, {0: (8, 6)}, [0], layers=[1]) for _ in range(2))
    arena[large.pages], arena[small.pages] = 1e20, 1.0
    x = torch.tensor([[1e-10] * 8, [1e20] * 8, [float("nan")] * 8])
    got = torch.zeros(3, 6)
    sgmv(got, x, arena, make_segments([0, 1, 2, 3], [large, small, large]), 1, [(0, 0, 6)])
    assert got[:2].isfinite().all()
    assert got[2].isnan().all()


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 30), per_token=st.integers(1, 3))
def test_entries_of_experts_are_those_of_the_tokens_that_go_there(seed, tokens, per_token):
    """Two adapters with experts of their own, one of them in two parts, beside tokens without."""
    generator = torch.Generator().manual_seed(seed)
    arena, layer = torch.randn(40, 64, generator=generator), 1

    def part(pages, rank, first, experts):
        return AdapterRows(pages, rank, 0.5, 12, [0, -1], [8, -1], [-1, first], experts=experts)

    one = [part(range(20), 2, 5, (0, 2)), part(range(20), 3, 300, (3,))]
    other = [part(range(20, 40), 4, 0, (0, 1, 2, 3))]
    bounds = sorted(torch.randint(0, tokens + 1, (3,), generator=generator).tolist())
    segments = Segments()
    for begin, end, parts in zip((0, *bounds), (*bounds, tokens), (one, [], other, one), strict=True):
        for rows in parts if begin < end else ():
            segments.add(begin, end, rows)
    chosen = [sorted(torch.randperm(4, generator=generator)[:per_token].tolist()) for _ in range(tokens)]
    going = [(expert, [token for token in range(tokens) if expert in chosen[token]]) for expert in range(4)]
    pairs = [(expert, token) for expert, each in going for token in each]
    x = torch.randn(len(pairs), 8, generator=generator)
    got, want = torch.zeros(len(pairs), 4), torch.zeros(len(pairs), 4)
    sgmv(got, x, arena, segments.of_experts(going, layer), layer, [(0, 0, 4)])
    for row, (expert, token) in enumerate(pairs):
        for begin, end, rows in segments:
            if begin <= token < end and expert in rows.experts:
                own = rows.of_expert(expert)
                assert own is not None
                a, b = own.matrices(arena, layer, 0, 8, 4)
                assert a is not None and b is not None
                want[row] += 0.5 * (x[row] @ a.T @ b)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_rows", "page_elems"), [(1, 4), (3, 4), (2, 2), (4, 8)])
def test_whole_rows_that_fill_their_pages_have_no_second_matrix_after_them(num_rows, page_elems):
    """Rows of embeddings and heads have A alone: no page follows the last one."""
    arena = torch.arange(24.0).view(-1, page_elems)
    pages = list(reversed(range(num_rows * 4 // page_elems)))
    rows = AdapterRows(pages, num_rows, 1.0, 4, [0], [4], [0], token_ids=range(num_rows))
    a, b = rows.blocks(arena, 0, 0, 4, 0)
    assert torch.equal(stacked(a), arena[pages].view(-1, 4))
    assert b == []
