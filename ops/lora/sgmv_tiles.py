"""Tiles of SGMV: tokens, and the entries of a step whose terms one program adds to their outputs.

Two programs must not write the same outputs. So a token's entries that change the same module of a layer are in one
tile, which has a record for each level of `Segments`; some may be empty. Where a level has several entries, because an
adapter has several parts, further tiles go on with the first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .sgmv import AdapterRows, Segments

#: Records of a tile of a step with merged weights: the merged adapter's, which is subtracted, and the tokens' own.
MERGED_TERMS = 2

#: A tile's records: what a token has on each level, at most.
Tile = tuple[AdapterRows | None, ...]

#: Tokens, from the first to the last, exclusive; and a tile of them with those that go on with it.
Run = tuple[int, int, tuple[Tile, ...]]


def tile_runs(segments: Segments, terms: int = 1) -> tuple[list[Run], int]:
    """Return the runs of a step's tokens, with `terms` records or more to a tile, and that number.

    Entries without rank-rows are left out. With one record a run is an entry of `segments`. With several, runs begin
    and end where any entry does.
    """
    entries = [
        (begin, end, rows, level)
        for (begin, end, rows), level in zip(segments, segments.level, strict=True)
        if rows.rank and begin < end
    ]
    terms = max(terms, 1 + max((level for *_, level in entries), default=0))
    if terms == 1:
        return [(begin, end, ((rows,),)) for begin, end, rows, _ in entries], 1
    bounds = sorted({at for begin, end, *_ in entries for at in (begin, end)})
    number = {at: index for index, at in enumerate(bounds)}
    used: list[list[tuple[AdapterRows, int]]] = [[] for _ in bounds]
    for begin, end, rows, level in entries:
        for of_run in used[number[begin] : number[end]]:
            of_run.append((rows, level))
    runs = [
        (begin, end, _tiles(group, terms))
        for begin, end, of_run in zip(bounds, bounds[1:], used, strict=False)
        for group in _groups(of_run)
    ]
    return runs, terms


def cut(runs: Sequence[Run], begin: int, end: int, tokens: int) -> list[Run]:
    """Cut the runs within `begin … end` to at most so many tokens."""
    pieces: list[Run] = []
    for run in runs:
        first, last = max(run[0], begin), min(run[1], end)
        if first == run[0] and first < last == run[1] <= first + tokens:  # the usual case
            pieces.append(run)
            continue
        pieces += [(at, min(at + tokens, last), run[2]) for at in range(first, last, tokens)]
    return pieces


def count_tiles(
    segments: Segments, tile_tokens: int, border: int = sys.maxsize, tail_tile: int = 1, terms: int = 1
) -> tuple[int, int, int]:
    """Number of tiles before the border and from it on, and of records of each; see `SgmvTables.plan`."""
    runs, terms = tile_runs(segments, terms)
    heads, tails = cut(runs, 0, border, tile_tokens), cut(runs, border, sys.maxsize, tail_tile)
    return num_tiles(heads), num_tiles(tails), terms


def num_tiles(runs: Sequence[Run]) -> int:
    """Number of tiles, with those that go on with others."""
    return sum([len(tiles) for _, _, tiles in runs])


def _groups(entries: Sequence[tuple[AdapterRows, int]]) -> Sequence[Sequence[tuple[AdapterRows, int]]]:
    """Divide the entries of some tokens into as many groups as share no module of a layer with each other."""
    if len(entries) == 1:
        return (entries,)
    groups: list[tuple[int, list[int]]] = []  # modules that a group changes, and its entries
    for index, (rows, _) in enumerate(entries):
        places, members = rows.places, [index]
        joined = [group for group in groups if group[0] & places]
        for group in joined:
            groups.remove(group)
            places |= group[0]
            members += group[1]
        groups.append((places, members))
    return [[entries[index] for index in sorted(members)] for _, members in groups]


def _tiles(entries: Sequence[tuple[AdapterRows, int]], terms: int) -> tuple[Tile, ...]:
    """A tile with the first entry of each level, one with the second ones, and so on."""
    first: list[AdapterRows | None] = [None] * terms
    others = []
    for rows, level in entries:
        if first[level] is None:
            first[level] = rows
        else:
            others.append((rows, level))
    return (tuple(first), *_tiles(others, terms)) if others else (tuple(first),)
