"""A step's adapters on a GPU: static tables that captured launches read, and the launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from ...memory.adapters.adapter import Adapter
from ...memory.pages.adapter_layout import AdapterLayout, AdapterPart
from ...memory.pages.layout import MODULES, PageLayout
from ...memory.transfers.transfer import Transfer
from ...ops.sgmv import Segments
from ...ops.sgmv_schedule import Schedule, decode, prefill, rank_classes, token_limits
from ...ops.sgmv_tables import Copy, SgmvTables
from ..cpus import available_cpus
from .batch import LoraState, RowAdapters, lora_groups, rows_in
from .config import ModelConfig

if TYPE_CHECKING:
    from ...ops.sgmv_triton import Sgmv, Shrunk

#: Most parts of an adapter, which rank and alpha patterns make; each has a slot of its own in the tables.
MAX_PARTS = 16

#: Mean length of segments up to which a step is bound by reading rank-rows rather than by multiplying with them.
_SHORT = 8

#: Rank of adapters that kernels are tried with, and the standard deviation of their elements, so that they add about as
#: much as the base weights give.
_SAMPLE_RANK, _SAMPLE_SCALE = 16, 1 / 16

#: Tiles that a captured piece has beyond the tiles of its bucket's tokens: prompts seldom end where tiles do.
_MORE_TILES = 4

#: Most decode rows with adapters behind the prompts of a captured piece: of more, launches without work would take the
#: device longer than the host takes to launch what there is.
_MOST_TAIL = 64


class StepLimits(NamedTuple):
    """Most that a step holds. rank: of its adapters. padded: tokens of a step of prompts that is padded to a bucket."""

    rank: int
    adapters: int
    rows: int
    tokens: int
    padded: int = 0


class StepOffload(Protocol):
    """What of a step other processes compute, found while it is launched."""

    def takes(self, lora_index: int, layer: int, /) -> bool:
        """True if they compute a layer of an adapter that its pages lack: from now on its tables leave that out."""
        ...

    def offload(self, group: int, x: torch.Tensor, layer: int, /) -> None:
        """Give them their rows of x."""
        ...

    def collect(self, group: int, y: torch.Tensor, /) -> None:
        """Add what they make of the rows to y."""
        ...


class CudaLoraState(LoraState):
    """The tables of all launches, sized once from what a step may hold, so that nothing that adapters do moves them.

    Captured steps have the launches of their bucket, `bucket(size)`; others get theirs from `begin_ragged`.
    """

    def __init__(
        self,
        config: ModelConfig,
        arena: torch.Tensor,
        layout: PageLayout,
        limits: StepLimits,
        *,
        max_stall: float,
        make_copy: Callable[[int], Copy],
    ) -> None:
        """make_copy: see SgmvTables."""
        super().__init__(config, arena, max_stall)
        self.max_rank, max_adapters, self._max_rows, self._max_tokens, padded = limits
        self._config, self._num_layers = config, config.num_layers
        self._page_elems, self._itemsize = layout.page_elems, layout.itemsize
        self._decodes = {most: decode(most, self.max_rank) for most in token_limits("decode", self._max_rows)}
        self._prefills = {
            (most, rank): prefill(most, rank, self._itemsize)
            for most in token_limits("prefill", self._max_tokens)
            for rank in rank_classes(self.max_rank)
        }
        possible = self._possible()
        least_tile = min(schedule.tile_tokens for schedule in self._prefills.values())
        self.widths = [(config.module_dims[MODULES[group[0][0]]][0], group) for group in lora_groups(config)]
        _, widest = self._whole(self.max_rank)
        self._products: dict[Schedule, list[Sgmv]] = {}
        self.offloading: Callable[[Segments, Sequence[int], SgmvTables], StepOffload | None] | None = None
        """Chooses what is lent of a step of prompts, by its segments, the slot of each, and the tables."""
        self.offloaded: StepOffload | None = None
        """What the step lends."""
        self.tables = SgmvTables(
            table_rows=(max_adapters + 1) * MAX_PARTS,  # one more is taken off others' rows while it is in the weights
            layers=config.num_layers,
            max_pages=widest.num_pages,
            max_rank=self.max_rank,
            page_elems=layout.page_elems,
            slab_elems=widest.parts[0].slabs.slab_elems,
            max_tiles=MAX_PARTS * (self._max_tokens // least_tile + 2 * self._max_rows),
            scratch=max(self._scratch(max(tokens, padded), schedule) for schedule, tokens in possible.items()),
            device=arena.device,
            make_copy=make_copy,
        )

    def set_step(
        self,
        adapters: Sequence[Adapter],
        lora_indices: Sequence[RowAdapters],
        lengths: Sequence[int],
        merged: Adapter | None = None,
    ) -> None:
        self.offloaded = None
        super().set_step(adapters, lora_indices, lengths, merged)

    def _is_offloaded(self, lora_index: int, transfer: Transfer, layer: int) -> bool:
        if self.offloaded is None:
            return False
        transfer.is_done()  # which has its count of layers be of now
        return self.offloaded.takes(lora_index, layer)

    def use_arena(self, arena: torch.Tensor) -> None:
        """Read adapters from another arena of the same layout from now on."""
        self.arena = arena
        for product in itertools.chain.from_iterable(self._products.values()):
            product.use_arena(arena)

    def bucket(self, size: int, passes: int = 1) -> LoraLaunches:
        """The launches of a captured step: as many tiles whatever the adapters, with some room for their parts."""
        return LoraLaunches(self, decode(size, self.max_rank), size, passes=passes)

    def padded(self, tokens: int) -> LoraLaunches:
        """The launches of captured pieces of `tokens` tokens: prompts, and behind them decode rows with the kernels of
        a decode step; all tiles of these count tokens from the first.
        """
        schedule, last = prefill(tokens, self.max_rank, self._itemsize), min(tokens, self._max_rows, _MOST_TAIL)
        num_tiles = -(-tokens // schedule.tile_tokens) + _MORE_TILES
        return LoraLaunches(self, schedule, num_tiles, tail=Tail(decode(last, self.max_rank), last, 0))

    def begin_padded(
        self,
        adapters: Sequence[Adapter],
        lora_indices: Sequence[RowAdapters],
        lengths: Sequence[int],
        captured: LoraLaunches,
    ) -> LoraLaunches | None:
        """Write the tables of a step of prompts; `captured`, or other launches where that has too few tiles."""
        tail = captured.tail
        if tail is not None:
            self._begin(adapters, lora_indices, lengths)
            tiles = captured.schedule.tile_tokens, _border(lengths), tail.schedule.tile_tokens, captured.num_tiles
            num_tiles, tables = self.tables.plan(self.segments, *tiles), self.tables
            enough = num_tiles <= captured.num_tiles and tables.tail_tiles <= tail.num_tiles
            if enough and tables.passes <= captured.passes and self.offloaded is None:
                return captured
            return self._ragged(lengths)
        return self.begin_ragged(adapters, lora_indices, lengths)

    def begin_bucket(
        self,
        adapters: Sequence[Adapter],
        lora_indices: Sequence[RowAdapters],
        captured: LoraLaunches,
        merged: Adapter | None = None,
    ) -> LoraLaunches | None:
        """Write a decode step's tables and wait for its adapters; `captured`, or launches over more tiles if need be.
        None where the weights have all in them that the rows need.

        lora_indices: of every row, padding rows too. merged: see `set_step`.
        """
        self.set_step(adapters, lora_indices, [1] * len(lora_indices), merged)
        for layer in range(self._num_layers if self._coming else 0):  # an adapter may leave out any, the last too
            self.wait(layer)
        if merged is not None and not self.segments.rows:
            return None
        num_tiles = self.tables.plan(self.segments, captured.schedule.tile_tokens)
        passes = self.tables.passes
        if num_tiles <= captured.num_tiles and passes <= captured.passes:
            return captured
        return LoraLaunches(self, captured.schedule, num_tiles, passes=passes)

    def begin_ragged(
        self,
        adapters: Sequence[Adapter],
        lora_indices: Sequence[RowAdapters],
        lengths: Sequence[int],
        merged: Adapter | None = None,
    ) -> LoraLaunches | None:
        """Write a step's tables; its launches, which wait for each layer of adapters that are still coming. None where
        the weights have all in them that the rows need.

        Rows of one token behind the others, which is where decode rows are, have the launches of a decode step, so
        that they wait for no tile of many tokens and their products are the same in either.
        """
        self._begin(adapters, lora_indices, lengths, merged)
        return None if merged is not None and not self.segments.rows else self._ragged(lengths)

    def _begin(
        self,
        adapters: Sequence[Adapter],
        lora_indices: Sequence[RowAdapters],
        lengths: Sequence[int],
        merged: Adapter | None = None,
    ) -> None:
        """`set_step` of a step of prompts, some of which may be lent."""
        self.set_step(adapters, lora_indices, lengths, merged)
        if self._coming and self.offloading is not None:
            self.offloaded = self.offloading(self.segments, self._lora_indices, self.tables)

    def _ragged(self, lengths: Sequence[int]) -> LoraLaunches:
        segments, tokens = self.segments, sum(lengths)
        covered = sum(end - begin for begin, end, _ in segments)
        if tokens <= self._max_rows and covered <= _SHORT * len(segments.rows):
            schedule = self._decode(tokens)
            num_tiles = self.tables.plan(segments, schedule.tile_tokens)
            return LoraLaunches(self, schedule, num_tiles, self.wait, self.tables.passes)
        border = _border(lengths)
        rank = max((rows.rank for begin, _, rows in segments if begin < border), default=1)
        schedule = next(each for (most, limit), each in self._prefills.items() if border <= most and rank <= limit)
        tail = self._decode(tokens - border)
        num_tiles = self.tables.plan(segments, schedule.tile_tokens, border, tail.tile_tokens)
        return LoraLaunches(
            self,
            schedule,
            num_tiles,
            self.wait,
            self.tables.passes,
            Tail(tail, self.tables.tail_tiles, border) if self.tables.tail_tiles else None,
        )

    def sgmvs(self, schedule: Schedule) -> list[Sgmv]:
        """A schedule's products with each group of projections, made once."""
        if (found := self._products.get(schedule)) is None:
            from ...ops.sgmv_triton import Sgmv  # needs triton

            found = [Sgmv(self.arena, self.tables, modules, d_in, schedule) for d_in, modules in self.widths]
            self._products[schedule] = found
        return found

    @contextmanager
    def samples(self) -> Iterator[None]:
        """Inside, adapters to try kernels with are in the arena's pages, which are zeros afterwards."""
        generator = torch.Generator(self.arena.device).manual_seed(0)
        self.arena.normal_(0.0, _SAMPLE_SCALE, generator=generator)
        try:
            yield
        finally:
            self.rest()
            self.arena.zero_()

    def sample(self, bucket: int) -> LoraLaunches:
        """The launches of a captured step; the tables say that each row has an adapter of its own, as far as they have
        room for so many, of one rank and on all modules, in whatever pages there are.
        """
        part, layout = self._whole(min(_SAMPLE_RANK, self.max_rank))
        pages = list(itertools.islice(itertools.cycle(range(len(self.arena))), layout.num_pages))
        adapters = [rows_in(part, layout.parts[0], pages) for _ in range(min(bucket, len(self.tables.offsets)))]
        segments = Segments()
        for row, rows in zip(range(bucket), itertools.cycle(adapters)):
            segments.add(row, row + 1, rows)
        launches = self.bucket(bucket)
        self.tables.plan(segments, launches.schedule.tile_tokens)
        return launches

    def rest(self) -> None:
        """Have the tables say that there is nothing to do, whatever is launched."""
        self.set_step((), (), ())
        self.tables.plan(self.segments, 1)

    def warm_up(self) -> None:
        """Compile every kernel, as many at once as there are processors, and launch each with nothing to do, so that
        no request waits for a compiler.
        """
        from ...ops.launch_triton import compiling  # needs triton

        device, dtype = self.arena.device, self.arena.dtype
        cases = []
        for schedule in self._possible():
            launches = LoraLaunches(self, schedule, 1)
            for group, (d_in, modules) in enumerate(self.widths):
                out = sum(width for _, _, width in modules)
                y, x = (torch.zeros(1, width, dtype=dtype, device=device) for width in (out, d_in))
                cases.append((launches, group, y, x))
        with compiling(available_cpus()):
            for launches, *case in cases:
                launches.add(*case, 0, compile_only=True)
        for launches, *case in cases:
            launches.add(*case, 0)

    def _whole(self, rank: int) -> tuple[AdapterPart, AdapterLayout]:
        """An adapter of one rank that changes everything, and its layout."""
        part = AdapterPart(rank, 1.0, tuple(range(self._num_layers)), MODULES)
        sizes = self._config.module_dims, self._num_layers, self._page_elems, self._itemsize
        return part, AdapterLayout.build((part,), *sizes)

    def _possible(self) -> dict[Schedule, int]:
        """Every schedule that a step may take, with the most tokens that it is taken for."""
        return {
            **{schedule: most for most, schedule in self._decodes.items()},  # rising, so the last is the most
            **{schedule: most for (most, _), schedule in self._prefills.items()},
        }

    def _decode(self, tokens: int) -> Schedule:
        """The schedule of so many tokens in a row each."""
        return next(schedule for most, schedule in self._decodes.items() if tokens <= most)

    def _scratch(self, tokens: int, schedule: Schedule) -> int:
        return max(
            SgmvTables.scratch_elems(schedule.splits(d_in), tokens, len(group), self.max_rank)
            for d_in, group in self.widths
        )


