"""The price of company: decode steps of sequences of mixed adapters over steps of the base model alone.

`python -m chorus.perf.bench.company`: one engine with eight adapters of ranks 8 to 64 decodes batches of several sizes,
with the adapters in rotation and without, in turns. Section `peers` of `perf.bench` compares eight sequences with other
servers.

Tests: tests/perf/bench/test_company.py
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Any

from ..report.command import conclude, count, parser, say
from ..report.table import rows_table
from .context import RANKS, on_cpu
from .machine import processor
from .models.sizes import SIZES
from .subject import Subject
from .timer import in_turns, ratio

_COUNT = 8
"""Adapters."""

_PROMPT = 64


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--model-size", choices=SIZES, default="125m", metavar="NAME")
    command.add_argument("--sequences", type=count, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N")
    command.add_argument("--steps", type=count, default=16, help="of a turn")
    command.add_argument("--rounds", type=count, default=5)
    command.add_argument("--threads", type=count, default=None, help="default: all processors")
    args = command.parse_args(argv)
    with on_cpu(SIZES[args.model_size]) as context:
        adapters, most = context.mixed_adapters(_COUNT // len(RANKS)), max(args.sequences)
        limits = {"max_seqs": most, "max_batched": most * _PROMPT, "max_len": _PROMPT + 2 * args.steps + 64}
        more = {} if args.threads is None else {"threads": args.threads}
        with Subject(context, adapters, inline_reads=True, **limits, **more) as subject:
            subject.load(list(adapters))
            rows = [_measured(subject, list(adapters), number, args) for number in args.sequences]
    columns = "sequences | base, ms: base * 1e3 | 8 adapters, ms: mixed * 1e3 | adapters / base: ratio | tokens/s: rate"
    rows_table("decode steps", columns, ({**row, "rate": row["sequences"] / row["mixed"]} for row in rows)).show()
    return conclude({"device": processor(), "model_size": args.model_size, "rows": rows}, True)


def _measured(subject: Subject, adapters: Sequence[str], sequences: int, args: Namespace) -> dict[str, Any]:
    """The seconds of a step, and the ratio of turns next to each other."""
    say(f"{sequences} sequences")

    def step(names: Sequence[str | None]) -> float:
        return median(subject.decode_seconds(names, _PROMPT, args.steps))

    work = {"base": partial(step, [None] * sequences), "mixed": partial(step, [*islice(cycle(adapters), sequences)])}
    in_turns(work, 1)
    seconds = in_turns(work, args.rounds)
    found = {kind: median(each) for kind, each in seconds.items()}
    return {"sequences": sequences, "adapters": "all", **found, "ratio": ratio(seconds, "mixed", "base")}


if __name__ == "__main__":
    sys.exit(main())
