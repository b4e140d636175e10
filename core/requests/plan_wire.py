"""A step's plan as plain data, so that it can be sent to another process as JSON or, with images, as msgpack.

Tests: tests/core/test_moving.py, tests/core/executors/test_ranks.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ...memory.adapters.adapter import Adapter
from ...memory.pages.states import StateSlots
from .blocks import PromptBlocks
from .grammar import Grammar
from .media import MediaItem
from .request_params import RequestParams
from .types import ScheduledSequence, StepPlan

if TYPE_CHECKING:
    import torch

VERSION = 13

_PARAMS = tuple(one.name for one in fields(RequestParams))
_GRAMMAR = tuple(one.name for one in fields(Grammar))


def plan_to_wire(plan: StepPlan, *, samples: bool = True) -> dict[str, Any]:
    """Return the plan as lists, dicts, strings, numbers and None. samples: with the sampling parameters of sequences;
    otherwise only sequences that report prompt logprobs have them.

    An adapter is its name, version and pages here, and by the hash of its content the same everywhere; that is None
    until it has been computed, which a server does in the background.
    """
    return {
        "v": VERSION,
        "step_id": plan.step_id,
        "mode": str(plan.mode),
        "bucket": plan.bucket,
        "adapters": [adapter_to_wire(adapter) for adapter in plan.adapters],
        "merged": None if plan.merged is None else adapter_to_wire(plan.merged),
        "sources": None if plan.sources is None else list(plan.sources),
        "sequences": [
            _sequence_to_wire(sequence)
            | (_sampling_to_wire(sequence) if samples or sequence.wants_prompt_logprobs else {})
            for sequence in plan.sequences
        ],
    }


def plan_from_wire(data: Mapping[str, Any], find: Callable[[Mapping[str, Any]], Adapter]) -> StepPlan:
    """Return the plan of `plan_to_wire`'s data. find: the receiver's adapter for an entry of `adapters`, and for
    `merged`.

    Raises ValueError for another version of the format.
    """
    if data["v"] != VERSION:
        raise ValueError(f"the plan is of wire version {data['v']}, this engine reads {VERSION}; run equal versions")
    sequences = [_sequence_from_wire(sequence) for sequence in data["sequences"]]
    adapters = [find(adapter) for adapter in data["adapters"]]
    merged = None if data["merged"] is None else find(data["merged"])
    return StepPlan(data["step_id"], sequences, adapters, bucket=data["bucket"], merged=merged, sources=data["sources"])


def _sequence_to_wire(sequence: ScheduledSequence) -> dict[str, Any]:
    return {
        "request_id": sequence.request_id,
        "lora_index": sequence.lora_index,
        "lora_from": sequence.lora_from,
        "tokens": list(sequence.tokens),
        "start": sequence.start,
        "pages": list(sequence.pages),
        "samples": sequence.samples,
        "drafts": sequence.drafts,
        "states": _states_to_wire(sequence),
        "state_drafts": 0 if sequence.states is None else sequence.states.accepted,
        "media": _media_to_wire(sequence),
        "blocks": [sequence.blocks.prompt, [list(span) for span in sequence.blocks.spans]],
    }


def _media_to_wire(sequence: ScheduledSequence) -> list[dict[str, Any]]:
    """The images of the sequence's prompt without their files, and those of their rows that the step takes."""
    found = []
    for item, encoded in zip(sequence.media, sequence.media_rows, strict=True):
        places = list(item.places(sequence.start, sequence.kv_len))
        first, count = (places[0][1], sum(each for *_, each in places)) if places else (0, 0)
        rows = encoded[first : first + count].float().cpu().numpy().tobytes() if places else b""  # exactly as they are
        runs = [list(run) for run in item.runs]
        own = {"runs": runs, "grid": list(item.grid), "ends": list(item.ends)}
        found.append({**own, "first": first, "count": count, "rows": rows})
    return found


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of an image, which stand for all of them."""

    first: int
    """The first one's number."""
    rows: torch.Tensor

    def __getitem__(self, wanted: slice) -> torch.Tensor:
        return self.rows[wanted.start - self.first : wanted.stop - self.first]


