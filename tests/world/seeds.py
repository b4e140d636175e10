"""Lives of an engine drawn from seeds: `python -m tests.world.seeds --seeds 10000`.

The real engine, scheduler, adapter store, page pool and prefix cache run in virtual time over an executor that checks
every step, with reads that are slow, fail, end early or never end, and with aborts, reloads in place, pins, preemption,
KV that is copied out and back, merges, moves of requests, faults and tiny memory, under options drawn from all there
are. After every step the books must add up, every answer must be the one that the request gets alone, a token at a
time, and nothing may come from the cache of another tenant. Prints each failing seed with its cause; the same seed
gives the same life.

    python -m tests.world.seeds --first 250000 --seeds 750000 --jobs 1 --log seeds.log
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.requests.sampling_params import SamplingParams, Seeds
from chorus.core.requests.types import FinishReason, TokenLogprobs
from chorus.perf.report.command import conclude, parser

from .asked import Asked, Told, promise
from .checked_executor import (
    BASE_CONTENT,
    EOS,
    MAX_MODEL_LEN,
    VOCAB,
    CheckedAdapters,
    CheckedExecutor,
    CheckedShadow,
    Disk,
    next_token,
)
from .checked_swaps import CheckedSwaps
from .engine_life import Campaign, EngineLife, Lived, lived
from .late_results import late_results
from .virtual_reads import VirtualReads, World

PATIENCE = 120.0
"""Virtual seconds within which every request must have ended once nothing new comes."""
LONGEST_NAP = 0.5
"""Virtual seconds between two steps at most while only reads are waited for and nothing new comes."""
LOG_EVERY = 1000


class Life(EngineLife):
    """One engine in virtual time, all of it drawn from a seed."""

    names = ("alto", "bass", "tenor", "soprano")

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = self.rng
        self.world = World()
        self.prompts = [[rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 24))] for _ in range(3)]
        config = self._draw_config()
        self.seeds = Seeds(config.seed)
        self.disk = Disk(rng, rng.choice([0.0002, 0.002, 0.02, 0.2]), config.adapter_read_seconds)
        memory: dict = {}
        reads = VirtualReads(self.world, rng.randint(1, 3))
        adapters = CheckedAdapters(self.disk, reads, self.world, memory, rng)
        shadow = CheckedShadow(memory, self.world) if rng.random() < 0.7 else None
        is_swapping = config.preemption != "recompute"
        swaps = CheckedSwaps(config.block_tokens, memory, self.world, rng) if is_swapping else None
        self.executor = CheckedExecutor(config, adapters, self.world, memory, shadow, swaps)
        self.engine = Engine(config, late_results(self.executor, seed), self.world, reads)
        self.executor.pool = self.engine.pool
        for name in self.names[: rng.randint(1, len(self.names))]:
            self._register(name, self._new_directory())

    def _draw_config(self) -> EngineConfig:
        rng = self.rng
        block = rng.choice([1, 2, 4, 8])
        seqs = rng.choice([1, 2, 3, 4, 6])
        return EngineConfig(
            model=Path("made-up"), block_tokens=block,
            num_pages=2 + -(-rng.choice([24, MAX_MODEL_LEN, 64, 120]) // block) + rng.randint(1, 12), max_num_seqs=seqs,
            max_num_batched_tokens=max(seqs, rng.choice([4, 8, 16, 64])), chunked_prefill=rng.random() < 0.8,
            host_cache_bytes=rng.choice([0, 1, 500, 2000, 1 << 20, 1 << 20]), eviction=rng.choice(["cost", "lru"]),
            prefix_cache=rng.random() < 0.7, lookahead=rng.choice([1, 2, 8]), prefetch=rng.choice([0, 1, 3]),
            max_adapters_per_step=rng.choice([None, None, 1, 2]), max_overtake_seconds=rng.choice([0.0, 0.05, 1.0]),
            max_load_stall_seconds=rng.choice([0.0, 0.001, 0.02]), max_waiting=rng.choice([None, None, 3, 12]),
            share_prefix_cache=rng.random() < 0.3, adapter_read_seconds=rng.choice([0.05, 1.0, 30.0]),
            preemption=rng.choice(["recompute", "swap", "swap", "auto"]), seed=rng.randrange(1 << 30),
        )  # fmt: skip

    def _span(self) -> range:
        return range(self.rng.randint(20, 90))

    # -- requests

    def _ask(self) -> None:
        """One request, several that begin alike, or several answers of one prompt."""
        rng = self.rng
        name = rng.choice([None, *self.current, *self.current]) if rng.random() < 0.95 else rng.choice(self.names)
        shared = rng.choice(self.prompts)
        shared = shared[: rng.choice([0, len(shared) // 2, len(shared)])]
        tenant, salt = rng.choice(["", "", "a", "b"]), rng.choice(["", "", "", "salt"])
        own, is_one_prompt = [rng.randrange(2, VOCAB)], rng.random() < 0.3
        for _ in range(rng.choice([1, 1, 1, 3, 6])):
            if not is_one_prompt:
                own = [rng.randrange(2, VOCAB) for _ in range(rng.choice([1, 6]))]
            params = SamplingParams(
                max_tokens=rng.choice([None, *range(1, 13)]), temperature=rng.choice([0.0, 1.0]),
                ignore_eos=rng.random() < 0.5, stop_token_ids=tuple(rng.sample(range(VOCAB), rng.randint(0, 2))),
                prompt_logprobs=rng.choice([None, None, None, 0]), logprobs=rng.choice([None, None, None, 0]),
                seed=rng.choice([None, 7]),
            )  # fmt: skip
            if asked := self._submit(name, shared + own, self.seeds.fill(params), tenant, salt):
                self.executor.contents[asked.request.id] = _content(asked)

    def _alone(self, asked: Asked) -> Told:
        params, prompt, told = asked.request.params, asked.prompt, Told()
        seed = asked.request.seed if params.temperature else None
        while told.reason is None:
            token = next_token(_content(asked), prompt + told.tokens, seed)
            told.tokens.append(token)
            if token in params.stop_token_ids or (token in EOS and not params.ignore_eos):
                told.reason = FinishReason.STOP
            elif len(told.tokens) == params.max_tokens or len(prompt) + len(told.tokens) == MAX_MODEL_LEN:
                told.reason = FinishReason.LENGTH
        if params.logprobs is not None:
            told.logprobs = [TokenLogprobs(token, -1.0) for token in told.tokens]
        if params.prompt_logprobs is not None:
            told.scores = [TokenLogprobs(token, -float(at)) for at, token in enumerate(prompt) if at]
        return told

    def _preempt(self) -> None:
        """One after another, so that copies out and back overlap."""
        for _ in range(self.rng.choice([1, 1, 2, 4])):
            super()._preempt()

    # -- adapters

    def _new_directory(self) -> Path:
        self.num_directories += 1
        path = Path(f"directory-{self.num_directories}")
        self.disk.write(path, self.rng.randint(1, 5))
        return path

    def _directory(self, name: str) -> Path:
        """A new directory, or the adapter's own, overwritten in place."""
        adapter = self.current.get(name)
        if adapter is None or self.rng.random() >= 0.6:
            return self._new_directory()
        path = adapter.manifest.path
        self.disk.write(path, self.rng.randint(1, 5))
        self.reached["reloaded in place"] += adapter.requests > 0
        return path

    def _break_files(self, path: Path) -> None:
        self.disk.broken.add(path)
        self.disk.unlucky.add(self.disk.content[path])

    @property
    def has_hung(self) -> bool:
        return self.disk.has_hung

    def _is_unlucky(self, asked: Asked) -> bool:
        return _content(asked) in self.disk.unlucky

    # -- time

    def _wait(self) -> None:
        self.world.advance(self.rng.choice([0.001, 0.05, 2.0]))

    def _pause(self) -> None:
        self.world.advance(0.0005)

    def _drain(self) -> None:
        end, nap = self.world.now + PATIENCE, 0.0
        while self.engine.has_work():
            promise(self.world.now < end, f"requests never end: {list(self.active)}")
            if self._step():
                nap = 0.0
                self._check_books()
            else:  # the next step would do the same, until a read goes on or was waited for long enough
                nap = min(LONGEST_NAP, 2 * nap + 0.0005)
                self.world.advance(min(nap, max(0.0, self.world.next_time - self.world.now)))
        self._remove_adapters()
        self.world.advance(1.0)


def _content(asked: Asked) -> int:
    return BASE_CONTENT if asked.adapter is None else asked.adapter.manifest.mtime_ns


def live(seed: int) -> Lived:
    return lived(seed, Life)


def lives(seeds: range, jobs: int) -> Iterator[Lived]:
    if jobs == 1:
        yield from map(live, seeds)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(live, seeds, chunksize=50)


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--seeds", type=int, default=10_000, help="how many lives")
    command.add_argument("--first", type=int, default=0, help="the first seed; with --seeds 1 to see one again")
    command.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    command.add_argument("--log", type=Path, help="file to which progress is appended, to go on from with --first")
    args = command.parse_args(argv)
    campaign = Campaign(args.log, LOG_EVERY)
    for life in lives(range(args.first, args.first + args.seeds), args.jobs):
        campaign.add(life)
    return conclude(campaign.result(), not campaign.failed)


if __name__ == "__main__":
    sys.exit(main())
