"""The one-screen help of --help; --help-all shows every flag."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from textwrap import fill
from typing import Any

FLAGS = {
    "model": "a checkpoint's directory, or a name such as smollm2",
    "adapters": "directory of LoRA adapters, one PEFT directory each",
    "lora_modules": "an adapter from anywhere, as NAME=DIR; repeatable",
    "served_model_name": "the base model's name in the API",
    "host": "address to listen on (default: 127.0.0.1)",
    "port": "port to listen on (default: 8000)",
    "api_key_file": "file of the keys that clients must send, one a line",
    "device": "cpu, cuda, or one GPU such as cuda:1 (default: auto)",
    "memory_bytes": "room for KV cache and adapters, such as 20GiB",
    "max_model_len": "most tokens of one request, prompt and answer",
    "config": "TOML file with any of the settings",
}
"""The most important settings, in words that fit a line."""

WIDTH, COLUMN = 100, 30


def brief_help(
    parser: argparse.ArgumentParser, own: Sequence[argparse.Action], examples: Sequence[str], num_more: int
) -> str:
    """The help text. own: the command's flags that are not settings. num_more: number of flags that are left out."""
    shown = {one.dest: one for one in parser._actions}  # noqa: SLF001 - argparse offers no public access
    rows = [(_invocation(one), (one.help or "") % {**vars(one), "prog": parser.prog}) for one in own]
    for name, text in FLAGS.items():
        if (setting := shown.get(f"setting_{name}")) is not None and (name != "model" or "model_argument" not in shown):
            rows.append((_invocation(setting), text))
    rows.append(("--help-all", f"show the other {num_more} flags, too"))
    lines = [f"usage: {parser.usage or _usage(parser, own)}", "", parser.description or "", ""]
    for name, text in rows:
        gap = COLUMN - len(name) - 4
        head = f"  {name}{' ' * gap if gap > 0 else '  '}"
        lines.append(fill(head + text, WIDTH, subsequent_indent=" " * (COLUMN - 2), break_on_hyphens=False))
    if examples:
        lines += ["", "examples:", *(f"  {one}" for one in examples)]
    return "\n".join(lines) + "\n"


def _usage(parser: argparse.ArgumentParser, own: Sequence[argparse.Action]) -> str:
    needed = (_invocation(one) for one in own if one.required and one.option_strings)
    places = (
        _invocation(one) if one.nargs != "?" else f"[{_invocation(one)}]" for one in own if not one.option_strings
    )
    return " ".join((parser.prog, *places, *needed, "[flags]"))


def _invocation(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest)
    flag = action.option_strings[-1]
    return flag if action.nargs == 0 else f"{flag} {action.metavar or action.dest.upper()}"


class HelpAll(argparse.Action):
    """Print every flag and end the command."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="show every flag, and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(argparse.ArgumentParser.format_help(parser), end="")
        parser.exit()
