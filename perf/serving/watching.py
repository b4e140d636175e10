"""What watching the operator's page costs the server: `python -m chorus.perf.serving.watching`.

Pairs of rounds on one `chorus serve` (the built-in model): streams side by side, alone and while readers of
`/ui/events` watch, in turns of changing order. What counts is the processor time of the whole server for a token, read
from the kernel, so that what else the machine does hardly shows. The bar: at most 5 % more at the median of the pairs.

Then the scale: the engine without tensors with many pages and adapters at work, a picture of it taken after every few
steps and encoded. Bytes of an event, and processor milliseconds on the engine's thread and beside it.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.requests.request import Request
from ...core.requests.sampling_params import SamplingParams
from ...memory.host.images import InlineReads
from ...server.engine.picture import Picture
from ...server.ui.frames import Frames
from ..cpu.schedule_time import FakeExecutor
from ..report.command import judge, parser, say
from ..report.table import Goal, Table
from .http_cost import spent, streams
from .server_process import launched
from .streams import Address

MOST = 1.05
"""Most processor time of the server for a token while it is watched, over that while it is not."""

_WATCH = b"GET /ui/events HTTP/1.1\r\nhost: localhost\r\n\r\n"


def watch(address: Address, events: Any, stop: Any) -> None:
    """Read the page's events until `stop` is set, and count them."""
    import socket

    with socket.create_connection(address) as connection:
        connection.sendall(_WATCH)
        connection.settimeout(0.2)
        while not stop.is_set():
            try:
                data = connection.recv(1 << 16)
            except TimeoutError:
                continue
            with events.get_lock():
                events.value += data.count(b"event: ")


def pairs(args: Any) -> Iterator[tuple[float, float, int]]:
    """Processor microseconds for a token alone and watched, and the events that were read, of each pair."""
    context = multiprocessing.get_context("spawn")
    flags = ["--threads", "1", "--max-num-seqs", str(args.streams)]
    with launched(flags) as server, context.Pool(1) as clients:

        def cost() -> float:
            work = lambda: clients.apply(streams, (server.address, args.streams, args.tokens))  # noqa: E731
            parts, _, count = spent(server, work)
            return 1e6 * sum(parts.values()) / count

        def watched() -> tuple[float, int]:
            events, stop = context.Value("i", 0), context.Event()
            readers = [context.Process(target=watch, args=(server.address, events, stop)) for _ in range(args.watchers)]
            for reader in readers:
                reader.start()
            while events.value < args.watchers:  # all have begun
                time.sleep(0.01)
            value = cost()
            stop.set()
            for reader in readers:
                reader.join()
            return value, events.value

        cost()
        for index in range(args.pairs):
            alone = cost() if index % 2 else 0.0
            value, count = watched()
            alone = alone or cost()
            say(f"pair {index + 1}: {alone:.0f} alone, {value:.0f} watched, {count} events")
            yield alone, value, count


def scale(num_pages: int, num_adapters: int, ticks: int) -> dict[str, float]:
    """Median bytes of an event, and processor milliseconds, of an engine with 256 requests at work."""
    executor = FakeExecutor(num_pages)
    config = EngineConfig(model=Path("none"), max_num_seqs=256, max_num_batched_tokens=1 << 16, num_pages=num_pages,
                          prefix_cache=True, max_waiting=None, host_cache_bytes=64 << 30)  # fmt: skip
    engine = Engine(config, executor, reads=InlineReads())
    for index in range(num_adapters):
        engine.store.register(f"adapter-{index:05}", Path(f"a{index}-16"))
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    frames, number, found = Frames(), 0, []
    for tick in range(ticks + 20):
        for _ in range(20):
            while len(engine.scheduler.running) + len(engine.scheduler.waiting) < 320:
                prompt = [number % 251, number // 251 % 251] * 1600
                adapter = f"adapter-{number % num_adapters:05}"
                engine.add_request(Request(f"r{number}", prompt, params, adapter, tenant=f"t{number % 50}"))
                number += 1
            engine.step()
        times = [time.thread_time()]
        picture = Picture.of(engine)
        times.append(time.thread_time())
        data, _ = frames.encode(picture, engine.stats(), {}, None)
        times.append(time.thread_time())
        if tick >= 20:
            found.append((len(data), 1000 * (times[1] - times[0]), 1000 * (times[2] - times[1])))
    _, whole = frames.encode(Picture.of(engine), engine.stats(), {}, {})
    stats = engine.stats()
    engine.close()
    size, taking, encoding = (median(column) for column in zip(*found, strict=True))
    return {"pages": stats.num_pages, "pages_in_use": stats.num_pages - stats.num_free_pages, "adapters": num_adapters,
            "bytes_of_an_event": size, "bytes_of_everything": len(whole), "ms_on_the_engine_s_thread": taking,
            "ms_beside_it": encoding}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--watchers", type=int, default=3, help="readers of the page's events")
    command.add_argument("--pairs", type=int, default=6, help="pairs of rounds; 0: the scale alone")
    command.add_argument("--streams", type=int, default=16, help="streams side by side")
    command.add_argument("--tokens", type=int, default=200, help="tokens of a stream")
    command.add_argument("--num-pages", type=int, default=100_000, help="of the arena, for the scale")
    command.add_argument("--adapters", type=int, default=5_000, help="for the scale")
    command.add_argument("--ticks", type=int, default=10, help="events, for the scale; 0: the pairs alone")
    args = command.parse_args(argv)
    result: dict[str, Any] = {}
    goals = []
    if args.pairs:
        found = list(pairs(args))
        ratios = [value / alone for alone, value, _ in found]
        table = Table("processor µs of the server for a token", ["pair", "alone", "watched", "ratio", "events"])
        for index, ((alone, value, count), ratio) in enumerate(zip(found, ratios, strict=True), 1):
            table.add(index, alone, value, ratio, count)
        table.show()
        result = {"ratio": round(median(ratios), 4), "ratios": [round(one, 4) for one in ratios]}
        goals.append(Goal(f"processor time for a token, {args.watchers} watch", median(ratios), MOST, at_most=True))
    if args.ticks:
        sizes = scale(args.num_pages, args.adapters, args.ticks)
        result["scale"] = {name: round(value, 3) for name, value in sizes.items()}
        table = Table("scale", ["what", "median"])
        for name, value in sizes.items():
            table.add(name.replace("_s_", "'s ").replace("_", " "), value)
        table.show()
    return judge(result, goals)


if __name__ == "__main__":
    sys.exit(main())
