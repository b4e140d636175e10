"""What a step's adapters add in a layer's mixture of experts on a GPU: launches over tiles that the device makes.

Tests: tests/core/model/moe/test_mixture_launches_interpreted.py, tests/core/executors/test_cuda_experts_interpreted.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from ....memory.pages.layout import SlabLayout
from ....memory.pages.projections import MIXTURE_ROLES, Projections, Role
from ....ops import dependent_launch
from ....ops.lora.sgmv_schedule import Schedule, decode, prefill
from ....ops.lora.sgmv_tables import MAX_GRID, SgmvTables
from ....ops.moe.expert_tiles import ExpertTiles
from ....ops.moe.expert_tiles_schedule import num_tiles
from ....ops.moe.mixture_tables import MixtureSizes, MixtureTables, ModuleGroup
from ....ops.table_records import Copy
from ..specs.config import ModelConfig

if TYPE_CHECKING:
    from ....ops.lora.sgmv_triton import Sgmv

#: A number of tokens above the limits of all schedules but the last: these launches have one schedule for any step.
_MANY = 1 << 30

_ALL = slice(None)

_EXPERT_ROLES = (Role.EXPERT_GATE_UP, Role.EXPERT_DOWN)


class MixtureForm(NamedTuple):
    """How a step's adapters change mixtures of experts."""

    groups: tuple[str, ...] = ()
    """The products that any of them changes; empty: there are none."""
    border: int = 0
    """Tokens from here on are those of decoding sequences, with the kernels of decode steps."""
    adapters: int = 0
    """Adapters of the tokens before the border, which are multiplied in runs."""
    end: int | None = None
    """Tokens from here on are padding; None: a captured step has no more than decoding sequences."""


class MixtureLimits(NamedTuple):
    """The largest step, and the largest adapter."""

    adapters: int
    rows: int
    """Tokens of a decode step."""
    tokens: int
    rank: int
    pages: int
    """Of an adapter."""


