"""JSON schemas as llguidance takes them: what it can't enforce, and where a schema asks for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

MAX_OPTIONAL = 500
"""Most optional properties that may come next in an answer. Their number bounds the time of a token, and beyond it the
parser would give up within the answer."""

UNENFORCED = frozenset({
    "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains",
    "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "$dynamicRef",
})  # fmt: skip
"""Keywords of JSON Schema that llguidance refuses."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties")
_TOGETHER = ("anyOf", "oneOf", "allOf")
_LOOKS_AROUND = re.compile(r"\(\?(?:=|!|<=|<!)|\\[1-9]")
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")


def subschemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each schema that is an object within a schema, itself first, with its path."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for name in _MAPS:
        inner = schema.get(name)
        for key, each in inner.items() if isinstance(inner, dict) else ():
            yield from subschemas(each, f"{path}.{name}.{key}" if path else f"{name}.{key}")
    for name in (*_LISTS, *_SINGLES):
        inner = schema.get(name)
        at = f"{path}.{name}" if path else name
        if isinstance(inner, list):
            for index, each in enumerate(inner):
                yield from subschemas(each, f"{at}[{index}]")
        else:
            yield from subschemas(inner, at)


def located(message: str, schema: Any, root: str = "") -> str | None:
    """llguidance's message about a schema with the path of what it is about; None if the schema has no such thing.

    root: path of the schema.
    """
    for path, each in subschemas(schema, root):
        place = path or "the schema"
        if (found := _UNIMPLEMENTED.search(message)) is not None:
            names = [name.strip('" ') for name in found[1].split(",")]
            if all(name in each for name in names):
                verb = "is a rule" if len(names) == 1 else "are rules"
                return (
                    f"{place}: {', '.join(names)} {verb} that can't be enforced; leave it out, or say strict: false "
                    "(of response_format or a function) to have it dropped"
                )
        elif any(_is_about(message, name, each.get(name)) for name in ("format", "type", "$ref", "pattern")):
            return f"{place}: {message}"
        elif message.startswith("oneOf") and "oneOf" in each:
            return f"{place}: it can't be told which one of oneOf an answer matches; use anyOf"
    return None


def _is_about(message: str, name: str, value: Any) -> bool:
    if not isinstance(value, str) or not value:
        return False
    wanted = {"format": f"Unknown format: {value}", "type": f"Invalid type: {value}",
              "$ref": f"'{value.removeprefix('#')}'"}.get(name)  # fmt: skip
    return message == wanted or (name == "$ref" and f"{wanted}" in message) or (
        name == "pattern" and "regex parse error" in message and value in message
    )  # fmt: skip


def check_optional(schema: Any, root: str = "") -> None:
    """Raise ValueError for an object with too many optional properties. root: path of the schema, for the message."""
    counted: dict[int, int] = {}
    for path, each in subschemas(schema, root):
        if (count := _num_optional(each, schema, counted)) > MAX_OPTIONAL:
            raise ValueError(
                f"{path or 'the schema'}: {count} properties are optional, at most {MAX_OPTIONAL} may be; list more in "
                "required, or group them into objects"
            )


def _num_optional(schema: Any, root: Any, counted: dict[int, int]) -> int:
    """Optional properties of an object, and of what it may be instead, or is as well. counted: by schemas' identity."""
    if not isinstance(schema, dict):
        return 0
    if (known := counted.get(id(schema))) is not None:
        return known
    counted[id(schema)] = 0  # while it is counted: a schema within itself adds nothing
    properties, required = schema.get("properties"), schema.get("required")
    count = 0
    if isinstance(properties, dict):
        count = len(properties.keys() - {each for each in required or () if isinstance(each, str)})
    parts = [each for name in _TOGETHER if isinstance(inner := schema.get(name), list) for each in inner]
    if isinstance(reference := schema.get("$ref"), str):
        parts.append(_resolved(reference, root))
    count += sum(_num_optional(each, root, counted) for each in parts)
    counted[id(schema)] = count
    return count


def _resolved(reference: str, root: Any) -> Any:
    """What a reference within a document points to; None if that is nothing."""
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found if reference.startswith("#") else None


def relaxed(schema: Any) -> Any:
    """A schema without the rules that can't be enforced: answers then match all others."""
    if not isinstance(schema, Mapping):
        return schema
    kept = {name: _relaxed_value(name, value) for name, value in schema.items() if _is_enforced(name, value)}
    if "oneOf" in kept:
        options = kept.pop("oneOf")
        if "anyOf" in kept:
            kept["allOf"] = [*kept.get("allOf", ()), {"anyOf": options}]
        else:
            kept["anyOf"] = options
    return kept


def _relaxed_value(name: str, value: Any) -> Any:
    if name in _MAPS and isinstance(value, Mapping):
        has_patterns = name == "patternProperties"
        return {key: relaxed(each) for key, each in value.items() if not (has_patterns and _LOOKS_AROUND.search(key))}
    if isinstance(value, list) and name in (*_LISTS, "items"):
        return [relaxed(each) for each in value]
    return relaxed(value) if name in _SINGLES else value


def _is_enforced(name: str, value: Any) -> bool:
    if name == "format":
        return not isinstance(value, str) or _is_known_format(value)
    if name == "pattern":
        return not isinstance(value, str) or _LOOKS_AROUND.search(value) is None
    return name not in UNENFORCED


@lru_cache(256)
def _is_known_format(name: str) -> bool:
    from llguidance import LLMatcher

    source = LLMatcher.grammar_from_json_schema({"type": "string", "format": name})
    return not LLMatcher.validate_grammar(source)
