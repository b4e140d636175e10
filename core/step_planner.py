"""From chosen requests to the plan of a step."""

from __future__ import annotations

from collections.abc import Mapping

from ..graphs.buckets import DecodeBuckets
from ..memory.adapter import Adapter
from .request import Request
from .types import BASE_SLOT, ScheduledRow, StepPlan


def plan_step(step_id: int, chosen: Mapping[Request, int], buckets: DecodeBuckets) -> StepPlan:
    """The step in which each of `chosen` computes so many more tokens; its block table covers them.

    Prefill rows first, rows of one slot adjacent within each kind (Punica §6); slots are numbered in the order of
    `chosen`.
    """
    decodes: dict[Adapter | None, list[ScheduledRow]] = {None: []}  # by slot, the base model's first
    prefills: dict[Adapter | None, list[ScheduledRow]] = {}
    for request, count in chosen.items():
        adapter, row = request.adapter, request.row
        group = decodes.get(adapter)
        if group is None:
            group = decodes[adapter] = []
        if row is None:
            row = _new_row(request, count)
            if count > 1:
                group = prefills.setdefault(adapter, [])
        group.append(row)
    rows: list[ScheduledRow] = []
    for slot, adapter in enumerate(decodes, BASE_SLOT) if prefills else ():
        for row in prefills.get(adapter, ()):
            row.slot = slot
            rows.append(row)
    for slot, group in enumerate(decodes.values(), BASE_SLOT):
        for row in group:
            row.slot = slot
        rows += group
    bucket = None if prefills else buckets.pick(len(rows))
    del decodes[None]
    return StepPlan(step_id, rows, list(decodes), bucket)


def _new_row(request: Request, count: int) -> ScheduledRow:
    """The row of a request that has none to go on with; it keeps the one with which it begins to decode."""
    start, token_ids = request.num_computed_tokens, request.token_ids
    tokens, samples = token_ids[start : start + count], start + count == len(token_ids)
    row = ScheduledRow(
        request.id, BASE_SLOT, tokens, start, request.block_table.pages, request.params, request.seed, samples,
        token_ids, request.num_prompt_tokens,
    )  # fmt: skip
    if count == 1 and samples:
        request.row = row
    return row
