"""The price of company: decode steps of sequences of mixed adapters over steps of the base model alone.

`python -m chorus.perf.bench.company`: one engine with eight adapters of ranks 8 to 64 decodes batches of several sizes,
with the adapters in rotation and without, in turns. Section `peers` of `perf.bench` compares eight sequences with other
servers.

Tests: tests/perf/bench/test_company.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from ..report.command import conclude, count, parser, say
from ..report.table import Table
from .context import Context
from .machine import processor
from .sizes import SIZES
from .store import ResultStore
from .subject import Subject
from .timer import WallTimer, in_turns, ratio

RANKS = (8, 16, 32, 64)
"""Ranks of the adapters, two of each."""

_PROMPT = 64


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--model-size", choices=SIZES, default="125m", metavar="NAME")
    command.add_argument("--sequences", type=count, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N")
    command.add_argument("--steps", type=count, default=16, help="of a turn")
    command.add_argument("--rounds", type=count, default=5)
    command.add_argument("--threads", type=count, default=None, help="default: all processors")
    args = command.parse_args(argv)
    with TemporaryDirectory(prefix="chorus-company-") as name:
        work = Path(name)
        size = SIZES[args.model_size]
        context = Context("cpu", size, quick=True, timer=WallTimer(), store=ResultStore(work, {}), work_dir=work)
        adapters = {name: path for rank in RANKS for name, path in context.adapters(rank, 2).items()}
        most = max(args.sequences)
        limits = {"max_seqs": most, "max_batched": most * _PROMPT, "max_len": _PROMPT + 2 * args.steps + 64}
        more = {} if args.threads is None else {"threads": args.threads}
        with Subject(context, adapters, inline_reads=True, **limits, **more) as subject:
            subject.load(list(adapters))
            rows = [_measured(subject, list(adapters), number, args.steps, args.rounds) for number in args.sequences]
    table = Table("decode steps", ["sequences", "base, ms", "8 adapters, ms", "adapters / base", "tokens/s, adapters"])
    for row in rows:
        rate = row["sequences"] / row["mixed"]
        table.add(row["sequences"], 1e3 * row["base"], 1e3 * row["mixed"], row["ratio"], rate)
    table.show()
    return conclude({"device": processor(), "model_size": args.model_size, "rows": rows}, True)


def _measured(subject: Subject, adapters: Sequence[str], sequences: int, steps: int, rounds: int) -> dict[str, float]:
    """Seconds of a step, and the ratio of turns next to each other."""
    say(f"{sequences} sequences")

    def step(names: Sequence[str | None]) -> float:
        return median(subject.decode_seconds(names, _PROMPT, steps))

    mixed = list(islice(cycle(adapters), sequences))
    work: dict[str, Callable[[], float]] = {"base": partial(step, [None] * sequences), "mixed": partial(step, mixed)}
    in_turns(work, 1)
    seconds = in_turns(work, rounds)
    found = {name: median(each) for name, each in seconds.items()}
    return {"sequences": sequences, **found, "ratio": ratio(seconds, "mixed", "base")}


if __name__ == "__main__":
    sys.exit(main())
