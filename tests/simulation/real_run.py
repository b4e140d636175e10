"""Simulation test of the real engine on the CPU: `python -m tests.simulation.real_run --answers 30000 --seed 1`.

The built-in model and its adapters, one engine after another under options drawn from all there are, with a small
arena, tenants and salts, all that a request may ask, aborts, reloads, removals, pins, merges, preemption, KV that is
swapped at once or late or is lost on its way, moves of requests, steps that fail and reads that come late, in pieces,
fail or hang. The invariants are
checked after every step. Every answer must be the one that a request gets alone in a calm engine, with its
log-probabilities.

    python -m tests.simulation.real_run --answers 30000 --seed 1 --log runs.log
    python -m tests.simulation.real_run --answers 20000 --seed 1 --first 31
    python -m tests.simulation.real_run --ranks 2           # or: --offload-workers 1, with adapters over a slow link
    python -m tests.simulation.real_run --base qwen3.5      # a tiny random model: a name of tests/core/tiny_families.py
    python -m tests.simulation.real_run --base qwen3-moe --kv-cache-dtype fp8
    python -m tests.simulation.real_run --images gemma3     # a tiny random model that sees, asked about images
    python -m tests.simulation.real_run --files             # cached prefixes in files, which all engines share
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from tokenizers import Tokenizer

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine, _encoder_of
from chorus.core.executors.base import ModelExecutor
from chorus.core.executors.choice import open_executor
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.policies import Policies
from chorus.core.requests.grammar import Grammar
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import StepPlan, StepResult
from chorus.core.sleep import CannotSleep, Sleep
from chorus.memory.adapters.adapter import Adapter, Tier
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.pages.eviction import RestoreCosts
from chorus.perf.report.command import conclude, parser
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from chorus.server.demo.skills import BASE, SKILLS, prompt, sample_inputs

from ..attacks.slow_reads import hold_up
from ..core.executors.slow_link import slow_down
from ..core.speculation.stand_ins import Drawn, Free
from ..core.tiny_families import make_tiny
from .asked import Asked, Told, Violation, promise
from .engine_run import Campaign, EngineRun, Outcome, run_seed
from .invariants import Invariants
from .late_results import late_results
from .late_swaps import LateSwaps
from .made_up_images import Prompt

MAX_TOKENS = 24
TEXTS = 8
ANSWERS_PER_ENGINE = {"auto": 400, "torch": 120}
FAULT = "an injected fault"
CLEAR = 2e-3
"""By how much a token's log-probability exceeds the next one's."""
GRACE = 5.0
"""Seconds until every page is back after the last read was let go."""
WAYS: list[dict[str, Any]] = [
    {},
    {},
    {},
    {},
    {"max_tokens": None},
    {"max_tokens": 3},
    {"stop_token_ids": (97, 101, 105)},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"logprobs": 0, "prompt_logprobs": 0},
    {"logit_bias": {101: 2.0, 97: -100.0}},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"min_tokens": 9},
    {"bad_words": ((101,), (97, 98))},
    {"allowed_token_ids": tuple(range(90, 125))},
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"ignore_eos": True},
    {"grammar": Grammar("regex", "[a-f ]{3,12}(yes|no)")},
]
"""Options that requests may have in addition to a temperature and a seed."""

GREEDY_WAYS: list[dict[str, Any]] = [
    {},
    {},
    {"max_tokens": 3},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"logprobs": 0, "prompt_logprobs": 0},
    {"ignore_eos": True},
]
"""Those of requests to tiny random models: they leave the best token as it is."""


@dataclass(frozen=True)
class Base:
    """A model, its adapters, and prompts for the base model, None, and for each adapter."""

    model: Path
    adapters: Mapping[str, Path]
    prompts: Mapping[str | None, list[Prompt]]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of every engine's configuration."""

    ways: list[dict[str, Any]] = field(default_factory=lambda: WAYS)
    temperatures: tuple[float, ...] = (0.0, 0.0, 1.0)
    is_large: bool = False
    """True if adapters take many pages: the smallest pool has room for one."""
    least_tokens: int = 0
    """Tokens that a step must have room for, beside one of each sequence."""


