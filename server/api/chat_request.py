"""The body of POST /v1/chat/completions.

Tests: tests/server/test_chat.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator, model_validator
from pydantic_core import from_json

from ..access.limits import RequestLimits, check_counts, check_json
from ..errors import ApiError, validated
from ..text.conversation import RESERVED_FOR_TEMPLATE, Conversation, text_in
from ..text.tokenizer import Tokenizer
from .fields import MESSAGE, check_messages, other_fields
from .images.image_parts import image_of, is_image
from .openai import GenerationRequest, LogprobCount
from .tool_fields import ToolFields

PARTS = {"type": "array", "items": {"type": "object"}}
"""The schema of content in parts."""


class ChatMessage(BaseModel):
    """One message of a conversation; fields other than role and content go to the chat template unchanged."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[list[Any], WithJsonSchema(PARTS)] | None = None
    """A text; or, if it has images, its parts: those of text, and `{"type": "image", "image": ImageFile}`."""

    @field_validator("content", mode="before")
    @classmethod
    def _read_parts(cls, content: Any) -> Any:
        if content is not None and not isinstance(content, str | list):
            raise ValueError("it must be a text, or a list of parts")
        if not isinstance(content, list):
            return content
        parts = [_part(part, index) for index, part in enumerate(content)]
        if any(part["type"] == "image" for part in parts):
            return parts
        return "\n".join(part["text"] for part in parts)

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is missing; a {self.role} message needs it")
        return self

    @model_validator(mode="after")
    def _arguments_are_objects(self) -> ChatMessage:
        """Arguments of earlier tool calls are JSON text in the API, but objects in templates."""
        calls = (self.model_extra or {}).get("tool_calls")
        for index, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError(f"tool_calls[{index}] must have a function with a name")
            arguments = function.get("arguments")
            try:
                value = from_json(arguments or "{}") if isinstance(arguments, str | None) else arguments
            except ValueError:
                value = None
            if not isinstance(value, dict):
                raise ValueError(f"tool_calls[{index}].function.arguments must be a JSON object")
            function["arguments"] = value
        return self

    def for_template(self) -> dict[str, Any]:
        given = self.model_extra or {}
        # in their order: templates may write all fields that they are given
        names = [name for name in given if name in MESSAGE]
        shown = {name: given[name] for name in (*names, *other_fields(given))}
        return {**shown, "role": self.role, "content": self.content or ""}


def _part(part: Any, index: int) -> dict[str, Any]:
    if is_image(part):
        try:
            return {"type": "image", "image": image_of(part)}
        except ValueError as error:
            raise ValueError(f"part {index} {error}") from None
    text = part.get("text") if isinstance(part, dict) and part.get("type") in ("text", "input_text") else None
    if not isinstance(text, str):
        raise ValueError(f"part {index} is neither text nor an image; parts of type text and image_url are supported")
    return {"type": "text", "text": text}


class ConversationBody(BaseModel):
    """The messages of a conversation."""

    messages: list[ChatMessage] = Field(min_length=1)

    @field_validator("messages", mode="before")
    @classmethod
    def _only_what_messages_have(cls, messages: Any) -> Any:
        check_messages(messages)
        return messages


