"""Twice the KV that fits: requests that outgrow the arena, preempted to host memory or computed again, in one run.

    python -m chorus.perf.cpu.swapping [--geometry 125m] [--requests 12] [--times 2] [--rounds 2]

All requests come at once and draw more tokens than admission expects while none has ended, until their KV would be
`--times` what the arena holds: some are preempted. The same requests are served in turns with `preemption` swap,
recompute and auto, and by an arena with room for all. That one's rate is out of swapping's reach: its steps have all
rows, while less KV takes more steps of fewer rows, however fast copies are ("copies, ms" is what they take in all). A
rate is output tokens per second until the last request has ended; a ratio is the median over rounds of the ratios
within each. Bars: swap at least 1.2 times recompute where it is what the engine's own estimate chooses, and auto at
least 0.98 of the better of the two.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.engine_stats import EngineStats
from ...core.requests.request import Request
from ...core.requests.sampling_params import SamplingParams
from ..report.command import judge, parser
from ..report.table import Goal, Table
from .random_model import adapters, checkpoint
from .workload import Geometry, Workload

LEAST_GAIN = 1.2
LEAST_AUTO = 0.98

SETTINGS = ("swap", "recompute", "auto", "room for all")


class Served(NamedTuple):
    """Results of a run: output tokens per second, the engine's counts, seconds that its copies take by its estimate,
    and that estimate for one page beside that of computing it.
    """

    rate: float
    stats: EngineStats
    copy_seconds: float
    page_copied: float
    page_computed: float


class Bench:
    """A model and its adapters, and an engine for each run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._workload = Workload(
            options.geometry, requests=options.requests, prompt_tokens=options.prompt_tokens, threads=options.threads,
            ranks=(options.rank,),
        )  # fmt: skip
        work_dir = Path(options.work_dir)
        self._model, self._adapters = checkpoint(self._workload, work_dir), adapters(self._workload, work_dir)
        self._params = SamplingParams(max_tokens=options.output_tokens, temperature=0, ignore_eos=True)

    def serve(self, setting: str) -> Served:
        """Serve all requests from a cold start, every second with the adapter."""
        engine = self._engine(setting)
        for index, prompt in enumerate(self._workload.prompts()):
            adapter = next(iter(self._adapters)) if index % 2 else None
            engine.add_request(Request(str(index), list(prompt), self._params, adapter))
        began = time.perf_counter()
        while engine.has_work():
            engine.step()
        seconds = time.perf_counter() - began
        stats, costs = engine.stats(), engine.costs
        engine.check_integrity()
        num_copied = stats.swapped_bytes_out // engine.executor.layout.page_bytes
        engine.close()
        return Served(
            stats.num_generated_tokens / seconds, stats, num_copied * costs.swapped_page, costs.swapped_page,
            costs.prefix_page,
        )  # fmt: skip

    def _engine(self, setting: str) -> Engine:
        options = self._options
        block = EngineConfig.model_fields["block_tokens"].default
        pages = -(-(options.prompt_tokens + options.output_tokens) // block) * options.requests
        spare = 1 + self._adapter_pages(block)
        pages = spare + (pages if setting == "room for all" else int(pages / options.times))
        config = EngineConfig(
            model=self._model, max_num_seqs=options.requests, threads=options.threads, prefix_cache=False,
            num_pages=pages, preemption="recompute" if setting == "room for all" else setting, seed=0,
        )  # fmt: skip
        engine = Engine.from_config(config)
        for name, path in self._adapters.items():
            engine.store.register(name, path)
        return engine

    def _adapter_pages(self, block: int) -> int:
        """Return the pages of an adapter, for which each arena has room beside KV."""
        page = self._workload.geometry.kv_elems_per_token * block
        return -(-self._workload.adapter_params(0) // page)


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[Goal]]:
    """Return the result, and the bars that it is held against."""
    bench, rounds = Bench(options), []
    for index in range(options.rounds):
        order = SETTINGS if index % 2 else SETTINGS[::-1]
        rounds.append({setting: bench.serve(setting) for setting in order})
    ratios = {name: median(each[name].rate / each["recompute"].rate for each in rounds) for name in SETTINGS}
    rates = {name: median(each[name].rate for each in rounds) for name in SETTINGS}
    table = Table(
        f"{options.requests} requests, {options.times:g} times the KV that fits",
        ("", "tokens/s", "of recompute", "preempted", "swapped out", "MB out", "MB in", "copies, ms"),
    )
    for name in SETTINGS:
        last = rounds[-1][name]
        out, back = last.stats.swapped_bytes_out / 1e6, last.stats.swapped_bytes_in / 1e6
        table.add(
            name, rates[name], ratios[name], last.stats.num_preemptions, last.stats.num_swaps_out, out, back,
            last.copy_seconds * 1e3,
        )  # fmt: skip
    table.show()
    last = rounds[-1]["auto"]
    result = {
        "ratios": ratios, "tokens_per_second": rates,
        "preemptions": {name: rounds[-1][name].stats.num_preemptions for name in SETTINGS},
        "page_seconds": {"copied": last.page_copied, "computed": last.page_computed},
    }  # fmt: skip
    best = max(ratios["swap"], ratios["recompute"])
    goals = [Goal("tokens/s, auto over the better of the two", ratios["auto"] / best, LEAST_AUTO)]
    if last.page_copied < last.page_computed:
        goals.append(Goal("tokens/s, swap over recompute", ratios["swap"], LEAST_GAIN))
    return result, goals


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--geometry", type=Geometry.parse, default=Geometry(), help="the model's shapes, as of perf.cpu")
    add("--requests", type=int, default=12, help="that come at once, each with a seat")
    add("--prompt-tokens", type=int, default=256)
    add("--output-tokens", type=int, default=1024)
    add("--times", type=float, default=2.0, help="KV of all requests, of what the arena holds")
    add("--rank", type=int, default=16, help="of the adapter that every second request has")
    add("--rounds", type=int, default=2)
    add("--threads", type=int, help="CPU threads; default: all")
    add("--work-dir", default=str(Path(tempfile.gettempdir()) / "chorus-swapping"), help="where models are kept")
    return judge(*run(command.parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())