class MixtureState:
    """The tables and launches of adapters on mixtures; for the largest step, so captured launches never move."""

    def __init__(
        self,
        config: ModelConfig,
        arena: torch.Tensor,
        limits: MixtureLimits,
        make_copy: Callable[[int], Copy],
    ) -> None:
        """make_copy: see `SgmvTables`."""
        adapters, rows, tokens, max_rank, max_pages = limits
        self.arena, self.max_rank = arena, max_rank
        spec, projections = config.experts, config.projections
        assert spec is not None, "the model has experts"
        self.per_token = spec.routing.per_token
        self._single, self._runs = decode(_MANY, max_rank), prefill(_MANY, max_rank, arena.itemsize)
        self._adapters, self._experts = adapters, spec.count
        groups = mixture_groups(projections)
        self._most_singles = {role: rows * self.per_token if its.experts else tokens for role, its in groups.items()}
        most_tiles = max(
            len(its.modules) * max(self._most_singles[role], self._most_runs(tokens) if its.experts else 0)
            for role, its in groups.items()
        )
        self.tables = MixtureTables(
            MixtureSizes(
                adapters=adapters,
                layers=config.num_layers,
                max_pages=max_pages,
                max_rank=max_rank,
                page_elems=arena.shape[1],
                slab_elems=_widest_slab(projections, arena.itemsize),
                tokens=tokens,
                tiles=most_tiles,
            ),
            groups,
            arena.device,
            make_copy,
        )
        self._tokens = tokens
        self._sgmvs: dict[tuple[Schedule, str], Sgmv] = {}

    @property
    def scratch(self) -> int:
        """Elements of partial sums that the largest launch needs."""
        return max(
            SgmvTables.scratch_elems(schedule.splits(its.inputs), pairs, len(its.modules), self.max_rank)
            for role, its in self.tables.groups.items()
            for schedule, pairs in (
                (self._single, self._most_singles[role]),
                (self._runs, self._tokens * self.per_token if its.experts else 0),
            )
        )

    def use_scratch(self, partial_sums: torch.Tensor) -> None:
        """Share the partial sums of other launches on the same stream."""
        self.tables.tiles.h = partial_sums
        self._sgmvs.clear()

    def use_arena(self, arena: torch.Tensor) -> None:
        """From now on, read adapters from another arena of the same layout."""
        self.arena = arena
        for sgmv in self._sgmvs.values():
            sgmv.use_arena(arena)

    def _most_runs(self, tokens: int, adapters: int | None = None) -> int:
        """The most tiles of so many tokens' pairs in runs of one adapter and expert."""
        distinct = self._adapters if adapters is None else adapters
        return num_tiles(tokens * self.per_token, self._experts * (distinct + 1), self._runs.tile_tokens)

    def launches(self, layer: int, form: MixtureForm) -> MixtureLaunches | None:
        """Those of a layer; None if it has none of the groups that a step changes."""
        return MixtureLaunches(self, layer, form) if form.groups else None

    def sgmv(self, schedule: Schedule, role: str) -> Sgmv:
        """A schedule's launches for a product, made once."""
        if (found := self._sgmvs.get((schedule, role))) is None:
            from ....ops.lora.sgmv_triton import Sgmv  # needs triton

            its = self.tables.groups[role]
            with dependent_launch.only(False):  # the launch before writes the tiles
                found = Sgmv(self.arena, self.tables.tiles, its.modules, its.inputs, schedule)
            self._sgmvs[schedule, role] = found
        return found

    def add_singles(
        self,
        role: str,
        y: torch.Tensor,
        x: torch.Tensor,
        layer: int,
        *,
        chosen: torch.Tensor | None = None,
        rows: slice = _ALL,
        compile_only: bool = False,
    ) -> None:
        """Add to some rows, each with the kernels of a decode step. chosen: see `mixture_tables_triton`."""
        from ....ops.moe.mixture_tables_triton import write  # needs triton

        y, x = y[rows], x[rows]
        if not (pairs := len(x)):
            return
        first = rows.start or 0
        written = write(
            self.tables, role, layer, pairs=pairs, first_pair=first, chosen=chosen, compile_only=compile_only
        )
        self._multiply(self.sgmv(self._single, role), y, x, written, compile_only=compile_only)

    def add_runs(
        self,
        role: str,
        y: torch.Tensor,
        x: torch.Tensor,
        layer: int,
        *,
        runs: ExpertTiles,
        chosen: torch.Tensor,
        compile_only: bool = False,
    ) -> None:
        """Add to the first rows, which are in the order of `runs`."""
        from ....ops.moe.mixture_tables_triton import write  # needs triton

        written = write(self.tables, role, layer, chosen=chosen, runs=runs, compile_only=compile_only)
        rows = len(runs.pairs)
        self._multiply(self.sgmv(self._runs, role), y[:rows], x[:rows], written, compile_only=compile_only)

    def _multiply(self, sgmv: Sgmv, y: torch.Tensor, x: torch.Tensor, written: int, *, compile_only: bool) -> None:
        """Add the products of the tiles that were written; more than a launch can have are in several."""
        tiles = self.tables.tiles.tiles
        for begin in range(0, written, MAX_GRID):
            own = tiles[begin:] if begin else tiles
            sgmv(y, x, 0, own, min(written - begin, MAX_GRID), compile_only=compile_only)

    def runs_of(self, chosen: torch.Tensor, adapters: int) -> ExpertTiles:
        """Tiles of tokens' pairs, by expert and adapter. adapters: the most that the tokens have."""
        count = self.tables.num_runs
        keys = chosen * count + (self.tables.adapter_of[: len(chosen), None] + 1)
        used = self._experts * (min(adapters, self._adapters) + 1)
        return ExpertTiles.of(keys, self._experts * count, self._runs.tile_tokens, used)

    def warm_up(self, *, compile_only: bool) -> None:
        """Compile every kernel, or launch each once without work. The tables must have no adapter."""
        device, dtype = self.arena.device, self.arena.dtype
        chosen = torch.zeros(1, self.per_token, dtype=torch.int64, device=device)
        runs = self.runs_of(chosen, 0)
        for role, its in self.tables.groups.items():
            kind = torch.float32 if role in (Role.ROUTER, Role.SHARED_GATE) else dtype
            outputs = sum(width for _, _, width in its.modules)
            rows = self.per_token if its.experts else 1
            y, x = (torch.zeros(rows, width, dtype=kind, device=device) for width in (outputs, its.inputs))
            own = chosen if its.experts else None
            self.add_singles(role, y, x, 0, chosen=own, compile_only=compile_only)
            if its.experts:
                self.add_runs(role, y, x, 0, runs=runs, chosen=chosen, compile_only=compile_only)


