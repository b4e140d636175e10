"""Outputs as model cards and chat templates show them, for every format of calls, reasoning and answers."""

from __future__ import annotations

import json

import pytest

from chorus.server.text.call_styles import wide
from chorus.server.text.channel_formats import HARMONY
from chorus.server.text.output_parser import OutputParser
from chorus.server.text.output_parts import ParsedMessage
from chorus.server.text.output_syntax import OutputSyntax
from chorus.server.text.tool_call_formats import (
    TOOL_CALL_FORMATS,
    answer_format_of,
    is_known,
    output_syntax_of,
    reasoning_format_of,
    tool_call_format_of,
)

TOOLS = {
    "get_weather": {
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
    },
    "now": {"properties": {}},
    "brave_search": {"properties": {"query": {"type": "string"}}},
}
PARIS, NOW = ("get_weather", {"city": 'Paris, "FR"', "days": 3}), ("now", {})
JSON = json.dumps(PARIS[1])
LIST = f'[{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]'
DSML, M3 = wide("|DSML|"), "]<]minimax[>["
PYTHON = r"""get_weather(city="Paris, \"FR\"", days=3)"""

SAID = [
    # name of the format, a text of its template, an output
    (
        "glm4",
        "{{ '<tool_call>' + name }}<arg_key>{{ k }}</arg_key>",
        '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris, "FR"</arg_value>\n<arg_key>days</arg_key>\n'
        "<arg_value>3</arg_value>\n</tool_call><tool_call>now</tool_call>",
    ),
    (
        "glm4",
        "<tool_call><arg_key>",  # GLM 4.7 writes no line breaks
        '<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris, "FR"</arg_value><arg_key>days</arg_key>'
        "<arg_value>3</arg_value></tool_call>\n<tool_call>now\n</tool_call>",
    ),
    (
        "glm5",  # GLM-4.7 and GLM-5 say in their templates that there are no line breaks
        "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>",
        '<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris, "FR"</arg_value><arg_key>days</arg_key>'
        "<arg_value>3</arg_value></tool_call><tool_call>now</tool_call>",
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ),
    (
        "minimax_m2",
        "<minimax:tool_call><invoke name=",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris, "FR"</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ),
    (
        "minimax_m3",
        "{%- set ns_token = ']<]minimax[>[' -%}",
        f'{M3}<tool_call>\n{M3}<invoke name="get_weather">{M3}<city>Paris, "FR"{M3}</city>{M3}<days>3{M3}</days>'
        f'{M3}</invoke>\n{M3}<invoke name="now">{M3}</invoke>\n{M3}</tool_call>',
    ),
    (
        "dots",
        "<dots_function_call>",
        '<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">Paris, "FR"</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</dots_function_call>',
    ),
    (
        "dots",
        "<dots_function_call>",  # an object in place of tags
        f'<dots_function_call>{{"name": "get_weather", "arguments": {JSON}}}</dots_function_call>'
        '<dots_function_call>{"name": "now", "arguments": {}}</dots_function_call>',
    ),
    (
        "longcat",
        "<longcat_tool_call>",
        f'<longcat_tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</longcat_tool_call>\n'
        '<longcat_tool_call>\n{"name": "now", "arguments": {}}\n</longcat_tool_call>\n',
    ),
    (
        "hunyuan_3",
        "{%- set HYTK = ':opensource' %}{{ '<tool_calls{}><tool_sep{}>'.format(HYTK) }}",
        "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
        '<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Paris, "FR"</arg_value:opensource>\n'
        "<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n"
        "</tool_call:opensource>\n<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
    ),
    (
        "hunyuan_4",
        "<tool_calls:6124c78e><arg_key:6124c78e>",
        "<tool_calls:6124c78e><tool_call:6124c78e>get_weather<arg_key:6124c78e>city</arg_key:6124c78e>"
        '<arg_value:6124c78e>Paris, "FR"</arg_value:6124c78e><arg_key:6124c78e>days</arg_key:6124c78e>'
        "<arg_value:6124c78e>3</arg_value:6124c78e></tool_call:6124c78e><tool_call:6124c78e>now</tool_call:6124c78e>"
        "</tool_calls:6124c78e>",
    ),
    (
        "hunyuan_4",
        "<tool_calls><tool_call><arg_key>",  # marks without a suffix
        '<tool_calls><tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris, "FR"</arg_value>'
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call></tool_calls>",
    ),
    (
        "deepseek_v4",
        "{%- set tools = '<' + dsml_token + 'tool_calls>' -%}",
        f'<{DSML}tool_calls>\n<{DSML}invoke name="get_weather">\n<{DSML}parameter name="city" string="true">'
        f'Paris, "FR"</{DSML}parameter>\n<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n'
        f'</{DSML}invoke>\n<{DSML}invoke name="now">\n</{DSML}invoke>\n</{DSML}tool_calls>',
    ),
    (
        "deepseek_v32",
        f"<{DSML}function_calls>",
        f'<{DSML}function_calls>\n<{DSML}invoke name="get_weather">\n<{DSML}parameter name="city" string="true">'
        f'Paris, "FR"</{DSML}parameter>\n<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n'
        f'</{DSML}invoke>\n<{DSML}invoke name="now">\n</{DSML}invoke>\n</{DSML}function_calls>',
    ),
    ("lfm2", "<|tool_call_start|>", f"<|tool_call_start|>[{PYTHON}, now()]<|tool_call_end|>"),
    ("lfm2", "<|tool_list_start|>[{{ tools }}]", f"<|tool_call_start|>[{PYTHON}, now()]<|tool_call_end|>"),
    ("llama_pythonic", "[func_name1(params_name1=params_value1", f"[{PYTHON}, now()]"),
    ("olmo3", "<function_calls>", f"<function_calls>\n{PYTHON}\nnow()\n</function_calls>"),
    (
        "gemma4",
        "<|tool_call>call:{{ name }}<tool_call|>",
        '<|tool_call>call:get_weather{city:<|"|>Paris, "FR"<|"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|>',
    ),
    (
        "functiongemma",
        "<start_function_call>",
        '<start_function_call>call:get_weather{city:<escape>Paris, "FR"<escape>,days:3}<end_function_call>'
        "<start_function_call>call:now{}<end_function_call>",
    ),
    (
        "command",
        "<|START_ACTION|>",
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {JSON}}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
    ),
    ("apertus", "<|tools_prefix|>", f'<|tools_prefix|>[{{"get_weather": {JSON}}}, {{"now": {{}}}}]<|tools_suffix|>'),
    (
        "hunyuan",
        "<tool_calls>",
        f"<tool_calls>{LIST}</tool_calls>",
    ),
    (
        "nemotron_nano_2",
        "<TOOLCALL>",
        f"<TOOLCALL>{LIST}</TOOLCALL>",
    ),
    (
        "granite",
        "<|tool_call|>",
        f"<|tool_call|>{LIST}",
    ),
    (
        "granite",
        "<|tool_call|>",  # Granite 3.1
        f"<tool_call>{LIST}",
    ),
    (
        "llama_pythonic",
        "[func_name1(params_name1=params_value1",
        f'<|python_start|>[{{"name": "get_weather", "parameters": {JSON}}}, '
        '{"name": "now", "parameters": {}}]<|python_end|>',
    ),
    (
        "llama3",
        "<|python_tag|> <|python_start|>",  # Llama 4
        f'<|python_start|>{{"name": "get_weather", "parameters": {JSON}}}; '
        '{"name": "now", "parameters": {}}<|python_end|>',
    ),
    (
        "phi4_mini",
        "<|tool|>{{ tools }}<|/tool|>",
        f'<|tool_call|>[{{"type": "function", "function": {{"name": "get_weather", "arguments": {JSON}}}}}, '
        '{"type": "function", "function": {"name": "now", "arguments": {}}}]<|/tool_call|>',
    ),
    (
        "phi4_mini",
        "<|tool|>{{ tools }}<|/tool|>",
        f"functools{LIST}",
    ),
    (
        "hermes",
        "<tool_call>",  # ERNIE
        f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
    ),
]


