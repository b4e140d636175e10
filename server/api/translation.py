"""From the body of another API to a chat request: fields that are read anew, passed on, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import RootModel

from ...core.requests.sampling_params import InvalidRequest
from ..access.limits import RequestLimits, check_json
from ..errors import ApiError, clipped, validated
from .fields import unknown_field

CHATS_OWN = frozenset(
    (
        "add_generation_prompt", "continue_final_message", "echo", "logprobs", "max_completion_tokens",
        "max_new_tokens", "max_tokens", "messages", "n", "n_cmpl", "n_predict", "prompt", "prompt_logprobs",
        "response_format", "return_full_text", "return_step_info", "return_token_ids", "return_tokens_as_token_ids",
    )
)  # fmt: skip
"""Fields of chat that ask for what other APIs' answers have no room for, or that these name otherwise."""

Refused = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields that can't be obeyed: the values that ask for nothing, and what to do instead."""


def read_fields(body: bytes, limits: RequestLimits, known: Collection[str], refused: Refused) -> dict[str, Any]:
    """A body's fields, without nulls and without refused fields whose value asks for nothing.

    known: the API's own fields. Raises an ApiError for a refused one, and for fields of chat that have no meaning here.
    """
    check_json(body, limits.max_json_values)
    fields = {
        name: value for name, value in validated(RootModel[dict[str, Any]], body).root.items() if value is not None
    }
    for name in list(fields):
        if name in refused:
            neutral, instead = refused[name]
            if not any(fields[name] == nothing and type(fields[name]) is type(nothing) for nothing in neutral):
                message = f"{name} is not supported with this value: {instead}"
                raise ApiError(400, message, param=name, code="unsupported_parameter")
            del fields[name]
        elif name in CHATS_OWN and name not in known:
            raise unknown_field(name, known)
    return fields


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """A block in which errors about fields of chat have the names that the client gave them."""
    try:
        yield
    except InvalidRequest as error:
        field = _renamed(error.field, names)
        raise InvalidRequest(field, str(error).replace(error.field, field)) from None
    except ApiError as error:
        if error.param is not None:
            param = _renamed(error.param, names)
            error.message, error.param = error.message.replace(error.param, param), param
        raise


def _renamed(param: str, names: Mapping[str, str]) -> str:
    """The field as the client named it; of a field that was built from several, without its place inside."""
    head = re.split(r"[.\[]", param, maxsplit=1)[0]
    return names.get(head, param)


def typed(fields: Mapping[str, Any], name: str, kind: type | tuple[type, ...], what: str, where: str = "") -> Any:
    """A field that is null or of a kind. Raises an ApiError that says `what` it must be."""
    value = fields.get(name)
    if value is None or (isinstance(value, kind) and not (isinstance(value, bool) and kind is int)):
        return value
    raise wrong(where + name, what)


def wrong(param: str, what: str) -> ApiError:
    return ApiError(400, f"{clipped(param)} must be {what}", param=param)


def unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="unsupported_parameter")


def objects(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of objects. Raises an ApiError that names the place."""
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


def part_text(part: dict[str, Any], where: str, kinds: Collection[str]) -> str:
    kind = part.get("type")
    if kind not in kinds:
        message = f"{where} is of type {clipped(repr(kind))}; only {', '.join(kinds)} can be read by a language model"
        raise unsupported(f"{where}.type", message)
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise wrong(f"{where}.text", "a string")
    return text
