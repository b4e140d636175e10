"""A server process that is started for a measurement and stopped after it."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from ...memory.host.child_python import python_command
from ..bench.machine import family, need_psutil
from .errors import LoadError

#: The log line with the address, for chorus, llama.cpp and vLLM.
_LISTENING = re.compile(r"(?:listening|server(?: \d+)?) on (http\S+)")
_STOP_SECONDS = 60
_PR_SET_PDEATHSIG = 1


class LaunchedServer:
    """A server in its own process: its address and its resource use."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """Wait until it listens, and keep reading its log, so it never blocks. Raises LoadError."""
        self.process, self.pid = process, process.pid
        self.log_bytes = 0
        self._tail: deque[str] = deque(maxlen=20)
        for line in self._log():
            if found := _LISTENING.search(line):
                self.url = found[1]
                self._reader = threading.Thread(target=deque, args=(self._log(), 0), daemon=True)
                self._reader.start()
                break
        else:
            text = "".join(self._tail)
            raise LoadError(f"the server ended with {process.wait()} before it listened:\n{text}")
        where = urlsplit(self.url)
        self.address = str(where.hostname), int(where.port or 0)

    def _log(self) -> Iterator[str]:
        with suppress(ValueError):  # it was closed meanwhile
            for line in self.process.stdout or ():
                self._tail.append(line)
                self.log_bytes += len(line)
                yield line

    def children(self, word: str) -> list[int]:
        """Process ids of it and of its descendants with a word in their command line, sorted."""
        psutil, found = need_psutil(), []
        for process in family([self.pid]):
            with suppress(psutil.NoSuchProcess):  # zombies have no command line
                if word in process.cmdline():
                    found.append(process.pid)
        return sorted(found)

    def stop(self) -> int:
        """Ask it to end and read the rest of its log; return its exit code."""
        code = stop(self.process)
        self._reader.join()
        return code


def stop(process: subprocess.Popen[str]) -> int:
    """Ask a server to end, unless it has; return its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


@contextmanager
def launched(
    flags: Sequence[str], descriptors: int | None = None, command: Sequence[str] = ("serve",)
) -> Iterator[LaunchedServer]:
    """`chorus serve`, or another command, on a free port. See `started`."""
    words = python_command(f"{str(__package__).split('.')[0]}.server", *command, "--port", "0", *flags)
    with started(words, descriptors=descriptors) as server:
        yield server


@contextmanager
def started(
    words: Sequence[str], environment: Mapping[str, str] | None = None, descriptors: int | None = None
) -> Iterator[LaunchedServer]:
    """A server by its command. It gets SIGTERM when this thread ends for any reason. Raises LoadError if it does not
    start.

    descriptors: most that it may have open.
    """
    libc, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before prctl was called
            os.kill(os.getpid(), signal.SIGTERM)
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, **(environment or {})},
        preexec_fn=prepare,
    ) as process:
        try:
            yield LaunchedServer(process)
        finally:
            stop(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