class ChatCompletionRequest(ConversationBody, ToolFields, GenerationRequest):
    """A conversation to continue."""

    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: LogprobCount = 0
    add_special_tokens: bool = False
    echo: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    mm_processor_kwargs: dict[str, Any] = {}

    def check(self, limits: RequestLimits) -> None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs need logprobs=true", param="top_logprobs")
        self.check_tools(limits)
        if self.continue_final_message and self.add_generation_prompt:
            message = "a continued message can't be followed by a new prompt; set add_generation_prompt to false"
            raise ApiError(400, message, param="add_generation_prompt")
        self.check_last_message()
        for name in self.chat_template_kwargs:
            if name in RESERVED_FOR_TEMPLATE:
                message = f"{name} can't be given in chat_template_kwargs"
                raise ApiError(400, message, param="chat_template_kwargs")

    def check_last_message(self) -> None:
        """Raises an ApiError if there is nothing to continue."""
        if self.continue_final_message and not self.messages[-1].content:
            raise ApiError(400, "the last message has no content to continue", param="continue_final_message")

    def with_messages(self, messages: Any, limits: RequestLimits) -> ChatCompletionRequest:
        """The same request about another conversation; only its messages are checked."""
        check_counts({"messages": messages}, limits)
        other = self.model_copy(update={"messages": validated(ConversationBody, {"messages": messages}).messages})
        other.check_last_message()
        return other

    @property
    def num_earlier_calls(self) -> int:
        given = [(message.model_extra or {}).get("tool_calls") for message in self.messages]
        return sum(len(calls) for calls in given if isinstance(calls, list))

    @property
    def asked_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def limit_field(self) -> str | None:
        return super().limit_field if self.max_completion_tokens is None else "max_completion_tokens"

    def ignored(self, tokenizer: Tokenizer) -> list[str]:
        template = tokenizer.chat_template
        effort = self._effort()
        ignored = [] if not effort or any(name in template for name in effort) else ["reasoning_effort"]
        if self.verbosity not in (None, "medium") and "verbosity" not in template:
            ignored.append("verbosity")
        if self.tools and ("tools" not in template or not tokenizer.knows_calls):
            ignored.append("tools")
        if self.thinking_token_budget not in (None, -1) and self.obeyed_budget(tokenizer) is None:
            ignored.append("thinking_token_budget")
        others = {name for message in self.messages for name in other_fields(message.model_extra or {})}
        return [*ignored, *(f"messages.{name}" for name in sorted(others) if name not in template)]

    def _effort(self) -> dict[str, Any]:
        """Template variables from reasoning_effort; the second is for models whose reasoning is only on or off."""
        effort = self.reasoning_effort
        if effort is None:
            return {}
        return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}

    def _verbosity(self) -> dict[str, Any]:
        return {} if self.verbosity is None else {"verbosity": self.verbosity}

    def conversation(self) -> Conversation:
        """Messages and options for the chat template."""
        begins = self.add_generation_prompt
        return Conversation(
            [message.for_template() for message in self.messages],
            begins_output=not self.continue_final_message if begins is None else begins,
            continues_last=self.continue_final_message,
            tools=self.tools,
            variables={**self._effort(), **self._verbosity(), **self.chat_template_kwargs},
            add_special_tokens=self.add_special_tokens,
        )


def has_messages(body: bytes) -> bool:
    """True if a body contains a conversation; False if it is not a JSON object."""
    try:
        return "messages" in from_json(body)
    except (ValueError, TypeError):
        return False


class Conversations(BaseModel):
    """The body of POST /v1/chat/completions/batch; fields other than messages are a chat request's."""

    model_config = ConfigDict(extra="allow")

    messages: list[Annotated[list[dict[str, Any]], Field(min_length=1)]] = Field(min_length=1)

    @field_validator("messages", mode="before")
    @classmethod
    def _are_several(cls, given: Any) -> Any:
        if isinstance(given, list) and not all(isinstance(one, list) for one in given):
            raise ValueError("they must be a list of conversations, each a list of messages")
        return given


@dataclass(frozen=True, slots=True)
class ChatBatch:
    """One request with several conversations, POST /v1/chat/completions/batch."""

    asked: ChatCompletionRequest
    """The batch as a chat request with the first conversation."""
    conversations: list[Conversation]

    @classmethod
    def of(cls, asked: ChatCompletionRequest) -> ChatBatch:
        return cls(asked, [asked.conversation()])

    @property
    def begun(self) -> list[str]:
        """The text before each choice under `echo`: the last message, if it is the assistant's."""
        last = [one.messages[-1] for one in self.conversations]
        return [text_in(message["content"]) if message["role"] == "assistant" else "" for message in last]

    @classmethod
    def parse(cls, body: bytes, limits: RequestLimits) -> ChatBatch:
        check_json(body, limits.max_json_values)
        read = validated(Conversations, body)
        given, fields = read.messages, read.model_extra or {}
        if fields.get("stream"):
            raise ApiError(400, "several conversations can't be streamed; send a request for each", param="stream")
        if len(given) > limits.max_prompts:
            message = f"at most {limits.max_prompts} conversations are allowed in one request, got {len(given)}"
            raise ApiError(400, message, param="messages")
        asked = ChatCompletionRequest.of({**fields, "messages": given[0]}, limits)
        others = (asked.with_messages(one, limits) for one in given[1:])
        return cls(asked, [one.conversation() for one in (asked, *others)])
