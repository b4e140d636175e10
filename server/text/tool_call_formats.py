"""The formats of model families, as data for parsers and for grammars; the more specific ones come first.

Tests: tests/server/text/test_output_parser.py, tests/server/text/test_tool_call_formats.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .call_styles import NAMED, invoked, parameters, wide, wrapped
from .channel_formats import CHANNEL_FORMATS, NAMED_CHANNELS, channel_format_of
from .hunyuan_formats import HUNYUAN_3, HUNYUAN_4, suffix_of
from .literal_syntax import LiteralSyntax
from .nested_syntax import NestedSyntax
from .output_syntax import AnswerFormat, CallStyle, Frame, OutputSyntax, ReasoningFormat, ToolCallFormat
from .tagged_syntax import TaggedSyntax

_XML_HEAD = re.compile(r"\s*<function=(?P<name>[^>\n]{1,64})>")
_XML = CallStyle(_XML_HEAD, "\n<function={name}>\n", "</function>\n", TaggedSyntax())
_PYTHON = LiteralSyntax()
_PYTHON_HEAD = re.compile(r"\s*(?P<name>[^\W\d][\w.\-]{0,63})\(")
_IN_PYTHON = CallStyle(_PYTHON_HEAD, "{name}(", "", _PYTHON)

_DSML = wide("|DSML|")
_DSML_STYLE = invoked(_DSML, parameters(_DSML, '" string="false">', '" string="true">'))

_MINIMAX = "]<]minimax[>["
_INVOKE_M3 = r'\s*%s<invoke name="(?P<name>[^"\n]{1,64})">'

_GLM = TaggedSyntax("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "", "\n")
_GLM_INLINE = TaggedSyntax("<arg_key>", "</arg_key><arg_value>", "</arg_value>", "", "")
_GLM_HEAD = re.compile(r"\s*(?P<name>[^\s<{]{1,64})\s*(?=<arg_key>|</tool_call>)")

_KIMI_HEAD = re.compile(
    r"\s*(?:<\|tool_call_begin\|>)?\s*(?:functions\.)?(?P<name>[^\s<:{]{1,64})(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)

_COHERE = CallStyle(
    re.compile(
        r'\s*\{\s*"tool_call_id"\s*:\s*"[^"\\]*"\s*,\s*"tool_name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"parameters"\s*:\s*(?=\{)'
    ),
    '{{"tool_call_id": "0", "tool_name": "{name}", "parameters": ',
    "}",
    wrapped=True,
)
_KEYED = CallStyle(re.compile(r'\s*\{\s*"(?P<name>[^"\\]*)"\s*:\s*(?=\{)'), '{{"{name}": ', "}", wrapped=True)
_PHI = wrapped(before='"type": "function", ')

_DEEPSEEK_NAME = wide(r"\s*(?:<|tool_call_begin|>)?%s(?P<name>[^\s<`{]{1,64})%s\s*(?=\{)")
_DEEPSEEK_FRAME = Frame(wide("<|tool_calls_begin|>"), wide("<|tool_calls_end|>"), separator=wide("<|tool_call_begin|>"))


def _gemma(quote: str) -> CallStyle:
    syntax = LiteralSyntax("}", ":", ",", quote, ("true", "false", "null"))
    return CallStyle(re.compile(r"\s*call:(?P<name>[^\s{]{1,64})\{"), "call:{name}{{", "", syntax)


HERMES_STYLE = replace(NAMED, begin="\n" + NAMED.begin, end=NAMED.end + "\n")
HERMES = ToolCallFormat(  # Hermes, Qwen2.5, Qwen3, ERNIE, and all models whose template does not mention tools
    "hermes", ("<tool_call>",), (HERMES_STYLE,), (Frame("<tool_call>", "</tool_call>", between="\n"),)
)


def _listed(name: str, open: str, close: str, *signs: str, style: CallStyle = NAMED) -> ToolCallFormat:
    """Calls in brackets between two marks."""
    frame = Frame(open, close, first="[", separator=",", last="]", between=", ")
    return ToolCallFormat(name, signs or (open,), (style,), (frame,))


TOOL_CALL_FORMATS = (
    ToolCallFormat(
        "deepseek_v3",
        (wide("<|tool_calls_begin|>"), "```json"),
        (
            CallStyle(
                re.compile(_DEEPSEEK_NAME % (wide("function<|tool_sep|>"), r"\s*```json")),
                wide("<|tool_call_begin|>function<|tool_sep|>{name}\n```json\n"),
                wide("\n```<|tool_call_end|>"),
            ),
        ),
        (replace(_DEEPSEEK_FRAME, between="\n"),),
    ),
    ToolCallFormat(
        "deepseek_v31",
        (wide("<|tool_calls_begin|>"),),
        (
            CallStyle(
                re.compile(_DEEPSEEK_NAME % ("", wide("<|tool_sep|>"))),
                wide("<|tool_call_begin|>{name}<|tool_sep|>"),
                wide("<|tool_call_end|>"),
            ),
        ),
        (_DEEPSEEK_FRAME,),
    ),
    *(
        ToolCallFormat(
            name,
            (f"<{_DSML}{block}>",),
            (_DSML_STYLE,),
            (Frame(f"<{_DSML}{block}>", f"</{_DSML}{block}>", separator="\n"),),
            other_signs=(f"dsml_token + '{block}>",),  # which the template puts together
        )
        for name, block in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    ),
    ToolCallFormat(
        "minimax_m3",
        (_MINIMAX,),
        (
            CallStyle(
                re.compile(_INVOKE_M3 % re.escape(_MINIMAX)),
                f'{_MINIMAX}<invoke name="{{name}}">',
                f"{_MINIMAX}</invoke>\n",
                NestedSyntax(_MINIMAX),
            ),
        ),
        (Frame(f"{_MINIMAX}<tool_call>", f"{_MINIMAX}</tool_call>", first="\n", separator="\n"),),
    ),
    ToolCallFormat(
        "dots",
        ("<dots_function_call>",),
        (invoked("", parameters("")), NAMED),
        (Frame("<dots_function_call>", "</dots_function_call>", separator="\n"),),
    ),
    ToolCallFormat(
        "longcat",
        ("<longcat_tool_call>",),
        (HERMES_STYLE,),
        (Frame("<longcat_tool_call>", "</longcat_tool_call>", between="\n"),),
    ),
    ToolCallFormat(
        "minimax_m2",
        ("<minimax:tool_call>",),
        (invoked("", parameters("")),),
        (Frame("<minimax:tool_call>", "</minimax:tool_call>", separator="\n"),),
    ),
    ToolCallFormat(
        "seed_oss",
        ("<seed:tool_call>",),
        (_XML,),
        (Frame("<seed:tool_call>", "</seed:tool_call>", between="\n"),),
    ),
    ToolCallFormat(
        "qwen3_coder",
        ("<tool_call>", "<function="),
        (_XML,),
        (Frame("<tool_call>", "</tool_call>", between="\n"),),
    ),
    HUNYUAN_3,
    HUNYUAN_4,
    ToolCallFormat(
        "glm5",
        ("<tool_call>{function-name}<arg_key>",),
        (CallStyle(_GLM_HEAD, "{name}", "", _GLM_INLINE),),
        (Frame("<tool_call>", "</tool_call>"),),
    ),
    ToolCallFormat(
        "glm4",
        ("<tool_call>", "<arg_key>"),
        (CallStyle(_GLM_HEAD, "{name}\n", "", _GLM),),
        (Frame("<tool_call>", "</tool_call>", between="\n"),),
    ),
    ToolCallFormat(
        "kimi_k2",
        ("<|tool_calls_section_begin|>",),
        (
            CallStyle(
                _KIMI_HEAD,
                "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
            ),
        ),
        (Frame("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", separator="<|tool_call_begin|>"),),
        ids="functions.{name}:{index}",
    ),
    ToolCallFormat(
        "gemma4", ("<|tool_call>", "<tool_call|>"), (_gemma('<|"|>'),), (Frame("<|tool_call>", "<tool_call|>"),)
    ),
    ToolCallFormat(
        "functiongemma",
        ("<start_function_call>",),
        (_gemma("<escape>"),),
        (Frame("<start_function_call>", "<end_function_call>"),),
    ),
    replace(
        _listed("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", style=_IN_PYTHON),
        other_signs=("<|tool_list_start|>",),  # LFM2's first template writes no calls
    ),
    _listed("command", "<|START_ACTION|>", "<|END_ACTION|>", style=_COHERE),
    _listed("apertus", "<|tools_prefix|>", "<|tools_suffix|>", style=_KEYED),
    _listed("hunyuan", "<tool_calls>", "</tool_calls>"),
    _listed("nemotron_nano_2", "<TOOLCALL>", "</TOOLCALL>"),
    ToolCallFormat(
        "phi4_mini",
        ("<|tool|>", "<|/tool|>"),
        (_PHI, NAMED),
        tuple(
            Frame(open, close, first="[", separator=",", last="]", between=", ")
            for open, close in (("<|tool_call|>", "<|/tool_call|>"), ("functools", ""))
        ),
    ),
    ToolCallFormat(
        "granite",
        ("<|tool_call|>",),
        (NAMED,),
        tuple(  # Granite 3.1 writes the second, though its template has the first
            Frame(open, first="[", separator=",", last="]", between=", ") for open in ("<|tool_call|>", "<tool_call>")
        ),
    ),
    ToolCallFormat(
        "olmo3",
        ("<function_calls>",),
        (replace(_IN_PYTHON, begin="\n{name}("),),
        (Frame("<function_calls>", "</function_calls>", separator="\n", last="\n"),),
    ),
    ToolCallFormat(
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        (CallStyle(re.compile(r"\s*(?P<name>[^\[\]{}\s]{1,64})\[ARGS\]\s*(?=\{)"), "{name}[ARGS]"),),
        (Frame("[TOOL_CALLS]"),),
        ids="{letters:9}",  # their templates accept no other
    ),
    replace(_listed("mistral_list", "[TOOL_CALLS]", ""), ids="{letters:9}"),
    ToolCallFormat(
        "llama_pythonic",
        ("[func_name1(params_name1=params_value1",),
        (_IN_PYTHON, wrapped(arguments="parameters")),
        (Frame("<|python_start|>", "<|python_end|>", first="[", separator=",", last="]", between=", "),),
        bare="[",
    ),
    ToolCallFormat(
        "llama3",
        ("<|python_tag|>",),
        (
            wrapped(arguments="parameters"),
            CallStyle(re.compile(r"\s*(?P<name>[^\W\d][\w\-]{0,63})\.call\("), "{name}.call(", "", _PYTHON),
        ),
        (
            Frame("<|python_tag|>", separator=";", between="; "),
            Frame("<|python_start|>", "<|python_end|>", separator=";"),  # Llama 4's
        ),
        bare="{",
    ),
    HERMES,
)
"""More specific ones first."""

LLAMA_3_2 = '{"name": function name, "parameters": dictionary of argument name and its value}'
"""Text in templates of Llama 3.2; they have no `<|python_tag|>`."""

REASONING_FORMATS = (
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<mm:think>", "</mm:think>"),
    ReasoningFormat("<|channel>thought\n", "<channel|>"),
    ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningFormat("<think>", "</think>"),
)

ANSWER_FORMATS = (
    AnswerFormat("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    AnswerFormat("<response>", "</response>"),
    AnswerFormat("<answer>", "</answer>"),
)


REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names of a message's reasoning, in APIs and in chat templates."""

