"""How model families write tool calls, reasoning and answers, as data for `OutputParser` and for grammars.

Tests: tests/server/text/test_output_parser.py, tests/server/text/test_tool_call_formats.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .argument_syntax import ArgumentSyntax, JsonSyntax
from .literal_syntax import LiteralSyntax
from .tagged_syntax import TaggedSyntax

JSON = JsonSyntax()


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How one call is written: `begin`, the arguments, `end`."""

    head: re.Pattern[str]
    """Pattern of the text before the arguments; its group `name` is the function's."""
    begin: str
    end: str = ""
    """What a grammar writes around the arguments, `{name}` for the function's name."""
    arguments: ArgumentSyntax = JSON
    wrapped: bool = False
    """The call is a JSON object with the name and the arguments."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around calls: `open`, `first`, calls with `separator` between them, `last`, `close`."""

    open: str
    close: str = ""
    first: str = ""
    separator: str = ""
    """Between two calls in one frame; "": each call has a frame of its own. A line break stands for any blanks."""
    last: str = ""
    between: str = ""
    """What a grammar writes between two calls."""

    @property
    def listed(self) -> bool:
        """True if calls may be in brackets."""
        return self.first.startswith("[")


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """A format of tool calls. A grammar writes the first of its styles and frames; the parser reads all."""

    name: str
    signs: tuple[str, ...]
    """Texts that a chat template of the family contains, all of them."""
    styles: tuple[CallStyle, ...]
    frames: tuple[Frame, ...]
    bare: str = ""
    """A call may begin an output without `open`, by this character."""
    ids: str = "call_{letters:24}"
    """Ids of calls: `{letters:N}` for N random letters and digits, `{name}` for the function's name, `{index}` for the
    number of the call in the conversation.
    """
    is_single: bool = False
    """An output has one call at most."""

    @property
    def style(self) -> CallStyle:
        """The style that a grammar writes."""
        return self.styles[0]

    @property
    def frame(self) -> Frame:
        """The frame that a grammar writes."""
        return self.frames[0]

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts of the format that may be special tokens."""
        frames = [text for each in self.frames for text in (each.open, each.first, each.separator, each.close)]
        styles = [text for each in self.styles for text in (each.begin, each.end, *each.arguments.marks)]
        return *frames, *styles


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning is the text between `open` and `close` at the beginning of an output."""

    open: str
    close: str
    most: int | None = None
    """Most tokens of it; None: unlimited."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Marks that may stand around an answer, and belong to no content."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class ChannelFormat:
    """Output as messages: a header with a channel or a recipient, `message`, the text, and one of `ends`."""

    start: str
    """Begins a message; the chat template writes the first one."""
    message: str
    """Ends a header."""
    ends: tuple[str, ...]
    calls: ToolCallFormat
    """How a message to a function is written."""
    begins: tuple[str, ...]
    """Texts that a header may begin with."""
    thinks: str
    """Header of reasoning that a grammar writes."""
    answers: str
    """Header of an answer that a grammar writes."""
    continues: str
    """What a grammar writes between two messages."""
    readers: tuple[str, ...] = ("",)
    """Recipients of content; messages to others than these and to functions are reasoning."""
    reasoning: re.Pattern[str] = re.compile("<none>")
    """Pattern of headers of reasoning that has no recipient."""
    functions: str = ""
    """Text before the names of functions in recipients."""
    framed: bool = False
    """A message to functions is calls in the frames of `calls`; otherwise it is the arguments of one call."""

    @property
    def marks(self) -> tuple[str, ...]:
        return self.start, self.message, self.thinks, *self.ends, *self.calls.marks

    def may_be_header(self, text: str) -> bool:
        """True if a text may be the beginning of a header."""
        text = text.lstrip()
        return any(text.startswith(each) or each.startswith(text) for each in (self.start, self.message, *self.begins))

    def recipient_of(self, header: str) -> str:
        """To whom a message with this header goes; "": nobody is named."""
        found = _RECIPIENT.search(header)
        return "" if found is None else found[1]


_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True, slots=True)
class OutputSyntax:
    """What to parse an output for; a part that is None is not parsed."""

    calls: ToolCallFormat | None = None
    reasoning: ReasoningFormat | None = None
    reasons_already: bool = False
    """The prompt ended within reasoning."""
    answer: AnswerFormat | None = None
    channels: ChannelFormat | None = None
    """Output is messages; then the others but `calls` are None."""

    @property
    def marks(self) -> str:
        """All marks around calls, reasoning and answers."""
        if self.channels is not None:
            return " ".join(self.channels.marks)
        pairs = [(each.open, each.close) for each in (self.reasoning, self.answer) if each is not None]
        return " ".join((*(() if self.calls is None else self.calls.marks), *(mark for pair in pairs for mark in pair)))


def wide(text: str) -> str:
    """A text with DeepSeek's characters for the bars and blanks in its marks."""
    return text.replace("|", "\uff5c").replace("_", "\u2581")


