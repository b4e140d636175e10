"""Builds a step's plan from the requests chosen for it."""

from __future__ import annotations

from collections.abc import Mapping

from ...graphs.runner import DecodeBuckets
from ..requests.request import Request
from ..requests.types import BASE_SLOT, ScheduledRow, StepPlan
from .running import Groups


def plan_step(step_id: int, groups: Groups, counts: Mapping[Request, int], buckets: DecodeBuckets) -> StepPlan:
    """Return the plan of a step in which each request of `groups` computes `counts[request]` tokens, 1 by default.

    Prefill rows come first; rows of one slot are adjacent within each kind (Punica §6).
    """
    if None in groups:
        groups = {None: groups[None], **groups}  # base-model rows come first
    prefills: list[ScheduledRow] = []
    decodes: list[ScheduledRow] = []
    for slot, group in enumerate(groups.values(), BASE_SLOT if None in groups else 0):
        for request in group:
            row = request.row
            if row is None:
                row = _new_row(request, counts.get(request, 1))
                (decodes if len(row.tokens) == 1 else prefills).append(row)
            else:
                decodes.append(row)
            row.slot = slot
    bucket = None if prefills else buckets.pick(len(decodes))
    adapters = [adapter for adapter in groups if adapter is not None]
    return StepPlan(step_id, prefills + decodes, adapters, bucket)


def _new_row(request: Request, count: int) -> ScheduledRow:
    """Return a new row for a request; if it decodes, the request keeps the row for its next steps."""
    start, token_ids = request.num_computed_tokens, request.token_ids
    tokens, samples = token_ids[start : start + count], start + count == len(token_ids)
    row = ScheduledRow(
        request.id, BASE_SLOT, tokens, start, request.block_table.pages, request.params, request.seed, samples,
        token_ids, request.num_prompt_tokens,
    )  # fmt: skip
    if count == 1 and samples:
        request.row = row
    return row
