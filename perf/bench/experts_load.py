"""The load of an adapter on all experts of a mixture, from its file into pages, and the first token that waits for it.

The adapter is written, registered, read into the host cache and copied into pages by the adapter store; the base model
is not needed for that, so shapes may be true ones whatever the machine's memory is. The limit is the time in which this
machine reads the file's bytes into fresh memory and copies them into the same pages, measured in turns with the load.
Processors' times are compared, so that other processes don't count; a disk that is waited for doesn't either.

With `--prompt` an engine with random weights serves a first token, with the adapter in its pages and on the disk. The
base model must fit then: a few layers, or many narrow ones with an adapter of more ranks.

Tests: tests/perf/bench/test_experts_load.py
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ...core.costs.measure import forget_file
from ...core.executors.adapters import ModelAdapters
from ...core.model.read_config import read_model_config
from ...memory.adapters.adapter import Adapter
from ...memory.adapters.store import AdapterStore
from ...memory.files.form import WEIGHTS_FILE
from ...memory.files.identity import with_content
from ...memory.files.module_paths import ExpertForm
from ...memory.host.images import HostImages, ThreadReads
from ...memory.pages import hugepages
from ...memory.pages.arena import Arena
from ...memory.pages.eviction import EvictionOrder, RestoreCosts
from ...memory.pages.layout import PageLayout
from ...memory.pages.pool import PagePool
from ..report.command import judge, parser
from ..report.table import Goal, Table, rows_table
from .driving import asked, first_token_seconds, opened
from .models.random_mixture import MixtureShape, write_adapter

PLAIN_BAR = 0.5
"""Least rate of a load, as a share of that of reading and copying the bytes once."""

OVERLAP_BAR = 0.5
"""Least share of the shorter of load and prefill that a cold first token saves of their sum."""

NAME = "it"
_READ_BYTES = 8 << 20
_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Loaded:
    """Seconds and bytes of a load."""

    register: float
    """Seconds until its configuration and its header are read and checked."""
    load: float
    """Seconds from then until it is in its pages."""
    processor: float
    """Seconds of processors for both."""
    pages_bytes: int
    """In pages, and as many in the host cache."""
    above: int
    """Bytes by which the process's memory was above what is kept at most."""
    pause: float
    """Seconds that another thread waited for the interpreter at most."""


