"""Common parts of measuring commands: parsers, progress, and one JSON object as the last line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from .table import Goal, goal_table


def parser(spec: ModuleSpec | None, doc: str | None) -> argparse.ArgumentParser:
    """A parser for a module's command; the docstring's first paragraph is the description, the rest follows."""
    assert spec is not None and doc is not None, "a command is a module with a docstring, run by `python -m`"
    name = spec.name.removesuffix(".__main__")
    about, _, details = doc.partition("\n\nTests:")[0].partition("\n\n")
    return argparse.ArgumentParser(f"python -m {name}", description=about, epilog=details, formatter_class=_Format)


class _Format(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the text's lines, and shows defaults that the text does not mention."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_told = "default" in (action.help or "")
        if is_told or isinstance(action.default, bool) or action.default in (None, "", []):
            return action.help
        return super()._get_help_string(action)


def count(text: str) -> int:
    """An argument that must be a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def say(text: str) -> None:
    """Report a command's progress, apart from its result."""
    print(text, file=sys.stderr, flush=True)


def conclude(result: dict[str, Any], ok: bool) -> int:
    """Print the result for programs; return the command's exit code."""
    print(json.dumps(result))
    return 0 if ok else 1


def judge(result: dict[str, Any], goals: Sequence[Goal]) -> int:
    """Show the goals and print the result with whether it meets them all; return the exit code."""
    goal_table("bars", goals).show()
    met = all(goal.met for goal in goals)
    return conclude({**result, "met": met}, met)
