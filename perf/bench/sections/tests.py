"""The tests that need a GPU, run by pytest. One that is skipped counts as one that failed.

Every file is a process of its own, since one illegal access spoils a process for all that follows. What pytest says
goes to the section's log as it comes, and a test that hangs is ended with the stacks of its threads.
"""

from __future__ import annotations

import subprocess
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ...report.table import Table
from ..context import Context
from .registry import rows_table

_ROOT = Path(__file__).resolve().parents[3]
_MARK = "pytest.mark." + "gpu"
_SLOWEST = 5


class TestsFailed(AssertionError):
    """Not every test passed."""


def command(report: Path, file: str, smoke: bool) -> list[str]:
    """Run a file's GPU tests, on a CPU all of its tests. A test that hangs in a kernel can't be interrupted, so its
    process ends.
    """
    return [
        sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--timeout=60", "--timeout-method=thread",
        f"--junitxml={report}", file, *(() if smoke else ("-m", "gpu")),
    ]  # fmt: skip


def chosen_files(smoke: bool) -> list[str]:
    """Files without a GPU test are left out: they may import what a GPU machine lacks. On a CPU a quick file runs, to
    try the harness.
    """
    return ["tests/graphs/test_buckets.py"] if smoke else files_with_gpu_tests(_ROOT / "tests")


def files_with_gpu_tests(folder: Path) -> list[str]:
    """Test files below `folder` that use the mark `gpu`. TestsFailed when there is none."""
    found = [str(path) for path in sorted(folder.rglob("test_*.py")) if _MARK in path.read_text("utf-8")]
    if not found:
        raise TestsFailed(f"no test below {folder} has the mark gpu")
    return found


def run(context: Context) -> dict[str, Any]:
    """Counts of passed, failed and skipped tests. Raises TestsFailed unless there are tests and all passed."""
    found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "not_passed": [], "slowest": []}
    for file in chosen_files(context.smoke):
        for name, value in _run_file(file, context).items():
            found[name] += value
        context.save(found)
    found["slowest"] = sorted(found["slowest"], key=itemgetter("seconds"), reverse=True)[:_SLOWEST]
    if found["failed"] or found["skipped"] or not found["passed"]:
        names = "\n".join(found["not_passed"]) or "no test was found"
        raise TestsFailed(f"{_summary(found)}; not passed:\n{names}\nthe log has what pytest said")
    return found


def _run_file(file: str, context: Context) -> dict[str, Any]:
    """A file's counts; a process that ends without a report, as one that hung does, is a failure of the file."""
    report = context.store.directory / "tests.xml"
    report.unlink(missing_ok=True)
    done = subprocess.run(command(report, file, context.smoke), cwd=_ROOT, stdout=sys.stderr, check=False)
    if not report.is_file():
        cause = f"failed {file}: pytest ended with {done.returncode} and no report"
        return {"failed": 1, "not_passed": [cause]}
    found = counts(ElementTree.parse(report).getroot())
    report.unlink()
    return found


def counts(root: ElementTree.Element) -> dict[str, Any]:
    """Counts of a JUnit report. Errors count as failures."""
    found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "not_passed": [], "slowest": []}
    for case in root.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[outcome] += 1
        found["not_passed"] += [f"{outcome} {name}"] * (outcome != "passed")
        found["slowest"].append({"test": name, "seconds": float(case.get("time") or 0.0)})
    found["slowest"] = sorted(found["slowest"], key=itemgetter("seconds"), reverse=True)[:_SLOWEST]
    return found


def tables(values: dict[str, Any]) -> list[Table]:
    return [rows_table("GPU tests", {name: name for name in ("passed", "failed", "skipped")}, [values])]


def _summary(found: dict[str, Any]) -> str:
    return f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped (a skip is a failure)"
