"""LoRA state of a step on a GPU: the static tables that captured launches read, and the launches of each step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ....graphs.runner import EagerReason
from ....memory.adapters.adapter import Adapter
from ....memory.files.whole_copies import MAX_TRAINED_ROWS
from ....memory.pages.adapter_layout import AdapterLayout, AdapterPart, VectorTarget, uniform_parts
from ....memory.pages.layout import PageLayout, SlabLayout
from ....memory.pages.projections import MIXTURE_ROLES, GemmShape
from ....memory.transfers.transfer import Transfer
from ....ops.lora.in_parts import Modules, launch_for
from ....ops.lora.sgmv import AdapterRows, Segments
from ....ops.lora.sgmv_schedule import Schedule, decode, prefill, rank_classes, token_limits
from ....ops.lora.sgmv_tables import SgmvTables, TableSizes
from ....ops.lora.sgmv_tiles import MERGED_TERMS, count_tiles
from ....ops.lora.vectors_tables import VectorTables
from ....ops.moe.mixture_tables import MAX_PARTS, Parts
from ....ops.table_records import Copy
from ...cpus import available_cpus
from ..moe.mixture_launches import MixtureForm, MixtureLaunches, MixtureLimits, MixtureState
from ..specs.attention import LatentSpec
from ..specs.config import ModelConfig
from .latent_launches import LatentLaunches
from .lora_launches import LoraLaunches, StepOffload, Tail, Variant
from .lora_state import LoraState, RowAdapters

if TYPE_CHECKING:
    from ....ops.attention.latents_triton import LaunchedLora
    from ....ops.lora.sgmv_triton import Sgmv
    from ....ops.lora.vectors_triton import ScaleRows

#: New adapters with vectors of one copy to the device; few adapters have them.
_USUAL_VECTORS = 16

#: Mean length of segments up to which a step is bound by reading rank-rows, not by computing with them.
_SHORT = 8

#: Extra tiles of a captured piece, beyond those for its bucket's tokens: prompts seldom end where tiles end.
_MORE_TILES = 4

#: Sequences of a merged step for each that uses another adapter or none, in usual launches.
_MIXTURE_SHARE = 4

#: Decoding sequences with adapters after the prompts of a usual captured piece. Launches without work take the device
#: some time, too, so more of them are for steps that need them.
_MOST_TAIL = 64


class StepLimits(NamedTuple):
    """The largest step."""

    rank: int
    """Of its adapters."""
    adapters: int
    rows: int
    tokens: int
    padded: int = 0
    """Tokens of a step with prompts that is padded to a bucket."""


class CudaLoraState(LoraState):
    """The tables of all launches, allocated once for the largest step, so changes of adapters never move them.

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
        self._num_layers = config.num_layers
        self._page_elems, self._itemsize = layout.page_elems, layout.itemsize
        self._decodes = {most: decode(most, self.max_rank) for most in token_limits("decode", self._max_rows)}
        self._prefills = {
            (most, rank): prefill(most, rank, self._itemsize)
            for most in token_limits("prefill", self._max_tokens)
            for rank in rank_classes(self.max_rank)
        }
        possible = self._possible()
        least_tile = min(schedule.tile_tokens for schedule in self._prefills.values())
        self._projections = config.projections
        self.gemm_shapes = config.projections.gemm_shapes
        """The different sizes of the layers' GEMMs."""
        self._usual_parts = len(uniform_parts(self._projections, self.max_rank))
        widest = self._widest()
        self._sgmvs: dict[tuple[Schedule, int], dict[int, Sgmv]] = {}
        self._scales: dict[bool, dict[int, ScaleRows]] = {}
        self.offloading: Callable[[Segments, Sequence[int], SgmvTables], StepOffload | None] | None = None
        """Chooses the segments of a step with prompts to offload; called with the segments, the `lora_index` of each,
        and the tables.
        """
        self.offloaded: StepOffload | None = None
        """The offloaded part of the current step."""
        self._terms = 1
        """The fewest records of the current step's tiles."""
        usual_tiles = self._max_tokens // least_tile + 2 * self._max_rows
        self.mixtures: MixtureState | None = None
        """Of adapters on mixtures of experts; None for a model without."""
        if self._projections.mixture:
            tokens = max(self._max_tokens, self._max_rows, padded)
            most = MixtureLimits(max_adapters, self._max_rows, tokens, self.max_rank, widest.num_pages)
            self.mixtures = MixtureState(config, arena, most, make_copy)
        scratch = max(self._scratch(max(tokens, padded), schedule) for schedule, tokens in possible.items())
        sizes = TableSizes(
            # one more, because a merged adapter is subtracted from the rows of others
            table_rows=(max_adapters + 1) * MAX_PARTS,
            layers=config.num_layers,
            max_pages=widest.num_pages,
            max_rank=self.max_rank,
            page_elems=layout.page_elems,
            slab_elems=self._widest_slab(),
            modules=self._projections.num_own,
            max_tiles=MAX_PARTS * usual_tiles,
            max_terms=MERGED_TERMS,
            usual_rows=(max_adapters + 1) * self._usual_parts,
            usual_tiles=usual_tiles * self._usual_parts,
            scratch=max(scratch, 0 if self.mixtures is None else self.mixtures.scratch),
        )
        self.tables = SgmvTables(sizes, arena.device, make_copy)
        if self.mixtures is not None:
            self.mixtures.use_scratch(self.tables.h)
        self._latent_launches = self._new_latent_launches(config.one_latent)
        self._mixture_modules = {
            role: {module for columns in self._mixture_columns for module, _, _ in columns[role]}
            for role in MIXTURE_ROLES
        }
        self._planned = Segments(), MixtureForm()  # of the last step with tables for mixtures
        self._vectors = VectorTables(
            2 * (max_adapters + 1),  # those of a merged adapter are undone, and others are applied
            config.num_layers,
            widest.num_pages,
            max(self._max_tokens, self._max_rows, padded),
            arena.device,
            modules=self._projections.num_own,
            itemsize=self._itemsize,
            usual_rows=min(max_adapters + 1, _USUAL_VECTORS),
            make_copy=make_copy,
        )

    @property
    def table_bytes(self) -> int:
        """Device memory of the tables, without the partial sums."""
        mixtures = 0 if self.mixtures is None else self.mixtures.tables.num_bytes
        return self.tables.num_bytes + self._vectors.num_bytes + mixtures

    def set_step(
        self,
        adapters: Sequence[Adapter],
        lora_indices: Sequence[RowAdapters],
        lengths: Sequence[int],
        merged: Adapter | None = None,
    ) -> None:
        self.offloaded = None
        # of merged steps also if no token has both, so that no sequence's sums depend on its batch
        self._terms = 1 if merged is None else MERGED_TERMS
        super().set_step(adapters, lora_indices, lengths, merged)

    def _is_offloaded(self, lora_index: int, transfer: Transfer, layer: int) -> bool:
        if self.offloaded is None:
            return False
        transfer.is_done()  # updates its count of layers
        return self.offloaded.takes(lora_index, layer)

    def use_arena(self, arena: torch.Tensor) -> None:
        """From now on, read adapters from another arena of the same layout."""
        self.arena = arena
        for sgmv in (one for made in (*self._sgmvs.values(), *self._scales.values()) for one in made.values()):
            sgmv.use_arena(arena)
        if self._latent_launches is not None:
            self._latent_launches.use_arena(arena)
        if self.mixtures is not None:
            self.mixtures.use_arena(arena)

    def bucket(self, size: int, terms: int = 1) -> LoraLaunches:
        """Return the launches of a captured step: a tile for each sequence, if adapters have the usual parts; of a
        merged step, for each of a quarter of them, since most sequences are the merged adapter's.

        terms: records of a tile, MERGED_TERMS of a merged step.
        """
        num_tiles = (size if terms == 1 else -(-size // _MIXTURE_SHARE)) * self._usual_parts
        return LoraLaunches(self, decode(size, self.max_rank), num_tiles, terms=terms)

    def padded(self, tokens: int, terms: int = 1) -> LoraLaunches:
        """Return the launches of captured pieces with `tokens` tokens. terms: see `bucket`.

        Prompts come first, then decoding sequences with the kernels of a decode step; all tiles of these count tokens
        from the first.
        """
        schedule, last = prefill(tokens, self.max_rank, self._itemsize), min(tokens, self._max_rows, _MOST_TAIL)
        num_tiles = (-(-tokens // schedule.tile_tokens) + _MORE_TILES) * self._usual_parts
        tail = Tail(decode(last, self.max_rank), last * self._usual_parts, 0)
        return LoraLaunches(self, schedule, num_tiles, terms=terms, tail=tail)

    def begin_padded(
        self,
        adapters: Sequence[Adapter],
        lora_indices: Sequence[RowAdapters],
        lengths: Sequence[int],
        captured: LoraLaunches,
        merged: Adapter | None = None,
    ) -> LoraLaunches | None:
        """Write the tables of a step with prompts; return `captured`, with the launches for vectors and the room that
        the step needs, or launches of this step alone.

        Returns None if the merged weights contain everything that the sequences need.
        """
        self._begin(adapters, lora_indices, lengths, merged)
        if self._is_contained(merged):
            return None
        if self.of_mixtures.segments.rows:
            return self._ragged(lengths, EagerReason.EXPERTS)
        assert captured.tail is not None
        scales, tables = self._plan_vectors(), self.tables
        tiles = captured.schedule.tile_tokens, _border(lengths), captured.tail.schedule.tile_tokens
        num_tiles, tail_tiles, terms = count_tiles(self.in_layers.segments, *tiles, captured.terms)
        found = captured.with_room(num_tiles, tail_tiles, scales) if terms == captured.terms else None
        if found is None or self.offloaded is not None:
            return self._ragged(lengths, EagerReason.TILES if found is None else EagerReason.OFFLOAD)
        tables.plan(self.in_layers.segments, *tiles, found.num_tiles, terms)
        return found

    def begin_bucket(
        self,
        adapters: Sequence[Adapter],
        lora_indices: Sequence[RowAdapters],
        captured: LoraLaunches,
        merged: Adapter | None = None,
    ) -> LoraLaunches | None:
        """Write a decode step's tables and wait for its adapters; return `captured`, with the launches for vectors and
        the room that the step needs, or launches of this step alone.

        Returns None if the merged weights contain everything that the sequences need. lora_indices: of every entry,
        including padding. merged: see `set_step`.
        """
        self.set_step(adapters, lora_indices, [1] * len(lora_indices), merged)
        # an adapter may leave out any layer, even the last
        for layer in range(self._num_layers if self._coming else 0):
            self.wait(layer)
        if self._is_contained(merged):
            return None
        num_tiles = self.tables.plan(self.in_layers.segments, captured.schedule.tile_tokens, terms=captured.terms)
        scales, terms, mixture = self._plan_vectors(), self.tables.terms, self._plan_mixtures()
        latents = self.changes_latents and (bool(self.in_layers.segments.vectors) or self._latent_launches is None)
        is_usual = terms == captured.terms and not latents
        found = captured.with_room(num_tiles, 0, scales, mixture) if is_usual else None
        if found is not None:
            return found
        eager = EagerReason.LATENTS if latents else EagerReason.TILES
        variant = Variant(scales, eager=eager, mixture=mixture, latents=latents)
        return LoraLaunches(self, captured.schedule, num_tiles, terms=terms, variant=variant)

    def _is_contained(self, merged: Adapter | None) -> bool:
        """True if merged weights contain everything that a step needs of its adapters."""
        own = self.in_layers.segments.rows or self.of_model.segments.rows or self.of_mixtures.segments.rows
        return merged is not None and not own

    def begin_ragged(
        self,
        adapters: Sequence[Adapter],
        lora_indices: Sequence[RowAdapters],
        lengths: Sequence[int],
        merged: Adapter | None = None,
    ) -> LoraLaunches | None:
        """Write a step's tables; return its launches, which wait for each layer of adapters still being loaded.

        Returns None if the merged weights contain everything that the sequences need. Decoding sequences come last, and
        use the launches of a decode step. So they don't wait for tiles of many tokens, and their results are the same
        as in decode steps.
        """
        self._begin(adapters, lora_indices, lengths, merged)
        return None if self._is_contained(merged) else self._ragged(lengths)

    def _begin(
        self,
        adapters: Sequence[Adapter],
        lora_indices: Sequence[RowAdapters],
        lengths: Sequence[int],
        merged: Adapter | None = None,
    ) -> None:
        """Like `set_step`, for a step with prompts, parts of which may be offloaded."""
        self.set_step(adapters, lora_indices, lengths, merged)
        if self._coming and self.offloading is not None:
            self.offloaded = self.offloading(self.in_layers.segments, self.in_layers.lora_indices, self.tables)

    def _plan_vectors(self) -> tuple[bool, ...]:
        """Write the tables of a step's vectors; return the launches that it has, see `LoraLaunches`."""
        if not self.in_layers.segments.vectors:
            return ()
        self._vectors.plan(self.in_layers.segments)
        undone = [self.in_layers.segments.rows[index].scale < 0 for index in self.in_layers.segments.vectors]
        return tuple(undo for undo in (True, False) if undo in undone)

    def _plan_mixtures(self, border: int = 0, end: int | None = None) -> MixtureForm:
        """Write the tables of a step's adapters on mixtures of experts; return how they change these. border, end: see
        `MixtureForm`.
        """
        if self.mixtures is None:
            return MixtureForm()
        segments, form = self._planned
        if segments is self.of_mixtures.segments and (form.border, form.end) == (border, end):
            return form
        parts: dict[tuple[int, int], list[AdapterRows]] = {}
        for begin, end, rows in self.of_mixtures.segments:
            parts.setdefault((begin, end), []).append(rows)
        runs: list[tuple[int, int, Parts]] = [(*run, tuple(own)) for run, own in parts.items()]
        self.mixtures.tables.plan(runs)
        modules = {
            module for rows in self.of_mixtures.segments.rows for module, at in enumerate(rows.a_offset) if at >= 0
        }
        roles = tuple(role for role, own in self._mixture_modules.items() if not modules.isdisjoint(own))
        found = MixtureForm(roles, border, len({own for begin, _, own in runs if begin < border}), end)
        self._planned = self.of_mixtures.segments, found
        return found

    def _ragged(self, lengths: Sequence[int], eager: EagerReason = EagerReason.TOKENS) -> LoraLaunches:
        segments, tokens, scales = self.in_layers.segments, sum(lengths), self._plan_vectors()
        every = (*segments, *self.of_mixtures.segments)
        lengths_of_rows = [end - begin for begin, end, rows in every if rows.rank]
        if tokens <= self._max_rows and sum(lengths_of_rows) <= _SHORT * len(lengths_of_rows):
            schedule = self._decode(tokens)
            num_tiles = self.tables.plan(segments, schedule.tile_tokens, terms=self._terms)
            mixture = self._plan_mixtures(0, tokens)
            variant = Variant(scales, eager=eager, mixture=mixture, latents=self.changes_latents)
            return LoraLaunches(self, schedule, num_tiles, self.wait, self.tables.terms, variant=variant)
        border = _border(lengths)
        rank = max((rows.rank for begin, _, rows in segments if begin < border), default=1)
        schedule = next(each for (most, limit), each in self._prefills.items() if border <= most and rank <= limit)
        tail = self._decode(tokens - border)
        num_tiles = self.tables.plan(segments, schedule.tile_tokens, border, tail.tile_tokens, terms=self._terms)
        return LoraLaunches(
            self,
            schedule,
            num_tiles,
            wait=self.wait,
            terms=self.tables.terms,
            tail=Tail(tail, self.tables.tail_tiles, border) if self.tables.tail_tiles else None,
            variant=Variant(
                scales, eager=eager, mixture=self._plan_mixtures(border, tokens), latents=self.changes_latents
            ),
        )

    def mixture_launches(self, layer: int, form: MixtureForm) -> MixtureLaunches | None:
        """The launches of a step's adapters on a layer's mixture of experts; None if there are none."""
        return None if self.mixtures is None else self.mixtures.launches(layer, form)

    def largest(self, lengths: Sequence[int]) -> LoraLaunches | None:
        """Launches without work that take as much memory as any step's of these lengths; None if no launches of an
        eager step take any.
        """
        if self.mixtures is None:
            return None
        self.rest()
        form = MixtureForm(tuple(self.mixtures.tables.groups), _border(lengths), len(self.tables.offsets), sum(lengths))
        schedule = next(reversed(self._possible()))
        return LoraLaunches(self, schedule, 0, variant=Variant(eager=EagerReason.EXPERTS, mixture=form))

    def sgmvs(self, schedule: Schedule, terms: int) -> dict[int, Sgmv]:
        """Return a schedule's launches by the index of the GEMM's sizes, made once. terms: records of a tile."""
        if (found := self._sgmvs.get((schedule, terms))) is None:
            from ....ops.lora.sgmv_triton import Sgmv  # needs triton

            def launch(modules: Modules, inputs: int) -> Sgmv:
                return Sgmv(self.arena, self.tables, modules, d_in=inputs, schedule=schedule, terms=terms)

            found = {
                index: launch_for(each.modules, partial(launch, inputs=each.inputs))
                for index, each in enumerate(self.gemm_shapes)
            }
            self._sgmvs[schedule, terms] = found
        return found

    def launched_latents(self, layer: int, tiles: torch.Tensor, num_tiles: int, terms: int) -> LaunchedLora | None:
        """The launches of a decode step's adapters on a layer's kv_b_proj; None if they can't be launched."""
        launches = self._latent_launches
        return None if launches is None else launches.of(layer, tiles, num_tiles, terms, self.in_layers.segments)

    def scale(self, gemm: int, y: torch.Tensor, layer: int, *, undo: bool, compile_only: bool = False) -> None:
        """Apply a step's vectors to a GEMM's outputs, or undo those of a merged adapter."""
        if (found := self._scales.get(undo)) is None:
            from ....ops.lora.vectors_triton import ScaleRows  # needs triton

            found = {
                index: launch_for(each.modules, partial(ScaleRows, self.arena, self._vectors, undo=undo))
                for index, each in enumerate(self.gemm_shapes)
            }
            self._scales[undo] = found
        found[gemm](y, layer, compile_only=compile_only)

    def rest(self) -> None:
        """Make the tables say that there is nothing to do, for any launch."""
        self.set_step((), (), ())
        self.tables.plan(self.in_layers.segments, 1)
        self._plan_mixtures()

    def warm_up(self) -> None:
        """Compile every kernel, as many at once as there are processors, and launch each once without work.

        Afterwards no request waits for a compiler.
        """
        from ....ops.launch_triton import compiling  # needs triton

        device, dtype = self.arena.device, self.arena.dtype
        cases, places = [], self._first_uses()
        for schedule, terms in itertools.product(self._possible(), (1, MERGED_TERMS)):
            launches = LoraLaunches(self, schedule, 1, terms=terms)
            for gemm, layer, each in places:
                y, x = (torch.zeros(1, width, dtype=dtype, device=device) for width in (each.outputs, each.inputs))
                cases.append((launches, gemm, y, x, layer))
        outputs = [
            (gemm, torch.zeros(1, each.outputs, dtype=dtype, device=device), layer) for gemm, layer, each in places
        ]
        with compiling(available_cpus()):
            self._warm_up_latents(compile_only=True)
            if self.mixtures is not None:
                self.mixtures.warm_up(compile_only=True)
            for launches, *case in cases:
                launches.add(*case, compile_only=True)
            for case, undo in itertools.product(outputs, (False, True)):
                self.scale(*case, undo=undo, compile_only=True)
        if self.mixtures is not None:
            self.mixtures.warm_up(compile_only=False)
        for launches, *case in cases:
            launches.add(*case)
        for case, undo in itertools.product(outputs, (False, True)):
            self.scale(*case, undo=undo)
        self._warm_up_latents(compile_only=False)

    def _warm_up_latents(self, *, compile_only: bool) -> None:
        if self._latent_launches is not None:
            layer = next(layer for layer, own in enumerate(self._latents) if own)
            self._latent_launches.warm_up(layer, compile_only=compile_only)

    def _new_latent_launches(self, latent: LatentSpec | None) -> LatentLaunches | None:
        """None for a model without latents, with several kinds of them, or with heads that kernels don't take."""
        if latent is None or not LatentLaunches.can_launch(latent, self._itemsize):
            return None
        ((module, _, width),) = next(filter(None, self._latents))
        return LatentLaunches(latent, module, width, self.arena, self.tables)

    def _first_uses(self) -> list[tuple[int, int, GemmShape]]:
        """Each size's index, the layer that first has it, and the size."""
        found: dict[int, int] = {}
        for layer, own in enumerate(self._projections.gemm_shape_of):
            found |= {index: layer for index in own.values() if index not in found}
        return [(index, layer, self.gemm_shapes[index]) for index, layer in found.items()]

    def whole(self, rank: int) -> tuple[tuple[AdapterPart, ...], AdapterLayout]:
        """Make an adapter of one rank that changes everything, and its layout."""
        parts = uniform_parts(self._projections, rank)
        return parts, AdapterLayout.build(parts, self._projections, self._page_elems, self._itemsize)

    def _widest(self) -> AdapterLayout:
        """The layout of the largest adapter: on every module of the layers and of the model, with vectors and with all
        rows that it may have of its own.
        """
        its = self._projections
        names = [each.name for each in its if not each.is_rows]
        parts = list(uniform_parts(its, self.max_rank, targets=names))
        own = [each.name for each in its if each.is_rows]
        parts += [AdapterPart(MAX_TRAINED_ROWS, 1.0, its.layers_of(name), (name,)) for name in own]
        vectors = [
            VectorTarget(layer, name)
            for layer in range(its.num_layers)
            for name in its.names_in(layer)
            if name not in its.mixture
        ]
        return AdapterLayout.build(parts, its, self._page_elems, self._itemsize, vectors=vectors)

    def _widest_slab(self) -> int:
        """The most elements that a rank-row of a layer may have."""
        layers = dict.fromkeys(self._projections.layers)
        names = ([each.name for each in layer if not each.is_of_mixture] for layer in layers)
        return max(SlabLayout.build(self._projections, targets, self._itemsize).slab_elems for targets in names)

    def _possible(self) -> dict[Schedule, int]:
        """Every schedule that a step may use, with the most tokens that it is used for."""
        return {
            # in rising order, so the last is the largest
            **{schedule: most for most, schedule in self._decodes.items()},
            **{schedule: most for (most, _), schedule in self._prefills.items()},
        }

    def _decode(self, tokens: int) -> Schedule:
        """The schedule for so many sequences of one token each."""
        return next(schedule for most, schedule in self._decodes.items() if tokens <= most)

    def _scratch(self, tokens: int, schedule: Schedule) -> int:
        return max(
            SgmvTables.scratch_elems(
                schedule.splits(each.inputs), tokens, len(each.modules), self.max_rank, MERGED_TERMS
            )
            for each in self.gemm_shapes
        )


def _border(lengths: Sequence[int]) -> int:
    """Number of tokens before the last rows of one token."""
    return sum(lengths) - sum(1 for _ in itertools.takewhile(lambda length: length == 1, reversed(lengths)))
