"""Segmented gather matrix-vector multiplication (SGMV, Punica §4) over adapters stored in pages.

    y[s:e] += scale · (x[s:e] @ Aᵀ) @ Bᵀ      for every segment [s, e) of tokens that share an adapter

A and B are read through the adapter's page table; one call takes any mix of ranks, without padding. This is the CPU
implementation. Calls cost more here than GEMMs of a few rows. Therefore it multiplies neighbouring short segments with
the rows of all their adapters at once, and masks the terms of other tokens' adapters. Tests compare it with the plain
implementation in `sgmv_ref`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

#: Most tokens that are multiplied at once with the rows of all their adapters; a longer segment is multiplied with its
#: own adapter alone. Up to this many, a GEMM takes about as long as reading its rows.
TILE_TOKENS = 16

#: Consecutive rank-rows: one strided view `[n, width]` in a page, or the pieces `[1, …]` of a row over several pages.
Block = list[torch.Tensor]


@dataclass(slots=True, eq=False, weakref_slot=True)
class AdapterRows:
    """Locations of an adapter's rank-rows in the arena, for all its modules and layers with one rank and scale.

    The adapter's elements are spread over its `pages`: element v is in `pages[v // page_elems]`, at `v % page_elems`.
    Rank-row i of a layer begins at `first_elem[layer] + i · slab_elems`. In it, row i of module m's A begins at
    `a_offset[m]` and row i of its Bᵀ at `b_offset[m]`.
    """

    pages: Sequence[int]
    rank: int
    scale: float
    slab_elems: int
    a_offset: Sequence[int]
    """-1 if the module is not targeted; likewise `b_offset`."""
    b_offset: Sequence[int]
    first_elem: Sequence[int]
    """-1 if the layer has no rank-rows."""
    vectors: Sequence[Sequence[int]] | None = None
    """By layer and module, where the module's vectors begin (see `vectors`), -1 if it has none.

    An adapter's vectors are an entry of their own, of rank 0, whose `first_elem` is where the layer's first vector
    begins. With scale -1 they are undone.
    """
    token_ids: Sequence[int] = ()
    """Of whole rows of embeddings or of the head: the tokens of the rank-rows, in rising order."""
    experts: Sequence[int] = ()
    """Of rows of experts, in rising order: each one's `rank` rank-rows follow those of the one before."""
    _of_expert: dict[int, AdapterRows] = field(default_factory=dict, init=False)
    _blocks: dict[tuple[int, int], tuple[list[Block], list[Block]]] = field(default_factory=dict, init=False)
    _places: int = field(default=-1, init=False)

    @property
    def places(self) -> int:
        """Bit set of the modules that it changes in each layer; two adapters without a common bit never interact."""
        if self._places < 0:
            modules = sum(1 << module for module, offset in enumerate(self.a_offset) if offset >= 0)
            layers = enumerate(self.first_elem)
            self._places = sum(modules << len(self.a_offset) * layer for layer, first in layers if first >= 0)
        return self._places

    def of_expert(self, expert: int) -> AdapterRows | None:
        """The rows of one expert, made once; None if it has none."""
        found = self._of_expert.get(expert)
        if found is None and expert in self.experts:
            skipped = self.experts.index(expert) * self.rank * self.slab_elems
            first_elem = [-1 if first < 0 else first + skipped for first in self.first_elem]
            found = self._of_expert[expert] = replace(self, first_elem=first_elem, experts=())
        return found

    def blocks(
        self, arena: torch.Tensor, layer: int, module: int, d_in: int, d_out: int
    ) -> tuple[list[Block], list[Block]]:
        """The layer's rows of the module's A and of its Bᵀ, in order of rank, as views that are made once.

        Empty if the layer or the module has no rows. d_out: 0 for whole rows, which have no B.
        """
        key = (layer, module)
        found = self._blocks.get(key)
        if found is None:
            first, a, b = self.first_elem[layer], self.a_offset[module], self.b_offset[module]
            if first < 0 or a < 0:
                found = [], []
            else:
                outputs = self._rows(arena, first + b, d_out) if d_out else ()  # without B, its place is past the pages
                found = list(self._rows(arena, first + a, d_in)), list(outputs)
            self._blocks[key] = found
        return found

    def matrices(
        self, arena: torch.Tensor, layer: int, module: int, d_in: int, d_out: int
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Copy A `[rank, d_in]` and Bᵀ `[rank, d_out]`; None if the layer or the module has no rows."""
        a, b = self.blocks(arena, layer, module, d_in, d_out)
        return (stacked(a), stacked(b)) if a else (None, None)

    def _rows(self, arena: torch.Tensor, start: int, width: int) -> Iterator[Block]:
        page_elems = arena.shape[1]
        row = 0
        while row < self.rank:
            index, at = divmod(start + row * self.slab_elems, page_elems)
            if at + width > page_elems:
                yield list(self._pieces(arena, index, at, width))
                row += 1
                continue
            count = min(self.rank - row, (page_elems - width - at) // self.slab_elems + 1)
            page = arena[self.pages[index]]
            yield [page.as_strided((count, width), (self.slab_elems, 1), page.storage_offset() + at)]
            row += count

    def _pieces(self, arena: torch.Tensor, index: int, at: int, width: int) -> Iterator[torch.Tensor]:
        while width:
            piece = arena[self.pages[index]][None, at : at + width]
            yield piece
            width -= piece.shape[1]
            index, at = index + 1, 0


@dataclass(slots=True)
class Segments:
    """A step's runs of tokens that share an adapter: tokens `begin[i]:end[i]` use `rows[i]`.

    An adapter with several ranks or scales has an entry for each. Tokens may have several adapters, for example one
    with its scale negated. Tokens of the base model have none. The terms that the entries of a token add to one module
    are summed in the order in which the entries were added.
    """

    begin: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    rows: list[AdapterRows] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    """Address of an int32, the number of layers that have arrived; 0 if all have."""
    late: list[int] = field(default_factory=list)
    """The entries for which `forward` waited in vain."""
    level: list[int] = field(default_factory=list)
    """0, or above the level of every earlier entry that shares tokens, and a module of a layer, with this one. Entries
    of one level can be computed in parallel, each level after all lower ones.
    """
    _tiles: list[Tile] = field(default_factory=list, init=False)
    vectors: list[int] = field(default_factory=list, init=False)
    """Indices of the entries that are vectors."""
    _end: int = 0  # of all entries
    _tokens: tuple[int, int] | None = None  # of the last entries, if no other entry has any of them
    _taken: list[int] = field(default_factory=list)  # `places` taken by these entries, by level

    def add(self, begin: int, end: int, rows: AdapterRows, ready: int = 0) -> None:
        if rows.vectors is not None:
            self.vectors.append(len(self.rows))
        self.level.append(self._level(begin, end, rows.places))
        self.begin.append(begin)
        self.end.append(end)
        self.rows.append(rows)
        self.ready.append(ready)
        self._tiles = []

    def _level(self, begin: int, end: int, places: int) -> int:
        if begin == end:
            return 0
        if begin >= self._end:  # the usual case: no entry has these tokens yet
            self._tokens, self._end, self._taken = (begin, end), end, [places]
            return 0
        if (begin, end) == self._tokens:
            level = next((level for level in reversed(range(len(self._taken))) if self._taken[level] & places), -1) + 1
            if level == len(self._taken):
                self._taken.append(0)
            self._taken[level] |= places
            return level
        self._tokens, self._end = None, max(self._end, end)
        earlier = zip(self.begin, self.end, self.rows, self.level, strict=True)
        return 1 + max((at for a, b, rows, at in earlier if a < end and begin < b and rows.places & places), default=-1)

    def __iter__(self) -> Iterator[tuple[int, int, AdapterRows]]:
        return zip(self.begin, self.end, self.rows, strict=True)

    def without(self, indices: Collection[int]) -> Segments:
        """Return the other entries, in order."""
        kept = Segments()
        for index, (begin, end, rows) in enumerate(self):
            if index not in indices:
                kept.add(begin, end, rows, self.ready[index])
        return kept

    def of_rows(self, tokens: Sequence[int]) -> Segments:
        """Return the entries of rows that are only some tokens, in rising order: row i is `tokens[i]`."""
        found = Segments()
        for begin, end, rows in self:
            first, last = bisect_left(tokens, begin), bisect_left(tokens, end)
            if first < last:
                found.add(first, last, rows)
        return found

    def of_experts(self, going: Sequence[tuple[int, Sequence[int]]], layer: int) -> Segments:
        """Return the entries with rank-rows of experts in a layer, as entries of each expert's rank-rows.

        going: experts, each with the tokens that go to it, in rising order. Rows are these tokens, expert after expert.
        """
        found, row = Segments(), 0
        of_experts = [each for each in self if each[2].experts and each[2].first_elem[layer] >= 0]
        for expert, tokens in going:
            for begin, end, rows in of_experts:
                first, last = bisect_left(tokens, begin), bisect_left(tokens, end)
                if first < last and (own := rows.of_expert(expert)) is not None:
                    found.add(row + first, row + last, own)
            row += len(tokens)
        return found

    def within(self, begin: int, end: int) -> Segments:
        """Return the entries of tokens `begin:end`, counted from the first of these."""
        return self.of_rows(range(begin, end))

    def tiles(self) -> list[Tile]:
        """Neighbouring entries that are multiplied together; made once all entries are added."""
        if not self._tiles:
            for begin, end, rows in self:
                last = self._tiles[-1] if self._tiles else None
                if last is None or max(end, last.end) - min(begin, last.begin) > TILE_TOKENS:
                    self._tiles.append(last := Tile(begin, end))
                last.add(begin, end, rows)
        return self._tiles


class Tile:
    """Tokens `begin:end`, and the entries of a step that have some of them."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.entries: list[tuple[int, int, AdapterRows]] = []
        self._factors: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, begin: int, end: int, rows: AdapterRows) -> None:
        self.begin, self.end = min(begin, self.begin), max(end, self.end)
        self.entries.append((begin, end, rows))

    def mask(self, h: torch.Tensor, entries: tuple[int, ...]) -> torch.Tensor:
        """Scale each token's products with its own adapters' rank-rows, and zero those with others', in place.

        h: `[tokens, rows]`, the rank-rows of `entries` one after another.
        """
        found = self._factors.get(entries)
        if found is None:
            used = [self.entries[index] for index in entries]
            ranks = torch.tensor([rows.rank for _, _, rows in used])
            begins, ends, scales = zip(*((begin, end, rows.scale) for begin, end, rows in used), strict=True)
            tokens = torch.arange(self.begin, self.end)[:, None]
            others = (tokens < torch.tensor(begins)) | (tokens >= torch.tensor(ends))
            found = others.repeat_interleave(ranks, 1), torch.tensor(scales).repeat_interleave(ranks)
            found = self._factors[entries] = found[0].to(h.device), found[1].to(h.device)
        return (h if len(self.entries) == 1 else h.masked_fill_(found[0], 0)).mul_(found[1])


