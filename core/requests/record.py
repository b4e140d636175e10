"""A request as plain data: what another engine needs to go on with it, token for token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .plan_wire import params_from_wire, params_to_wire
from .request import Request

VERSION = 2


def to_record(request: Request) -> dict[str, Any]:
    """Return a request's parameters and tokens; sampling depends on tokens, seed and parameters only.

    Its client has received all tokens that were generated so far.
    """
    return {
        "v": VERSION, "id": request.id, "tokens": list(request.token_ids),
        "num_prompt_tokens": request.num_prompt_tokens, "params": params_to_wire(request.params),
        "seed": request.seed, "adapter": request.adapter_name, "tenant": request.tenant,
        "cache_salt": request.cache_salt, "call": request.call,
    }  # fmt: skip


def from_record(data: Mapping[str, Any]) -> Request:
    """Return a request that continues where the record ends. ValueError for another version of the format.

    Its arrival time is not taken over, as it refers to another engine's clock.
    """
    if data["v"] != VERSION:
        raise ValueError(f"the record is of version {data['v']}, this engine reads {VERSION}; run equal versions")
    tokens, count = list(data["tokens"]), data["num_prompt_tokens"]
    params = replace(params_from_wire(data["params"]), seed=data["seed"])
    request = Request(
        data["id"], tokens[:count], params, data["adapter"],
        tenant=data["tenant"], cache_salt=data["cache_salt"], call=data["call"],
    )  # fmt: skip
    request.token_ids += tokens[count:]
    return request
