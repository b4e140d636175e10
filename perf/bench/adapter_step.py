"""Processor time that adapters add to a decode step of eight rows, of this build and of another, in turns.

Each build is a process that waits for its turn. A turn is decode steps of eight rows without adapters, and with those
of `--load`: `mixed`, one of mixed ranks on all projections for each row; `head`, one on the output projection for each
of four rows, beside four of the base model; `added` and `rows`, likewise, with eight tokens beyond the model's
vocabulary, or 4,096 trained tokens; `unused`, no row has one, but the engine has the four of `head` in memory, and is
compared with another engine that has none. A turn's time is its quietest tenth, as other processes' memory
traffic comes and goes in milliseconds. Every second round runs in reverse order. Thus two layouts of adapters in
memory, which no process has at once, are compared on a shared machine. `--beside` is the Python of an environment that
imports another checkout with this command.

Tests: tests/perf/bench/test_adapter_step.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, NamedTuple

from ...memory.host.child_python import python_command
from ..report.command import judge, parser
from ..report.table import Goal, Table
from .context import on_cpu
from .models.random_model import AdapterForm
from .models.sizes import SIZES
from .subject import Subject
from .timer import in_turns

MOST_TIME = 0.85
"""Most that adapters may add to a step, of what they add in the build beside."""

LEAST_RATE = {"mixed": 0.79, "head": 0.97, "added": 0.97, "rows": 0.97, "unused": 0.99}
"""Least that the rate of steps with adapters may be, of that of steps without, by load."""

HEAD_RANK = 16

_ROWS, _PROMPT = 8, 128


class Turn(NamedTuple):
    """Processor seconds of a step."""

    base: float
    mixed: float

    @property
    def added(self) -> float:
        """What the adapters take."""
        return self.mixed - self.base


class Build:
    """A process that measures turns of one build. Use as a context: leaving it ends the process."""

    def __init__(self, python: str, arguments: Sequence[str]) -> None:
        """python: of the environment that imports the build."""
        command = python_command("chorus.perf.bench.adapter_step", "--worker", *arguments, python=python)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Build:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()  # closes its input, by which it ends

    def turn(self) -> Turn:
        """Measure a turn. Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with code {self._process.wait()}: see its output above")
        return Turn(*json.loads(line))


def measure(size: str, load: str, steps: int, threads: int, turns: Callable[[Callable[[], Turn]], None]) -> None:
    """Make an engine and hand a function that measures a turn to `turns`."""
    with on_cpu(SIZES[size]) as context:
        if load == "mixed":
            adapters = context.mixed_adapters()
        else:
            form = AdapterForm.HEAD if load == "unused" else AdapterForm(load)
            rank = HEAD_RANK if form is AdapterForm.HEAD else 1
            adapters = context.adapters(rank, _ROWS // 2, form)
        base: list[str | None] = [None] * _ROWS
        room = {"max_batched": _ROWS * _PROMPT, "max_len": _PROMPT + 2 * steps + 64}
        limits: dict[str, Any] = {"max_seqs": _ROWS, **room}

        @contextmanager
        def engine(adapters: Mapping[str, Path]) -> Iterator[Subject]:
            """An engine that has these adapters in memory."""
            clock = time.process_time
            with Subject(context, adapters, inline_reads=True, clock=clock, **limits, threads=threads) as subject:
                subject.load(list(adapters))
                yield subject

        def quiet(subject: Subject, names: Sequence[str | None]) -> float:
            seconds = sorted(subject.decode_seconds(names, _PROMPT, steps))
            return seconds[len(seconds) // 10]

        def unused() -> Turn:
            """Of engines made for the turn, as each has its own place in memory."""
            with engine({}) as without, engine(adapters) as having:
                seconds = {each: quiet(each, base) for each in (without, having)}
                for each in (having, without):
                    seconds[each] = min(seconds[each], quiet(each, base))
                return Turn(seconds[without], seconds[having])

        if load == "unused":
            turns(unused)
            return
        rows = [*adapters, *base[len(adapters) :]]
        with engine(adapters) as subject:
            turns(lambda: Turn(quiet(subject, base), quiet(subject, rows)))


def _answer(turn: Callable[[], Turn]) -> None:
    """Measure a turn for each line of the standard input."""
    turn()  # the first is slower: caches are cold
    for _ in sys.stdin:
        print(json.dumps(turn()), flush=True)


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--model-size", default="125m", choices=SIZES)
    command.add_argument("--load", default="mixed", choices=LEAST_RATE)
    command.add_argument("--rounds", type=int, default=15)
    command.add_argument("--steps", type=int, default=30, help="decode steps of a turn, with adapters and without")
    command.add_argument("--threads", type=int, default=1)
    command.add_argument("--beside", help="Python of the other build")
    command.add_argument("--worker", action="store_true", help="measure a turn for each line of the standard input")
    args = command.parse_args(argv)
    if args.worker:
        measure(args.model_size, args.load, args.steps, args.threads, _answer)
        return 0
    flags = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in ("model_size", "load", "steps", "threads")]
    pythons = {"this": sys.executable} | ({"beside": args.beside} if args.beside else {})
    with ExitStack() as stack:
        builds = {name: stack.enter_context(Build(python, flags)) for name, python in pythons.items()}
        turns = in_turns({name: partial(Build.turn, build) for name, build in builds.items()}, args.rounds)
    return conclude(turns, args.load)


def conclude(turns: dict[str, list[Turn]], load: str = "mixed") -> int:
    """Show a table and the bars, and print the result; return the exit code. turns: of `this` and, maybe, `beside`."""
    table = Table(
        "processor time of a decode step, ms", ["build", "base", "adapters add", "least", "most", "rate / base"]
    )
    rates = {name: median(turn.base / turn.mixed for turn in own) for name, own in turns.items()}
    for name, own in turns.items():
        added = [turn.added * 1e3 for turn in own]
        base = median(turn.base for turn in own) * 1e3
        table.add(name, base, median(added), min(added), max(added), rates[name])
    table.show()
    goals = [Goal("rate with adapters / without", rates["this"], LEAST_RATE[load])]
    result: dict[str, object] = {"load": load, "turns": turns, "rates": rates}
    if "beside" in turns:
        pairs = zip(turns["this"], turns["beside"], strict=True)
        result["over_beside"] = over = median(own.added / other.added for own, other in pairs)
        goals.append(Goal("time of the adapters, over the build beside", over, MOST_TIME, at_most=True))
    return judge(result, goals)


if __name__ == "__main__":
    raise SystemExit(main())
