"""Reference answers that the repository keeps: what transformers + peft answer about the tiny models of the tests.

A file of `reference_answers` has the answers about one model, by hashes of questions. They hold for a model that has
the same files, whichever code wrote these:

    make references                 asks transformers + peft everything again, and writes all files
    python -m tests.references      adds what the last test runs asked beyond them

A tenth of the models, drawn by the commit, is asked again in each run and must answer the same; all are where the
versions of transformers and peft are others, or with CHORUS_REFERENCES=all, as each night.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from zlib import crc32

from .greedy import MIN_MARGIN

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "reference_answers"

#: The environment's variable of what draws the models that are asked again: any text, or "all".
AGAIN = "CHORUS_REFERENCES"
SHARE = 10

#: Digits of the hash of a question.
KEY = 16
LIBRARIES = ("transformers", "peft")

#: Of more numbers than this, a token's log-probability may be another: two experts may be as good for it.
_NUMBERS = 20

#: Fields of configurations that say which library wrote them, and where.
_WRITTEN_BY = ("transformers_version", "peft_version", "base_model_name_or_path", "_name_or_path", "name_or_path")


class References:
    """The answers about one model. Empty for one that they were not written for."""

    def __init__(self, name: str, contents: str) -> None:
        """name: of the directory of `kept_files`. contents: see `contents_of`."""
        self.name = name
        known = read(name)
        is_same = known.get("contents") == contents and known.get("source") == source()
        self._answers: Mapping[str, Any] = known.get("answers", {}) if is_same else {}
        self.is_asked_again = known.get("versions") != versions_of() or is_drawn(name)

    def find(self, asked: str) -> Any:
        """The answer to a question as JSON has it, or None."""
        return self._answers.get(key_of(asked))

    def check(self, asked: str, made: Any) -> None:
        """Raise AssertionError if an answer is not the one that is kept."""
        known = self.find(asked)
        assert known is None or is_same(known, made), (
            f"{self.name!r} was asked {asked[:200]} again: transformers and peft {versions_of()} answer {made}, but "
            f"{path_of(self.name).name} has {known}. If the new answer is right, run `make references`"
        )


def key_of(asked: str) -> str:
    return hashlib.sha256(asked.encode()).hexdigest()[:KEY]


def is_same(known: Any, made: Any) -> bool:
    """True for the same tokens, and numbers that only rounding parts. A choice that is not clear may go either way."""
    if any(isinstance(each, float) and each < MIN_MARGIN for answer in (known, made) for each in answer):
        return True
    return _is_near(known, json.loads(json.dumps(made)))


def _is_near(known: Any, made: Any) -> bool:
    if isinstance(known, list) and isinstance(made, list):
        far = sum(not _is_near(*each) for each in zip(known, made, strict=False))
        allowed = len(known) > _NUMBERS and all(isinstance(each, float) for each in known)
        return len(known) == len(made) and far <= allowed
    if isinstance(known, float) and isinstance(made, float):
        return math.isclose(known, made, rel_tol=1e-3, abs_tol=1e-3)
    return known == made


def is_drawn(name: str) -> bool:
    """True for the tenth of the models that the environment draws."""
    drawn_by = os.environ.get(AGAIN, "0")
    return drawn_by == "all" or crc32(f"{drawn_by} {name}".encode()) % SHARE == 0


def commit() -> str:
    """The commit that is checked out, or 0 where there is no repository."""
    command = ["git", "-C", str(HERE), "rev-parse", "--short=12", "HEAD"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "0"
    return "0"


@cache
def versions_of(libraries: tuple[str, ...] = LIBRARIES) -> dict[str, str | None]:
    return {library: _version(library) for library in libraries}


def _version(library: str) -> str | None:
    """None for a copy without its package's description."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


@cache
def source() -> str:
    """A hash of the code that all answers come by."""
    return hashlib.sha256((HERE / "greedy.py").read_bytes()).hexdigest()[:16]


def contents_of(path: Path) -> str:
    """A hash of all files below a directory, wherever it is and whichever versions of libraries wrote them, but for
    model cards.
    """
    found = hashlib.sha256()
    for file in sorted(each for each in path.rglob("*") if each.is_file() and each.name != "README.md"):
        found.update(f"{file.relative_to(path)}\n".encode())
        found.update(_canonical(file))
    return found.hexdigest()[:32]


def _canonical(file: Path) -> bytes:
    if file.suffix != ".json":
        return file.read_bytes()
    fields = json.loads(file.read_text())
    if file.name == "adapter_config.json":  # PEFT has sets there, whose order differs between processes
        fields = {name: sorted(each) if _is_names(each) else each for name, each in fields.items()}
    if isinstance(fields, dict):
        fields = {name: each for name, each in fields.items() if name not in _WRITTEN_BY}
    return json.dumps(fields, sort_keys=True).encode()


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def path_of(name: str) -> Path:
    return FOLDER / f"{re.sub('[^a-z0-9.-]+', '_', name.lower())}.json"


def read(name: str) -> dict[str, Any]:
    with suppress(FileNotFoundError):
        return json.loads(path_of(name).read_text())
    return {}


def write(name: str, contents: str, answers: Mapping[str, Any]) -> None:
    """Write the file of a model, an answer a line."""
    told = {"model": name, "versions": versions_of(), "source": source(), "contents": contents}
    lines = [f"  {json.dumps(key)}: {json.dumps(_rounded(answers[key]))}" for key in sorted(answers)]
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in told.items())
    FOLDER.mkdir(exist_ok=True)
    path_of(name).write_text(f'{{\n{head}"answers": {{\n' + ",\n".join(lines) + "\n}}\n")


def _rounded(value: Any) -> Any:
    """Numbers with as many digits as float32 has."""
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def merge(made: Iterator[tuple[str, str, dict[str, Any]]]) -> Sequence[Path]:
    """Add answers to the files, and return these. Other answers about a model stay, if it is the same."""
    written = []
    for name, contents, answers in made:
        known = read(name)
        told = (known.get("contents"), known.get("versions"), known.get("source"))
        if told == (contents, versions_of(), source()):
            answers = {**answers, **known["answers"]}
        if answers:
            write(name, contents, answers)
            written.append(path_of(name))
    return written


def main() -> int:
    from .kept import made_answers

    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    written = merge(made_answers())
    size = sum(path.stat().st_size for path in FOLDER.glob("*.json"))
    print(f"{len(written)} files written; {FOLDER.name} has {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
