"""Which files `-m` collects, by the marks that they name."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from .conftest import (
    SEED,
    SERVED,
    SHARE,
    beyond_share,
    chosen_seed,
    chosen_share,
    is_of_other_half,
    marks_of_file,
    may_match,
)

HERE = Path(__file__).parent

SLOW = "(slow and not triton) or (triton and not slow)"
"""Of `make slow`."""


@pytest.mark.parametrize(
    ("expression", "marks", "wanted"),
    [
        ("slow", {"slow"}, True),
        ("slow", {"native", "wide"}, False),
        ("not slow", {"slow"}, True),  # some tests of the file may not be
        ("native and not slow", {"slow"}, False),
        ("native and not slow", {"slow", "native"}, True),
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
        ("core/paths/test_paths.py", {"slow", "wide"}),
        ("core/executors/test_cuda_interpreted.py", {"triton", "slow"}),
        ("ops/lora/test_sgmv_triton.py", {"triton", "slow"}),
    ],
)
def test_marks_of_a_file(file, wanted):
    assert wanted <= marks_of_file(HERE / file)


def test_each_file_is_of_one_half():
    """A plain `pytest` and `pytest --served` run all files between them, each of which .ci/run calls."""
    files = [*HERE.rglob("test_*.py")]
    halves = [{path for path in files if not is_of_other_half(path, is_served=each)} for each in (False, True)]
    assert halves[0] | halves[1] == {*files}
    assert not halves[0] & halves[1]
    assert all((HERE / folder).is_dir() for folder in SERVED)
    assert HERE / "server" / "test_serve.py" in halves[1]
    assert HERE / "core" / "paths" / "test_paths.py" in halves[0]
    makefile = (HERE.parent / "Makefile").read_text()
    assert re.search(r"^rest: served ", makefile, re.MULTILINE)
    assert re.search(r"^served:.*\n\tpytest -q --served$", makefile, re.MULTILINE)


def test_a_file_without_a_mark_does_not_have_it(tmp_path):
    (tmp_path / "test_it.py").write_text("import pytest\n\npytestmark = pytest.mark.native\n")
    assert {"slow", "triton"}.isdisjoint(marks_of_file(tmp_path / "test_it.py"))


class Item:
    """As much of a collected test as `beyond_share` reads. own: the mark is on the test itself."""

    def __init__(
        self, nodeid: str, *, own: bool = False, marked: bool = True, mark: object = "wide", **params: object
    ) -> None:
        self.nodeid, self._own, self._mark = nodeid, own, mark if marked else None
        if nodeid.endswith("]"):
            self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> object | None:
        return self._mark

    def iter_markers_with_node(self, name: str) -> list[tuple[object, str]]:
        return [(self if self._own else "its module", name)]


def left_out(items: list[Item], share: int, seed: str = "") -> set[Item]:
    return cast(set[Item], beyond_share(cast(list[pytest.Item], items), share, seed))


@pytest.mark.parametrize("share", [1, 2, SHARE])
@pytest.mark.parametrize("count", [1, 2, 6, 7, 32])
def test_every_test_keeps_its_share_of_cases_and_at_least_one(count, share):
    kept = set()
    for test in (f"test_files.py::test_{name}" for name in "abcdefghijkl"):
        cases = [Item(f"{test}[{case}]") for case in range(count)]
        out = left_out(cases, share)
        left = [case for case, item in enumerate(cases) if item not in out]
        assert max(1, count // share) <= len(left) <= -(-count // share)
        kept |= {*left}
    assert len(kept) >= min(count, 2), "the same case of every test"


def test_another_commit_draws_other_cases_and_the_same_one_the_same():
    cases = [Item(f"test_files.py::test_a[{case}]") for case in range(60)]
    drawn = [frozenset(left_out(cases, SHARE, seed)) for seed in (*map(str, range(40)), "0")]
    assert drawn[0] == drawn[-1]
    assert len({*drawn}) == 40
    assert not frozenset.intersection(*drawn), "a case that no commit draws"


@pytest.mark.parametrize("seed", "abcdef")
def test_a_share_has_each_value_of_the_parameters_that_are_named(seed):
    mark = pytest.mark.wide(each=("subject", "path")).mark
    cases = [
        Item(f"f::test_a[{subject}-{path}]", mark=mark, subject=subject, path=path, kernels=kernels)
        for subject in range(20)
        for path in range(7)
        for kernels in "ab"
    ]
    for share, covers in ((2 * SHARE, 1), (SHARE, 1), (2, SHARE // 2)):
        kept = [case.callspec.params for case in cases if case not in left_out(cases, share, seed)]
        assert min(sum(each["subject"] == subject for each in kept) for subject in range(20)) >= covers
        assert min(sum(each["path"] == path for each in kept) for path in range(7)) >= covers
        assert len(kept) <= covers * (20 + 7 - 1)
    assert not left_out(cases, 1, seed)


def test_the_seed_is_the_environments_or_the_commit(monkeypatch):
    monkeypatch.setenv(SEED, "it")
    assert chosen_seed() == "it"
    monkeypatch.delenv(SEED)
    assert re.fullmatch(r"[0-9a-f]{12}|0", chosen_seed())
    monkeypatch.setenv("PATH", "")
    assert chosen_seed() == "0", "there is no git"


def test_a_single_test_is_left_out_by_its_own_mark_alone():
    items = [Item("f::test_a", own=True), Item("f::test_b"), Item("f::test_c[1]", marked=False)]
    assert left_out(items, SHARE) == {items[0]}
    assert left_out(items, 2) == left_out(items, 1) == set()


@pytest.mark.parametrize(("value", "wanted"), [(None, SHARE), ("1", 1), ("2", 2)])
def test_the_environment_sets_the_share(monkeypatch, value, wanted):
    monkeypatch.delenv("CHORUS_TEST_SHARE", raising=False)
    if value is not None:
        monkeypatch.setenv("CHORUS_TEST_SHARE", value)
    assert chosen_share() == wanted


@pytest.mark.parametrize("value", [None, "1", "4"])
def test_a_share_that_is_said_is_drawn_of_named_files_too(value):
    path = HERE / "memory/files/names/test_name_pattern.py"
    environment = {name: each for name, each in os.environ.items() if name != "CHORUS_TEST_SHARE"}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider", str(path)]
    said = subprocess.run(
        command,
        env=environment | ({} if value is None else {"CHORUS_TEST_SHARE": value}),
        check=True,
        capture_output=True,
        text=True,
    )
    assert ("deselected" in said.stdout) == (value == "4")


@pytest.mark.parametrize("value", ["0", "-2", "2.5", "half", ""])
def test_a_share_that_is_not_a_positive_integer_is_a_usage_error(monkeypatch, value):
    monkeypatch.setenv("CHORUS_TEST_SHARE", value)
    with pytest.raises(pytest.UsageError) as error:
        chosen_share()
    told = str(error.value)
    assert f"CHORUS_TEST_SHARE is {value!r}" in told
    assert "must be a positive integer" in told
    assert "unset it" in told


def test_what_levels_leave_out_runs_on_every_instruction_set_at_once():
    """A native test is one of `levels` by its parameter, which must have all that are built and this processor runs."""
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
                    found[path, function.name] = ast.unparse(
                        next(each.value for each in call.keywords if each.arg == "params")
                    )
        own = re.search(r"^LEVELS = (.*)$", text, re.MULTILINE)
        assert own is None or own[1] == "native_library.levels()", path
    assert len(found) > 5
    assert all(re.search(r"\bLEVELS\b|native_library\.levels\(\)", levels) for levels in found.values()), found
