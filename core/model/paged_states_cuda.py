"""The states of a step's sequences on a GPU: decoding sequences have theirs read and written in pages, by one launch.

Tests: tests/core/model/test_paged_states_interpreted.py
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from ...memory.pages.arena import Arena
from ...memory.pages.pool import PagePool
from ...memory.pages.states import StateLayout
from ...ops.gated_delta import DeltaWeights, step_in_pages
from ...ops.gated_delta_schedule import StepConstants
from ...ops.upload import on_device
from ..requests.types import ScheduledSequence
from .config import ModelConfig
from .layers import GatedDeltaSpec
from .paged_states import PagedStates, checked_states, layers_with_states


class CudaPagedStates:
    """Reads and writes states for one step after another; it is the `StepStates` of each.

    A sequence with one known token, and perhaps drafts, has a row of the launch's table, which stays at one address.
    Sequences with more known tokens, parts of prompts, have their states gathered.
    """

    def __init__(self, config: ModelConfig, arena: Arena, most: int) -> None:
        """config: of a model with Gated DeltaNet; the arena's layout has its states. most: sequences of the largest
        step.
        """
        assert config.delta is not None and arena.layout.states is not None
        self._spec, self._layout = config.delta, arena.layout.states
        self._pages = arena.pages.view(torch.float32)
        self._index = layers_with_states(config)
        self._prompts = PagedStates(config, arena)
        self._spans: list[slice] = []
        """The tokens of each prompt."""
        self._constants = _constants(self._spec, self._layout)
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

    def mix(self, layer: int, mixed: torch.Tensor, weights: DeltaWeights, eps: float) -> torch.Tensor:
        """See `StepStates.mix`."""
        out = mixed.new_empty(len(mixed), self._spec.v_size)
        if self._spans:
            rows = torch.cat([mixed[span] for span in self._spans])
            parts = self._prompts.mix(layer, rows, weights, eps).split([span.stop - span.start for span in self._spans])
            for span, part in zip(self._spans, parts, strict=True):
                out[span] = part
        if self._count:
            table = self._table[: self._count]
            step_in_pages(
                out,
                mixed,
                weights,
                eps,
                pages=self._pages,
                table=table,
                layer=self._index[layer],
                constants=self._constants,
            )
        return out


def _constants(spec: GatedDeltaSpec, layout: StateLayout) -> StepConstants:
    return StepConstants(
        k_heads=spec.num_k_heads,
        v_heads=spec.num_v_heads,
        k_dim=spec.k_dim,
        v_dim=spec.v_dim,
        conv=spec.conv_size,
        convs_per_page=layout.convs_per_page,
        heads_per_page=layout.heads_per_page,
        conv_pages=layout.num_conv_pages,
        num_pages=layout.num_pages,
        drafts_per_page=layout.drafts_per_page,
        draft_page=layout.first_draft_page,
        most_drafts=layout.shape.most_drafts,
    )
