"""The states of a step's sequences on a GPU: decoding sequences have theirs read and written in pages, by one launch
or PyTorch's operators, without a wait for the host.

Tests: tests/core/model/test_paged_states_interpreted.py
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from ...memory.pages.arena import Arena
from ...memory.pages.pool import PagePool
from ...ops.mixers.recurrent import RecurrentWeights
from ...ops.ranks.ranks import Collectives
from ...ops.upload import on_device
from ..requests.types import ScheduledSequence
from .paged_states import PagedStates, StatePages, checked_states
from .specs.config import ModelConfig


class CudaPagedStates:
    """Reads and writes states for one step after another; it is the `StepStates` of each.

    A sequence with one known token, and perhaps drafts, has a row of the step's table, which stays at one address.
    Sequences with more known tokens, parts of prompts, have their states gathered.
    """

    def __init__(self, config: ModelConfig, arena: Arena, most: int) -> None:
        """See `PagedStates`. most: sequences of the largest step."""
        self._states = StatePages(config, arena)
        self._spec, self._layout, self._pages = self._states.spec, self._states.layout, self._states.pages
        self._prompts = PagedStates(config, arena)
        self._spans: list[slice] = []
        """The tokens of each prompt."""
        self._launch = self._spec.launch(self._layout)
        width = 4 + 2 * self._layout.num_pages
        self._table = torch.zeros(most, width, dtype=torch.long, device=self._pages.device)
        self._count = 0

    def set_step(self, sequences: Sequence[ScheduledSequence], qo_indptr: Sequence[int]) -> None:
        """See `PagedStates.set_step`. Padding may have one token, or none."""
        prompts, table = list[int](), list[list[int]]()
        for index, each in enumerate(sequences):
            states, begin = checked_states(each, self._layout), qo_indptr[index]
            if len(each.tokens) - each.drafts > 1:
                prompts.append(index)
                continue
            row = [begin, len(each.tokens), states.accepted, int(each.start == 0)]
            table.append(row + states.read_by(each.state_step) + states.written_by(each.state_step))
        dummies = [PagePool.DUMMY] * (2 * self._layout.num_pages)
        for index in range(len(sequences), len(qo_indptr) - 1):
            table.append([qo_indptr[index], qo_indptr[index + 1] - qo_indptr[index], 0, 1, *dummies])
        self._count = len(table)
        if table:
            self._table[: len(table)].copy_(on_device(torch.tensor(table), self._table.device))
        self._spans = [slice(qo_indptr[index], qo_indptr[index + 1]) for index in prompts]
        if prompts:
            lengths = accumulate(span.stop - span.start for span in self._spans)
            self._prompts.set_step([sequences[index] for index in prompts], [0, *lengths])

    def mix(
        self, layer: int, rows: torch.Tensor, weights: RecurrentWeights, ranks: Collectives | None = None
    ) -> torch.Tensor:
        """See `StepStates.mix`."""
        table, out = self._table[: self._count], None
        if self._launch is None and self._count:
            out = self._step(layer, rows, weights, table, ranks)
        if self._spans:
            own = torch.cat([rows[span] for span in self._spans])
            lengths = [span.stop - span.start for span in self._spans]
            mixed = self._prompts.mix(layer, own, weights, ranks)
            out = rows.new_empty(len(rows), mixed.shape[1]) if out is None else out
            for span, part in zip(self._spans, mixed.split(lengths), strict=True):
                out[span] = part
        if out is None:
            out = rows.new_empty(len(rows), self._spec.out_size)
        if self._launch is not None and self._count:
            self._launch(out, rows, weights, pages=self._pages, table=table, layer=self._states.index[layer])
        return out

    def _step(
        self,
        layer: int,
        rows: torch.Tensor,
        weights: RecurrentWeights,
        table: torch.Tensor,
        ranks: Collectives | None,
    ) -> torch.Tensor:
        """Decoding sequences by PyTorch's operators: as many of them whatever the numbers in the table are."""
        begins, counts, accepted, fresh = table[:, :4].unbind(1)
        read, written = table[:, 4:].chunk(2, 1)
        most = self._layout.shape.most_drafts
        state = self._states.read(layer, read, fresh.bool(), most, weights.part)
        out = weights.step(rows, state, begins, counts, accepted, ranks)
        self._states.write(layer, written, state, most, weights.part)
        return out
