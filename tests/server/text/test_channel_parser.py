"""Output of messages with channels and recipients."""

from __future__ import annotations

import json

import pytest

from chorus.server.text.channel_formats import ATEM, HARMONY, INKLING, channel_format_of
from chorus.server.text.channel_parser import ChannelParser
from chorus.server.text.output_parts import ParsedMessage, PartKind

TOOLS = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}, "g.h": {}}
CALL = ("f", {"a": 'x <|end|> "', "b": 3})
JSON = json.dumps(CALL[1])


def parsed(form, pieces, text, **options):
    reader, said, thoughtful = ChannelParser(form, TOOLS, **options), ParsedMessage(), False
    for piece, final in [*((piece, False) for piece in pieces), ("", True)]:
        parts = reader.read(piece, final=final)
        assert all(text.startswith(part.text, part.at) for part in parts if part.kind is PartKind.CONTENT)
        said.add(parts)
        thoughtful |= reader.reasons
    assert thoughtful or not said.reasoning or len(pieces) < len(text)
    calls = [(call.name, json.loads(call.arguments)) for call in said.calls]
    return said.content, said.reasoning, calls, reader.calls


def parsed_everywhere(form, text, **options):
    whole = parsed(form, [text], text, **options)
    assert parsed(form, list(text), text, **options) == whole
    for at in range(1, len(text)):
        assert parsed(form, [text[:at], text[at:]], text, **options) == whole, (text[:at], text[at:])
    return whole


THOUGHT = "<|channel|>analysis<|message|>So <b>.\n<|end|><|start|>assistant"


@pytest.mark.parametrize("thought", ["", THOUGHT])
@pytest.mark.parametrize("end", ["", "<|return|>", "<|end|>"])
def test_channels_of_harmony(thought, end):
    text = f"{thought}<|channel|>final<|message|>It rains. {{}}{end}"
    assert parsed_everywhere(HARMONY, text) == ("It rains. {}", "So <b>." if thought else "", [], False)
    hidden = parsed_everywhere(HARMONY, text, shows_reasoning=False)
    assert hidden == ("It rains. {}", "", [], False)


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json",
        " to=functions.f<|channel|>commentary json",
        "<|channel|>analysis to=functions.f code",
        " to=f<|channel|>commentary",
    ],
)
@pytest.mark.parametrize("end", ["", "<|call|>"])
def test_calls_of_harmony(header, end):
    text = f"{THOUGHT}{header}<|message|>{JSON}{end}"
    assert parsed_everywhere(HARMONY, text) == ("", "So <b>.", [CALL], True)


def test_a_preamble_is_content_and_what_goes_to_other_tools_is_not():
    call = f" to=functions.f<|channel|>commentary<|message|>{JSON}"
    text = f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{call}"
    assert parsed_everywhere(HARMONY, text) == ("I look.", "", [CALL], True)
    other = "<|channel|>commentary to=python code<|message|>print(1)<|call|>"
    assert parsed_everywhere(HARMONY, other) == ("", "print(1)", [], False)


def test_several_calls_and_only_one_where_they_must_not_be_parallel():
    one = f"<|channel|>commentary to=functions.f json<|message|>{JSON}<|call|>"
    two = f"{one}<|start|>assistant<|channel|>commentary to=functions.g.h json<|message|>{{}}<|call|>"
    assert parsed_everywhere(HARMONY, two) == ("", "", [CALL, ("g.h", {})], True)
    assert parsed_everywhere(HARMONY, two, parallel=False)[2] == [CALL]


def test_text_without_channels_is_content():
    assert parsed_everywhere(HARMONY, "It rains.") == ("It rains.", "", [], False)
    assert parsed_everywhere(HARMONY, "<|channel|>anal") == ("", "", [], False)


def test_an_answer_that_is_cut_has_what_came_of_its_call():
    reader, said = ChannelParser(HARMONY, TOOLS), ParsedMessage()
    said.add(reader.read('<|channel|>commentary to=functions.f json<|message|>{"a": "x'))
    said.add(reader.read("", final=True))
    assert (said.calls[0].arguments, reader.calls) == ('{"a": "x', False)


