"""The price of company on servers: tokens of mixed adapters over tokens of the base model, beside other servers.

`python -m chorus.perf.bench.company_beside --beside vllm=ENV/bin/vllm`: each server has eight adapters of ranks 8 to 64
and gets requests for them in rotation, or for the base model alone, all at once. Servers take turns; one is suspended
while another is measured. See section `peers` of `perf.bench` for the servers. `company` measures steps without one.

Tests: tests/perf/bench/test_company_beside.py
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count as numbers
from pathlib import Path
from statistics import median
from typing import Any

from ...core.cpus import available_cpus
from ..report.command import conclude, count, parser, say
from ..report.table import rows_table
from .context import Context, on_cpu
from .machine import processor
from .models.random_model import RandomModel, checkpoint
from .models.sizes import SIZES
from .sections import peers
from .sections.peers import PEERS, Load, Served
from .timer import in_turns, ratio

_DTYPE = "bfloat16"
_OWN = "chorus"


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--beside", nargs="*", default=[], metavar="NAME=PATH", help="other servers: vllm, llamacpp")
    add("--model-size", choices=SIZES, default="125m", metavar="NAME")
    add("--sequences", type=count, nargs="+", default=[1, 8, 64], metavar="N")
    add("--prompt-tokens", type=count, default=16)
    add("--output-tokens", type=count, default=64)
    add("--rounds", type=count, default=3)
    add("--threads", type=count, default=available_cpus())
    args = command.parse_args(argv)
    others = [each for each in PEERS if each != _OWN]
    paths = {name: Path(path) for name, _, path in (each.partition("=") for each in args.beside) if path}
    if unknown := [each for each in args.beside if each.partition("=")[0] not in {*others} & {*paths}]:
        command.error(f"--beside {unknown[0]}: give NAME=PATH, of {', '.join(others)}")
    with on_cpu(SIZES[args.model_size]) as context, ExitStack() as stack:
        model = checkpoint(RandomModel(context.size.geometry, dtype=_DTYPE), context.work_dir)
        room, most = args.prompt_tokens + args.output_tokens + 16, max(args.sequences)
        load = Load(model, context.mixed_adapters(), room, _DTYPE, args.threads, requests=most)
        servers = dict[str, Served]()
        for peer in (_OWN, *paths):
            say(f"start of {peer}")
            servers[peer] = peers.suspended(PEERS[peer](load, paths.get(peer, Path()), True, stack), stack)
        rows = [row for number in args.sequences for row in _measured(context, load, servers, number, args)]
    columns = "sequences | server | base, tokens/s: base | 8 adapters, tokens/s: mixed | base / adapters: ratio"
    rows_table("answers", columns, rows).show()
    return conclude({"device": processor(), "model_size": args.model_size, "rows": rows}, True)


def _measured(
    context: Context, load: Load, servers: dict[str, Served], sequences: int, args: Namespace
) -> list[dict[str, Any]]:
    """A row for each server: the rates' medians, and the ratio of turns next to each other."""
    say(f"{sequences} sequences")
    size = {"requests": sequences, "prompt_tokens": args.prompt_tokens, "output_tokens": args.output_tokens}
    turns = numbers()

    def seconds(served: Served, chosen: Sequence[int | None]) -> float:
        """Of a token of all sequences."""
        rates = peers.measure(context, load, served, chosen=chosen, seed=f"{next(turns)}", size=size)
        return 1 / rates["rate"]  # who serves adapters one after another has decoded most before the last prefill

    cases: dict[str, Sequence[int | None]] = {"base": [None], "mixed": range(len(load.files))}
    work: dict[str, Callable[[], float]] = {
        f"{case} of {name}": partial(seconds, served, chosen)
        for name, served in servers.items()
        for case, chosen in cases.items()
    }
    in_turns(work, 1)
    found = in_turns(work, args.rounds)
    rows = [
        {
            "sequences": sequences,
            "server": name,
            **{case: 1 / median(found[f"{case} of {name}"]) for case in cases},
            "ratio": ratio(found, f"mixed of {name}", f"base of {name}"),
        }
        for name in servers
    ]
    for row in rows:
        say(f"{row['server']}: {row['ratio']:.2f}")
    return rows


if __name__ == "__main__":
    sys.exit(main())
