"""Ways to write calls that several formats share.

Tests: tests/server/text/test_tool_call_formats.py
"""

from __future__ import annotations

import re

from .output_syntax import CallStyle
from .tagged_syntax import TaggedSyntax


def wide(text: str) -> str:
    """A text with DeepSeek's characters for the bars and blanks in its marks."""
    return text.replace("|", "\uff5c").replace("_", "\u2581")


def wrapped(name: str = "name", arguments: str = "arguments", before: str = "", after: str = "") -> CallStyle:
    """A JSON object with a name and arguments. before, after: what a grammar writes around both."""
    keys = "arguments|parameters" if arguments in ("arguments", "parameters") else re.escape(arguments)
    head = rf'"{name}"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(?:{keys})"\s*:\s*(?=\{{)'
    begin = f'{{{{{before}"{name}": "{{name}}", "{arguments}": '
    return CallStyle(re.compile(r"\s*\{\s*" + head), begin, f"{after}}}", wrapped=True)


NAMED = wrapped()
"""A JSON object with the name and the arguments."""

_INVOKE = r'\s*<%sinvoke name="(?P<name>[^"\n]{1,64})">'


def invoked(prefix: str, syntax: TaggedSyntax) -> CallStyle:
    """Calls that are written as `<invoke name="NAME">` and parameters between tags."""
    head = re.compile(_INVOKE % re.escape(prefix))
    return CallStyle(head, f'\n<{prefix}invoke name="{{name}}">\n', f"</{prefix}invoke>\n", syntax)


def parameters(prefix: str, named: str = '">', named_text: str = "") -> TaggedSyntax:
    return TaggedSyntax(f'<{prefix}parameter name="', named, f"</{prefix}parameter>", "", "\n", named_text)
