"""Arguments between tags: what their grammars take of schemas, and how much is read of long texts."""

import json

import pytest

from chorus.core.requests.grammar import Grammar
from chorus.core.requests.grammars import Grammars
from chorus.server.api.output_grammar import output_grammar
from chorus.server.text import literal_arguments
from chorus.server.text.literal_arguments import LiteralArguments
from chorus.server.text.output_syntax import OutputSyntax
from chorus.server.text.tagged_syntax import TaggedArguments
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


@pytest.mark.parametrize(
    ("begun", "piece", "end", "wanted"),
    [
        ('a=f("', "b' ", '")', """{"a": "f(\\"b' """),
        ("a=f('", "b\\n ", "')", '{"a": "f('),
        ("a={'", "b ", "': 1}", 'b ": 1}}'),
        ("a={", "b ", ": 1}", 'b": 1}}'),
        ("", "b", "=1", '"}'),
    ],
    ids=["a text", "a text with escapes", "a key", "a key without marks", "a name"],
)
def test_quoted_text_and_names_without_end_are_searched_once(monkeypatch, begun, piece, end, wanted):
    """Also those within values that are no literals; each character is looked at a few times, not at each token."""
    reader, looked_at = NAMED_FORMATS["lfm2"].style.arguments.reader({}), []
    module = literal_arguments

    def noting(name, length):
        plain = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, **named: looked_at.append(length(*given)) or plain(*given, **named)
        )

    noting("_unescaped", lambda text, *_: len(text))
    ends = getattr(LiteralArguments, "_text_end")  # noqa: B009
    monkeypatch.setattr(
        LiteralArguments,
        "_text_end",
        lambda self, text, at: looked_at.append(len(text) - max(at, self._searched)) or ends(self, text, at),
    )
    given, rest = reader.read(begun, final=False)
    for _ in range(2000):
        piece_given, rest = reader.read(reader.held + piece, final=False)
        given += piece_given
    assert rest is None and sum(looked_at) < 50 * 2000
    piece_given, rest = reader.read(f"{reader.held}{end})", final=True)
    found = given + piece_given
    assert found.endswith(wanted) or found.startswith(wanted), found[-60:]
    assert json.loads(found)


@pytest.mark.parametrize(
    ("name", "begun", "piece", "end", "wanted"),
    [
        ("qwen3_coder", "<parameter=", "ab", ">1</parameter>", '": 1'),
        ("glm4", "<arg_key>", "a<", "</arg_key>\n<arg_value>1</arg_value>", '": 1'),
        ("deepseek_v32", None, 'a"', None, '": 1'),
        ("gemma4", "a:", "b ", "}", 'b"}'),
        ("lfm2", "a=", "b ", ")", 'b"}'),
    ],
)
def test_what_goes_on_without_end_is_searched_once(monkeypatch, name, begun, piece, end, wanted):
    """Each character of a name, and of a value without quotation marks, is looked at a few times, not at each token."""
    syntax = NAMED_FORMATS[name].style.arguments
    begun, end = begun or syntax.open, end or f"{syntax.named}1{syntax.close}"
    reader, searched = syntax.reader({}), []
    owner, search = (
        (TaggedArguments, "_name") if isinstance(reader, TaggedArguments) else (LiteralArguments, "_bare_end")
    )
    plain = getattr(owner, search)

    def noting(self, text, *more):
        before = self._searched if owner is TaggedArguments else self._scanned
        searched.append(len(text) - before)
        return plain(self, text, *more)

    monkeypatch.setattr(owner, search, noting)
    given, rest = reader.read(begun, final=False)
    for _ in range(2000):
        piece_given, rest = reader.read(reader.held + piece, final=False)
        given += piece_given
    assert rest is None and sum(searched) < 50 * 2000
    piece_given, rest = reader.read(reader.held + end, final=True)
    assert (given + piece_given).endswith(wanted)