def _wrapped(name: str = "name", arguments: str = "arguments", before: str = "", after: str = "") -> CallStyle:
    """A JSON object with a name and arguments. before, after: what a grammar writes around both."""
    keys = "arguments|parameters" if arguments in ("arguments", "parameters") else re.escape(arguments)
    head = rf'"{name}"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(?:{keys})"\s*:\s*(?=\{{)'
    begin = f'{{{{{before}"{name}": "{{name}}", "{arguments}": '
    return CallStyle(re.compile(r"\s*\{\s*" + head), begin, f"{after}}}", wrapped=True)


_NAMED = _wrapped()
_XML_HEAD = re.compile(r"\s*<function=(?P<name>[^>\n]{1,64})>")
_XML = CallStyle(_XML_HEAD, "\n<function={name}>\n", "</function>\n", TaggedSyntax())
_PYTHON = LiteralSyntax()
_PYTHON_HEAD = re.compile(r"\s*(?P<name>[^\W\d][\w.\-]{0,63})\(")
_IN_PYTHON = CallStyle(_PYTHON_HEAD, "{name}(", "", _PYTHON)

_INVOKE = r'\s*<%sinvoke name="(?P<name>[^"\n]{1,64})">'


def _invoked(prefix: str, syntax: TaggedSyntax) -> CallStyle:
    """Calls that are written as `<invoke name="NAME">` and parameters between tags."""
    head = re.compile(_INVOKE % re.escape(prefix))
    return CallStyle(head, f'\n<{prefix}invoke name="{{name}}">\n', f"</{prefix}invoke>\n", syntax)


def _parameters(prefix: str, named: str = '">', named_text: str = "") -> TaggedSyntax:
    return TaggedSyntax(f'<{prefix}parameter name="', named, f"</{prefix}parameter>", "", "\n", named_text)


_DSML = wide("|DSML|")
_DSML_STYLE = _invoked(_DSML, _parameters(_DSML, '" string="false">', '" string="true">'))

_GLM = TaggedSyntax("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "", "\n")
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
_PHI = _wrapped(before='"type": "function", ')

_DEEPSEEK_NAME = wide(r"\s*(?:<|tool_call_begin|>)?%s(?P<name>[^\s<`{]{1,64})%s\s*(?=\{)")
_DEEPSEEK_FRAME = Frame(wide("<|tool_calls_begin|>"), wide("<|tool_calls_end|>"), separator=wide("<|tool_call_begin|>"))


def _gemma(quote: str) -> CallStyle:
    syntax = LiteralSyntax("}", ":", ",", quote, ("true", "false", "null"))
    return CallStyle(re.compile(r"\s*call:(?P<name>[^\s{]{1,64})\{"), "call:{name}{{", "", syntax)


HERMES_STYLE = replace(_NAMED, begin="\n" + _NAMED.begin, end=_NAMED.end + "\n")
HERMES = ToolCallFormat(  # Hermes, Qwen2.5, Qwen3, ERNIE, and all models whose template does not mention tools
    "hermes", ("<tool_call>",), (HERMES_STYLE,), (Frame("<tool_call>", "</tool_call>", between="\n"),)
)


def _listed(name: str, open: str, close: str, *signs: str, style: CallStyle = _NAMED) -> ToolCallFormat:
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
        ToolCallFormat(name, (mark,), (_DSML_STYLE,), (Frame(mark, f"</{mark[1:]}", separator="\n"),))
        for name, mark in (("deepseek_v32", f"<{_DSML}function_calls>"), ("deepseek_v4", f"<{_DSML}tool_calls>"))
    ),
    ToolCallFormat(
        "minimax_m2",
        ("<minimax:tool_call>",),
        (_invoked("", _parameters("")),),
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
    _listed("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", style=_IN_PYTHON),
    _listed("command", "<|START_ACTION|>", "<|END_ACTION|>", style=_COHERE),
    _listed("apertus", "<|tools_prefix|>", "<|tools_suffix|>", style=_KEYED),
    _listed("hunyuan", "<tool_calls>", "</tool_calls>"),
    _listed("nemotron_nano_2", "<TOOLCALL>", "</TOOLCALL>"),
    ToolCallFormat(
        "phi4_mini",
        ("<|tool|>", "<|/tool|>"),
        (_PHI, _NAMED),
        tuple(
            Frame(open, close, first="[", separator=",", last="]", between=", ")
            for open, close in (("<|tool_call|>", "<|/tool_call|>"), ("functools", ""))
        ),
    ),
    _listed("granite", "<|tool_call|>", ""),
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
        (_IN_PYTHON,),
        (Frame("<|python_start|>", "<|python_end|>", first="[", separator=",", last="]", between=", "),),
        bare="[",
    ),
    ToolCallFormat(
        "llama3",
        ("<|python_tag|>",),
        (
            _wrapped(arguments="parameters"),
            CallStyle(re.compile(r"\s*(?P<name>[^\W\d][\w\-]{0,63})\.call\("), "{name}.call(", "", _PYTHON),
        ),
        (Frame("<|python_tag|>", separator=";", between="; "),),
        bare="{",
    ),
    HERMES,
)
"""More specific ones first."""

