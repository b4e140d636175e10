"""The body of POST /generate, TGI's and LoRAX's, as a completion request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import RootModel

from ..access.limits import RequestLimits, check_json
from ..errors import ApiError, clipped, validated
from .completion_request import CompletionRequest
from .fields import unknown_field
from .translation import renaming, typed, unsupported, wrong

MAX_NEW_TOKENS = 100
"""TGI's, where a request does not say."""

SAME = frozenset(("frequency_penalty", "repetition_penalty", "response_format", "seed", "stop", "temperature", "top_k",
                  "top_p"))  # fmt: skip
RENAMED = {
    "adapter_id": "lora_path", "ignore_eos_token": "ignore_eos", "max_new_tokens": "max_tokens",
    "return_full_text": "echo", "truncate": "truncate_prompt_tokens",
}  # fmt: skip
"""Parameters that the completion request has by other names."""

OWN = frozenset(("adapter_source", "decoder_input_details", "details", "do_sample", "grammar"))

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "api_token": ((), "adapters are loaded by the operator, with POST /v1/adapters"),
    "best_of": ((1,), "ask several times, with seeds"),
    "merged_adapters": ((), "name one adapter in adapter_id"),
    "return_k_alternatives": ((0,), "use POST /v1/completions with logprobs"),
    "top_n_tokens": ((0,), "use POST /v1/completions with logprobs"),
    "typical_p": ((1.0,), "use top_p"),
    "watermark": ((False,), "answers have no watermark here"),
}
"""Parameters that can't be obeyed: the values that ask for nothing, and what to do instead."""

SOURCES = ("local", "hub")
"""Sources of an adapter that need nothing: it is registered here by its name, wherever it came from."""

NAMES = {"prompt": "inputs", "structured_outputs": "grammar",
         **{ours: theirs for theirs, ours in RENAMED.items()}}  # fmt: skip
"""The client's names of fields that the completion request has by others."""

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""TGI's defaults, whatever the model's generation_config.json says."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request to answer. in_list: whether the whole answer is the only one of a list. samples: else it is greedy."""

    completion: CompletionRequest
    details: bool
    in_list: bool
    samples: bool

    @classmethod
    def parse(cls, body: bytes, limits: RequestLimits, *, stream: bool | None = None) -> GenerateRequest:
        """stream: what the route says; None: the body does, and the answer is in a list."""
        check_json(body, limits.max_json_values)
        fields = validated(RootModel[dict[str, Any]], body).root
        for name in fields:
            if name not in ("inputs", "parameters", "stream"):
                raise unknown_field(name, ("inputs", "parameters", "stream"))
        given = typed(fields, "parameters", dict, "an object") or {}
        given = {name: value for name, value in given.items() if value is not None}
        if not isinstance(fields.get("inputs"), str):
            raise wrong("inputs", "a text")
        samples = bool(_flag(given, "do_sample")) or given.keys() & {"top_k", "top_p"} or given.get("temperature")
        completion = {**NEUTRAL, "max_tokens": MAX_NEW_TOKENS, "include_stop_str_in_output": True}
        if not samples:
            completion["temperature"] = 0.0
        for name, value in given.items():
            _take(name, value, completion)
        streams = bool(_flag(fields, "stream")) if stream is None else stream
        details = bool(_flag(given, "details")) or bool(_flag(given, "decoder_input_details"))
        completion |= {"prompt": fields["inputs"], "stream": streams}
        if details or streams:
            completion["logprobs"] = 0
        if _flag(given, "decoder_input_details"):
            completion["prompt_logprobs"] = 0
        with renaming(NAMES):
            asked = CompletionRequest.of(completion, limits)
        return cls(asked, details, stream is None, bool(samples))


def _flag(fields: dict[str, Any], name: str) -> bool | None:
    return typed(fields, name, bool, "true or false")


def _take(name: str, value: Any, completion: dict[str, Any]) -> None:
    """Take a parameter over. Raises an ApiError for one that can't be obeyed."""
    if name in SAME:
        completion[name] = value
    elif name in RENAMED:
        completion[RENAMED[name]] = value
    elif name == "grammar":
        completion["structured_outputs"] = _grammar(value)
    elif name == "adapter_source":
        if value not in SOURCES:
            message = f"adapter_source is {clipped(str(value))}; adapters are known here by their names: leave it out"
            raise unsupported(name, message)
    elif name in REFUSED:
        neutral, instead = REFUSED[name]
        if not any(value == nothing for nothing in neutral):
            raise unsupported(name, f"{name} is not supported with this value: {instead}")
    elif name not in OWN:
        raise unknown_field(name, SAME | RENAMED.keys() | OWN)


def _grammar(value: Any) -> dict[str, Any]:
    kind, text = (value.get("type"), value.get("value")) if isinstance(value, dict) else (None, None)
    if kind == "json_schema" and isinstance(text, dict):
        kind, text = "json", text.get("schema")
    if kind not in ("json", "regex") or text is None:
        raise ApiError(400, "grammar has the type json, json_schema or regex, and a value", param="grammar")
    return {kind: text}
