"""Time to the first token of activated LoRA over plain LoRA, for a long prompt that the base model has answered.

`python -m chorus.perf.bench.invocations`: in each round the prefix cache is emptied and the base model answers the
prompt. Then eight activated adapters are invoked at its end, one after another, and a plain adapter gets the same
tokens. An activated adapter goes on with the KV of the base model; a plain one computes the whole prompt. Weights are
random.

Tests: tests/perf/bench/test_invocations.py
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from itertools import count as numbers
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.requests.request import Request
from ...core.requests.request_params import RequestParams
from ...memory.files.config import CONFIG_FILE
from ..inline_reads import InlineReads
from ..report.command import count, judge, parser, say
from ..report.table import Goal, rows_table
from .machine import processor
from .models.random_model import RandomModel, adapters, checkpoint
from .models.sizes import SIZES

MOST = 0.05
"""Most that the time of an activated adapter may be of a plain one's, for a prompt of 32k tokens."""

INVOCATION = [5, 6, 5]


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
    rows = [
        {"model": kind, "cached": cached[kind], "seconds": value, "ratio": value / found["plain"]}
        for kind, value in found.items()
    ]
    columns = "model | cached tokens: cached | ms: seconds * 1e3 | over plain LoRA: ratio"
    rows_table(f"first token, prompt of {arguments.prompt} tokens", columns, rows).show()
    goal = Goal("activated over plain", found["activated"] / found["plain"], MOST, at_most=True)
    result = {"device": processor(), "model_size": arguments.size, "prompt": arguments.prompt}
    return judge({**result, "seconds": seconds, "cached": cached}, [goal])


def _measured(arguments: Namespace, work: Path) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds of each request, and the fewest cached tokens, by the kind of the model that is asked."""
    room = arguments.prompt + arguments.tail + len(INVOCATION) + 2
    geometry = replace(SIZES[arguments.size].geometry, positions=room)
    model = RandomModel(geometry, (arguments.rank,) * (arguments.invocations + 1))
    limits = {"threads": arguments.threads, "max_model_len": room, "memory_bytes": arguments.memory}
    served: dict[str, Any] = {"model": checkpoint(model, work), "device": "cpu", "speculation": "off"}
    engine = Engine.from_config(EngineConfig.model_validate({**served, **limits}), InlineReads())
    draw, ids = Random(0), numbers()
    prefix = [draw.randrange(8, geometry.vocab) for _ in range(arguments.prompt)]

    def ask(name: str | None, prefix: Sequence[int] = prefix) -> tuple[float, int]:
        """Seconds to the first token of a new request, and how many of its tokens were cached."""
        tail = [draw.randrange(8, geometry.vocab) for _ in range(arguments.tail)]
        params = RequestParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = Request(f"q{next(ids)}", [*prefix, *INVOCATION, *tail], params, name)
        began = time.perf_counter()
        engine.add_request(request)
        while engine.has_work():
            if errors := [output.error for output in engine.step() if output.error is not None]:
                raise RuntimeError(errors[0])
        return time.perf_counter() - began, request.num_cached_tokens

    try:
        plain, *others = adapters(model, work).values()
        engine.store.register("plain", plain)
        names = [f"activated-{index}" for index in range(len(others))]
        for name, source in zip(names, others, strict=True):
            engine.store.register(name, _activated(source, work / name))
        for name in ("plain", *names):  # loads them
            ask(name, prefix[:32])
        kinds: dict[str, list[str | None]] = {"base": [None], "activated": [*names], "plain": ["plain"]}
        found: dict[str, list[tuple[float, int]]] = {kind: [] for kind in ("plain", "base", "activated")}
        for turn in range(arguments.rounds):
            say(f"round {turn}")
            engine.reset_prefix_cache()
            for kind, chosen in kinds.items():
                found[kind] += map(ask, chosen)
    finally:
        engine.close()
    seconds = {kind: [each for each, _ in asked] for kind, asked in found.items()}
    return seconds, {kind: min(cached for _, cached in asked) for kind, asked in found.items()}


def _activated(source: Path, path: Path) -> Path:
    """A copy of an adapter that begins to act at `INVOCATION`."""
    shutil.copytree(source, path)
    config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    config["alora_invocation_tokens"] = INVOCATION
    (path / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())
