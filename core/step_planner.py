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
    groups: dict[Adapter | None, list[ScheduledRow]] = {None: []}  # rows by slot, the base model's first
    prefills = False
    for request, count in chosen.items():
        row = request.row
        if row is None:
            row = _new_row(request, count)
            prefills = prefills or count > 1
        group = groups.get(request.adapter)
        if group is None:
            group = groups[request.adapter] = []
        group.append(row)
    rows: list[ScheduledRow] = []
    for slot, group in enumerate(groups.values(), BASE_SLOT):
        for row in group:
            row.slot = slot
        rows += group
    if prefills:
        rows = [row for row in rows if len(row.tokens) > 1] + [row for row in rows if len(row.tokens) == 1]
    bucket = None if prefills else buckets.pick(len(rows))
    del groups[None]
    return StepPlan(step_id, rows, list(groups), bucket)


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
