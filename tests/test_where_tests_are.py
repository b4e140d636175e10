"""A newcomer finds the tests of a module: by its name, or by a line in its docstring that names them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("core", "graphs", "memory", "ops", "perf", "server")

#: Lines of a module that may go without.
LINES = 120


@pytest.mark.parametrize("package", PACKAGES)
def test_every_longer_module_tells_its_tests(package):
    untold = []
    for path in sorted((ROOT / package).rglob("*.py")):
        text, module = path.read_text("utf-8"), path.relative_to(ROOT)
        docstring = ast.get_docstring(ast.parse(text)) or ""
        assert docstring.count("Tests:") < 2, f"{module}: its docstring tells its tests twice"
        named = re.findall(r"tests/[\w/]+", docstring.partition("Tests:")[2])
        assert all((ROOT / each).is_dir() or (ROOT / f"{each}.py").is_file() for each in named), f"{module}: {named}"
        if (
            text.count("\n") > LINES
            and not named
            and not (ROOT / "tests" / module.parent / f"test_{path.name}").exists()
        ):
            untold.append(str(module))
    assert not untold, "add `Tests: tests/….py` to their docstrings"
