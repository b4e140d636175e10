"""Time to the first token of activated LoRA adapters whose prompt the base model has answered.

The base model answers a prompt. Then each adapter gets the same prompt, its invocation and a few tokens, in turns with
requests to the base model of the same length, which is what such a request could take at best. Weights are random.

Tests: tests/perf/bench/test_activated.py
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.requests.request import Request
from ...core.requests.request_params import RequestParams
from ...memory.files.config import CONFIG_FILE
from ..inline_reads import InlineReads
from ..report.command import judge, parser
from ..report.table import Goal, Table
from .models.random_model import RandomModel, adapters, checkpoint
from .models.sizes import SIZES
from .timer import in_turns, ratio

BAR = 1.2
"""Most that an adapter's time may be of the base model's."""

INVOCATION = [5, 6, 5]


def activated(source: Path, path: Path) -> Path:
    """A copy of an adapter that begins to act at `INVOCATION`."""
    shutil.copytree(source, path)
    config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    config["alora_invocation_tokens"] = INVOCATION
    (path / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    return path


class Asker:
    """Sends requests one after another to an engine."""

    def __init__(self, engine: Engine, prefix: list[int], tail: int, vocab: int) -> None:
        """tail: tokens after the invocation, other ones in each request."""
        self._engine, self._prefix, self._tail, self._vocab = engine, prefix, tail, vocab
        self._random, self._ids = Random(1), count()
        self.cached: dict[str | None, int] = {}
        """The fewest cached tokens of a request, by adapter."""

    def seconds(self, adapter: str | None) -> float:
        """Seconds to the first token of a new request."""
        tail = [self._random.randrange(8, self._vocab) for _ in range(self._tail)]
        wanted = RequestParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = Request(f"q{next(self._ids)}", self._prefix + INVOCATION + tail, wanted, adapter)
        began = time.perf_counter()
        self._engine.add_request(request)
        while self._engine.has_work():
            self._engine.step()
        seconds = time.perf_counter() - began
        self.cached[adapter] = min(request.num_cached_tokens, self.cached.get(adapter, request.num_cached_tokens))
        return seconds


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--size", choices=SIZES, default="135m", help="shapes of the model")
    add("--adapters", type=int, default=5)
    add("--rank", type=int, default=32)
    add("--prefix", type=int, default=272, help="tokens that the base model has answered")
    add("--tail", type=int, default=12, help="tokens after the invocation")
    add("--rounds", type=int, default=20)
    add("--threads", type=int, default=torch.get_num_threads())
    arguments = command.parse_args(argv)
    with tempfile.TemporaryDirectory() as work:
        return _run(arguments, Path(work))


def _run(arguments: Any, work: Path) -> int:
    geometry = SIZES[arguments.size].geometry
    model = RandomModel(geometry, (arguments.rank,) * arguments.adapters)
    config = EngineConfig(
        model=checkpoint(model, work),
        device="cpu",
        threads=arguments.threads,
        max_model_len=arguments.prefix + arguments.tail + len(INVOCATION) + 2,
        memory_bytes=1 << 30,
        speculation="off",
    )
    engine = Engine.from_config(config, InlineReads())
    try:
        names = [f"a{index}" for index in range(arguments.adapters)]
        for name, source in zip(names, adapters(model, work).values(), strict=True):
            engine.store.register(name, activated(source, work / name))
        random = Random(0)
        prefix = [random.randrange(8, geometry.vocab) for _ in range(arguments.prefix)]
        asker = Asker(engine, prefix, arguments.tail, geometry.vocab)
        for adapter in (None, *names):  # the first computes the prompt, the others load their adapter
            asker.seconds(adapter)
        asker.cached.clear()
        work_of: dict[str, Callable[[], float]] = {"base": partial(asker.seconds, None)}
        work_of |= {name: partial(asker.seconds, name) for name in names}
        seconds = in_turns(work_of, arguments.rounds)
    finally:
        engine.close()
    table = Table("activated LoRA", ["model", "cached tokens", "shortest, ms", "ratio to base, in pairs"])
    ratios = {name: ratio(seconds, name, "base") for name in names}
    table.add("base", asker.cached[None], min(seconds["base"]) * 1e3, 1.0)
    for name in names:
        table.add(name, asker.cached[name], min(seconds[name]) * 1e3, ratios[name])
    table.show()
    worst = max(ratios, key=lambda name: ratios[name])
    goals = [
        Goal("time to the first token, over the base model's", ratios[worst], BAR, at_most=True, where=worst),
        Goal("cached tokens", min(asker.cached.values()), arguments.prefix // 16 * 16 - 16),
    ]
    return judge({"ratios": ratios, "cached": {str(key): value for key, value in asker.cached.items()}}, goals)


if __name__ == "__main__":
    raise SystemExit(main())
