"""Reasoning, content and calls out of text that comes in any pieces, for every family of models."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.server.text.argument_syntax import JsonEnd
from chorus.server.text.call_styles import wide
from chorus.server.text.output_parser import MAX_HEAD, OutputParser
from chorus.server.text.output_parts import ParsedMessage, Part, PartKind
from chorus.server.text.output_syntax import OutputSyntax
from chorus.server.text.tagged_syntax import TaggedSyntax
from chorus.server.text.tool_call_formats import (
    ANSWER_FORMATS,
    HERMES,
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    declared,
    reasoning_format_of,
    tool_call_format_of,
)

FORMATS = {each.name: each for each in TOOL_CALL_FORMATS}
THINK = REASONING_FORMATS[-1]
TOOLS = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}, "g": {}}


def parser(tools=TOOLS, *, shows_reasoning=True, parallel=True, **syntax):
    return OutputParser(OutputSyntax(**syntax), tools, shows_reasoning=shows_reasoning, parallel=parallel)


def message(text, pieces=None, **options):
    reader = parser(**options)
    whole = ParsedMessage()
    for piece, final in [*((piece, False) for piece in ([text] if pieces is None else pieces)), ("", True)]:
        parts = reader.read(piece, final=final)
        assert all(text.startswith(p.text, p.at) for p in parts if p.kind is PartKind.CONTENT)
        whole.add(parts)
    for call in whole.calls:
        call.id = re.sub(r"[A-Za-z0-9]{9,}$", "", call.id)
    return whole, reader.calls


def calls(text, name, **options):
    """Content, then each call's name and arguments."""
    whole, _ = message(text, calls=FORMATS[name], **options)
    return whole.content, *((call.name, json.loads(call.arguments)) for call in whole.calls)


F, G = ("f", {"a": 'x } </tool_call> "\\', "b": 3}), ("g", {})
JSON = json.dumps(F[1])
LINES = "\n" * 1000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "hermes",
            f'<tool_call>\n{{"name": "f", "arguments": {JSON}}}\n</tool_call>\n'
            '<tool_call>{"arguments": {}, "name": "g"}</tool_call>',
        ),
        ("hermes", f'<tool_call>{{"name":"f","arguments":{json.dumps(JSON)}}}</tool_call><tool_call> {{"name": "g"}}'),
        ("llama3", f'{{"name": "f", "parameters": {JSON}}}; {{"name": "g", "parameters": {{}}}}'),
        ("llama3", f'<|python_tag|>{{"type": "function", "name": "f", "parameters": {JSON}}};{{"name": "g"}}'),
        (
            "mistral_list",
            f'[TOOL_CALLS] [{{"name": "f", "arguments": {JSON}, "id": "a}}]"}}, {{"name": "g", "arguments": {{}}}}]',
        ),
        ("mistral", f"[TOOL_CALLS]f[ARGS]{JSON}[TOOL_CALLS]g[ARGS] {{}}"),
        (
            "deepseek_v3",
            wide(
                "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>f\n```json\n"
                "JSON\n```<|tool_call_end|>\n<|tool_call_begin|>function<|tool_sep|>g\n```json\n"
                "{}\n```<|tool_call_end|><|tool_calls_end|>"
            ).replace("JSON", JSON),
        ),
        (
            "deepseek_v31",
            wide(
                "<|tool_calls_begin|><|tool_call_begin|>f<|tool_sep|>JSON<|tool_call_end|>"
                "<|tool_call_begin|>g<|tool_sep|>{}<|tool_call_end|><|tool_calls_end|>"
            ).replace("JSON", JSON),
        ),
    ],
)
def test_calls_of_families(name, text):
    assert calls(text, name) == ("", F, G)
    behind = calls(f"Well. \n{text}", name)
    assert behind == ((f"Well. \n{text}",) if name == "llama3" and text[0] == "{" else ("Well.", F, G))


