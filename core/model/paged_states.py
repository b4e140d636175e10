"""The states of a step's sequences in pages of the arena; see `memory.pages.states`.

Tests: tests/core/layers/test_hybrids.py
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from ...memory.pages.arena import Arena
from ...memory.pages.pool import PagePool
from ...memory.pages.states import StateLayout, StateSlots
from ...ops.mixers.recurrent import WHOLE, RecurrentState, RecurrentWeights, StatePart
from ...ops.ranks.ranks import Collectives
from ..requests.types import ScheduledSequence
from .specs.config import ModelConfig
from .specs.recurrent import RecurrentSpec


def layers_with_states(config: ModelConfig) -> list[int]:
    """For each layer of the model that has a state, its index among those."""
    return [count - 1 for count in accumulate(layer.recurrent is not None for layer in config.layers)]


def state_pages(config: ModelConfig, arena: Arena) -> dict[bool, StatePages]:
    """Of a model with recurrent mixers, whose states the arena's layout has; True: of further states."""
    assert config.recurrent is not None and arena.layout.states is not None
    found = {False: StatePages(config.recurrent, arena.layout.states, arena, layers_with_states(config))}
    if (lookup := config.lookup) is not None and (further := arena.layout.states.further) is not None:
        counts = accumulate(layer.lookup is not None for layer in config.layers)
        found[True] = StatePages(lookup, further, arena, [count - 1 for count in counts])
    return found


def checked_states(sequence: ScheduledSequence, layout: StateLayout) -> StateSlots:
    """Return a sequence's slots. Raises RuntimeError if they can't serve its step."""
    states, most = sequence.states, layout.shape.most_drafts
    if states is None:
        raise RuntimeError("a sequence has no pages for its states")
    if max(states.accepted, sequence.drafts) > most or sequence.drafts >= len(sequence.tokens):
        raise RuntimeError(f"a sequence has {sequence.drafts} drafts, and states keep the inputs of {most}")
    return states


class StatePages:
    """The states of sequences in the arena, read from some pages and written to others."""

    def __init__(self, spec: RecurrentSpec, layout: StateLayout, arena: Arena, index: list[int]) -> None:
        """index: for each layer that has such a state, its index among those."""
        self.spec, self.layout, self.index = spec, layout, index
        self.pages = arena.pages.view(torch.float32)
        """`[pages, elements]`."""
        self._heads = [self._heads_of(index) for index in range(self.layout.shape.num_layers)]

    def read(
        self, layer: int, pages: torch.Tensor, fresh: torch.Tensor, drafts: int = 0, part: StatePart = WHOLE
    ) -> RecurrentState:
        """The states in these pages. layer: its index in the model. pages: `[sequences, pages of a state]` int64.
        fresh: `[sequences]`: True if a sequence begins with a state of zeros. drafts: of how many the inputs are read.
        part: the rest is empty.
        """
        index, shape = self.index[layer], self.spec.recurrent_shape
        conv = recurrent = self.pages.new_empty(len(pages), 0)
        if part.has_conv:
            page, at = self.layout.conv(index)
            conv = self.pages[pages[:, page], at : at + self.layout.shape.conv_elems].unflatten(1, self.spec.conv_shape)
            conv = conv[..., part.channels]
        if part.has_heads and (spans := self._heads[index]):
            recurrent = torch.cat([self.pages[pages[:, page], begin:end] for page, begin, end in spans], 1)
            recurrent = recurrent.unflatten(1, shape)
        for state in (conv, recurrent):  # an index of booleans would have a GPU wait for the host
            state.masked_fill_(fresh.view(-1, *[1] * (state.dim() - 1)), 0)
        kept = self._drafts_of(index, pages, drafts)[..., part.drafts] if drafts else None
        found = RecurrentState(conv, recurrent, kept)
        found.fresh = fresh.clone() if self.spec.marks_first else None
        return found

    def write(
        self, layer: int, pages: torch.Tensor, state: RecurrentState, drafts: int = 0, part: StatePart = WHOLE
    ) -> None:
        """Keep states in these pages, and the inputs of so many drafts."""
        index = self.index[layer]
        if part.has_conv:
            page, at = self.layout.conv(index)
            first, last, _ = part.channels.indices(self.spec.channels)
            if last - first == self.spec.channels:
                self.pages[pages[:, page], at : at + self.layout.shape.conv_elems] = state.conv.flatten(1)
            else:
                for tap, inputs in enumerate(state.conv.unbind(1)):
                    begin = at + tap * self.spec.channels
                    self.pages[pages[:, page], begin + first : begin + last] = inputs
        heads, done = state.recurrent.flatten(1), 0
        for page, begin, end in self._heads[index] if part.has_heads else ():
            self.pages[pages[:, page], begin:end] = heads[:, done : done + end - begin]
            done += end - begin
        first, last, _ = part.drafts.indices(self.spec.draft_size)
        for draft in range(drafts):
            assert state.drafts is not None
            page, at = self.layout.draft(index, draft)
            self.pages[pages[:, page], at + first : at + last] = state.drafts[:, draft]

    def _drafts_of(self, index: int, pages: torch.Tensor, drafts: int) -> torch.Tensor:
        """See `RecurrentState.drafts`."""
        width = self.spec.draft_size
        found = self.pages.new_zeros(len(pages), self.layout.shape.most_drafts, width)
        for draft in range(drafts):
            page, at = self.layout.draft(index, draft)
            found[:, draft] = self.pages[pages[:, page], at : at + width]
        return found

    def _heads_of(self, index: int) -> list[tuple[int, int, int]]:
        """A layer's heads in the pages of a state: index of the page, first element and the one after the last."""
        layout, found = self.layout, dict[int, tuple[int, int]]()
        for head in range(layout.shape.num_heads):
            page, at = layout.head(index, head)
            found[page] = found.get(page, (at, 0))[0], at + layout.shape.head_elems
        return [(page, *span) for page, span in found.items()]


