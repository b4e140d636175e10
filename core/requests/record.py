"""A request as plain data, with which another engine can continue it token for token.

Tests: tests/core/test_moving.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .media import MediaItem
from .plan_wire import params_from_wire, params_to_wire
from .request import Request

VERSION = 9


@dataclass(frozen=True, slots=True)
class NotHere:
    """Refusal of a record: no adapter of its content is registered here.

    content_hash: None where the exporting engine had not computed it yet; such a request can't be resumed anywhere.
    """

    adapter: str
    content_hash: str | None


def to_record(request: Request, now: float) -> dict[str, Any]:
    """Return a request's parameters and tokens; sampling depends on tokens, seed and parameters only.

    Its client has received all tokens that were generated so far. An adapter is the hash of its content; its name
    is the one that the client asked for, and may mean another adapter elsewhere. now: seconds on the engine's clock.
    """
    adapter = request.changed_by
    return {
        "v": VERSION,
        "id": request.id,
        "tokens": list(request.token_ids),
        "num_prompt_tokens": request.num_prompt_tokens,
        "params": params_to_wire(request.params),
        "adapter": None if adapter is None else request.adapter_name,
        "content_hash": None if adapter is None else adapter.manifest.content_hash,
        "tenant": request.tenant,
        "cache_salt": request.cache_salt,
        "choice_group": request.choice_group,
        "media": [item.to_wire() for item in request.media],
        "prediction": list(request.prediction),
        "age": now - request.arrival_time,
        "num_paid_tokens": max(request.num_paid_tokens, request.num_computed_tokens),
    }


def from_record(data: Mapping[str, Any], now: float) -> Request:
    """Return a request that continues where the record ends, without its adapter. now: seconds on this engine's clock.

    ValueError for another version of the format.
    """
    if data["v"] != VERSION:
        raise ValueError(f"the record is of version {data['v']}, this engine reads {VERSION}; run equal versions")
    tokens, count = list(data["tokens"]), data["num_prompt_tokens"]
    request = Request(
        id=data["id"],
        token_ids=tokens[:count],
        params=params_from_wire(data["params"]),
        adapter_name=data["adapter"],
        arrival_time=now - data["age"],
        tenant=data["tenant"],
        cache_salt=data["cache_salt"],
        choice_group=data["choice_group"],
        media=tuple(map(MediaItem.from_wire, data["media"])),
        prediction=data["prediction"],
        num_paid_tokens=data["num_paid_tokens"],
    )
    request.token_ids += tokens[count:]
    return request