def demo_base() -> Base:
    """The built-in model, whose adapters are trained, so that one for another gives another answer."""
    tokenizer = Tokenizer.from_file(str(BUILTIN_MODEL / "tokenizer.json"))
    prompts = {
        name: [Prompt(tokenizer.encode(prompt(text)).ids) for text in sample_inputs(skill, TEXTS, 0)]
        for name, skill in {None: BASE, **SKILLS}.items()
        if name is None or (BUILTIN_ADAPTERS / name).is_dir()
    }
    adapters = {name: BUILTIN_ADAPTERS / name for name in prompts if name is not None}
    return Base(BUILTIN_MODEL, adapters, prompts)


def tiny_base(name: str, **options: Any) -> Base:
    """A tiny random model of tests/core/tiny_families.py, with prompts after which each greedy token is a clear choice:
    an option that changes logits, or a temperature, would test rounding instead.
    """
    it, rng = make_tiny(name), random.Random(name)
    lengths = [rng.randint(5, 60) for _ in range(TEXTS)]
    prompts = {
        adapter: [
            Prompt(it.case(adapter, length, seed=seed, count=MAX_TOKENS)[0]) for seed, length in enumerate(lengths)
        ]
        for adapter in (None, *it.adapters)
    }
    return Base(it.model, it.adapters, prompts, options, GREEDY_WAYS, temperatures=(0.0,), is_large=True)


def seeing_base(name: str) -> Base:
    """A tiny random model of tests/core/media, asked about the same images in other words, so that what prompts share
    ends behind their images or within them. Its answers are those of transformers and peft, each token a clear choice.
    """
    from ..core.media.test_served_images import Asked as Seen
    from ..core.media.test_served_images import engine_of, picture

    seen, rng = Seen(name), random.Random(name)
    pictures = [picture(seed, size) for seed, size in enumerate([(30, 90), (60, 20), (40, 40)])]
    engine = engine_of(seen, max_num_batched_tokens=512)
    prompts: dict[str | None, list[Prompt]] = {}
    for adapter in (None, "text", "seven", "linear"):
        prompts[adapter] = found = list[Prompt]()
        for number in range(16):
            images = pictures[: rng.choice([1, 1, 2, 3])] if rng.random() < 0.9 else []
            text = " ".join(rng.choices(["hi", "how", "are", "you", "today", "a", "what", "?"], k=rng.randint(1, 9)))
            request = seen.request(f"{adapter} {number}", adapter, images, text, MAX_TOKENS)
            request.params = RequestParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True, logprobs=2)
            told = Told()
            engine.add_request(request)
            while engine.has_work():
                for output in engine.step():
                    told.add(output)
            gaps = [one.top[0][1] - one.top[1][1] for one in told.logprobs]
            if min(gaps) > CLEAR and told.tokens == seen.wanted[request.id]:
                found.append(Prompt(request.token_ids[: request.num_prompt_tokens], request.media))
            elif min(gaps) > CLEAR:
                raise Violation(f"{request} is not answered as by transformers")
    engine.close()
    path = seen.reference.path
    longest = max(len(each.tokens) for found in prompts.values() for each in found)
    adapters = {each: path / "adapters" / each for each in prompts if each is not None}
    options = {"memory_bytes": None}
    return Base(path, adapters, prompts, options, GREEDY_WAYS, (0.0,), is_large=True, least_tokens=longest)


class Calm:
    """Answers that requests get when they are alone: of an engine that nothing else happens to, computed once."""

    def __init__(self, base: Base | None = None) -> None:
        self.base = base or demo_base()
        self._engine = Engine.from_config(_config(self.base))
        for name, path in self.base.adapters.items():
            self._engine.store.register(name, path)
        self._known: dict[tuple[str | None, tuple[int, ...], tuple[str, ...], str], Told] = {}
        self.asked: dict[Path, list[dict[str, Asked]]] = {}
        """The requests of each engine that had a folder of cached prefixes."""
        self.prompts = self.base.prompts
        layout, adapters = self._engine.executor.layout, [each for _, each in self._engine.store.registered()]
        self.least_pages = layout.state_pages * (layout.state_slots + 1)
        """Pages of a pool in which little has room, without those of its KV."""
        if self.base.is_large:
            self.least_pages += max(each.num_pages for each in adapters)

    def answer(self, skill: str | None, sent: Prompt, params: RequestParams) -> Told:
        key = (skill, tuple(sent.tokens), tuple(item.digest for item in sent.media), repr(params))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Told()
            self._engine.add_request(Request("calm", list(sent.tokens), params, skill, media=sent.media))
            while self._engine.has_work():
                for output in self._engine.step():
                    found.add(output)
        return found


