"""Inputs of `LLM`: prompts and conversations in the formats that clients use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ...core.requests.request_params import InvalidRequest
from ..api.fields import unknown_field
from .params import python_errors


class TextPrompt(TypedDict):
    """A prompt in the format of vLLM's clients."""

    prompt: str


class TokensPrompt(TypedDict):
    """The same as token ids."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
"""A text, its tokens, or either in a dictionary."""

Messages = Sequence[Mapping[str, Any]]
"""A conversation: OpenAI's messages, with `role` and `content`."""

_FORMS = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


def prompts_of(given: Any) -> tuple[list[str | list[int]], bool]:
    """The prompts as texts or token ids, and whether only one was given. Raises InvalidRequest."""
    given = _listed(given)
    if isinstance(given, list) and not all(map(_is_token, given)):
        return [_prompt(one, f"prompts[{index}]") for index, one in enumerate(given)], False
    return ([], False) if given == [] else ([_prompt(given, "prompts")], True)


def _prompt(given: Any, where: str) -> str | list[int]:
    given = _listed(given)
    if isinstance(given, Mapping):
        return _of_mapping(given, where)
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not all(map(_is_token, given)):
        raise InvalidRequest(where, f"{where} must be {_FORMS}, not {_kind(given)}")
    return given


def _of_mapping(given: Mapping[str, Any], where: str) -> str | list[int]:
    known = ("prompt", "prompt_token_ids")
    for name in given:
        if name not in known:
            with python_errors():
                raise unknown_field(str(name), known, f"{where}.")
    found = {name: given[name] for name in known if given.get(name) is not None}
    if len(found) != 1:
        raise InvalidRequest(where, f"{where} must have one of prompt and prompt_token_ids")
    ((name, value),) = found.items()
    if isinstance(value, str) != (name == "prompt"):
        what = "a text" if name == "prompt" else "a list of token ids"
        raise InvalidRequest(f"{where}.{name}", f"{where}.{name} must be {what}, not {_kind(value)}")
    return _prompt(value, f"{where}.{name}")


def conversations_of(given: Any) -> tuple[list[list[Any]], bool]:
    """The conversations, and whether only one was given. Raises InvalidRequest."""
    messages = _conversation(given, "messages", of="messages, or a list of conversations")
    if messages and all(isinstance(one, Mapping) for one in messages):
        return [messages], True
    return [_conversation(one, f"messages[{index}]") for index, one in enumerate(messages)], False


def _conversation(given: Any, where: str, of: str = "messages, each with role and content") -> list[Any]:
    if not isinstance(given, list | tuple):
        raise InvalidRequest(where, f"{where} must be a list of {of}, not {_kind(given)}")
    return list(given)


def _listed(given: Any) -> Any:
    """A sequence as a list, including an array of token ids from numpy or torch."""
    if callable(listed := getattr(given, "tolist", None)):
        return listed()
    return list(given) if isinstance(given, tuple | range) else given


def _is_token(one: Any) -> bool:
    return isinstance(one, int) and not isinstance(one, bool)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def for_each(value: Any, count: int, name: str, single: type | tuple[type, ...], what: str) -> list[Any]:
    """One value for every prompt. what: the kind of a value, in words. Raises InvalidRequest."""
    if isinstance(value, single):
        return [value] * count
    if not isinstance(value, list | tuple):
        raise InvalidRequest(name, f"{name} must be {what}, or a list of them, not {_kind(value)}")
    if len(value) != count:
        raise InvalidRequest(name, f"got {len(value)} {name} for {count} prompts; give one, or one for each")
    for index, one in enumerate(value):
        if not isinstance(one, single):
            raise InvalidRequest(f"{name}[{index}]", f"{name}[{index}] must be {what}, not {_kind(one)}")
    return list(value)
