"""Tiles have every entry of a step once, and no two of them write the same outputs."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from chorus.ops.lora.sgmv import AdapterRows, Segments
from chorus.ops.lora.sgmv_tiles import count_tiles, cut, num_tiles, tile_runs

MODULES, LAYERS, TOKENS = 4, 2, 8


def part(modules, layers=range(LAYERS), rank=1):
    offsets = [0 if module in modules else -1 for module in range(MODULES)]
    first = [0 if layer in layers else -1 for layer in range(LAYERS)]
    return AdapterRows([0], rank, 1.0, 1, offsets, offsets, first)


def make(*entries):
    segments = Segments()
    for entry in entries:
        segments.add(*entry)
    return segments


def divided(number):
    """Sets of numbers that share none."""
    return st.lists(st.integers(-1, 2), min_size=number, max_size=number).map(
        lambda owners: [[at for at, of in enumerate(owners) if of == owner] for owner in range(3) if owner in owners]
    )


#: The parts of an adapter: on other modules, or in other layers.
adapters = st.one_of(
    divided(MODULES).map(lambda each: [part(modules) for modules in each]),
    divided(LAYERS).map(lambda each: [part(range(MODULES), layers) for layers in each]),
)
#: Tokens of a sequence, and its adapter; -1: the merged one, -2: none.
sequences = st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2)), max_size=4)


@given(
    own=st.lists(adapters, min_size=3, max_size=3),
    merged=adapters,
    sequences=sequences,
    tokens=st.integers(1, 3),
    border=st.integers(0, TOKENS),
)
def test_every_term_is_in_one_tile_that_nothing_else_writes(own, merged, sequences, tokens, border):
    segments, at, want = Segments(), 0, {}
    for length, adapter in sequences:
        for rows in merged if adapter != -1 else ():
            segments.add(at, at + length, rows)
        at += length
    at = 0
    for length, adapter in sequences:
        for rows in own[adapter] if adapter >= 0 else ():
            segments.add(at, at + length, rows)
        for token in range(at, at + length):
            want[token] = sorted(map(id, (merged if adapter != -1 else []) + (own[adapter] if adapter >= 0 else [])))
        at += length
    runs, terms = tile_runs(segments, 2)
    pieces = cut(runs, 0, border, tokens) + cut(runs, border, at, 1)
    assert terms == 2
    assert all(0 < end - begin <= (tokens if begin < border else 1) for begin, end, _ in pieces)
    assert not any(begin < border < end for begin, end, _ in pieces)
    for token, entries in want.items():
        groups = [
            [rows for tile in tiles for rows in tile if rows is not None]
            for begin, end, tiles in pieces
            if begin <= token < end
        ]
        assert sorted(id(rows) for group in groups for rows in group) == entries
        for group, other in combinations(groups, 2):
            assert not any(one.places & two.places for one in group for two in other)
    for _, _, tiles in pieces:
        for term in range(terms):
            level = [tile[term] for tile in tiles if tile[term] is not None]
            assert not any(one.places & two.places for one, two in combinations(level, 2)), "they share partial sums"
    heads, tails, _ = count_tiles(segments, tokens, border, 1, 2)
    assert heads + tails == num_tiles(pieces)


def test_without_other_terms_each_entry_has_tiles_of_its_own():
    one, two = part([0]), part([1])
    segments = make((0, 4, one), (0, 4, two), (4, 4, one), (4, 6, one), (4, 6, part([2], rank=0)))
    runs, terms = tile_runs(segments)
    assert terms == 1
    assert runs == [(0, 4, ((one,),)), (0, 4, ((two,),)), (4, 6, ((one,),))]


def test_parts_that_match_are_tiles_side_by_side_and_others_go_on_with_each_other():
    attention, mlp, all_of_them = part([0, 1]), part([2, 3]), part([0, 1, 2, 3])
    pair = part([0]), part([3])
    runs, _ = tile_runs(make((0, 1, attention), (0, 1, mlp), (0, 1, pair[0]), (0, 1, pair[1])))
    assert [tiles for _, _, tiles in runs] == [((attention, pair[0]),), ((mlp, pair[1]),)]
    runs, _ = tile_runs(make((0, 1, attention), (0, 1, mlp), (0, 1, all_of_them)))
    assert [tiles for _, _, tiles in runs] == [((attention, all_of_them), (mlp, None))]
