"""Counts what STYLE rules ask of code and prose: `python -m tests.style_report` (`make style-report`).

It reports and judges nothing. `--list NAME` prints the places of one count, such as `--list calls`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SERVING = ("core", "graphs", "memory", "ops", "server")
PACKAGES = (*SERVING, "perf", "tests", "docs")
MOST_POSITIONAL, MOST_PARAMETERS, LONG_SENTENCE = 5, 7, 30

PRIVATE_WORDS = (
    r"seats?|foresees?|foreseen|tak(?:e|es|ing) back|taken back|as if done|givers?|takers?|ledgers?|books|keepers?|"
    r"lend|lends|lent|hand(?:s|ed)? over|assistants?|followers?|chances|likeliest|mends?|mended|"
    r"give up|gives up|given up|gave up|gets on|got on|lives|worlds?|opponents?|sits? out|sat out|makes? way|"
    r"in (?:any )?company"
)
"""Words that the glossary replaces."""
WORDS_WITH_OTHER_MEANINGS = r"rows?|slots?|places?|pauses?|paused|fronts?|life|ways?|products?|draws?|drawn|scores?"
"""Words that the glossary replaces in one meaning, and that are right in another."""
STIFF_WORDS = r"what|behind|beside"
MADE = "Written by docs/generate.py", "This page is made by"
"""In pages that are made from code."""


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in listed.stdout.split() if (path := ROOT / name).is_file()]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def sources(*packages: str) -> list[Path]:
    return [path for path in tracked("*.py") if path.relative_to(ROOT).parts[0] in packages]


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


# -- code


def classes_defined_twice() -> Iterator[str]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sources(*SERVING):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(place(path, node.lineno))
    yield from (f"{name}: {', '.join(places)}" for name, places in sorted(found.items()) if len(places) > 1)


def long_calls() -> Iterator[str]:
    for path in sources(*SERVING):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and len(node.args) > MOST_POSITIONAL:
                yield f"{place(path, node.lineno)}: {ast.unparse(node.func)} takes {len(node.args)}"


def wide_functions() -> Iterator[str]:
    for path in sources(*SERVING):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if (count := len(names) - (names[:1] in (["self"], ["cls"]))) > MOST_PARAMETERS:
                    yield f"{place(path, node.lineno)}: {node.name} has {count}"


def skipped_formats() -> Iterator[str]:
    for path in tracked("*.py"):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT and token.string.startswith("# fmt: skip"):
                yield place(path, token.start[0])


def private_overrides() -> Iterator[str]:
    """Private methods of serving classes that classes of perf override."""
    classes = defaultdict(list)
    for path in sources(*SERVING, "perf"):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append((path, node))
    for path in sources("perf"):
        for node in (each for each in tree_of(path).body if isinstance(each, ast.ClassDef)):
            theirs = {name for base in _bases(node, classes) for name in _methods(base)}
            for name, line in _methods(node).items():
                if name in theirs and name.startswith("_") and not name.startswith("__"):
                    yield f"{place(path, line)}: {node.name}.{name}"


def _bases(node: ast.ClassDef, classes: dict[str, list[tuple[Path, ast.ClassDef]]]) -> Iterator[ast.ClassDef]:
    """Serving classes that a class inherits from, by name."""
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
        for path, found in classes.get(name, ()):
            if found is not node:
                if path.relative_to(ROOT).parts[0] in SERVING:
                    yield found
                yield from _bases(found, classes)


def _methods(node: ast.ClassDef) -> dict[str, int]:
    return {each.name: each.lineno for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


# -- prose


def prose_of(path: Path) -> str:
    """Paragraphs of a page, or the docstrings and comments of a module, without code."""
    text = _page(path) if path.suffix == ".md" else "\n\n".join(_docstrings_and_comments(path))
    return re.sub(r"https?://\S+|`[^`]*`", "X", text)


def _page(path: Path) -> str:
    text = re.sub(r"```.*?```|<!--.*?-->", "", path.read_text(), flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"(?m)^\s*(?:[-*|#>]|\d+\.)", "\n\n", text).replace("|", "\n\n")


def _docstrings_and_comments(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    lines = io.StringIO(path.read_text()).readline
    comments = [each for each in tokenize.generate_tokens(lines) if each.type == tokenize.COMMENT]
    block: list[str] = []
    last = 0
    for each in comments:
        if block and each.start[0] != last + 1:
            yield " ".join(block)
            block = []
        block.append(each.string.lstrip("#: "))
        last = each.start[0]
    yield " ".join(block)


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z][\w'-]*", text)


def sentences(text: str) -> Iterable[list[str]]:
    return filter(None, (words(each) for each in re.split(r"[.!?]\s|\n\s*\n", text)))


def pages(package: str) -> list[Path]:
    if package == "docs":
        return [*tracked("docs/*.md"), *tracked("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    return sources(package)


def per_thousand(pattern: str, text: str) -> float:
    count = len(re.findall(rf"\b(?:{pattern})\b", text, re.IGNORECASE))
    return 1000 * count / max(1, len(words(text)))


# -- the report

CODE = {
    "classes": ("class names defined twice in serving code", classes_defined_twice),
    "calls": (f"calls with more than {MOST_POSITIONAL} positional values", long_calls),
    "parameters": (f"functions with more than {MOST_PARAMETERS} parameters", wide_functions),
    "skips": ("`fmt: skip` comments", skipped_formats),
    "overrides": ("private methods of serving code overridden in perf", private_overrides),
}


def print_prose() -> None:
    columns = "words", "private", "ambiguous", "stiff", "long sentences"
    print(f"\n{'per 1,000 words':12}", *(f"{name:>15}" for name in columns))
    for package in PACKAGES:
        text = "\n\n".join(map(prose_of, pages(package)))
        lengths = [len(each) for each in sentences(text)]
        share = sum(length > LONG_SENTENCE for length in lengths) / max(1, len(lengths))
        rates = (per_thousand(each, text) for each in (PRIVATE_WORDS, WORDS_WITH_OTHER_MEANINGS, STIFF_WORDS))
        print(f"{package:15}", f"{len(words(text)):>15,}", *(f"{rate:>15.1f}" for rate in rates), f"{share:>15.1%}")
    print(f'stiff: "{STIFF_WORDS}"; long: over {LONG_SENTENCE} words')


def print_pages() -> None:
    counts = Counter({str(path.relative_to(ROOT)): len(words(prose_of(path))) for path in pages("docs")})
    generated = {str(path.relative_to(ROOT)) for path in pages("docs") if any(map(path.read_text().__contains__, MADE))}
    print("\nwords per page")
    for name, count in counts.most_common():
        print(f"{name:50} {count:>7,}{' made from code' * (name in generated)}")
    by_hand = sum(count for name, count in counts.items() if name not in generated)
    print(f"{'written by hand':50} {by_hand:>7,}\n{'all':50} {counts.total():>7,}")


def main(argv: list[str] | None = None) -> int:
    command = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    command.add_argument("--list", choices=CODE, help="print the places of one count")
    args = command.parse_args(argv)
    if args.list:
        print(*CODE[args.list][1](), sep="\n")
        return 0
    for title, find in CODE.values():
        print(f"{title:55} {len(list(find())):>6,}")
    print(f"{'lines of pyproject.toml':55} {len((ROOT / 'pyproject.toml').read_text().splitlines()):>6,}")
    print_prose()
    print_pages()
    return 0


if __name__ == "__main__":
    sys.exit(main())