def sgmv(
    y: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    segments: Segments,
    layer: int,
    modules: Sequence[tuple[int, int, int]],
) -> None:
    """Add every segment's LoRA term to y, in place.

    y: `[tokens, out]`, the packed outputs of the projections that share x `[tokens, in]`. arena: `[num_pages,
    page_elems]` of any dtype; the computation is in x's and y's dtype. modules: (module id, first column in y, width)
    per projection.
    """
    d_in = x.shape[1]
    for tile in segments.tiles():
        a: list[Block] = []
        used: list[int] = []
        expands: list[tuple[int, int, int, int, list[Block]]] = []
        row = 0
        for module, column, width in modules:
            first, b = row, []
            for index, (_, _, adapter) in enumerate(tile.entries):
                a_blocks, b_blocks = adapter.blocks(arena, layer, module, d_in, width)
                if a_blocks:
                    a += a_blocks
                    b += b_blocks
                    used.append(index)
                    row += adapter.rank
            if b:
                expands.append((first, row, column, width, b))
        if not a:
            continue
        h = tile.mask(x[tile.begin : tile.end] @ stacked(a).to(x.dtype).T, tuple(used))  # [tokens, rows]
        target = y[tile.begin : tile.end]
        for first, last, column, width, b in expands:
            target[:, column : column + width].addmm_(h[:, first:last], stacked(b).to(x.dtype))