_CALL = {"content": "json", "transform": {"type": "function", "function": "{content}"}}

_LITERAL = re.compile(r"(?:\\s\*)?((?:[^\\.^$*+?{}\[\]|()]|\\\W)+)")
"""A regular expression that matches one text, optionally after blanks."""


def declared(template: Any) -> OutputSyntax:
    """The formats in a checkpoint's own `response_template` (transformers'): reasoning between marks, and calls as JSON
    of a name and arguments between marks. The chat template determines the rest.
    """
    fields = template.get("fields") if isinstance(template, dict) else None
    known = {name: field for name, field in (fields or {}).items() if isinstance(field, dict)}
    marks = {name: pair for name, field in known.items() if all(pair := (_mark(field, "open"), _mark(field, "close")))}
    reasoning = next((ReasoningFormat(*marks[name]) for name in REASONING_FIELDS if name in marks), None)
    calls, how = marks.get("tool_calls"), known.get("tool_calls", {})
    if calls is None or not _CALL.items() <= how.items() or how.get("content_args"):
        return OutputSyntax(None, reasoning)
    frame = replace(HERMES.frame, open=calls[0], close=calls[1])
    return OutputSyntax(replace(HERMES, name="declared", frames=(frame,)), reasoning)


def _mark(field: Mapping[str, Any], name: str) -> str:
    text, pattern = field.get(name), field.get(f"{name}_pattern")
    if isinstance(text, str):
        return text
    found = _LITERAL.fullmatch(pattern) if isinstance(pattern, str) else None
    return "" if found is None else re.sub(r"\\(.)", r"\1", found[1])


