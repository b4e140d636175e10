"""Which schemas the formats of literals can write: their parts are enforced, or refused by their path."""

import jsonschema
import pytest

from chorus.core.requests.grammar import Grammar
from chorus.core.requests.grammars import Grammars
from chorus.server.api.output_grammar import output_grammar
from chorus.server.text.output_syntax import OutputSyntax
from chorus.server.text.tool_call_formats import NAMED_FORMATS

from ...tiny_tokenizer import save_tokenizer
from ..written_calls import written_calls

DEFS = {"City": {"type": "string", "enum": ["Rome", "Oslo"]}, "a/b~c": {"type": "integer"}}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}, "additionalProperties": False}
STRICT = {"additionalProperties": False}


def arguments_of(schema, **more):
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": DEFS, **STRICT, **more}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    backend = save_tokenizer(path)
    return backend, Grammars(path, backend.get_vocab_size(), [backend.token_to_id("</s>")])


ENFORCED = [
    # the schema of an argument, values that it allows, values that it does not
    ({"$ref": "#/$defs/City"}, ["Rome"], ["Bonn", 1]),
    ({"$ref": "#/$defs/a~1b~0c"}, [1, -5], ["1"]),
    ({"$ref": "#/$defs/a~1b~0c", "description": "x", "minimum": 3}, [3, 99], [2]),
    ({"allOf": [{"$ref": "#/$defs/City"}], "default": "Rome"}, ["Oslo"], ["Bonn"]),
    ({"allOf": [{"type": "number", "minimum": 0}, {"type": "integer", "maximum": 9}]}, [0, 9], [-1, 10, 0.5]),
    (
        {
            "allOf": [
                {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
                {"properties": {"y": {"type": "boolean"}}, "required": ["y"]},
            ]
        },
        [{"x": 1, "y": True}],
        [{"x": 1}, {"y": True}, {"x": "1", "y": True}],
    ),
    ({"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 1}]}, [5, 1], [3, "5"]),
    ({"type": "object", "required": ["x"]}, [{"x": "any"}, {"x": 1}], [{}]),
    ({"type": ["string", "null"]}, ["x", None], [1, True]),
]


@pytest.mark.parametrize("name", ["lfm2", "gemma4"])
@pytest.mark.parametrize(("schema", "allowed", "others"), ENFORCED)
def test_parts_of_schemas_are_enforced(grammars, name, schema, allowed, others):
    form, schema = NAMED_FORMATS[name], arguments_of(schema)
    lark = output_grammar(OutputSyntax(form), {"f": schema}, {}, forced=True, parallel=False)
    assert form.style.arguments.unwritable(schema) is None
    for value in (*allowed, *others):
        matcher = grammars[1].compile(Grammar("calls", lark))
        text = written_calls(form, {"f": schema}, [("f", {"a": value})])
        tokens = grammars[0].encode(text, add_special_tokens=False).ids
        fits = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert fits == (value in allowed and type(value) in map(type, allowed)), (value, text)
        assert fits == jsonschema.Draft202012Validator(schema).is_valid({"a": value})


def test_a_schema_may_refer_to_itself(grammars):
    form = NAMED_FORMATS["lfm2"]
    for schema in (
        {"type": "object", "properties": {"next": {"$ref": "#"}}, **STRICT},
        {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": NODE}, **STRICT},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, **STRICT},
        {"type": "object", "properties": {"next": {"allOf": [{"$ref": "#"}], "description": "x"}}, **STRICT},
    ):
        lark = output_grammar(OutputSyntax(form), {"f": schema}, {}, forced=True, parallel=False)
        for value, fits in (({"next": {"next": {}}}, True), ({"next": {"next": 5}}, False), ({"next": 5}, False)):
            matcher = grammars[1].compile(Grammar("calls", lark))
            text = written_calls(form, {"f": schema}, [("f", value)])
            tokens = grammars[0].encode(text, add_special_tokens=False).ids
            assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == fits, text


REFUSED = [
    ({"$ref": "#/$defs/Nowhere"}, "properties.a.$ref: '#/$defs/Nowhere' is no schema within this one"),
    ({"items": {"$ref": "other.json"}, "type": "array"}, "properties.a.items.$ref: 'other.json' is no schema"),
    ({"$ref": 5}, "properties.a.$ref: 5 is no schema"),
    ({"$ref": "#/properties/a"}, "properties.a.$ref: '#/properties/a' refers to itself"),
    ({"type": "foo"}, "properties.a.type: 'foo' is no type; use one of string, number"),
    ({"type": ["string", "foo"]}, "properties.a.type: 'foo' is no type"),
    ({"type": "array", "items": {"not": {}}}, "properties.a.items: not is a rule that can't be enforced"),
    ({"enum": []}, "properties.a: its const, enum, anyOf, oneOf or type allows no value"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "properties.a: two different rules pattern for one value"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "properties.a: its const, enum"),
    ({"type": "object", "required": ["x"], **STRICT}, "properties.a.required: 'x' is not among the properties"),
    (False, "properties.a: false allows no value"),
]


@pytest.mark.parametrize("name", ["lfm2", "gemma4"])
@pytest.mark.parametrize(("schema", "said"), REFUSED)
def test_what_cannot_be_written_is_refused_by_its_path(name, schema, said):
    reason = NAMED_FORMATS[name].style.arguments.unwritable(arguments_of(schema))
    assert reason is not None and reason.startswith(said), reason


def test_names_that_are_required_are_properties():
    syntax = NAMED_FORMATS["lfm2"].style.arguments
    reason = syntax.unwritable(arguments_of({"type": "string"}, required=["a", "b"]))
    assert reason == "required: 'b' is not among the properties; add it there"


def test_gemma_writes_no_name_and_no_text_with_its_marks():
    syntax = NAMED_FORMATS["gemma4"].style.arguments
    for name in ("x:y", " x", '<|"|>'):
        reason = syntax.unwritable(arguments_of({"type": "object", "properties": {name: {}}}))
        assert reason == f"properties.a.properties.{name}: this model's format of tool calls writes no such name"
    assert "can't write a value with" in (syntax.unwritable(arguments_of({"const": 'a<|"|>b'})) or "")


def test_schemas_that_double_at_each_level_are_written_once():
    levels = {
        f"L{i}": {"properties": {k: {"allOf": [{"$ref": f"#/$defs/L{i + 1}"}, {}]} for k in "xy"}} for i in range(30)
    }
    conjuncts = {f"M{i}": {"allOf": [{"$ref": f"#/$defs/M{i + 1}"}] * 2} for i in range(30)}
    defs = {**levels, **conjuncts, "L30": {"type": "integer"}, "M30": {"type": "integer"}}
    for first in ("L0", "M0"):
        assert (
            NAMED_FORMATS["lfm2"].style.arguments.unwritable(
                arguments_of({"$ref": f"#/$defs/{first}"}, **{"$defs": defs})
            )
            is None
        )
