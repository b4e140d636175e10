"""Slow and hanging adapter files under ordinary load: `python -m tests.attacks.slow_reads`.

The real engine on the CPU with the built-in model, on the server's worker thread. Requests of the base model and of
resident adapters arrive at a steady rate. Half of the rounds add as many requests for other adapters: half of these
come at 1 MB/s, layer by layer, the rest never. The bar: the p99 of the ordinary requests' time to first token is at
most 1.25 times that without the slow files. Rounds alternate, so other load on the machine affects both kinds.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import RequestOutput
from chorus.memory.files.manifest import AdapterManifest
from chorus.memory.host.image import HostImage
from chorus.memory.pages.adapter_layout import AdapterLayout
from chorus.perf.report.command import judge, parser
from chorus.perf.report.table import Goal, Table, spread
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from chorus.server.engine.worker import EngineWorker
from chorus.server.start.launch import take_short_turns

BYTES_PER_SECOND = 1e6


def hold_up(engine: Engine, begin: Callable[[Path], Callable[[float], object] | None]) -> None:
    """Let the engine's adapter reads take their time from now on.

    begin: called with the directory on the thread that reads; it may wait or raise. The function that it returns is
    called before layers arrive, with their share of all layers.
    """
    backend: Any = engine.executor.adapters
    inner = backend.read

    def read(manifest: AdapterManifest, layout: AdapterLayout, image: HostImage) -> None:
        arrive, publish, ready = begin(manifest.path), image.publish, 0

        def publish_late(num_ready: int) -> None:
            nonlocal ready
            assert arrive is not None
            arrive((num_ready - ready) / layout.num_layers)
            ready = num_ready
            publish(num_ready)

        if arrive is not None:
            image.publish = publish_late
        inner(manifest, layout, image)

    backend.read = read


def run_round(slow_adapters: int, args: argparse.Namespace, seed: int, where: Path) -> list[float]:
    """Times to first token of the ordinary requests, in seconds."""
    over, seconds = threading.Event(), args.megabytes * 1e6 / BYTES_PER_SECOND
    config = EngineConfig(
        model=BUILTIN_MODEL,
        memory_bytes=64 << 20,
        max_num_seqs=args.seats,
        prefix_cache=False,
        threads=1,
        seed=seed,
        device="cpu",
        max_waiting=None,
    )
    sources = sorted(path for path in BUILTIN_ADAPTERS.iterdir() if path.is_dir())
    copies = [Path(shutil.copytree(sources[2], where / f"slow-{index}")) for index in range(slow_adapters)]

    def begin(path: Path) -> Callable[[float], object] | None:
        if path in copies[1::2]:
            over.wait()
        return (lambda share: over.wait(seconds * share)) if path in copies else None

    def build() -> Engine:
        engine = Engine.from_config(config)
        for path in sources[:2]:
            engine.store.register(path.name, path)
            while not engine.adapters.pin(path.name):
                engine.store.images.wait(0.1)
        for path in copies:
            engine.store.register(path.name, path)
        hold_up(engine, begin)
        _run_alone(engine)
        return engine

    worker = EngineWorker(build)
    worker.start()
    take_short_turns()  # as a server does once it is loaded
    try:
        ordinary = [None, *(path.name for path in sources[:2])]
        return _serve(worker, random.Random(seed), args, ordinary, [path.name for path in copies])
    finally:
        over.set()
        worker.stop()


def _run_alone(engine: Engine) -> None:
    """Capture the graphs that are captured at first use, and measure the time of a prefill."""
    for index in range(2 * engine.config.max_num_seqs):
        engine.add_request(Request(f"warm {index}", [40] * 24, RequestParams(8, temperature=0, ignore_eos=True)))
    while engine.has_work():
        engine.step()


def _serve(
    worker: EngineWorker, rng: random.Random, args: argparse.Namespace, ordinary: list[str | None], slow: list[str]
) -> list[float]:
    """Open-loop arrivals: a request's time counts from its planned arrival. Each slow one has an ordinary one."""
    params = RequestParams(16, temperature=0, ignore_eos=True)
    took: list[float] = []
    open_ones: list[threading.Event] = []
    slow_ids: list[str] = []

    def ask(name: str, adapter: str | None, due: float) -> None:
        done = threading.Event()
        open_ones.append(done)

        def take(output: RequestOutput) -> None:
            if output.token_ids and not done.is_set():
                took.append(time.perf_counter() - due)
                done.set()
            elif output.finish_reason is not None:
                done.set()

        worker.submit(Request(name, _prompt(rng), params, adapter), take)

    start = due = time.perf_counter()
    while due < start + args.seconds:
        time.sleep(max(0.0, due - time.perf_counter()))
        index = len(open_ones)
        ask(f"o{index}", ordinary[index % len(ordinary)], due)
        if slow:
            slow_ids.append(f"s{index}")
            worker.submit(Request(f"s{index}", _prompt(rng), params, slow[index % len(slow)]), lambda output: None)
        due += rng.expovariate(args.rate)
    if not all(done.wait(30.0) for done in open_ones) or len(took) != len(open_ones):
        raise RuntimeError(f"{len(open_ones) - len(took)} of {len(open_ones)} ordinary requests got no token")
    for name in slow_ids:
        worker.abort(name)
    worker.call(Engine.check_integrity).result()
    return took


def _prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(30, 90) for _ in range(rng.randint(8, 40))]


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--slow", type=int, default=40, help="adapters that are slow or hang")
    add("--megabytes", type=float, default=25.0, help="of a slow one's file")
    add("--seconds", type=float, default=6.0, help="of a round")
    add("--rounds", type=int, default=4, help="of each kind")
    add("--rate", type=float, default=60.0, help="ordinary requests per second")
    add("--seats", type=int, default=16, help="max_num_seqs")
    args = command.parse_args(argv)
    seen: dict[str, list[float]] = {"without": [], "with": []}
    for index in range(args.rounds):
        for kind in ("without", "with") if index % 2 == 0 else ("with", "without"):
            with tempfile.TemporaryDirectory() as where:
                count = args.slow if kind == "with" else 0
                took = run_round(count, args, index, Path(where))
            seen[kind] += took
    found = {kind: ms for kind, took in seen.items() if (ms := spread(1e3 * seconds for seconds in took))}
    table = Table("TTFT, ms", ["slow files", "requests", "p50", "p99", "max"])
    for kind, ms in found.items():
        table.add(kind, len(seen[kind]), ms["p50"], ms["p99"], ms["max"])
    table.show()
    ratio = found["with"]["p99"] / found["without"]["p99"]
    values = {kind: round(ms["p99"], 3) for kind, ms in found.items()}
    result = {"p99_ratio": round(ratio, 3), "ttft_p99_ms": values, "slow": args.slow}
    return judge(result, [Goal("p99 with slow files / without", ratio, 1.25, at_most=True)])


if __name__ == "__main__":
    sys.exit(main())
