"""Arguments as nested elements, whose tags begin with a mark: `MARK<NAME>VALUEMARK</NAME>` (MiniMax-M3).

Tests: tests/server/text/test_nested_syntax.py, tests/server/api/test_calls_read_back.py
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.requests.json_schemas import NOTES
from .allowed_values import AllowedValues
from .argument_syntax import ArgumentSyntax, Rules
from .nested_arguments import MAX_NAME, NestedArguments
from .tagged_syntax import dangling, value_grammar, wrong_texts
from .whole_schemas import under

_OBJECT = {"type", "properties", "required", "additionalProperties"}
_ARRAY = {"type", "items"}


@dataclass(frozen=True)
class NestedSyntax(ArgumentSyntax):
    """Arguments as elements.

    A text is written as it is, up to its closing tag, so no text has that. An object has an element for each member, a
    list one for each item. Objects and lists whose schemas say more than that, and all other values, are JSON, whose
    strings may have the tag.
    """

    mark: str
    item: str = "item"
    """The name of a list's elements."""

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.mark,)

    def reader(self, schema: Mapping[str, Any], ends: Sequence[str] = ()) -> NestedArguments:
        del ends
        return NestedArguments(self.mark, self.item, schema)

    def grammar(self, schema: Mapping[str, Any], rules: Rules) -> str:
        """In the order of the schema's properties. Of texts, enum and const are enforced."""
        values = AllowedValues(schema)
        return self._members(values.properties(schema), values.required(schema), values, rules)

    def is_object(self, schema: Any) -> bool:
        """True if objects of this schema are written as elements."""
        return (
            isinstance(schema, Mapping)
            and schema.get("type") == "object"
            and not schema.keys() - _OBJECT - NOTES
            and bool(properties := schema.get("properties"))
            and not set(schema.get("required") or ()) - properties.keys()
            and all(map(self._can_name, properties))
        )

    def is_list(self, schema: Any) -> bool:
        """True if lists of this schema are written as elements."""
        return (
            isinstance(schema, Mapping)
            and schema.get("type") == "array"
            and not schema.keys() - _ARRAY - NOTES
            and bool(schema.get("items"))
        )

    def _members(
        self, properties: Mapping[str, Any], required: Collection[str], values: AllowedValues, rules: Rules
    ) -> str:
        parts = []
        for name, each in properties.items():
            part = self._element(name, each, values, rules)
            parts.append(part if name in required else f"({part})?")
        return " ".join(parts)

    def _element(self, name: str, schema: Any, values: AllowedValues, rules: Rules) -> str:
        """An element from its tag to its closing tag, each of which is spelt in one piece: several begin alike."""
        spelt, close, allowed = rules.spelt, f"{self.mark}</{name}>", values.of(schema)
        opening, end = spelt(f"{self.mark}<{name}>"), spelt(close)
        if allowed.is_text and allowed.texts is not None:
            texts = (*allowed.texts, "null") if allowed.is_nullable else allowed.texts
            return f"{opening} ({' | '.join(map(json.dumps, texts))}) {end}"
        if allowed.is_text:
            rule, is_new = rules.reserve("text", close)
            if is_new:
                rules.add(spelt.text_up_to(rule, close))
            return f"{opening} {rule}"
        if self.is_object(schema):
            members = self._members(schema["properties"], schema.get("required") or (), values, rules)
            return f"{opening} {members} {end}"
        if self.is_list(schema):
            return f"{opening} ({self._element(self.item, schema['items'], values, rules)})* {end}"
        return f"{opening} {value_grammar(schema, values.root)} {end}"

    def unwritable(self, schema: Mapping[str, Any]) -> str | None:
        if (found := dangling(schema)) is not None:
            return found
        values = AllowedValues(schema)
        properties = values.properties(schema)
        for name in properties:
            if not self._can_name(name):
                return f"properties.{name}: this model's format of tool calls writes no such name"
        return self._unwritable({"type": "object", "properties": properties}, "", values)

    def _unwritable(self, schema: Any, path: str, values: AllowedValues) -> str | None:
        """Say which text in a schema can't be written; None: all can."""
        for where, name, each in self._elements(schema, path):
            if (reason := wrong_texts(values.of(each), f"{self.mark}</{name}>")) is not None:
                return f"{where}: {reason}"
            if (found := self._unwritable(each, where, values)) is not None:
                return found
        return None

    def _elements(self, schema: Any, path: str) -> list[tuple[str, str, Any]]:
        """Where the elements of values of a schema are said, their names, and their schemas."""
        if self.is_object(schema):
            return [(under(path, f"properties.{name}"), name, each) for name, each in schema["properties"].items()]
        return [(under(path, "items"), self.item, schema["items"])] if self.is_list(schema) else []

    def _can_name(self, name: str) -> bool:
        """True if a member's name is read back as it is."""
        fits = 0 < len(name) <= MAX_NAME and name == name.strip()
        return fits and ">" not in name and not name.startswith("/") and self.mark not in name
