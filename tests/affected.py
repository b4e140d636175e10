"""Prints the tests of the files that differ from a branch: `make affected`.

A module's are those that its docstring names after "Tests:" and the file that mirrors it, or else the files that import
it; a helper's are the files of tests that import it.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from .kept import imports_of

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
PACKAGES = ("core", "graphs", "memory", "ops", "perf", "server")

#: Tests of what is no module: a pattern of its path, and files.
OTHERS = (
    (r".*\.md|docs/.*", ("test_commands.py", "test_generated_pages.py", "test_links.py")),
    (r"ops/native/.*", ("ops/cpu",)),
    (r"Makefile|\.ci/.*|\.github/.*|pyproject\.toml", ("test_commands.py", "test_marks.py", "test_skips.py")),
    (r"deploy/.*", ("server/cluster/test_chart.py",)),
    (r"server/ui/.*", ("server/ui",)),
    (r"core/model/families/.*", ("core/test_families.py",)),
    (r"tests/core/published_configs.json", ("core/model/specs/test_published_configs.py",)),
)


def named_tests(module: Path) -> list[Path]:
    """The files and folders of tests that a module's docstring names, and the file that mirrors it."""
    docstring = ast.get_docstring(ast.parse(module.read_text("utf-8"))) or ""
    named = [ROOT / each.rstrip("/") for each in re.findall(r"tests/[\w/]+", docstring.partition("Tests:")[2])]
    mirror = TESTS / module.relative_to(ROOT).with_name(f"test_{module.name}")
    return [*(each if each.is_dir() else each.with_suffix(".py") for each in named), *([mirror] * mirror.is_file())]


def affected(changed: Iterable[str]) -> list[Path]:
    """The tests of files, by their paths from the root; those that are gone have none."""
    found = {path for each in changed if (ROOT / each).is_file() for path in _of_file(each)}
    return sorted(path for path in found if not any(parent in found for parent in path.parents))


def _of_file(name: str) -> Iterator[Path]:
    path = ROOT / name
    yield from (TESTS / each for pattern, files in OTHERS if re.fullmatch(pattern, name) for each in files)
    if path.suffix != ".py":
        return
    if path.is_relative_to(TESTS):
        yield from [path] if path.name.startswith("test_") else _importers(path)
    elif path.parts[len(ROOT.parts)] in PACKAGES:
        yield from named_tests(path) or _callers(path)


def _importers(helper: Path) -> Iterator[Path]:
    """Yield the files of tests that import a helper themselves; those below a `conftest.py`, which pytest imports, are
    too many.
    """
    files = helper.parent.glob("test_*.py") if helper.name == "conftest.py" else TESTS.rglob("test_*.py")
    yield from (path for path in files if helper.name == "conftest.py" or helper in imports_of(path))


def _callers(module: Path) -> list[Path]:
    """The tests of a module that names none: those that import it, if there are some in the folder that mirrors its own
    these alone, or those of the modules beside it that import it, or all of the folder.
    """
    *package, name = ("chorus", *module.relative_to(ROOT).with_suffix("").parts)
    folder = TESTS / module.relative_to(ROOT).parent
    own = re.compile(rf"from {'.'.join([*package, name])} import |from {'.'.join(package)} import .*\b{name}\b")
    found = [path for path in TESTS.rglob("test_*.py") if own.search(path.read_text("utf-8"))]
    if near := [path for path in found if path.is_relative_to(folder)]:
        return near
    relative = re.compile(rf"from \.[\w.]*\b{name} import |from \. import .*\b{name}\b")
    users = (path for path in module.parent.glob("*.py") if relative.search(path.read_text("utf-8")))
    found = found or [test for user in users for test in named_tests(user)]
    return found or [path for near in (folder, folder.parent) for path in near.glob("test_*.py")]


def changed_since(base: str) -> list[str]:
    """Paths of files that differ from where the checked-out branch left `base`, and of new ones."""

    def git(*command: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True).stdout

    return [
        *git("diff", "--name-only", git("merge-base", base, "HEAD").strip()).splitlines(),
        *git("ls-files", "--others", "--exclude-standard").splitlines(),
    ]


def main(argv: list[str] | None = None) -> int:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--since", default="main", help="branch or commit (main)")
    command.add_argument("files", nargs="*", help="files instead of those that differ")
    arguments = command.parse_args(argv)
    changed = arguments.files or changed_since(arguments.since)
    print(*(path.relative_to(ROOT) for path in affected(changed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
