"""Finds file-system calls on the threads of event loops, which every client would wait for."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

AUDITED = frozenset(
    {
        "open",
        "os.listdir",
        "os.scandir",
        "os.rename",
        "os.remove",
        "os.mkdir",
        "os.rmdir",
        "os.chmod",
        "os.chown",
        "os.link",
        "os.symlink",
        "os.truncate",
        "os.utime",
        "shutil.rmtree",
        "shutil.copytree",
        "shutil.move",
        "tempfile.mkdtemp",
        "tempfile.mkstemp",
        "glob.glob",
        "sqlite3.connect",
        "fcntl.flock",
        "fcntl.lockf",
        "subprocess.Popen",
    }
)
"""Events that the interpreter raises for calls, whoever makes them."""

PATCHED = (
    "stat",
    "lstat",
    "access",
    "statvfs",
    "readlink",
    "fsync",
    "fdatasync",
    "pread",
    "pwrite",
    "preadv",
    "pwritev",
    "replace",
    "ftruncate",
)
"""Calls of `os` without an event, or that look at descriptors."""

FRAMES = 12


class BlockingCalls:
    """Calls that were made on `loops`, the ids of their threads."""

    def __init__(self) -> None:
        self.loops: set[int] = set()
        self.found: list[str] = []
        self.tell: Callable[[str], object] = self.found.append

    def note(self, what: str, arguments: tuple[Any, ...]) -> None:
        if threading.get_ident() not in self.loops:
            return
        stack = traceback.StackSummary.extract(traceback.walk_stack(None), limit=FRAMES, lookup_lines=False)
        if any(_is_exempt(frame.filename) for frame in stack):
            return
        lines = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in stack[1:]]
        self.tell("\n  ".join([f"{what}{arguments[:1]}", *lines]))

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Begin to watch, until the patches are undone."""
        for name in PATCHED:
            monkeypatch.setattr(os, name, self._noting(f"os.{name}", getattr(os, name)))
        _watchers.append(self)

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any, **named: Any) -> Any:
            self.note(name, arguments)
            return call(*arguments, **named)

        return noting


_watchers: list[BlockingCalls] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watchers and event in AUDITED:
        for one in _watchers:
            one.note(event, arguments)


def _is_exempt(file: str) -> bool:
    """Tracebacks read the source for the log."""
    return file.endswith("linecache.py")


def begin(calls: BlockingCalls, patches: pytest.MonkeyPatch) -> None:
    """Begin to watch, until the patches are undone and it is taken from the watchers."""
    if not getattr(_hook, "is_set", False):
        sys.addaudithook(_hook)  # for good: there is no way back
        _hook.is_set = True  # pyright: ignore[reportFunctionMemberAccess]
    calls.watch(patches)


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockingCalls]:
    """A watch over loops that are yet to be named."""
    calls = BlockingCalls()
    with monkeypatch.context() as patches:
        begin(calls, patches)
        try:
            yield calls
        finally:
            _watchers.remove(calls)
