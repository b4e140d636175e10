"""The adapters of a step on a CPU: the rows of each, as segments of the step's tokens.

Tests: tests/core/test_parity.py, tests/core/paths.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from ...memory.adapters.adapter import Adapter
from ...memory.pages.adapter_layout import AdapterPart, PartLayout, VectorLayout
from ...memory.pages.projections import FURTHER_GROUPS, LAYER_GROUPS, MIXTURE_GROUPS, Group, Projections
from ...memory.transfers.transfer import Transfer
from ...ops.latents import AbsorbedLora
from ...ops.sgmv import AdapterRows, Segments, add_embeddings, sgmv
from ...ops.trained_rows import TrainedRows
from ...ops.vectors import scale_outputs
from ..requests.types import BASE_LORA_INDEX, ScheduledSequence
from .config import ModelConfig
from .mixture_lora import MixtureLora
from .step_lora import HeadLora

T = TypeVar("T")

#: Adapter of a row: its slot, or several in the order in which they are added up, each with a factor of its
#: scale. ((3, 1.0), (0, -1.0)) is what slot 3 adds beyond slot 0.
RowAdapters = int | tuple[tuple[int, float], ...]


class _Resident(NamedTuple):
    """An adapter's rows in its current pages."""

    pages: list[int]
    """The list that they were made for."""
    in_layers: list[AdapterRows]
    """Of the parts in layers, outside mixtures of experts, and of vectors."""
    of_model: list[AdapterRows]
    """Of the parts that change the model's own modules."""
    of_mixture: tuple[AdapterRows, ...]
    """Of the parts in mixtures of experts."""


