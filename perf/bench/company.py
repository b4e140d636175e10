"""The price of company: decode steps of sequences of mixed adapters over steps of the base model alone.

`python -m chorus.perf.bench.company`: one engine with eight adapters of ranks 8 to 64 decodes batches of several sizes,
with the adapters in rotation and without, in turns. `--model-size mixture`: the model is a mixture of 64 experts with
about as many active parameters as `170m`; it has eight adapters of rank 16 on attention, and eight of rank 8 on
attention and all experts. Section `peers` of `perf.bench` compares eight sequences with other servers.

Tests: tests/perf/bench/test_company.py
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from ...memory.files.module_paths import ExpertForm
from ..report.command import conclude, count, parser, say
from ..report.table import rows_table
from .context import RANKS, Context, on_cpu
from .machine import processor
from .models.random_mixture import MixtureShape, MixtureSize, write_adapter
from .models.sizes import SIZES
from .subject import Subject
from .timer import in_turns, ratio

MIXTURE = "mixture"

SHAPE = MixtureShape(
    layers=12, hidden=1024, size=256, count=64, per_token=8, heads=16, kv_heads=4, head_dim=64, vocab=32000
)

#: Kind of a mixture's adapters → their rank, and how their files have experts.
MIXTURE_KINDS: dict[str, tuple[int, ExpertForm | None]] = {"attention": (16, None), "experts": (8, ExpertForm.TOGETHER)}

_COUNT = 8
"""Adapters of each kind."""

_PROMPT = 64
_BASE = "base"

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--model-size", choices=[*SIZES, MIXTURE], default="125m", metavar="NAME")
    command.add_argument("--sequences", type=count, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N")
    command.add_argument("--steps", type=count, default=16, help="of a turn")
    command.add_argument("--rounds", type=count, default=5)
    command.add_argument("--threads", type=count, default=None, help="default: all processors")
    args = command.parse_args(argv)
    is_mixture = args.model_size == MIXTURE
    with on_cpu(SIZES["170m" if is_mixture else args.model_size]) as context:
        kinds = _of_mixture(context) if is_mixture else {"all": context.mixed_adapters(_COUNT // len(RANKS))}
        most = max(args.sequences)
        limits = {"max_seqs": most, "max_batched": most * _PROMPT, "max_len": _PROMPT + 2 * args.steps + 64}
        more = {} if args.threads is None else {"threads": args.threads}
        named = MixtureSize(MIXTURE, SHAPE) if is_mixture else None
        everything = {name: path for kind in kinds.values() for name, path in kind.items()}
        with Subject(context, everything, inline_reads=True, size=named, **limits, **more) as subject:
            subject.load(list(everything))
            names = {kind: list(adapters) for kind, adapters in kinds.items()}
            rows = [row for number in args.sequences for row in _measured(subject, names, number, args)]
    columns = (
        "sequences | adapters on: adapters | base, ms: base * 1e3 | 8 adapters, ms: mixed * 1e3 | "
        "adapters / base: ratio | tokens/s, adapters: rate"
    )
    rows_table("decode steps", columns, ({**row, "rate": row["sequences"] / row["mixed"]} for row in rows)).show()
    return conclude({"device": processor(), "model_size": args.model_size, "rows": rows}, True)


def _of_mixture(context: Context) -> dict[str, dict[str, Path]]:
    """Adapters by what they change."""
    found = {}
    for kind, (rank, form) in MIXTURE_KINDS.items():
        source = write_adapter(context.work_dir / "mixture" / kind, SHAPE, rank, form)
        found[kind] = context.links(source, kind, _COUNT)
    return found


def _measured(subject: Subject, kinds: Mapping[str, Sequence[str]], sequences: int, args: Namespace) -> list[Row]:
    """For each kind of adapter the seconds of a step, and the ratio of turns next to each other."""
    say(f"{sequences} sequences")

    def step(names: Sequence[str | None]) -> float:
        return median(subject.decode_seconds(names, _PROMPT, args.steps))

    batches: dict[str, Sequence[str | None]] = {_BASE: [None] * sequences}
    batches |= {kind: list(islice(cycle(names), sequences)) for kind, names in kinds.items()}
    work: dict[str, Callable[[], float]] = {kind: partial(step, names) for kind, names in batches.items()}
    in_turns(work, 1)
    seconds = in_turns(work, args.rounds)
    found = {kind: median(each) for kind, each in seconds.items()}
    return [
        {
            "sequences": sequences,
            "adapters": kind,
            "base": found[_BASE],
            "mixed": found[kind],
            "ratio": ratio(seconds, kind, _BASE),
        }
        for kind in kinds
    ]


if __name__ == "__main__":
    sys.exit(main())
