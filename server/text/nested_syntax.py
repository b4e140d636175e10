"""Arguments as nested elements, whose tags begin with a mark: `MARK<NAME>VALUEMARK</NAME>` (MiniMax-M3).

Tests: tests/server/text/test_nested_syntax.py, tests/server/api/test_calls_read_back.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.requests.json_schemas import NOTES
from .argument_syntax import ArgumentSyntax, Rules
from .nested_arguments import MAX_NAME, NestedArguments
from .tagged_syntax import allowed_texts, dangling, value_grammar
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
        return self._members(schema, schema, rules)

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

    def _members(self, schema: Mapping[str, Any], whole: Mapping[str, Any], rules: Rules) -> str:
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        parts = []
        for name, each in properties.items():
            kind = each if isinstance(each, Mapping) else {}
            part = self._element(name, kind, whole, rules)
            parts.append(part if name in required else f"({part})?")
        return " ".join(parts)

    def _element(self, name: str, schema: Mapping[str, Any], whole: Mapping[str, Any], rules: Rules) -> str:
        """An element from its tag to its closing tag, each of which is spelt in one piece: several begin alike."""
        spelt, close = rules.spelt, f"{self.mark}</{name}>"
        opening, end = spelt(f"{self.mark}<{name}>"), spelt(close)
        if schema.get("type") == "string":
            if (texts := allowed_texts(schema)) is not None:
                return f"{opening} ({' | '.join(json.dumps(text) for text in texts)}) {end}"
            rule, is_new = rules.reserve("text", close)
            if is_new:
                rules.add(spelt.text_up_to(rule, close))
            return f"{opening} {rule}"
        if self.is_object(schema):
            return f"{opening} {self._members(schema, whole, rules)} {end}"
        if self.is_list(schema):
            items = schema["items"] if isinstance(schema["items"], Mapping) else {}
            return f"{opening} ({self._element(self.item, items, whole, rules)})* {end}"
        return f"{opening} {value_grammar(schema, whole)} {end}"

    def unwritable(self, schema: Mapping[str, Any]) -> str | None:
        if (found := dangling(schema)) is not None:
            return found
        for name in schema.get("properties") or {}:
            if not self._can_name(name):
                return f"properties.{name}: this model's format of tool calls writes no such name"
        return self._unwritable({"type": "object", "properties": schema.get("properties") or {}}, "")

    def _unwritable(self, schema: Any, path: str) -> str | None:
        """Say which text in a schema can't be written; None: all can."""
        for where, name, each in self._elements(schema, path):
            if (found := self._wrong_text(where, name, each) or self._unwritable(each, where)) is not None:
                return found
        return None

    def _elements(self, schema: Any, path: str) -> list[tuple[str, str, Any]]:
        """Where the elements of values of a schema are said, their names, and their schemas."""
        if self.is_object(schema):
            return [(under(path, f"properties.{name}"), name, each) for name, each in schema["properties"].items()]
        return [(under(path, "items"), self.item, schema["items"])] if self.is_list(schema) else []

    def _wrong_text(self, where: str, name: str, schema: Any) -> str | None:
        """Say why an element of this name can't have the texts of its schema; None: it can."""
        is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
        texts, close = allowed_texts(schema) if is_text else None, f"{self.mark}</{name}>"
        if texts is not None and not texts:
            return f"{where}: none of the values of const or enum is a string, which its type asks for"
        if any(close in text for text in texts or ()):
            return f"{where}: this model's format of tool calls can't write a value with {close}"
        return None

    def _can_name(self, name: str) -> bool:
        """True if a member's name is read back as it is."""
        fits = 0 < len(name) <= MAX_NAME and name == name.strip()
        return fits and ">" not in name and not name.startswith("/") and self.mark not in name
