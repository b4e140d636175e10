"""Fields that the request bodies have in common.

OpenAI's fields, Chorus's extensions, the supported extensions of vLLM, and other servers' names for them: see `fields`.

Tests: tests/server/api/test_fields.py
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)

from ...core.requests.grammar import Grammar
from ...core.requests.request_params import MAX_LOGPROBS, RequestParams
from ...memory.adapters.composition import MAX_TERMS
from ..access.grants import NOWHERE
from ..access.limits import RequestLimits, check_counts, check_json
from ..errors import ApiError, clipped, no_room, validated
from ..text.output_parts import PartReader
from ..text.output_syntax import OutputSyntax
from ..text.tokenizer import Tokenizer
from .adapters.scaled_adapters import LlamaAdapter, MergedAdapters, ScaledAdapter, composed
from .fields import AllThatFit, own_fields
from .grammar_fields import GrammarFields
from .prediction import Prediction
from .sampling_defaults import SamplingDefaults

MAX_NAME_CHARACTERS = 256
MAX_STOP_CHARACTERS = 1024
INT64_MAX = 2**63 - 1

SAME = ("presence_penalty", "frequency_penalty", "seed", "ignore_eos")
"""Fields that are passed on as sampling parameters."""

LEAST_MASS = 1e-9
"""A nucleus that only the likeliest token is in."""

DEFAULTED = ("temperature", "top_p", "min_p", "repetition_penalty")
"""Fields for which the model has defaults."""

LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
TokenLimit = Annotated[
    int | None, WrapValidator(lambda given, check: given if isinstance(given, AllThatFit) else check(given))
]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]

AnyRequest = TypeVar("AnyRequest", bound="GenerationRequest")


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's; with include_usage, every chunk has the counts so far."""
    include_obfuscation: bool = False
    """OpenAI's padding of chunks, which does not change the content; this server adds none."""


