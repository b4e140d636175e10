"""A contender in a process of its own: the side that measures, and, as a command, the side that is measured.

`python -m chorus.perf.contenders.process MODULE:CLASS CPUS` answers calls, one JSON line each: `{"do": "run", …}` calls
that method with the other fields; the answer is `{"result": …}` or `{"error": …}`. What the engine prints goes to
standard error.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import threading
import traceback
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
                [str(python), "-u", "-m", "chorus.perf.contenders.process", target, ",".join(map(str, cpus))],
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


def main(target: str, cpus: str) -> None:
    os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})  # before any library counts them
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    module, _, name = target.partition(":")
    served = getattr(importlib.import_module(module), name)()
    for line in sys.stdin:
        request = json.loads(line)
        method = request.pop("do")
        print(json.dumps(_answer(served, method, request)), file=answers)
        if method == "close":
            break


def _answer(served: Any, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
    gc.collect()
    try:
        return {"result": getattr(served, method)(**arguments)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(*sys.argv[1:])
