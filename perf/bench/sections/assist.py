"""First tokens of an adapter that comes over a slow link: waited for, streamed, assisted, or begun as is chosen.

A prompt's adapter is in host memory and comes over a link of so many bytes a second; each way is over the same prompt
with the adapter in the arena, in one round (CaraServe §4).
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from statistics import median
from typing import Any

from ....core.cold_start import ColdStart
from ....core.cpus import available_cpus
from ....memory.pages.adapter_layout import AdapterLayout
from ...cpu.slow_link import slow_down
from ...report.table import Table
from ..context import Context
from ..subject import Subject
from .registry import rows_table

RANK = 64

WAYS: dict[str, ColdStart | None] = {
    "wait": ColdStart.WAIT, "stream": ColdStart.STREAM, "assist": ColdStart.ASSIST, "chosen": None,
}  # fmt: skip


class SlowLink:
    """An engine with assistants whose adapters come over a link of `rate` bytes a second."""

    def __init__(self, subject: Subject, paths: list[Path]) -> None:
        self._subject, self._engine, self._paths = subject, subject.engine, paths
        self.assist = subject.executor._assist  # noqa: SLF001
        self.rate = 1e12
        self._serial = 0
        slow_down(subject.executor.adapters, subject.arena_pages, self._pace)

    def _pace(self, layer: int, layout: AdapterLayout) -> None:
        time.sleep(4 * layout.num_elems / layout.num_layers / self.rate)

    def first_token(self, tokens: int, way: ColdStart | None, *, cold: bool = True) -> float:
        """Seconds from a request to its first token. way: None: as is chosen."""
        self._serial += 1
        name, store = f"slow{self._serial}", self._engine.store
        adapter = store.register(name, self._paths[self._serial % len(self._paths)])
        while not store.loads.fetch(adapter):
            time.sleep(0.001)
        if not cold:
            self._load(adapter)
        self.assist.way = way if way is not ColdStart.WAIT else ColdStart.STREAM
        request = self._subject.request(tokens, 1, name)
        began = time.perf_counter()
        if way is ColdStart.WAIT:
            self._load(adapter)
        self._engine.add_request(request)
        self._subject.finish()
        seconds = time.perf_counter() - began
        self._engine.adapters.remove(name)
        while store.loads.under_way:
            store.poll()
            time.sleep(0.001)
        return seconds

    def _load(self, adapter: Any) -> None:
        self._engine.store.prefetch(adapter)
        while adapter.transfer is not None:
            self._engine.store.poll()
            time.sleep(0.0002)


def run(context: Context) -> dict[str, Any]:
    """Ratios to a warm adapter's first token, medians over all rounds but the first."""
    adapters = context.adapters(RANK, 2)
    rates, prompts = context.pick((2e8,), (2e7, 2e8, 2e9), (2e7, 2e8, 2e9)), context.pick((8,), (8, 64), (8, 64))
    workers = max(1, available_cpus() - 1)
    found: dict[str, Any] = {"rank": RANK, "workers": workers, "rows": []}
    with Subject(
        context, adapters, max_seqs=1, max_batched=1024, max_len=128, assist_workers=workers, threads=1,
        dtype="float32", cpu_kernels="native", max_load_stall_seconds=60.0,
    ) as subject:  # fmt: skip
        link = SlowLink(subject, list(adapters.values()))
        for rate, tokens in itertools.product(rates, prompts):
            with context.row(found, f"assist, {rate / 1e6:g} MB/s, {tokens} tokens", subject.abort_all):
                link.rate = rate
                found["rows"].append(_row(link, tokens, context.pick(1, 5, 15)))
    return found


def _row(link: SlowLink, tokens: int, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in ("warm", *WAYS)}
    assisted = 0
    for index in range(rounds + 1):
        seconds["warm"].append(link.first_token(tokens, ColdStart.STREAM, cold=False))
        for name in list(WAYS)[:: 1 if index % 2 else -1]:
            before = link.assist.starts.num_assisted
            seconds[name].append(link.first_token(tokens, WAYS[name]))
            assisted += name == "chosen" and link.assist.starts.num_assisted > before
    over = {name: median([a / b for a, b in zip(seconds[name], seconds["warm"], strict=True)][1:]) for name in WAYS}
    warm = median(seconds["warm"]) * 1e3
    return {"rate": link.rate, "tokens": tokens, "warm_ms": warm, "assisted": assisted / (rounds + 1), **over}


def tables(values: dict[str, Any]) -> list[Table]:
    columns: dict[str, Any] = {"MB/s": lambda row: row["rate"] / 1e6, "tokens": "tokens", "warm, ms": "warm_ms"}
    columns |= {name: name for name in (*WAYS, "assisted")}
    return [
        rows_table(
            f"(p) first token of a cold adapter of rank {values['rank']}, over a warm one's", columns, values["rows"]
        )
    ]
