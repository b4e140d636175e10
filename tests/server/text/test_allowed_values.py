"""Which values a schema allows.

Values of tagged calls have the types of their schemas, in each spelling that libraries have for a type: whole, in
pieces, and as a grammar leads to them.
"""

from __future__ import annotations

import json
from enum import Enum, IntEnum, StrEnum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from chorus.core.requests.grammar import Grammar
from chorus.core.requests.grammars import Grammars
from chorus.core.requests.speller import Speller
from chorus.server.api.output_grammar import output_grammar
from chorus.server.text.allowed_values import Allowed, AllowedValues
from chorus.server.text.argument_syntax import Rules
from chorus.server.text.channel_formats import ATEM
from chorus.server.text.nested_syntax import NestedSyntax
from chorus.server.text.output_parser import OutputParser
from chorus.server.text.output_parts import ParsedMessage
from chorus.server.text.output_syntax import OutputSyntax, ToolCallFormat
from chorus.server.text.tagged_syntax import TaggedSyntax
from chorus.server.text.tool_call_formats import TOOL_CALL_FORMATS

from ...tiny_tokenizer import save_tokenizer

TAGGED = {
    form.name: form
    for form in (*TOOL_CALL_FORMATS, ATEM.calls)
    if isinstance(form.style.arguments, TaggedSyntax | NestedSyntax)
}
LOOKALIKES = ("2", "90210", "1.10", "-0", "1e5", "true", "False", "12345678901234567890", "[1]", '{"a": 1}', '"x"', "")


class Zip(Enum):
    """An enum of strings that look like other values."""

    A, B, C = "2", "90210", "true"


class Size(StrEnum):
    """An enum of strings."""

    SMALL, LARGE = "1.10", "[1]"


class Level(IntEnum):
    """An enum of integers."""

    LOW, HIGH = 1, 2


class Place(BaseModel):
    """An object."""

    zip: Zip
    note: str | None


class ByPydantic(BaseModel):
    """Each type as pydantic spells it."""

    text: str
    described: Annotated[str, Field(description="x", min_length=0)]
    nullable: str | None
    defaulted: str | None = None
    an_enum: Zip
    described_enum: Annotated[Zip, Field(description="x")]
    maybe_enum: Zip | None
    str_enum: Size
    either_enum: Zip | Size
    literal: Literal["1", "null", "2"]
    maybe_literal: Literal["1", "2"] | None
    one_literal: Literal["7"]
    level: Level
    maybe_level: Level | None
    number: float
    integer: int | None
    flag: bool | None
    either: str | int
    texts: list[str]
    place: Place | None
    places: dict[str, Place]


_ENUM = {"type": "string", "enum": ["2", "90210", "true"]}
BY_ZOD: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$ref": "#/definitions/Args",
    "definitions": {
        "Args": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "nullable": {"type": ["string", "null"]},
                "nullish": {"anyOf": [{"anyOf": [{"not": {}}, {"type": "string"}]}, {"type": "null"}]},
                "an_enum": _ENUM,
                "maybe_enum": {"anyOf": [_ENUM, {"type": "null"}]},
                "same_enum": {"$ref": "#/definitions/Args/properties/an_enum"},
                "maybe_same": {"anyOf": [{"$ref": "#/definitions/Args/properties/an_enum"}, {"type": "null"}]},
                "literal": {"type": "string", "const": "2"},
                "bare_literal": {"const": "2"},
                "union": {"anyOf": [{"const": "1"}, {"const": "2"}]},
                "both": {"allOf": [{"type": "string"}, {"$ref": "#/definitions/Args/properties/text"}]},
                "number": {"type": "number"},
                "integer": {"type": ["integer", "null"]},
                "either": {"type": ["string", "number"]},
            },
            "required": [],
            "additionalProperties": False,
        }
    },
}
OPEN_API: dict[str, Any] = {
    "allOf": [
        {"$ref": "#/$defs/Base"},
        {
            "properties": {
                "own": {"allOf": [{"$ref": "#/$defs/Zip"}]},
                "nullable": {"type": "string", "nullable": True},
                "defaulted": {"allOf": [{"$ref": "#/$defs/Zip"}], "nullable": True},
            }
        },
    ],
    "$defs": {
        "Zip": {"$ref": "#/$defs/Code"},
        "Code": {"type": "string", "description": "five digits"},
        "Base": {"type": "object", "properties": {"base": {"$ref": "#/$defs/Zip"}, "count": {"type": "integer"}}},
    },
}

