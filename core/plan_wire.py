"""A step's plan as plain data, so that it can be sent to another process as JSON or msgpack."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ..graphs.runner import StepMode
from ..memory.adapter import Adapter
from .sampling_params import SamplingParams
from .types import ScheduledRow, StepPlan

VERSION = 2


def plan_to_wire(plan: StepPlan) -> dict[str, Any]:
    """Lists, dicts, strings, numbers and None only.

    An adapter is its name, version and pages here, and by the hash of its content the same everywhere; that is None
    until it has been computed, which a server does in the background.
    """
    return {
        "v": VERSION,
        "step_id": plan.step_id,
        "mode": str(plan.mode),
        "bucket": plan.bucket,
        "repeat": plan.repeat,
        "until": None if math.isinf(plan.until) else plan.until,
        "adapters": [
            {
                "name": adapter.name, "version": adapter.version, "content_hash": adapter.manifest.content_hash,
                "pages": list(adapter.pages),
            }
            for adapter in plan.adapters
        ],
        "rows": [
            {
                "request_id": row.request_id, "slot": row.slot, "tokens": list(row.tokens), "start": row.start,
                "pages": list(row.pages), "params": params_to_wire(row.params), "seed": row.seed,
                "samples": row.samples, "token_ids": list(row.token_ids), "num_prompt_tokens": row.num_prompt_tokens,
            }
            for row in plan.rows
        ],
    }  # fmt: skip


def plan_from_wire(data: Mapping[str, Any], find: Callable[[Mapping[str, Any]], Adapter]) -> StepPlan:
    """The plan that `plan_to_wire` was given. find: the receiver's adapter for an entry of `adapters`.

    Raises ValueError for another version of the format.
    """
    if data["v"] != VERSION:
        raise ValueError(f"the plan is of wire version {data['v']}, this engine reads {VERSION}; run equal versions")
    rows = [ScheduledRow(**{**row, "params": params_from_wire(row["params"])}) for row in data["rows"]]
    until = math.inf if data["until"] is None else data["until"]
    adapters = [find(adapter) for adapter in data["adapters"]]
    plan = StepPlan(data["step_id"], rows, adapters, data["bucket"], data["repeat"], until)
    plan.mode = StepMode(data["mode"])
    return plan


def params_to_wire(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as plain data; what JSON has no keys or tuples for becomes lists."""
    data = asdict(params)
    data["logit_bias"] = [[token, bias] for token, bias in params.logit_bias.items()]
    data["stop_token_ids"] = list(params.stop_token_ids)
    data["bad_words"] = [list(word) for word in params.bad_words]
    return data


def params_from_wire(data: Mapping[str, Any]) -> SamplingParams:
    """The parameters that `params_to_wire` was given; InvalidRequest where they are wrong."""
    lists = {
        "logit_bias": {int(token): bias for token, bias in data["logit_bias"]},
        "stop_token_ids": tuple(data["stop_token_ids"]),
        "bad_words": tuple(tuple(word) for word in data["bad_words"]),
    }
    return SamplingParams(**{**data, **lists})