def parsed(syntax, text, pieces):
    reader, said = OutputParser(syntax, TOOLS), ParsedMessage()
    for piece in pieces:
        said.add(reader.read(piece))
    said.add(reader.read("", final=True))
    assert reader.calls or not said.calls, "the last call is complete"
    return said.content, said.reasoning, [(call.name, json.loads(call.arguments)) for call in said.calls]


def parsed_everywhere(syntax, text):
    """What is read of a text, whatever pieces it comes in."""
    whole = parsed(syntax, text, [text])
    assert parsed(syntax, text, list(text)) == whole
    for at in range(1, len(text)):
        assert parsed(syntax, text, [text[:at], text[at:]]) == whole, (text[:at], text[at:])
    return whole


@pytest.mark.parametrize(("name", "template", "text"), SAID)
def test_a_format_is_recognised_by_its_template_and_read(name, template, text):
    form = tool_call_format_of(template)
    assert form.name == name
    assert parsed_everywhere(OutputSyntax(form), text) == ("", "", [PARIS, NOW])
    if not form.bare:
        assert parsed_everywhere(OutputSyntax(form), f"Let me see.\n{text}") == ("Let me see.", "", [PARIS, NOW])


def test_every_format_has_an_output_here_or_in_the_tests_of_the_parser():
    older = {"deepseek_v3", "deepseek_v31", "mistral", "mistral_list", "qwen3_coder", "seed_oss"}
    assert {form.name for form in TOOL_CALL_FORMATS} == older | {name for name, *_ in SAID}