def _border(lengths: Sequence[int]) -> int:
    """Tokens of the rows before the last rows of one token."""
    return sum(lengths) - sum(1 for _ in itertools.takewhile(lambda length: length == 1, reversed(lengths)))


class Tail(NamedTuple):
    """Tokens of a step from `border` on, which have a schedule of their own and `num_tiles` tiles behind the others,
    and count from there.
    """

    schedule: Schedule
    num_tiles: int
    border: int


class LoraLaunches:
    """A step's launches: one schedule over so many of the tables' tiles, and perhaps another one for its last tokens.
    They hold nothing of a step themselves.

    wait: called before every layer. passes: most entries of a token on one module.
    """

    def __init__(
        self,
        state: CudaLoraState,
        schedule: Schedule,
        num_tiles: int,
        wait: Callable[[int], None] = lambda layer: None,
        passes: int = 1,
        tail: Tail | None = None,
    ) -> None:
        self.schedule, self.num_tiles, self.wait, self.passes = schedule, num_tiles, wait, passes
        self._state, self.tail = state, tail
        self._tiles = state.tables.tiles_of_pass[:passes]
        self._tokens = (tail and tail.border) or None
        self._tail_tiles = [] if tail is None else [tiles[num_tiles:] for tiles in self._tiles]

    @cached_property
    def _groups(self) -> list[Sgmv]:
        return self._state.sgmvs(self.schedule)

    @cached_property
    def _tail_groups(self) -> list[Sgmv]:
        return [] if self.tail is None else self._state.sgmvs(self.tail.schedule)

    def add(self, group: int, y: torch.Tensor, x: torch.Tensor, layer: int, *, compile_only: bool = False) -> None:
        """Add the products of the first `num_tiles` tiles of each pass with a group's projections, and of the tail's.

        compile_only: see `sgmv_triton.Sgmv`.
        """
        if (tail := self.tail) is not None:
            last = y[tail.border :], x[tail.border :]
            self._tail_groups[group](*last, layer, self._tail_tiles, tail.num_tiles)
        self._groups[group](y, x, layer, self._tiles, self.num_tiles, self._tokens, compile_only=compile_only)
        if (offloaded := self._state.offloaded) is not None:
            offloaded.collect(group, y)

    def shrink(self, group: int, x: torch.Tensor, layer: int, *, compile_only: bool = False) -> Shrunk | None:
        """Multiply with A alone. None where adapters of a row are added in passes, or tiles hold more than a token."""
        if self.passes > 1 or self.tail is not None or self.schedule.tensor_cores:
            return None
        (tiles,) = self._tiles
        return self._groups[group].shrink(x, layer, tiles, self.num_tiles, compile_only=compile_only)

    def offload(self, group: int, x: torch.Tensor, layer: int) -> None:
        """See `StepLora.offload`."""
        if (offloaded := self._state.offloaded) is not None:
            offloaded.offload(group, x, layer)