@pytest.mark.parametrize("name", ["seed_oss", "qwen3_coder"])
def test_arguments_as_tags_are_typed_by_the_schema(name):
    form = FORMATS[name]
    text = (
        f"{form.frame.open}\n<function=f>\n<parameter=a>\n12 <b>\n\n</parameter>\n<parameter=b>7</parameter>\n"
        f'<parameter=c>{{"d": True}}</parameter><parameter=e>True</parameter>\n</function>\n{form.frame.close}\n'
        f"{form.frame.open}<function=g></function>{form.frame.close} Done."
    )
    wanted = {"a": "12 <b>\n", "b": 7, "c": '{"d": True}', "e": True}
    assert calls(text, name) == ("Done.", ("f", wanted), ("g", {}))


LOOKALIKES = (
    "<tool_call>",
    "<tool_call> is a tag",
    '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
    "a <tool_cal",
    '<tool_call>{"name": "h"',
    "<tool_call>[1]</tool_call>",
    '<tool_call>{"a": ]]}',
    "<function=f>",
    "  \n",
    "{} a ",
    '{"name": "h", "parameters": {}}',
    '{"name": 1, "parameters": NaN}',
    "[TOOL_CALLS] none",
    "[TOOL_CALLS]h[ARGS]{}",
    "<|python_tag|>print(1)",
    "<seed:tool_call>\n<function=h>\n</function>",
    '<tool_call>{"name": ["f"]}',
)


@pytest.mark.parametrize("text", LOOKALIKES)
@pytest.mark.parametrize("name", FORMATS)
def test_what_only_looks_like_a_call_is_content(name, text):
    whole, called = message(text, calls=FORMATS[name], reasoning=THINK)
    assert (whole.content, whole.calls, called) == (text, [], False)
    assert message(text, list(text), calls=FORMATS[name], reasoning=THINK)[0].content == text


def test_reasoning():
    text = "\n<think>\nSo: <tool_call>\n\n</think>\n\nYes <think> "
    assert message(text, reasoning=THINK)[0] == ParsedMessage("Yes <think> ", "So: <tool_call>")
    assert message("\nSo\n</think>\n\nYes", reasoning=THINK, reasons_already=True)[0] == ParsedMessage("Yes", "So")
    assert message("\nSo </thin", reasoning=THINK, reasons_already=True)[0] == ParsedMessage("", "So </thin")
    assert message(text, reasoning=THINK, shows_reasoning=False)[0] == ParsedMessage("Yes <think> ")
    assert message(" No", reasoning=THINK)[0] == ParsedMessage(" No")
    assert message(text)[0] == ParsedMessage(text)
    bare = '<think>a</think>\n{"name": "g", "parameters": {}}'
    whole, called = message(bare, calls=FORMATS["llama3"], reasoning=THINK)
    assert (whole.reasoning, whole.content, [call.name for call in whole.calls], called) == ("a", "", ["g"], True)


def test_only_one_call_where_they_must_not_be_parallel():
    one = '<tool_call>{"name": "g", "arguments": {}}</tool_call>\n'
    assert calls(one * 3 + "more", "hermes", parallel=False) == ("", G)


def test_parts_come_in_order_and_as_soon_as_they_are_certain():
    reader = parser(calls=HERMES)
    assert reader.read("Well <tool") == [Part(PartKind.CONTENT, "Well")]
    assert reader.read('_call>{"name": "f", ') == []
    assert reader.read('"arguments": ') == []
    call, begun = reader.read('{"a": "x')
    assert (call.kind, call.text, call.call) == (PartKind.CALL, "f", 0) and re.fullmatch(
        "call_[A-Za-z0-9]{24}", call.id
    )
    assert begun == Part(PartKind.ARGUMENTS, '{"a": "x', 0)
    assert not reader.calls
    assert reader.read('"}}</tool_call>Done') == [
        Part(PartKind.ARGUMENTS, '"}', 0),
        Part(PartKind.CONTENT, "Done", at=66),
    ]
    assert reader.calls and reader.read("", final=True) == []


def test_a_string_among_tags_is_given_as_it_comes():
    reader = parser(calls=FORMATS["qwen3_coder"])
    reader.read("<tool_call><function=f><parameter=a>")
    assert reader.read('one "two') == [Part(PartKind.ARGUMENTS, '"one \\"two', 0)]
    assert reader.read("\n</para") == []
    assert reader.read("graph") == [Part(PartKind.ARGUMENTS, "\\n</paragraph", 0)]


