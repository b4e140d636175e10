"""A step's inputs, passed down `forward`: its tensors, and its adapters in the form that the LoRA operators take."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import itemgetter
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ...graphs.buffers import split_columns
from ...memory.adapters.adapter import Adapter
from ...memory.pages.adapter_layout import AdapterPart, PartLayout, VectorLayout
from ...memory.pages.layout import PageLayout
from ...memory.pages.projections import LAYER_GROUPS, MIXTURE_GROUPS, Group, Projections
from ...memory.transfers.transfer import Transfer
from ...ops.gated_delta import DeltaState
from ...ops.sgmv import AdapterRows, Segments, add_embeddings, sgmv
from ...ops.trained_rows import TrainedRows
from ...ops.vectors import scale_outputs
from ..requests.types import BASE_LORA_INDEX, ScheduledSequence
from .config import ModelConfig
from .mixture_lora import MixtureLora
from .sampler import following_tokens

if TYPE_CHECKING:
    from ...ops.sgmv_triton import Shrunk
    from .paged_states import PagedStates

T = TypeVar("T")

#: Adapter of a row: its slot, or several in the order in which they are added up, each with a factor of its
#: scale. ((3, 1.0), (0, -1.0)) is what slot 3 adds beyond slot 0.
RowAdapters = int | tuple[tuple[int, float], ...]

#: Groups of projections that share an input.
QKV, ATTN_O, GATE_UP, DOWN = map(int, LAYER_GROUPS)

#: The page list that rows were made for, and the rows of each part: of those in layers, and of the model's modules.
_Resident = tuple[list[int], list[AdapterRows], list[AdapterRows]]


class StepLora(Protocol):
    """Adds LoRA products of x `[tokens, in]` to packed outputs y `[tokens, out]` in a forward pass."""

    def wait(self, layer: int, /) -> None:
        """Wait for `layer` of adapters that are still being loaded; called before the layer is computed."""

    def offload(self, group: int, x: torch.Tensor, layer: int, /) -> None:
        """Give other processes what they compute of a group's products; called before the base product."""

    def add(self, group: int, y: torch.Tensor, x: torch.Tensor, layer: int, /) -> None:
        """Add the adapters' products of a group of projections with a common input: QKV, ATTN_O, GATE_UP or DOWN, or
        one of a mixture of experts.
        """

    def shrink(self, group: int, x: torch.Tensor, layer: int, /) -> Shrunk | None:
        """Multiply x with the adapters' A, as the first half of `add`, where a product can take the other half in its
        launch; None where `add` must do both.
        """

    def mixture(self, layer: int, /) -> MixtureLora | None:
        """What adapters add in a layer's mixture of experts; None if they add nothing."""

    def embed(self, rows: torch.Tensor, token_ids: torch.Tensor, /) -> None:
        """Add the adapters' terms to embeddings `[tokens, hidden]`; waits for the adapters' first layer."""

    def known(self, token_ids: torch.Tensor, /) -> torch.Tensor:
        """The tokens, with any of the model's in place of those that an adapter adds: `embed` writes their rows."""
        ...

    def use_logits(self, sampled: Sequence[int], scored: Sequence[int], /) -> None:
        """Tell which of the step's tokens, in rising order, have logits, and prompt-logprob logits. Without this call,
        every token has logits.
        """

    def logits(self, /) -> HeadLora | None:
        """What adapters add to the step's logits; None if they add nothing."""

    def prompt_logits(self, /) -> HeadLora | None:
        """What adapters add to the logits of the step's prompt-logprob tokens."""


class HeadLora:
    """Adds LoRA products to logits, and replaces those of tokens with rows of their own. segments: of the rows that
    have logits.
    """

    def __init__(
        self, arena: torch.Tensor, segments: Segments, layer: int, module: int, trained: TrainedRows | None
    ) -> None:
        """trained: None if no segment has rows of its own."""
        self._arena, self._segments, self._layer, self._module = arena, segments, layer, module
        self._trained = trained

    def add(self, logits: torch.Tensor, x: torch.Tensor, first: int, begin: int = 0) -> None:
        """Add the terms of x `[rows, hidden]` to logits `[rows, columns]` float32, before they are scaled or capped; a
        rank has columns of its own. first: the token of the first column. begin: the first of these rows.
        """
        segments = self._segments
        if begin or len(logits) < max(segments.end, default=0):
            segments = segments.within(begin, begin + len(logits))
        if self._trained is not None:
            self._trained.replace_logits(logits, x, self._arena, segments, self._layer, first)
        modules = ((self._module, 0, logits.shape[1]),)
        sgmv(logits, x.float(), self._arena, segments, self._layer, modules)


