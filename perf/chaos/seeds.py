"""Lives of an engine drawn from seeds: `python -m chorus.perf.chaos.seeds --seeds 10000`.

The real engine, scheduler, adapter store, page pool and prefix cache run in virtual time over an executor that checks
every step, with reads that are slow, fail, end early or never end, and with aborts, reloads in place, pins, preemption,
moves of requests, faults and tiny memory, under options drawn from all there are. After every step the books must add
up, every answer must be the one that the request gets alone, told in as many pieces as it may, and nothing may come
from the cache of another tenant. Prints each failing seed with its cause; the same seed gives the same life.

    python -m chorus.perf.chaos.seeds --first 250000 --seeds 750000 --jobs 1 --log seeds.log
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.requests.request import Request, RequestState
from ...core.requests.sampling_params import InvalidRequest, SamplingParams
from ...core.requests.types import FinishReason, RequestOutput
from ...core.scheduling.overload import Overloaded
from ...memory.adapters.adapter import Adapter, Tier
from ...memory.files.error import AdapterFormatError
from .asked import Asked
from .checked_executor import (
    BASE_CONTENT,
    MAX_MODEL_LEN,
    VOCAB,
    CheckedAdapters,
    CheckedExecutor,
    Disk,
    Violation,
    promise,
)
from .virtual_reads import VirtualReads, World

NAMES = ("alto", "bass", "tenor", "soprano")
PATIENCE = 120.0
"""Virtual seconds within which every request must have ended once nothing new comes."""
LONGEST_NAP = 0.5
"""Virtual seconds between two steps at most while only reads are waited for and nothing new comes."""
LOG_EVERY = 1000


class Life:
    """One engine from its start to its end, all of it drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.world = World()
        self.reached: Counter[str] = Counter()
        self.asked: dict[str, Asked] = {}
        self.active: dict[str, Asked] = {}
        self.num_preemptions = self.num_given_up = 0
        self.current: dict[str, Adapter] = {}
        self.num_directories = 0
        self.prompts = [[rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 24))] for _ in range(3)]
        self.config = self._draw_config()
        self.disk = Disk(rng, rng.choice([0.0002, 0.002, 0.02, 0.2]), self.config.adapter_read_seconds)
        memory: dict = {}
        reads = VirtualReads(self.world, rng.randint(1, 3))
        adapters = CheckedAdapters(self.disk, reads, self.world, memory, rng)
        self.executor = CheckedExecutor(self.config, adapters, self.world, memory)
        self.engine = Engine(self.config, self.executor, self.world, reads)
        self.executor.pool = self.engine.pool
        for name in NAMES[: rng.randint(1, len(NAMES))]:
            self._register(name, self._new_directory())

    def run(self) -> Counter[str]:
        """Live; raises Violation, or whatever the engine raises that it must not."""
        try:
            actions = (
                [self._ask] * 6 + [self._step] * 14 + [self._abort, self._load, self._load, self._unload, self._pin,
                self._unpin, self._wait, self._break, self._fault, self._reclaim, self._preempt, self._move]
            )  # fmt: skip
            for _ in range(self.rng.randint(20, 90)):
                self.rng.choice(actions)()
                self._check_books()
            self._finish()
        finally:
            self.engine.close()
        return self.reached

    # -- what happens

    def _draw_config(self) -> EngineConfig:
        rng = self.rng
        block = rng.choice([1, 2, 4, 8])
        seqs = rng.choice([1, 2, 3, 4, 6])
        return EngineConfig(
            model=Path("made-up"), block_tokens=block,
            num_pages=2 + -(-rng.choice([24, MAX_MODEL_LEN, 64, 120]) // block) + rng.randint(1, 12), max_num_seqs=seqs,
            max_num_batched_tokens=max(seqs, rng.choice([4, 8, 16, 64])), chunked_prefill=rng.random() < 0.8,
            host_cache_bytes=rng.choice([0, 1, 500, 2000, 1 << 20]), eviction=rng.choice(["cost", "lru"]),
            prefix_cache=rng.random() < 0.7, lookahead=rng.choice([1, 2, 8]), prefetch=rng.choice([0, 1, 3]),
            max_adapters_per_step=rng.choice([None, None, 1, 2]), max_overtake_seconds=rng.choice([0.0, 0.05, 1.0]),
            max_load_stall_seconds=rng.choice([0.0, 0.001, 0.02]), max_waiting=rng.choice([None, None, 3, 12]),
            share_prefix_cache=rng.random() < 0.3, adapter_read_seconds=rng.choice([0.05, 1.0, 30.0]),
            seed=rng.randrange(1 << 30),
        )  # fmt: skip

    def _new_directory(self) -> Path:
        self.num_directories += 1
        path = Path(f"directory-{self.num_directories}")
        self.disk.write(path, self.rng.randint(1, 5))
        return path

    def _register(self, name: str, path: Path) -> None:
        try:
            self.current[name] = self.engine.store.register(name, path)
        except AdapterFormatError:
            pages = self.disk.pages[self.disk.content[path]]
            promise(pages >= self.engine.pool.num_usable, "an adapter that fits was refused")

    def _ask(self) -> None:
        """One request, several that begin alike, or several answers of one prompt."""
        rng = self.rng
        name = rng.choice([None, *self.current, *self.current]) if rng.random() < 0.95 else rng.choice(NAMES)
        shared = rng.choice(self.prompts)
        shared = shared[: rng.choice([0, len(shared) // 2, len(shared)])]
        tenant, salt = rng.choice(["", "", "a", "b"]), rng.choice(["", "", "", "salt"])
        own, is_one_prompt = [rng.randrange(2, VOCAB)], rng.random() < 0.3
        for _ in range(rng.choice([1, 1, 1, 3, 6])):
            if not is_one_prompt:
                own = [rng.randrange(2, VOCAB) for _ in range(rng.choice([1, 6]))]
            self._ask_one(name, shared + own, tenant, salt)

    def _ask_one(self, name: str | None, prompt: list[int], tenant: str, salt: str) -> None:
        rng = self.rng
        params = SamplingParams(
            max_tokens=rng.choice([None, *range(1, 13)]), temperature=rng.choice([0.0, 1.0]),
            ignore_eos=rng.random() < 0.5, stop_token_ids=tuple(rng.sample(range(VOCAB), rng.randint(0, 2))),
            prompt_logprobs=rng.choice([None, None, None, 0]), logprobs=rng.choice([None, None, None, 0]),
            seed=rng.choice([None, 7]),
        )  # fmt: skip
        request = Request(f"r{len(self.asked)}", prompt, params, name, tenant=tenant, cache_salt=salt)
        if not self._add(lambda: self.engine.add_request(request)):
            return
        adapter = None if name is None else self.current[name]
        promise(request.adapter is adapter, "a request got another version than the current one")
        content = BASE_CONTENT if adapter is None else adapter.manifest.mtime_ns
        self.executor.contents[request.id] = content
        scope = ("" if self.config.share_prefix_cache else tenant, salt)
        self.asked[request.id] = self.active[request.id] = Asked(request, adapter, content, prompt, scope)

    def _add(self, add: Callable[[], object]) -> bool:
        try:
            add()
        except Overloaded:
            self.reached["refused: overloaded"] += 1
        except InvalidRequest:
            self.reached["refused: invalid"] += 1
        else:
            return True
        return False

    def _abort(self) -> None:
        if self.active:
            self._drop(self.rng.choice(list(self.active)))
            self.reached["aborted"] += 1

    def _drop(self, id: str) -> None:
        promise(self.engine.abort(id), "a live request could not be aborted")
        self.active.pop(id).aborted = True
        promise(not self.engine.abort(id), "a request was aborted twice")

    def _move(self) -> None:
        """Take a request out as plain data and let it come back, as if from another engine."""
        ids = [id for id, asked in self.active.items() if asked.request.state is not RequestState.DONE]
        asked = self.active[self.rng.choice(ids)] if ids else None
        if asked is None or (asked.adapter is not None and self.current.get(asked.adapter.name) is not asked.adapter):
            return
        record = self.engine.export_request(asked.request.id)
        self._drop(asked.request.id)
        moved: list[Request] = []
        if self._add(lambda: moved.append(self.engine.import_request(record))):
            (asked.request,) = moved
            asked.aborted, asked.was_sent_back = False, True
            self.active[asked.request.id] = asked
            self.reached["moved"] += 1

    def _load(self) -> None:
        """Register a new directory, or overwrite one in place and register it again."""
        name = self.rng.choice(NAMES)
        adapter = self.current.get(name)
        if adapter is not None and self.rng.random() < 0.6:
            path = adapter.manifest.path
            self.disk.write(path, self.rng.randint(1, 5))
            self.reached["reloaded in place"] += adapter.requests > 0
        else:
            path = self._new_directory()
        self._register(name, path)

    def _unload(self) -> None:
        name = self.rng.choice(NAMES)
        if self.current.pop(name, None) is not None:
            self.engine.store.unregister(name)

    def _pin(self) -> None:
        name = self.rng.choice(NAMES)
        if name in self.current:
            try:
                is_pinned = self.engine.pin_adapter(name)
            except (InvalidRequest, AdapterFormatError, OSError, TimeoutError):
                is_pinned = False
            self.reached["pinned" if is_pinned else "not pinned"] += 1

    def _unpin(self) -> None:
        name = self.rng.choice(NAMES)
        if name in self.current:
            self.engine.unpin_adapter(name)

    def _wait(self) -> None:
        self.world.advance(self.rng.choice([0.001, 0.05, 2.0]))

    def _break(self) -> None:
        if self.current and self.rng.random() < 0.3:
            path = self.rng.choice(list(self.current.values())).manifest.path
            self.disk.broken.add(path)
            self.disk.unlucky.add(self.disk.content[path])

    def _fault(self) -> None:
        how = self.rng.choice(["glitch", "raises", "sick"])
        if how == "glitch":
            self.executor.glitches = 1
        elif self.active and self.rng.random() < 0.3:
            guilty = self.executor.raises_for if how == "raises" else self.executor.sick
            guilty.add(self.rng.choice(list(self.active)))

    def _preempt(self) -> None:
        scheduler = self.engine.scheduler
        if len(scheduler.running):
            scheduler.preempt(self.rng.choice(list(scheduler.running)))

    def _reclaim(self) -> None:
        if self.rng.random() < 0.3:
            self.engine.reclaim_idle()

    def _step(self) -> bool:
        """One step of the engine; False if there was nothing to run and nothing to tell."""
        plan = self.engine.begin_step()
        outputs = self.engine.end_step(plan)
        if self.executor.violations:
            raise self.executor.violations[0]
        self.executor.glitches = 0
        for output in outputs:
            self._take(output)
        preemptions, given_up = self.engine.scheduler.num_preemptions, self.engine.store.images.counts().num_given_up
        self.reached["preempted"] += preemptions > self.num_preemptions
        self.reached["reads given up"] += given_up > self.num_given_up
        self.num_preemptions, self.num_given_up = preemptions, given_up
        if not outputs:
            self.world.advance(0.0005)
        return plan is not None or bool(outputs)

    def _finish(self) -> None:
        """Nothing new comes: every request ends, and every page and byte comes back."""
        end, nap = self.world.now + PATIENCE, 0.0
        while self.engine.has_work():
            promise(self.world.now < end, f"requests never end: {list(self.active)}")
            if self._step():
                nap = 0.0
                self._check_books()
            else:  # the next step would do the same, until a read goes on or was waited for long enough
                nap = min(LONGEST_NAP, 2 * nap + 0.0005)
                self.world.advance(min(nap, max(0.0, self.world.next_time - self.world.now)))
        for name in list(self.current):
            self.engine.unpin_adapter(name)
            self.engine.store.unregister(name)
        self.current.clear()
        self.world.advance(1.0)
        for asked in self.asked.values():
            promise(asked.ended, f"{asked.request.id} was forgotten")
        self.engine.step()
        self.engine.check_when_idle()
        self.engine.reclaim_idle()
        self.engine.check_integrity()
        stats = self.engine.stats()
        promise(stats.num_free_pages == stats.num_pages, f"pages were lost: {stats}")

    # -- what must hold

    def _check_books(self) -> None:
        self.engine.check_integrity()
        store = self.engine.store
        held = {adapter: (pins := int(store.is_pinned(adapter)), pins) for adapter in self.current.values()}
        for asked in self.active.values():
            request, adapter = asked.request, asked.adapter
            if request.state in (RequestState.LATE, RequestState.SWAPPED):
                asked.was_sent_back = True
            if adapter is None:
                continue
            references, requests = held.get(adapter, (0, 0))
            is_here = request.state is not RequestState.DONE  # else its error is still to be told
            held[adapter] = references + request.is_running, requests + is_here
            if not asked.was_here:
                asked.was_here = store.tier(adapter) in (Tier.HOST, Tier.DEVICE)
        for adapter, expected in held.items():
            if (adapter.references, adapter.requests) != expected:
                raise Violation(f"{adapter} is held, or wanted, by too many or by too few: {expected}")

    def _take(self, output: RequestOutput) -> None:
        asked = self.asked[output.request_id]
        promise(not asked.ended, f"{output.request_id} goes on after its end")
        asked.take(output, self.asked.values())
        if output.finish_reason is None:
            return
        del self.active[output.request_id]
        if asked.reason is not FinishReason.ERROR:
            self.reached["answered"] += 1
            self.reached["answered from the prefix cache"] += asked.request.num_cached_tokens > 0
            return
        self.reached["ended with an error"] += 1
        id, text = output.request_id, asked.error or ""
        guilty = id in self.executor.raises_for or id in self.executor.sick or "pinned adapters" in text
        if not guilty:
            waited = self.disk.has_hung and "could not begin, because all others hang" in text
            promise(waited or asked.content in self.disk.unlucky, f"{id} failed without a reason: {text}")
            promise("changed on disk" not in text or not asked.was_here, f"{id} lost bytes that were here: {text}")


def live(seed: int) -> tuple[int, str | None, Counter[str]]:
    """One life: the seed, why it failed or None, and what it reached."""
    logging.disable(logging.CRITICAL)
    life = None
    try:
        life = Life(seed)
        return seed, None, life.run()
    except Exception as error:
        return seed, f"{type(error).__name__}: {error}", life.reached if life else Counter()


def lives(seeds: range, jobs: int) -> Iterator[tuple[int, str | None, Counter[str]]]:
    if jobs == 1:
        yield from map(live, seeds)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(live, seeds, chunksize=50)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chorus.perf.chaos.seeds", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10_000, help="how many lives (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed; with --seeds 1 to see one again")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--log", type=Path, help="file to which progress is appended, to go on from with --first")
    parser.add_argument("--raise", action="store_true", dest="raises", help="let the first failure raise, to debug it")
    args = parser.parse_args(argv)
    seeds = range(args.first, args.first + args.seeds)
    if args.raises:
        for seed in seeds:
            Life(seed).run()
        return 0
    start, reached, failed = time.perf_counter(), Counter[str](), []
    for seed, cause, found in lives(seeds, args.jobs):
        reached += found
        if cause is not None:
            failed.append(seed)
            if len(failed) <= 20:
                print(f"seed {seed}: {cause}", flush=True)
        if args.log is not None and (cause is not None or (seed + 1) % LOG_EVERY == 0):
            with args.log.open("a") as log:
                where = f"{time.strftime('%H:%M:%S')} {args.first} to {seed}: {len(failed)} failed"
                log.write(f"{where}, {reached['answered']} answers{f', seed {seed}: {cause}' if cause else ''}\n")
    seconds = time.perf_counter() - start
    for name, count in sorted(reached.items()):
        print(f"{name:32} {count:10}")
    print(json.dumps({"seeds": len(seeds), "failed": failed[:1000], "seconds": round(seconds, 1), "reached": reached}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
