"""The tests that need a GPU, run by pytest in a process of its own. One that is skipped counts as one that failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ..context import Context
from ..table import Table

_ROOT = Path(__file__).resolve().parents[3]
_MARK = "pytest.mark." + "gpu"


class TestsFailed(AssertionError):
    """Not every test passed."""


def command(report: Path, smoke: bool) -> list[str]:
    """Files without a GPU test are left out: they may import what a GPU machine lacks. On a CPU a few quick tests run,
    to try the harness."""
    chosen = ["tests/graphs/test_buckets.py"] if smoke else [*files_with_gpu_tests(_ROOT / "tests"), "-m", "gpu"]
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *chosen]


def files_with_gpu_tests(folder: Path) -> list[str]:
    """Test files below `folder` that use the mark `gpu`. TestsFailed when there is none."""
    found = [str(path) for path in sorted(folder.rglob("test_*.py")) if _MARK in path.read_text("utf-8")]
    if not found:
        raise TestsFailed(f"no test below {folder} has the mark gpu")
    return found


def run(context: Context) -> dict[str, Any]:
    """Counts of passed, failed and skipped tests. Raises TestsFailed unless there are tests and all passed."""
    report = context.store.directory / "tests.xml"
    report.unlink(missing_ok=True)
    done = subprocess.run(command(report, context.smoke), cwd=_ROOT, capture_output=True, text=True, check=False)
    if not report.is_file():
        raise TestsFailed(f"pytest ended with {done.returncode} and no report:\n{done.stdout}\n{done.stderr}")
    found = counts(ElementTree.parse(report).getroot())
    context.say(done.stdout)
    if found["failed"] or found["skipped"] or not found["passed"]:
        names = "\n".join(found["not_passed"]) or "no test was found"
        raise TestsFailed(f"{_summary(found)}; not passed:\n{names}\n\n{done.stdout[-6000:]}")
    return found


def counts(root: ElementTree.Element) -> dict[str, Any]:
    """What a JUnit report says. Errors count as failures."""
    passed = failed = skipped = 0
    not_passed, slowest = [], []
    for case in root.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed += 1
            not_passed.append(f"failed {name}")
        elif "skipped" in kinds:
            skipped += 1
            not_passed.append(f"skipped {name}")
        else:
            passed += 1
        slowest.append((float(case.get("time") or 0.0), name))
    return {
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
        "not_passed": not_passed,
        "slowest": [{"test": name, "seconds": seconds} for seconds, name in sorted(slowest, reverse=True)[:5]],
    }


def tables(values: dict[str, Any]) -> list[Table]:
    table = Table("GPU tests", ["passed", "failed", "skipped"])
    table.add(values["passed"], values["failed"], values["skipped"])
    return [table]


def _summary(found: dict[str, Any]) -> str:
    return f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped (a skip is a failure)"
