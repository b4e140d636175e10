"""Answers that are wrong, lost or delayed by a killed replica: `python -m chorus.perf.serving.killed_replica`.

`chorus cluster up` serves the built-in model and its adapters. Clients ask questions without a pause; after a third of
the time a replica is killed (-9). An answer is wrong if it is not the one that the cluster gave before, lost if the
client gets an error or no end, and delayed if it takes longer than any of the time before.

Tests: tests/perf/serving/test_killed_replica.py
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count as numbers
from statistics import median
from typing import Any

import httpx

from ...server.demo.builtin import BUILTIN_NAME
from ...server.demo.questions import Question, skill_questions
from ..bench.machine import processor
from ..report.command import count, judge, parser, say
from ..report.table import Goal, rows_table
from .errors import LoadError
from .server_process import launched

_TIMEOUT = 300.0
QUESTIONS = 6
"""Of each skill."""


@dataclass
class Load:
    """Clients that ask without a pause. answers: for each request its begin and end (by `monotonic`), and whether the
    answer was the expected one; None if it was lost.
    """

    url: str
    questions: Sequence[Question]
    expected: Sequence[str]
    answers: list[tuple[float, float, bool | None]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    _turns: Any = field(default_factory=numbers)

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=_TIMEOUT, trust_env=False) as client:
            while not self.over.is_set():
                number = next(self._turns) % len(self.questions)
                began = time.monotonic()
                try:
                    right = _answer(client, self.questions[number]) == self.expected[number]
                except (LoadError, httpx.HTTPError):
                    right = None
                self.answers.append((began, time.monotonic(), right))


def _answer(client: httpx.Client, question: Question) -> str:
    """The text of an answer. Raises LoadError."""
    response = client.post(question.path, json=question.body())
    if response.status_code != 200:
        raise LoadError(f"{response.status_code}: {response.text:.300}")
    choice = response.json()["choices"][0]
    if choice["finish_reason"] not in ("stop", "length"):
        raise LoadError(f"an answer ended by {choice['finish_reason']}")
    return choice["text"]


def measured(replicas: int, clients: int, seconds: float, flags: Sequence[str]) -> dict[str, Any]:
    """Counts of answers, and seconds of delay."""
    questions = [one for each in skill_questions(BUILTIN_NAME, QUESTIONS, 0).values() for one in each]
    command = ("cluster", "up", "--replicas", str(replicas))
    with launched(flags, command=command) as server:
        with httpx.Client(base_url=server.url, timeout=_TIMEOUT, trust_env=False) as client:
            expected = [_answer(client, question) for question in questions]
        load = Load(server.url, questions, expected)
        with ThreadPoolExecutor(clients) as pool:
            running = [pool.submit(load.run) for _ in range(clients)]
            time.sleep(seconds / 3)
            victim = server.children("replica")[0]
            say(f"killing a replica, process {victim}")
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            time.sleep(2 * seconds / 3)
            load.over.set()
        for each in running:
            each.result()
    return judged(load.answers, killed)


def judged(answers: Sequence[tuple[float, float, bool | None]], killed: float) -> dict[str, Any]:
    """Counts of answers; those before the kill are the measure of those that it touched."""
    before = [end - begin for begin, end, _ in answers if end < killed]
    after = [end - begin for begin, end, _ in answers if end >= killed]
    if not before or not after:
        raise LoadError("no answers came before the kill, or after it; give it more time")
    usual = max(before)
    delayed = [each for each in after if each > usual]
    return {
        "answers": len(answers),
        "in_progress": sum(begin < killed <= end for begin, end, _ in answers),
        "wrong": sum(right is False for *_, right in answers),
        "lost": sum(right is None for *_, right in answers),
        "delayed": len(delayed),
        "longest_delay": max(delayed, default=usual) - median(before),
        "median_before": median(before),
        "longest_before": usual,
    }


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--replicas", type=count, default=2)
    command.add_argument("--clients", type=count, default=8)
    command.add_argument("--seconds", type=float, default=30.0, help="of load; the kill comes after a third")
    command.add_argument("--serve-flags", default="--threads 1", help="flags of the cluster")
    args = command.parse_args(argv)
    try:
        found = measured(args.replicas, args.clients, args.seconds, args.serve_flags.split())
    except LoadError as error:
        print(f"killed_replica: {error}", file=sys.stderr)
        return 2
    columns = "answers | in progress: in_progress | wrong | lost | delayed | longest delay, s: longest_delay"
    rows_table("a replica killed under load", columns, [found]).show()
    goals = [Goal(name, found[name], 0, at_most=True) for name in ("wrong", "lost")]
    return judge({"device": processor(), **found}, goals)


if __name__ == "__main__":
    sys.exit(main())