class LoraState:
    """Applies a step's adapters to a model; the segments' adapters are set once per step.

    segments: of the parts in layers. model_segments: of the parts that change the token embeddings or the output
    projection; most steps have none. mixture_segments: of the parts that change mixtures of experts.
    """

    def __init__(self, config: ModelConfig, arena: torch.Tensor, max_stall: float = 0.0) -> None:
        """max_stall: seconds that a step may wait in all for adapters that are still coming."""
        self.arena = arena
        self.max_stall = max_stall
        self.segments, self.model_segments, self.mixture_segments = Segments(), Segments(), Segments()
        self._coming: dict[int, Transfer] = {}  # by slot
        self._late: set[int] = set()
        self._lora_indices: list[int] = []  # of each segment
        self._model_indices: list[int] = []  # of each of the model's
        self._mixture_indices: list[int] = []  # of each of mixtures
        self._logit_tokens: tuple[Sequence[int] | None, Sequence[int]] = None, ()
        self._patience = 0.0  # seconds that the step may still wait
        self.changes_latents = False
        """True if the step's adapters may change keys and values of latents."""
        self._step: tuple[object, ...] | None = None  # what `segments` were made of
        self._rows: WeakKeyDictionary[Adapter, _Resident] = WeakKeyDictionary()
        self._scaled: WeakKeyDictionary[AdapterRows, dict[float, AdapterRows]] = WeakKeyDictionary()
        self._projections, self._num_layers = config.projections, config.num_layers
        self._vocab_size = config.vocab_size
        self._groups = lora_groups(config.projections)
        self._latents = {module for layer in self._groups for module, _, _ in layer[Group.KV_UP]}
        self._embedding, self._head = (self._projections.of_group(each) for each in (Group.EMBEDDING, Group.HEAD))
        self._inputs = self._projections.of_group(Group.INPUTS)
        rows = [self._projections.of_group(each) for each in (Group.EMBEDDING_ROWS, Group.HEAD_ROWS)]
        self._head_rows = rows[1]
        known = [each for each in rows if each is not None]
        self._trained = TrainedRows(known[0], known[1], config.hidden_size) if len(known) == len(rows) else None

    def set_step(
        self,
        adapters: Sequence[Adapter],
        lora_indices: Sequence[RowAdapters],
        lengths: Sequence[int],
        merged: Adapter | None = None,
    ) -> None:
        """Describe a step: row i has `lengths[i]` tokens and uses `adapters[lora_indices[i]]`, or the base model at -1.

        Neighbouring rows of the same slot, or of the same several, become one segment. merged: the adapter merged into
        the weights: it is subtracted from the rows of other adapters (neighbouring rows as one segment), and its own
        rows have no LoRA work in layers. The model's own modules are never merged.
        """
        self._logit_tokens = None, ()
        if self._is_last_step(adapters, lora_indices, lengths, merged):
            return  # most decode steps have the same segments as the step before
        self._late.clear()
        self._patience = self.max_stall
        self._lora_indices, self._model_indices, self._mixture_indices = [], [], []
        self.segments, self.model_segments, self.mixture_segments = Segments(), Segments(), Segments()
        if merged is not None:
            own = adapters.index(merged) if merged in adapters else None
            self._subtract(merged, [lora_index == own for lora_index in lora_indices], lengths)
        rows = [[] if adapter is merged else self.rows_of(adapter) for adapter in adapters]
        of_model = [self.model_rows_of(adapter) for adapter in adapters]
        of_mixture = [self.mixture_rows_of(adapter) for adapter in adapters]
        for used, begin, end in _runs(lora_indices, lengths):
            for lora_index, factor in _factors(used):
                self._add(begin, end, lora_index, factor, rows[lora_index])
                self._add_of_model(begin, end, lora_index, factor, of_model[lora_index])
                self._add_of_mixture(begin, end, lora_index, factor, of_mixture[lora_index])
        if self._latents:
            self.changes_latents = self._may_change_latents()

    def _may_change_latents(self) -> bool:
        of_latents = (each.a_offset[module] >= 0 for each in self.segments.rows for module in self._latents)
        return bool(self.segments.vectors) or any(of_latents)

    def _is_last_step(
        self,
        adapters: Sequence[Adapter],
        lora_indices: Sequence[RowAdapters],
        lengths: Sequence[int],
        merged: Adapter | None,
    ) -> bool:
        """True if the step is described already; otherwise it is remembered, unless adapters are still coming."""
        transfers = [adapter.transfer for adapter in adapters]
        self._coming = {lora_index: transfer for lora_index, transfer in enumerate(transfers) if transfer is not None}
        if self._coming:
            self._step = None
            return False
        pages = [adapter.pages for adapter in adapters]
        before = self._step
        self._step = list(adapters), pages, list(lora_indices), list(lengths), merged and (merged, merged.pages)
        return self._step == before

    def _subtract(self, merged: Adapter, is_own: Sequence[bool], lengths: Sequence[int]) -> None:
        """Take the adapter in the weights off all rows but its own."""
        for own, begin, end in _runs(is_own, lengths):
            if not own:
                self._add(begin, end, BASE_LORA_INDEX, -1.0, self.rows_of(merged))

    def _add(self, begin: int, end: int, lora_index: int, factor: float, parts: Sequence[AdapterRows]) -> None:
        """Add a segment for each part of an adapter, times `factor`."""
        transfer = self._coming.get(lora_index)
        address = 0 if transfer is None else transfer.address
        for part in parts:
            self.segments.add(begin, end, part if factor == 1.0 else self._times(part, factor), address)
            self._lora_indices.append(lora_index)

    def _add_of_model(self, begin: int, end: int, lora_index: int, factor: float, parts: Sequence[AdapterRows]) -> None:
        """As `_add`, of the model's modules."""
        transfer = self._coming.get(lora_index)
        address = 0 if transfer is None else transfer.address
        for part in parts:
            self.model_segments.add(begin, end, part if factor == 1.0 else self._times(part, factor), address)
            self._model_indices.append(lora_index)

    def _add_of_mixture(
        self, begin: int, end: int, lora_index: int, factor: float, parts: Sequence[AdapterRows]
    ) -> None:
        """As `_add`, of mixtures of experts."""
        transfer = self._coming.get(lora_index)
        address = 0 if transfer is None else transfer.address
        for part in parts:
            self.mixture_segments.add(begin, end, part if factor == 1.0 else self._times(part, factor), address)
            self._mixture_indices.append(lora_index)

    def wait(self, layer: int) -> None:
        """Wait for `layer` of adapters that are still being loaded; adapters that miss the deadline are late."""
        for lora_index, transfer in self._coming.items():
            if lora_index in self._late or not self._is_awaited(lora_index, transfer, layer):
                continue
            began = time.monotonic()
            if not transfer.wait_layer(layer, max(0.0, self._patience)):
                self._give_up(lora_index)
            self._patience -= time.monotonic() - began

    def _give_up(self, lora_index: int) -> None:
        """Leave a late adapter out of the step: what lies in its pages may be NaN for all."""
        self._late.add(lora_index)
        late = {index for index, of in enumerate(self._lora_indices) if of == lora_index}
        self.segments = self.segments.without(late)
        self._lora_indices = [of for of in self._lora_indices if of != lora_index]
        late = {index for index, of in enumerate(self._model_indices) if of == lora_index}
        self.model_segments = self.model_segments.without(late)
        self._model_indices = [of for of in self._model_indices if of != lora_index]
        late = {index for index, of in enumerate(self._mixture_indices) if of == lora_index}
        self.mixture_segments = self.mixture_segments.without(late)
        self._mixture_indices = [of for of in self._mixture_indices if of != lora_index]

    def _is_awaited(self, lora_index: int, transfer: Transfer, layer: int) -> bool:
        """False if a step needs nothing of an adapter's layer, because other processes compute all of it."""
        return not self._is_offloaded(lora_index, transfer, layer) or self._has_model_rows(lora_index, layer)

    def _has_model_rows(self, lora_index: int, layer: int) -> bool:
        """True if an adapter has rank-rows of the model's modules beside a layer."""
        rows = zip(self.model_segments.rows, self._model_indices, strict=True)
        return any(of == lora_index and each.first_elem[layer] >= 0 for each, of in rows)

    def _is_offloaded(self, lora_index: int, transfer: Transfer, layer: int) -> bool:
        """True if other processes compute a layer of an adapter that is still being loaded."""
        return False

    def late_indices(self) -> set[int]:
        """Slots of adapters that missed the deadline: their rows are void."""
        found = self._late.union(self._lora_indices[index] for index in self.segments.late)
        found.update(self._model_indices[index] for index in self.model_segments.late)
        return found.union(self._mixture_indices[index] for index in self.mixture_segments.late)

    def late_requests(self, rows: Sequence[ScheduledSequence]) -> list[str]:
        """Return the requests with void rows: their adapter missed the deadline."""
        if not (self._late or self.segments.late or self.model_segments.late or self.mixture_segments.late):
            return []
        late = self.late_indices()
        return [row.request_id for row in rows if row.lora_index in late]

    def offload(self, group: int, x: torch.Tensor, layer: int) -> None:
        """Torch's operators lend nothing."""

    def add(self, group: int, y: torch.Tensor, x: torch.Tensor, layer: int) -> None:
        modules = self._groups[layer][group]
        has_vectors = bool(self.segments.vectors)
        if has_vectors:
            scale_outputs(y, self.arena, self.segments, layer, modules, undo=True)
        sgmv(y, x, self.arena, self.segments, layer, modules=modules)
        if has_vectors:
            scale_outputs(y, self.arena, self.segments, layer, modules)

    def absorbed(self, layer: int) -> AbsorbedLora | None:
        """See `StepLora.absorbed`."""
        ((module, _, width),) = self._groups[layer][Group.KV_UP]
        return AbsorbedLora(self.arena, self.segments, layer, module, width) if self.changes_latents else None

    def mixture(self, layer: int) -> MixtureLora | None:
        """See `StepLora.mixture`."""
        return MixtureLora.of(self.arena, self.mixture_segments, layer, self._groups[layer])

    def shrink(self, group: int, x: torch.Tensor, layer: int) -> None:
        """Nothing is shared with a product on a CPU."""

    def embed(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """See `StepLora.embed`."""
        if self._embedding is not None and self.model_segments.rows:
            self.wait(0)
            if self._trained is not None and any(each.token_ids for each in self.model_segments.rows):
                self._trained.replace_embeddings(rows, token_ids, self.arena, self.model_segments)
            inputs, _ = self._projections.dims_of(self._embedding)
            add_embeddings(rows, token_ids, self.arena, self.model_segments, self._embedding, vocab=inputs)

    def add_inputs(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """See `StepLora.add_inputs`."""
        module = self._inputs
        if module is not None and any(rows.a_offset[module] >= 0 for rows in self.model_segments.rows):
            self.wait(0)
            sgmv(y, x, self.arena, self.model_segments, 0, modules=((module, 0, y.shape[1]),))

    def known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `StepLora.known`."""
        return token_ids.clamp(max=self._vocab_size - 1) if self.model_segments.rows else token_ids

    def added_logits(self, adapter: Adapter, states: torch.Tensor) -> torch.Tensor:
        """Logits `[rows, added]` float32 of the tokens that an adapter adds to the model's, before they are scaled or
        capped. states: `[rows, hidden]` float32.
        """
        assert self._trained is not None, "an adapter with added tokens has rows of the head"
        columns, parts = range(self._vocab_size, adapter.manifest.num_tokens), self.model_rows_of(adapter)
        return self._trained.added_logits(states, self.arena, parts, self._num_layers - 1, columns)

    def use_logits(self, sampled: Sequence[int], scored: Sequence[int]) -> None:
        """See `StepLora.use_logits`."""
        self._logit_tokens = sampled, scored

    def logits(self) -> HeadLora | None:
        """See `StepLora.logits`."""
        return self._head_lora(self._logit_tokens[0])

    def prompt_logits(self) -> HeadLora | None:
        """See `StepLora.prompt_logits`."""
        return self._head_lora(self._logit_tokens[1])

    def _head_lora(self, tokens: Sequence[int] | None) -> HeadLora | None:
        segments, head, own = self.model_segments, self._head, self._head_rows
        if not segments.rows or head is None or own is None:
            return None
        trained = self._trained if any(rows.a_offset[own] >= 0 for rows in segments.rows) else None
        if trained is None and not any(rows.a_offset[head] >= 0 for rows in segments.rows):
            return None
        if tokens is not None:
            segments = segments.of_rows(tokens)
        return HeadLora(self.arena, segments, self._num_layers - 1, head, trained)

    def modules(self, layer: int, group: int) -> list[int]:
        """The modules of a layer's group of projections."""
        return [module for module, _, _ in self._groups[layer][group]]

    def columns(self, layer: int, group: int) -> tuple[tuple[int, int, int], ...]:
        """(module id, first column, width) of a layer's group of projections."""
        return self._groups[layer][group]

    def _times(self, rows: AdapterRows, factor: float) -> AdapterRows:
        """Return the same rows with another scale, cached."""
        made = self._scaled.setdefault(rows, {})
        if factor not in made:
            made[factor] = replace(rows, scale=factor * rows.scale)
        return made[factor]

    def rows_of(self, adapter: Adapter) -> list[AdapterRows]:
        """Return the rows of the adapter's parts in layers, outside mixtures of experts, and its vectors, in its
        current pages, cached per page list.
        """
        return self._resident(adapter).in_layers

    def model_rows_of(self, adapter: Adapter) -> list[AdapterRows]:
        """As `rows_of`, of its parts that change the model's own modules."""
        return self._resident(adapter).of_model

    def mixture_rows_of(self, adapter: Adapter) -> tuple[AdapterRows, ...]:
        """As `rows_of`, of its parts that change mixtures of experts."""
        return self._resident(adapter).of_mixture

    def _resident(self, adapter: Adapter) -> _Resident:
        found: _Resident | None = self._rows.get(adapter)
        if found is None or found.pages is not adapter.pages:
            in_layers, of_model, of_mixture = list[AdapterRows](), list[AdapterRows](), list[AdapterRows]()
            for part, place in zip(adapter.manifest.parts, adapter.layout.parts, strict=True):
                its = self._projections[part.targets[0]]
                own = of_model if its.is_of_model else of_mixture if its.is_of_mixture else in_layers
                own.append(rows_in(part, place, adapter.pages))
            if (vectors := adapter.layout.vectors) is not None:
                in_layers.append(vectors_in(vectors, adapter.pages))
            found = self._rows[adapter] = _Resident(adapter.pages, in_layers, of_model, tuple(of_mixture))
        return found


def _factors(used: RowAdapters) -> Sequence[tuple[int, float]]:
    """The adapters that a row uses, and the factor of each."""
    factors = ((used, 1.0),) if isinstance(used, int) else used
    return [(lora_index, factor) for lora_index, factor in factors if lora_index != BASE_LORA_INDEX]


def _runs(keys: Sequence[T], lengths: Sequence[int]) -> Iterator[tuple[T, int, int]]:
    """Neighbouring rows with equal keys: the key, and the first and last token, exclusive; row i has `lengths[i]`."""
    begin = 0
    for key, group in itertools.groupby(zip(keys, lengths, strict=True), itemgetter(0)):
        end = begin + sum(length for _, length in group)
        yield key, begin, end
        begin = end


def rows_in(part: AdapterPart, place: PartLayout, pages: list[int]) -> AdapterRows:
    """A part's rows where the adapter has these pages."""
    slabs = place.slabs
    return AdapterRows(
        pages=pages,
        rank=part.rank,
        scale=part.scale,
        slab_elems=slabs.slab_elems,
        a_offset=slabs.a_offset,
        b_offset=slabs.b_offset,
        first_elem=place.first_elem,
        token_ids=part.token_ids,
        experts=part.experts,
    )


def vectors_in(place: VectorLayout, pages: list[int]) -> AdapterRows:
    """An adapter's vectors where it has these pages."""
    without = (-1,) * len(place.first_elem[0])
    return AdapterRows(
        pages=pages,
        rank=0,
        scale=1.0,
        slab_elems=0,
        a_offset=without,
        b_offset=without,
        first_elem=[begin if begin < end else -1 for begin, end in place.layer_elems],
        vectors=place.first_elem,
    )


def lora_groups(projections: Projections) -> list[dict[int, tuple[tuple[int, int, int], ...]]]:
    """By layer, then group: (module id, first column, width) of the projections, whose outputs are side by side."""
    groups = (*LAYER_GROUPS, *FURTHER_GROUPS, *MIXTURE_GROUPS)
    return [
        {int(group): projections.columns(layer, group) for group in groups} for layer in range(projections.num_layers)
    ]
