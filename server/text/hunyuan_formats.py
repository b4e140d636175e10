"""The formats of Hunyuan 3 and 4, whose marks have another suffix in each checkpoint.

Tests: tests/server/text/test_tool_call_formats.py
"""

from __future__ import annotations

import re

from .output_syntax import CallStyle, Frame, ToolCallFormat
from .tagged_syntax import TaggedSyntax

_SUFFIX = re.compile(r"set HYTK = '(:[^'\s>]{1,32})'|</?(?:think|tool_calls?|arg_key)(:[^\s<>{}]{1,32})>")


def suffix_of(template: str) -> str:
    """What stands at the end of marks' names in a chat template, with its colon; "": nothing."""
    found = _SUFFIX.search(template)
    return "" if found is None else found[1] or found[2]


def _format(name: str, suffix: str, separator: str, *signs: str, line: str = "") -> ToolCallFormat:
    """Calls by a name and tags of keys and of values. separator: behind the name. line: ends each part."""
    call, calls, key, value = (f"{each}{suffix}>" for each in ("tool_call", "tool_calls", "arg_key", "arg_value"))
    behind = re.escape(separator.format(suffix)) if separator else f"(?=<{re.escape(key)}|</{re.escape(call)})"
    head = re.compile(rf"\s*(?:<{re.escape(call)})?\s*(?P<name>[^\s<{{]{{1,64}})\s*{behind}")
    arguments = TaggedSyntax(f"<{key}", f"</{key}{line}<{value}", f"</{value}", "", line)
    begin = f"<{call}{{name}}{separator.format(suffix)}{line}"
    return ToolCallFormat(
        name,
        signs,
        (CallStyle(head, begin, f"</{call}{line}", arguments),),
        (Frame(f"<{calls}", f"</{calls}", first=line, separator=f"<{call}"),),
        fit=lambda template: _format(name, suffix_of(template), separator, *signs, line=line),
    )


HUNYUAN_3 = _format("hunyuan_3", "", "<tool_sep{}>", "<tool_calls", "<tool_sep", line="\n")
HUNYUAN_4 = _format("hunyuan_4", "", "", "<tool_calls", "<arg_key")