HARMONY = ChannelFormat(
    "<|start|>",
    "<|message|>",
    ("<|end|>", "<|call|>", "<|return|>"),
    ToolCallFormat(
        "harmony",
        (),
        (CallStyle(re.compile("(?!)"), "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"),),
        (Frame(""),),
        is_single=True,
    ),
    begins=("assistant", "<|channel|>", "to=", "<|constrain|>"),
    thinks="<|channel|>analysis<|message|>",
    answers="<|channel|>final<|message|>",
    continues="<|end|><|start|>assistant",
    reasoning=re.compile(r"<\|channel\|>\s*analysis"),
    functions="functions.",
)
"""Output of gpt-oss."""

ATEM = ChannelFormat(
    "<|start|>",
    "<|message|>",
    ("<|eom|>", "<|eot|>"),
    ToolCallFormat(
        "muse_glimmer",
        (),
        (_invoked("atem:", _parameters("atem:")),),
        (Frame("<atem:function_calls>", "</atem:function_calls>", separator="\n"),),
    ),
    begins=("assistant", "to="),
    thinks=" to=self<|message|>",
    answers=" to=user<|message|>",
    continues="<|eom|><|start|>assistant",
    readers=("", "user"),
    framed=True,
)
"""Output of Muse Glimmer."""

CHANNEL_FORMATS = {"<|channel|>": HARMONY, "<atem:function_calls>": ATEM}
"""By a text that a chat template of the family contains."""

LLAMA_3_2 = '{"name": function name, "parameters": dictionary of argument name and its value}'
"""Text in templates of Llama 3.2; they have no `<|python_tag|>`."""

REASONING_FORMATS = (
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),
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


def tool_call_format_of(template: str) -> ToolCallFormat:
    """The call format of the model with this chat template."""
    if LLAMA_3_2 in template:
        return next(each for each in TOOL_CALL_FORMATS if each.name == "llama3")
    return next((each for each in TOOL_CALL_FORMATS if all(sign in template for sign in each.signs)), HERMES)


def channel_format_of(template: str) -> ChannelFormat | None:
    """The format of messages of the model with this chat template; None: its output is no messages."""
    return next((each for sign, each in CHANNEL_FORMATS.items() if sign in template), None)


def reasoning_format_of(template: str, is_token: Callable[[str], bool]) -> ReasoningFormat | None:
    """The reasoning format of the model with this chat template; None if it does not reason."""
    return next((each for each in REASONING_FORMATS if each.close in template or is_token(each.close)), None)


def answer_format_of(template: str) -> AnswerFormat | None:
    """The marks around answers of the model with this chat template; None: there are none."""
    return next((each for each in ANSWER_FORMATS if each.close in template), None)
