"""Fields that ask for answers that match a grammar: OpenAI's, vLLM's, SGLang's and llama.cpp's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import from_json

from ...core.requests.grammar import Grammar, GrammarKind
from ..errors import ApiError

if TYPE_CHECKING:
    from ..access.limits import RequestLimits


class GrammarFields(BaseModel):
    """Fields of a body; one of them at most may say what the answer matches."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None

    def asked_grammar(self, limits: RequestLimits) -> tuple[str, Grammar] | None:
        """Return the field that says what the answer matches, and its grammar; None if there is none.

        Raises an ApiError for two of them, and for a grammar that is larger than this server takes.
        """
        found = list(self._grammars())
        if len(found) > 1:
            (one, _), (other, _), *_ = found
            raise ApiError(400, f"{one} and {other} both say what the answer matches; give one of them", param=other)
        for name, grammar in found:
            check_size(name, grammar, limits)
            return name, grammar
        return None

    def _grammars(self) -> Iterator[tuple[str, Grammar]]:
        for name, read in _PLAIN.items():
            if value := getattr(self, name):
                yield name, read(name, value)
        for name, value in (self.structured_outputs or {}).items():
            full = f"structured_outputs.{name}"
            if name not in _STRUCTURED and name not in _STRUCTURED_HARMLESS:
                known = ", ".join(_STRUCTURED)
                raise ApiError(400, f"{full} is not known; it may have {known}", param=full, code="unknown_parameter")
            if name in _STRUCTURED and value not in (None, False):  # what is empty asks for something, too
                yield full, _STRUCTURED[name](full, value)
        if self.response_format is not None and (grammar := _of_format(self.response_format)) is not None:
            yield "response_format", grammar


def _of_format(asked: dict[str, Any]) -> Grammar | None:
    """The grammar of a response_format. What it says is enforced whether it says `strict` or not."""
    name, inside = "response_format", {**asked}
    kind = inside.pop("type", None)
    if kind == "text" and not inside:
        return None
    if kind == "json_object" and inside.keys() <= {"schema"}:
        schema = inside.get("schema")
        return _schema(name, schema) if schema else Grammar(GrammarKind.JSON_OBJECT)
    if kind == "json_schema" and inside.keys() == {"json_schema"} and isinstance(inside["json_schema"], Mapping):
        schema = inside["json_schema"].get("schema")
        if isinstance(schema, Mapping):
            return _schema(name, schema)
        raise ApiError(400, "response_format.json_schema has no schema", param=name)
    if kind == "structural_tag":
        return _structural_tag(name, inside)
    raise ApiError(
        400, "response_format may be text, json_object, json_schema with its json_schema, or structural_tag", param=name
    )


def _schema(name: str, value: Any) -> Grammar:
    if not isinstance(value, str | Mapping):
        raise ApiError(400, f"{name} must be a JSON schema, as an object or as text", param=name)
    return Grammar(GrammarKind.JSON_SCHEMA, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _choice(name: str, value: Any) -> Grammar:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ApiError(400, f"{name} must be a list of strings", param=name)
    return Grammar(GrammarKind.CHOICE, json.dumps(value, ensure_ascii=False))


def _structural_tag(name: str, value: Any) -> Grammar:
    if isinstance(value, str):
        try:
            value = from_json(value)
        except ValueError as error:
            raise ApiError(400, f"{name} is no JSON: {error}", param=name) from None
    if not isinstance(value, Mapping) or not {"structures", "triggers"} <= value.keys():
        raise ApiError(400, f"{name} needs structures and triggers; its form with format is not supported", param=name)
    return Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(value, ensure_ascii=False))


def _text(kind: GrammarKind) -> Callable[[str, Any], Grammar]:
    def read(name: str, value: Any) -> Grammar:
        if not isinstance(value, str):
            raise ApiError(400, f"{name} must be a string", param=name)
        return Grammar(kind, value)

    return read


def _any_object(name: str, value: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_OBJECT)


_PLAIN: dict[str, Callable[[str, Any], Grammar]] = {
    "guided_json": _schema,
    "guided_regex": _text(GrammarKind.REGEX),
    "guided_choice": _choice,
    "guided_grammar": _text(GrammarKind.GRAMMAR),
    "json_schema": _schema,
    "regex": _text(GrammarKind.REGEX),
    "ebnf": _text(GrammarKind.GRAMMAR),
    "grammar": _text(GrammarKind.GRAMMAR),
    "structural_tag": _structural_tag,
}

_STRUCTURED: dict[str, Callable[[str, Any], Grammar]] = {
    "json": _schema,
    "regex": _text(GrammarKind.REGEX),
    "choice": _choice,
    "grammar": _text(GrammarKind.GRAMMAR),
    "json_object": _any_object,
    "structural_tag": _structural_tag,
}

_STRUCTURED_HARMLESS = frozenset({"disable_fallback", "disable_any_whitespace"})
"""vLLM's, of which the answer does not depend here: there is one backend, and blanks are few in any case."""


def check_size(name: str, grammar: Grammar, limits: RequestLimits) -> None:
    """Raises an ApiError for a grammar that would take too long to compile."""
    size = len(grammar.text.encode("utf-8", "surrogatepass"))
    if size > limits.max_grammar_bytes:
        raise ApiError(
            400, f"{name} has {size} bytes, this server takes grammars of {limits.max_grammar_bytes}", param=name
        )
    if grammar.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG):
        size = _pattern_bytes(name, grammar.text)
    elif grammar.kind == GrammarKind.CHOICE:
        size = 0
    if size > limits.max_pattern_bytes:
        raise ApiError(
            400,
            f"{name} has {size} bytes of regular expressions or rules, this server takes {limits.max_pattern_bytes}",
            param=name,
        )


def _pattern_bytes(name: str, text: str) -> int:
    """Bytes of the regular expressions in a schema."""
    try:
        left, size = [from_json(text)], 0
    except ValueError as error:
        raise ApiError(400, f"{name} is no JSON: {error}", param=name) from None
    while left:
        value = left.pop()
        if isinstance(value, dict):
            keys = value.get("patternProperties")
            patterns = [value.get("pattern"), *(keys if isinstance(keys, dict) else ())]
            size += sum(
                len(pattern.encode("utf-8", "surrogatepass")) for pattern in patterns if isinstance(pattern, str)
            )
            left += value.values()
        elif isinstance(value, list):
            left += value
    return size