@pytest.mark.parametrize("end", ["<|call|>", "<|end|>", " <|call|>"])
def test_a_message_to_a_function_ends_at_its_mark(end):
    """Also where its body is empty, which is a call without arguments, or no JSON, which is no call."""
    header, next_one = "<|channel|>commentary to=functions.f json<|message|>", "<|start|>assistant<|channel|>final"
    answer = f"{end}{next_one}<|message|>Yes."
    assert parsed_everywhere(HARMONY, f"{header}{answer}") == ("Yes.", "", [("f", {})], True)
    assert parsed_everywhere(HARMONY, f"{header}print(1) {{}}{answer}") == ("Yes.", "print(1) {}", [], False)
    assert parsed_everywhere(HARMONY, header) == ("", "", [("f", {})], True)
    for broken in ('{"a": ', '{"a": "x", ', '{"a": {"b": [1'):
        for pieces in ([f"{header}{broken}{answer}"], list(f"{header}{broken}{answer}")):
            reader, said = ChannelParser(HARMONY, TOOLS), ParsedMessage()
            for piece in (*pieces, ""):
                said.add(reader.read(piece, final=not piece))
            (call,) = said.calls
            assert (call.arguments.rstrip(), said.content) == (broken.rstrip(), "Yes."), "it is given as it is said"


def test_recipients_of_muse_glimmer():
    call = (
        '<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="a">x <|end|> "</atem:parameter>\n'
        '<atem:parameter name="b">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
    )
    thought = " to=self<|message|>So.<|eom|><|start|>assistant"
    assert parsed_everywhere(ATEM, f"{thought} to=f<|message|>{call}<|eot|>") == ("", "So.", [CALL], True)
    assert parsed_everywhere(ATEM, f"{thought} to=user<|message|>It rains.<|eot|>") == ("It rains.", "So.", [], False)
    assert parsed_everywhere(ATEM, "<|message|>It rains.") == ("It rains.", "", [], False)
    several = f" to=f<|message|>{call}<|eom|><|start|>assistant to=g.h<|message|>" + (
        '<atem:function_calls>\n<atem:invoke name="g.h">\n</atem:invoke>\n</atem:function_calls><|eot|>'
    )
    assert parsed_everywhere(ATEM, several) == ("", "", [CALL, ("g.h", {})], True)


def test_a_template_tells_of_channels():
    assert channel_format_of("<|start|>assistant<|channel|>final<|message|>") is HARMONY
    assert channel_format_of("<|start|>assistant to=self<|message|><atem:function_calls>") is ATEM
    assert channel_format_of("<|channel>thought<channel|>") is None


@pytest.mark.parametrize("form", [HARMONY, ATEM])
@pytest.mark.parametrize("lead", ["It rains.", " hi <b> ", "<", "assistant" + " x" * 200])
def test_text_before_a_mark_that_is_no_header_is_content(form, lead):
    content, reasoning, *_ = parsed_everywhere(form, f"{lead}<|message|>So.")
    assert (content, reasoning) == (f"{lead.lstrip()}<|message|>So.", ""), "nothing is lost"


def test_content_beside_calls_keeps_its_place():
    text = " to=f<|message|>  <atem:function_calls><x> and<|eot|><|start|>assistant to=user<|message|>Yes.<|eot|>"
    assert parsed_everywhere(ATEM, text) == ("  <atem:function_calls><x> andYes.", "", [], False)


def test_one_call_of_a_message_where_they_must_not_be_parallel():
    calls = "".join(f'<atem:invoke name="{name}">\n</atem:invoke>\n' for name in ("f", "g.h"))
    text = f" to=f<|message|><atem:function_calls>\n{calls}</atem:function_calls><|eot|>"
    assert parsed_everywhere(ATEM, text)[2] == [("f", {}), ("g.h", {})]
    assert parsed_everywhere(ATEM, text, parallel=False) == ("", "", [("f", {})], True)


def invoked(name: str, arguments: str) -> str:
    return f'<|message_model|>{name}<|content_invoke_tool_json|>{{"name":"{name}","args":{arguments}}}<|end_message|>'


def test_messages_of_kinds():
    """Inkling's: thoughts, texts and calls, each told by the mark behind its header."""
    thought = "<|message_model|><|content_thinking|>So <b>.\n<|end_message|>"
    answer = "<|message_model|><|content_text|>It rains. {}<|end_message|><|content_model_end_sampling|>"
    assert parsed_everywhere(INKLING, thought + answer) == ("It rains. {}", "So <b>.", [], False)
    assert parsed_everywhere(INKLING, answer) == ("It rains. {}", "", [], False)
    call = ("f", {"a": 'x } "', "b": 3})
    calls = invoked("f", json.dumps(call[1])) + invoked("g.h", "{}")
    text = f"{thought}<|message_model|><|content_text|>I look.<|end_message|>{calls}<|content_model_end_sampling|>"
    assert parsed_everywhere(INKLING, text) == ("I look.", "So <b>.", [call, ("g.h", {})], True)
    assert parsed_everywhere(INKLING, text, parallel=False)[2] == [call]
    assert parsed_everywhere(INKLING, invoked("other", "{}"))[::2] == ("", []), "a function that is not there"
    assert parsed_everywhere(INKLING, "It rains.") == ("It rains.", "", [], False)
    assert channel_format_of("{{ '<|content_invoke_tool_json|>' }}") is INKLING
