"""Hand-overs to assistants beside CaraServe's micro-benchmarks (§7.4).

One projection's x goes to 1 … n processes and products come back: by shared memory and by sockets, 16 tokens to each
(Fig. 17); and the products of 128 tokens and rank 64 by so many processes and by as many of torch's threads (Fig. 18).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from ....core.config import EngineConfig
from ....core.cpus import available_cpus
from ....core.executors.assist import Assist, LendableAdapters, assistant_cpus
from ....core.executors.base import ModelExecutor
from ....memory.pages.arena import Arena
from ...cpu.workload import Geometry
from ...report.table import Table
from ..context import Context
from .registry import rows_table

RANK, TOKENS, SPLIT_TOKENS = 64, 16, 128

LLAMA_LAYER = Geometry(hidden=4096, ffn=11008, layers=1, heads=32, kv_heads=32, vocab=512)
"""One of Llama-2-7B's: shapes are read, weights are not."""


def run(context: Context) -> dict[str, Any]:
    """Median ms of a hand-over, by number of processes and way."""
    shape = context.pick(
        Geometry(hidden=64, ffn=128, layers=1, heads=4, kv_heads=4, vocab=64), LLAMA_LAYER, LLAMA_LAYER
    )
    rounds, most = context.pick(3, 100, 400), max(1, available_cpus() - 1)
    found: dict[str, Any] = {"rank": RANK, "tokens": TOKENS, "split_tokens": SPLIT_TOKENS, "rows": []}
    assist = _assistants(context, shape, most)
    try:
        assist.join()
        for count in range(1, most + 1):
            with context.row(found, f"hand-overs to {count}"):
                seconds = {
                    "shared": assist.time_handover(TOKENS * count, count, 1, rounds),
                    "socket": _by_sockets(shape.hidden, count, rounds),
                    "split": assist.time_handover(SPLIT_TOKENS, count, RANK, rounds),
                    "threads": _by_threads(shape.hidden, count, rounds),
                }
                found["rows"].append({"processes": count, **{way: 1e3 * each for way, each in seconds.items()}})
    finally:
        assist.close()
    return found


def _assistants(context: Context, geometry: Geometry, workers: int) -> Assist:
    model = context.work_dir / "shapes"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(geometry.config("float32")))
    config = EngineConfig(model=model, device="cpu", assist_workers=workers, max_num_batched_tokens=1024)
    shapes = ModelExecutor(config)
    assist = Assist(config, shapes.config, shapes.layout.page_elems, torch.float32)
    assist.use_adapters(LendableAdapters(shapes.config, Arena(shapes.layout, 2, torch.float32, "cpu"), torch.float32))
    return assist


def _by_sockets(hidden: int, count: int, rounds: int) -> float:
    """Seconds of the same hand-over where `multiprocessing`'s connections carry x and the products."""
    context, links, processes = multiprocessing.get_context("spawn"), [], []
    for cpu in assistant_cpus(count):
        here, there = context.Pipe()
        processes.append(context.Process(target=_answer, args=(there, hidden, cpu), daemon=True))
        processes[-1].start()
        links.append(here)
    x = torch.zeros(TOKENS, hidden).numpy()

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
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    torch.set_num_threads(1)
    a, b = torch.zeros(hidden, 1), torch.zeros(1, hidden)
    while (x := link.recv()) is not None:
        link.send((torch.from_numpy(x) @ a @ b).numpy())


def _by_threads(hidden: int, count: int, rounds: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    x, a, b = torch.zeros(SPLIT_TOKENS, hidden), torch.zeros(hidden, RANK), torch.zeros(RANK, hidden)
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
    return median(found)


def tables(values: dict[str, Any]) -> list[Table]:
    columns = {
        "processes": "processes", "shared memory": "shared", "socket": "socket", "own split": "split",
        "torch's threads": "threads",
    }  # fmt: skip
    title = (
        f"(q) hand-over of {values['tokens']} tokens to each process, and products of {values['split_tokens']} tokens "
        f"and rank {values['rank']}, ms"
    )
    return [rows_table(title, columns, values["rows"])]
