"""JSON schemas as llguidance takes them: keywords that it can't enforce, and their paths in a schema.

Tests: tests/core/test_json_schemas.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

MAX_OPTIONAL = 500
"""Most optional properties that may come next in an answer. Their number bounds the time of a token, and beyond it the
parser would give up within the answer."""

UNENFORCED = frozenset(
    {
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
        "$dynamicRef",
    }
)
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
    for at, each in _parts(schema):
        yield from subschemas(each, f"{path}.{at}" if path else at)


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas that a schema consists of, each with its path from there."""
    for name in _MAPS:
        if isinstance(inner := schema.get(name), dict):
            yield from ((f"{name}.{key}", each) for key, each in inner.items())
    for name in (*_LISTS, *_SINGLES):
        inner = schema.get(name)
        if isinstance(inner, list):
            yield from ((f"{name}[{index}]", each) for index, each in enumerate(inner))
        else:
            yield name, inner


def located(message: str, schema: Any, root: str = "") -> str | None:
    """llguidance's message about a schema, with the path of its subject; None if the schema has no such part.

    root: path of the schema.
    """
    found = _UNIMPLEMENTED.search(message)
    missing = [] if found is None else [name.strip('" ') for name in found[1].split(",")]

    def is_it(each: Mapping[str, Any]) -> bool:
        return all(name in each for name in missing) if missing else _is_about(message, each)

    path = next((path for path, each in subschemas(schema, root) if is_it(each)), None)
    if path is None:
        return None
    if missing:
        verb = "is a rule" if len(missing) == 1 else "are rules"
        message = (
            f"{', '.join(missing)} {verb} that can't be enforced; leave it out, or say strict: false (of "
            "response_format or a function) to have it dropped"
        )
    elif message.startswith("oneOf"):
        message = "it can't be told which one of oneOf an answer matches; use anyOf"
    return f"{path or 'the schema'}: {message}"


def _is_about(message: str, schema: Mapping[str, Any]) -> bool:
    """True if a message is about a schema's own format, type, reference, pattern or choice."""
    if message.startswith("oneOf"):
        return "oneOf" in schema
    if "regex parse error" in message:
        pattern = schema.get("pattern")
        return isinstance(pattern, str) and pattern in message
    wanted = (f"Unknown format: {schema.get('format')}", f"Invalid type: {schema.get('type')}")
    reference = schema.get("$ref")
    return message in wanted or (isinstance(reference, str) and f"'{reference.removeprefix('#')}'" in message)


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
    """Optional properties of an object, with those of its alternatives and conjuncts. counted: by schemas' identity."""
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
        parts.append(resolved(reference, root))
    count += sum(_num_optional(each, root, counted) for each in parts)
    counted[id(schema)] = count
    return count


TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")

NOTES = frozenset(
    ("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples")
) | {"readOnly", "title", "writeOnly"}
"""Keywords that allow and forbid nothing."""


def merged(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One schema that allows what each of several does. Raises ValueError for rules that can't be one."""
    together: dict[str, Any] = {}
    for schema in schemas:
        for name, rule in schema.items():
            if name not in NOTES:
                together[name] = rule if name not in together else _both(name, together[name], rule)
    return together


def _both(name: str, one: Any, other: Any) -> Any:
    """The rule of this name that says what two say."""
    if one == other:
        return one
    if name not in _CONJUNCTIONS:
        raise ValueError(f"two different rules {name} for one value; write them as one")
    return _CONJUNCTIONS[name](one, other)


def _both_properties(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {**one, **other, **{each: _all_of(one[each], other[each]) for each in one.keys() & other.keys()}}


def _all_of(one: Any, other: Any) -> Any:
    return one and other if isinstance(one, bool) and isinstance(other, bool) else {"allOf": [one, other]}


def _common_types(one: Any, other: Any) -> Any:
    first, second = ({*each} if isinstance(each, list) else {each} for each in (one, other))
    common = first & second
    for a, b in ((first, second), (second, first)):
        common |= {"integer"} if "integer" in a and "number" in b else set()
    return next(iter(common)) if len(common) == 1 else sorted(common)


_CONJUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "properties": _both_properties,
    "required": lambda one, other: [*dict.fromkeys((*one, *other))],
    "type": _common_types,
    "enum": lambda one, other: [each for each in one if each in other],
    "additionalProperties": _all_of,
    "items": _all_of,
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems"), min),
}
"""What two rules say together, by their name."""


def resolved(reference: str, root: Any) -> Any:
    """The target of a reference within a document; None if there is none."""
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found if reference.startswith("#") else None


def moved(schema: Any, pointer: str) -> Any:
    """A schema whose references mean the same once its document is at `pointer` of another, such as `/$defs/inner`."""
    if not isinstance(schema, Mapping):
        return schema
    inside = {name: _changed(name, value, lambda each: moved(each, pointer)) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        inside["$ref"] = f"#{pointer}{reference[1:]}"
    return inside


def _changed(name: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """The value of a keyword with the schemas in it changed."""
    if name in _MAPS and isinstance(value, Mapping):
        return {key: change(each) for key, each in value.items()}
    if isinstance(value, list) and name in (*_LISTS, "items"):
        return [change(each) for each in value]
    return change(value) if name in _SINGLES else value


def open_object(schema: Any) -> str | None:
    """The path of the first object in a schema that may have other properties than its own; None: there is none."""
    for path, each in subschemas(schema):
        kinds = each.get("type")
        is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds) or "properties" in each
        if is_object and each.get("additionalProperties") is not False:
            return path
    return None


def without_nulls(schema: Any) -> Any:
    """A schema without `required: null`, which some libraries write where nothing is required."""
    if not isinstance(schema, Mapping):
        return schema
    kept = {name: value for name, value in schema.items() if not (name == "required" and value is None)}
    return {name: _changed(name, value, without_nulls) for name, value in kept.items()}


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
    if name == "patternProperties" and isinstance(value, Mapping):
        value = {key: each for key, each in value.items() if not _LOOKS_AROUND.search(key)}
    return _changed(name, value, relaxed)


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
