"""Arguments as elements in one another: what is read of them, at every split, and what their grammar allows."""

from __future__ import annotations

import json

import pytest

from chorus.core.requests.grammar import Grammar
from chorus.core.requests.grammars import Grammars
from chorus.server.api.output_grammar import output_grammar
from chorus.server.text.nested_arguments import MAX_NAME, NestedArguments
from chorus.server.text.output_syntax import OutputSyntax
from chorus.server.text.tool_call_formats import NAMED_FORMATS

from ...tiny_tokenizer import save_tokenizer
from ..written_calls import written_calls

M = "]<]minimax[>["
FORM = NAMED_FORMATS["minimax_m3"]
SKUS = {"type": "object", "properties": {"sku": {"type": "string"}, "count": {"type": "integer"}}}
ORDER = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "user": {"type": "integer"},
        "items": {"type": "array", "items": SKUS},
        "tags": {"type": "array", "items": {"type": "string"}},
        "at": {"type": "object", "properties": {"where": SKUS, "grid": {"type": "array", "items": {"type": "array"}}}},
        "either": {"anyOf": [{"type": "null"}, SKUS]},
        "more": {"type": ["string", "null"]},
    },
    "additionalProperties": False,
}


TEXT, CANNOT = {"type": "string"}, "model's format of tool calls can't write a value"


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    backend = save_tokenizer(path)
    return backend, Grammars(path, backend.get_vocab_size(), [backend.token_to_id("</s>")])


def tag(name, inner):
    return f"{M}<{name}>{inner}{M}</{name}>"


def read(schema, pieces):
    reader, given, rest = NestedArguments(M, "item", schema), "", None
    held = ""
    for index, piece in enumerate(pieces):
        said, rest = reader.read(held + piece, final=index == len(pieces) - 1)
        given, held = given + said, reader.held if rest is None else ""
        if rest is not None:
            return given, rest + "".join(pieces[index + 1 :])
    return given, rest


def read_everywhere(schema, text):
    """What is read of a text, whatever pieces it comes in: the arguments, and what follows them."""
    whole = read(schema, [text])
    assert read(schema, list(text)) == whole
    for at in range(1, len(text)):
        assert read(schema, [text[:at], text[at:]]) == whole, (text[:at], text[at:])
    return json.loads(whole[0]), whole[1]


@pytest.mark.parametrize(
    ("inner", "wanted"),
    [
        ("", {}),
        (tag("note", " a\n]<]mini <b> \"x\" "), {"note": " a\n]<]mini <b> \"x\" "}),
        (tag("note", ""), {"note": ""}),
        (tag("user", "42"), {"user": 42}),
        (tag("user", " forty "), {"user": "forty"}),
        (
            tag("items", tag("item", tag("sku", "b-1") + tag("count", "2")) + f"\n{tag('item', tag('sku', '7'))}\n"),
            {"items": [{"sku": "b-1", "count": 2}, {"sku": "7"}]},
        ),
        (tag("tags", tag("item", "x") + tag("item", "1")), {"tags": ["x", "1"]}),
        (tag("tags", ""), {"tags": []}),
        (tag("tags", '["a", "]<]minimax[>[</tags>"]'), {"tags": ["a", "]<]minimax[>[</tags>"]}),
        (tag("at", ""), {"at": {}}),
        (tag("at", tag("where", tag("sku", "x")) + tag("grid", tag("item", tag("item", "1")))),
         {"at": {"where": {"sku": "x"}, "grid": [[1]]}}),
        (tag("either", tag("count", "3")), {"either": {"count": 3}}),
        (tag("either", "null"), {"either": None}),
        (tag("more", "null"), {"more": None}),
        (tag("more", "x"), {"more": "x"}),
        (tag("other", tag("item", "1") + tag("item", "b")), {"other": [1, "b"]}),
        (tag("other", tag("k", tag("item", "true"))), {"other": {"k": [True]}}),
        (tag("other", f"{tag('k', '1')} text {M}x"), {"other": {"k": 1}}),
        (tag("other", f"text {tag('k', '1')}"), {"other": f"text {tag('k', '1')}"}),
        (tag("other", '{"k": [1]}'), {"other": {"k": [1]}}),
    ],
)  # fmt: skip
def test_elements_become_json_at_every_split(inner, wanted):
    end = f"{M}</invoke>\nIt rains."
    assert read_everywhere(ORDER, inner + end) == (wanted, end)


