"""Hints that tell which package to install: the distribution's own name, and extras that it has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ("core", "docs", "examples", "graphs", "memory", "ops", "perf", "server", ".github")
#: The arguments of pip: a name with extras, or a bare name after `pip install`.
WITH_EXTRAS = re.compile(r"([\w.-]*chorus[\w.-]*)\[([\w,{}]+)\]")
BARE = re.compile(r"pip install (?:-\S+ )*['\"]?([\w-]*chorus[\w-]*)")


def hints():
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [*ROOT.glob("*.md"), *ROOT.glob("*.py"), ROOT / "pyproject.toml", ROOT / "Makefile", ROOT / ".ci" / "run"]
    for path in files:
        if path.suffix in (".py", ".md", ".toml", ".yml", ".sh", ""):
            text = path.read_text(encoding="utf-8", errors="replace")
            for found in WITH_EXTRAS.finditer(text):
                yield path, found[1], found[2].split(",")
            for found in BARE.finditer(text):
                yield path, found[1], []


def test_no_hint_fetches_a_stranger():
    """The package index has another project by the name that is imported."""
    found = list(hints())
    assert len(found) > 10
    extras = PROJECT["optional-dependencies"]
    for path, name, wanted in found:
        assert name == PROJECT["name"] == "chorus-lora", f"{path}: pip would fetch {name}"
        for extra in wanted:
            is_one = extra in extras or (extra == "cuda{major}" and {"cuda12", "cuda13"} <= extras.keys())
            assert is_one, f"{path}: there is no extra {extra}"
