"""A child process that is watched, and restarted with back-off when it ends.

Tests: tests/server/cluster/test_processes.py
"""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ...memory.host.child_python import python_command

log = logging.getLogger(__name__)

FIRST_BACK_OFF, LAST_BACK_OFF = 0.1, 30.0
"""Seconds until a child that ended is restarted: the first time, and after repeated ends."""

STOP_SECONDS = 5.0
"""Seconds that processes may take to end before they are killed."""

STEADY_SECONDS = 60.0
"""Seconds that a child must have run to reset the back-off."""


class Child:
    """A `chorus` command as a process, and the thread that restarts it. It ends when this process does."""

    def __init__(self, name: str, arguments: Sequence[str], ready_file: Path) -> None:
        """ready_file: a file that each of its processes writes once it serves."""
        self.name = name
        self._ready_file = ready_file
        self._written_before: int | None = None  # when an earlier process wrote it
        self.command = python_command(f"{(__package__ or 'chorus').partition('.')[0]}.server", *arguments)
        """The process's command line."""
        self._process: subprocess.Popen[bytes] | None = None
        self._trouble: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"chorus-child-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def trouble(self) -> str | None:
        """The reason why it will not run: its first process ended by itself, and never served."""
        return self._trouble

    def is_serving(self) -> bool:
        """True if its present process has begun to serve."""
        process = self._process
        return process is not None and process.poll() is None and self._has_served()

    def signal(self, number: int, pid: int | None = None) -> None:
        """Send the process a signal, if there is one. After SIGTERM it drains and is restarted.

        pid: of the intended process, in case another one has replaced it.
        """
        process = self._process
        if process is not None and pid in (None, process.pid) and process.poll() is None:
            process.send_signal(number)

    def finish(self) -> None:
        """Send SIGTERM and start no replacement; see `join`."""
        self._stopping.set()
        self.signal(signal.SIGTERM)

    def stop(self) -> None:
        """End the process at once, by closing its input, and start no replacement; see `join`."""
        self._stopping.set()
        self._close_input()

    def join(self, seconds: float) -> None:
        """Wait for the end; force it after so many seconds."""
        if not self._thread.is_alive():
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.signal(signal.SIGKILL)
            self._thread.join()

    def _run(self) -> None:
        back_off, is_first = FIRST_BACK_OFF, True
        while not self._stopping.is_set():
            began = time.monotonic()
            status = self._run_once()
            if self._stopping.is_set():
                return
            if time.monotonic() - began > STEADY_SECONDS or status == 0:
                back_off = FIRST_BACK_OFF
            if is_first and status != 0 and not self._has_served():  # the launch of a cluster then fails
                self._trouble = f"{self.name} could not start ({_how(status)}); its messages are above"
                log.warning("%s", self._trouble)
            else:
                level = logging.INFO if status == 0 else logging.WARNING  # 0: it was asked to end, and is replaced
                log.log(level, "%s ended (%s); restarting in %g s", self.name, _how(status), back_off)
            is_first = False
            self._stopping.wait(back_off)
            back_off = min(LAST_BACK_OFF, 2 * back_off)

    def _run_once(self) -> int:
        self._process, self._written_before = None, self._written()
        try:
            # its input is never written to: it ends when this process ends, for any reason
            self._process = subprocess.Popen(self.command, stdin=subprocess.PIPE, env=_environment())
        except OSError as error:
            log.error("%s can't be started: %s", self.name, error)
            return 127
        if self._stopping.is_set():
            self._close_input()
        status = self._process.wait()
        self._close_input()
        return status

    def _has_served(self) -> bool:
        """True if the latest process has begun to serve."""
        return self._written() not in (None, self._written_before)

    def _written(self) -> int | None:
        with suppress(FileNotFoundError):
            return self._ready_file.stat().st_mtime_ns
        return None

    def _close_input(self) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()


def end_with_parent() -> None:
    """End this process when its launcher ends for any reason: then its standard input, a pipe, is closed."""
    if not stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        return  # started by hand, or by a container

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(0)

    threading.Thread(target=wait, name="chorus-parent", daemon=True).start()


def _how(status: int | None) -> str:
    if status is not None and status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"


def _environment() -> dict[str, str]:
    """This process's environment, without keys: API servers get them from a file, and replicas do not use them."""
    keys = "CHORUS_API_KEY", "CHORUS_ADMIN_KEY"
    return {name: value for name, value in os.environ.items() if not name.startswith(keys)}
