"""A request's logits on the native decoder are batch-invariant."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.memory.pages.adapter_layout import AdapterLayout, uniform_parts
from chorus.ops.cpu import native
from chorus.ops.lora.sgmv import AdapterRows

from .invariance import Request, Row, Tally, World, build, cancel, compare, compute, schedule

pytestmark = [pytest.mark.native, pytest.mark.wide]
DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_company_chunks_padding_and_threads_leave_no_trace(dtype):
    """A hundred requests of models of any shape; `python -m tests.attacks.invariance` compares ten thousand."""
    tally = Tally()
    for seed in range(1_000_000, 1_000_010):
        compare(seed, dtype, tally)
    assert tally.cases > 120
    assert not tally.differing, "\n".join(tally.differing[:5])


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(DTYPES))
def test_any_world_is_invariant(seed, dtype):
    tally = Tally()
    compare(seed, dtype, tally, runs=2)
    assert not tally.differing, "\n".join(tally.differing)


@pytest.mark.parametrize("rank", [1, 2, 3, 5, 16, 17, 33])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 11, 12, 70])
def test_ranks_are_added_in_the_same_order_for_any_number_of_tokens(rank, count):
    """Few tokens of an adapter are computed row by row, many as a product: the last token of a prompt by either."""
    world = one_adapter(rank, 70)
    decoder = native.NativeDecoder(world.model, 1)
    whole = compute(decoder, world, [Row(0, 0, 70)])
    begin = 70 - count
    if begin:
        compute(decoder, world, [Row(0, 0, begin)])
    part = compute(decoder, world, [Row(0, begin, count)])
    decoder.close()
    assert torch.equal(part, whole[begin:])


def test_one_unit_in_the_last_place_counts():
    world = build(random.Random(5), torch.bfloat16)
    decoder = native.NativeDecoder(world.model, 1)
    row = Row(0, 0, len(world.requests[0].tokens))
    logits = compute(decoder, world, [row])
    assert torch.isfinite(logits).all()
    world.model.norm.mul_(1 + 2**-7)  # of the last norm alone: the model's least step in bf16
    assert not torch.equal(compute(decoder, world, [row]), logits)
    decoder.close()


def test_schedules_compute_every_token_once():
    rng = random.Random(0)
    requests = [Request([0] * length, []) for length in (1, 5, 40)]
    for _ in range(30):
        done: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for rows in schedule(rng, requests):
            for row in rows:
                if row.request >= 0:
                    done[row.request] += range(row.start, row.start + row.count)
        assert [done[i] for i in range(3)] == [list(range(len(request.tokens))) for request in requests]


def one_adapter(rank: int, tokens: int) -> World:
    """A case with one request, whose adapter has `rank` everywhere."""
    seed = 0
    while True:
        world = build(random.Random(seed), torch.bfloat16, plain=True, positions=tokens)
        if world.model.num_layers > 1:
            break
        seed += 1
    model, layout, table = world.model, world.layout, world.table
    placed = AdapterLayout.build(uniform_parts(table, rank), table, layout.page_elems, 2)
    kv_pages = layout.pages_for_tokens(tokens)
    generator = torch.Generator().manual_seed(rank)
    model.arena = (
        0.15 * torch.randn(1 + kv_pages + placed.num_pages, layout.page_elems, generator=generator)
    ).bfloat16()
    slabs = placed.parts[0].slabs
    pages = list(range(1 + kv_pages, len(model.arena)))
    rows = AdapterRows(
        pages, rank, rank**-0.5, slabs.slab_elems, slabs.a_offset, slabs.b_offset, placed.parts[0].first_elem
    )
    cancel(model.arena, rows)
    ids = torch.randint(0, model.vocab, (tokens,), generator=generator).tolist()
    return World(model, layout, table, [[rows]], [Request(ids, [0])], [list(range(1, 1 + kv_pages))])
