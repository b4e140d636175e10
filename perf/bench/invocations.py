"""Time to the first token of activated LoRA over plain LoRA, for a long prompt that the base model has answered.

`python -m chorus.perf.bench.invocations`: in each round the prefix cache is emptied and the base model answers the
prompt. Then eight activated adapters are invoked at its end, one after another, and a plain adapter gets the same
tokens. An activated adapter goes on with the KV of the base model; a plain one computes the whole prompt. Weights are
random.

Tests: tests/perf/bench/test_invocations.py
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from ..report.command import count, judge, parser, say
from ..report.table import Goal, rows_table
from .activated import INVOCATION, Asker, activated
from .driving import opened
from .machine import processor
from .models.random_model import RandomModel, adapters, checkpoint
from .models.sizes import SIZES

MOST = 0.05
"""Most that the time of an activated adapter may be of a plain one's, for a prompt of 32k tokens."""


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--size", choices=SIZES, default="135m", metavar="NAME", help="shapes of the model")
    add("--invocations", type=count, default=8, help="activated adapters, invoked one after another")
    add("--rank", type=count, default=32)
    add("--prompt", type=count, default=32768, help="tokens that the base model answers")
    add("--tail", type=count, default=12, help="tokens after the invocation")
    add("--rounds", type=count, default=3)
    add("--memory", type=count, default=4 << 30, help="bytes for KV and adapters")
    add("--threads", type=count, default=torch.get_num_threads())
    arguments = command.parse_args(argv)
    with tempfile.TemporaryDirectory() as work:
        seconds, cached = _measured(arguments, Path(work))
    found = {kind: median(each) for kind, each in seconds.items()}
    ratio = found["activated"] / found["plain"]
    rows = [
        {"model": kind, "cached": cached[kind], "seconds": value, "ratio": value / found["plain"]}
        for kind, value in found.items()
    ]
    columns = "model | cached tokens: cached | ms: seconds * 1e3 | over plain LoRA: ratio"
    rows_table(f"first token, prompt of {arguments.prompt} tokens", columns, rows).show()
    goal = Goal("activated over plain", ratio, MOST, at_most=True)
    result = {"device": processor(), "model_size": arguments.size, "prompt": arguments.prompt}
    return judge({**result, "seconds": seconds, "cached": cached}, [goal])


def _measured(arguments: Any, work: Path) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds of each request, and the fewest cached tokens, by the kind of the model that is asked."""
    room = arguments.prompt + arguments.tail + len(INVOCATION) + 2
    geometry = replace(SIZES[arguments.size].geometry, positions=room)
    model = RandomModel(geometry, (arguments.rank,) * (arguments.invocations + 1))
    limits = {"threads": arguments.threads, "max_model_len": room, "memory_bytes": arguments.memory}
    with opened(checkpoint(model, work), **limits) as engine:
        plain, *others = adapters(model, work).values()
        engine.store.register("plain", plain)
        names = [f"activated-{index}" for index in range(len(others))]
        for name, source in zip(names, others, strict=True):
            engine.store.register(name, activated(source, work / name))
        random = Random(0)
        prefix = [random.randrange(8, geometry.vocab) for _ in range(arguments.prompt)]
        for name in ("plain", *names):  # loads them
            Asker(engine, prefix[:32], arguments.tail, geometry.vocab).seconds(name)
        seconds: dict[str, list[float]] = {"plain": [], "base": [], "activated": []}
        cached: dict[str, Any] = dict.fromkeys(seconds, room)
        for turn in range(arguments.rounds):
            say(f"round {turn}")
            engine.reset_prefix_cache()
            asker = Asker(engine, prefix, arguments.tail, geometry.vocab)
            for kind, asked in (("base", [None]), ("activated", names), ("plain", ["plain"])):
                seconds[kind] += [asker.seconds(name) for name in asked]
                cached[kind] = min(cached[kind], *(asker.cached[name] for name in asked))
    return seconds, cached


if __name__ == "__main__":
    sys.exit(main())
