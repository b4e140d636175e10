"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from .errors import ApiError
from .openai import GenerationRequest, LogprobCount


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
    """A conversation to continue."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: LogprobCount = 0

    def check(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs need logprobs=true", param="top_logprobs")

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def output_limit(self, room: int) -> int | None:
        asked = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return None if asked is None else min(asked, room)
