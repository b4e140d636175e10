"""Thousands of adapters on disk, asked for by Zipf's law: `python -m chorus.perf.bench.many_adapters`.

A server of a random model is started with a directory of adapters that all differ. Clients ask one after another,
adapter i with a weight of i to the power of -1.1. A request is cold if it is the first for its adapter, and hot
otherwise. The tables have the times to the first token, the seconds to the start, and the memory of the processes.

Tests: tests/perf/bench/test_many_adapters.py
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from ..report.command import conclude, count, parser, say
from ..report.table import Table
from ..serving.errors import LoadError
from ..serving.server_process import launched
from ..workload.popularity import PowerLaw
from .machine import family, need_psutil, processor
from .models.random_model import RandomModel, adapters, checkpoint
from .models.sizes import SIZES

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TIMEOUT = 300.0
_VALUE_BITS = 0x3F
"""Bits of a low byte of a bfloat16 value, which may take any value."""


def directory_of(source: Path, number: int, path: Path) -> Path:
    """A directory of so many adapters, made on first use; each differs from `source` in its last values."""
    if path.is_dir():
        return path
    config, weights = (source / CONFIG).read_bytes(), bytearray((source / WEIGHTS).read_bytes())
    draft = path.with_name(f"{path.name}.draft")
    for index in range(number):
        for digit in range(4):
            weights[-2 - 2 * digit] = index >> 6 * digit & _VALUE_BITS
        one = draft / f"a{index:05d}"
        one.mkdir(parents=True)
        (one / CONFIG).write_bytes(config)
        (one / WEIGHTS).write_bytes(weights)
    draft.rename(path)
    return path


@dataclass
class Clients:
    """Clients that ask for adapters in a given order, each as soon as its last answer has ended."""

    url: str
    order: Sequence[int]
    vocab: int
    firsts: dict[str, list[float]] = field(default_factory=lambda: {"hot": [], "cold": []})
    """Seconds to the first token."""
    errors: list[str] = field(default_factory=list)
    _asked: set[int] = field(default_factory=set)
    _turns: Any = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, clients: int) -> None:
        threads = [threading.Thread(target=self._ask_all) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _ask_all(self) -> None:
        with httpx.Client(base_url=self.url, timeout=_TIMEOUT, trust_env=False) as client:
            while (turn := next(self._turns)) < len(self.order):
                index = self.order[turn]
                with self._lock:
                    kind = "hot" if index in self._asked else "cold"
                    self._asked.add(index)
                try:
                    seconds = self._first(client, index, turn)
                except (LoadError, httpx.HTTPError) as error:
                    self.errors.append(f"{type(error).__name__}: {error}")
                else:
                    self.firsts[kind].append(seconds)

    def _first(self, client: httpx.Client, index: int, turn: int) -> float:
        """Seconds to the first token of an answer, which is read to its end. Raises LoadError."""
        prompt = [8 + (turn * 31 + place * 7) % (self.vocab - 8) for place in range(32)]
        body = {"model": f"a{index:05d}", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "stream": True}
        began, first = time.perf_counter(), None
        with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise LoadError(f"{answer.status_code}: {answer.read().decode():.200}")
            for line in answer.iter_lines():
                if first is None and line.startswith("data: {"):
                    first = time.perf_counter() - began
        if first is None:
            raise LoadError("a stream had no token")
        return first


def resident_bytes(pid: int) -> int:
    """Memory of a process and its descendants."""
    psutil, found = need_psutil(), 0
    for process in family([pid]):
        with suppress(psutil.NoSuchProcess):
            found += process.memory_info().rss
    return found


def measured(args: Any) -> dict[str, Any]:
    geometry = SIZES[args.model_size].geometry
    model = RandomModel(geometry, (args.rank,))
    served = checkpoint(model, args.work_dir)
    (source,) = adapters(model, args.work_dir).values()
    say(f"{args.adapters} adapters")
    folder = directory_of(source, args.adapters, args.work_dir / f"many-{args.model_size}-{args.rank}-{args.adapters}")
    law = PowerLaw(kind="power_law", exponent=args.exponent)
    order = law.choose(args.seed, args.adapters, lambda: args.requests).take(args.requests).tolist()
    flags = ["--model", str(served), "--adapters", str(folder), "--memory-bytes", args.memory, "--speculation", "off"]
    began = time.monotonic()
    with launched(flags) as server:
        started = time.monotonic() - began
        at_start = resident_bytes(server.pid)
        say(f"started in {started:.1f} s")
        clients = Clients(server.url, order, geometry.vocab)
        clients.run(args.clients)
        at_end = resident_bytes(server.pid)
    return {
        "adapters": args.adapters,
        "requests": args.requests,
        "start_seconds": started,
        "bytes_at_start": at_start,
        "bytes_at_end": at_end,
        "errors": len(clients.errors),
        "first_error": next(iter(clients.errors), None),
        **{kind: _marks(seconds) for kind, seconds in clients.firsts.items()},
    }


def _marks(seconds: Sequence[float]) -> dict[str, Any]:
    p50, p99 = np.percentile(seconds, (50, 99)).tolist() if seconds else (None, None)
    return {"requests": len(seconds), "p50": p50, "p99": p99}


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--model-size", choices=SIZES, default="tiny", metavar="NAME")
    add("--adapters", type=count, default=10_000)
    add("--rank", type=count, default=4)
    add("--requests", type=count, default=2000)
    add("--clients", type=count, default=4, help="requests at once")
    add("--exponent", type=float, default=1.1, help="of Zipf's law")
    add("--memory", default="1GiB", help="for KV and adapters")
    add("--seed", type=int, default=0)
    add("--work-dir", type=Path, default=Path("build/many-adapters"))
    try:
        found = measured(command.parse_args(argv))
    except LoadError as error:
        print(f"many_adapters: {error}", file=sys.stderr)
        return 2
    table = Table(f"{found['adapters']} adapters on disk", ["requests", "number", "TTFT p50, ms", "TTFT p99, ms"])
    for kind in ("hot", "cold"):
        marks = (each and 1e3 * each for each in (found[kind]["p50"], found[kind]["p99"]))
        table.add(kind, found[kind]["requests"], *marks)
    table.show()
    costs = Table("server", ["start, s", "MB at the start", "MB at the end", "errors"])
    costs.add(found["start_seconds"], found["bytes_at_start"] / 1e6, found["bytes_at_end"] / 1e6, found["errors"])
    costs.show()
    return conclude({"device": processor(), **found}, not found["errors"])


if __name__ == "__main__":
    sys.exit(main())