class LoraState:
    """Applies a step's adapters to a model; the segments' adapters are set once per step.

    segments: of the parts in layers. model_segments: of the parts that change the token embeddings or the output
    projection; most steps have none.
    """

    def __init__(self, config: ModelConfig, arena: torch.Tensor, max_stall: float = 0.0) -> None:
        """max_stall: seconds that a step may wait in all for adapters that are still coming."""
        self.arena = arena
        self.max_stall = max_stall
        self.segments, self.model_segments = Segments(), Segments()
        self._coming: dict[int, Transfer] = {}  # by slot
        self._late: set[int] = set()
        self._lora_indices: list[int] = []  # of each segment
        self._model_indices: list[int] = []  # of each of the model's
        self._logit_tokens: tuple[Sequence[int] | None, Sequence[int]] = None, ()
        self._patience = 0.0  # seconds that the step may still wait
        self._step: tuple[object, ...] | None = None  # what `segments` were made of
        self._rows: WeakKeyDictionary[Adapter, _Resident] = WeakKeyDictionary()
        self._scaled: WeakKeyDictionary[AdapterRows, dict[float, AdapterRows]] = WeakKeyDictionary()
        self._projections, self._num_layers = config.projections, config.num_layers
        self._vocab_size = config.vocab_size
        self._groups = lora_groups(config.projections)
        self._embedding, self._head = (self._projections.of_group(each) for each in (Group.EMBEDDING, Group.HEAD))
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
        self._lora_indices, self._model_indices = [], []
        self.segments, self.model_segments = Segments(), Segments()
        if merged is not None:
            own = adapters.index(merged) if merged in adapters else None
            self._subtract(merged, [lora_index == own for lora_index in lora_indices], lengths)
        rows = [[] if adapter is merged else self.rows_of(adapter) for adapter in adapters]
        of_model = [self.model_rows_of(adapter) for adapter in adapters]
        for used, begin, end in _runs(lora_indices, lengths):
            for lora_index, factor in _factors(used):
                self._add(begin, end, lora_index, factor, rows[lora_index])
                self._add_of_model(begin, end, lora_index, factor, of_model[lora_index])

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
        return found.union(self._model_indices[index] for index in self.model_segments.late)

    def late_requests(self, rows: Sequence[ScheduledSequence]) -> list[str]:
        """Return the requests with void rows: their adapter missed the deadline."""
        if not (self._late or self.segments.late or self.model_segments.late):
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
        sgmv(y, x, self.arena, self.segments, layer, modules)
        if has_vectors:
            scale_outputs(y, self.arena, self.segments, layer, modules)

    def mixture(self, layer: int) -> MixtureLora | None:
        """See `StepLora.mixture`."""
        return MixtureLora.of(self.arena, self.segments, layer, self._groups[layer])

    def shrink(self, group: int, x: torch.Tensor, layer: int) -> None:
        """Nothing is shared with a product on a CPU."""

    def embed(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """See `StepLora.embed`."""
        if self._embedding is not None and self.model_segments.rows:
            self.wait(0)
            if self._trained is not None and any(each.token_ids for each in self.model_segments.rows):
                self._trained.replace_embeddings(rows, token_ids, self.arena, self.model_segments)
            inputs, _ = self._projections.dims_of(self._embedding)
            add_embeddings(rows, token_ids, self.arena, self.model_segments, self._embedding, inputs)

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
        """Return the rows of the adapter's parts in layers, and its vectors, in its current pages, cached per page
        list.
        """
        return self._resident(adapter)[1]

    def model_rows_of(self, adapter: Adapter) -> list[AdapterRows]:
        """As `rows_of`, of its parts that change the model's own modules."""
        return self._resident(adapter)[2]

    def _resident(self, adapter: Adapter) -> _Resident:
        found: _Resident | None = self._rows.get(adapter)
        if found is None or found[0] is not adapter.pages:
            found = (adapter.pages, list[AdapterRows](), list[AdapterRows]())
            in_layers, of_model = found[1:]
            for part, place in zip(adapter.manifest.parts, adapter.layout.parts, strict=True):
                own = of_model if self._projections[part.targets[0]].is_of_model else in_layers
                own.append(rows_in(part, place, adapter.pages))
            if (vectors := adapter.layout.vectors) is not None:
                in_layers.append(vectors_in(vectors, adapter.pages))
            self._rows[adapter] = found
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
    groups = (*LAYER_GROUPS, *MIXTURE_GROUPS)
    return [
        {int(group): projections.columns(layer, group) for group in groups} for layer in range(projections.num_layers)
    ]


class RowPlan(Protocol):
    """A step's rows as a model's attention takes them: `Attention`, or `NativeRows`."""

    def plan(self, qo_indptr: Sequence[int], page_table: torch.Tensor, kv_lens: Sequence[int]) -> None: ...


P = TypeVar("P", bound=RowPlan, covariant=True)
L = TypeVar("L", bound=StepLora, covariant=True)


class GemmBackend(StrEnum):
    """Multiplier of rows with weights.

    LIBRARY: cuBLAS on a GPU. SMALL: our kernel, for at most `small_gemm_schedule.MAX_ROWS` rows in 16 bits, with the
    activation behind the product where there is one. EXPANDED: as SMALL, for at most MAX_EXPANDED_ROWS rows, and
    adapters are expanded in the same launch, so that the activation stays in it.
    """

    LIBRARY = "library"
    SMALL = "small"
    EXPANDED = "expanded"


#: GEMM backends of a step's products: of each group of projections in a layer (`QKV`, …), and behind them of the
#: logits.
GemmBackends = tuple[GemmBackend, ...]

BY_LIBRARY: GemmBackends = (GemmBackend.LIBRARY,) * 5


class StepStates(Protocol):
    """The states of a step's sequences in layers of Gated DeltaNet."""

    @property
    def qo_indptr(self) -> Sequence[int]:
        """Sequence i has the tokens `qo_indptr[i]` … `qo_indptr[i + 1]`-1, in the batch's order."""
        ...

    def of(self, layer: int, /) -> DeltaState:
        """The states before the step, zeros where a sequence begins. layer: its index in the model.

        The layer changes them in place and then hands them to `write`.
        """
        ...

    def write(self, layer: int, state: DeltaState, /) -> None:
        """Keep the states after the step."""
        ...


@dataclass(slots=True)
class StepBatch(Generic[P, L]):
    """Inputs of a forward pass, with attention and adapters in the form that the model takes.

    token_ids, positions, offset: `[tokens]` int64. page: `[page groups, tokens]` int64; (page, offset) is where a
    token's KV is written.
    logit_tokens: `[logits]` int64, indices of the tokens to compute logits for; None: every token.
    kept_tokens: `[kept]` int64, indices of the tokens whose hidden states are kept after the step: first those of
    prompt logprobs, whose logits are then computed in slices, then pooled ones. lora: None when no row uses an adapter.
    merged: use the shadow weights, with an adapter merged into them. backends: backend of each product; other than the
    library only for few tokens on a GPU. states: None for a model without Gated DeltaNet.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    offset: torch.Tensor
    page: torch.Tensor
    attention: P
    lora: L | None
    logit_tokens: torch.Tensor | None = None
    kept_tokens: torch.Tensor | None = None
    merged: bool = False
    backends: GemmBackends = BY_LIBRARY
    states: StepStates | None = None


def column_width(tokens: int) -> int:
    """Elements of one of a batch's columns where they lie in static buffers one behind the other: each begins on 16
    bytes, as kernels are compiled for that.
    """
    return -(-tokens // 2) * 2


def _kept_tokens(rows: Sequence[ScheduledSequence], begins: Sequence[int]) -> tuple[list[int], list[int]]:
    """Tokens of prompt log-probabilities, and pooled ones: see `StepBatch.kept_tokens`. begins: index of each row's
    first token.
    """
    scored, pooled = list[int](), list[int]()
    for row, begin in zip(rows, begins, strict=False):
        if row.wants_prompt_logprobs:
            scored += range(begin, begin + len(following_tokens(row)))
        pooled += [begin + index for index in row.pooled]
    return scored, pooled


def _logit_tokens(rows: Sequence[ScheduledSequence], begins: Sequence[int]) -> list[int]:
    """Tokens with logits: each row's last known one, and its drafts. begins: as in `_kept_tokens`, and the end."""
    ends = [end - 1 for end in begins[1:]]
    if not any(row.drafts for row in rows):
        return ends
    return [token for row, end in zip(rows, ends, strict=True) for token in range(end - row.drafts, end + 1)]


def _tell_logits(lora: StepLora | None, sampled: Sequence[int], scored: Sequence[int]) -> None:
    if lora is not None:
        lora.use_logits(sampled, scored)


def ragged_batch(
    rows: list[ScheduledSequence],
    layout: PageLayout,
    dummy_page: int,
    attention: P,
    lora: L | None,
    merged: bool = False,
    states: PagedStates | None = None,
) -> StepBatch[P, L]:
    """The unpadded batch of a step that holds prefill chunks; plans `attention` for it."""
    token_ids, positions, qo_indptr = [], [], [0]
    block_tokens, groups = layout.block_tokens, layout.pages_per_block
    page: list[list[int]] = [[] for _ in range(groups)]
    for row in rows:
        token_ids += row.tokens
        span = range(row.start, row.kv_len)
        positions += span
        for group, column in enumerate(page):
            column += [row.pages[position // block_tokens * groups + group] for position in span]
        qo_indptr.append(len(token_ids))
    prompt_tokens, pooled_tokens = _kept_tokens(rows, qo_indptr)
    kept, logit_tokens = prompt_tokens + pooled_tokens, _logit_tokens(rows, qo_indptr)
    _tell_logits(lora, logit_tokens, prompt_tokens)
    offset = [position % block_tokens for position in positions]
    columns = torch.tensor((token_ids, positions, offset, *page), dtype=torch.long)
    table = np.full((len(rows), max(len(row.pages) for row in rows)), dummy_page)  # mostly padding beside a long row
    for row, pages in zip(rows, table, strict=True):
        pages[: len(row.pages)] = row.pages
    if states is not None:
        states.set_step(rows, qo_indptr)
    attention.plan(qo_indptr, torch.from_numpy(table), [row.kv_len for row in rows])
    return StepBatch(
        *split_columns(columns),
        attention=attention,
        lora=lora,
        logit_tokens=torch.tensor(logit_tokens, dtype=torch.long),
        kept_tokens=torch.tensor(kept, dtype=torch.long) if kept else None,
        merged=merged,
        states=states,
    )