class GenerationRequest(GrammarFields):
    """Fields that completions and chat completions have in common."""

    model_config = ConfigDict(extra="forbid")

    model: Name | None = None
    lora_path: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = None
    adapters: Annotated[list[ScaledAdapter], Field(max_length=MAX_TERMS)] | None = None
    lora: Annotated[list[LlamaAdapter], Field(max_length=MAX_TERMS)] | None = None
    merged_adapters: MergedAdapters | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(default=1, ge=1)
    max_tokens: TokenLimit = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stop: list[str] = []

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    bad_words: list[str] = []
    allowed_token_ids: list[int] | None = None
    logprob_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    prompt_logprobs: LogprobCount | None = None
    stop_token_ids: list[int] = []
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_step_info: bool = False
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] = "left"
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    prediction: Prediction | None = None
    request_id: Annotated[str, Field(pattern="^[A-Za-z0-9._:-]{1,128}$")] | None = None

    _limit_may_be_cut: bool = PrivateAttr(False)
    _named: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="before")
    @classmethod
    def _only_what_we_have(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict):
            return body
        own = own_fields(body, cls.model_fields)
        check_counts(own, info.context or RequestLimits())
        return own

    @field_validator("lora_path", mode="before")
    @classmethod
    def _one_adapter(cls, names: Any) -> Any:
        if not isinstance(names, list):
            return names
        if not names or any(name != names[0] for name in names):
            raise ValueError("a request can use one adapter; send a request for each")
        return names[0]

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, stop: Any) -> Any:
        stops = ([stop] if stop else []) if isinstance(stop, str) else stop
        if isinstance(stops, list):
            if "" in stops:
                raise ValueError("a stop string can't be empty")
            if any(isinstance(stop, str) and len(stop) > MAX_STOP_CHARACTERS for stop in stops):
                raise ValueError(f"a stop string can't be longer than {MAX_STOP_CHARACTERS} characters")
        return stops

    @field_validator("bad_words")
    @classmethod
    def _no_empty_word(cls, words: list[str]) -> list[str]:
        if "" in words:
            raise ValueError("a bad word can't be empty")
        if any(len(word) > MAX_STOP_CHARACTERS for word in words):
            raise ValueError(f"a bad word can't be longer than {MAX_STOP_CHARACTERS} characters")
        return words

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_token_ids(cls, biases: dict[str, float]) -> dict[str, float]:
        wrong = [key for key in biases if not (key.isascii() and key.isdigit() and len(key) < 10)]
        if wrong:
            shown = ", ".join(repr(key[:40]) for key in wrong[:4]) + (", …" if len(wrong) > 4 else "")
            raise ValueError(f"not token ids: {shown}; give ids as decimal strings")
        return biases

    @classmethod
    def parse(cls: type[AnyRequest], body: bytes, limits: RequestLimits) -> AnyRequest:
        """Parse a body; raises an ApiError that names the field."""
        check_json(body, limits.max_json_values)
        return cls.of(body, limits)

    @classmethod
    def of(cls: type[AnyRequest], body: bytes | dict[str, Any], limits: RequestLimits) -> AnyRequest:
        """A request from a body, or from its fields, within the limits."""
        request = validated(cls, body, context=limits)
        if "stream_options" in request.model_fields_set and not request.stream:
            raise ApiError(400, "stream_options need stream=true", param="stream_options")
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            count = getattr(request, name, None)
            if count is not None and count > limits.max_logprobs:
                raise ApiError(400, f"{name} is {count}, this server returns at most {limits.max_logprobs}", param=name)
        if request.logprob_token_ids and (request.num_logprobs is None or request.prompt_only):
            message = "logprob_token_ids need logprobs, and tokens to generate"
            raise ApiError(400, message, param="logprob_token_ids")
        request.name_adapters()
        request.check(limits)
        return request

    @property
    def has_numbers(self) -> bool:
        """True if it names adapters by numbers, which `name_adapters` needs to know."""
        return any(isinstance(one.id, int) for one in self.lora or ())

    def name_adapters(self, numbers: Mapping[int, str] | None = None) -> None:
        """Set `lora_path` to the one name of the adapters that other fields name. Raises an ApiError.

        numbers: names of adapters by their numbers. None: not known yet, so it is no adapter's name until they are.
        """
        if self.has_numbers and self.lora_path == NOWHERE:
            self.lora_path = None
        names = dict.fromkeys((one.id for one in self.lora or () if isinstance(one.id, int)), NOWHERE)
        named = composed(self.adapters, self.lora, self.merged_adapters, names if numbers is None else numbers)
        if named is None:
            return
        field, composition = named
        model = composition.model
        self._named = composition.named
        if self.lora_path:
            raise ApiError(400, f"lora_path and {field} both name adapters; give one of them", param=field)
        self.lora_path = NOWHERE if self.has_numbers and numbers is None else model

    @property
    def named(self) -> tuple[str, ...]:
        """Adapters that fields with scales name, those with the scale 0, too."""
        return self._named

    def check(self, limits: RequestLimits) -> None:
        """Raises an ApiError for fields that contradict each other."""

    def ignored(self, tokenizer: Tokenizer) -> list[str]:
        """Fields without an effect, because the model's chat template does not use them."""
        return [] if self.reasoning_effort is None else ["reasoning_effort"]

    def syntax(self, tokenizer: Tokenizer) -> OutputSyntax:
        """The kinds of parts to parse the output for."""
        return OutputSyntax()

    def reader(self, syntax: OutputSyntax) -> PartReader | None:
        """A parser for one choice's output; None if plain text suffices."""
        return None

    def output_grammars(
        self, content: tuple[str, Grammar] | None, syntax: OutputSyntax, tokenizer: Tokenizer, limits: RequestLimits
    ) -> list[tuple[str, Grammar]]:
        """Grammars that can be enforced, each with its field; the output matches the last one.

        content: the grammar of the content, and the field that defines it.
        """
        return [] if content is None else [content]

    def explained(self, message: str) -> str:
        """The fault of a grammar of `output_grammars`, with the path in the request of the part that it is about."""
        return message

    @property
    @abstractmethod
    def asked_logprobs(self) -> int | None:
        """Number of top log-probabilities per generated token that the client asks for; None: no logprobs."""

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives to report with each generated token; None: no log-probabilities."""
        asked, named = self.asked_logprobs, len(self.logprob_token_ids)
        return asked if asked is None or not named else named + 1  # the token itself is one of them

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for prompt tokens."""
        return self.prompt_logprobs

    @property
    def scores_field(self) -> str:
        """The name of the field that asks for log-probabilities, for errors."""
        return "logprobs" if self.num_logprobs is not None else "prompt_logprobs"

    @property
    def prompt_only(self) -> bool:
        """True if no tokens are to be generated."""
        return False

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options.include_usage and self.stream_options.continuous_usage_stats

    def allow_less(self) -> None:
        """Take a limit on tokens that the context has no room for as all that it has room for."""
        self._limit_may_be_cut = True

    def check_room(self, prompt: int, context: int) -> None:
        """Raises an ApiError for a limit on tokens that the client gives and the context has no room for.

        prompt: tokens of the prompt. context: most tokens of a prompt with its output.
        """
        asked, field = self.asked_tokens, self.limit_field
        if asked is not None and field is not None and asked > context - prompt and not self._limit_may_be_cut:
            raise no_room(context, field, asked, prompt)

    @property
    def limit_field(self) -> str | None:
        """The field with the client's limit on tokens; None if it gives none, or asks for all that fit."""
        return None if self.max_tokens is None or isinstance(self.max_tokens, AllThatFit) else "max_tokens"

    @property
    @abstractmethod
    def asked_tokens(self) -> int | None:
        """Most tokens to generate; None if the client gives no limit. `AllThatFit` is more than any context has."""

    def cut(self, prompt: list[int], context: int) -> list[int]:
        """A prompt truncated by `truncate_prompt_tokens`; -1 keeps as much as leaves room for the output."""
        kept = self.truncate_prompt_tokens
        if kept == -1:
            asked = self.asked_tokens or 1
            kept = max(context - (1 if isinstance(asked, AllThatFit) else asked), 1)
        if kept is None or kept >= len(prompt):
            return prompt
        return prompt[:kept] if self.truncation_side == "right" else prompt[len(prompt) - kept :]

    def stop_or(self, defaults: SamplingDefaults) -> list[str]:
        """The stop strings; the model's where the request has none of its own."""
        return self.stop if "stop" in self.model_fields_set else list(defaults.stop)

    def sampling_params(
        self,
        room: int,
        defaults: SamplingDefaults,
        bad_words: tuple[tuple[int, ...], ...] = (),
        unasked_limit: int | None = None,
        grammar: Grammar | None = None,
    ) -> list[RequestParams]:
        """An entry for each of the prompt's `n` choices, which differ only in their seeds: seed, seed + 1, ….

        room: tokens left in the context, to which a default limit, or one that `allow_less` is about, is cut.
        unasked_limit: most tokens if the client gives no limit. Raises InvalidRequest for values out of range.
        """
        asked = self.asked_tokens
        limit = unasked_limit if asked is None else asked
        most = 1 if self.prompt_only else None if limit is None else min(limit, max(room, 1))
        least = self.min_tokens
        if "min_tokens" not in self.model_fields_set:
            least = min(defaults.min_tokens, max(room, 1) if most is None else most)
        chosen = {name: _or(getattr(self, name), getattr(defaults, name)) for name in DEFAULTED}
        if chosen["top_p"] == 0:  # the likeliest token alone, as at OpenAI
            chosen["top_p"] = LEAST_MASS
        first = RequestParams(
            **{name: getattr(self, name) for name in SAME},
            **chosen,
            max_tokens=most,
            min_tokens=least,
            top_k=0 if self.top_k == -1 else _or(self.top_k, defaults.top_k),  # -1: vLLM's word for "all tokens"
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            stop_token_ids=tuple(self.stop_token_ids),
            bad_words=bad_words,
            logprobs=self.asked_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            logprob_token_ids=tuple(self.logprob_token_ids),
            grammar=grammar,
        )
        if self.seed is None:
            return [first] * self.n
        return [replace(first, seed=self.seed + index) for index in range(self.n)]


def names_of(base: str, model: str | None, lora_path: str | None = None) -> tuple[str, str | None]:
    """The model's name in the response, and the adapter's name or None. base: the base model's name.

    The adapter is `model`, the part of it after `base:` (SGLang), or `lora_path` if `model` names no other.
    """
    model = base if model is None else model.removeprefix(f"{base}:") or base
    if not lora_path or lora_path == model:
        return model, None if model == base else model
    if model != base:
        other = f"model is {clipped(model)!r}, but another field names {clipped(lora_path)!r}"
        raise ApiError(400, f"the request names two adapters: {other}; give one of them", param="model")
    return lora_path, lora_path


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
