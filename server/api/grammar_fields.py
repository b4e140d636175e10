"""Fields that ask for output that matches a grammar: OpenAI's, vLLM's, SGLang's and llama.cpp's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import from_json

from ...core.requests.grammar import Grammar, GrammarKind
from ...core.requests.json_schemas import open_object, relaxed
from ..errors import ApiError

if TYPE_CHECKING:
    from ..access.limits import RequestLimits


class GrammarFields(BaseModel):
    """Fields of a body, of which at most one may define the output's grammar."""

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
        """Return the field that defines the output's grammar, and the grammar; None if there is none.

        Raises an ApiError for two of them, and for a grammar that is too large.
        """
        found = list(self._grammars())
        if len(found) > 1:
            (one, _), (other, _), *_ = found
            raise ApiError(400, f"{one} and {other} both define the output's grammar; give one of them", param=other)
        for name, grammar in found:
            check_size(name, grammar, limits)
            return name, grammar
        return None

    def _grammars(self) -> Iterator[tuple[str, Grammar]]:
        for name, kind in _PLAIN.items():
            value = getattr(self, name)
            if value is not None and (name, value) != _NO_GRAMMAR:
                yield name, _read(name, kind, value)
        for name, value in (self.structured_outputs or {}).items():
            full = f"structured_outputs.{name}"
            if name not in _KINDS and name not in _STRUCTURED_HARMLESS:
                known = ", ".join(_KINDS)
                raise ApiError(400, f"{full} is not known; it may have {known}", param=full, code="unknown_parameter")
            if name in _KINDS and value not in (None, False):
                yield full, _read(full, name, value)
        if self.response_format is not None and (grammar := _of_format(self.response_format)) is not None:
            yield "response_format", grammar


def _of_format(asked: dict[str, Any]) -> Grammar | None:
    """The grammar of a response_format. It is enforced whether it says `strict` or not; for a schema with `strict:
    false`, rules that can't be enforced are dropped.
    """
    name, inside = "response_format", {**asked}
    kind = inside.pop("type", None)
    if kind == "text" and not inside:
        return None
    if kind == "json_object" and inside.keys() <= {"schema"}:
        schema = inside.get("schema")
        return _read(name, "json", schema) if schema else Grammar(GrammarKind.JSON_OBJECT)
    if kind == "json_schema" and inside.keys() == {"json_schema"} and isinstance(inside["json_schema"], dict):
        return _of_json_schema(name, inside["json_schema"])
    if kind == "structural_tag":
        return _read(name, kind, inside)
    raise ApiError(
        400,
        "response_format must be text, json_object, json_schema with its json_schema, or structural_tag",
        param=name,
    )


def _of_json_schema(name: str, asked: dict[str, Any]) -> Grammar:
    schema, strict = asked.get("schema"), asked.get("strict")
    if not isinstance(strict, bool | None):
        raise ApiError(400, f"{name}.json_schema.strict must be true or false", param=name)
    if not isinstance(schema, dict):
        raise ApiError(400, f"{name}.json_schema has no schema", param=name)
    if strict:
        check_strict(schema, f"{name}.json_schema.schema", name)
    return _read(name, "json", relaxed(schema) if strict is False else schema)


def check_strict(schema: Any, where: str, param: str) -> None:
    """Raises an ApiError for a schema at `where` that shall be strict, and has an object that may have further
    properties, as OpenAI does.
    """
    if (path := open_object(schema)) is not None:
        place = f"{where}.{path}" if path else where
        raise ApiError(
            400,
            f"with strict, {place} must have additionalProperties, which must be false; add "
            '"additionalProperties": false to each object, or leave strict out',
            param=param,
        )


_KINDS: dict[str, tuple[GrammarKind, type | tuple[type, ...], str]] = {
    "json": (GrammarKind.JSON_SCHEMA, (str, dict), "a JSON schema, as an object or as text"),
    "regex": (GrammarKind.REGEX, str, "a string"),
    "choice": (GrammarKind.CHOICE, list, "a list of strings"),
    "grammar": (GrammarKind.GRAMMAR, str, "a string"),
    "structural_tag": (GrammarKind.STRUCTURAL_TAG, (str, dict), "structures and triggers"),
    "json_object": (GrammarKind.JSON_OBJECT, object, ""),
}
"""Kinds of grammars under vLLM's names: the types of their values, and these types in words."""

_PLAIN = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""The same kinds as fields of their own."""

_NO_GRAMMAR = "grammar", ""
"""llama.cpp's default. Any other value than null asks for something: a client whose constraint turned out empty must
not get an answer without one."""


def _read(name: str, kind: str, value: Any) -> Grammar:
    """The grammar that a field defines. Raises an ApiError for a value of another type."""
    grammar_kind, types, what = _KINDS[kind]
    if value in ("", []):
        raise ApiError(400, f"{name} is empty; say what the output must match, or leave it out", param=name)
    if not isinstance(value, types) or (kind == "choice" and not all(isinstance(each, str) for each in value)):
        raise ApiError(400, f"{name} must be {what}", param=name)
    if kind == "json_object":
        return Grammar(grammar_kind)
    if kind == "structural_tag":
        value = _json_of(name, value) if isinstance(value, str) else value
        if not isinstance(value, dict) or not {"structures", "triggers"} <= value.keys():
            message = f"{name} needs structures and triggers; its form with format is not supported"
            raise ApiError(400, message, param=name)
    return Grammar(grammar_kind, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _json_of(name: str, text: str) -> Any:
    try:
        return from_json(text)
    except ValueError as error:
        raise ApiError(400, f"{name} must be JSON: {error}", param=name) from None


_STRUCTURED_HARMLESS = frozenset({"disable_fallback", "disable_any_whitespace"})
"""vLLM's options without an effect here: there is one backend, and blanks are few in any case."""


def check_size(name: str, grammar: Grammar, limits: RequestLimits) -> None:
    """Raises an ApiError for a grammar that would take too long to compile."""
    size = len(grammar.text.encode("utf-8", "surrogatepass"))
    if size > limits.max_grammar_bytes:
        raise ApiError(400, f"{name} has {size} bytes, this server accepts {limits.max_grammar_bytes}", param=name)
    if grammar.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG):
        size = _pattern_bytes(name, grammar.text)
    elif grammar.kind == GrammarKind.CHOICE:
        size = 0
    if size > limits.max_pattern_bytes:
        raise ApiError(
            400,
            f"{name} has {size} bytes of regular expressions or rules, this server accepts {limits.max_pattern_bytes}",
            param=name,
        )


def _pattern_bytes(name: str, text: str) -> int:
    """Bytes of the regular expressions in a schema."""
    left, size = [_json_of(name, text)], 0
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