def test_an_answer_that_is_cut_has_what_came_of_its_call():
    whole, called = message('<tool_call>\n{"name": "f", "arguments": {"a": "x', calls=HERMES)
    assert (whole.content, whole.calls[0].arguments, called) == ("", '{"a": "x', False)
    whole, called = message('<tool_call>\n{"name": "g", "arguments": {}}\n</tool_', calls=HERMES)
    assert (whole.content, whole.calls[0].arguments, called) == ("", "{}", True)


WORDS = st.sampled_from(
    [
        *LOOKALIKES,
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": ',
        '{"name": "g", "parameters": {',
        "}",
        "{",
        '"',
        "\\",
        "f[ARGS]",
        "[TOOL_CALLS]",
        "[",
        "]",
        ",",
        ";",
        "\n",
        " ",
        "a",
        "é",
        "<function=f>",
        "<parameter=a>",
        "<parameter=b>",
        "</parameter>",
        "</function>",
        "<seed:tool_call>",
        "</seed:tool_call>",
        "<think>",
        "</think>",
        "<|python_tag|>",
        "1",
        "</",
        "function",
        "```json\n{",
        "```",
        *map(wide, ("<|tool_calls_begin|>", "<|tool_call_begin|>", "<|tool_sep|>f", "<|tool_call_end|>")),
    ]
)


@pytest.mark.wide
@settings(deadline=None, max_examples=300)
@given(st.data())
def test_any_split_gives_the_same_and_nothing_raises(data):
    text = "".join(data.draw(st.lists(WORDS, max_size=14)))
    options = {
        "calls": data.draw(st.sampled_from(TOOL_CALL_FORMATS)),
        "reasoning": data.draw(st.sampled_from([None, THINK])),
        "reasons_already": data.draw(st.booleans()),
        "parallel": data.draw(st.booleans()),
    }
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    at_once = message(text, **options)
    assert message(text, pieces, **options) == at_once == message(text, list(text), **options)
    if not at_once[0].calls and options["reasoning"] is None:
        assert at_once[0].content == text, "nothing is lost"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", "hermes"),
        ('<tool_call>\\n{"name": <function-name>', "hermes"),
        ("<tool_call>\n<function=example>", "qwen3_coder"),
        ("<seed:tool_call><function=", "seed_oss"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral_list"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral"),
        ("<|python_tag|>", "llama3"),
        (
            wide("{{ '<|tool_calls_begin|><|tool_call_begin|>' + type + '<|tool_sep|>' + name + '```json' }}"),
            "deepseek_v3",
        ),
        (wide("<|tool_calls_begin|><|tool_call_begin|>"), "deepseek_v31"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3"),
    ],
)
def test_a_template_tells_the_family(template, name):
    assert tool_call_format_of(template).name == name


def test_a_checkpoint_declares_its_own_marks():
    call = {"content": "json", "transform": {"type": "function", "function": "{content}"}}
    own = declared(
        {
            "fields": {
                "thinking": {"open": "<r>", "close": "</r>"},
                "tool_calls": {"open_pattern": r"\s*<call\|>", "close": "</call>", **call},
                "content": {"close": "<end>"},
            }
        }
    )
    text = '<r>So</r><call|>{"name": "g", "arguments": {}}</call> Done.'
    whole, called = message(text, list(text), calls=own.calls, reasoning=own.reasoning)
    assert (whole.reasoning, whole.content, [one.name for one in whole.calls], called) == ("So", "Done.", ["g"], True)
    for other in (
        {"open_pattern": "<tool_call>call:(?P<name>)", "close": "</call>", **call},
        {"open": "<call>", "close": ["</call>"], **call},
        {"open": "<call>", "close": "</call>", **call, "content_args": {"unquoted_keys": True}},
        {"open": "<call>", "close": "</call>", "content": "xml-inline", "transform": {"function": {"name": "{name}"}}},
        "<call>",
    ):
        assert declared({"fields": {"tool_calls": other}}) == OutputSyntax()
    assert declared(None) == declared({}) == declared({"fields": {"thinking": 1}}) == OutputSyntax()


