"""The formats of model families whose output is messages with channels or recipients.

Tests: tests/server/text/test_channel_parser.py
"""

from __future__ import annotations

import re
from dataclasses import replace

from .argument_syntax import JsonSyntax
from .call_styles import invoked, parameters, wrapped
from .output_syntax import CallStyle, ChannelFormat, Frame, ToolCallFormat

_HARMONY_ENDS = "<|end|>", "<|call|>", "<|return|>"
_HARMONY_CALL = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"

HARMONY = ChannelFormat(
    "<|start|>",
    "<|message|>",
    _HARMONY_ENDS,
    ToolCallFormat(
        "harmony",
        (),
        (CallStyle(re.compile("(?!)"), _HARMONY_CALL, arguments=JsonSyntax((*_HARMONY_ENDS, "<|start|>"))),),
        (Frame(""),),
        is_single=True,
    ),
    begins=("assistant", "<|channel|>", "to=", "<|constrain|>"),
    thinks="<|channel|>analysis<|message|>",
    answers="<|channel|>final<|message|>",
    continues="<|end|><|start|>assistant",
    announces="<|channel|>commentary<|message|>",
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
        (invoked("atem:", parameters("atem:")),),
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

INKLING = ChannelFormat(
    "<|message_model|>",
    "<|content_text|>",
    ("<|end_message|>", "<|content_model_end_sampling|>"),
    ToolCallFormat(
        "inkling",
        (),
        (
            replace(
                wrapped(arguments="args"),
                begin='<|message_model|>{name}<|content_invoke_tool_json|>{{"name":"{name}","args":',
                end="}<|end_message|>",
            ),
        ),
        (Frame("<|content_invoke_tool_json|>"),),
        bare="{",
    ),
    begins=(),
    thinks="<|message_model|><|content_thinking|>",
    answers="<|message_model|><|content_text|>",
    continues="<|end_message|>",
    announces="<|message_model|><|content_text|>",
    reasoning=re.compile(r"<\|content_thinking\|>"),
    kinds=("<|content_thinking|>", "<|content_invoke_tool_json|>"),
    recipient=re.compile(r"([^\s<>|]+)<\|content_invoke_tool_json\|>"),
    framed=True,
)
"""Output of Inkling: a message's kind is the mark behind its recipient, and a call has the function's name twice."""

CHANNEL_FORMATS = {"<|content_invoke_tool_json|>": INKLING, "<|channel|>": HARMONY, "<atem:function_calls>": ATEM}
"""By a text that a chat template of the family contains."""


def channel_format_of(template: str) -> ChannelFormat | None:
    """The format of messages of the model with this chat template; None: its output is no messages."""
    return next((each for sign, each in CHANNEL_FORMATS.items() if sign in template), None)


NAMED_CHANNELS = {each.calls.name: each for each in CHANNEL_FORMATS.values()}
