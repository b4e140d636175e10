"""The measuring side: starts a contender's process and calls it."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_LOG_LINES = 15


class ContenderError(RuntimeError):
    """A contender's process failed; the message carries the end of its log."""


class ContenderProcess:
    """One child process. Calls block; a call that takes longer than `timeout` seconds ends the process.

    target: `module:Class` of what it serves. cpus: the processors it may use, the same for all contenders.
    """

    def __init__(
        self, target: str, python: Path, env: Mapping[str, str], cpus: Sequence[int], log: Path, timeout: float
    ) -> None:
        self._target = target
        self._log = log
        self._timeout = timeout
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [str(python), "-u", "-m", "chorus.perf.contenders.child", target, ",".join(map(str, cpus))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **env},
                text=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, method: str, **arguments: Any) -> Any:
        """Return what the contender's method returns. Raises ContenderError when it fails or the process is gone."""
        timer = threading.Timer(self._timeout, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps({"do": method, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        answer = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            raise ContenderError(f"{self._target}: {method}: {answer['error']}\n{self._tail()}")
        return answer["result"]

    def close(self) -> None:
        """End the process; asks it first, so that it can end its own children."""
        if self._process.poll() is None:
            try:
                self.call("close")
                self._process.wait(timeout=20)
            except (ContenderError, subprocess.TimeoutExpired):
                self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        with suppress(BrokenPipeError):  # the end of a call that it did not live to read
            self._process.stdin.close()

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join(f"    | {line}" for line in lines)