def test_a_template_or_a_token_tells_of_reasoning():
    assert reasoning_format_of("{{ a }}", lambda _: False) is None
    assert reasoning_format_of("a</think>", lambda _: False) == THINK
    assert reasoning_format_of("", "[/THINK]".__eq__) == REASONING_FORMATS[1]


@pytest.mark.parametrize("lead", ["", "<think>A.</think>"])
def test_content_on_both_sides_of_a_mark_keeps_its_place(lead):
    text = f"{lead}One <response>two</response> three"
    for pieces in ([text], list(text)):
        whole, _ = message(text, pieces, reasoning=THINK, answer=ANSWER_FORMATS[1])
        assert whole.content == "Onetwothree"


@pytest.mark.parametrize("close", ["", " </think>"])
@pytest.mark.parametrize(
    ("thought", "num_calls"),
    [
        ("<tool_call>x, ", 0),
        ('<tool_call>\n{"name": "none", "arguments": ', 0),
        (f'<tool_call>{{"name": "f", "arguments": {JSON}}}</tool_call> or \n<tool_call> <tool_call>{{}} ', 0),
        ('No <tool_call>{"a": 1} but <tool_call>{"name": "g", "arguments": {}}</tool_call>', 1),
        ('<tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>\n', 1),
    ],
)
def test_calls_that_are_thought_about_do_not_depend_on_the_pieces(thought, num_calls, close):
    text = f"<think>{thought}{close}"
    whole = message(text, calls=HERMES, reasoning=THINK)
    assert len(whole[0].calls) == num_calls and not whole[0].content
    for at in range(len(text)):
        assert message(text, [text[:at], text[at:]], calls=HERMES, reasoning=THINK) == whole, text[at:]
    assert message(text, list(text), calls=HERMES, reasoning=THINK) == whole


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        ("", "y"),
        ("x", f"x{LINES}y"),
        ("<think>", ""),
        ("<think>x</think>", "y"),
        ("<tool_call>", f"<tool_call>{LINES}y"),
    ],
)
def test_very_many_blanks_are_not_read_again_for_each_that_comes(before, wanted):
    class Counting(OutputParser):
        def _until(self, marks: Sequence[str], *, drops_blanks: bool) -> tuple[str, str]:
            read.append(len(self._held))
            return super()._until(marks, drops_blanks=drops_blanks)

    read: list[int] = []
    reader = Counting(OutputSyntax(HERMES, THINK), TOOLS)
    given = reader.read(before)
    for _ in LINES:
        given += reader.read("\n")
    assert sum(read) < len(LINES), "each is read once at most"
    given += reader.read("y", final=True)
    shown = "".join(part.text for part in given if part.kind is PartKind.CONTENT)
    assert shown.strip() == wanted