def test_an_element_that_another_ones_tag_closes_ends_before_it():
    text = f"{M}<at>{M}<where>{tag('sku', 'x')}{M}</at>{tag('user', '1')}{M}</invoke>"
    assert read_everywhere(ORDER, text) == ({"at": {"where": {"sku": "x"}}, "user": 1}, f"{M}</invoke>")


def test_a_text_comes_as_it_is_said():
    reader = NestedArguments(M, "item", ORDER)
    pieces = [f"{M}<note>ab", "cd]<", "]e", f"{M}</", "note>"]
    given, held = [], ""
    for piece in pieces:
        said, _ = reader.read(held + piece, final=False)
        given.append(said)
        held = reader.held
    assert given == ['{"note": "ab', "cd", "]<]e", "", '"']


@pytest.mark.parametrize("text", [f"{M}<{'a' * 2 * MAX_NAME}", f"{M}{'a' * 9}", "It rains."])
def test_what_is_no_element_ends_the_arguments(text):
    assert read_everywhere(ORDER, text) == ({}, text)


def test_elements_far_within_one_another_are_text():
    depth = 200
    text = f"{M}<a>" * depth + "1" + f"{M}</a>" * depth + f"{M}</invoke>"
    value, rest = json.loads(read({}, [text])[0]), read({}, [text])[1]
    for _ in range(60):
        value = value["a"]
    assert rest.endswith(f"{M}</invoke>") and isinstance(value, dict | str)


@pytest.mark.parametrize("begun", [f"{M}<", f"{M}<other>{M}<", f"{M}<user>", f"{M}<other> "])
def test_what_goes_on_without_end_is_searched_once(begun):
    """The text that is held grows no more than a name may, but for a value that is JSON."""
    reader, held = NestedArguments(M, "item", {"properties": {"user": {"type": "integer"}}}), begun
    for _ in range(2000):
        _, rest = reader.read(held + "a", final=False)
        if rest is not None:
            return
        held = reader.held
    assert "user" in begun or "other> " in begun or len(held) < MAX_NAME + 20


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"note": "a <b> ]<]minimax", "user": 1}, True),
        ({"items": [{"sku": "1", "count": 2}, {}], "tags": ["1", ""]}, True),
        ({"items": [], "at": {"where": {"count": -1}, "grid": [[1, "x"], []]}}, True),
        ({"either": {"sku": f"{M}"}, "more": "1"}, True),
        ({"either": None, "more": None}, True),
        ({"user": "x"}, False),
        ({"tags": [f"a{M}"]}, True),
        ({"tags": [f"a{M}</item>"]}, False),
        ({"items": [{"count": "x"}]}, False),
    ],
)
def test_a_grammar_allows_what_matches_the_schema_and_it_is_read_back(grammars, arguments, fits):
    backend, compiler = grammars
    lark = output_grammar(OutputSyntax(FORM), {"f": ORDER}, {}, forced=True, parallel=True)
    matcher = compiler.compile(Grammar("calls", lark))
    text = written_calls(FORM, {"f": ORDER}, [("f", arguments)])
    tokens = backend.encode(text, add_special_tokens=False).ids
    assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == fits, text
    if fits:
        body = text[text.index('"f">') + 4 :]
        assert read_everywhere(ORDER, body) == (arguments, f"{M}</invoke>\n{M}</tool_call>")


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({"a>b": {}}, "properties.a>b: this model's format of tool calls writes no such name"),
        ({"/a": {}}, "properties./a: this model's format of tool calls writes no such name"),
        ({"a": {"type": "string", "enum": ["x", f"{M}</a>"]}}, f"properties.a: this {CANNOT}"),
        ({"a": {"type": "string", "const": 1}}, "properties.a: its const, enum, anyOf, oneOf,"),
        (
            {"a": {"type": "array", "items": {"type": "object", "properties": {"b": {**TEXT, "const": f"{M}</b>"}}}}},
            f"properties.a.items.properties.b: this {CANNOT}",
        ),
        ({"a": {"$ref": "#/$defs/x"}}, "properties.a.$ref: '#/$defs/x' is no schema within this one"),
    ],
)  # fmt: skip
def test_what_elements_cannot_write_is_told(properties, said):
    syntax = FORM.style.arguments
    assert (syntax.unwritable({"properties": properties}) or "").startswith(said)
    assert syntax.unwritable(ORDER) is None
