"""What the grammar of a format of tool calls accepts, the parser reads back to the same arguments, at every split."""

from __future__ import annotations

import json

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from chorus.core.requests.grammar import Grammar
from chorus.core.requests.grammars import Grammars
from chorus.server.api.output_grammar import output_grammar
from chorus.server.text.literal_syntax import LiteralSyntax
from chorus.server.text.output_parser import OutputParser
from chorus.server.text.output_parts import ParsedMessage
from chorus.server.text.output_syntax import OutputSyntax
from chorus.server.text.tool_call_formats import TOOL_CALL_FORMATS

from ...tiny_tokenizer import save_tokenizer
from ..written_calls import written_calls

FORMATS = {each.name: each for each in TOOL_CALL_FORMATS}
CLOSE = "</parameter>"

WORDS = (
    *("a", "B2", "é", "😀", " ", "\n", "\n\n", "\t", '"', "\\", "'", "{", "}", "[", "]", ",", ":", ";", "0", "-1.5"),
    *("true", "None", "null", "<", ">", "</", "</param", "</parameter", "<parameter=a>", "<function=f>", "</function>"),
    *("\n</parameter", "```", "<tool_call>", "</tool_call>", "</seed:tool_call>", "[TOOL_CALLS]", "[ARGS]"),
)
TEXTS = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)
NAMES = st.sampled_from(["a", "b_c", "é", "a.b", "😀 x", 'q"', "back\\", "=", "<b"])
WORDS_ALONE = st.sampled_from(["a", "b_c", "é", "a.b", "c-1"])

EOS = 2

LAST = (
    '"',
    CLOSE,
    "\n",
    "}",
    "]",
    "1",
    "f",
    "g",
    ",",
    ":",
    "<",
    *"abcu",
    "tr",
    "ue",
    "fa",
    "ls",
    "nu",
    "ll",
    "null",
    "x",
    "o",
    "t",
    ">",
    "e",
    "é",
    "😀",
    "{",
)
"""Words that lead to the end of any text that a grammar allows."""

STRING = {"type": "string"}
VALUES = [
    (STRING, TEXTS),
    (
        {"type": "string", "enum": ["", "x\n", "\ny", "é😀", '"q"', " "]},
        st.sampled_from(["", "x\n", "\ny", "é😀", " "]),
    ),
    ({"type": "string", "const": "only\nthis "}, st.just("only\nthis ")),
    ({"type": "integer"}, st.integers(-(10**6), 10**6)),
    ({"type": "boolean"}, st.booleans()),
    ({"type": "null"}, st.none()),
    ({"type": ["string", "null"]}, st.none() | TEXTS.filter(lambda text: text not in ("null", "None"))),
    ({"anyOf": [{"enum": ["1", "", "true"]}, {"type": "null"}]}, st.sampled_from(["1", "", "true", None])),
    ({"enum": ["null", None]}, st.sampled_from(["null", None])),
    ({"allOf": [STRING], "description": "x"}, TEXTS),
    ({"anyOf": [STRING, {"type": "integer"}]}, TEXTS | st.integers(0, 9)),
    ({"enum": ["</parameter>", 1, None]}, st.sampled_from(["</parameter>", 1, None])),
    ({"type": "array", "items": STRING}, st.lists(TEXTS | st.just(CLOSE), max_size=3)),
    (
        {"type": "object", "properties": {"k</parameter>": STRING}, "required": ["k</parameter>"]},
        st.fixed_dictionaries({"k</parameter>": TEXTS | st.just(f"x{CLOSE}\n{CLOSE}")}),
    ),
]


@st.composite
def functions(draw, form):
    """The schema of a function's arguments, and some arguments."""
    properties, required, arguments = {}, [], {}
    names = WORDS_ALONE if isinstance(form.style.arguments, LiteralSyntax) else NAMES
    for name in draw(st.lists(names, unique=True, max_size=4)):
        schema, values = draw(st.sampled_from(VALUES))
        properties[name] = schema
        if draw(st.booleans()):
            required.append(name)
        if name in required or draw(st.booleans()):
            arguments[name] = draw(values)
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return schema, arguments


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    backend = save_tokenizer(path)
    return backend, Grammars(path, backend.get_vocab_size(), [backend.token_to_id("</s>")])


def matcher_of(grammars, form, tools):
    return grammars[1].compile(
        Grammar("calls", output_grammar(OutputSyntax(form), tools, {}, forced=True, parallel=True))
    )


def accepts(grammars, form, tools, text):
    matcher = matcher_of(grammars, form, tools)
    tokens = grammars[0].encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def read(form, tools, pieces):
    parser, message = OutputParser(OutputSyntax(form), tools), ParsedMessage()
    for piece in pieces:
        message.add(parser.read(piece))
    message.add(parser.read("", final=True))
    return message.content, message.reasoning, [(each.name, each.arguments) for each in message.calls], parser.calls


