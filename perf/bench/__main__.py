"""`python -m chorus.perf.bench`: run the sections without results, then show all results.

Every section runs in its own process and writes its own file, row by row. So a section that fails or hangs affects no
other, and a row that fails affects no other row. The last line is one JSON object. The exit code is not zero while a
requested section has failed or is missing.

Tests: tests/perf/bench/test_main.py
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from ...memory.host.child_python import python_command
from ..report.command import conclude, say
from .environment import describe, interpreter_obstacle
from .options import Options
from .report import REPORT, digest, report
from .sections.registry import SECTIONS, section
from .store import DONE, RESULT, RUNNING, OtherSettings, ResultStore

#: Least time left for which a section is started.
_LEAST_SECONDS = 15.0
_LOG_TAIL = 6000

#: Format of the engine's log in a section's log: milliseconds since the start, the logger, the message.
_LINE = "%(relativeCreated)d ms %(name)s: %(message)s"


def main(argv: list[str] | None = None, clock: Callable[[], float] = time.monotonic) -> int:
    options = Options.parse(argv)
    store = options.store()
    if options.worker is not None:
        return 0 if run_section(options.worker, options) else 1
    if options.smoke and (obstacle := interpreter_obstacle()) is not None:
        print(obstacle, file=sys.stderr)
        return 2
    try:
        store.check(SECTIONS)
    except OtherSettings as error:
        print(error, file=sys.stderr)
        return 2
    environment = describe(options.device, opened=False)
    deadline = clock() + options.budget
    for name in options.sections:
        if store.status(name) == DONE:
            say(f"{name}: there already")
            continue
        left = deadline - clock()
        if left < _LEAST_SECONDS:
            say(f"{name}: no time left; call again")
            continue
        timeout = min(options.section_timeout, left)
        _run(name, options, store, environment, None if math.isinf(timeout) else timeout)
    combined = store.combine([*dict.fromkeys([*options.known, *options.sections])], environment)
    report(combined, options.out / REPORT)
    lacking = {*options.sections} & {*combined["failed"], *combined["missing"]}
    return conclude(digest(combined, store.directory / RESULT), not lacking)


def _run(name: str, options: Options, store: ResultStore, environment: dict, timeout: float | None) -> None:
    """Run a section's process, with its output in a log; record how it ended if it could not do so itself."""
    say(f"{name}: {SECTIONS[name]} …")
    store.forget(name)
    log = options.out / f"{name}.log"
    command, environ = worker_command(name, options), {**os.environ, "PYTHONUNBUFFERED": "1"}  # it may be killed
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        try:
            done = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=timeout, check=False, env=environ
            )
            reason = f"the process ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"not done after {timeout:.0f} s"
    seconds = time.monotonic() - began
    if store.status(name) in (None, RUNNING):
        said = log.read_text("utf-8", errors="replace")[-_LOG_TAIL:]
        store.write(name, seconds, environment, error=f"{reason}\n{said}")
    say(f"{name}: {'done' if store.status(name) == DONE else 'FAILED, see ' + str(log)} in {seconds:.0f} s")


def run_section(name: str, options: Options) -> bool:
    """Run a section in this process and write its file; return whether it succeeded."""
    if options.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    logging.basicConfig(format=_LINE)
    logging.getLogger(str(__package__).partition(".")[0]).setLevel(logging.INFO)
    environment = describe(options.device, opened=False)
    store = options.store()
    began = time.perf_counter()

    def save(found: dict[str, Any]) -> None:
        store.save(name, time.perf_counter() - began, environment, found)

    try:
        context = options.context(save)
        environment = describe(options.device)
        values = section(name).run(context)
    except Exception:
        store.write(name, time.perf_counter() - began, environment, error=traceback.format_exc())
        traceback.print_exc()
        return False
    outcome = {"values": values}
    if lost := values.get("not_measured"):
        outcome["error"] = f"{len(lost)} rows were not measured; the first: {lost[0]['case']}: {lost[0]['why']}"
    store.write(name, time.perf_counter() - began, environment, **outcome)
    return not lost


def worker_command(name: str, options: Options) -> list[str]:
    return python_command(str(__package__), *options.given, "--worker", name)


if __name__ == "__main__":
    sys.exit(main())
