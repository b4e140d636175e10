"""Plain words as a test: nouns, not pronouns, in comments, docstrings, messages and docs; a short README.

Alone: `python tests/test_words.py [root]`.

"Whoever", "those" or "nobody" almost always hides a noun: the request, the tenant, the page, the client.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = "core", "memory", "ops", "graphs", "server", "perf"
LIMIT = 0.5
"""Most pronouns per 1,000 words: of each package's comments and docstrings, of all its messages, of the docs."""

README_WORDS = 900
"""Most words of README.md, as `wc -w` counts them."""

PRONOUN = re.compile(r"\b(?:who|whom|whose|whoever|whomever|nobody|somebody|anybody|everybody|those|told)\b", re.I)
WORD = re.compile(r"\w+")

#: A comment or a string literal; an apostrophe within a comment, or a `#` within a string, begins nothing. Parsing all
#: files takes seconds, this a tenth of one.
LITERAL = re.compile(
    r"#[^\n]*"
    r'|"""(?:[^"\\]|\\.|"(?!""))*"""'
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'(?:[^'\\\n]|\\.)*'",
    re.DOTALL,
)
CPP_LITERAL = re.compile(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"')
LITERALS = {".py": LITERAL, ".h": CPP_LITERAL, ".cpp": CPP_LITERAL}


class Text(NamedTuple):
    """A comment, docstring or message, and where it begins in its file."""

    start: int
    words: str
    is_message: bool = False


def texts(source: str, literal: re.Pattern[str]) -> Iterator[Text]:
    """The comments; the docstrings: literals in triple quotes with lines of their own; the messages: other literals of
    several words.
    """
    for found in literal.finditer(source):
        if found[0].startswith(("#", "//")) or _is_docstring(source, found):
            yield Text(found.start(), found[0])
        elif " " in found[0].strip("\"' "):
            yield Text(found.start(), found[0], True)


def _is_docstring(source: str, literal: re.Match[str]) -> bool:
    before = source[source.rfind("\n", 0, literal.start()) + 1 : literal.start()]
    ends = source[literal.end() : literal.end() + 1] in ("\n", "")
    return literal[0].startswith('"""') and ends and before.strip() in ("", "r")


@dataclass
class Count:
    """Words, and the pronouns among them."""

    num_words: int = 0
    places: list[str] = field(default_factory=list)

    def add(self, path: str, source: str, text: Text) -> None:
        self.num_words += len(WORD.findall(text.words))
        for found in PRONOUN.finditer(text.words):
            line = source.count("\n", 0, text.start + found.start()) + 1
            self.places.append(f"{path}:{line}: {found[0]}")

    def breaches(self, what: str) -> list[str]:
        """A line that says so if there are too many pronouns, and after it one for each of them."""
        if len(self.places) * 1000 <= LIMIT * self.num_words:
            return []
        rate = len(self.places) * 1000 / self.num_words
        return [f"{what}: {rate:.2f} pronouns per 1,000 words, at most {LIMIT} may be; use nouns", *self.places]


def count(root: Path) -> dict[str, Count]:
    """Count the words of each package, of all packages' messages, and of each page of the docs."""
    counts = {name: Count() for name in (*PACKAGES, "messages")}
    for package in PACKAGES:
        for path in sorted(each for each in root.joinpath(package).rglob("*") if each.suffix in LITERALS):
            source = path.read_text("utf-8")
            for text in texts(source, LITERALS[path.suffix]):
                counts["messages" if text.is_message else package].add(str(path.relative_to(root)), source, text)
    for path in sorted([*root.glob("docs/*.md"), *root.glob("README.md")]):
        name, source = str(path.relative_to(root)), path.read_text("utf-8")
        counts[name] = Count()
        counts[name].add(name, source, Text(0, source))
    return counts


def check(root: Path) -> list[str]:
    """Lines for each part with too many pronouns, and for a long README."""
    breaches = [line for name, counted in count(root).items() for line in counted.breaches(name)]
    readme = root / "README.md"
    if readme.is_file() and (num_words := len(readme.read_text("utf-8").split())) > README_WORDS:
        breaches.append(f"README.md: {num_words} words, at most {README_WORDS} may be; move the rest to docs/")
    return breaches


# -- tests


def test_the_words_are_nouns():
    assert check(ROOT) == []


def plant(root: Path, source: str, name: str = "memory/pages/a.py") -> list[str]:
    """Check a tree of one file."""
    path = root / name
    path.parent.mkdir(parents=True)
    path.write_text(source)
    return check(root)


PLANTED = {
    "a comment": ("x = 1  # who comes first", "a.py:1: who"),
    "a docstring": ('def f():\n    """Frees pages.\n\n    Whose they were.\n    """\n', "a.py:4: Whose"),
    "a raw docstring": ('r"""Nobody \\d."""\n', "a.py:1: Nobody"),
    "a docstring of an attribute": ('x = 1\n"""Those that wait."""', "a.py:2: Those"),
    "a comment behind quotes": ('x = "it\'s #"  # is told', "a.py:1: told"),
    "a comment with an apostrophe": ("# don't\n# somebody's", "a.py:2: somebody"),
    "a message": ('raise ValueError(f"no, those: {it}")', "a.py:1: those"),
    "a message in triple quotes": ('f(\n    """that is told""",\n)', "a.py:2: told"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_planted_pronoun_is_caught(tmp_path, case):
    source, want = PLANTED[case]
    rate, place = plant(tmp_path, source)
    assert rate.startswith("messages: " if "message" in case else "memory: ")
    assert place == f"memory/pages/{want}"


ALLOWED = {
    "code": "whose = those(told)",
    "a word in quotes": 'f("nobody", """those""", " who")',
    "longer words": "# wholly, foretold, whosoever\n",
    "one in two thousand": "#" + " page" * 1999 + " whose\n",
    "no text": "x = 1\n",
}


def test_planted_pronoun_in_cpp_is_caught(tmp_path):
    source = 'f("//those");  // it\'s whose\n#include "a.h"  // told_\n'
    assert plant(tmp_path, source, "ops/native/a.h")[1:] == ["ops/native/a.h:1: whose"]


@pytest.mark.parametrize("case", ALLOWED)
def test_other_text_passes(tmp_path, case):
    assert plant(tmp_path, ALLOWED[case]) == []


@pytest.mark.parametrize(("num_words", "breaches"), [(900, 0), (901, 1)])
def test_a_long_readme_is_caught(tmp_path, num_words, breaches):
    (tmp_path / "README.md").write_text("| page\n" * (num_words // 2) + "page" * (num_words % 2))
    assert len(check(tmp_path)) == breaches


@pytest.mark.parametrize("name", ["docs/page.md", "README.md"])
def test_a_page_with_pronouns_is_caught(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("# Access\n\nWho may use it, and whose `key` it is.\n")
    rate, *places = check(tmp_path)
    assert rate.startswith(f"{name}: ")
    assert places == [f"{name}:3: Who", f"{name}:3: whose"]


def test_other_packages_are_not_counted(tmp_path):
    assert plant(tmp_path, "# whose\n", "tests/a.py") == []


def test_command_line_exits_non_zero_on_a_breach(tmp_path):
    plant(tmp_path, "# whose\n")
    command = [sys.executable, __file__, str(tmp_path)]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "memory/pages/a.py:1: whose" in failed.stdout
    (tmp_path / "memory/pages/a.py").unlink()
    assert subprocess.run(command, capture_output=True, text=True, check=False).returncode == 0


def main(argv: list[str]) -> int:
    breaches = check(Path(argv[0]).resolve() if argv else ROOT)
    for breach in breaches:
        print(breach)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