@pytest.mark.parametrize(
    ("schema", "said", "wanted"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "75001", "75001"),
        ({"type": ["string", "null"]}, "True", "True"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, '"75001"', '"75001"'),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": "[1]"}, "[1]", "[1]"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "75001", 75001),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "1.0", 1.0),
        ({"anyOf": [{"type": "string"}, {}]}, "75001", 75001),
        ({"type": "integer"}, '{"a": 1}', {"a": 1}),
        ({"type": ["string", {}, "array"]}, "[1]", [1]),
        ({}, "75001", 75001),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm4", "minimax_m2"])
def test_a_value_between_tags_is_of_a_type_that_the_schema_has(name, schema, said, wanted):
    """A text may look like a number where the schema has only a string and null."""
    form, tools = FORMATS[name], {"f": {"properties": {"a": schema}}}
    style, syntax = form.style, form.style.arguments
    assert isinstance(syntax, TaggedSyntax)
    arguments = f"{syntax.open}a{syntax.named}{said}{syntax.close}{syntax.after}"
    text = form.frame.open + style.begin.format(name="f", index=0) + arguments + style.end + form.frame.close
    for pieces in ([text], list(text)):
        assert calls(text, name, pieces=pieces, tools=tools) == ("", ("f", {"a": wanted}))


CUT = {
    "in an object": ('<tool_call>\n{"name": "f", "arguments": {"b": 1\n</tool_call>', '{"b": 1\n'),
    "in a list": ('<tool_call>{"name": "f", "arguments": {"b": [1, {"x": 2</tool_call>', '{"b": [1, {"x": 2'),
    "behind the arguments": ('<tool_call>{"name": "f", "arguments": {"b": 1}</tool_call>', '{"b": 1}'),
    "behind the arguments, with more": (
        '<tool_call>{"name": "f", "arguments": {"b": 1}, "id": 5 </tool_call>',
        '{"b": 1}',
    ),
    "by the next call": ('<tool_call>{"name": "f", "arguments": {"b": 1', '{"b": 1'),
}


@pytest.mark.parametrize("case", CUT)
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_mark_ends_a_call_that_is_cut_short(case, size):
    """What follows is no part of it: another call, and content."""
    begun, arguments = CUT[case]
    text = f'{begun}<tool_call>{{"name": "g", "arguments": {{}}}}</tool_call>Done </tool'
    whole, _ = message(text, [text[at : at + size] for at in range(0, len(text), size)], calls=HERMES)
    assert [(call.name, call.arguments) for call in whole.calls] == [("f", arguments), ("g", "{}")]
    assert whole.content == "Done </tool"


def test_a_cut_object_without_a_name_is_content():
    text = '<tool_call>{"arguments": {"b": 1</tool_call> Done.'
    whole, _ = message(text, calls=HERMES)
    assert not whole.calls and whole.content == text


def test_marks_within_texts_end_nothing():
    said = 'a </tool_call> <tool_call> "'
    text = f'<tool_call>{{"name": "f", "arguments": {json.dumps({"a": said})}, "id": {json.dumps(said)}}}</tool_call>ok'
    whole, _ = message(text, [*text], calls=HERMES)
    assert [json.loads(call.arguments) for call in whole.calls] == [{"a": said}] and whole.content == "ok"


@pytest.mark.parametrize("name", ["hermes", "nemotron_nano_2", "qwen3_coder", "kimi_k2", "mistral"])
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(
    ("begun", "piece"), [('{"name":', " "), ("[", "\n"), ('{"name": "', "a"), ("<function=", "\t")]
)
def test_a_head_that_goes_on_without_end_is_read_once(monkeypatch, name, thinks, begun, piece):
    """Each character is looked at a few hundred times at most, however long the text is."""
    looked_at = []
    plain = getattr(OutputParser, "_head")  # noqa: B009
    monkeypatch.setattr(
        OutputParser, "_head", lambda self: looked_at.append(min(len(self._held), 2 * MAX_HEAD)) or plain(self)
    )
    find = JsonEnd.find
    monkeypatch.setattr(
        JsonEnd,
        "find",
        lambda self, text, begin: looked_at.append(len(text) - max(self.at, begin)) or find(self, text, begin),
    )
    form = FORMATS[name]
    reader = OutputParser(OutputSyntax(form, THINK if thinks else None, reasons_already=thinks), TOOLS)
    reader.read(form.frame.open + begun)
    for _ in range(4000):
        reader.read(piece)
    assert sum(looked_at) < 4000 * (2 if piece.isspace() else 2 * MAX_HEAD + 2)
    assert len(looked_at) < 20 or not piece.isspace(), "blanks wait for what follows them"


@pytest.mark.parametrize("piece", ["{0}", "{0} ", "{0}{{", "{0}\na", "{0}a b\n{0}"])
@pytest.mark.parametrize("together", [1, 1000])
def test_reasoning_full_of_marks_is_read_a_few_times_at_most(monkeypatch, piece, together):
    """By the parser itself, and by those that look for calls."""
    read: list[int] = []
    plain = OutputParser.read
    monkeypatch.setattr(
        OutputParser, "read", lambda self, text, **how: read.append(len(text)) or plain(self, text, **how)
    )
    reader = OutputParser(OutputSyntax(HERMES, THINK, reasons_already=True), TOOLS)
    text = piece.format("<tool_call>")
    given = [part for _ in range(1000 // together) for part in reader.read(text * together)]
    given += reader.read("</think>x", final=True)
    assert sum(read) <= 4 * len(text) * 1000
    shown = "".join(part.text for part in given if part.kind is PartKind.REASONING)
    assert shown.strip() == (text * 1000).strip()
