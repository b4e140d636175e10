"""The body of POST /generate, TGI's and LoRAX's, converted to a completion request.

Tests: tests/server/api/test_generate.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import Field, StrictBool

from ..access.limits import RequestLimits
from ..errors import ApiError, validated
from .completion_request import CompletionRequest
from .translation import OtherBody, renaming

MAX_NEW_TOKENS = 100
"""TGI's default, used if a request has none."""

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
NEUTRAL |= {"stop": [], "bad_words": []}
"""TGI's defaults, whatever the model's generation_config.json says."""


_SGLANGS = (
    "it is SGLang's, and this route takes TGI's body, inputs and parameters: send prompt, with the sampling parameters "
    "next to it, to POST /v1/completions"
)


class GenerateBody(OtherBody):
    """A request as the client sends it."""

    foreign = dict.fromkeys(
        ("text", "input_ids", "sampling_params", "rid", "lora_path", "return_logprob", "logprob_start_len"), _SGLANGS
    )

    inputs: str
    parameters: dict[str, Any] = {}
    stream: StrictBool = False


class Parameters(OtherBody):
    """The fields of `parameters`. Most go to the completion request unchanged, under our names."""

    refused = {
        "adapter_source": (("local", "hub"), "adapters are named here without their source: leave it out"),
        "api_token": ((), "adapters are loaded by the operator, with POST /v1/adapters"),
        "best_of": ((1,), "send several requests, with seeds"),
        "return_k_alternatives": ((0,), "use POST /v1/completions with logprobs"),
        "top_n_tokens": ((0,), "use POST /v1/completions with logprobs"),
        "typical_p": ((1.0,), "use top_p"),
        "watermark": ((False,), "watermarks are not supported"),
    }

    decoder_input_details: StrictBool = False
    details: StrictBool = False
    do_sample: StrictBool = False
    grammar: dict[str, Any] | None = None

    echo: Any = Field(None, alias="return_full_text")
    frequency_penalty: Any = None
    ignore_eos: Any = Field(None, alias="ignore_eos_token")
    lora_path: Any = Field(None, alias="adapter_id")
    max_tokens: Any = Field(None, alias="max_new_tokens")
    merged_adapters: Any = None
    repetition_penalty: Any = None
    response_format: Any = None
    seed: Any = None
    stop: Any = None
    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    truncate_prompt_tokens: Any = Field(None, alias="truncate")


READ_HERE = {"decoder_input_details", "details", "do_sample", "grammar"}

NAMES = {
    "prompt": "inputs",
    "structured_outputs": "grammar",
    **{name: field.alias for name, field in Parameters.model_fields.items() if field.alias},
}
"""The client's names for fields of the completion request."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request to generate text."""

    completion: CompletionRequest
    details: bool
    in_list: bool
    """Return a list with the whole response."""
    samples: bool
    """False: greedy."""

    @classmethod
    def parse(cls, body: bytes, limits: RequestLimits, *, stream: bool | None = None) -> GenerateRequest:
        """stream: as the route demands; None: as the body says, with the whole response in a list."""
        asked = GenerateBody.read(body, limits)
        given = validated(Parameters, asked.parameters)
        samples = bool(given.do_sample or given.model_fields_set & {"top_k", "top_p"} or given.temperature)
        streams = asked.stream if stream is None else stream
        details = given.details or given.decoder_input_details
        completion = {
            **NEUTRAL,
            "include_stop_str_in_output": True,
            "max_tokens": MAX_NEW_TOKENS,
            **({} if samples else {"temperature": 0.0}),
            **given.model_dump(exclude=READ_HERE, exclude_unset=True),
            "logprobs": 0 if details or streams else None,
            "prompt": asked.inputs,
            "prompt_logprobs": 0 if given.decoder_input_details else None,
            "stream": streams,
            "structured_outputs": _grammar(given.grammar),
        }
        with renaming(NAMES):
            asked_for = CompletionRequest.of(completion, limits)
        if given.max_tokens is None:
            asked_for.allow_less()
        return cls(asked_for, details, stream is None, samples)


def _grammar(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    kind, text = given.get("type"), given.get("value")
    if kind == "json_schema" and isinstance(text, dict):
        kind, text = "json", text.get("schema")
    if kind not in ("json", "regex") or text is None:
        raise ApiError(400, "grammar must have the type json, json_schema or regex, and a value", param="grammar")
    return {kind: text}
