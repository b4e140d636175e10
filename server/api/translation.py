"""Converts the body of another API to a chat request: fields are converted, passed on, or refused by name.

Tests: tests/server/api/test_fields.py
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator

from ...core.requests.request_params import InvalidRequest
from ..access.limits import RequestLimits, check_json
from ..errors import ApiError, clipped, validated
from .chat_request import ChatCompletionRequest
from .fields import unknown_field, unsupported
from .images.image_parts import image_of, is_image
from .openai import Name

CHATS_OWN = frozenset(
    (
        "add_generation_prompt",
        "continue_final_message",
        "echo",
        "logprobs",
        "max_completion_tokens",
        "max_new_tokens",
        "max_tokens",
        "messages",
        "n",
        "n_cmpl",
        "n_predict",
        "prompt",
        "prompt_logprobs",
        "response_format",
        "return_full_text",
        "return_step_info",
        "return_token_ids",
        "return_tokens_as_token_ids",
    )
)
"""Chat fields that other APIs' responses have no room for, or that these APIs name differently."""

RefusedFields = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields that can't be honored: the values that ask for nothing, and advice."""


AnyBody = TypeVar("AnyBody", bound="OtherBody")


class OtherBody(BaseModel):
    """The body of an API other than completions and chat; fields that are null count as absent."""

    model_config = ConfigDict(extra="forbid")

    refused: ClassVar[RefusedFields] = {}
    foreign: ClassVar[Mapping[str, str]] = {}
    """Fields of other servers' routes of the same path, each with advice."""
    harmless: ClassVar[Collection[str]] = ()
    """Fields on which no response depends."""

    @model_validator(mode="before")
    @classmethod
    def _obeyed(cls, fields: Any) -> Any:
        """The fields without nulls, harmless ones, and refused ones whose value asks for nothing."""
        if not isinstance(fields, dict):
            return fields
        known = {field.alias or name for name, field in cls.model_fields.items()}
        is_open = cls.model_config.get("extra") == "allow"
        kept = {}
        for name, value in fields.items():
            if value is None or name in cls.harmless:
                continue
            if name in cls.foreign:
                raise ApiError(400, f"there is no field {name!r}; {cls.foreign[name]}", param=name)
            if name in cls.refused:
                _check_neutral(name, value, *cls.refused[name])
            elif name not in known and (name in CHATS_OWN or not is_open):
                raise unknown_field(name, known)
            else:
                kept[name] = value
        return kept

    @classmethod
    def read(cls: type[AnyBody], body: bytes, limits: RequestLimits) -> AnyBody:
        """Raises an ApiError that names the wrong field."""
        check_json(body, limits.max_json_values)
        return validated(cls, body)


class AsChat(OtherBody):
    """A body that is converted to a chat request, which takes the fields that are not declared here unchanged."""

    model_config = ConfigDict(extra="allow")

    model: Name | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def as_chat(self, limits: RequestLimits, names: Mapping[str, str], **translated: Any) -> ChatCompletionRequest:
        """The equivalent chat request. translated: its fields that are not declared here; None where nothing is
        requested. names: the client's, for errors.
        """
        same = self.model_dump(include=set(AsChat.model_fields), exclude_unset=True) | (self.model_extra or {})
        asked = {name: value for name, value in translated.items() if value is not None}
        for name in same.keys() & asked.keys():
            if same[name] != asked[name]:
                other = names.get(name, name)
                raise ApiError(
                    400, f"{name} and {other} have the same meaning but differ; give one of them", param=name
                )
        with renaming(names):
            return ChatCompletionRequest.of(same | asked, limits)


def _check_neutral(name: str, value: Any, neutral: Sequence[Any], instead: str) -> None:
    """Raises an ApiError for a refused field whose value asks for something."""
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
        raise unsupported(name, f"{name} is not supported with this value: {instead}")


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """A `with` block in which errors about chat fields use the client's names."""
    try:
        yield
    except InvalidRequest as error:
        field = _renamed(error.field, names)
        raise InvalidRequest(field, str(error).replace(error.field, field)) from None
    except ApiError as error:
        if error.param is not None:
            param = _renamed(error.param, names)
            placed = _PLACE.sub(lambda found: names.get(found[1], found[0]), error.message)
            error.message, error.param = placed.replace(error.param, param), param
        raise


_PLACE = re.compile(r"(\w+\[\d+\])(\.function)?")
"""Of an item; one that `names` has is no chat tool at the client, so nothing of it is in `function`."""


def _renamed(param: str, names: Mapping[str, str]) -> str:
    """The field's name at the client; for a field built from several, without the position inside it, unless `names`
    has that.
    """
    if (place := _PLACE.match(param)) is not None and place[1] in names:
        return names[place[1]] + param[place.end() :]
    head = re.split(r"[.\[]", param, maxsplit=1)[0]
    return names.get(head, param)


def typed(fields: Mapping[str, Any], name: str, kind: type | tuple[type, ...], what: str, where: str = "") -> Any:
    """A field that is null or of a type. Raises an ApiError with `what` it must be."""
    value = fields.get(name)
    if value is None or (isinstance(value, kind) and not (isinstance(value, bool) and kind is int)):
        return value
    raise wrong(where + name, what)


def wrong(param: str, what: str) -> ApiError:
    return ApiError(400, f"{clipped(param)} must be {what}", param=param)


def objects(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of objects. Raises an ApiError that names the position."""
    if not isinstance(value, list):
        raise wrong(where, "a list of objects")
    for index, each in enumerate(value):
        if not isinstance(each, dict):
            raise wrong(f"{where}[{index}]", "an object")
    return value


def text_of(content: Any, where: str, kinds: Collection[str]) -> str | None:
    """The text of a content: None, a string, or parts of these kinds, joined by line breaks."""
    if content is None or isinstance(content, str):
        return content
    return "\n".join(part_text(part, f"{where}[{index}]", kinds) for index, part in enumerate(objects(content, where)))


def content_of(content: Any, where: str, kinds: Collection[str]) -> str | list[dict[str, Any]] | None:
    """A content with or without images: its text as of `text_of`, or the parts of a chat message."""
    if not isinstance(content, list) or not any(map(is_image, content)):
        return text_of(content, where, kinds)
    return [chat_part(part, f"{where}[{index}]", kinds) for index, part in enumerate(objects(content, where))]


def chat_part(part: dict[str, Any], where: str, kinds: Collection[str]) -> dict[str, Any]:
    """A part of text or an image as a part of a chat message."""
    if not is_image(part):
        return {"type": "text", "text": part_text(part, where, kinds)}
    try:
        return {"type": "image", "image": image_of(part)}
    except ValueError as error:
        raise unsupported(where, f"{where} {error}") from None


def part_text(part: dict[str, Any], where: str, kinds: Collection[str]) -> str:
    kind = part.get("type")
    if kind not in kinds:
        message = f"{where} is of type {clipped(repr(kind))}; only {', '.join(kinds)} are supported"
        raise unsupported(f"{where}.type", message)
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise wrong(f"{where}.text", "a string")
    return text