DEFINITIONS = {"$defs", "definitions"}

CASES: list[tuple[str, dict[str, Any], set[str]]] = [
    (
        "pydantic",
        ByPydantic.model_json_schema(),
        {
            *("text", "described", "nullable", "defaulted", "an_enum", "described_enum", "maybe_enum", "str_enum"),
            *("either_enum", "literal", "maybe_literal", "one_literal"),
        },
    ),
    (
        "zod",
        BY_ZOD,
        {
            *("text", "nullable", "nullish", "an_enum", "maybe_enum", "same_enum", "maybe_same", "literal"),
            *("bare_literal", "union", "both"),
        },
    ),
    ("openapi", OPEN_API, {"own", "base", "nullable", "defaulted"}),
]
NULLABLE = {"nullable", "nullish", "defaulted", "maybe_enum", "maybe_literal", "maybe_same"}


def written(form: ToolCallFormat, name: str, value: str, *, text: bool) -> str:
    """A call with one argument, as a model writes it."""
    style, frame, syntax = form.style, form.frame, form.style.arguments
    if isinstance(syntax, TaggedSyntax):
        named = syntax.named_text if text and syntax.named_text else syntax.named
        argument = f"{syntax.open}{name}{named}{syntax.around}{value}{syntax.around}{syntax.close}{syntax.after}"
    else:
        assert isinstance(syntax, NestedSyntax)
        argument = f"{syntax.mark}<{name}>{value}{syntax.mark}</{name}>"
    call = style.begin.format(name="f", index=0) + argument + style.end
    return frame.open + frame.first + call + frame.last + frame.close


def read(form: ToolCallFormat, schema: dict[str, Any], pieces: list[str]) -> Any:
    parser, message = OutputParser(OutputSyntax(form), {"f": schema}), ParsedMessage()
    for piece in pieces:
        message.add(parser.read(piece))
    message.add(parser.read("", final=True))
    assert parser.calls and not message.content
    return json.loads(message.calls[0].arguments)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    backend = save_tokenizer(path)
    return backend, Grammars(path, backend.get_vocab_size(), [backend.token_to_id("</s>")])


def all_cases() -> list[Any]:
    return [pytest.param(schema, texts, id=library) for library, schema, texts in CASES]


@pytest.mark.parametrize("form", TAGGED.values(), ids=TAGGED)
@pytest.mark.parametrize(("schema", "texts"), all_cases())
def test_a_text_that_looks_like_another_value_is_a_text_where_the_schema_says_so(form, schema, texts):
    for name in sorted(texts):
        for value in LOOKALIKES:
            text = written(form, name, value, text=True)
            assert read(form, schema, [text]) == {name: value}, name
            assert read(form, schema, list(text)) == {name: value}, name
        null = written(form, name, "null", text=name not in NULLABLE)
        for pieces in ([null], list(null)):
            assert read(form, schema, pieces) == {name: None if name in NULLABLE else "null"}, name


@pytest.mark.parametrize("form", TAGGED.values(), ids=TAGGED)
@pytest.mark.parametrize(("schema", "texts"), all_cases())
def test_other_values_are_what_they_spell(form, schema, texts):
    others = {"number", "integer", "either", "flag", "level", "maybe_level", "count"}
    for name in sorted(others & AllowedValues(schema).properties(schema).keys() - texts):
        for value in ("2", "true", "null") if name == "flag" else ("2", "90210"):
            text = written(form, name, value, text=False)
            assert read(form, schema, list(text)) == read(form, schema, [text]) == {name: json.loads(value)}, name


