"""`chorus completion`: prints a shell's script for completing commands and flags, made by shtab."""

from __future__ import annotations

import argparse
from typing import TextIO

from .adapters import CommandError

SHELLS = ("bash", "zsh", "fish")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")


def write(parser: argparse.ArgumentParser, shell: str, out: TextIO) -> None:
    """Write the shell's script for a parser's commands. Raises CommandError if the package shtab is missing."""
    try:
        import shtab
    except ImportError:
        raise CommandError("completion needs the package shtab; run: pip install shtab") from None
    out.write(shtab.complete(parser, shell) + "\n")
