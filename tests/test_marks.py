"""Which files `-m` collects, by the marks that they name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from .conftest import marks_of_file, may_match

HERE = Path(__file__).parent

SLOW = "(slow and not triton) or (triton and not slow and not sample)"
"""Of `make slow`."""


@pytest.mark.parametrize(
    ("expression", "marks", "wanted"),
    [
        ("slow", {"slow"}, True),
        ("slow", {"native", "long"}, False),
        ("not slow", {"slow"}, True),  # some tests of the file may not be
        ("numerics and not slow", {"slow"}, False),
        ("numerics and not slow", {"slow", "numerics"}, True),
        (SLOW, {"triton"}, True),
        (SLOW, {"native"}, False),
        ("slow and triton", {"slow"}, False),
    ],
)
def test_a_file_is_collected_if_a_test_may_match(expression, marks, wanted):
    assert may_match(expression, marks) == wanted


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("core/test_families.py", {"numerics", "native", "slow"}),  # `native` by the kernels of a case
        ("core/executors/test_cuda_interpreted.py", {"triton", "long", "slow"}),
        ("ops/test_sgmv_triton.py", {"triton", "slow"}),
    ],
)
def test_marks_of_a_file(file, wanted):
    assert wanted <= marks_of_file(HERE / file)


def test_a_file_without_a_mark_does_not_have_it(tmp_path):
    (tmp_path / "test_it.py").write_text("import pytest\n\npytestmark = pytest.mark.numerics\n")
    assert {"slow", "triton"}.isdisjoint(marks_of_file(tmp_path / "test_it.py"))


def test_levels_leave_out_single_tests_only():
    """A new test of native code runs on every instruction set: none is `once` by its module or its class."""
    for path in HERE.rglob("test_*.py"):
        if "pytest.mark.once" not in path.read_text():
            continue
        tree = ast.parse(path.read_bytes())
        tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        once = [test for test in tests if "pytest.mark.once" in map(ast.unparse, test.decorator_list)]
        uses = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "once"]
        assert len(uses) == len(once) < len(tests), path


def test_what_levels_leave_out_runs_on_every_instruction_set_at_once():
    """A native test is one of `levels` by its parameter, which must have all that this processor can run."""
    found = {}
    for path in HERE.rglob("test_*.py"):
        text = path.read_text()
        if "pytest.mark.native" not in text:
            continue
        tree = ast.parse(text)
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for call in (each for each in function.decorator_list if isinstance(each, ast.Call)):
                kind, arguments = ast.unparse(call.func), list(map(ast.unparse, call.args))
                if kind == "pytest.mark.parametrize" and arguments[0] == "'level'":
                    found[path, function.name] = arguments[1]
                if kind == "pytest.fixture" and function.name == "level":
                    found[path, function.name] = ast.unparse(next(each.value for each in call.keywords))
        own = re.search(r"^LEVELS = (.*)$", text, re.MULTILINE)
        assert own is None or own[1] == "native_library.levels()", path
    assert len(found) > 5
    assert all(levels == "LEVELS" or "native_library.levels()" in levels for levels in found.values()), found