@pytest.mark.parametrize("form", TAGGED.values(), ids=TAGGED)
@pytest.mark.parametrize(("schema", "texts"), all_cases())
def test_a_grammar_writes_texts_raw_as_the_parser_reads_them(grammars, form, schema, texts):
    """Also nullable ones, and enums without a type; what enum and const do not allow is refused."""
    backend, compiler = grammars
    values = AllowedValues(schema)
    assert form.style.arguments.unwritable(schema) is None
    for name in sorted(texts):
        inner = values.inner(schema, name)
        allowed = values.of(inner)
        tool = {"properties": {name: inner}, "required": [name], **{k: schema[k] for k in schema.keys() & DEFINITIONS}}
        lark = output_grammar(OutputSyntax(form), {"f": tool}, {}, forced=True, parallel=False)
        for text in (*LOOKALIKES, "null"):
            is_null = text == "null" and name in NULLABLE
            fits = is_null or allowed.texts is None or text in allowed.texts
            call = written(form, name, text, text=not is_null)
            matcher = compiler.compile(Grammar("calls", lark))
            tokens = backend.encode(call, add_special_tokens=False).ids
            found = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
            assert found == fits, (name, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "#/$defs/Zip"}, {"properties": {"a": {"type": "string"}}}]},
        {"oneOf": [{"properties": {"a": {"const": "1"}}}, {"properties": {"a": {"enum": ["2"]}}}]},
        {"properties": {"a": True}, "allOf": [{"properties": {"a": {"type": "string"}}}]},
        {"additionalProperties": {"type": "string"}},
    ],
)
def test_arguments_are_described_anywhere_in_a_schema(schema):
    form = TAGGED["qwen3_coder"]
    text = written(form, "a", "2", text=True)
    assert read(form, {"$defs": {"Zip": {"type": "object"}}, **schema}, [text]) == {"a": "2"}


def test_members_of_nested_elements_are_texts_by_what_they_refer_to():
    form, mark = TAGGED["minimax_m3"], "]<]minimax[>["
    place = f"{mark}<zip>2{mark}</zip>{mark}<note>null{mark}</note>"
    schema = ByPydantic.model_json_schema()
    assert read(form, schema, [written(form, "place", place, text=False)]) == {"place": {"zip": "2", "note": None}}
    places = f"{mark}<home>{place}{mark}</home>"
    wanted = {"places": {"home": {"zip": "2", "note": None}}}
    assert read(form, schema, [written(form, "places", places, text=False)]) == wanted
    items = "".join(f"{mark}<item>{each}{mark}</item>" for each in ("2", "true"))
    assert read(form, schema, [written(form, "texts", items, text=False)]) == {"texts": ["2", "true"]}
    pair = {"type": "array", "prefixItems": [{"$ref": "#/$defs/S"}, {"type": "integer"}]}
    tool = {"properties": {"pair": pair}, "$defs": {"S": {"enum": ["1", "2"]}}}
    assert read(form, tool, [written(form, "pair", items.replace("true", "2"), text=False)]) == {"pair": ["2", 2]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"enum": ["90210", 5]}, "90210", "90210"),
        ({"enum": ["90210", 5]}, "5", 5),
        ({"enum": ["2", 2]}, "2", 2),
        ({"enum": ["true", False]}, "true", "true"),
        ({"anyOf": [{"type": "string"}, {"const": 1}]}, "90210", "90210"),
        ({"anyOf": [{"type": "string"}, {"const": 1}]}, "1", 1),
        ({"anyOf": [{"enum": [2.0]}, {"type": "string"}]}, "2", 2),
        ({"anyOf": [{"enum": [2.0]}, {"type": "string"}]}, "1.10", "1.10"),
        ({"anyOf": [{"enum": ["a"]}, {"type": "integer"}, {"enum": [None]}]}, "null", None),
        ({"enum": ["a", 1]}, "2", 2),
    ],
)
def test_of_a_string_and_another_value_it_is_the_one_that_is_allowed(schema, text, value):
    for name in ("qwen3_coder", "minimax_m3"):
        call = written(TAGGED[name], "a", text, text=False)
        for pieces in ([call], list(call)):
            found = read(TAGGED[name], {"properties": {"a": schema}}, pieces)["a"]
            assert found == value and type(found) is type(value)


