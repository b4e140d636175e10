"""The tables that SGMV launches read, and the cost of a launch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chorus.ops.lora.sgmv import AdapterRows, Segments
from chorus.ops.lora.sgmv_schedule import decode, prefill, token_limits
from chorus.ops.lora.sgmv_tables import (
    BEGIN,
    END,
    MORE,
    PLACE_ROWS,
    RANK,
    SCALE,
    SLAB,
    TABLE_ROW,
    SgmvTables,
    TablesFull,
    TableSizes,
    place_pages,
)
from chorus.ops.lora.sgmv_tiles import count_tiles
from chorus.perf.kernels.cost import expand_cost, shrink_cost

MODULES = 19


def make_rows(rank=4, pages=(3, 1), modules=(0,), first=(7, -1), slab=48):
    offsets = [16 * module if module in modules else -1 for module in range(MODULES)]
    return AdapterRows(list(pages), rank, 1 / rank, slab, offsets, offsets, list(first))


def make_tables(**changes):
    sizes = {"table_rows": 2, "layers": 2, "max_pages": 3, "max_rank": 8, "max_tiles": 6, "scratch": 0}
    sizes |= {"page_elems": 512, "slab_elems": 48, "modules": MODULES}
    return SgmvTables(TableSizes(**{**sizes, **changes}))


def make_segments(*entries):
    segments = Segments()
    for entry in entries:
        segments.add(*entry)
    return segments


def test_segments_are_cut_into_tiles():
    tables, one, two = make_tables(), make_rows(), make_rows(rank=2)
    assert tables.plan(make_segments((0, 5, one), (6, 6, two), (7, 8, two)), tile_tokens=2) == 4
    tiles = tables.tiles.tolist()
    assert [tile[:2] for tile in tiles[:4]] == [[0, 2], [2, 4], [4, 5], [7, 8]]
    table_rows = [tile[TABLE_ROW] for tile in tiles]
    assert table_rows[0] == table_rows[1] == table_rows[2] != table_rows[3]
    assert table_rows[4:] == [-1] * 8
    table_row = table_rows[3]
    assert [tiles[3][column] for column in (RANK, SLAB)] == [2, 48]
    assert tables.tiles[3, SCALE].view(torch.float32) == 0.5
    assert tables.offsets[table_row, [0, 1, MODULES, MODULES + 1]].tolist() == [0, -1, 0, -1]
    assert tables.first_elem[table_row].tolist() == [7, -1]
    assert tables.pages[table_row, :2].tolist() == [3, 1]


def test_a_slot_that_becomes_anothers_is_so_in_tiles_that_stay():
    """The tile has all that is the same in every layer, and no more than its table row of the rest."""
    tables = make_tables(table_rows=1)
    tables.plan(make_segments((0, 3, make_rows())), tile_tokens=3)
    tables.plan(make_segments((0, 3, make_rows(rank=2))), tile_tokens=3)
    assert tables.tiles[0].tolist()[:SLAB] == [0, 3, 0, 2]


@given(
    page_elems=st.integers(1, 600),
    slab=st.integers(1, 90),
    first=st.lists(st.integers(-1, 2000), min_size=2),
    rank=st.integers(1, 70),
)
def test_records_say_where_rank_rows_lie(page_elems, slab, first, rank):
    first = [max(begin, -1) for begin in first]
    count = -(-(max(0, *first) + rank * slab) // page_elems)
    pages = [(7 * index + 3) % 10_007 for index in range(count)]
    tables = make_tables(
        layers=len(first), max_rank=70, slab_elems=90, page_elems=page_elems, max_pages=count, scratch=0
    )
    tables.plan(make_segments((0, 1, make_rows(rank, pages, first=first, slab=slab))), tile_tokens=1)
    assert tables.place_pages == place_pages(page_elems, 90) == tables.places.shape[3] - 1
    for layer, begin in enumerate(first):
        records = tables.places[tables.tiles[0, TABLE_ROW], layer].tolist()
        if begin < 0:
            assert {record[0] for record in records} == {-1}
            continue
        for elem in range(rank * slab if tables.place_pages else 0):
            at, *near = records[elem // slab // PLACE_ROWS]
            page, within = divmod(at + elem - elem // slab // PLACE_ROWS * PLACE_ROWS * slab, page_elems)
            assert (near[page], within) == (pages[(begin + elem) // page_elems], (begin + elem) % page_elems)


def test_nothing_is_left_of_a_step_with_more_tiles():
    tables, rows = make_tables(), make_rows()
    tables.plan(make_segments((0, 5, rows)), tile_tokens=1)
    assert tables.plan(make_segments((2, 3, rows)), tile_tokens=1) == 1
    assert tables.tiles[:, TABLE_ROW].tolist() == [0, *[-1] * 11]
    assert tables.plan(Segments(), tile_tokens=1) == 0
    assert (tables.tiles[..., 2] == -1).all()


class Watched(Segments):
    looks = 0

    def __iter__(self):
        self.looks += 1
        return super().__iter__()


def test_the_segments_of_the_last_step_are_not_looked_at_again():
    """Unless they are cut otherwise, or have more entries; or a step of others was in between."""
    tables, one, two = make_tables(), make_rows(), make_rows(rank=2)
    segments = Watched()
    segments.add(0, 3, one)
    assert tables.plan(segments, tile_tokens=2) == 2
    looks = segments.looks
    assert tables.plan(segments, tile_tokens=2) == 2
    assert segments.looks == looks > 0
    assert tables.plan(segments, tile_tokens=1) == 3
    segments.add(3, 4, two)
    assert tables.plan(segments, tile_tokens=1) == 4
    tables.plan(Segments(), tile_tokens=1)
    assert tables.plan(segments, tile_tokens=1) == 4
    assert segments.looks == 4 * looks
    with pytest.raises(TablesFull):
        tables.plan(make_segments(*((i, i + 1, one) for i in range(7))), tile_tokens=1)
    assert tables.plan(segments, tile_tokens=1) == 4
    assert [tile[:2] for tile in tables.tiles.tolist()[:4]] == [[0, 1], [1, 2], [2, 3], [3, 4]]


def used(tables):
    """Tokens, rank and `MORE` of the records in use, or None, tile by tile up to the last in use."""
    records = [
        (tile[BEGIN], tile[END], tile[RANK], tile[MORE]) if tile[TABLE_ROW] >= 0 else None
        for tile in tables.tiles.tolist()
    ]
    while records and records[-1] is None:
        records.pop()
    return records


def test_entries_of_a_token_that_share_a_module_are_records_of_a_tile():
    tables = make_tables(table_rows=4)
    one, two, three, other = make_rows(rank=1), make_rows(rank=2), make_rows(rank=3), make_rows(modules=(1,))
    assert tables.plan(make_segments((0, 2, one), (0, 2, other), (2, 3, two), (0, 2, three)), tile_tokens=2) == 3
    assert tables.terms == 2
    tiles = [(0, 2, 1, 0), (0, 2, 3, 0)], [(0, 2, 4, 0), None], [(2, 3, 2, 0), None]
    assert sorted(zip(used(tables)[::2], [*used(tables), None][1::2], strict=True), key=str) == sorted(
        map(tuple, tiles), key=str
    )
    assert tables.plan(make_segments((0, 2, one), (2, 3, two)), tile_tokens=2) == 2
    assert tables.terms == 1
    assert used(tables) == [(0, 2, 1, 0), (2, 3, 2, 0)], "nothing is left of the step with more records"
    assert tables.plan(make_segments((0, 2, one), (2, 3, two)), tile_tokens=2, terms=2) == 2
    assert tables.terms == 2
    assert used(tables) == [(0, 2, 1, 0), None, (2, 3, 2, 0)]
    assert tables.tiles[1, :MORE].tolist()[:3] == [0, 2, -1], "an empty record has the tile's tokens"
    assert tables.tiles[1, RANK] == 0


def test_a_tile_goes_on_where_an_adapter_has_several_parts():
    """Programs of other tiles would write the same outputs."""
    tables = make_tables(table_rows=4, max_tiles=4)
    merged = make_rows(rank=1, modules=(0, 1, 2))
    parts = make_rows(rank=2, modules=(0,)), make_rows(rank=3, modules=(1,)), make_rows(rank=4, modules=(5,))
    segments = make_segments((0, 2, merged), *((1, 2, part) for part in parts))
    assert tables.plan(segments, tile_tokens=1) == 4
    assert used(tables) == [(0, 1, 1, 0), None, (1, 2, 1, 1), (1, 2, 2, 1), None, (1, 2, 3, -1), (1, 2, 4, 0)]


def test_tokens_from_a_border_on_have_tiles_after_the_others():
    tables = make_tables(max_tiles=12, table_rows=4)
    one, two, three = make_rows(rank=1), make_rows(rank=2), make_rows(rank=3)
    segments = make_segments((0, 5, one), (5, 9, two), (8, 9, three))
    assert tables.plan(segments, 4, border=6, tail_tile=2) == 3
    assert (tables.terms, tables.tail_tiles) == (2, 2)
    heads = [(0, 4, 1, 0), None, (4, 5, 1, 0), None, (5, 6, 2, 0), None]
    assert used(tables) == [*heads, (0, 2, 2, 0), None, (2, 3, 2, 0), (2, 3, 3, 0)]
    assert tables.plan(segments, 4, border=6, tail_tile=2, tail_at=4) == 3
    assert used(tables) == [*heads, None, None, (6, 8, 2, 0), None, (8, 9, 2, 0), (8, 9, 3, 0)]
    assert count_tiles(segments, 4, border=6, tail_tile=2) == (3, 2, 2)
    assert tables.plan(segments, 4) == 4
    assert tables.tail_tiles == 0
    assert [record and record[:2] for record in used(tables)[::2]] == [(0, 4), (4, 5), (5, 8), (8, 9)]
    with pytest.raises(TablesFull, match="13 tiles"):
        tables.plan(make_segments((0, 16, one)), 4, border=4, tail_tile=1)


def levels(*entries):
    return make_segments(*entries).level


def test_levels_are_those_of_the_entries_that_share_tokens_and_modules():
    both, first, second, above = (
        make_rows(modules=(0, 1)),
        make_rows(),
        make_rows(modules=(1,)),
        make_rows(first=(-1, 3)),
    )
    assert levels((0, 4, first), (4, 9, first)) == [0, 0]
    assert levels((0, 4, first), (0, 4, second), (0, 4, above)) == [0, 0, 0], "other modules, other layers"
    assert levels((0, 4, first), (0, 4, first), (0, 4, second), (0, 4, both), (0, 4, above)) == [0, 1, 0, 2, 0]
    assert levels((0, 4, first), (2, 6, first), (0, 2, first), (5, 7, first), (7, 9, first)) == [0, 1, 1, 2, 0]
    assert levels((4, 6, first), (0, 4, first), (0, 6, first), (0, 6, first)) == [0, 0, 1, 2], "in any order"
    assert levels((3, 3, first), (0, 4, first), (2, 2, first), (0, 4, first)) == [0, 0, 0, 1], (
        "no tokens, nothing shared"
    )


def test_the_longest_unused_slot_is_given_up():
    tables = make_tables()
    one, two, three = make_rows(rank=1), make_rows(rank=2), make_rows(rank=3)
    tables.plan(make_segments((0, 1, one), (1, 2, two)), tile_tokens=1)
    tables.plan(make_segments((0, 1, one)), tile_tokens=1)
    tables.plan(make_segments((0, 1, three), (1, 2, one)), tile_tokens=1)
    assert tables.tiles[:2, RANK].tolist() == [3, 1]
    assert tables.tiles[1, TABLE_ROW] == 0, "an adapter that is used stays where it is"


def test_buffers_never_move():
    tables = make_tables()
    buffers = tables.tiles, tables.offsets, tables.first_elem, tables.places, tables.pages
    before = [tensor.data_ptr() for tensor in buffers]
    for rank in range(1, 8):
        tables.plan(make_segments((0, 3, make_rows(rank))), tile_tokens=1)
    assert buffers == (tables.tiles, tables.offsets, tables.first_elem, tables.places, tables.pages)
    assert before == [tensor.data_ptr() for tensor in buffers]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([(0, 7, make_rows())], "7 tiles"),
        ([(i, i + 1, make_rows()) for i in range(3)], "3 adapter parts"),
        ([(0, 1, make_rows()) for _ in range(3)], "3 entries"),
        ([(0, 1, make_rows(rank=9))], "rank 9"),
        ([(0, 1, make_rows(pages=(0, 1, 2, 3)))], "4 pages"),
        ([(0, 1, make_rows(slab=49))], "slabs of 49"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(entries, message):
    tables = make_tables()
    kept = make_rows()
    tables.plan(make_segments((0, 1, kept)), tile_tokens=1)
    with pytest.raises(ValueError, match=message):
        tables.plan(make_segments(*entries), tile_tokens=1)
    assert tables.plan(make_segments((0, 1, kept)), tile_tokens=1) == 1
    assert tables.tiles[0, RANK] == kept.rank


@pytest.mark.parametrize("make", [decode, prefill])
@pytest.mark.parametrize("d_in", [1, 64, 768, 4096, 14336, 28672])
def test_splits_cover_the_inputs_once(make, d_in):
    for tokens in (1, 64, 256, 8192):
        for max_rank in (8, 16, 64, 256):
            schedule = make(tokens, max_rank)
            covered = schedule.splits(d_in) * schedule.chunks(d_in) * schedule.block_k
            assert covered >= d_in > covered - schedule.chunks(d_in) * schedule.block_k
            assert schedule.splits(d_in) <= schedule.max_splits


def test_tiles_of_a_bucket_suffice():
    schedule = prefill(256, 16)
    lengths = [1, 64, 65, 126]
    needed = sum(-(-length // schedule.tile_tokens) for length in lengths)
    assert needed <= schedule.max_tiles(sum(lengths), len(lengths))
    assert decode(8, 16).max_tiles(8, 8) == 8


def test_cost_counts_what_a_launch_moves():
    rows, without, elsewhere = make_rows(modules=(0, 1)), make_rows(modules=(2,)), make_rows(first=(-1, 0))
    segments = make_segments((0, 3, rows), (3, 4, without), (4, 6, elsewhere), (6, 6, rows))
    modules = [(0, 0, 24), (1, 24, 8)]
    shrink = shrink_cost(segments, 0, modules, d_in=32, splits=2, itemsize=2)
    assert shrink.bytes == 2 * 4 * 32 * 2 + 3 * 32 * 2 + 2 * 2 * 3 * 4 * 4
    assert shrink.flops == 2 * 2 * 3 * 4 * 32
    expand = expand_cost(segments, 0, modules, splits=2, itemsize=2)
    assert expand.bytes == 4 * 32 * 2 + 2 * 3 * 32 * 2 + 2 * 2 * 3 * 4 * 4
    assert expand.flops == 2 * 3 * 4 * 32
    assert shrink + expand == type(shrink)(shrink.bytes + expand.bytes, shrink.flops + expand.flops)


@pytest.mark.parametrize("rule", [decode, prefill])
@pytest.mark.parametrize("most", [1, 7, 64, 65, 256, 1000, 3000])
def test_between_limits_there_is_one_schedule(rule, most):
    """A step may launch only kernels compiled ahead, one schedule per limit."""
    limits = token_limits(rule.__name__, most)
    assert limits == sorted(set(limits))
    assert limits[-1] == most
    for tokens in range(1, most + 1):
        assert rule(tokens, 64) == rule(next(limit for limit in limits if limit >= tokens), 64)


def test_a_step_of_more_adapters_than_usual_is_sent_in_several_copies():
    """Each copy has the entries of the step's new adapters alone; and a tile's is as long as the step's tiles."""
    sizes = {"table_rows": 6, "layers": 2, "max_pages": 60, "max_rank": 8, "max_tiles": 12, "scratch": 0}
    copies, room = [], []

    def make_copy(num_bytes):
        room.append(num_bytes)

        def copy(target, values):
            assert values.numel() * values.itemsize <= num_bytes
            copies.append(values.numel() * values.itemsize)
            target.copy_(values)

        return copy

    room_of = TableSizes(**sizes, page_elems=512, slab_elems=48, modules=MODULES, usual_rows=2, usual_tiles=4)
    many = SgmvTables(room_of, "cpu", make_copy)
    assert sum(room) < 6 * 4 * (many.first_elem.shape[1] * 2 + 2 * MODULES + 60 + many.places[0].numel()) / 2
    rows = [make_rows(rank=rank, pages=range(rank, 3 * rank)) for rank in (1, 2, 3, 4, 5)]
    segments = make_segments(*((token, token + 1, rows[token % 5]) for token in range(10)))
    assert many.plan(segments, tile_tokens=1) == 10
    assert len(copies) == 2 + 2, "of the adapters, whose pages are few, and of the tiles"
    whole = make_tables(**sizes)
    whole.plan(segments, tile_tokens=1)
    for name in ("tiles", "offsets", "first_elem", "places", "pages"):
        assert torch.equal(getattr(many, name), getattr(whole, name)), name
    copies.clear()
    many.plan(make_segments((0, 1, make_rows(rank=6, pages=[7]))), tile_tokens=1)
    record = 2 + 2 * 2 + 2 * MODULES + many.places[0].numel() + 1
    assert copies[0] == 4 * (record + record % 2)
