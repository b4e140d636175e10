"""Calls that TRL's copies of the families' chat templates write are read back, and written again as they were."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from chorus.server.text.channel_parser import ChannelParser
from chorus.server.text.output_parser import OutputParser
from chorus.server.text.output_parts import ParsedMessage
from chorus.server.text.tool_call_formats import output_syntax_of

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.integration

TEMPLATES = {path.stem: path for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))}
USER = {"role": "user", "content": "Weather?"}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "more": {"type": "object"},
        "list": {"type": "array"},
        "flag": {"type": "boolean"},
        "none": {"type": ["string", "null"]},
        "x": {"type": "number"},
    },
}
SCHEMAS = {"get_weather": WEATHER, "now": {"type": "object", "properties": {}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]

TEXTS = (
    *("5", "true", "", "null", "None", " a ", "x\n", "\ny", '{"a": 1}', "[1, 2]", 'It\'s "x"', 'a", "b', '"', "'a'"),
    *("é\u2028😀", "<b> & </b>", "a\tb", "a, b=2)", "x: y", "a}", "\\n \\", "a','b", "'"),
)
UNTOLD = ("\\n \\", "a','b", "'")
"""Texts that LFM2.5's first templates, which escape nothing, write as others are written."""
PARIS = {"city": "Paris", "days": 3}
EVERY_TYPE = {
    "city": "Pa\"r'is\n\\é😀",
    "days": 10**15,
    "more": {"a": [1, "x, y"], "b": None, "c": {}},
    "list": ["a", 2.5, True, []],
    "flag": False,
    "none": None,
    "x": -0.5,
}
HISTORIES = [
    # arguments of the first call, content before it, reasoning before that
    (PARIS, "", None),
    ({}, "", None),
    (EVERY_TYPE, "", None),
    (PARIS, "Let me see.", None),
    (PARIS, "", "So I look."),
    (EVERY_TYPE, "Let me see.", "So I look."),
    ({"list": [*TEXTS, {"k": "It's"}], "more": {f"k{i}": text for i, text in enumerate(TEXTS)}}, "", None),
    *(({"city": text, "days": 1}, "", None) for text in TEXTS),
]
ENDS = (
    *("<|im_end|>", "<turn|>", "<|tool_response>", "<|eot_id|>", "<|eom_id|>", "</s>", "<|eot|>", "<|observation|>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
"""Tokens at which models stop, which are no text of their answers."""


def num_shared(one, other):
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def rendered(template, messages, *, begins):
    """The text of a conversation; None if the template takes no such."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    try:
        texts, _ = render_jinja_template(
            [messages], tools=TOOLS, chat_template=template, add_generation_prompt=begins, **special
        )
    except (jinja2.TemplateError, TypeError):
        return None
    return texts[0]


def said_by(message, *, as_text, content):
    """The assistant's message with these parts, as a template takes it."""
    parts = [
        {
            "type": "function",
            "id": f"abcdefgh{index}",
            "function": {"name": name, "arguments": arguments if as_text else json.loads(arguments)},
        }
        for index, (name, arguments) in enumerate(message["calls"])
    ]
    made = {"role": "assistant", "content": message["content"] or content, "tool_calls": parts}
    reasoning = {"reasoning_content": message["reasoning"], "thinking": message["reasoning"]}
    return {**made, **(reasoning if message["reasoning"] else {})}


def parsed(syntax, pieces):
    kind = OutputParser if syntax.channels is None else ChannelParser
    reader, said = kind(syntax.channels or syntax, SCHEMAS), ParsedMessage()
    for piece in pieces:
        said.add(reader.read(piece))
    said.add(reader.read("", final=True))
    calls = [(call.name, call.arguments) for call in said.calls]
    return {"content": said.content, "reasoning": said.reasoning, "calls": calls}


def written(template, message):
    """The text of a conversation with this message, that of its prompt, and how the template takes the message: with
    calls in it, as many and as they can be.
    """
    for count, as_text, content in itertools.product((2, 1), (False, True), ("", None)):
        how = {"as_text": as_text, "content": content}
        one = {**message, "calls": message["calls"][:count]}
        whole = rendered(template, [USER, said_by(one, **how)], begins=False)
        prompt = rendered(template, [USER], begins=True)
        if whole is not None and prompt is not None and "get_weather" in whole[num_shared(whole, prompt) :]:
            return whole, prompt, how
    return None


def without_end(text):
    text = text.rstrip()
    while (end := next((each for each in ENDS if text.endswith(each)), None)) is not None:
        text = text.removesuffix(end).rstrip()
    return text


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_read_back_and_written_again(name):
    template = TEMPLATES[name].read_text(encoding="utf-8")
    for arguments, content, reasoning in HISTORIES:
        if name in ("lfm2_2_5", "lfm2_2_5_v2") and arguments.get("city") in UNTOLD:
            continue
        calls = [("get_weather", json.dumps(arguments, ensure_ascii=False)), ("now", "{}")]
        found = written(template, {"content": content, "reasoning": reasoning, "calls": calls})
        if found is None:
            continue  # it writes no calls, or none beside a content and thoughts
        whole, prompt, how = found
        at = num_shared(whole, prompt)
        at -= whole[:at].endswith("<")  # both go on by a mark
        syntax = output_syntax_of(template, lambda _: False)
        if syntax.reasoning is not None and whole[:at].rstrip().endswith(syntax.reasoning.open.strip()):
            syntax = replace(syntax, reasons_already=True)
        text = without_end(whole[at:])
        message = parsed(syntax, [text])
        assert parsed(syntax, text) == message, "letter by letter"
        (first, given), *more = message["calls"]
        assert (first, json.loads(given)) == ("get_weather", arguments), text
        assert more in ([], [calls[1]])
        assert rendered(template, [USER, said_by(message, **how)], begins=False) == whole, message


def test_most_templates_write_calls():
    """So that the test above is not of nothing."""
    message = {"content": "", "reasoning": None, "calls": [("get_weather", json.dumps(PARIS))]}
    having = {name for name, path in TEMPLATES.items() if written(path.read_text(encoding="utf-8"), message)}
    assert {"gemma4", "glm4moe", "gptoss", "lfm2_2_5", "qwen3", "qwen3_5_think", "muse_glimmer"} <= having
