"""The adapters of a step on a CPU: the rows of each, as segments of the step's tokens.

Tests: tests/core/test_parity.py, tests/core/paths.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

from ....memory.adapters.adapter import Adapter
from ....memory.pages.adapter_layout import AdapterPart, PartLayout, VectorLayout
from ....memory.pages.projections import Projection, Projections, Role
from ....memory.transfers.transfer import Transfer
from ....ops.attention.latents import AbsorbedLora
from ....ops.lora.sgmv import AdapterRows, Segments, add_embeddings, sgmv
from ....ops.lora.trained_rows import TrainedRows
from ....ops.lora.vectors import scale_outputs
from ...requests.types import BASE_LORA_INDEX, ScheduledSequence
from ..moe.mixture_lora import MixtureLora, mixture_columns
from ..specs.config import ModelConfig
from .step_lora import PER_LAYER_GEMM, HeadLora

T = TypeVar("T")

#: Adapter of a row: its index, or several in the order in which they are added up, each with a factor of its
#: scale. ((3, 1.0), (0, -1.0)) is what adapter 3 adds beyond adapter 0.
RowAdapters = int | tuple[tuple[int, float], ...]


class LoraState:
    """Applies a step's adapters to a model; the segments' adapters are set once per step."""

    def __init__(self, config: ModelConfig, arena: torch.Tensor, max_stall: float = 0.0) -> None:
        """max_stall: seconds that a step may wait in all for adapters that are still coming."""
        self.arena = arena
        self.max_stall = max_stall
        projections = config.projections
        self.in_layers = AdaptedPart(projections, lambda it: not (it.is_of_model or it.is_of_mixture), vectors=True)
        """Parts in layers, outside mixtures of experts, and vectors."""
        self.of_model = AdaptedPart(projections, lambda it: it.is_of_model)
        """Parts that change the model's own modules; most steps have none."""
        self.of_mixtures = AdaptedPart(projections, lambda it: it.is_of_mixture)
        """Parts that change mixtures of experts."""
        self._parts = self.in_layers, self.of_model, self.of_mixtures
        self._coming: dict[int, Transfer] = {}  # by index
        self._late: set[int] = set()
        self._logit_tokens: tuple[Sequence[int] | None, Sequence[int]] = None, ()
        self._patience = 0.0  # seconds that the step may still wait
        self.changes_latents = False
        """True if the step's adapters may change keys and values of latents."""
        self._step: tuple[object, ...] | None = None  # what `segments` were made of
        self._projections, self._num_layers = projections, config.num_layers
        self._vocab_size = config.vocab_size
        layers = range(config.num_layers)
        self._gemms = [shape.modules for shape in projections.gemm_shapes]
        self._latents = [projections.columns(layer, Role.KV_UP) for layer in layers]
        self._mixture_columns = mixture_columns(projections)
        self._embedding, self._head = (self._projections.of_role(each) for each in (Role.EMBEDDING, Role.HEAD))
        self._per_layer = self._projections.of_role(Role.PER_LAYER)
        rows = [self._projections.of_role(each) for each in (Role.EMBEDDING_ROWS, Role.HEAD_ROWS)]
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

        Neighbouring rows of the same adapter, or of the same several, become one segment. merged: the adapter merged
        into the weights: it is subtracted from the rows of other adapters (neighbouring rows as one segment), and its
        own rows have no LoRA work in layers. The model's own modules are never merged.
        """
        self._logit_tokens = None, ()
        if self._is_last_step(adapters, lora_indices, lengths, merged):
            return  # most decode steps have the same segments as the step before
        self._late.clear()
        self._patience = self.max_stall
        for part in self._parts:
            part.clear()
        if merged is not None:
            own = adapters.index(merged) if merged in adapters else None
            self._subtract(merged, [lora_index == own for lora_index in lora_indices], lengths)
        self._add(adapters, lora_indices, lengths, merged)
        if self._latents:
            self.changes_latents = self._may_change_latents()

    def _add(
        self,
        adapters: Sequence[Adapter],
        lora_indices: Sequence[RowAdapters],
        lengths: Sequence[int],
        merged: Adapter | None,
    ) -> None:
        """Add the segments of all rows; a merged adapter has none in layers."""
        rows = [[part.rows_of(adapter) for part in self._parts] for adapter in adapters]
        if merged in adapters:
            rows[adapters.index(merged)][0] = []
        for used, begin, end in _runs(lora_indices, lengths):
            for lora_index, factor in _factors(used):
                address = self._address(lora_index)
                for part, own in zip(self._parts, rows[lora_index], strict=True):
                    part.add(begin, end, lora_index, own, factor, address)

    def _may_change_latents(self) -> bool:
        of_latents = (
            each.a_offset[module] >= 0
            for each in self.in_layers.segments.rows
            for own in self._latents
            for module, _, _ in own
        )
        return bool(self.in_layers.segments.vectors) or any(of_latents)

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
                self.in_layers.add(begin, end, BASE_LORA_INDEX, self.in_layers.rows_of(merged), -1.0)

    def _address(self, lora_index: int) -> int:
        """Where the count of an adapter's layers is that have arrived; 0 if it is not on its way."""
        transfer = self._coming.get(lora_index)
        return 0 if transfer is None else transfer.address

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
        for part in self._parts:
            part.leave_out(lora_index)

    def _is_awaited(self, lora_index: int, transfer: Transfer, layer: int) -> bool:
        """False if a step needs nothing of an adapter's layer, because offload workers compute all of it."""
        return not self._is_offloaded(lora_index, transfer, layer) or self._has_model_rows(lora_index, layer)

    def _has_model_rows(self, lora_index: int, layer: int) -> bool:
        """True if an adapter has rank-rows of the model's modules beside a layer."""
        rows = zip(self.of_model.segments.rows, self.of_model.lora_indices, strict=True)
        return any(of == lora_index and each.first_elem[layer] >= 0 for each, of in rows)

    def _is_offloaded(self, lora_index: int, transfer: Transfer, layer: int) -> bool:
        """True if offload workers compute a layer of an adapter that is still being loaded."""
        return False

    def late_indices(self) -> set[int]:
        """Indices of adapters that missed the deadline: their rows are void."""
        return self._late.union(*(part.late for part in self._parts))

    def late_requests(self, rows: Sequence[ScheduledSequence]) -> list[str]:
        """Return the requests with void rows: their adapter missed the deadline."""
        late = self.late_indices()
        return [row.request_id for row in rows if row.lora_index in late] if late else []

    def offload(self, gemm: int, x: torch.Tensor, layer: int) -> None:
        """Torch's operators lend nothing."""

    def add(self, gemm: int, y: torch.Tensor, x: torch.Tensor, layer: int) -> None:
        """See `StepLora.add`."""
        if gemm == PER_LAYER_GEMM:
            self._add_per_layer(y, x)
            return
        modules = self._gemms[gemm]
        has_vectors = bool(self.in_layers.segments.vectors)
        if has_vectors:
            scale_outputs(y, self.arena, self.in_layers.segments, layer, modules, undo=True)
        sgmv(y, x, self.arena, self.in_layers.segments, layer, modules=modules)
        if has_vectors:
            scale_outputs(y, self.arena, self.in_layers.segments, layer, modules)

    def _add_per_layer(self, y: torch.Tensor, x: torch.Tensor) -> None:
        module = self._per_layer
        if module is not None and any(rows.a_offset[module] >= 0 for rows in self.of_model.segments.rows):
            self.wait(0)
            sgmv(y, x, self.arena, self.of_model.segments, 0, modules=((module, 0, y.shape[1]),))

    def absorbed(self, layer: int) -> AbsorbedLora | None:
        """See `StepLora.absorbed`."""
        ((module, _, width),) = self._latents[layer]
        return AbsorbedLora(self.arena, self.in_layers.segments, layer, module, width) if self.changes_latents else None

    def mixture(self, layer: int) -> MixtureLora | None:
        """See `StepLora.mixture`."""
        return MixtureLora.of(self.arena, self.of_mixtures.segments, layer, self._mixture_columns[layer])

    def shrink(self, gemm: int, x: torch.Tensor, layer: int) -> None:
        """Nothing is shared with a product on a CPU."""

    def embed(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """See `StepLora.embed`."""
        if self._embedding is not None and self.of_model.segments.rows:
            self.wait(0)
            if self._trained is not None and any(each.token_ids for each in self.of_model.segments.rows):
                self._trained.replace_embeddings(rows, token_ids, self.arena, self.of_model.segments)
            inputs, _ = self._projections.dims_of(self._embedding)
            add_embeddings(rows, token_ids, self.arena, self.of_model.segments, self._embedding, vocab=inputs)

    def known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `StepLora.known`."""
        return token_ids.clamp(max=self._vocab_size - 1) if self.of_model.segments.rows else token_ids

    def added_logits(self, adapter: Adapter, states: torch.Tensor) -> torch.Tensor:
        """Logits `[rows, added]` float32 of the tokens that an adapter adds to the model's, before they are scaled or
        capped. states: `[rows, hidden]` float32.
        """
        assert self._trained is not None, "an adapter with added tokens has rows of the head"
        columns, parts = range(self._vocab_size, adapter.manifest.num_tokens), self.of_model.rows_of(adapter)
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
        segments, head, own = self.of_model.segments, self._head, self._head_rows
        if not segments.rows or head is None or own is None:
            return None
        trained = self._trained if any(rows.a_offset[own] >= 0 for rows in segments.rows) else None
        if trained is None and not any(rows.a_offset[head] >= 0 for rows in segments.rows):
            return None
        if tokens is not None:
            segments = segments.of_rows(tokens)
        return HeadLora(self.arena, segments, self._num_layers - 1, head, trained)

    def modules(self, layer: int, product: str) -> list[int]:
        """The modules of one of a layer's products."""
        return [module for module, _, _ in self.columns(layer, product)]

    def columns(self, layer: int, product: str) -> tuple[tuple[int, int, int], ...]:
        """See `Projections.columns`."""
        return self._projections.columns(layer, product)

    def merged(self, layer: int) -> tuple[str, ...]:
        """See `Projections.merged`."""
        return self._projections.merged(layer)


class AdaptedPart:
    """What a step's adapters change of one part of a model: segments of the step's tokens, and whose each is."""

    def __init__(self, projections: Projections, has: Callable[[Projection], bool], *, vectors: bool = False) -> None:
        """has: which projections are of the part. vectors: adapters' vectors are, too."""
        self._projections, self._has, self._has_vectors = projections, has, vectors
        self.segments = Segments()
        self.lora_indices: list[int] = []
        """The index of each segment's adapter."""
        self._rows: WeakKeyDictionary[Adapter, tuple[list[int], list[AdapterRows]]] = WeakKeyDictionary()
        self._scaled: WeakKeyDictionary[AdapterRows, dict[float, AdapterRows]] = WeakKeyDictionary()

    def clear(self) -> None:
        """Begin another step."""
        self.segments, self.lora_indices = Segments(), []

    def add(
        self, begin: int, end: int, lora_index: int, rows: Sequence[AdapterRows], factor: float, address: int = 0
    ) -> None:
        """Add a segment for each of an adapter's rows, times `factor`. address: see `Segments.ready`."""
        for each in rows:
            self.segments.add(begin, end, each if factor == 1.0 else self._times(each, factor), address)
            self.lora_indices.append(lora_index)

    def leave_out(self, lora_index: int) -> None:
        """Drop an adapter's segments."""
        self.segments = self.segments.without({at for at, of in enumerate(self.lora_indices) if of == lora_index})
        self.lora_indices = [of for of in self.lora_indices if of != lora_index]

    @property
    def late(self) -> list[int]:
        """Indices of adapters that the step waited for in vain."""
        return [self.lora_indices[index] for index in self.segments.late]

    def rows_of(self, adapter: Adapter) -> list[AdapterRows]:
        """The rows of an adapter's own parts that are of this one, in its current pages, cached per page list."""
        pages, rows = self._rows.get(adapter, (None, []))
        if pages is not adapter.pages:
            pairs = zip(adapter.manifest.parts, adapter.layout.parts, strict=True)
            own = ((part, layout) for part, layout in pairs if self._has(self._projections[part.targets[0]]))
            rows = [rows_in(part, layout, adapter.pages) for part, layout in own]
            if self._has_vectors and (vectors := adapter.layout.vectors) is not None:
                rows.append(vectors_in(vectors, adapter.pages))
            self._rows[adapter] = adapter.pages, rows
        return rows

    def _times(self, rows: AdapterRows, factor: float) -> AdapterRows:
        """The same rows with another scale, cached."""
        made = self._scaled.setdefault(rows, {})
        if factor not in made:
            made[factor] = replace(rows, scale=factor * rows.scale)
        return made[factor]


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


def rows_in(part: AdapterPart, layout: PartLayout, pages: list[int]) -> AdapterRows:
    """A part's rows where the adapter has these pages."""
    slabs = layout.slabs
    return AdapterRows(
        pages=pages,
        rank=part.rank,
        scale=part.scale,
        slab_elems=slabs.slab_elems,
        a_offset=slabs.a_offset,
        b_offset=slabs.b_offset,
        first_elem=layout.first_elem,
        token_ids=part.token_ids,
        experts=part.experts,
    )


def vectors_in(layout: VectorLayout, pages: list[int]) -> AdapterRows:
    """An adapter's vectors where it has these pages."""
    without = (-1,) * len(layout.first_elem[0])
    return AdapterRows(
        pages=pages,
        rank=0,
        scale=1.0,
        slab_elems=0,
        a_offset=without,
        b_offset=without,
        first_elem=[begin if begin < end else -1 for begin, end in layout.layer_elems],
        vectors=layout.first_elem,
    )