@pytest.mark.parametrize("name", ["hunyuan_3", "hunyuan_4", "kimi_k2"])
def test_a_further_call_that_is_cut_before_its_name_ends_is_no_content(name):
    """At the limit of tokens; streams and whole answers agree."""
    template, text = next((template, text) for form, template, text in SAID if form == name)
    form = tool_call_format_of(template)
    first = text.index(form.frame.separator, text.index("get_weather"))
    for end in (first + len(form.frame.separator), first + len(form.frame.separator) + 2):
        assert parsed_everywhere(OutputSyntax(form), text[:end]) == ("", "", [PARIS])


def test_llamas_built_in_tools_are_functions_with_that_name():
    form = tool_call_format_of("<|python_tag|>")
    text = '<|python_tag|>brave_search.call(query="rain in Paris")'
    assert parsed_everywhere(OutputSyntax(form), text) == ("", "", [("brave_search", {"query": "rain in Paris"})])
    code = "<|python_tag|>print(1)"
    assert parsed_everywhere(OutputSyntax(form), code) == (code, "", []), "there is no function for code"


@pytest.mark.parametrize(
    ("template", "reasoning", "answer"),
    [
        ("<|channel>thought<channel|>", "<|channel>thought\nSo.\n<channel|>", "Yes."),
        ("<|START_THINKING|><|END_THINKING|>", "<|START_THINKING|>So.<|END_THINKING|>", "Yes."),
        (
            "<|END_THINKING|><|END_RESPONSE|>",
            "<|START_THINKING|>So.<|END_THINKING|>",
            "<|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        ),
        ("<|inner_prefix|><|inner_suffix|>", "<|inner_prefix|>So.<|inner_suffix|>", "Yes."),
        ("<mm:think></mm:think>", "<mm:think>So.</mm:think>", "Yes."),
        ("{% set HYTK = ':a1' %}<tool_sep{}>", "<think:a1>So.</think:a1>", "Yes."),
        ("<think:6124c78e>", "<think:6124c78e>So.</think:6124c78e>", "Yes."),
        ("<think></think><response></response>", "<think>So.</think>", "<response>\nYes.\n</response>"),
        ("<think></think><answer></answer>", "<think>\nSo.\n</think>\n", "<answer>\nYes.\n</answer>"),
    ],
)
def test_thoughts_and_the_marks_around_an_answer_are_no_content(template, reasoning, answer):
    syntax = OutputSyntax(None, reasoning_format_of(template, lambda _: False), answer=answer_format_of(template))
    assert parsed_everywhere(syntax, reasoning + answer) == ("Yes.", "So.", [])
    assert parsed_everywhere(syntax, answer) == ("Yes.", "", [])


@pytest.mark.parametrize("close", ["</think>", "\n</think>\n", ""])
def test_a_call_at_the_end_of_reasoning_is_a_call(close):
    """Models with an adapter call without closing their reasoning."""
    thinks = reasoning_format_of("</think>", lambda _: False)
    form = tool_call_format_of("<tool_call>")
    text = f'<think>\nI need it.\n<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>{close}'
    assert parsed_everywhere(OutputSyntax(form, thinks), text) == ("", "I need it.", [PARIS])


def test_a_call_that_is_thought_about_is_reasoning():
    thinks = reasoning_format_of("</think>", lambda _: False)
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>'
    for thought in (f"I could write {call} but won't.", "A <tool_call> is a mark.", f"No {call} and <tool_call>"):
        text = f"<think>{thought}</think>It rains."
        assert parsed_everywhere(OutputSyntax(tool_call_format_of(""), thinks), text) == ("It rains.", thought, [])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("city='It\\'s', days=-1_000", {"city": "It's", "days": -1000}),
        ("'Lyon', 2", {"city": "Lyon", "days": 2}),
        ('"""a\n"b" """, days=None', {"city": 'a\n"b" ', "days": None}),
        (
            'where={"at": [1, 2.5, (3,), True], \'b\': {"c": "x, ) ]"}}, days=0x10',
            {"where": {"at": [1, 2.5, [3], True], "b": {"c": "x, ) ]"}}, "days": 16},
        ),
        ('city="\\u00e9\\x41\\101\\n\\q\\\\"', {"city": "éAA\n\\q\\"}),
        ("city=date(2020, 1, 1), days=1 + 2", {"city": "date(2020, 1, 1)", "days": "1 + 2"}),
        ('city="\\ud83d\\ude00"', {"city": "😀"}),
        ("city=true, days=null", {"city": True, "days": None}),
        ("city=Paris", {"city": "Paris"}),
        ("city=It's fine, days='a'", {"city": "It's fine", "days": "a"}),
        ("city=f(b'x, y') + g(\"z)\"), days=1", {"city": "f(b'x, y') + g(\"z)\")", "days": 1}),
        ("city=''", {"city": ""}),
        ("city='It's', days=1", {"city": "It's", "days": 1}),  # LFM2.5 escapes no quotes
        ("city='It's'", {"city": "It's"}),
        ("city='the 'old' town' , days=1", {"city": "the 'old' town", "days": 1}),
        ('city="a "b" c"', {"city": 'a "b" c'}),
        ("where={'it's': ['o'c', 'd']}", {"where": {"it's": ["o'c", "d"]}}),
        ("city='a'" + " " * 99 + ", days=1", {"city": "a", "days": 1}),
        (" \n city = [ ] , \n", {"city": []}),
        ("", {}),
    ],
)
def test_literals_of_python_become_json(text, wanted):
    form = tool_call_format_of("<|tool_call_start|>")
    call = f"<|tool_call_start|>[get_weather({text})]<|tool_call_end|>"
    assert parsed_everywhere(OutputSyntax(form), call) == ("", "", [("get_weather", wanted)])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('city:<|"|>a}, {"b"<|"|>', {"city": 'a}, {"b"'}),
        (
            'where:{at:[<|"|>x<|"|>,-2,1e3,true],b:{<|"|>c<|"|>:null}},days:0.5',
            {"where": {"at": ["x", -2, 1e3, True], "b": {"c": None}}, "days": 0.5},
        ),
        ("city:Paris,days:3", {"city": "Paris", "days": 3}),
        ("city:[],where:{}", {"city": [], "where": {}}),
    ],
)
def test_gemmas_literals_become_json(text, wanted):
    form = tool_call_format_of("<|tool_call>call:<tool_call|>")
    call = f"<|tool_call>call:get_weather{{{text}}}<tool_call|>"
    assert parsed_everywhere(OutputSyntax(form), call) == ("", "", [("get_weather", wanted)])


