"""Plain words as a test: nouns, not pronouns, in comments and docstrings; a short README.

Alone: `python tests/test_words.py [root]`.

"Whoever", "those" or "nobody" almost always hides a noun: the request, the tenant, the page, the client.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

LIMITS = dict.fromkeys(("core", "memory", "ops", "graphs", "server", "perf"), 0.5)
"""Most pronouns per 1,000 words of each package."""

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
    """A comment or docstring, and where it begins in its file."""

    start: int
    words: str


def texts(source: str, literal: re.Pattern[str]) -> Iterator[Text]:
    """The comments, and the docstrings: literals in triple quotes with lines of their own."""
    for found in literal.finditer(source):
        if found[0].startswith(("#", "//")):
            yield Text(found.start(), found[0])
        elif found[0].startswith('"""'):
            before = source[source.rfind("\n", 0, found.start()) + 1 : found.start()]
            if before.strip() in ("", "r") and source[found.end() : found.end() + 1] in ("\n", ""):
                yield Text(found.start(), found[0])


def check(root: Path) -> list[str]:
    """A line for each package with too many pronouns, and after it one for each of them."""
    breaches = []
    for package, limit in LIMITS.items():
        num_words, places = 0, []
        for path in sorted(each for each in root.joinpath(package).rglob("*") if each.suffix in LITERALS):
            source = path.read_text("utf-8")
            for text in texts(source, LITERALS[path.suffix]):
                num_words += len(WORD.findall(text.words))
                for found in PRONOUN.finditer(text.words):
                    line = source.count("\n", 0, text.start + found.start()) + 1
                    places.append(f"{path.relative_to(root)}:{line}: {found[0]}")
        if len(places) * 1000 > limit * num_words:
            rate = len(places) * 1000 / num_words
            breaches += [f"{package}: {rate:.2f} pronouns per 1,000 words, at most {limit} may be; use nouns", *places]
    readme = root / "README.md"
    if readme.is_file() and (num_words := len(readme.read_text("utf-8").split())) > README_WORDS:
        breaches.append(f"README.md: {num_words} words, at most {README_WORDS} may be; move the rest to docs/")
    return breaches


# -- tests


def test_comments_and_docstrings_use_nouns():
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
}


@pytest.mark.parametrize("case", PLANTED)
def test_planted_pronoun_is_caught(tmp_path, case):
    source, want = PLANTED[case]
    rate, place = plant(tmp_path, source)
    assert rate.startswith("memory: ")
    assert place == f"memory/pages/{want}"


ALLOWED = {
    "code": "whose = those(told)",
    "a message": 'raise ValueError("nobody")\nf(\n    """those""",\n)',
    "longer words": "# wholly, foretold, whosoever\n",
    "one in two thousand": "#" + " page" * 1999 + " whose\n",
    "no text": "x = 1\n",
}


def test_planted_pronoun_in_cpp_is_caught(tmp_path):
    source = 'f("// those");  // it\'s whose\n#include "a.h"  // told_\n'
    assert plant(tmp_path, source, "ops/native/a.h")[1:] == ["ops/native/a.h:1: whose"]


@pytest.mark.parametrize("case", ALLOWED)
def test_other_text_passes(tmp_path, case):
    assert plant(tmp_path, ALLOWED[case]) == []


@pytest.mark.parametrize(("num_words", "breaches"), [(900, 0), (901, 1)])
def test_a_long_readme_is_caught(tmp_path, num_words, breaches):
    (tmp_path / "README.md").write_text("| page\n" * (num_words // 2) + "page" * (num_words % 2))
    assert len(check(tmp_path)) == breaches


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
