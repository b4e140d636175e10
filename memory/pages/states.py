"""Recurrent states in pages of the pool.

A state is computed from the state before it, so a step that runs twice must not change the one that it begins from. A
request therefore has several slots, each with pages for a whole state: a step reads one and writes the next, in turn. A
step that is discarded or run again reads the same slot again. A slot that has been written stays as it is until its
turn comes, so it can become a checkpoint of the prefix cache without a copy: the request takes other pages for it.

A state can't go back to the token before a rejected draft. So a step writes the state before its drafts, and next to
it their inputs, a row for each in every layer. The next step first takes in the inputs of those that were accepted. A
draft costs a row of inputs, where a state of its own would be tens of times as large.

Pure arithmetic and lists of page numbers, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

FLOAT_BYTES = 4
"""States are float32, whatever the model's dtype."""

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class StateShape:
    """A request's past in each layer with a state: a part for its convolution, and one of each head."""

    num_layers: int
    """Layers with a state."""

    conv_elems: int
    num_heads: int
    """0 where mixers have no more than a convolution."""

    head_elems: int
    draft_elems: int = 0
    """Elements of a draft's inputs in a layer."""

    most_drafts: int = 0
    """Drafts of a step whose inputs are kept; 0 without speculation."""

    further: StateShape | None = None
    """Further states, which some layers have beside these; None: there are none."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of a model whose tokens take none: with room for all heads of a layer, or any other part."""
        largest = FLOAT_BYTES * max(self.conv_elems, self.num_heads * self.head_elems, self.draft_elems)
        own = -(-largest // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return own if self.further is None else max(own, self.further.page_bytes)

    def of_ranks(self, size: int) -> StateShape:
        """The states of `size` TP ranks together. Their parts are as wide as a page is: a state takes as many pages."""
        return replace(
            self,
            conv_elems=size * self.conv_elems,
            head_elems=size * self.head_elems,
            draft_elems=size * self.draft_elems,
            further=None if self.further is None else self.further.of_ranks(size),
        )


class StateLayout:
    """Places of a state's parts in its pages: no part is split between pages.

    The convolutions' parts come first, then the heads', then the drafts' inputs, layer by layer; then further states.
    """

    def __init__(self, shape: StateShape, page_bytes: int, first: int = 0) -> None:
        """first: index of the first page of these parts. Raises ValueError if a page is too small for a part."""
        self.shape, self._first = shape, first
        floats = page_bytes // FLOAT_BYTES
        self.convs_per_page = floats // shape.conv_elems
        self.heads_per_page = floats // shape.head_elems if shape.num_heads else 1
        self.drafts_per_page = floats // shape.draft_elems if shape.most_drafts else 0
        num_drafts = shape.num_layers * shape.most_drafts
        if not self.convs_per_page or not self.heads_per_page or (num_drafts and not self.drafts_per_page):
            largest = FLOAT_BYTES * max(shape.conv_elems, shape.head_elems, shape.draft_elems)
            raise ValueError(f"a page has {page_bytes} bytes, and a part of a layer's state takes {largest}")
        self.num_conv_pages = -(-shape.num_layers // self.convs_per_page)
        self.first_draft_page = self.num_conv_pages - (-shape.num_layers * shape.num_heads // self.heads_per_page)
        own_pages = self.first_draft_page + (-(-num_drafts // self.drafts_per_page) if num_drafts else 0)
        self.further = None if shape.further is None else StateLayout(shape.further, page_bytes, first + own_pages)
        """Of further states."""
        self.num_pages = own_pages + (0 if self.further is None else self.further.num_pages)

    def conv(self, layer: int) -> tuple[int, int]:
        """Index of the page, and first element in it, of a layer's convolution; `layer` counts layers with a state."""
        page, at = divmod(layer, self.convs_per_page)
        return self._first + page, at * self.shape.conv_elems

    def head(self, layer: int, head: int) -> tuple[int, int]:
        """As `conv`, of a head."""
        page, at = divmod(layer * self.shape.num_heads + head, self.heads_per_page)
        return self._first + self.num_conv_pages + page, at * self.shape.head_elems

    def draft(self, layer: int, draft: int) -> tuple[int, int]:
        """As `conv`, of a draft's inputs."""
        page, at = divmod(layer * self.shape.most_drafts + draft, self.drafts_per_page)
        return self._first + self.first_draft_page + page, at * self.shape.draft_elems


class StateSlots:
    """A request's slots for its state, which its steps read and write in turn."""

    __slots__ = ("_shared", "accepted", "slots", "spare", "steps")

    def __init__(self, slots: list[list[int]], spare: list[int] | None = None, accepted: int = 0) -> None:
        """slots: the pages of each; the first is read by the request's first step, unless it begins with its first
        token. spare: pages of its own for a first slot that is a checkpoint of the prefix cache. accepted: see there,
        of the first slot.
        """
        self.slots = slots
        self.accepted = accepted
        """Drafts after the current state that were accepted: the next step takes in their inputs first."""
        self.spare = spare or []
        self.steps = 0
        """Steps that have been computed; one more while the step after them is planned ahead."""
        self._shared = 0  # index of the slot that `spare` is to replace

    def read_by(self, step: int) -> list[int]:
        """The pages that a step reads."""
        return self.slots[step % len(self.slots)]

    def written_by(self, step: int) -> list[int]:
        """The pages that a step writes."""
        return self.slots[(step + 1) % len(self.slots)]

    @property
    def current(self) -> list[int]:
        """The pages of the state after all computed steps, but for its accepted drafts."""
        return self.read_by(self.steps)

    def advance(self) -> list[int]:
        """Count a step; return the pages of a checkpoint that it read, which are not the request's any more."""
        left = self.leave_checkpoint()
        self.steps += 1
        self.accepted = 0
        return left

    def leave_checkpoint(self) -> list[int]:
        """Replace a checkpoint that the request begins with by its own pages; return the checkpoint's pages."""
        left: list[int] = []
        if self.spare:
            left, self.slots[self._shared], self.spare = self.slots[self._shared], self.spare, []
        return left

    def share(self, pages: list[int]) -> None:
        """Leave the current slot to the prefix cache after the next step, which reads it; `pages` replace it then."""
        self.spare, self._shared = pages, self.steps % len(self.slots)

    @property
    def shared(self) -> list[int]:
        """The slot that `spare` is to replace, if there is any."""
        return self.slots[self._shared]

    def pages(self) -> Iterator[int]:
        """All pages that the request holds."""
        for slot in self.slots:
            yield from slot
        yield from self.spare