def _media_from_wire(media: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """See `_media_to_wire`."""
    if not media:
        return {}
    import torch  # a simulation has none

    items, rows = list[MediaItem](), list[_Rows | None]()
    for each in media:
        (before, behind), runs = each["ends"], tuple((first, count) for first, count in each["runs"])
        items.append(MediaItem(b"", "", runs, tuple(each["grid"]), ends=(before, behind)))
        values = torch.frombuffer(bytearray(each["rows"]), dtype=torch.float32) if each["count"] else None
        rows.append(None if values is None else _Rows(each["first"], values.view(each["count"], -1)))
    return {"media": items, "media_rows": rows}


def _states_to_wire(sequence: ScheduledSequence) -> list[list[int]] | None:
    """The pages of the states that the step reads and writes."""
    states, step = sequence.states, sequence.state_step
    return None if states is None else [list(states.read_by(step)), list(states.written_by(step))]


def _sampling_to_wire(sequence: ScheduledSequence) -> dict[str, Any]:
    return {
        "params": params_to_wire(sequence.params),
        "seed": sequence.seed,
        "token_ids": list(sequence.token_ids),
        "num_prompt_tokens": sequence.num_prompt_tokens,
    }


def _sequence_from_wire(sequence: Mapping[str, Any]) -> ScheduledSequence:
    values = dict[str, Any](sequence)
    slots, accepted = values["states"], values.pop("state_drafts")
    values["states"] = None if slots is None else StateSlots(slots, accepted=accepted)
    prompt, spans = values["blocks"]
    values["blocks"] = PromptBlocks(tuple((first, end) for first, end in spans), prompt)
    values |= _media_from_wire(values.pop("media"))
    if "params" not in values:
        return ScheduledSequence(**values, params=RequestParams(), seed=0, token_ids=[], num_prompt_tokens=0)
    values["params"] = params_from_wire(values["params"])
    return ScheduledSequence(**values)


def adapter_to_wire(adapter: Adapter) -> dict[str, Any]:
    """Return an adapter as an entry of a plan."""
    return {
        "name": adapter.name,
        "version": adapter.version,
        "content_hash": adapter.manifest.content_hash,
        "pages": list(adapter.pages),
    }


def params_to_wire(params: RequestParams) -> dict[str, Any]:
    """Return sampling parameters as plain data that JSON can hold."""
    data = {name: getattr(params, name) for name in _PARAMS}
    data["logit_bias"] = [[token, bias] for token, bias in params.logit_bias.items()]
    data["stop_token_ids"] = list(params.stop_token_ids)
    data["logprob_token_ids"] = list(params.logprob_token_ids)
    data["bad_words"] = [list(word) for word in params.bad_words]
    data["allowed_token_ids"] = None if params.allowed_token_ids is None else list(params.allowed_token_ids)
    grammar = params.grammar
    data["grammar"] = None if grammar is None else {name: getattr(grammar, name) for name in _GRAMMAR}
    return data


def params_from_wire(data: Mapping[str, Any]) -> RequestParams:
    """Return the parameters of `params_to_wire`'s data. Raises InvalidRequest if they are invalid."""
    lists = {
        "logit_bias": {int(token): bias for token, bias in data["logit_bias"]},
        "stop_token_ids": tuple(data["stop_token_ids"]),
        "logprob_token_ids": tuple(data["logprob_token_ids"]),
        "bad_words": tuple(tuple(word) for word in data["bad_words"]),
        "allowed_token_ids": None if data["allowed_token_ids"] is None else tuple(data["allowed_token_ids"]),
        "grammar": None if data["grammar"] is None else Grammar(**data["grammar"]),
    }
    return RequestParams(**{**data, **lists})
