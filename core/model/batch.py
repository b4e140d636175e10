"""A step's inputs, passed down `forward`: its tensors, attention, adapters and states.

Tests: tests/core/model/program/test_native_decoder.py, tests/core/executors/test_cuda_interpreted.py
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from ...graphs.buffers import split_columns
from ...memory.pages.layout import PageLayout
from ...ops.attention.blocks import BlockSpans
from ...ops.mixers.recurrent import RecurrentWeights
from ...ops.ranks.ranks import Collectives
from ..requests.axis_positions import axis_positions
from ..requests.blocks import spans_of
from ..requests.types import ScheduledSequence
from .lora.step_lora import StepLora
from .sampler import following_tokens

T = TypeVar("T")


class RowPlan(Protocol):
    """A step's rows as a model's attention takes them: `Attention`, or `NativeRows`."""

    def plan(
        self,
        qo_indptr: Sequence[int],
        page_table: torch.Tensor,
        kv_lens: Sequence[int],
        *,
        blocks: BlockSpans | None = None,
    ) -> None: ...


P = TypeVar("P", bound=RowPlan, covariant=True)
L = TypeVar("L", bound=StepLora, covariant=True)


class GemmBackend(StrEnum):
    """Multiplier of rows with weights.

    LIBRARY: cuBLAS on a GPU. SMALL: our kernel, for at most `small_gemm_schedule.MAX_ROWS` rows in 16 bits, with the
    activation behind the product where there is one; for a mixture's experts, of any rows, the activation in the launch
    of gate and up, and no sort of few rows. EXPANDED: as SMALL, for at most MAX_EXPANDED_ROWS rows, and
    adapters are expanded in the same launch, so that the activation stays in it. SPLIT: our kernel in which programs
    share the inputs of the same columns, for plain weights and the rows and shapes of `split_gemm_schedule.is_split`.
    SWAPPED: our kernel for narrow weights and any number of rows, `swapped_gemm_triton`; for experts, as SMALL, with
    operands swapped. WIDE: for experts in steps of more than `expert_tiles_schedule.FEW_ROWS` rows: as SMALL, or as
    SWAPPED if their weights are narrow, but tiles of 64 rows have twice as many columns.
    """

    LIBRARY = "library"
    SMALL = "small"
    EXPANDED = "expanded"
    SPLIT = "split"
    SWAPPED = "swapped"
    WIDE = "wide"


class GemmKind(NamedTuple):
    """GEMMs for which one backend is chosen: of weights of one shape and storage, with the same computed with them."""

    outputs: int
    inputs: int

    form: str
    """The weight's dtype, or how a narrow one is stored."""

    biased: bool = False

    silu: bool = False
    """`silu(gate) · up` follows."""

    is_head: bool = False
    """It gives the logits."""

    experts: int = 0
    """Number of experts, if it is the GEMM of a mixture's gate and up; 0: it has one matrix."""

    is_narrow: bool = False
    """The weight is a `NarrowWeight`."""

    is_float4: bool = False
    """It is in MXFP4, which SMALL multiplies of experts alone."""


#: GEMM backends of a step: of each kind of GEMM that the library does not compute.
GemmBackends = Mapping[GemmKind, GemmBackend]

BY_LIBRARY: GemmBackends = MappingProxyType({})


class RowBackends:
    """GEMM backends of prompts, and of decode steps with more rows than the kernels for few take, by their rows."""

    def __init__(
        self, by_rows: Mapping[int, GemmBackends] = MappingProxyType({}), always: GemmBackends = BY_LIBRARY
    ) -> None:
        """by_rows: for steps of up to so many rows. Larger steps have those of the largest. always: for all steps."""
        self._by_rows = {size: {**always, **chosen} for size, chosen in by_rows.items()}
        self._always = always
        self._sizes = sorted(self._by_rows)

    def of(self, rows: int) -> GemmBackends:
        """The backends of a step of so many rows."""
        if not self._sizes:
            return self._always
        return self._by_rows[self._sizes[min(bisect_left(self._sizes, rows), len(self._sizes) - 1)]]


class StepStates(Protocol):
    """The states of a step's sequences in layers with a recurrent mixer."""

    def mix(
        self, layer: int, rows: torch.Tensor, weights: RecurrentWeights, ranks: Collectives | None, /
    ) -> torch.Tensor:
        """Compute a layer between its projections, as `RecurrentWeights.mix` does, and let the sequences' states go on.

        layer: its index in the model. ranks: that have shares of the same layer.
        """
        ...


class StatesOfSteps(StepStates, Protocol):
    """States that serve one step after another."""

    def set_step(self, sequences: Sequence[ScheduledSequence], qo_indptr: Sequence[int], /) -> None:
        """Begin a step: see `PagedStates.set_step`."""
        ...


class MediaRows(NamedTuple):
    """Rows of images that a step has in the place of tokens' embeddings."""

    places: torch.Tensor
    """`[rows]` int64: the tokens' indices in the step."""
    rows: torch.Tensor
    """`[rows, parts · hidden]`: what takes an embedding's place, then what `AddMedia` adds behind layers."""

    def part(self, index: int, hidden: int) -> torch.Tensor:
        """One part of the rows, `[rows, hidden]`."""
        return self.rows[:, index * hidden : (index + 1) * hidden]


