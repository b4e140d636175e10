"""What the parts of a schema allow: types and texts, with all that they refer to.

Tests: tests/server/text/test_allowed_values.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from ...core.requests.json_schemas import resolved

NULLS = ("null", "None")
"""How models write null."""

_MOST_DEPTH = 64
"""Levels of references, alternatives and conjuncts; those below allow anything."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """The values that a schema allows, as far as their types, const and enum tell."""

    kinds: frozenset[str] | None = None
    """Their types, by JSON schema's names; None: any."""
    texts: tuple[str, ...] | None = None
    """The strings among them; None: any."""

    @property
    def is_nullable(self) -> bool:
        return self.kinds is not None and "null" in self.kinds

    @property
    def is_text(self) -> bool:
        """True if they are strings, or null as well, where no string is written as null is."""
        kinds = self.kinds or frozenset()
        return "string" in kinds <= {"string", "null"} and not (self.is_nullable and {*NULLS} & {*(self.texts or ())})

    def __and__(self, other: Allowed) -> Allowed:
        kinds = _both(self.kinds, other.kinds)
        texts = self.texts if other.texts is None else other.texts
        if self.texts is not None and other.texts is not None:
            texts = tuple(each for each in self.texts if each in other.texts)
        if kinds is not None and (texts == () or "string" not in kinds):
            return Allowed(kinds - {"string"}, ())
        return Allowed(kinds, texts)

    def __or__(self, other: Allowed) -> Allowed:
        kinds = None if self.kinds is None or other.kinds is None else self.kinds | other.kinds
        texts = None if self.texts is None or other.texts is None else (*dict.fromkeys(self.texts + other.texts),)
        return Allowed(kinds, texts)


_ANY, _NONE = Allowed(), Allowed(frozenset(), ())


def _both(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    return one if other is None else other if one is None else one & other


class AllowedValues:
    """What the parts of one document allow. Rules that are wrong, or mean nothing here, allow anything."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._known: dict[int, tuple[Any, Allowed]] = {}  # by identity; each keeps its schema alive

    def of(self, schema: Any, depth: int = 0) -> Allowed:
        """What a schema allows."""
        if not isinstance(schema, Mapping):
            return _NONE if schema is False else _ANY
        if id(schema) not in self._known:
            self._known[id(schema)] = schema, _ANY  # while it is looked at: a schema within itself says nothing
            if depth < _MOST_DEPTH:
                self._known[id(schema)] = schema, reduce(Allowed.__and__, self._rules(schema, depth + 1), _ANY)
        return self._known[id(schema)][1]

    def _rules(self, schema: Mapping[str, Any], depth: int) -> Iterator[Allowed]:
        """What each rule of a schema allows."""
        if (kinds := _named(schema.get("type"))) is not None:
            yield Allowed(kinds, None if "string" in kinds else ())
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            yield reduce(Allowed.__or__, map(_only, values), _NONE)
        for several in _alternatives(schema):
            yield reduce(Allowed.__or__, (self.of(each, depth) for each in several), _NONE)
        for each in self._further(schema):
            yield self.of(each, depth)

    def _further(self, schema: Mapping[str, Any]) -> list[Any]:
        """The schemas that a value of a schema must match, too: its reference's target, and its conjuncts."""
        reference, conjuncts = schema.get("$ref"), schema.get("allOf")
        targets = [resolved(reference, self.root)] if isinstance(reference, str) else []
        return [*targets, *(conjuncts if isinstance(conjuncts, list) else ())]

    def conjuncts(self, schema: Any) -> list[Mapping[str, Any]]:
        """A schema and all that its values must match, too."""
        found: dict[int, Mapping[str, Any]] = {}
        left = [schema]
        while left:
            each = left.pop()
            if isinstance(each, Mapping) and id(each) not in found:
                found[id(each)] = each
                left += reversed(self._further(each))
        return [*found.values()]

    def properties(self, schema: Any) -> dict[str, Any]:
        """The properties of an object's schema, with those of its conjuncts."""
        found: dict[str, Any] = {}
        for part in self.conjuncts(schema):
            for name, each in _mapping(part, "properties").items():
                found[name] = {"allOf": [found[name], each]} if name in found else each
        return found

    def required(self, schema: Any) -> set[str]:
        """The names that an object must have, also by its conjuncts."""
        several = [part.get("required") for part in self.conjuncts(schema)]
        return {each for names in several if isinstance(names, list) for each in names if isinstance(each, str)}

    def inner(self, schema: Any, key: str | int) -> Any:
        """The schema of an object's member or a list's item, also where an alternative tells; True: nothing does."""
        return self._inner(schema, key, {}, 0)

    def _inner(self, schema: Any, key: str | int, seen: dict[int, Any], depth: int) -> Any:
        if id(schema) in seen or depth > _MOST_DEPTH:
            return seen.get(id(schema), True)
        seen[id(schema)] = True
        rules = []
        for part in self.conjuncts(schema):
            rules.append(_own_inner(part, key))
            rules += (
                _joined("anyOf", [self._inner(each, key, seen, depth + 1) for each in several])
                for several in _alternatives(part)
            )
        seen[id(schema)] = _joined("allOf", rules)
        return seen[id(schema)]


def _joined(name: str, schemas: Sequence[Any]) -> Any:
    """One schema of those that tell something; True: none does."""
    told = [each for each in schemas if each is not True]
    return {name: told} if len(told) > 1 else told[0] if told else True


def _own_inner(schema: Mapping[str, Any], key: str | int) -> Any:
    """The schema of a member or an item, by a schema's own properties or items; True: it does not tell."""
    if isinstance(key, str):
        found = _mapping(schema, "properties").get(key, schema.get("additionalProperties"))
        return found if isinstance(found, Mapping) else True
    items = schema.get("items")
    first = next((each for each in (schema.get("prefixItems"), items) if isinstance(each, list)), [])
    found = first[key] if key < len(first) else items
    return found if isinstance(found, Mapping) else True


def _mapping(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = schema.get(name)
    return found if isinstance(found, Mapping) else {}


def _alternatives(schema: Mapping[str, Any]) -> list[Sequence[Any]]:
    return [each for name in ("anyOf", "oneOf") if isinstance(each := schema.get(name), list)]


def _named(names: Any) -> frozenset[str] | None:
    """The kinds that a schema's `type` names."""
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list):
        return None
    kinds = frozenset(each for each in names if isinstance(each, str))
    return kinds | {"integer"} if "number" in kinds else kinds


def _only(value: Any) -> Allowed:
    """What allows this value alone."""
    return Allowed(frozenset({kind_of(value)}), (value,) if isinstance(value, str) else ())


def kind_of(value: Any) -> str:
    """The type of a value, by JSON schema's names."""
    is_whole = isinstance(value, float) and value.is_integer()
    return "integer" if is_whole else _KINDS[type(value)]


_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
"""Names of types in JSON schemas."""