def add_embeddings(
    y: torch.Tensor, token_ids: torch.Tensor, arena: torch.Tensor, segments: Segments, module: int, vocab: int
) -> None:
    """Add every segment's LoRA term of the token embeddings to y `[tokens, hidden]`, in place.

    Rank-row i of A has a value for each of `vocab` tokens: a token's are gathered in place of a product. token_ids:
    `[tokens]` int64. module: of the embeddings; adapters have its rank-rows next to those of layer 0.
    """
    for begin, end, adapter in segments:
        a_blocks, b_blocks = adapter.blocks(arena, 0, module, vocab, y.shape[1])
        if a_blocks:
            own = token_ids[begin:end]
            rows = [block[0] if len(block) == 1 else torch.cat(block, dim=1) for block in a_blocks]
            h = torch.cat([each.index_select(1, own) for each in rows]).to(y.dtype)
            y[begin:end].addmm_(h.T, stacked(b_blocks).to(y.dtype), alpha=adapter.scale)


def stacked(blocks: list[Block]) -> torch.Tensor:
    """Concatenate the rows of all blocks; a single view is not copied."""
    rows = [block[0] if len(block) == 1 else torch.cat(block, dim=1) for block in blocks]
    return rows[0] if len(rows) == 1 else torch.cat(rows)