def test_ids_are_as_the_family_writes_them():
    form = tool_call_format_of("<|tool_calls_section_begin|>")
    text = next(text for name, _, text in SAID if name == "kimi_k2")
    reader, said = OutputParser(OutputSyntax(form), TOOLS, first_call=2), ParsedMessage()
    said.add(reader.read(text, final=True))
    assert [call.id for call in said.calls] == ["functions.get_weather:2", "functions.now:3"]


def test_a_text_comes_as_it_is_said():
    form = tool_call_format_of("<|tool_call_start|>")
    reader = OutputParser(OutputSyntax(form), TOOLS)
    given = [
        "".join(part.text for part in reader.read(piece)) for piece in ("<|tool_call_start|>[now(x='ab", "cd\\", "n")
    ]
    assert given == ['now{"x": "ab', "cd", "\\n"]


def test_a_setting_names_the_format_and_an_unknown_one_is_told():
    syntax = output_syntax_of("<tool_call>", lambda _: False, name="lfm2")
    assert syntax.calls is not None and syntax.calls.name == "lfm2"
    assert output_syntax_of("", lambda _: False, name="harmony").channels is HARMONY
    assert output_syntax_of("<|channel|>", lambda _: False, name="hermes").channels is None
    for _, template, _ in SAID:
        assert is_known(f"{template} tools"), template
    for template in ("", "{{ messages }}", "tools <|channel|>", "tools [TOOL_CALLS]"):
        assert is_known(template), template
    assert not is_known("{{ tools | tojson }} <my_call>")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"properties": [1]}, "properties.a.properties: must be an object"),
        ({"items": {"required": 5}}, "properties.a.items.required: must be an array of names"),
    ],
)
def test_a_schema_that_is_none_is_told_before_its_grammar_is_written(wrong, said):
    arguments = tool_call_format_of("<|tool_call_start|>").style.arguments
    assert arguments.unwritable({"properties": {"a": wrong}}) == said
    assert arguments.unwritable({"properties": {"required": {"type": "string"}, "properties": True}}) is None
