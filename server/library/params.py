"""`SamplingParams` of the library: the fields of the HTTP API, checked by the same code."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Never, TypedDict, Unpack

from pydantic_core import from_json

from ...core.requests.grammar import Grammar, GrammarKind
from ...core.requests.request_params import MAX_LOGPROBS, InvalidRequest
from ..access.limits import RequestLimits
from ..api.chat_request import ChatCompletionRequest
from ..api.completion_request import DEFAULT_MAX_TOKENS, CompletionRequest
from ..api.fields import ALIASES, ALL_THAT_FIT, HARMLESS, NEUTRAL, unknown_field
from ..api.sampling_defaults import SamplingDefaults
from ..errors import ApiError, GenerationFailed

_NAMED = "name adapters with scales by adapter=, as A*0.7+B*0.5"

ELSEWHERE = {
    **dict.fromkeys(("adapters", "lora", "merged_adapters"), _NAMED),
    "lora_path": "name it by adapter=",
    "messages": "they are chat's first argument",
    "model": "an adapter is named by adapter=, and the model is the LLM's",
    "prompt": "it is generate's first argument",
    "request_id": "completions come in the order of the prompts",
    "return_step_info": "it concerns HTTP responses; leave it out",
    "return_tokens_as_token_ids": "a Completion has token ids as they are",
    "stream": "use llm.stream or llm.stream_chat",
    "stream_options": "a stream's completion has its token ids once the stream has ended",
}
"""Fields of HTTP bodies that are not sampling parameters here, each with its alternative."""

ALWAYS = {"return_token_ids": "a Completion has them always"}
"""Fields that are accepted and ask for something that is always there."""

COMPLETION_FIELDS = CompletionRequest.model_fields.keys() - ELSEWHERE.keys()
CHAT_FIELDS = ChatCompletionRequest.model_fields.keys() - ELSEWHERE.keys()
FIELDS = COMPLETION_FIELDS | CHAT_FIELDS
"""Fields of `SamplingParams`, without other servers' names for them."""

_BY_KIND = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.JSON_OBJECT: "json_object",
    GrammarKind.REGEX: "regex",
    GrammarKind.CHOICE: "choice",
    GrammarKind.GRAMMAR: "grammar",
    GrammarKind.STRUCTURAL_TAG: "structural_tag",
}
"""Names within `structured_outputs` of a Grammar's kinds."""

_ANY_CONVERSATION = [{"role": "user", "content": "x"}]

_NO_LIMITS = RequestLimits().model_copy(
    update={**dict.fromkeys(RequestLimits.model_fields, 1 << 62), "max_logprobs": MAX_LOGPROBS}
)
"""Limits of the model are checked for each request."""


class SamplingFields(TypedDict, total=False):
    """Arguments of `SamplingParams`; docs/reference/parameters.md says which kinds of requests support which."""

    n: int
    max_tokens: int | None
    max_completion_tokens: int | None
    min_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | Mapping[str, float]
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int] | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    logprobs: int | bool | None
    top_logprobs: int
    prompt_logprobs: int | None
    logprob_token_ids: Sequence[int]
    json: str | Mapping[str, Any] | type | None
    choice: Sequence[str] | None
    regex: str | None
    grammar: str | Grammar | None
    ebnf: str | None
    json_schema: str | Mapping[str, Any] | type | None
    structural_tag: str | Mapping[str, Any] | None
    structured_outputs: Mapping[str, Any] | None
    response_format: Mapping[str, Any] | None
    guided_json: str | Mapping[str, Any] | type | None
    guided_regex: str | None
    guided_choice: Sequence[str] | None
    guided_grammar: str | None
    best_of: int | None
    echo: bool
    add_special_tokens: bool
    skip_special_tokens: bool
    return_token_ids: bool
    truncate_prompt_tokens: int | None
    truncation_side: str
    cache_salt: str
    prediction: Mapping[str, Any] | None
    reasoning_effort: str | None
    verbosity: str | None
    thinking_token_budget: int | None
    separate_reasoning: bool
    include_reasoning: bool
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]