def read_at_every_split(form, tools, text):
    """What is read of a text, which no split changes: the content, and the calls with their parsed arguments."""
    whole = read(form, tools, [text])
    for at in range(1, len(text), max(1, len(text) // 300)):
        assert read(form, tools, [text[:at], text[at:]]) == whole, (text[:at], text[at:])
    assert read(form, tools, list(text)) == whole
    content, reasoning, calls, complete = whole
    assert complete and not reasoning
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.wide
@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_arguments_that_a_grammar_accepts_are_read_back(grammars, name, data):
    form = FORMATS[name]
    tools, calls = {}, []
    for function in data.draw(st.lists(st.sampled_from(["f", "g-1"]), unique=True, min_size=1)):
        tools[function], arguments = data.draw(functions(form))
        calls.append((function, arguments))
    text = written_calls(form, tools, calls)
    assert accepts(grammars, form, tools, text), text
    assert read_at_every_split(form, tools, text) == ("", calls)


@pytest.mark.wide
@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_any_text_that_a_grammar_leads_to_is_read_as_calls_that_match_the_schema(grammars, name, data):
    """A walk through the grammar by words that end values, quote marks, or look like the format's own."""
    form = FORMATS[name]
    tools = {"f": data.draw(functions(form))[0], "g": {"type": "object", "properties": {}}}
    matcher, backend = matcher_of(grammars, form, tools), grammars[0]
    last = (*LAST, *reversed(dict.fromkeys("".join((*form.marks, ")")))))
    ids = {word: backend.encode(word, add_special_tokens=False).ids for word in (*WORDS, *last, f"{CLOSE}\n")}
    steps = data.draw(st.lists(st.sampled_from(list(ids)), max_size=40))
    tokens: list[int] = []
    for number, step in enumerate((*steps, *last * 12)):
        if not matcher.is_stopped() and (forced := matcher.compute_ff_tokens()):
            matcher.consume_tokens(forced)
            tokens += forced
        if matcher.is_stopped() or (number >= len(steps) and matcher.is_accepting()):
            break
        if matcher.validate_tokens(ids[step]) == len(ids[step]):
            matcher.consume_tokens(ids[step])
            tokens += ids[step]
    assume(matcher.is_stopped() or matcher.is_accepting())
    text = backend.decode([token for token in tokens if token != EOS], skip_special_tokens=False)
    content, calls = read_at_every_split(form, tools, text)
    assert content == "" and calls, text
    for function, arguments in calls:
        jsonschema.validate(arguments, tools[function])


def test_a_text_ends_at_the_first_closing_tag_for_both(grammars):
    """A grammar that allowed the tag within a text let the rest of it leak into the content."""
    form = FORMATS["qwen3_coder"]
    tools = {"f": {"type": "object", "properties": {"a": STRING, "b": STRING}, "required": ["a"]}}
    for value in (f"x{CLOSE}y", f"x{CLOSE}", f"\n{CLOSE} "):
        assert not accepts(grammars, form, tools, written_calls(form, tools, [("f", {"a": value})])), value
    short = "<tool_call>\n<function=f>\n<parameter=a>\nx</parameter>\n</function>\n</tool_call>"
    assert accepts(grammars, form, tools, short)
    assert read_at_every_split(form, tools, short) == ("", [("f", {"a": "x"})])


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (f'["{CLOSE}", "\\"{CLOSE}"]', [CLOSE, f'"{CLOSE}']),
        (f'"{CLOSE}\\n"', f"{CLOSE}\n"),
        (f'["x{CLOSE}', '["x'),
        (f'["x\n"{CLOSE}', '["x\n"'),
        ("{'a': 1}", "{'a': 1}"),
        ("[1, 2", "[1, 2"),
    ],
)
@pytest.mark.parametrize("line", ["", "\n"])
def test_json_between_tags_ends_at_a_tag_outside_its_strings_and_other_text_at_the_first(value, wanted, line):
    form, tools = FORMATS["qwen3_coder"], {"f": {"properties": {}}}
    value = value.removesuffix(CLOSE) if wanted in ('["x', '["x\n"') else value
    text = f"<tool_call><function=f><parameter=a>{line}{value}{line}{CLOSE}{line}</function></tool_call>"
    assert read_at_every_split(form, tools, text) == ("", [("f", {"a": wanted})])


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({"a>b": STRING}, "properties.a>b: this model's format of tool calls can't write a name with >"),
        ({" a": STRING}, "properties. a: this model's format of tool calls can't write a name"),
        ({"a": {"type": "string", "enum": ["x", CLOSE]}}, f"can't write a value with {CLOSE}"),
        ({"a": {"type": "string", "enum": [1, None]}}, "its const, enum, anyOf, oneOf, allOf or type allows no value"),
    ],
)
def test_what_tags_cannot_write_is_told(properties, said):
    tags = FORMATS["seed_oss"].style.arguments
    assert said in (tags.unwritable({"properties": properties}) or "")
    assert tags.unwritable({"properties": {"a": STRING, "b": {"enum": [CLOSE, 1]}, "c": True}}) is None
