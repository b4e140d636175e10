"""Files and reference answers that many test processes need: made by the first, kept on disk for the others.

`transformers` and `peft` write tiny models and compute their answers, which takes as long as the tests of them. What
they made is kept below `build/tests` until any Python file of the project or a version of these libraries changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core", "graphs", "memory", "ops", "perf", "server", "tests")
LIBRARIES = ("torch", "transformers", "peft", "safetensors", "numpy")
DAY = 24 * 60 * 60


def kept_files(name: str, write: Callable[[Path], object]) -> Path:
    """Return a directory that `write` has filled, in this process or in an earlier one. Tests only read it.

    name: unique, since whatever is kept by this name is taken for what `write` writes.
    """
    path = kept_root() / name
    done = path.with_name(f"{path.name}.done")
    with locked(f"{name}.lock"):
        if not done.exists():
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
            write(path)
            done.touch()
    return path


class KeptAnswers:
    """Answers by question, both as JSON has them: lists, strings and numbers. Each is a file of its own."""

    def __init__(self, path: Path | None = None) -> None:
        """path: a directory of `kept_files`, whose models are asked; None keeps answers in this object alone."""
        self._folder = path and path / "answers"
        self._known: dict[str, Any] = {}

    def get(self, question: Any, answer: Callable[[], Any]) -> Any:
        """The answer that is known, or that of `answer`, which is kept."""
        asked = json.dumps(question)
        if asked not in self._known:
            self._known[asked] = self._read_or_make(asked, answer)
        return self._known[asked]

    def _read_or_make(self, asked: str, answer: Callable[[], Any]) -> Any:
        if self._folder is None:
            return answer()
        path = self._folder / hashlib.sha256(asked.encode()).hexdigest()
        if path.exists():
            return json.loads(path.read_text())
        found = answer()
        self._folder.mkdir(exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(json.dumps(found))
        new.replace(path)
        return found


@cache
def kept_root() -> Path:
    """The directory of what belongs to this state of the source. Those that nobody has used for a day are removed."""
    root = ROOT / "build" / "tests" / _state()
    root.mkdir(parents=True, exist_ok=True)
    os.utime(root)
    for other in root.parent.iterdir():
        if other.stat().st_mtime < time.time() - DAY:
            shutil.rmtree(other, ignore_errors=True)
    return root


def _state() -> str:
    """A hash of all that could change the files or answers."""
    found = hashlib.sha256(repr([_version(library) for library in LIBRARIES]).encode())
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _version(library: str) -> str | None:
    """None for a copy without its package's description."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


@contextmanager
def locked(name: str) -> Iterator[None]:
    """While no other process of this state of the source holds the lock of this name."""
    path = kept_root() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
