"""What the bodies that clients send have in common.

OpenAI's fields, and those of vLLM's and our own extensions that we take. Fields that nobody knows are ignored, as the
SDKs send many; `null` is as good as absent. Fields that would change the answer and that we don't have are refused
unless they ask for what we do anyway.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..core.sampling_params import MAX_LOGPROBS, SamplingParams
from .errors import ApiError, from_validation

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_BAD_WORDS = 1024
INT64_MAX = 2**63 - 1

LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Known fields that we don't have, or not in this kind of call, with the values that ask for nothing."""

AnyRequest = TypeVar("AnyRequest", bound="GenerationRequest")


class StreamOptions(BaseModel):
    """How a stream is sent. continuous_usage_stats: vLLM's; with include_usage, every chunk has the counts so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(BaseModel):
    """What completions and chat completions have in common."""

    model_config = ConfigDict(extra="allow")

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1)
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stop: list[str] = []

    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    bad_words: list[str] = Field(default=[], max_length=MAX_BAD_WORDS)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    prompt_logprobs: LogprobCount | None = None
    stop_token_ids: list[int] = []
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_step_info: bool = False

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, stop: Any) -> Any:
        stops = [stop] if isinstance(stop, str) else stop
        if isinstance(stops, list):
            if len(stops) > MAX_STOPS:
                raise ValueError(f"at most {MAX_STOPS} stop strings are taken, these are {len(stops)}")
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
        for key in biases:
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError(f"the key {key[:40]!r} is no token id; give ids as decimal strings")
        return biases

    @classmethod
    def parse(cls: type[AnyRequest], body: bytes) -> AnyRequest:
        """Reads a body; raises an ApiError that names the field."""
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            raise from_validation(error) from None
        for name, value in (request.model_extra or {}).items():
            harmless = UNSUPPORTED.get(name)
            if harmless is not None and not any(value == nothing for nothing in harmless):
                raise ApiError(400, f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "stream_options need stream=true", param="stream_options")
        request.check()
        return request

    def check(self) -> None:
        """Raises an ApiError for fields that don't go together."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many alternatives to report with each generated token; None: no log-probabilities."""

    @property
    def num_prompt_scores(self) -> int | None:
        """The same of prompt tokens."""
        return self.prompt_logprobs

    @property
    def prompt_only(self) -> bool:
        """Whether nothing is to be generated."""
        return False

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options.continuous_usage_stats

    @abstractmethod
    def output_limit(self, room: int) -> int | None:
        """Most tokens to generate when `room` tokens of the context are left (below 1: the prompt is too long).

        None: as many as there is room for, in the engine's memory, too.
        """

    def sampling_params(self, room: int, bad_words: tuple[tuple[int, ...], ...] = ()) -> list[SamplingParams]:
        """An entry for each of the prompt's `n` choices, which differ in their seeds only: seed, seed + 1, ….

        Raises InvalidRequest for values out of range. A limit beyond the context's end is cut to it.
        """
        first = SamplingParams(
            max_tokens=1 if self.prompt_only else self.output_limit(max(room, 1)),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,  # vLLM's word for "all tokens"
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            bad_words=bad_words,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_scores,
        )
        if self.seed is None:
            return [first] * self.n
        return [replace(first, seed=self.seed + index) for index in range(self.n)]