class SamplingParams:
    """Parameters of sampling, stopping, the output's grammar and the reported details.

    Takes the fields of POST /v1/completions and /v1/chat/completions by their names, and other servers' names for them;
    each is honored or refused as over HTTP. Fields that are left out have the model's defaults, or OpenAI's. Without
    `max_tokens` a prompt's completion has 16 tokens, and a conversation's as many as fit; None: as many as fit. A
    Grammar, and a pydantic model's class for `json`, are accepted as well. Raises InvalidRequest.
    """

    __slots__ = ("_given",)

    def __init__(self, *given: Never, **fields: Unpack[SamplingFields]) -> None:
        if given:
            raise InvalidRequest("params", "SamplingParams takes fields by name, such as temperature=0")
        plain = {name: _plain(value) for name, value in fields.items()}
        with python_errors():
            _check_names(plain)
        if isinstance(grammar := plain.get("grammar"), Grammar):
            plain.pop("grammar")
            if plain.get("structured_outputs"):
                raise InvalidRequest(
                    "grammar", "grammar and structured_outputs both define the output's grammar; give one of them"
                )
            plain["structured_outputs"] = _structured(grammar)
        self._given = MappingProxyType(plain)
        with python_errors():
            self._check()

    @property
    def given(self) -> Mapping[str, Any]:
        """The fields that were given, as plain values."""
        return self._given

    def replace(self, **fields: Unpack[SamplingFields]) -> SamplingParams:
        """A copy with other values of some fields."""
        merged: dict[str, Any] = {**self._given, **fields}
        return SamplingParams(**merged)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in FIELDS:
            raise AttributeError(f"SamplingParams has no field {name!r}")
        if name in self._given:
            return self._given[name]
        kind = CompletionRequest if name in COMPLETION_FIELDS else ChatCompletionRequest
        return kind.model_fields[name].get_default(call_default_factory=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (dict(self._given),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamplingParams) and self._given == other._given

    __hash__ = None  # pyright: ignore[reportAssignmentType] - fields may be lists

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self._given.items())})"

    def _check(self) -> None:
        """Raise an ApiError or InvalidRequest for values that no model could honor."""
        own = {name: ALIASES.get(name, name) for name in self._given}
        texts = {name: value for name, value in self._given.items() if own[name] not in CHAT_FIELDS - COMPLETION_FIELDS}
        if not {"max_tokens", "max_completion_tokens"} & set(own.values()):
            least = texts.get("min_tokens", 0)
            texts["max_tokens"] = max(DEFAULT_MAX_TOKENS, least) if isinstance(least, int) else DEFAULT_MAX_TOKENS
        asked = CompletionRequest.of(texts, _NO_LIMITS)
        asked.sampling_params(1 << 30, SamplingDefaults())
        asked.asked_grammar(_NO_LIMITS)
        if len(texts) <= len(self._given) and self._given.keys() - texts.keys():
            ChatCompletionRequest.of(self.for_chat(_ANY_CONVERSATION), _NO_LIMITS)

    def for_text(self, prompt: Any) -> dict[str, Any]:
        """The body of the equivalent completion request."""
        body = {**self._given, "prompt": prompt}
        if self._given.get("max_tokens", 0) is None:
            body["max_tokens"] = ALL_THAT_FIT
        return body

    def for_chat(self, messages: Any) -> dict[str, Any]:
        """The body of the equivalent chat request; `logprobs` is a number here, but a flag and a number there."""
        body = {**self._given, "messages": messages}
        if (count := body.get("logprobs")) is not None and not isinstance(count, bool):
            if body.setdefault("top_logprobs", count) != count:
                raise ApiError(400, "logprobs and top_logprobs differ; give one of them", param="logprobs")
            body["logprobs"] = True
        return body


def _rebuilt(fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**fields)


def _check_names(fields: Mapping[str, Any]) -> None:
    """Raises an ApiError for a field that does not exist, or not here."""
    for name in fields:
        if (instead := ELSEWHERE.get(ALIASES.get(name, name))) is not None:
            raise ApiError(400, f"{name} is not a sampling parameter; {instead}", param=name)
        if name not in FIELDS and name not in ALIASES and name not in HARMLESS and name not in NEUTRAL:
            raise unknown_field(name, FIELDS)


def _structured(grammar: Grammar) -> dict[str, Any]:
    """The field `structured_outputs` that requests a grammar."""
    kind = GrammarKind(grammar.kind)
    if grammar.around:
        raise InvalidRequest("grammar", "a Grammar's `around` is for the server only; combine both into one grammar")
    if kind == GrammarKind.JSON_OBJECT:
        return {"json_object": True}
    return {_BY_KIND[kind]: from_json(grammar.text) if kind == GrammarKind.CHOICE else grammar.text}


def plain_copy(value: Any) -> Any:
    """A value as JSON data that shares nothing with the caller's value."""
    return copy.deepcopy(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(_plain(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if callable(schema := getattr(value, "model_json_schema", None)) and isinstance(value, type):
        return schema()
    if callable(listed := getattr(value, "tolist", None)):  # numpy's and torch's arrays and numbers
        return listed()
    return value


@contextmanager
def python_errors(where: str = "") -> Iterator[None]:
    """A `with` block that converts HTTP errors to the library's: InvalidRequest, or GenerationFailed if the caller is
    not at fault. where: prefix of an InvalidRequest's text, such as `prompt 3: `.
    """
    try:
        yield
    except ApiError as error:
        if error.status >= 500:
            raise GenerationFailed(where + error.message) from None
        raise InvalidRequest(error.param or "request", where + error.message) from None
    except InvalidRequest as error:
        error.args = (where + str(error),)
        raise