class PagedStates:
    """Reads and writes states for one step after another; it is the `StepStates` of each.

    A sequence's state is read from one slot of its request and written to the next, so that a step that runs again
    begins with the same state.
    """

    def __init__(self, config: ModelConfig, arena: Arena) -> None:
        """See `state_pages`."""
        self._states = state_pages(config, arena)
        self._layout = self._states[False].layout
        self.qo_indptr: Sequence[int] = [0]
        self.accepted: Sequence[int] = ()
        """For each sequence, the drafts of the step before whose inputs its state takes in first."""
        self.drafts: Sequence[int] = ()
        """For each sequence, the last of its tokens, whose inputs are kept beside its state."""
        self._make_tables(0)
        self.read, self.written = self._tables[:, :0].unbind(0)
        """`[sequences, pages of a state]` int64: what each sequence reads, and writes."""
        self.fresh = self._fresh[:0]
        """`[sequences]`: True if a sequence begins with a state of zeros."""

    def _make_tables(self, most: int) -> None:
        device = self._states[False].pages.device
        self._tables = torch.full((2, most, self._layout.num_pages), PagePool.DUMMY, device=device)
        self._fresh = torch.ones(most, dtype=torch.bool, device=device)

    def set_step(self, sequences: Sequence[ScheduledSequence], qo_indptr: Sequence[int]) -> None:
        """Begin a step. qo_indptr: sequence i has the tokens `qo_indptr[i]` … `qo_indptr[i + 1]`-1; entries beyond the
        sequences are padding.
        """
        count = len(qo_indptr) - 1
        read, written = [], []
        accepted, drafts = [0] * count, [0] * count
        for index, each in enumerate(sequences):
            states = checked_states(each, self._layout)
            read.append(states.read_by(each.state_step))
            written.append(states.written_by(each.state_step))
            accepted[index], drafts[index] = states.accepted, each.drafts
        self.accepted, self.drafts = accepted, drafts
        padding = [[PagePool.DUMMY] * self._layout.num_pages] * (count - len(sequences))
        self.qo_indptr = qo_indptr
        if count > len(self._fresh):
            self._make_tables(count)
        tables, self.fresh = self._tables[:, :count], self._fresh[:count]
        tables.copy_(torch.tensor((read + padding, written + padding)))
        self.fresh.copy_(torch.tensor([each.start == 0 for each in sequences] + [True] * len(padding)))
        self.read, self.written = tables.unbind(0)

    def mix(
        self, layer: int, rows: torch.Tensor, weights: RecurrentWeights, ranks: Collectives | None = None
    ) -> torch.Tensor:
        """See `StepStates.mix`."""
        drafts = max(self.drafts, default=0)
        kept = max(self.accepted, default=0) or drafts
        states = self._states[weights.further]
        state = states.read(layer, self.read, self.fresh, kept, weights.part)
        out = weights.mix(rows, state, self.qo_indptr, self.accepted, self.drafts, ranks)
        states.write(layer, self.written, state, drafts, weights.part)
        return out
