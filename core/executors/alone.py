"""Reruns the entries of a failed step one by one, so only requests that fail again are lost."""

from __future__ import annotations

import logging
from dataclasses import replace

from ...memory.transfers.transfer import ExecutorLost
from ..requests.types import StepPlan, StepResult
from .base import Executor

logger = logging.getLogger(__name__)


def run_rows_alone(executor: Executor, plan: StepPlan) -> StepResult:
    """Run each entry of a plan in its own step; return the joint result, with an error for each entry that raised.

    A step writes only the KV of its own entries, so running an entry again is harmless. Raises ExecutorLost.
    """
    merged = StepResult()
    for row in plan.sequences:
        adapters = [] if row.lora_index < 0 else [plan.adapters[row.lora_index]]
        bucket = None if row.is_ragged else len(row.tokens)
        alone = StepPlan(plan.step_id, [replace(row, lora_index=min(row.lora_index, 0))], adapters, bucket, plan.merged)
        try:
            result = executor.execute(alone)
        except ExecutorLost:
            raise
        except Exception as error:
            logger.exception("request %s failed", row.request_id)
            merged.errors[row.request_id] = f"the step failed: {type(error).__name__}: {error}"
        else:
            merged.merge(result)
    return merged
