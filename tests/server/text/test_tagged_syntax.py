"""Arguments between tags: what their grammars take of schemas, and how much is read of long texts."""

import pytest

from chorus.core.requests.grammar import Grammar
from chorus.core.requests.grammars import Grammars
from chorus.server.api.output_grammar import output_grammar
from chorus.server.text.output_syntax import OutputSyntax
from chorus.server.text.tool_call_formats import NAMED_FORMATS

from ...tiny_tokenizer import save_tokenizer
from ..written_calls import written_calls


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    backend = save_tokenizer(path)
    return backend, Grammars(path, backend.get_vocab_size(), [backend.token_to_id("</s>")])


@pytest.mark.parametrize("reference", ["#/properties/b", "#/$defs/x", "other.json"])
def test_a_reference_to_nowhere_is_refused_by_its_path(reference):
    schema = {"properties": {"a": {"type": "array", "items": {"$ref": reference}}}}
    reason = NAMED_FORMATS["qwen3_coder"].style.arguments.unwritable(schema)
    assert reason == f"properties.a.items.$ref: {reference!r} is no schema within this one"


@pytest.mark.parametrize("name", ["qwen3_coder", "glm4", "minimax_m2", "deepseek_v32"])
@pytest.mark.parametrize(
    ("schema", "allowed", "other"),
    [
        ({"$ref": "#/properties/first"}, 5, 11),
        ({"type": "array", "items": {"$ref": "#/properties/first"}}, [1, 2], [1, "x"]),
        ({"$ref": "#/$defs/same"}, 5, 11),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, {"first": 1, "a": None}, {"first": 11, "a": None}),
    ],
)
def test_a_property_may_refer_to_any_part_of_the_schema(grammars, name, schema, allowed, other):
    form = NAMED_FORMATS[name]
    tools = {
        "f": {
            "type": "object",
            "properties": {"first": {"type": "integer", "maximum": 10}, "a": schema},
            "required": ["first", "a"],
            "$defs": {"same": {"$ref": "#/properties/first"}},
            "additionalProperties": False,
        }
    }
    lark = output_grammar(OutputSyntax(form), tools, {}, forced=True, parallel=False)
    for value, fits in ((allowed, True), (other, False)):
        matcher = grammars[1].compile(Grammar("calls", lark))
        text = written_calls(form, tools, [("f", {"first": 1, "a": value})])
        tokens = grammars[0].encode(text, add_special_tokens=False).ids
        assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == fits, text
