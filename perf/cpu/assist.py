"""CPU-assisted prefill beside CaraServe's micro-benchmarks (§7.4), and first tokens over a slow link.

    python -m chorus.perf.cpu.assist

Hand-overs: x of one projection to 1 … n processes and products of rank 1 back, 16 tokens to each, by shared memory and
by sockets (Fig. 17). Split: 128 tokens' products by 1 … n processes and by as many of torch's threads (Fig. 18). First
tokens: a prompt with an adapter that comes over a link of so many bytes a second, when the adapter is waited for,
streamed layer by layer, assisted, or begun as the cost model chooses; each over the same with the adapter in the arena,
in one round.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.cold_start import ColdStart
from ...core.config import EngineConfig
from ...core.cpus import available_cpus
from ...core.engine import Engine
from ...core.executors.assist import Assist, assistant_cpus
from ...core.executors.cpu import CpuExecutor
from ...core.model.config import ModelConfig
from ...core.requests.request import Request
from ...core.requests.sampling_params import SamplingParams
from ...memory.pages.adapter_layout import AdapterLayout
from ...memory.pages.arena import Arena
from ...memory.pages.layout import PageLayout
from ..report.command import conclude, parser
from ..report.table import Table
from . import random_model
from .slow_link import slow_down
from .workload import Geometry, Workload

_RANK, _TOKENS, _SPLIT_TOKENS = 64, 16, 128


def handovers(geometry: Geometry, workers: int, directory: Path, rounds: int) -> dict[str, Any]:
    """Median seconds by number of processes, of each way."""
    model = directory / "shapes"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(geometry.config("float32")))
    config = EngineConfig(model=model, device="cpu", assist_workers=workers, max_num_batched_tokens=1024)
    shape = ModelConfig.read(model)
    page = PageLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, config.block_tokens, 4)
    assist = Assist(config, shape, Arena(page, 2, torch.float32, "cpu"), torch.float32)
    found: dict[str, Any] = {"shared": {}, "socket": {}, "split": {}, "threads": {}}
    try:
        assist.join()
        for count in range(1, workers + 1):
            found["shared"][count] = assist.time_handover(_TOKENS * count, count, 1, rounds)
            found["split"][count] = assist.time_handover(_SPLIT_TOKENS, count, _RANK, rounds)
        found["profile"] = {"handover": assist.profile.handover, "per_elem": assist.profile.per_elem}
    finally:
        assist.close()
    for count in range(1, workers + 1):
        found["socket"][count] = _over_sockets(geometry.hidden, count, rounds)
        found["threads"][count] = _by_threads(geometry.hidden, count, rounds)
    return found


def _over_sockets(hidden: int, count: int, rounds: int) -> float:
    """The same hand-over by messages, as x and the products go through `multiprocessing`'s connections."""
    context = multiprocessing.get_context("spawn")
    links, processes = [], []
    for cpu in assistant_cpus(count):
        here, there = context.Pipe()
        processes.append(context.Process(target=_answer, args=(there, hidden, cpu), daemon=True))
        processes[-1].start()
        links.append(here)
    x = np.zeros((_TOKENS, hidden), np.float32)

    def once() -> None:
        for link in links:
            link.send(x)
        for link in links:
            link.recv()

    once()
    try:
        return _median(once, rounds)
    finally:
        for link, process in zip(links, processes, strict=True):
            link.send(None)
            process.join()


def _answer(link: Connection, hidden: int, cpu: int | None) -> None:
    import os

    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    torch.set_num_threads(1)
    a, b = torch.zeros(hidden, 1), torch.zeros(1, hidden)
    while (x := link.recv()) is not None:
        link.send((torch.from_numpy(x) @ a @ b).numpy())


