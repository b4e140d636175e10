"""Schemas with all that they refer to, for formats that have a grammar of their own.

Tests: tests/server/text/test_literal_syntax.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.requests.json_schemas import UNENFORCED, merged, resolved

_MOST_REFERENCES = 32
"""References in a row, after which one refers to itself."""


class UnwritableError(ValueError):
    """A schema whose values can't be written."""

    def __init__(self, path: str, reason: str) -> None:
        """path: of the part that is why."""
        super().__init__(f"{path or 'the schema'}: {reason}")


def under(path: str, name: str) -> str:
    """The path of a part of a schema."""
    return f"{path}.{name}".removeprefix(".")


class WholeSchemas:
    """The parts of one schema, each with what it refers to. Raises UnwritableError for what can't be enforced."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._targets: dict[str, Mapping[str, Any] | None] = {}  # by their references
        self._under_way: set[str] = set()

    def whole(self, schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        """A schema with what it refers to, and with all of its `allOf`."""
        if unenforced := sorted(schema.keys() & UNENFORCED):
            verb = "is a rule" if len(unenforced) == 1 else "are rules"
            raise UnwritableError(
                path, f"{', '.join(unenforced)} {verb} that can't be enforced; leave it out, or say strict: false"
            )
        own = {name: each for name, each in schema.items() if name not in ("$ref", "allOf")}
        parts: list[Mapping[str, Any]] = [own]
        if "$ref" in schema:
            parts.append(self._whole_target(schema["$ref"], path))
        conjuncts = schema.get("allOf") or ()
        if not isinstance(conjuncts, Sequence):
            raise UnwritableError(under(path, "allOf"), "must be an array of schemas")
        for index, each in enumerate(conjuncts):
            parts.append(self.whole(each if isinstance(each, Mapping) else {}, under(path, f"allOf[{index}]")))
        try:
            return merged(parts)
        except ValueError as error:
            raise UnwritableError(path, str(error)) from None

    def _whole_target(self, reference: Any, path: str) -> Mapping[str, Any]:
        """The schema that a reference means, with all that it refers to."""
        target, key = self.target(reference, path), f"{reference}"
        if self._targets.setdefault(key, None) is None:
            if key in self._under_way:
                raise UnwritableError(under(path, "$ref"), f"{reference!r} refers to itself")
            self._under_way.add(key)
            self._targets[key] = self.whole(target, path)
            self._under_way.discard(key)
        return self._targets[key] or {}

    def target(self, reference: Any, path: str) -> Mapping[str, Any]:
        """The schema that a reference means, where it is no reference alone."""
        for _ in range(_MOST_REFERENCES):
            is_here = isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))
            found = resolved(reference, self._root) if is_here else None
            if found is True:
                return {}
            if not isinstance(found, Mapping):
                raise UnwritableError(under(path, "$ref"), f"{reference!r} is no schema within this one")
            if found.keys() != {"$ref"}:
                return found
            reference = found["$ref"]
        raise UnwritableError(under(path, "$ref"), f"{reference!r} refers to itself")
