"""Servers that a measurement launches end with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import IO, cast

import pytest

from tests.processes import runs

WAIT = 120

LAUNCHES = """
import time
from chorus.perf.serving.server_process import launched
with launched(["--threads", "1"]) as server:
    print(server.pid, flush=True)
    time.sleep(1e6)
"""


@pytest.mark.wide
def test_a_command_that_is_killed_leaves_no_server():
    with subprocess.Popen([sys.executable, "-c", LAUNCHES], stdout=subprocess.PIPE, text=True) as command:
        pid = cast(IO[str], command.stdout).readline().strip()
        assert runs(pid)
        command.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + WAIT
    while runs(pid):
        assert time.monotonic() < deadline, f"server {pid} outlives the command that launched it"
        time.sleep(0.05)
