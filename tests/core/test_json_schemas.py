"""JSON schemas that can't be enforced in full: reported keywords, dropped keywords, and the largest size."""

from __future__ import annotations

import json

import pytest

from chorus.core.requests.grammar import Grammar
from chorus.core.requests.grammars import Grammars, InvalidGrammar
from chorus.core.requests.json_schemas import MAX_OPTIONAL, UNENFORCED, relaxed
from chorus.server.demo.builtin import BUILTIN_MODEL

jsonschema = pytest.importorskip("jsonschema")

RULES = {
    "uniqueItems": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
    "if": {"type": "object", "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "not": {"type": "integer", "not": {"const": 5}},
    "contains": {"type": "array", "contains": {"type": "integer"}, "minContains": 2, "maxContains": 3},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "format": {"type": "string", "format": "binary"},
    "pattern": {"type": "string", "pattern": "^(?!a)b$"},
    "oneOf": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}], "anyOf": [{}]},
}


@pytest.fixture(scope="module")
def grammars():
    return Grammars(BUILTIN_MODEL, 259, (0,))


def compiled(grammars, schema):
    return grammars.compile(Grammar("json_schema", json.dumps(schema)))


def within(schema):
    return {"type": "object", "properties": {"a": {"type": "array", "items": {"anyOf": [{"type": "null"}, schema]}}}}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_cannot_be_enforced_is_told_with_its_path_and_can_be_dropped(grammars, rule):
    schema = within(RULES[rule])
    with pytest.raises(InvalidGrammar) as refused:
        compiled(grammars, schema)
    assert str(refused.value).startswith("properties.a.items.anyOf[1]: ")
    assert rule in str(refused.value) or rule in ("format", "pattern")
    assert "\n   1 |" not in str(refused.value)
    matcher = compiled(grammars, relaxed(schema))
    jsonschema.Draft202012Validator.check_schema(relaxed(schema))
    text = b'{"a": [null]}'
    assert matcher.try_consume_tokens(tokens(text)) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize("rule", sorted(UNENFORCED))
def test_llguidance_enforces_none_of_the_rules_that_are_dropped(grammars, rule):
    """One that it does enforce must no longer be dropped."""
    value = {"uniqueItems": True, "$dynamicRef": "#a"}.get(rule, {"minContains": 1, "maxContains": 1}.get(rule, {}))
    with pytest.raises(InvalidGrammar, match="can't be enforced"):
        compiled(grammars, within({rule: value}))


def test_what_is_enforced_stays(grammars):
    schema = within({"type": "string", "pattern": "^a+$", "format": "date", "maxLength": 3, "x": 1}) | {
        "required": ["a"],
        "$defs": {"q": {"const": 1}},
        "patternProperties": {"^b": {"$ref": "#/$defs/q"}},
        "additionalProperties": False,
    }
    assert relaxed(schema) == schema
    compiled(grammars, within({"type": "array", "uniqueItems": False}))


def test_rules_around_schemas_are_no_part_of_a_message(grammars):
    """As of calls that are forced."""
    text = f'%llguidance {{}}\nstart: "<secret>" %json {json.dumps(RULES["uniqueItems"])}'
    with pytest.raises(InvalidGrammar) as refused:
        grammars.compile(Grammar("calls", text))
    assert str(refused.value) == 'Unimplemented keys: ["uniqueItems"]'


def optional(count, first=0):
    return {
        "type": "object",
        "properties": {f"p{i}": {"type": "integer"} for i in range(first, first + count)},
        "additionalProperties": False,
    }


LARGE = {
    "one": lambda n: optional(n),
    "either": lambda n: {"anyOf": [optional(n // 2), optional(n - n // 2, n)]},
    "inner": lambda n: {
        "type": "object",
        "properties": {"p0": {"type": "integer"}, "x": {"$ref": "#/$defs/y"}},
        "$defs": {"y": optional(n)},
    },
    "by reference": lambda n: {"anyOf": [{"$ref": "#/$defs/a~1b"}, {"type": "null"}], "$defs": {"a/b": optional(n)}},
    "required, too": lambda n: {**optional(n + 200), "required": [f"p{i}" for i in range(n, n + 200)]},
}


@pytest.mark.parametrize("kind", LARGE)
def test_as_many_optional_properties_as_are_taken_are_served_to_the_end_and_more_are_refused(grammars, kind):
    matcher = compiled(grammars, LARGE[kind](MAX_OPTIONAL))
    for token in tokens(b'{"x": {"p0": 1, "p200": 3}' if kind == "inner" else b'{"p0": 1, "p200": 3'):
        assert grammars.masks([matcher])[0].any() and matcher.consume_tokens([token])
    assert grammars.masks([matcher])[0].any()
    with pytest.raises(InvalidGrammar, match=f"{MAX_OPTIONAL + 100} properties are optional, at most {MAX_OPTIONAL}"):
        compiled(grammars, LARGE[kind](MAX_OPTIONAL + 100))


def test_schemas_within_themselves_are_counted_once(grammars):
    doubled = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(25)}
    compiled(grammars, {"$ref": "#/$defs/d0", "$defs": {**doubled, "d25": {"type": "object"}}})
    compiled(grammars, {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}})


def tokens(text):
    from tokenizers import Tokenizer

    from chorus.server.text.vocabulary import Vocabulary

    vocabulary = Vocabulary(Tokenizer.from_file(str(BUILTIN_MODEL / "tokenizer.json")))
    ids = {vocabulary.bytes_of(token): token for token in range(259)}
    return [ids[bytes([byte])] for byte in text]
