"""A server of our own, started for a load and stopped after it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .client import ServerError

_LISTENING = re.compile(r"listening on (http\S+)")
_STOP_SECONDS = 30


@contextmanager
def launched(flags: Sequence[str]) -> Iterator[str]:
    """`chorus serve` on a free port in a process of its own; gives its URL. Raises ServerError if it does not start."""
    command = [sys.executable, "-m", f"{__package__.split('.')[0]}.server", "serve", "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        tail: deque[str] = deque(maxlen=20)
        try:
            yield _url(process, tail)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)


def _url(process: subprocess.Popen[str], tail: deque[str]) -> str:
    """Read the server's log until it names its address, and go on reading it, so that it is never held up."""
    for line in process.stderr:
        tail.append(line)
        if found := _LISTENING.search(line):
            threading.Thread(target=tail.extend, args=(process.stderr,), daemon=True).start()
            return found[1]
    raise ServerError(f"chorus serve ended with {process.wait()} before it listened:\n{''.join(tail)}")
