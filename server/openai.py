"""The bodies clients send: OpenAI's fields, and those of vLLM's and our own extensions that we take.

Fields that nobody knows are ignored, as the SDKs send many; `null` is as good as absent. Fields that would change the
answer and that we don't have are refused unless they ask for what we do anyway.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..core.sampling_params import InvalidRequest, SamplingParams
from .errors import ApiError, from_validation

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
INT64_MAX = 2**63 - 1

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
"""Known fields that we don't have, with the values that ask for nothing."""

AnyRequest = TypeVar("AnyRequest", bound="GenerationRequest")


class StreamOptions(BaseModel):
    """How a stream is sent."""

    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What completions and chat completions have in common."""

    model_config = ConfigDict(extra="allow")

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stop: list[str] = []

    top_k: int = 0
    ignore_eos: bool = False
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
        return request

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def output_limit(self, room: int) -> int:
        """Most tokens to generate when `room` tokens of the context are left (below 1: the prompt is too long)."""
        raise NotImplementedError

    def sampling_params(self, room: int) -> SamplingParams:
        """Raises InvalidRequest for values out of range. A limit beyond the context's end is cut to it."""
        return SamplingParams(
            max_tokens=self.output_limit(max(room, 1)),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,  # vLLM's word for "all tokens"
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Any = None
    max_tokens: int | None = 16
    add_special_tokens: bool = True

    def output_limit(self, room: int) -> int:
        return min(self.max_tokens if self.max_tokens is not None else 16, room)

    def prompts(self, limit: int) -> list[str | list[int]]:
        """One entry per choice: a text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str) or _is_token_list(prompt):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise InvalidRequest(
                "prompt", "prompt must be a string, a list of token ids, or a non-empty list of either"
            )
        if len(prompt) > limit:
            raise InvalidRequest("prompt", f"at most {limit} prompts are taken at once, these are {len(prompt)}")
        for index, entry in enumerate(prompt):
            if not (isinstance(entry, str) or _is_token_list(entry)):
                raise InvalidRequest(f"prompt[{index}]", f"prompt[{index}] must be a string or a list of token ids")
        return prompt


class Message(BaseModel):
    """One message of a conversation; fields we don't know go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_text_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        texts = []
        for index, part in enumerate(content):
            text = part.get("text") if isinstance(part, dict) and part.get("type") in ("text", "input_text") else None
            if not isinstance(text, str):
                raise ValueError(f"part {index} is no text part; only parts of type text are supported")
            texts.append(text)
        return "\n".join(texts)

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is missing; a {self.role} message needs it")
        return self

    def for_template(self) -> dict[str, Any]:
        return {**(self.model_extra or {}), "role": self.role, "content": self.content or ""}


class ChatCompletionRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None

    def output_limit(self, room: int) -> int:
        asked = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return room if asked is None else min(asked, room)


def _is_token_list(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
