"""Starts of Python as a child process, which imports nothing from the current directory: it may be a stranger's.

Tests: tests/memory/host/test_child_python.py
"""

from __future__ import annotations

import os
import re
import resource
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.context import SpawnContext

SAFE_PATH = "PYTHONSAFEPATH"
"""The environment's variable that does what `-P` does, for interpreters that a library starts."""


def python_command(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """The command line that runs a module: `python -m` alone would import from the current directory first. python:
    this interpreter, unless told.
    """
    return [python or sys.executable, "-P", "-m", module, *arguments]


def spawn_context() -> SpawnContext:
    """multiprocessing's context of new interpreters; sets `SAFE_PATH` for them and all that start later."""
    os.environ[SAFE_PATH] = "1"
    return get_context("spawn")


def limit_memory(more: int) -> None:
    """Limit this process to so many bytes more than it has, if the operating system supports it (Linux)."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return
    found = re.search(r"^VmData:\s*(\d+) kB", status, re.MULTILINE)
    if found is not None:
        most = (int(found[1]) << 10) + more
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
