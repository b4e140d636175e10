"""From chosen requests to the plan of a step."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from ..graphs.buckets import DecodeBuckets
from ..memory.adapter import Adapter
from .request import Request
from .types import BASE_SLOT, ScheduledRow, StepPlan


def plan_step(step_id: int, chosen: Mapping[Request, int], buckets: DecodeBuckets) -> StepPlan:
    """The step in which each of `chosen` computes so many more tokens; its block table covers them.

    Prefill rows first, rows of one slot adjacent within each kind (Punica §6). A request that decodes keeps its row
    from step to step: the row of an earlier plan shows what is planned now.
    """
    slots: dict[Adapter | None, int] = {None: BASE_SLOT}
    prefills: list[ScheduledRow] = []
    decodes: list[ScheduledRow] = []
    for request, count in chosen.items():
        slot = slots.setdefault(request.adapter, len(slots) - 1)
        start, token_ids = request.num_computed_tokens, request.token_ids
        tokens, samples = token_ids[start : start + count], start + count == len(token_ids)
        row = request.row
        if count == 1 and row is not None:
            row.slot, row.tokens, row.start, row.samples = slot, tokens, start, samples
            decodes.append(row)
            continue
        row = ScheduledRow(
            request.id, slot, tokens, start, request.block_table.pages, request.params, request.seed, samples,
            token_ids, request.num_prompt_tokens,
        )  # fmt: skip
        if count == 1:
            request.row = row
            decodes.append(row)
        else:
            prefills.append(row)
    for rows in (prefills, decodes):
        rows.sort(key=attrgetter("slot"))
    bucket = None if prefills else buckets.pick(len(decodes))
    rows = prefills + decodes
    return StepPlan(step_id, rows, [a for a in slots if a is not None], bucket)