class Faulty:
    """An executor that fails on demand, for a whole step or for some requests."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.glitches = 0
        self.raises_for: set[str] = set()
        self.sick: set[str] = set()
        self.violations: list[Violation] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, plan: StepPlan) -> StepResult:
        if self.glitches or any(row.request_id in self.raises_for for row in plan.sequences):
            self.glitches = 0
            raise RuntimeError(FAULT)
        result = self._inner.execute(plan)
        for id in self.sick & set(result.tokens):
            del result.tokens[id]
            result.errors[id] = FAULT
        return result


class RealRun(EngineRun):
    """One engine on the built-in model. where: a folder for its adapters. over: lets go of the reads that hang. ranks,
    offload_workers: its other processes; with offload workers, layers come over a slow link.
    """

    acts = {**EngineRun.acts, "ask": 48, "step": 144, "sleep": 2}
    not_pinned = (Tier.LOADING, Tier.HOST, Tier.FAILED)  # it may have been read meanwhile

    def __init__(
        self,
        rng: random.Random,
        calm: Calm,
        where: Path,
        over: threading.Event,
        ranks: int = 1,
        offload_workers: int = 0,
        files: Path | None = None,
    ) -> None:
        super().__init__(rng)
        self._ranks, self._offload_workers = ranks, offload_workers
        self.calm, self.where, self.over = calm, where, over
        self.names = [name for name in calm.prompts if name is not None]
        self.broken: set[Path] = set()
        self._has_hung = False
        apart = random.Random(str(rng.getstate()))  # of speculation; it changes no other draw
        config = self._draw_config()
        if apart.random() < 0.5:
            cached = apart.choice([0, 200, 2000])
            config = config.model_copy(update={"speculation": "ngram", "speculation_cache_tokens": cached})
        self._engines = [] if files is None else calm.asked.setdefault(files, [])
        self._engines.append(self.asked)
        if files is not None:
            config = _with_files(config, files, random.Random(repr(apart.getstate())), self.reached)
        with patch.object(ModelExecutor, "state_slots", 3):  # as on a GPU, so that steps may be launched ahead
            inner: Any = open_executor(config)
        if inner.swaps is not None and self.rng.random() < 0.5:
            inner.swaps = LateSwaps(inner.swaps, random.Random(self.rng.random()))
            if config.prefix_cache and config.host_bytes:
                config = config.model_copy(update={"host_prefix_cache": "on"})
        self.executor: Any = Faulty(inner)
        proposer = Drawn(lambda request: self._alone(self.asked[request.id]).tokens, apart)
        policies = Policies(proposer=proposer)
        encoder = _encoder_of(config, inner)
        self.engine = Engine(config, late_results(self.executor, rng), policies=policies, encoder=encoder)
        proposer.use(self.engine)
        if self.engine.disk is not None:  # a tiny model computes a block in less time than its file is read in
            self.engine.disk.costs = RestoreCosts(prefix_page=1e3)
        self.predict = lambda: proposer.predict(self.engine.model.vocab_size)
        if self.engine.speculation is not None and apart.random() < 0.8:
            self.engine.speculation.cost = cast(Any, Free())
        self.invariants = Invariants(self.engine, self.reached)
        self._note_sent_back()
        self._draw = random.Random(self.rng.random())  # for the threads that read
        if isinstance(inner, CpuExecutor) and offload_workers:
            slow_down(inner.adapters, inner.arena.pages, lambda *_: time.sleep(self._draw.choice([0.0, 0.001, 0.01])))
        hold_up(self.engine, self._begin_read)
        for name in self.names:
            self._register(name, self._directory(name))

    def earlier(self) -> Iterable[Asked]:
        return (asked for engine in self._engines for asked in engine.values() if engine is not self.asked)

    def _draw_config(self) -> EngineConfig:
        rng = self.rng
        slots = rng.choice([1, 2, 4, 8, 16])
        base = self.calm.base
        return _config(
            base,
            num_pages=self._ranks * (self.calm.least_pages + rng.choice([40, 60, 90, 400])),
            block_tokens=rng.choice([4, 8, 16]),
            max_num_seqs=slots,
            max_num_batched_tokens=max(slots + base.least_tokens, rng.choice([16, 32, 256])),
            chunked_prefill=rng.random() < 0.8,
            adapter_read_seconds=rng.choice([0.02, 0.2, 30.0]),
            host_cache_bytes=rng.choice([0, 100_000, 1 << 30]),
            eviction=rng.choice(["cost", "lru"]),
            prefix_cache=bool(base.least_tokens) or rng.random() < 0.7,
            share_prefix_cache=rng.random() < 0.3,
            lookahead=rng.choice([1, 2, 8]),
            prefetch=rng.choice([0, 1, 3]),
            max_adapters_per_step=rng.choice([None, None, 1, 3]),
            max_overtake_seconds=rng.choice([0.0, 0.01, 1.0]),
            max_load_stall_seconds=rng.choice([0.0, 0.002, 0.02]),
            max_waiting=rng.choice([None, 8, 64]),
            cpu_kernels=rng.choice(["auto", "auto", "auto", "auto" if self._offload_workers else "torch"]),
            seed=rng.randrange(1 << 30),
            preemption=rng.choice(["auto", "swap", "recompute"]),
            tensor_parallel_size=self._ranks,
            offload_workers=self._offload_workers,
        )

    def _span(self) -> Iterator[None]:
        most = ANSWERS_PER_ENGINE[self.engine.config.cpu_kernels]
        while self.reached["answered"] < most and len(self.asked) < 3 * most:
            yield

    # -- requests

    def _ask(self) -> None:
        rng = self.rng
        if len(self.active) > 4 * self.engine.config.max_num_seqs + 8:
            return
        skill = rng.choice([None, *self.current, *self.current])
        way = {"max_tokens": MAX_TOKENS, **rng.choice(self.calm.base.ways)}
        sent, temperature = rng.choice(self.calm.prompts[skill]), rng.choice(self.calm.base.temperatures)
        for _ in range(rng.choice([1, 1, 1, 4])):
            params = RequestParams(**way, temperature=temperature, seed=rng.randrange(3) if temperature else 0)
            self._submit(skill, sent, params, rng.choice(["", "a", "b"]), rng.choice(["", "", "x"]))

    def _alone(self, asked: Asked) -> Told:
        skill = None if asked.adapter is None else asked.adapter.name
        return self.calm.answer(skill, Prompt(asked.prompt, asked.request.media), asked.request.params)

    def _add(self, add: Callable[[], object]) -> str | None:
        """Queue a request, once its images are encoded."""
        refused = super()._add(add)
        while self.engine.is_encoding:
            self.engine._add_encoded()  # noqa: SLF001 - no step may begin meanwhile
            time.sleep(0)
        return refused

    # -- adapters

    def _sleep(self) -> None:
        """The engine sleeps for a while, in which adapters come and go, and are pinned and unpinned."""
        if self.engine.executor.release_pages is None:
            return
        try:
            slept = Sleep(self.engine)
        except CannotSleep:
            self.reached["too busy to sleep"] += 1
            return
        self.is_asleep = True
        for _ in range(self.rng.choice([0, 1, 2, 4])):
            getattr(self, self.rng.choice(["_load", "_unload", "_pin", "_unpin"]))()
        self.is_asleep = False
        slept.wake()
        lost = {adapter for adapter in self.pinned if adapter not in self.engine.store.pins}
        promise(self.has_hung or all(map(self._is_unlucky, lost)), "a pin was lost in a sleep")
        self.pinned -= lost
        self.reached["slept"] += 1

    def _directory(self, name: str) -> Path:
        """A new version, equal to the one before it."""
        self.num_directories += 1
        return Path(shutil.copytree(self.calm.base.adapters[name], self.where / f"{name}-{self.num_directories}"))

    def _begin_read(self, path: Path) -> Callable[[float], object] | None:
        """A read comes late, layer by layer, fails, or hangs: for good, or until it was cancelled or nearly so."""
        fate, seconds, patience = (
            self._draw.random(),
            self._draw.uniform(0, 0.05),
            self.engine.config.adapter_read_seconds,
        )
        if fate < 0.05 and patience < 1:
            self._has_hung = True
            self.broken.add(path)
            self.over.wait(None if fate < 0.02 else self._draw.uniform(0, 3 * patience))
        elif fate < 0.15:
            self.over.wait(seconds)
        elif 0.25 <= fate < 0.26 or (fate > 0.26 and path in self.broken):
            self.broken.add(path)
            raise AdapterFormatError(FAULT)
        if seconds > patience:
            self.broken.add(path)
        return (lambda share: self.over.wait(seconds)) if 0.15 <= fate < 0.25 else None

    @property
    def has_hung(self) -> bool:
        return self._has_hung

    def _break_files(self, path: Path) -> None:
        self.broken.add(path)

    def _is_unlucky(self, adapter: Adapter | None) -> bool:
        return adapter is not None and adapter.manifest.path in self.broken

    # -- time

    def _wait(self) -> None:
        time.sleep(self.rng.choice([0.0, 0.001, 0.01]))

    def _drain(self) -> None:
        for _ in range(100_000):
            if not self.engine.has_work() and not self.engine.swapped.copies:
                break
            self._step()
            self._check_invariants()
        promise(not self.active, f"requests never end: {list(self.active)[:5]}")
        self._remove_adapters()
        self.over.set()
        if (disk := self.engine.disk) is not None:
            self.reached["tokens from files"] += disk.num_hit_tokens
        end = time.monotonic() + GRACE
        while self.engine.stats().num_reads and time.monotonic() < end:
            self.engine.step()

    def _pause(self) -> None:
        """Time goes by itself."""


def _config(base: Base, **options: Any) -> EngineConfig:
    fixed = {"model": base.model, "device": "cpu", "dtype": "float32", "threads": 1}
    return EngineConfig(**{**fixed, **base.options, **options})


def _with_files(config: EngineConfig, folder: Path, rng: random.Random, reached: Counter[str]) -> EngineConfig:
    """Keep cached prefixes in the files of a folder, some of which have been damaged since the last engine."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "key" and path.stat().st_size and rng.random() < 0.05:
            _damage(path, rng)
            reached["damaged files"] += 1
    copied = "swap" if config.preemption == "recompute" else config.preemption
    room = {
        "kv_cache_dir": folder,
        "kv_cache_disk_bytes": rng.choice([1 << 18, 1 << 22, 1 << 26]),
        "host_cache_bytes": rng.choice([100_000, 1 << 30, 1 << 30]),
        "block_tokens": 4,  # prompts are short
    }
    return config.model_copy(update={**room, "prefix_cache": True, "preemption": copied})


