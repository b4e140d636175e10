"""Time to the first token of activated LoRA adapters whose prompt the base model has answered.

The base model answers a prompt. Then each adapter gets the same prompt, its invocation and a few tokens, in turns with
requests to the base model of the same length, which is what such a request could take at best. Weights are random.

Tests: tests/perf/bench/test_activated.py
"""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from ...core.engine import Engine
from ...memory.files.config import CONFIG_FILE
from ..report.command import judge, parser
from ..report.table import Goal, rows_table
from .driving import asked, first_token_seconds, opened
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
        self._random = Random(1)
        self.cached: dict[str | None, int] = {}
        """The fewest cached tokens of a request, by adapter."""

    def seconds(self, adapter: str | None) -> float:
        """Seconds to the first token of a new request."""
        tail = [self._random.randrange(8, self._vocab) for _ in range(self._tail)]
        request = asked(self._prefix + INVOCATION + tail, adapter)
        seconds = first_token_seconds(self._engine, request)
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
    room = arguments.prefix + arguments.tail + len(INVOCATION) + 2
    limits = {"threads": arguments.threads, "max_model_len": room, "memory_bytes": 1 << 30}
    with opened(checkpoint(model, work), **limits) as engine:
        names = [f"a{index}" for index in range(arguments.adapters)]
        for name, source in zip(names, adapters(model, work).values(), strict=True):
            engine.store.register(name, activated(source, work / name))
        random = Random(0)
        prefix = [random.randrange(8, geometry.vocab) for _ in range(arguments.prefix)]
        asker = Asker(engine, prefix, arguments.tail, geometry.vocab)
        for adapter in (None, *names):  # the first computes the prompt, the others load their adapter
            asker.seconds(adapter)
        asker.cached.clear()
        models = {"base": None, **{name: name for name in names}}
        seconds = in_turns({name: partial(asker.seconds, each) for name, each in models.items()}, arguments.rounds)
    ratios = {name: ratio(seconds, name, "base") for name in names}
    rows = [
        {"model": name, "cached": asker.cached[each], "shortest": min(seconds[name]), "ratio": ratios.get(name, 1.0)}
        for name, each in models.items()
    ]
    columns = "model | cached tokens: cached | shortest, ms: shortest * 1e3 | ratio to base, in pairs: ratio"
    rows_table("activated LoRA", columns, rows).show()
    worst = max(ratios, key=lambda name: ratios[name])
    goals = [
        Goal("time to the first token, over the base model's", ratios[worst], BAR, at_most=True, where=worst),
        Goal("cached tokens", min(asker.cached.values()), arguments.prefix // 16 * 16 - 16),
    ]
    return judge({"ratios": ratios, "cached": {str(key): value for key, value in asker.cached.items()}}, goals)


if __name__ == "__main__":
    raise SystemExit(main())
