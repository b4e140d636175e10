"""The end of the process: one exit for all commands, with a deadline."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from typing import NoReturn

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 4.0
"""Seconds after the grace time at which the process ends even if something hangs."""


STRAGGLER_SECONDS = 1.0
"""Seconds that threads of a finished command may take to end."""


def leave(code: int) -> NoReturn:
    """End the process after a command, at once if a thread is left, such as one that reads from a dead disk.

    The interpreter would wait for such a thread forever, or be torn down while the thread runs; C++ then calls abort().
    """
    deadline = time.monotonic() + STRAGGLER_SECONDS
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and _is_in_the_way(thread):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
    sys.exit(code)


def _is_in_the_way(thread: threading.Thread) -> bool:
    return not thread.daemon or thread.name.startswith("chorus-")


class ExitDeadline:
    """Ends the process `seconds` after the first SIGINT or SIGTERM, even if its threads hang.

    Signals arrive through a pipe that the operating system writes at once, even while the main thread is stuck in a
    call.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def start(self) -> None:
        """Call this on the main thread, the only one that may handle signals; on other threads it does nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._run, args=(reader,), name="chorus-exit", daemon=True).start()

    def _run(self, reader: int) -> None:
        while not set(os.read(reader, 64)) & {signal.SIGINT, signal.SIGTERM}:
            pass
        time.sleep(self._seconds)
        last = threading.Timer(0.2, os._exit, (0,))  # writing the log may hang, too
        last.daemon = True
        last.start()
        log.error("the server did not end by itself within %g s; it ends now", self._seconds)
        os._exit(0)