def _damage(path: Path, rng: random.Random) -> None:
    """Flip a bit of a file, or cut it."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    if rng.random() < 0.3:
        del data[at:]
    else:
        data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def simulate(seed: int, calm: Calm, ranks: int = 1, offload_workers: int = 0, files: Path | None = None) -> Outcome:
    """files: a folder for cached prefixes, of engines one after another; each is begun twice, to find its own files."""
    cause, reached = None, Counter[str]()
    for _ in range(1 if files is None else 2):
        over = threading.Event()
        with tempfile.TemporaryDirectory(prefix="chorus-run-") as where:
            begin = partial(
                RealRun,
                calm=calm,
                where=Path(where),
                over=over,
                ranks=ranks,
                offload_workers=offload_workers,
                files=files,
            )
            try:
                _, cause, found = run_seed(seed, begin)
            finally:
                over.set()
        reached += found
        if cause is not None:
            break
    return seed, cause, reached


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--answers", type=int, default=3000, help="answers to check")
    command.add_argument("--seed", type=int, default=0, help="what all engines are drawn from")
    command.add_argument("--first", type=int, default=0, help="the first engine, to go on or to see one again")
    command.add_argument("--log", type=Path, help="file to which progress is appended")
    command.add_argument("--ranks", type=int, default=1, help="ranks of each engine")
    command.add_argument("--offload-workers", type=int, default=0, help="offload workers of each engine")
    command.add_argument("--base", help="a tiny random model, in place of the built-in one")
    command.add_argument("--images", help="a tiny random model that sees: a name of tests/core/media")
    command.add_argument("--kv-cache-dtype", default="auto", help="of a tiny model's engines")
    command.add_argument("--files", action="store_true", help="keep cached prefixes in files, which all engines share")
    args = command.parse_args(argv)
    base = tiny_base(args.base, kv_cache_dtype=args.kv_cache_dtype) if args.base else demo_base()
    base = seeing_base(args.images) if args.images else base
    calm, campaign = Calm(base), Campaign(args.log, 1)
    with tempfile.TemporaryDirectory(prefix="chorus-run-") as name:
        files = Path(name) if args.files else None
        while campaign.reached["answered"] < args.answers and len(campaign.failed) <= 20:
            seed = 1_000_000 * args.seed + args.first + campaign.count
            campaign.add(simulate(seed, calm, args.ranks, args.offload_workers, files))
    return conclude({"ok": not campaign.failed, **campaign.result()}, not campaign.failed)


if __name__ == "__main__":
    sys.exit(main())