class MixtureLaunches:
    """Adds LoRA products to those of a layer's mixture of experts; the GPU's counterpart of `MixtureLora`."""

    def __init__(self, state: MixtureState, layer: int, form: MixtureForm) -> None:
        self._state, self._layer, self._form = state, layer, form

    def add(self, role: str, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add to products y `[tokens, out]` of all of the step's tokens x `[tokens, in]`, by rows of y's dtype."""
        if role in self._form.groups:
            self._state.add_singles(role, y, x.to(y.dtype), self._layer)

    def routed(self, chosen: torch.Tensor) -> RoutedLora | None:
        """What adapters add to experts, of tokens that go to `chosen` `[tokens, per_token]`; None if they add
        nothing.
        """
        if not any(role in self._form.groups for role in _EXPERT_ROLES):
            return None
        return RoutedLora(self._state, self._layer, self._form, chosen)


class RoutedLora:
    """Adds LoRA products to those of the experts that tokens are routed to.

    Products have a row for each pair of a token and an expert. The pairs of prompts are in runs of one expert and
    adapter; those of decoding sequences follow as they are.
    """

    def __init__(self, state: MixtureState, layer: int, form: MixtureForm, chosen: torch.Tensor) -> None:
        self._state, self._layer, self._form, self._chosen = state, layer, form, chosen
        self._runs: ExpertTiles | None = None
        per_token = chosen.shape[1]
        # pairs of decoding sequences
        self._singles = slice(form.border * per_token, None if form.end is None else form.end * per_token)
        self._pairs = chosen.new_empty(0)
        """`[tokens · per_token]` int64: the pair of each row, where there are runs."""
        if form.adapters:
            self._runs = state.runs_of(chosen[: form.border], form.adapters)
            head = self._runs.pairs
            self._pairs = torch.arange(chosen.numel(), device=chosen.device)
            self._pairs[: len(head)] = head.to(self._pairs.dtype)

    @property
    def has_runs(self) -> bool:
        """True if rows are in another order than pairs."""
        return self._runs is not None

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Rows `[tokens · per_token, in]` of tokens x `[tokens, in]`."""
        per_token = self._chosen.shape[1]
        if self._runs is None:
            return x[:, None].expand(-1, per_token, -1).reshape(-1, x.shape[1])
        return x[self._pairs // per_token]

    def in_order(self, values: torch.Tensor) -> torch.Tensor:
        """Values of pairs, `[pairs, …]`, in the order of rows."""
        return values if self._runs is None else values[self._pairs]

    def in_rows(self, tiles: ExpertTiles) -> ExpertTiles:
        """Tiles of the base products, with numbers of rows for those of pairs."""
        if self._runs is None:
            return tiles
        rows = torch.empty_like(self._pairs)
        rows[self._pairs] = torch.arange(len(rows), device=rows.device)
        own = rows[tiles.pairs].to(torch.int32)
        return ExpertTiles(tiles.block_t, own, tiles.expert, tiles.first, tiles.end)

    def add(self, role: str, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add to products y `[pairs, out]` of x `[pairs, in]`."""
        if role not in self._form.groups:
            return
        if self._runs is not None:
            self._state.add_runs(role, y, x, self._layer, runs=self._runs, chosen=self._chosen)
        self._state.add_singles(role, y, x, self._layer, chosen=self._chosen, rows=self._singles)

    def by_pair(self, y: torch.Tensor) -> torch.Tensor:
        """Rows in the order of pairs."""
        if self._runs is None:
            return y
        found = torch.empty_like(y)
        found[self._pairs] = y
        return found


def mixture_groups(projections: Projections) -> dict[str, ModuleGroup]:
    """The groups of a model's mixtures; all of its layers with experts have the same."""
    found: dict[str, ModuleGroup] = {}
    for layer, role in ((layer, role) for layer in range(projections.num_layers) for role in MIXTURE_ROLES):
        if role not in found and (modules := projections.columns(layer, role)):
            its = projections[projections.name_of(modules[0][0])]
            found[role] = ModuleGroup(modules, its.inputs, its.experts)
    return found


def _widest_slab(projections: Projections, itemsize: int) -> int:
    """The most elements of a rank-row of a part on mixtures: projections of experts are in parts of their own."""
    own = [each for each in projections if each.is_of_mixture]
    kinds = ([each.name for each in own if bool(each.experts) == experts] for experts in (False, True))
    return max(SlabLayout.build(projections, names, itemsize).slab_elems for names in kinds if names)
