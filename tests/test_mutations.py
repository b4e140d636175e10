"""A mutation run plants faults that change the program, drawn by a seed, and names the test that finds each."""

from __future__ import annotations

import ast
import subprocess

import pytest

from . import mutations
from .mutations import Run, copy_of_the_repository, draw, faults_of

MODULE = '''"""Numbers. Tests: tests/core/test_numbers.py"""
import logging

LIMIT = 3


def jit(function):
    return function


def clipped(number: int, most: int = LIMIT, *, by: str = f"{LIMIT + 1}") -> int:
    """At most `most`."""
    if number < most and not number == 7:
        logging.info("clipped %d", 1)
        return number + 1
    if number == 100:
        return number - 0
    while number < 0 and most > 1000:
        number = 5
    numbers = [é for é in "é" if é != most]; numbers.clear()
    raise ValueError(f"{number - 1}")


@jit
def kernel(number):
    return number + 1
'''
TESTS = """
import pytest
from chorus.core.numbers import clipped

def test_clipped():
    assert clipped(1) == 2
    with pytest.raises(ValueError):
        clipped(4)
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A repository with one module and its tests."""
    root = tmp_path / "root"
    for name, text in {
        "core/numbers.py": MODULE,
        "__init__.py": "",
        "core/__init__.py": "",
        "tests/core/test_numbers.py": TESTS,
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--import-mode=importlib'",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    monkeypatch.setattr(mutations, "ROOT", root)
    monkeypatch.setattr(mutations, "affected", lambda _: [root / "tests/core/test_numbers.py"])
    return root


def test_a_fault_changes_what_python_runs_of_a_function_and_nothing_else(tree):
    module = tree / "core/numbers.py"
    assert [str(fault).partition("  ")[2] for fault in faults_of(module)] == [
        "number < most and not number == 7  →  (number < most or not number == 7)",
        "number < most  →  (number <= most)",
        "number < most and not number == 7  →  False",
        "not number == 7  →  (number == 7)",
        "number == 7  →  (number != 7)",
        "7  →  (6)",
        "7  →  (8)",
        "number + 1  →  (number - 1)",
        "1  →  (0)",
        "1  →  (2)",
        "number == 100  →  (number != 100)",
        "number == 100  →  False",
        "100  →  (101)",
        "100  →  (99)",
        "number - 0  →  (number + 0)",
        "0  →  (-1)",
        "0  →  (1)",
        "number < 0 and most > 1000  →  (number < 0 or most > 1000)",
        "number < 0  →  (number <= 0)",
        "0  →  (-1)",
        "0  →  (1)",
        "most > 1000  →  (most >= 1000)",
        "1000  →  (1001)",
        "1000  →  (999)",
        "5  →  (4)",
        "5  →  (6)",
        "é != most  →  (é == most)",
        "numbers.clear()  →  pass",
        'raise ValueError(f"{number - 1}")  →  pass',
    ]
    for fault in faults_of(module):
        assert ast.dump(ast.parse(fault.changed())) != ast.dump(ast.parse(MODULE))
        ast.parse(fault.changed(mutations.RAISES))


def test_a_seed_draws_faults_of_different_lines():
    faults = draw(40, "2026-01-01", ["graphs"])
    assert faults == draw(40, "2026-01-01", ["graphs"]) != draw(40, "2026-01-02", ["graphs"])
    assert len({(fault.path, fault.line) for fault in faults}) == 40


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ("number + 1  →  (number - 1)", "found by tests/core/test_numbers.py::test_clipped"),
        ("5  →  (4)", "survived: none of its tests runs the line"),
        ("number < 0 and most > 1000  →  (number < 0 or most > 1000)", "survived: it may change nothing"),
    ],
)
def test_what_tests_say_of_a_fault(tree, tmp_path, fault, verdict):
    [planted] = [each for each in faults_of(tree / "core/numbers.py") if str(each).endswith(f"  {fault}")]
    copy = copy_of_the_repository(tmp_path / "copy")
    assert Run(copy, 60).verdict(planted) == verdict
    assert (copy / "core/numbers.py").read_text() == MODULE
