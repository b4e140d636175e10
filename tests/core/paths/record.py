"""Asks transformers + peft all that the table of paths asks: `python -m tests.core.paths.record`.

A part of `make references`, since a run of the tests asks only what the cells that it draws need.
"""

from __future__ import annotations

import sys
from multiprocessing import get_context
from typing import Any

from chorus.perf.report.command import parser

from ...conftest import quiet
from .asked import ANSWERS, CROWD, LONG, PROMPTS
from .subjects import SUBJECTS


class NoDriver:
    """Takes requests for no engine."""

    def add(self, *_: Any, **__: Any) -> None:
        """Forget a request."""


@quiet()
def record(name: str) -> str:
    """Ask about one subject; return its name."""
    subject = SUBJECTS[name]
    for asked in (PROMPTS, ANSWERS, CROWD, LONG):
        asked.add(subject, NoDriver())
    vars(subject).pop("it")  # models of all would not fit into memory
    return name


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--jobs", type=int, default=2, help="processes")
    jobs = command.parse_args(argv).jobs
    with get_context("spawn").Pool(jobs, maxtasksperchild=20) as pool:
        for name in pool.imap(record, SUBJECTS):
            print(name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