def _by_threads(hidden: int, count: int, rounds: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    x, a, b = torch.zeros(_SPLIT_TOKENS, hidden), torch.zeros(hidden, _RANK), torch.zeros(_RANK, hidden)
    try:
        return _median(lambda: x @ a @ b, rounds)
    finally:
        torch.set_num_threads(before)


def _median(work: Callable[[], object], rounds: int) -> float:
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


class SlowLinkBench:
    """An engine with adapters that come over a link of `rate` bytes a second."""

    def __init__(self, workload: Workload, directory: Path, workers: int) -> None:
        self._adapters = [*random_model.adapters(workload, directory).values()]
        self.engine = Engine.from_config(
            EngineConfig(
                model=random_model.checkpoint(workload, directory), prefix_cache=False, seed=0, device="cpu",
                dtype="float32", memory_bytes=256 << 20, assist_workers=workers, max_load_stall_seconds=60.0,
                max_num_batched_tokens=1024, threads=1,
            )
        )  # fmt: skip
        executor = self.engine.executor
        assert isinstance(executor, CpuExecutor)
        assert executor._assist is not None  # noqa: SLF001
        self.assist = executor._assist  # noqa: SLF001
        self.rate = 1e12
        slow_down(executor.adapters, executor.arena.pages, self._pace)
        self._vocab, self._serial = workload.geometry.vocab, 0

    def _pace(self, layer: int, layout: AdapterLayout) -> None:
        time.sleep(4 * layout.num_elems / layout.num_layers / self.rate)

    def first_token(self, tokens: int, way: ColdStart | None, *, cold: bool = True) -> float:
        """Seconds from a request to its first token; its adapter is in host memory. way: None: as is chosen."""
        self._serial += 1
        name, store = f"a{self._serial}", self.engine.store
        adapter = store.register(name, self._adapters[self._serial % len(self._adapters)])
        while not store.loads.fetch(adapter):
            time.sleep(0.001)
        if not cold:
            self._load(adapter)
        self.assist.way = way if way is not ColdStart.WAIT else ColdStart.STREAM
        prompt = [(self._serial + 7 * index) % self._vocab for index in range(tokens)]
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        began = time.perf_counter()
        if way is ColdStart.WAIT:
            self._load(adapter)
        self.engine.add_request(Request(name, prompt, params, name))
        while self.engine.has_work():
            self.engine.step()
        seconds = time.perf_counter() - began
        self.engine.adapters.remove(name)
        while store.loads.under_way:
            store.poll()
            time.sleep(0.001)
        return seconds

    def _load(self, adapter: Any) -> None:
        self.engine.store.prefetch(adapter)
        while adapter.transfer is not None:
            self.engine.store.poll()
            time.sleep(0.0002)


def first_tokens(bench: SlowLinkBench, rates: list[float], prompts: list[int], rounds: int) -> list[dict[str, Any]]:
    """Of each rate and prompt the warm seconds, and the ways over them: medians over all rounds but the first."""
    ways: dict[str, ColdStart | None] = {"wait": ColdStart.WAIT, "stream": ColdStart.STREAM, "assist": ColdStart.ASSIST}
    ways["chosen"] = None
    found = []
    for rate, tokens in itertools.product(rates, prompts):
        bench.rate = rate
        seconds: dict[str, list[float]] = {name: [] for name in ("warm", *ways)}
        assisted = 0
        for index in range(rounds + 1):
            seconds["warm"].append(bench.first_token(tokens, ColdStart.STREAM, cold=False))
            for name in list(ways)[:: 1 if index % 2 else -1]:
                before = bench.assist.starts.num_assisted
                seconds[name].append(bench.first_token(tokens, ways[name]))
                assisted += name == "chosen" and bench.assist.starts.num_assisted > before
        over = {name: [a / b for a, b in zip(seconds[name], seconds["warm"], strict=True)][1:] for name in ways}
        ratios = {name: statistics.median(each) for name, each in over.items()}
        warm = statistics.median(seconds["warm"])
        found.append({"rate": rate, "tokens": tokens, "warm": warm, "assisted": assisted / (rounds + 1), **ratios})
    return found


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--rounds", type=int, default=5, help="of first tokens; hand-overs take 20 times as many")
    command.add_argument("--workers", type=int, default=max(1, available_cpus() - 1))
    command.add_argument("--geometry", type=Geometry.parse, default=Geometry(vocab=512), help="as of perf.cpu")
    args = command.parse_args(argv)
    big = Geometry(hidden=4096, ffn=11008, layers=1, heads=32, kv_heads=32, vocab=512)
    with tempfile.TemporaryDirectory(prefix="chorus-assist-") as directory:
        small = handovers(big, args.workers, Path(directory), 20 * args.rounds)
        table = Table("hand-over of 16 tokens to each, and products of 128 tokens and rank 64, ms", [
            "processes", "shared memory", "socket", "own split", "torch's threads",
        ])  # fmt: skip
        for count in range(1, args.workers + 1):
            ways = ("shared", "socket", "split", "threads")
            table.add(str(count), *(f"{1e3 * small[name][count]:.3f}" for name in ways))
        table.show()
        workload = Workload(args.geometry, dtype="float32", threads=1, ranks=(_RANK,) * 2)
        bench = SlowLinkBench(workload, Path(directory), args.workers)
        rows = first_tokens(bench, [2e7, 2e8, 2e9], [8, 64], args.rounds)
        bench.engine.close()
    table = Table("first token of a cold adapter of rank 64, over a warm one's", [
        "MB/s", "tokens", "warm, ms", "wait", "stream", "assist", "chosen", "assisted",
    ])  # fmt: skip
    for row in rows:
        ratios = (f"{row[name]:.2f}" for name in ("wait", "stream", "assist", "chosen"))
        table.add(
            f"{row['rate'] / 1e6:g}", str(row["tokens"]), f"{1e3 * row['warm']:.1f}", *ratios, f"{row['assisted']:g}"
        )
    table.show()
    return conclude({"handovers": small, "first_tokens": rows}, ok=True)


if __name__ == "__main__":
    sys.exit(main())