class LoadOnly:
    """Pages, host memory and an adapter store for a model, without its weights. All pages are in memory."""

    def __init__(self, model: Path, num_bytes: int) -> None:
        """num_bytes: of the pages."""
        config = read_model_config(model)
        shape = len(config.attention_layers), config.num_kv_heads, config.head_dim, _BLOCK_TOKENS, 2
        layout = PageLayout(*shape)
        self.arena = Arena(layout, num_bytes // layout.page_bytes + 2, torch.bfloat16, "cpu")
        self.arena.pages.fill_(1)
        pool, costs = PagePool(self.arena.num_pages), RestoreCosts()
        images: HostImages[Adapter] = HostImages(2 * num_bytes, ThreadReads())
        backend = ModelAdapters(config, self.arena, torch.bfloat16)
        order = EvictionOrder()
        self.store = AdapterStore(
            pool, backend, images, order, costs, page_bytes=layout.page_bytes, clock=time.monotonic
        )

    def __enter__(self) -> LoadOnly:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def load(self, path: Path) -> Loaded:
        """Load an adapter that is on the disk alone, and forget it again."""
        gc.collect()
        before = _memory("VmRSS")
        with _longest_pause() as pause:
            forget_peak()
            spent, began = time.process_time(), time.perf_counter()
            adapter = self.store.register(NAME, path)
            registered = time.perf_counter()
            wait_for_pages(self.store, adapter)
            ended, spent = time.perf_counter(), time.process_time() - spent
        num_bytes = adapter.num_pages * self.arena.layout.page_bytes
        found = Loaded(
            register=registered - began,
            load=ended - registered,
            processor=spent,
            pages_bytes=num_bytes,
            above=max(0, _memory("VmHWM") - before - num_bytes),
            pause=max(pause, default=0.0),
        )
        self.store.release(adapter)
        self.store.unregister(NAME)
        return found

    def plain_seconds(self, path: Path) -> tuple[float, float]:
        """Seconds to read a file's bytes into fresh memory, and to copy them into the pages; and of processors."""
        spent, began = time.process_time(), time.perf_counter()
        with path.open("rb", buffering=0) as file:
            size = path.stat().st_size
            data = hugepages.zeros((size,), torch.uint8)
            target, done = data.numpy().data, 0
            while done < size:
                done += file.readinto(target[done : done + _READ_BYTES])
        self.arena.pages.view(-1).view(torch.uint8)[:size] = data
        return time.perf_counter() - began, time.process_time() - spent


def wait_for_pages(store: AdapterStore, adapter: Adapter) -> None:
    """Have an adapter read and copied, as a request that waits for it does, and pin it."""
    store.acquire(adapter)
    while adapter.transfer is not None:
        for failed, error in store.poll():
            raise RuntimeError(f"{failed} could not be loaded") from error
        store.images.wait(0.001)


def forget_peak() -> None:
    """Have the system count the process's peak memory from now on."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _memory(field: str) -> int:
    """Bytes of the process: VmRSS, or VmHWM, the peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


@contextmanager
def _longest_pause() -> Iterator[list[float]]:
    """A thread that wants the interpreter every millisecond: its waits in seconds, beyond that."""
    waits, ended = list[float](), threading.Event()

    def watch() -> None:
        before = time.perf_counter()
        while not ended.wait(0.001):
            now = time.perf_counter()
            waits.append(now - before - 0.001)
            before = now

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield waits
    finally:
        ended.set()
        thread.join()


class FirstTokens:
    """An engine with random weights, and the first tokens of its requests."""

    def __init__(self, model: Path, prompt: int, num_bytes: int, threads: int) -> None:
        """num_bytes: of adapters in pages."""
        layout_bytes = _page_bytes(model)
        self._opened = opened(
            model,
            inline_reads=False,
            load_format="dummy",
            max_model_len=prompt + 512,
            max_num_seqs=4,
            max_num_batched_tokens=max(64, prompt),
            num_pages=num_bytes // layout_bytes + 4 * -(-(prompt + 512) // _BLOCK_TOKENS) + 4,
            host_cache_bytes=2 * num_bytes + (64 << 20),
            prefix_cache=False,
            threads=threads,
        )
        self._prompt = [3 + index % 61 for index in range(prompt)]

    def __enter__(self) -> FirstTokens:
        self.engine = self._opened.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def to_disk(self, path: Path) -> Adapter:
        """Forget pages and host image of the adapter."""
        store = self.engine.store
        if NAME in store:
            store.unregister(NAME)
        return store.register(NAME, path)

    def seconds(self, adapter: str | None = NAME) -> float:
        """Seconds until the first token of a request that arrives now."""
        return first_token_seconds(self.engine, asked(self._prompt, adapter))

    def load_seconds(self, path: Path) -> float:
        """Seconds in which the engine's store brings the adapter into pages, without a request."""
        adapter, began = self.to_disk(path), time.perf_counter()
        wait_for_pages(self.engine.store, adapter)
        found = time.perf_counter() - began
        self.engine.store.release(adapter)
        return found

    def steps_beside(self, path: Path | None, count: int) -> list[float]:
        """Seconds of decode steps of the base model, while the adapter is read, if a path is given."""
        request, store = asked(self._prompt, max_tokens=count + 1), self.engine.store
        self.engine.add_request(request)
        while not request.num_output_tokens:
            self.engine.step()
        adapter = None if path is None else self.to_disk(path)
        if adapter is not None:
            store.loads.fetch(adapter)
        seconds = []
        while self.engine.has_work():
            began = time.perf_counter()
            self.engine.step()
            seconds.append(time.perf_counter() - began)
        while adapter is not None and not store.loads.fetch(adapter):
            time.sleep(0.001)
        return seconds


def _page_bytes(model: Path) -> int:
    config = read_model_config(model)
    return PageLayout(len(config.attention_layers), config.num_kv_heads, config.head_dim, _BLOCK_TOKENS, 2).page_bytes


def measure_loads(model: Path, adapter: Path, rounds: int, *, uncached: bool = False) -> dict[str, Any]:
    """Loads in turns with plain reads. uncached: the file is read from the disk itself."""
    file = adapter / WEIGHTS_FILE
    loads, plains = list[Loaded](), list[tuple[float, float]]()
    with LoadOnly(model, 2 * file.stat().st_size) as place:
        for _ in range(rounds):
            if uncached:
                forget_file(file)
            plains.append(place.plain_seconds(file))
            if uncached:
                forget_file(file)
            loads.append(place.load(adapter))
        manifest = place.store.register(NAME, adapter).manifest
        began = time.perf_counter()
        with_content(manifest)
        hashing = time.perf_counter() - began
    best = min(loads, key=lambda each: each.register + each.load)
    seconds, size = best.register + best.load, file.stat().st_size
    plain, plain_processor = map(min, zip(*plains, strict=True))
    processor = min(each.processor for each in loads)
    return {
        "file_bytes": size,
        "pages_bytes": best.pages_bytes,
        "register_seconds": best.register,
        "load_seconds": best.load,
        "plain_seconds": plain,
        "processor_seconds": processor,
        "plain_processor_seconds": plain_processor,
        "share": plain_processor / processor,
        "mb_per_second": size / seconds / 1e6,
        "above_bytes": max(each.above for each in loads),
        "pause_seconds": median(each.pause for each in loads),
        "hash_seconds": hashing,
    }


def measure_first_tokens(
    model: Path, adapter: Path, prompt: int, rounds: int, threads: int, *, neighbours: int
) -> dict[str, Any]:
    """Cold and warm first tokens in turns with loads. neighbours: decode steps of the base model beside a load."""
    found: dict[str, list[float]] = {"warm": [], "cold": [], "load": []}
    streamed: list[bool] = []
    with FirstTokens(model, prompt, 2 * (adapter / WEIGHTS_FILE).stat().st_size, threads) as tokens:
        for _ in range(rounds + 1):
            found["load"].append(tokens.load_seconds(adapter))
            found["warm"].append(tokens.seconds())
            tokens.to_disk(adapter)
            before = tokens.engine.store.num_streamed
            found["cold"].append(tokens.seconds())
            streamed.append(tokens.engine.store.num_streamed > before)
        alone = tokens.steps_beside(None, neighbours)
        beside = tokens.steps_beside(adapter, neighbours)
    warm, cold, load = (median(found[name][1:]) for name in ("warm", "cold", "load"))  # the first is slower
    return {
        "warm_seconds": warm,
        "cold_seconds": cold,
        "load_seconds": load,
        "overlap": (load + warm - cold) / min(load, warm),
        "streamed": sum(streamed) / len(streamed),
        "step_seconds": median(alone),
        "longest_alone": max(alone),
        "longest_beside": max(beside),
    }


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add, true = command.add_argument, MixtureShape()
    for name in ("layers", "hidden", "size", "count", "per-token", "heads", "kv-heads", "head-dim", "vocab"):
        add(f"--{name}", type=int, default=getattr(true, name.replace("-", "_")))
    add("--rank", type=int, default=8)
    add("--form", choices=list(ExpertForm), default=ExpertForm.EACH, help="of the file")
    add("--rounds", type=int, default=3)
    add("--uncached", action="store_true", help="read the file from the disk itself")
    add("--prompt", type=int, default=0, help="tokens of requests to an engine; 0: no engine is made")
    add("--neighbours", type=int, default=32, help="decode steps beside a load")
    add("--threads", type=int, default=torch.get_num_threads())
    arguments = command.parse_args(argv)
    names = "layers", "hidden", "size", "count", "per_token", "heads", "kv_heads", "head_dim", "vocab"
    shape = MixtureShape(*(getattr(arguments, name) for name in names))
    goals, found = list[Goal](), dict[str, Any]()
    gc.collect()
    gc.freeze()  # as servers do
    with TemporaryDirectory(prefix="chorus-experts-") as name:
        work = Path(name)
        model = shape.write_config(work / "model")
        adapter = write_adapter(work / NAME, shape, arguments.rank, ExpertForm(arguments.form))
        found["load"] = loads = measure_loads(model, adapter, arguments.rounds, uncached=arguments.uncached)
        _table_of_loads(loads).show()
        goals.append(Goal("rate / that of reading and copying once", loads["share"], PLAIN_BAR))
        if arguments.prompt:
            found["first_token"] = first = measure_first_tokens(
                model, adapter, arguments.prompt, arguments.rounds, arguments.threads, neighbours=arguments.neighbours
            )
            _table_of_first_tokens(first).show()
            goals.append(Goal("overlap of load and first token", first["overlap"], OVERLAP_BAR))
    return judge(found, goals)


def _table_of_loads(loads: dict[str, Any]) -> Table:
    times = (
        "header read and checked, s: register_seconds | weights read and copied into pages, s: load_seconds | "
        "bytes read and copied once, s: plain_seconds | MB/s: mb_per_second | "
        "processor time of the load, s: processor_seconds | "
        "processor time of reading and copying once, s: plain_processor_seconds | "
        "peak memory above what is kept, MB: above_bytes * 1e-6 | "
        "longest wait of another thread, ms: pause_seconds * 1e3 | hash of the content, s: hash_seconds"
    )
    sizes = "file, MB: file_bytes * 1e-6 | pages, and the same in the host cache, MB: pages_bytes * 1e-6"
    whole, table = (
        rows_table("", f"{sizes} | {times}", [loads]),
        Table("load of an adapter on all experts", ["", "value"]),
    )
    for row in zip(whole.columns, *whole.rows, strict=True):
        table.add(*row)
    return table


def _table_of_first_tokens(first: dict[str, Any]) -> Table:
    columns = (
        "adapter in pages: warm_seconds | load: load_seconds | adapter on disk: cold_seconds | overlap | "
        "begun in a load: streamed | step: step_seconds | longest: longest_alone | beside a load: longest_beside"
    )
    return rows_table("first token, s", columns, [first])


if __name__ == "__main__":
    raise SystemExit(main())