def output_syntax_of(
    template: str, is_token: Callable[[str], bool], own: OutputSyntax | None = None, name: str | None = None
) -> OutputSyntax:
    """The syntax of the output of a model with this chat template. own: what its checkpoint declares. name: of the
    format of calls, in place of what the template tells.
    """
    channels = channel_format_of(template) if name is None else NAMED_CHANNELS.get(name)
    if channels is not None:
        return OutputSyntax(channels.calls, channels=channels)
    own = own or OutputSyntax()
    calls = own.calls or tool_call_format_of(template) if name is None else NAMED_FORMATS[name].fitted(template)
    reasoning = own.reasoning or reasoning_format_of(template, is_token)
    return OutputSyntax(calls, reasoning, answer=answer_format_of(template))


def is_known(template: str) -> bool:
    """True unless a chat template writes tools in a way that is none of the formats."""
    signs = [LLAMA_3_2, *CHANNEL_FORMATS]
    has_sign = any(sign in template for sign in signs)
    has_signs = any(each.is_of(template) for each in TOOL_CALL_FORMATS)
    return has_sign or has_signs or "tools" not in template


def tool_call_format_of(template: str) -> ToolCallFormat:
    """The call format of the model with this chat template."""
    if LLAMA_3_2 in template:
        return next(each for each in TOOL_CALL_FORMATS if each.name == "llama3")
    return next((each for each in TOOL_CALL_FORMATS if each.is_of(template)), HERMES).fitted(template)


def reasoning_format_of(template: str, is_token: Callable[[str], bool]) -> ReasoningFormat | None:
    """The reasoning format of the model with this chat template; None if it does not reason."""
    if suffix := suffix_of(template):
        return ReasoningFormat(f"<think{suffix}>", f"</think{suffix}>")
    return next((each for each in REASONING_FORMATS if each.close in template or is_token(each.close)), None)


def answer_format_of(template: str) -> AnswerFormat | None:
    """The marks around answers of the model with this chat template; None: there are none."""
    return next((each for each in ANSWER_FORMATS if each.close in template), None)


NAMED_FORMATS = {each.name: each for each in TOOL_CALL_FORMATS}
FORMAT_NAMES = (*NAMED_FORMATS, *NAMED_CHANNELS)
"""Names of all formats of calls."""
