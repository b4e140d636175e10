"""Plants faults in the program, one at a time, and reports which of them its tests find: `python -m tests.mutations`.

A fault is a small change of one line: another comparison, operator or number, a dropped `not`, a branch that is never
taken, a call or a `raise` left out. The date draws the lines, of functions that Python runs. The tests that a module's
docstring names run on a copy of the repository; the one that finds a fault must pass without it.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .affected import ROOT, affected

PACKAGES = ("core", "memory", "ops")

#: Calls that only report, which no test need miss.
REPORTS = re.compile(r"(_?log|_?logger|logging|warnings)\.")

#: Expressions that raise when they are computed: a fault that all tests find which run the line.
RAISES = "(1 // 0)"

PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)]
PAIRS.append((ast.In, ast.NotIn))  # codespell:ignore notin
COMPARISONS = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}


PYTEST = ("-m", "pytest", "-q", "-x", "-n0", "-pno:cacheprovider", "--tb=no", "-rfE", "-mnot slow and not triton")
"""Command that runs tests up to the first that fails, and prints its name."""


@dataclass(frozen=True)
class Fault:
    """Other text in place of a module's characters from `start` to `end`."""

    path: Path
    line: int
    start: int
    end: int
    text: str

    def changed(self, text: str | None = None) -> str:
        """The module's source with the fault, or with another text there."""
        source = self.path.read_text("utf-8")
        return source[: self.start] + (self.text if text is None else text) + source[self.end :]

    def __str__(self) -> str:
        was = " ".join(self.path.read_text("utf-8")[self.start : self.end].split())
        return f"{self.path.relative_to(ROOT)}:{self.line}  {was}  →  {self.text}"


def faults_of(path: Path) -> list[Fault]:
    """All faults that can be planted in the functions of a module, by lines."""
    source = path.read_text("utf-8")
    lines = source.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]

    def place(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found = []
    for node, text in _changes(ast.parse(source), inside=False):
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
        found.append(Fault(path, node.lineno, start, end, text))
    return sorted(found, key=lambda fault: (fault.line, fault.start, fault.text))


def _changes(node: ast.AST, inside: bool) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield nodes, and texts that replace them. inside: `node` is in a function."""
    if inside:
        if isinstance(node, ast.expr):
            yield from ((node, f"({ast.unparse(other)})") for other in _others(node))
        elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and _is_needed(node.value)):
            yield node, "pass"
        elif isinstance(node, ast.If):
            yield node.test, "False"
    for child in _run_parts(node):
        yield from _changes(child, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _run_parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node that Python runs, unless they are patterns, messages or a GPU kernel's."""
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.pattern):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if not any("jit" in ast.unparse(each) for each in node.decorator_list):
            yield from node.body
    elif isinstance(node, ast.AnnAssign):
        yield from [node.value] if node.value else []
    elif not isinstance(node, ast.Expr) or _is_needed(node.value):
        yield from ast.iter_child_nodes(node)


def _is_needed(value: ast.expr) -> bool:
    return isinstance(value, ast.Call | ast.Await) and not REPORTS.match(ast.unparse(value))


def _others(node: ast.expr) -> Iterator[ast.expr]:
    """Yield what could stand in place of an expression."""
    match node:
        case ast.Compare(left, [operator], right) if type(operator) in COMPARISONS:
            yield ast.Compare(left, [COMPARISONS[type(operator)]()], right)
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(operator)](), right)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() as value):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))


def draw(number: int, seed: str, packages: Iterable[str] = PACKAGES) -> list[Fault]:
    """Faults of as many lines, each line as likely as any other, and each fault of one line, too."""
    lines: dict[tuple[Path, int], list[Fault]] = {}
    for path in sorted(path for package in packages for path in (ROOT / package).rglob("*.py")):
        for fault in faults_of(path):
            lines.setdefault((path, fault.line), []).append(fault)
    chance = random.Random(seed)
    return [chance.choice(lines[each]) for each in chance.sample(list(lines), min(number, len(lines)))]


def copy_of_the_repository(folder: Path) -> Path:
    """The files that git tracks or does not know, and libraries that are built."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    built = (str(path.relative_to(ROOT)) for path in (ROOT / "ops").rglob("*.so"))
    for name in (*filter(None, listed.split("\0")), *built):
        if (ROOT / name).is_file():
            (folder / "chorus" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "chorus" / name)
    return folder / "chorus"


class Run:
    """Tests on a copy of the repository."""

    def __init__(self, copy: Path, seconds: float) -> None:
        self._copy = copy
        self._seconds = seconds
        self._last_line = ""

    def verdict(self, fault: Fault) -> str:
        """What the tests of a fault's module say of it."""
        tests = [str(path.relative_to(ROOT)) for path in affected([str(fault.path.relative_to(ROOT))])]
        if not tests:
            return "survived: no tests are of its module"
        with self._planted(fault, fault.text):
            outcome = self._outcome(tests)
        if outcome == "":
            with self._planted(fault, RAISES):
                reached = self._outcome(tests)
            return "survived: it may change nothing" if reached else "survived: none of its tests runs the line"
        if outcome is None:
            return f"unknown: tests took more than {self._seconds:.0f} s"
        if self._outcome([outcome]) != "":
            return f"unknown: {outcome} fails without it: {self._last_line}"
        return f"found by {outcome}"

    def _planted(self, fault: Fault, text: str) -> _Planted:
        return _Planted(self._copy / fault.path.relative_to(ROOT), fault.changed(text))

    def _outcome(self, tests: list[str]) -> str | None:
        """The first test that fails, or the first file that cannot be imported; empty if all pass, and None if they
        take too long.
        """
        paths = f"{self._copy.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        process = subprocess.Popen(
            [sys.executable, *PYTEST, *tests],
            cwd=self._copy,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "CHORUS_TEST_SHARE": "6"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self._seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None
        if process.returncode in (0, 5):  # 5: no test was left of these
            return ""
        self._last_line = f"{output.splitlines()[-1:]}, code {process.returncode}"
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
        return failed[1] if failed else tests[0]


class _Planted:
    """A file with another text, for a while."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._text = text
        self._was = path.read_text("utf-8")

    def __enter__(self) -> None:
        self._path.write_text(self._text, "utf-8")

    def __exit__(self, *_: object) -> None:
        self._path.write_text(self._was, "utf-8")


def main(argv: list[str] | None = None) -> int:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--faults", type=int, default=60, help="how many (60)")
    command.add_argument("--seed", default=datetime.date.today().isoformat(), help="what draws them (the date)")
    command.add_argument("--seconds", type=float, default=300, help="time for the tests of one fault (300)")
    arguments = command.parse_args(argv)
    faults = draw(arguments.faults, arguments.seed)
    print(f"{len(faults)} faults, drawn by --seed {arguments.seed}", flush=True)
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(copy_of_the_repository(Path(folder)), arguments.seconds)
        for fault in faults:
            verdict = run.verdict(fault)
            counts[verdict.split()[0].rstrip(":")] += 1
            print(f"{fault}\n    {verdict}", flush=True)
    told = counts["found"] + counts["survived"]
    print(f"found {counts['found']} of {told} ({counts['found'] / max(told, 1):.0%}); unknown {counts['unknown']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
