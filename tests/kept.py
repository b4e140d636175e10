"""Files and reference answers that many test processes need: made by the first, kept on disk for the others.

`transformers` and `peft` write tiny models, which takes as long as the tests of them. What they made is kept below
`build/tests` until a file of tests that it was made by changes, or a program's part that writers call (`PROGRAM`), or a
version of these libraries. The answers about them are kept in the repository (`references.py`).
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any

from .references import KEY, References, contents_of, versions_of

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("torch", "transformers", "peft", "safetensors", "numpy")
DAY = 24 * 60 * 60

#: What writers call of the program: they read configurations, and find the modules that adapters go on.
PROGRAM = ("core/model", "memory/files")

_IMPORTED = re.compile(r"^\s*from (\.+)([\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)


def kept_files(name: str, write: Callable[[Path], object]) -> Path:
    """Return a directory that `write` has filled, in this process or in an earlier one. Tests only read it.

    name: unique, since whatever is kept by this name is taken for what `write` writes.
    """
    caller = inspect.currentframe()
    assert caller is not None and caller.f_back is not None
    sources = frozenset({Path(caller.f_back.f_code.co_filename), *_files_of(write)})
    path = kept_root() / f"{name}.{source_of(sources)}"
    with locked(f"{path.name}.lock"):
        if not _done(path).exists():
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
            write(path)
            _done(path).write_text(contents_of(path))
        os.utime(path)
    return path


def _done(path: Path) -> Path:
    """The file that is there when a directory is whole; it has a hash of its contents."""
    return path.with_name(f"{path.name}.done")


def name_of(path: Path) -> str:
    """The name of a directory of `kept_files`."""
    return path.name.rpartition(".")[0]


class KeptAnswers:
    """Answers by question, both as JSON has them: lists, strings and numbers. Those that the repository does not have
    are files of their own.
    """

    def __init__(self, path: Path | None = None) -> None:
        """path: a directory of `kept_files`, whose models are asked; None keeps answers in this object alone."""
        self._folder = path and path / "answers"
        self._known: dict[str, Any] = {}
        self._references = None
        if path is not None and path.parent == kept_root():
            self._references = References(name_of(path), _done(path).read_text())

    def get(self, question: Any, answer: Callable[[], Any]) -> Any:
        """The answer that is known, or that of `answer`, which is kept."""
        asked = json.dumps(question)
        if asked not in self._known:
            self._known[asked] = self._find(asked, answer)
        return self._known[asked]

    def _find(self, asked: str, answer: Callable[[], Any]) -> Any:
        known = self._references and self._references.find(asked)
        if self._references is None or known is None or self._references.is_asked_again:
            known = self._read_or_make(asked, answer)
            if self._references is not None:
                self._references.check(asked, known)
        return known

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


def made_answers() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name, the hash of the contents, and the answers by hashes of questions, of each directory. Of some with
    one name that is the last used.
    """
    made = (path.with_suffix("") for path in kept_root().glob("*.done"))
    newest = {name_of(path): path for path in sorted(made, key=lambda path: path.stat().st_mtime)}
    for name, path in sorted(newest.items()):
        files = [each for each in (path / "answers").glob("*") if not each.suffix]
        yield name, _done(path).read_text(), {each.name[:KEY]: json.loads(each.read_text()) for each in files}


@cache
def kept_root() -> Path:
    """The directory of all that is kept. What nobody has used for a day is removed."""
    root = ROOT / "build" / "tests"
    root.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        if path.suffix in (".done", ".lock") or path.stat().st_mtime > time.time() - DAY:
            continue
        for beside in (_done(path), path.with_name(f"{path.name}.lock")):
            beside.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    return root


@cache
def source_of(files: frozenset[Path]) -> str:
    """A hash of all that could change what functions of these files write."""
    found = hashlib.sha256(repr(versions_of(LIBRARIES)).encode())
    for path in sorted({each for file in files for each in imported_by(file)}):
        found.update(path.read_bytes())
    found.update(source_of_program().encode())
    return found.hexdigest()[:16]


@cache
def source_of_program() -> str:
    found = hashlib.sha256()
    for folder in PROGRAM:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def _files_of(write: Any) -> Iterator[Path]:
    """Yield the files of a function, and of those that it wraps."""
    while write is not None:
        code = getattr(write, "__code__", None)
        if isinstance(code, CodeType):
            yield Path(code.co_filename)
        write = write.func if isinstance(write, partial) else getattr(write, "__wrapped__", None)


def imported_by(file: Path) -> frozenset[Path]:
    """A file of tests and all files of tests that it imports, by others, too."""
    found, waiting = set[Path](), [file.resolve()]
    while waiting:
        if (each := waiting.pop()) not in found and each.is_relative_to(ROOT / "tests"):
            found.add(each)
            waiting += imports_of(each)
    return frozenset(found)


@cache
def imports_of(file: Path) -> tuple[Path, ...]:
    found = []
    for dots, module, names in _IMPORTED.findall(file.read_text()):
        base = file.parents[len(dots) - 1].joinpath(*module.split("."))
        each = (base / name for name in re.findall(r"\w+", names))
        found += [path for path in (near.with_suffix(".py") for near in (base, *each)) if path.is_file()]
    return tuple(found)


@contextmanager
def locked(name: str) -> Iterator[None]:
    """While no other process holds the lock of this name."""
    path = kept_root() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
