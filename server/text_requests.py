"""The bodies of POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from .chat_request import ChatCompletionRequest
from .errors import ApiError, from_validation
from .json_body import check_json
from .limits import RequestLimits
from .openai import Name

Body = TypeVar("Body", bound=BaseModel)


class TextToTokens(BaseModel):
    """A text to tokenize."""

    model_config = ConfigDict(extra="forbid")

    model: Name | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class ChatToTokens(ChatCompletionRequest):
    """A conversation to tokenize; fields that only say how to answer it count for nothing."""

    return_token_strs: bool = False
    tool_choice: Any = "none"


class TokensToText(BaseModel):
    """Tokens to decode."""

    model_config = ConfigDict(extra="forbid")

    model: Name | None = None
    tokens: list[Annotated[int, Field(ge=0)]]

    @classmethod
    def parse(cls, body: bytes, limits: RequestLimits) -> TokensToText:
        return _parse(cls, body, limits)


def tokenize_request(body: bytes, limits: RequestLimits) -> TextToTokens | ChatToTokens:
    """Reads either kind of body of POST /tokenize."""
    check_json(body, limits.max_json_values)
    try:
        is_chat = "messages" in from_json(body)
    except (ValueError, TypeError):
        is_chat = False
    return ChatToTokens.parse(body, limits) if is_chat else _parse(TextToTokens, body, limits)


def _parse(kind: type[Body], body: bytes, limits: RequestLimits) -> Body:
    check_json(body, limits.max_json_values)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() and error.errors(include_input=False)[0]["type"] == "extra_forbidden":
            name = error.errors(include_input=False)[0]["loc"][-1]
            raise ApiError(400, f"there is no field {name!s:.200}; leave it out", param=f"{name!s:.200}") from None
        raise from_validation(error) from None
