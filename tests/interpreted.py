"""Runs `test_*_interpreted.py` in processes that interpret Triton's kernels.

A process that interprets can't compile, and the other way round, so these modules are never imported by a process whose
TRITON_INTERPRET is not 1. There each file is one test, which runs the file in a process of its own, or two: one of
those that are marked `slow`. `-k` finds it by the names of the tests in it, and that process then runs those alone.
`make slow` interprets from the beginning: two processes share the quick tests of all these files.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Collection, Iterable, Sequence

import pytest

from .processes import PYTEST, run_python

SECONDS = 1200
NOTHING_SELECTED = pytest.ExitCode.NO_TESTS_COLLECTED


def is_interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


class InterpretedFile(pytest.File):
    """A file of tests that another process runs."""

    def collect(self) -> Iterable[InterpretedTests]:
        tree = ast.parse(self.path.read_bytes())
        tests = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test")]
        marks, slow = _module_marks(tree), [test.name for test in tests if _is_slow(test)]
        if quick := [test.name for test in tests if test.name not in slow]:
            yield InterpretedTests.from_parent(self, name="interpreted", tests=quick, marks=marks)
        if slow:
            yield InterpretedTests.from_parent(self, name="interpreted_slow", tests=slow, marks={*marks, "slow"})


class InterpretedTests(pytest.Item):
    """Tests of one file, or those of them that `-k` selects."""

    def __init__(self, *, tests: Sequence[str], marks: Collection[str], **options) -> None:
        super().__init__(**options)
        self._tests = tests
        self.extra_keyword_matches.update(tests)
        self.add_marker(pytest.mark.timeout(SECONDS))
        for name in sorted({*marks, "triton"}):
            self.add_marker(name)

    def runtest(self) -> None:
        keyword = str(self.config.getoption("keyword") or "")
        tests = [f"{self.path}::{name}" for name in self._tests]
        result = run_python(*PYTEST, *tests, "-k", keyword, TRITON_INTERPRET="1")
        if result.returncode == NOTHING_SELECTED and keyword:
            pytest.skip(f"no test of the file matches {keyword!r}")
        assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]

    def reportinfo(self) -> tuple[os.PathLike[str], int, str]:
        return self.path, 0, self.name


def _is_slow(test: ast.FunctionDef) -> bool:
    return any(ast.unparse(each) == "pytest.mark.slow" for each in test.decorator_list)


def _module_marks(tree: ast.Module) -> set[str]:
    """Names of the marks in a module's `pytestmark`, without those that skip."""
    found = {
        node.attr
        for assignment in tree.body
        if isinstance(assignment, ast.Assign) and ast.unparse(assignment.targets[0]) == "pytestmark"
        for node in ast.walk(assignment.value)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark"
    }
    return found - {"skip", "skipif"}
