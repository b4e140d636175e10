"""A newcomer finds the tests of a module: by its name, or by a line in its docstring that names them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from .affected import PACKAGES, ROOT, TESTS, affected, named_tests

#: Lines of a module that may go without.
LINES = 120


@pytest.mark.parametrize("package", PACKAGES)
def test_every_longer_module_tells_its_tests(package):
    untold = []
    for path in sorted((ROOT / package).rglob("*.py")):
        text, module = path.read_text("utf-8"), path.relative_to(ROOT)
        docstring = ast.get_docstring(ast.parse(text)) or ""
        assert docstring.count("Tests:") < 2, f"{module}: its docstring tells its tests twice"
        known = named_tests(path)
        assert all(map(Path.exists, known)), f"{module}: {known}"
        if text.count("\n") > LINES and not known:
            untold.append(str(module))
    assert not untold, "add `Tests: tests/….py` to their docstrings"


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("core/scheduling/service.py", "core/scheduling/test_service.py"),
        ("tests/test_links.py", "test_links.py"),
        ("tests/server/failing_disk.py", "server/test_failing_disk.py"),
        ("docs/reference/glossary.md", "test_links.py"),
        ("ops/native/decoder_avx2.cpp", "ops/cpu"),
    ],
)
def test_tests_of_a_changed_file_are_found(changed, tests):
    assert TESTS / tests in affected([changed])


def test_files_that_are_gone_have_no_tests():
    assert affected(["core/gone.py", "tests/test_gone.py"]) == []


def test_a_folder_stands_for_its_files():
    found = affected(["ops/native/decoder_avx2.cpp", "tests/ops/cpu/native_bits.cpp", "tests/ops/cpu/conftest.py"])
    assert found == [TESTS / "ops" / "cpu"]
