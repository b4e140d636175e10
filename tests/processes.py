"""Python processes of their own, for kernels that are interpreted: a process that interprets can't compile any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

PYTEST = ("-m", "pytest", "-q", "--timeout=0", "-p", "no:cacheprovider")
"""Command that runs the tests of the files that follow."""


def run_python(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command on one processor; it interprets kernels only if `environment` says so."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env={**plain, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
