"""Python commands that interpret kernels on a processor that the other tests leave idle: begun with the session, one
after another, and waited for by the test that names them with the mark `beside`.

Kernels of a process that interprets can't be compiled, so each is a process of its own, and takes a minute or more.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


class Beside:
    """Results of commands by their arguments. A daemon thread waits for them: a server that ends counts the others."""

    def __init__(self) -> None:
        self._results: dict[tuple[str, ...], Future[subprocess.CompletedProcess[str]]] = {}
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False

    def begin(self, commands: Iterable[tuple[str, ...]]) -> None:
        """Run commands, one after another; once at most."""
        self._results = {command: Future() for command in commands}
        if self._results:
            threading.Thread(target=self._work, name="beside", daemon=True).start()

    def result(self, command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        """Wait for a command."""
        return self._results[command].result()

    def close(self) -> None:
        """End what is still running; whoever would wait for it has ended."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()

    def _work(self) -> None:
        for command, future in self._results.items():
            if self._is_closed:
                return
            try:
                future.set_result(self._run(command))
            except OSError as error:
                future.set_exception(error)

    def _run(self, command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        self._process = process = _python(*command, TRITON_INTERPRET="1")
        if self._is_closed:
            process.kill()
        return subprocess.CompletedProcess(command, *_outcome(process))


def run_python(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command that interprets kernels only if `environment` says so."""
    return subprocess.CompletedProcess(command, *_outcome(_python(*command, **environment)))


def _python(*command: str, **environment: str) -> subprocess.Popen[str]:
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *command],
        env={**plain, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate()
    return process.returncode, stdout, stderr


KEY = pytest.StashKey[Beside]()


def begin(session: pytest.Session) -> None:
    """Begin the commands of the tests that a session has collected."""
    session.config.stash[KEY] = beside = Beside()
    if session.config.option.collectonly or find_spec("triton") is None:
        return
    marks = [item.get_closest_marker("beside") for item in session.items]
    beside.begin([mark.args for mark in marks if mark is not None])