class AxisPositions(NamedTuple):
    """Tokens whose positions differ between axes."""

    places: torch.Tensor
    """`[tokens]` int64: their indices in the step."""
    positions: torch.Tensor
    """`[3, tokens]` int64."""


@dataclass(slots=True)
class StepBatch(Generic[P, L]):
    """Inputs of a forward pass, with attention and adapters in the form that the model takes.

    token_ids, positions, offset: `[tokens]` int64. page: `[page groups, tokens]` int64; (page, offset) is where a
    token's KV is written. positions: by which heads are rotated.
    logit_tokens: `[logits]` int64, indices of the tokens to compute logits for; None: every token.
    kept_tokens: `[kept]` int64, indices of the tokens whose hidden states are kept after the step: first those of
    prompt logprobs, whose logits are then computed in slices, then pooled ones. lora: None when no row uses an adapter.
    merged: use the shadow weights, with an adapter merged into them. backends: of GEMMs that others than the
    library compute, for few tokens on a GPU. states: None for a model without recurrent mixers.
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
    backends: GemmBackends = field(default_factory=lambda: BY_LIBRARY)
    states: StepStates | None = None
    media: MediaRows | None = None
    """None: no token stands for a row of an image."""
    axes: AxisPositions | None = None
    """None: each token has one position on all axes."""
    image_tokens: torch.Tensor | None = None
    """`[of images]` int64: indices of the tokens that experts of images take, in rising order; None: there are none."""

    def look_up(self, token: int | None) -> None:
        """Have this token stand at rows of images, whose embeddings these are; None: the placeholder stays."""
        if self.media is not None and token is not None:
            self.token_ids[self.media.places] = token


def media_rows(rows: Sequence[ScheduledSequence], begins: Sequence[int]) -> MediaRows | None:
    """The rows of images at the positions that sequences compute. begins: index of each one's first token."""
    places, found = list[int](), list[torch.Tensor]()
    for sequence, begin in zip(rows, begins, strict=False):
        for item, encoded in zip(sequence.media, sequence.media_rows, strict=True):
            for position, row, count in item.places(sequence.start, sequence.kv_len):
                first = begin + position - sequence.start
                places += range(first, first + count)
                found.append(encoded[row : row + count])
    return MediaRows(torch.tensor(places, dtype=torch.long), torch.cat(found)) if found else None


def image_tokens(rows: Sequence[ScheduledSequence], begins: Sequence[int]) -> torch.Tensor | None:
    """See `StepBatch.image_tokens`. begins: index of each sequence's first token."""
    found = list[int]()
    for sequence, begin in zip(rows, begins, strict=False):
        for item in sequence.media:
            for position, count in item.spans(sequence.start, sequence.kv_len):
                first = begin + position - sequence.start
                found += range(first, first + count)
    return torch.tensor(found, dtype=torch.long) if found else None


def _by_axes(rows: Sequence[ScheduledSequence], begins: Sequence[int], positions: torch.Tensor) -> AxisPositions | None:
    """The positions of images' rows, where they have axes. positions: of the step's tokens by their places in the
    sequences; they are changed to those behind images.
    """
    places, found = list[int](), list[np.ndarray]()
    for sequence, begin in zip(rows, begins, strict=False):
        if not any(item.grid for item in sequence.media):
            continue
        own = axis_positions(sequence.media, sequence.start, sequence.kv_len)
        positions[begin : begin + own.shape[1]] = torch.from_numpy(own[0])
        for item in sequence.media if sequence.sees else ():
            for first, _, count in item.places(sequence.start, sequence.kv_len):
                at = first - sequence.start
                places += range(begin + at, begin + at + count)
                found.append(own[:, at : at + count])
    if not found:
        return None
    return AxisPositions(torch.tensor(places), torch.from_numpy(np.concatenate(found, axis=1)))


def position_shifts(rows: Sequence[ScheduledSequence]) -> list[int]:
    """What is added to each token's index in its sequence to get its position; for steps without rows of images."""
    return [shift for row in rows for shift in [row.position_shift] * len(row.tokens)]


def _blocks(rows: Sequence[ScheduledSequence]) -> BlockSpans | None:
    """The blocks of a step's tokens; None if no prompt has any, as most haven't."""
    if not any(row.blocks.spans for row in rows):
        return None
    return spans_of([(row.blocks, row.start, row.kv_len) for row in rows])


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
    states: StatesOfSteps | None = None,
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
    axes = _by_axes(rows, qo_indptr, columns[1])
    table = np.full((len(rows), max(len(row.pages) for row in rows)), dummy_page)  # mostly padding beside a long row
    for row, pages in zip(rows, table, strict=True):
        pages[: len(row.pages)] = row.pages
    if states is not None:
        states.set_step(rows, qo_indptr)
    attention.plan(qo_indptr, torch.from_numpy(table), [row.kv_len for row in rows], blocks=_blocks(rows))
    return StepBatch(
        *split_columns(columns),
        attention=attention,
        lora=lora,
        logit_tokens=torch.tensor(logit_tokens, dtype=torch.long),
        kept_tokens=torch.tensor(kept, dtype=torch.long) if kept else None,
        merged=merged,
        states=states,
        media=media_rows(rows, qo_indptr),
        axes=axes,
        image_tokens=image_tokens(rows, qo_indptr),
    )
