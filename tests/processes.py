"""Processes that tests begin, and whether they still run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

PYTEST = ("-m", "pytest", "-q", "--timeout=0", "-p", "no:cacheprovider")
"""Command that runs the tests of the files that follow."""


def run_python(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command on one processor. It interprets kernels if `environment` says so; then it can compile none."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env={**plain, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


def runs(pid: str) -> bool:
    """True if a process has not ended; one that has, and that nobody has waited for, does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
