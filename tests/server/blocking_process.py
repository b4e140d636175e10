"""`BlockingCalls` in the processes of a command: a `sitecustomize` on their path calls `install`.

After SIGUSR2 a process notes file-system calls on the threads that run event loops, in a file of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from asyncio.base_events import BaseEventLoop
from pathlib import Path

CUSTOMIZE = "from tests.server.blocking_process import install\ninstall()\n"
DIRECTORY = "TEST_BLOCKING_CALLS"
"""Variable that names the directory of the files."""


def install() -> None:
    """Watch this process from SIGUSR2 on."""
    directory = os.environ.get(DIRECTORY)
    if directory is None or sys.argv[:1] != ["-m"]:
        return
    loops: set[int] = set()
    run_forever = BaseEventLoop.run_forever

    def run(self: BaseEventLoop) -> None:
        loops.add(threading.get_ident())
        try:
            run_forever(self)
        finally:
            loops.discard(threading.get_ident())

    BaseEventLoop.run_forever = run
    signal.signal(signal.SIGUSR2, lambda *_: _begin(Path(directory), loops))


def _begin(directory: Path, loops: set[int]) -> None:
    import pytest

    from tests.server.blocking_calls import BlockingCalls, begin

    calls = BlockingCalls()
    calls.loops = loops
    file = os.open(directory / f"{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{' '.join(sys.argv)}\n".encode())
    calls.tell = lambda text: os.write(file, f"{text}\n\n".encode())
    begin(calls, pytest.MonkeyPatch())
