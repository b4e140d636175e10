"""What the parts of a schema allow: types and texts, with all that they refer to.

Tests: tests/server/text/test_allowed_values.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

from ...core.requests.json_schemas import resolved, subschemas

NULLS = ("null", "None")
"""How models write null."""

_MOST_DEPTH = 64
"""Levels of references, alternatives and conjuncts; those below allow anything."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """The values that a schema allows, as far as their types, const and enum tell."""

    by_kind: Mapping[str, Mapping[Any, None] | None] | None = None
    """Their types, by JSON schema's names, each with the only values of it, in order; None: any."""

    @property
    def kinds(self) -> frozenset[str] | None:
        """Their types; None: any."""
        return None if self.by_kind is None else frozenset(self.by_kind)

    @property
    def texts(self) -> Collection[str] | None:
        """The strings among them; None: any."""
        return None if self.by_kind is None else self.by_kind.get("string", ())

    @property
    def is_nullable(self) -> bool:
        return self.by_kind is not None and "null" in self.by_kind

    @property
    def is_text(self) -> bool:
        """True if they are strings, or null as well, where no string is written as null is."""
        kinds, texts = self.by_kind or {}, self.texts or ()
        is_alone = "string" in kinds and len(kinds) == 1 + self.is_nullable
        return is_alone and not (self.is_nullable and any(null in texts for null in NULLS))

    def __contains__(self, value: Any) -> bool:
        kind = kind_of(value)
        if self.by_kind is None or kind not in self.by_kind:
            return self.by_kind is None
        values = self.by_kind[kind]
        return values is None or value in values

    def __and__(self, other: Allowed) -> Allowed:
        if other is self or other.by_kind is None or self.by_kind is None:
            return self if other.by_kind is None else other
        both = [kind for kind in self.by_kind if kind in other.by_kind]
        found = {kind: _both(self.by_kind[kind], other.by_kind[kind]) for kind in both}
        return Allowed({kind: values for kind, values in found.items() if values is None or values})


def any_of(several: Iterable[Allowed]) -> Allowed:
    """What one of several allows."""
    found: dict[str, dict[Any, None] | None] = {}
    for each in {id(each): each for each in several}.values():
        if each.by_kind is None:
            return _ANY
        for kind, values in each.by_kind.items():
            known = found.setdefault(kind, {})
            if known is not None and values is not None:
                known.update(values)
            else:
                found[kind] = None
    return Allowed(found)


def _of_values(values: Iterable[Any]) -> Allowed:
    """What allows these values alone; of lists and objects, all."""
    found: dict[str, dict[Any, None] | None] = {}
    for each in values:
        if (kind := kind_of(each)) in ("array", "object"):
            found[kind] = None
        else:
            of_kind = found[kind] = found.get(kind) or {}
            of_kind[each] = None
    return Allowed(found)


_ANY, _NONE, _NULL = Allowed(), Allowed({}), Allowed({"null": None})


def _both(one: Mapping[Any, None] | None, other: Mapping[Any, None] | None) -> Mapping[Any, None] | None:
    if one is None or other is None:
        return other if one is None else one
    fewer, more = sorted((one, other), key=len)
    return {each: None for each in fewer if each in more}


class AllowedValues:
    """What the parts of one document allow. Rules that are wrong, or mean nothing here, allow anything."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._known: dict[int, tuple[Any, Allowed]] = {}  # by identity; each keeps its schema alive
        self._inners: dict[tuple[int, str | int], tuple[Any, Any]] = {}

    def of(self, schema: Any, depth: int = 0) -> Allowed:
        """What a schema allows."""
        if not isinstance(schema, Mapping):
            return _NONE if schema is False else _ANY
        if id(schema) not in self._known:
            self._known[id(schema)] = schema, _ANY  # while it is looked at: a schema within itself says nothing
            if depth < _MOST_DEPTH:
                found = reduce(Allowed.__and__, self._rules(schema, depth + 1), _ANY)
                if schema.get("nullable") is True and found.texts is None:  # OpenAPI 3.0's; an enum has its own null
                    found = any_of([found, _NULL])
                self._known[id(schema)] = schema, found
        return self._known[id(schema)][1]

    def _rules(self, schema: Mapping[str, Any], depth: int) -> Iterator[Allowed]:
        """What each rule of a schema allows."""
        if (kinds := _named(schema.get("type"))) is not None:
            yield Allowed(dict.fromkeys(kinds))
        if schema.get("not") in ({}, True):
            yield _NONE
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            yield _of_values(values)
        for several in _alternatives(schema):
            yield any_of([self.of(each, depth) for each in several])
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
        found: dict[str, list[Any]] = {}
        for part in self.conjuncts(schema):
            for name, each in _mapping(part, "properties").items():
                found.setdefault(name, []).append(each)
        return {name: {"allOf": several} if len(several) > 1 else several[0] for name, several in found.items()}

    def required(self, schema: Any) -> set[str]:
        """The names that an object must have, also by its conjuncts."""
        several = [part.get("required") for part in self.conjuncts(schema)]
        return {each for names in several if isinstance(names, list) for each in names if isinstance(each, str)}

    def inner(self, schema: Any, key: str | int) -> Any:
        """The schema of an object's member or a list's item, also where an alternative tells; True: nothing does."""
        place = id(schema), key if isinstance(key, str) else min(key, self._most_first)
        if place not in self._inners:
            self._inners[place] = schema, self._inner(schema, place[1], {}, 0)
        return self._inners[place][1]

    @cached_property
    def _most_first(self) -> int:
        """The items of a list that may have schemas of their own."""
        firsts = (each.get(name) for _, each in subschemas(self.root) for name in ("prefixItems", "items"))
        return max((len(each) for each in firsts if isinstance(each, list)), default=0)

    def _inner(self, schema: Any, key: str | int, seen: dict[int, Any], depth: int) -> Any:
        if not isinstance(schema, Mapping) or id(schema) in seen or depth > _MOST_DEPTH:
            return seen.get(id(schema), True)
        seen[id(schema)] = True
        rules = [_own_inner(schema, key)]
        rules += [self._inner(each, key, seen, depth + 1) for each in self._further(schema)]
        for several in _alternatives(schema):
            rules.append(_joined("anyOf", [self._inner(each, key, seen, depth + 1) for each in several]))
        seen[id(schema)] = _joined("allOf", rules)
        return seen[id(schema)]


def _joined(name: str, schemas: Sequence[Any]) -> Any:
    """One schema of those that tell something; True: none does."""
    told = [*{id(each): each for each in schemas if each is not True}.values()]
    return {name: told} if len(told) > 1 else told[0] if told else True


def _own_inner(schema: Mapping[str, Any], key: str | int) -> Any:
    """The schema of a member or an item, by a schema's own properties or items; True: it does not tell."""
    if isinstance(key, str):
        own = _mapping(schema, "properties")
        if key in own:
            return own[key] if isinstance(own[key], Mapping) else True
        others = [*_mapping(schema, "patternProperties").values(), schema.get("additionalProperties")]
        return _joined("anyOf", [each for each in others if isinstance(each, Mapping)])
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
