"""Replicas as processes of this machine: started, watched, and started again when they end."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.cpus import available_cpus
from .replica_settings import ReplicaSettings
from .stream import new_secret

if TYPE_CHECKING:
    from ..settings import Settings

log = logging.getLogger(__name__)

FIRST_BACK_OFF, LAST_BACK_OFF = 0.1, 30.0
"""Seconds until a replica that ended is started again: at first, and after it ended again and again."""

STEADY_SECONDS = 60.0
"""Seconds that a replica must have run for the back-off to begin anew."""

STOP_SECONDS = 5.0
"""Seconds that replicas may take to end before they are killed."""


class ReplicaProcess:
    """One replica, and the thread that keeps it running. socket: where it listens."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.socket = directory / f"{name}.sock"
        self.exit_status: int | None = None
        """How its latest process ended; None while it runs."""
        self.num_starts = 0
        self._command = [
            sys.executable, "-m", "chorus.server", "replica", "--socket", str(self.socket),
            "--secret-file", str(directory / "secret"), "--settings", str(directory / "settings.json"),
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"chorus-launch-{name}", daemon=True)

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    def start(self) -> None:
        self._thread.start()

    def signal(self, number: int) -> None:
        """Send the process a signal; SIGTERM has it drain, and end once its requests have moved."""
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(number)

    def stop(self) -> None:
        """End the process and start no other; see `join`. It ends by itself when this process does."""
        self._stopping.set()
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.signal(signal.SIGKILL)
            self._thread.join()

    def _run(self) -> None:
        back_off = FIRST_BACK_OFF
        while not self._stopping.is_set():
            began = time.monotonic()
            self.socket.unlink(missing_ok=True)
            try:
                # its input is never written to: it ends with this process, however that ends
                self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, env=_environment())
            except OSError as error:
                log.error("replica %s can't be started: %s", self.name, error)
                self.exit_status = 127
            else:
                self.num_starts += 1
                self.exit_status = None
                if self._stopping.is_set():
                    self.stop()
                self.exit_status = self._process.wait()
                if self._process.stdin is not None:
                    self._process.stdin.close()
            if self._stopping.is_set():
                return
            if time.monotonic() - began > STEADY_SECONDS or self.exit_status == 0:
                back_off = FIRST_BACK_OFF
            log.warning("replica %s ended (%s); it is started again in %g s",
                        self.name, _how(self.exit_status), back_off)  # fmt: skip
            self._stopping.wait(back_off)
            back_off = min(LAST_BACK_OFF, 2 * back_off)


class ReplicaProcesses:
    """Replicas of one machine, in a directory that only this user may enter. Use as a context manager."""

    def __init__(self, count: int, settings: Settings) -> None:
        # a socket's path has at most 107 bytes, which a temporary directory elsewhere may exceed
        self.directory = Path(tempfile.mkdtemp(prefix="chorus-"))
        self.secret = new_secret(self.directory / "secret")
        replica = ReplicaSettings.of(settings)
        if replica.engine.threads is None:
            replica.engine.threads = max(1, available_cpus() // count)
        (self.directory / "settings.json").write_text(replica.model_dump_json())
        self.replicas = [ReplicaProcess(f"r{index}", self.directory) for index in range(count)]

    def start(self) -> None:
        for replica in self.replicas:
            replica.start()

    def trouble(self) -> str | None:
        """Why a replica that has never been there will not be: its first process has ended."""
        for replica in self.replicas:
            if replica.exit_status not in (None, 0) and replica.num_starts <= 1:
                return f"replica {replica.name} could not start ({_how(replica.exit_status)}); its messages are above"
        return None

    def kill(self, name: str) -> None:
        """End a replica that hangs; it is started again."""
        for replica in self.replicas:
            if replica.name == name:
                replica.signal(signal.SIGKILL)

    def stop(self) -> None:
        """End all of them, and wait for it."""
        for replica in self.replicas:
            replica.stop()
        deadline = time.monotonic() + STOP_SECONDS
        for replica in self.replicas:
            replica.join(max(0.0, deadline - time.monotonic()))
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> ReplicaProcesses:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _how(status: int | None) -> str:
    if status is not None and status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"


def _environment() -> dict[str, str]:
    """This process's, without keys: a replica has no use for them."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("CHORUS_API_KEY", "CHORUS_ADMIN"))
    }
