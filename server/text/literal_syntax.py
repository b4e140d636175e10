"""Arguments as literals of a programming language: `f(a=1, b="x")`, `f{a:1,b:<|"|>x<|"|>}`.

Tests: tests/server/text/test_output_parser.py, tests/server/api/test_calls_read_back.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.requests.json_schemas import NOTES, TYPES
from ...core.requests.speller import Speller
from .argument_syntax import ArgumentSyntax, Rules, json_grammar
from .literal_arguments import KEY, LiteralArguments
from .whole_schemas import UnwritableError, WholeSchemas, under

_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


@dataclass(frozen=True)
class LiteralSyntax(ArgumentSyntax):
    """Arguments as `name`, `named`, a literal and so on, up to `close`.

    Texts stand between `quote`, as they are, or with an empty `quote` between quotation marks with Python's escapes.
    """

    close: str = ")"
    named: str = "="
    between: str = ", "
    quote: str = ""
    words: Sequence[str] = ("True", "False", "None")

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.quote,)

    def reader(self, schema: Mapping[str, Any], ends: Sequence[str] = ()) -> LiteralArguments:
        del ends
        return LiteralArguments(self.close, self.quote, schema)

    def grammar(self, schema: Mapping[str, Any], rules: Rules) -> str:
        """Names in the order of the schema. Patterns and lengths of texts, and counts of items, are not enforced."""
        members = _LiteralGrammar(self, schema, rules).members(schema, "", self.named, quoted=False)
        return f"{members} {rules.spelt(self.close)}"

    def unwritable(self, schema: Mapping[str, Any]) -> str | None:
        if (found := _wrong(schema, "")) is not None:
            return found
        for name in schema.get("properties") or {}:
            if KEY.fullmatch(name) is None:
                return f"properties.{name}: {_NO_NAME}"
        try:
            self.grammar(schema, Rules(Speller({})))
        except UnwritableError as error:
            return str(error)
        except RecursionError:
            return "the schema: its allOf, anyOf and $ref refer to each other without end"
        return None


_NO_NAME = "this model's format of tool calls writes no such name"


def _wrong(schema: Any, path: str) -> str | None:
    """Say what of a schema is no schema, of the parts that the grammar is made of; None: nothing."""
    items = schema.items() if isinstance(schema, Mapping) else enumerate(schema) if isinstance(schema, list) else ()
    for name, each in items:
        where = f"{path}.{name}".removeprefix(".")
        if name == "properties" and not isinstance(each, Mapping | bool | None):
            return f"{where}: must be an object"
        if name == "required" and not (
            isinstance(each, Mapping | bool | None)
            or (isinstance(each, list) and all(isinstance(one, str) for one in each))
        ):
            return f"{where}: must be an array of names"
        if (found := _wrong(each, where)) is not None:
            return found
    return None


class _LiteralGrammar:
    """Writes the grammar of literals that match a schema."""

    def __init__(self, syntax: LiteralSyntax, root: Mapping[str, Any], rules: Rules) -> None:
        self._syntax, self._root, self._rules = syntax, root, rules
        self._spelt = rules.spelt
        self._schemas = WholeSchemas(root)

    def members(self, schema: Mapping[str, Any], path: str, named: str, *, quoted: bool) -> str:
        """The members of an object, without what is around them: each optional one may be left out."""
        schema = self._schemas.whole(schema, path)
        required, more = dict.fromkeys(schema.get("required") or ()), schema.get("additionalProperties", True)
        properties = {**(schema.get("properties") or {})}
        for name in required:
            if name not in properties and more is False:
                raise UnwritableError(under(path, "required"), f"{name!r} is not among the properties; add it there")
            properties.setdefault(name, more)
        parts = []
        for name, each in properties.items():
            where = under(path, f"properties.{name}")
            if not (quoted or self._can_name(name)):
                raise UnwritableError(where, _NO_NAME)
            key = json.dumps(name, ensure_ascii=False) if quoted else name
            parts.append((f"{self._spelt(key + named)} {self.value(each, where)}", name in required))
        return self._listed(parts)

    def _can_name(self, name: str) -> bool:
        """True if a name without quotation marks is read back as it is."""
        quote = self._syntax.quote
        return name == name.strip() and ":" not in name and not (quote and (quote in name)) and name != ""

    def _listed(self, parts: Sequence[tuple[str, bool]]) -> str:
        """Members in order, a separator between any two that are there. After the first required one it is simple."""
        between, first = self._spelt(self._syntax.between), next((i for i, part in enumerate(parts) if part[1]), None)
        if first is None:
            options = [self._rest(parts, index, between) for index in range(len(parts))]
            return f"({' | '.join(options)})?" if options else '""'
        before = "".join(f"({part} {between})? " for part, _ in parts[:first])
        return before + self._rest(parts, first, between)

    @staticmethod
    def _rest(parts: Sequence[tuple[str, bool]], index: int, between: str) -> str:
        """The member at an index, and those behind it."""
        text = parts[index][0]
        for part, is_required in parts[index + 1 :]:
            text += f" {between} {part}" if is_required else f" ({between} {part})?"
        return text

    def value(self, schema: Any, path: str) -> str:
        """The grammar of a value."""
        if schema is False:
            raise UnwritableError(path, "false allows no value; leave the property out")
        if not isinstance(schema, Mapping):
            return self._any()
        rules = schema.keys() - NOTES
        if rules == {"$ref"}:
            return self._referred(schema["$ref"], path)
        if not rules & {"$ref", "allOf"}:
            return self._of_whole(self._schemas.whole(schema, path), path)
        key = f"{id(self._root)} {json.dumps(schema, sort_keys=True)}"
        name, is_new = self._rules.reserve("merged", key)
        if is_new:
            self._rules.add(f"{name}: {self._of_whole(self._schemas.whole(schema, path), path)}")
        return name

    def _of_whole(self, schema: Mapping[str, Any], path: str) -> str:
        """The grammar of a value by a schema without references and conjuncts of its own."""
        options = self._options(schema, path)
        if options is not None:
            if not options:
                raise UnwritableError(path, "its const, enum, anyOf, oneOf or type allows no value")
            return f"({' | '.join(dict.fromkeys(options))})"
        return self._of_kind(schema.get("type"), schema, path)

    def _options(self, schema: Mapping[str, Any], path: str) -> list[str] | None:
        """The grammars of which a value matches one; None: the schema names no such."""
        if "const" in schema:
            return [self._spelt(self.literal(schema["const"], path))]
        if isinstance(schema.get("enum"), list):
            return [self._spelt(self.literal(each, path)) for each in schema["enum"]]
        for several in ("anyOf", "oneOf"):
            if isinstance(schema.get(several), list):
                return self._alternatives(schema, several, path)
        kinds = schema.get("type")
        return [self.value({**schema, "type": kind}, path) for kind in kinds] if isinstance(kinds, list) else None

    def _alternatives(self, schema: Mapping[str, Any], several: str, path: str) -> list[str]:
        """The grammars of a schema's `anyOf` or `oneOf`, each with the rest of the schema."""
        rest = {name: each for name, each in schema.items() if name != several and name not in NOTES}
        return [
            self.value({"allOf": [rest, each]} if rest and each else each, under(path, f"{several}[{index}]"))
            for index, each in enumerate(schema[several])
        ]

    def _of_kind(self, kind: Any, schema: Mapping[str, Any], path: str) -> str:
        true, false, null = self._syntax.words
        if kind in ("integer", "number"):
            return json_grammar({"type": kind, **{name: schema[name] for name in _NUMBERS if name in schema}})
        if kind == "boolean":
            return f"({self._spelt(true)} | {self._spelt(false)})"
        if kind == "null":
            return self._spelt(null)
        if kind == "string":
            return self._text()
        if kind == "array":
            return self._array(self.value(schema.get("items", {}), under(path, "items")))
        if kind == "object" or (kind is None and "properties" in schema):
            return self._object(schema, path)
        if kind is not None:
            raise UnwritableError(under(path, "type"), f"{kind!r} is no type; use one of {', '.join(TYPES)}")
        return self._any()

    def _array(self, item: str) -> str:
        return self._rules.named("array", f'"[" ({item} ({self._spelt(self._syntax.between)} {item})*)? "]"')

    def _object(self, schema: Mapping[str, Any], path: str) -> str:
        if not schema.get("properties") and not schema.get("required"):
            return self._any_object() if schema.get("additionalProperties", True) is not False else '"{" "}"'
        is_quoted = not self._syntax.quote
        return f'"{{" {self.members(schema, path, ": " if is_quoted else ":", quoted=is_quoted)} "}}"'

    def _referred(self, reference: Any, path: str) -> str:
        target = self._schemas.target(reference, path)
        name, is_new = self._rules.reserve("referred", f"{id(self._root)} {reference}")
        if is_new:
            self._rules.add(f"{name}: {self.value(target, path)}")
        return name

    def _text(self) -> str:
        if self._syntax.quote:
            self._rules.add_unless_there(self._spelt.text_up_to("quoted_text", self._syntax.quote))
            return f"{self._spelt(self._syntax.quote)} quoted_text"
        self._rules.add_unless_there(r'QUOTED: /"([^"\\\n\r]|\\["\\nrt])*"/')
        return "QUOTED"

    def _any(self) -> str:
        name, is_new = self._rules.reserve("any", "any value")
        if is_new:
            self._rules.add(f"{name}: {self._text()} | {json_grammar({'type': 'number'})} | {self._plain()}")
        return name

    def _plain(self) -> str:
        words = " | ".join(map(self._spelt, self._syntax.words))
        return f"{words} | {self._array(self._any())} | {self._any_object()}"

    def _any_object(self) -> str:
        name, is_new = self._rules.reserve("any_object", "any object")
        if is_new:
            is_quoted = not self._syntax.quote
            key = f'{self._text()} ": "' if is_quoted else 'NAME ":"'
            if not is_quoted:
                self._rules.add_unless_there(r"NAME: /[A-Za-z_][A-Za-z0-9_]*/")
            member, between = f"{key} {self._any()}", self._spelt(self._syntax.between)
            self._rules.add(f'{name}: "{{" ({member} ({between} {member})*)? "}}"')
        return name

    def literal(self, value: Any, path: str) -> str:
        """A value as it is written."""
        if value is None or isinstance(value, bool):
            return self._syntax.words[(True, False, None).index(value)]
        if isinstance(value, str):
            return self._written_text(value, path)
        if isinstance(value, list):
            return f"[{self._syntax.between.join(self.literal(each, path) for each in value)}]"
        if isinstance(value, dict):
            pairs = (self._written_name(name, path) + self.literal(each, path) for name, each in value.items())
            return f"{{{self._syntax.between.join(pairs)}}}"
        return json.dumps(value)

    def _written_text(self, text: str, path: str) -> str:
        quote = self._syntax.quote
        if quote and quote in text:
            raise UnwritableError(path, f"this model's format of tool calls can't write a value with {quote}")
        return f"{quote}{text}{quote}" if quote else _python_text(text)

    def _written_name(self, name: str, path: str) -> str:
        """The name of an object's member, and what follows it."""
        if self._syntax.quote and not self._can_name(name):
            raise UnwritableError(path, _NO_NAME)
        return f"{name}:" if self._syntax.quote else f"{_python_text(name)}: "


def _python_text(text: str) -> str:
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(letter, letter) for letter in text) + '"'
