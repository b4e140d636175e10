"""Ranks as threads of the test's process, in place of processes, which take seconds to begin."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from chorus.core.executors.rank import serve_messages


class ThreadProcess:
    """Runs `python -m chorus.core.executors.rank` on a thread, with the part of `subprocess.Popen` that ranks use."""

    stdin = None

    def __init__(self, command: Sequence[str], pass_fds: Sequence[int], **options: Any) -> None:
        fds = [os.dup(fd) for fd in pass_fds]
        self._socket = socket.socket(fileno=os.dup(fds[0]))
        self._status: int | None = None
        self._thread = threading.Thread(target=self._run, args=fds, daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._status is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return self._status

    def kill(self) -> None:
        """End the rank before its next message."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _run(self, link_fd: int, memory_fd: int) -> None:
        status = 1
        try:
            with Connection(link_fd) as link:
                status = serve_messages(link, memory_fd)
        except (EOFError, OSError):
            status = 0
        except SystemExit:
            pass
        finally:
            os.close(memory_fd)
            self.kill()  # a process that ends closes all that it had
            self._status = status
