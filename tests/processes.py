"""Processes that tests start: whether they still run, and their use of the machine."""

from __future__ import annotations

import os
import re
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
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def runs(pid: str) -> bool:
    """True if a process has not ended; one that has, and that nobody has waited for, does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def rss(pid: int) -> int:
    """Bytes resident."""
    return _status(pid, "VmRSS")


def peak(pid: int) -> int:
    """Most bytes resident since `forget_peak`."""
    return _status(pid, "VmHWM")


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status(pid: int, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def num_threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def descriptors(pid: int) -> list[str]:
    """Targets of a process's open descriptors, such as `socket:[4711]`."""
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(descriptor))
        except OSError:
            continue  # closed meanwhile
    return links