def test_members_whose_names_match_patterns_are_of_their_types():
    """Pydantic spells a dict with constrained keys so."""
    form, mark = TAGGED["minimax_m3"], "]<]minimax[>["
    codes = {"type": "object", "patternProperties": {"^x_": {"type": "string"}}}
    call = written(form, "codes", f"{mark}<x_1>90210{mark}</x_1>", text=False)
    assert read(form, {"properties": {"codes": codes}}, [call]) == {"codes": {"x_1": "90210"}}
    assert read(form, {"properties": {"codes": {**codes, "additionalProperties": {"type": "integer"}}}}, [call]) == {
        "codes": {"x_1": 90210}
    }


def test_large_schemas_are_looked_at_in_linear_time():
    texts = [f"v{each}" for each in range(20_000)]
    values = AllowedValues({"properties": {"a": {"enum": texts}, "b": {"anyOf": [{"const": each} for each in texts]}}})
    for name in "ab":
        assert [*(values.of(values.inner(values.root, name)).texts or ())] == texts

    class Counting(AllowedValues):
        count = 0

        def _further(self, schema):
            self.count += 1
            return super()._further(schema)

    ways = {
        f"N{i}": {"allOf": [{"$ref": f"#/$defs/N{i + 1}"}], "anyOf": [{"$ref": f"#/$defs/N{i + 2}"}]}
        for i in range(300)
    }
    values = Counting({"$defs": ways, "$ref": "#/$defs/N0"})
    assert values.inner(values.root, "x") is True
    assert values.count < 4 * len(ways)
    items = {"anyOf": [{"properties": {f"p{each}": {"type": "string"}}} for each in range(100)]}
    values = Counting({"type": "array", "items": items})
    found = [values.inner(values.inner(values.root, each), "p7") for each in range(100)]
    assert all(each is found[0] for each in found) and values.count < 2 * len(items["anyOf"])
    many = AllowedValues({"allOf": [{"properties": {"a": {"type": "integer"}}}] * 3000})
    assert TAGGED["qwen3_coder"].style.arguments.grammar(many.root, Rules(Speller({})))


def test_schemas_that_refer_to_themselves_or_double_at_each_level_are_looked_at_once():
    levels = {f"L{i}": {"anyOf": [{"$ref": f"#/$defs/L{i + 1}"}, {"$ref": f"#/$defs/L{i + 1}"}]} for i in range(30)}
    loops = {"A": {"$ref": "#/$defs/B"}, "B": {"allOf": [{"$ref": "#/$defs/A"}, {"type": "string"}]}}
    members = {"M": {"anyOf": [{"$ref": "#/$defs/M"}, {"properties": {"x": {"type": "string"}}}]}}
    root = {"$defs": {**levels, **loops, **members, "L30": {"type": "string"}}}
    values = AllowedValues(root)
    assert values.of({"$ref": "#/$defs/L0"}).is_text
    assert values.of({"$ref": "#/$defs/B"}).is_text
    assert values.of(values.inner({"$ref": "#/$defs/M"}, "x")).is_text
    assert values.inner({"$ref": "#/$defs/L0"}, "x") is True
    long = {f"N{i}": {"$ref": f"#/$defs/N{i + 1}"} for i in range(5000)}
    values = AllowedValues({"$defs": long})
    assert values.of({"$ref": "#/$defs/N0"}) == Allowed() and values.inner({"$ref": "#/$defs/N0"}, "x") is True


def test_a_string_that_is_spelt_as_null_is_written_as_json():
    form, schema = TAGGED["qwen3_coder"], {"properties": {"a": {"enum": ["null", None]}}}
    assert '%json {"enum": ["null", null]' in form.style.arguments.grammar(schema, Rules(Speller({})))
    assert read(form, schema, [written(form, "a", '"null"', text=True)]) == {"a": "null"}
    assert read(form, schema, [written(form, "a", "null", text=True)]) == {"a": None}
