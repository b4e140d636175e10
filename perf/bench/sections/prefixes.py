"""Adapters with a system prompt each, more than the page pool holds: prefixes from host memory and from files.

The pool has room for a tenth of the adapters and of the prompts' KV, host memory for all adapters and for half of the
KV, files for all. Each prompt is computed once, one after another. Then requests come by a Zipf law and by a uniform
one: a time to first token counts for the tier that its prefix came from, and is held against the same prompts' when
nothing was cached. An engine that begins with the files alone, after one that wrote nothing at its end, as if killed,
serves each prompt once: with the system's copies of the files in memory, and dropped.

"beside" is the time between two tokens of sequences that decode while such requests come, with the tiers and without;
both engines begin as they would be after each prompt was served once, the first one by the files that are there.
"nothing" is the rate of prompts that have nothing in common, in turns with the tiers and without.

"rounds" are prompts that host memory can hold two of, asked twice: one after another, or all at once. Then an engine
begins with the files of the one that was killed after the first round, and is asked them once more.

Tests: tests/perf/bench/test_prefixes.py
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ....core.requests.request import Request
from ....memory.files.identity import with_content
from ....memory.pages.eviction import RestoreCosts
from ...report.table import Goal, Table, rows_table
from ..context import Context
from ..driving import asked
from ..subject import Subject

RANK = 8
POOL_SHARE, HOST_SHARE = 0.1, 0.5
TIERS = ("computed", "pool", "host", "files")
ZIPF = 1.0
ANSWER = 4
"""Tokens of an answer."""

DECODED = 512
"""Tokens of a sequence that decodes beside."""

MOST_HOST, MOST_FILES = 0.15, 0.3
"""Goals: median time to first token of a hit over that of computing the prompt."""

MOST_BESIDE = 1.2
"""Goal: p99 between two tokens of decoding sequences with the tiers, over that without."""

ROUND_PROMPTS, ROUND_POOL, ROUND_HOST, ROUND_FILES = 12, 1.4, 2.6, 43
"""Prompts of a round; and of those, how many the page pool, host memory and the files have room for."""

LEAST_HITS = 11 / 12
"""Goal: share of prompts of a round that are found; the last one of an engine that was killed was in its pool alone."""

LEAST_RATE = 0.99
"""Goal: tokens per second with nothing to reuse, over that without tiers."""

_WAIT_SECONDS = 120.0


@dataclass
class Served:
    """Times to first token by tier, and times between tokens of the sequences that decoded beside."""

    ttft: dict[str, list[float]] = field(default_factory=lambda: {tier: [] for tier in TIERS})
    gaps: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        return {
            **{tier: median(times) if times else None for tier, times in self.ttft.items()},
            **{f"{tier}_requests": len(times) for tier, times in self.ttft.items()},
        }


@dataclass(frozen=True)
class Load:
    """A study's size. num_requests: of each law."""

    num_adapters: int
    prompt_tokens: int
    num_requests: int
    num_decoding: int
    num_fresh: int
    """Prompts that have nothing in common, of each run."""


def run(context: Context) -> dict[str, Any]:
    load = context.pick(Load(4, 48, 8, 1, 2), Load(20, 512, 40, 2, 8), Load(200, 2000, 200, 4, 12))
    folder = context.work_dir / "kv-cache"
    study = _Study(context, load, folder)
    found: dict[str, Any] = {**vars(load), "rows": []}
    try:
        with context.row(found, "prefixes in three tiers"):
            study.tiers(found)
        with context.row(found, "prefixes of an engine that begins with files"):
            study.restart(found)
        with context.row(found, "decoding beside"):
            study.beside(found)
        with context.row(found, "nothing to reuse"):
            study.nothing(found)
        with context.row(found, "rounds of more prompts than host memory holds"):
            study.rounds(found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


class _Study:
    def __init__(self, context: Context, load: Load, folder: Path) -> None:
        self._context, self._load, self._folder = context, load, folder
        self._adapters = context.adapters(RANK, load.num_adapters)
        draw = random.Random(context.seed)
        vocab = context.size.geometry.vocab
        self._prompts = {name: [draw.randrange(3, vocab) for _ in range(load.prompt_tokens)] for name in self._adapters}
        self._draw, self._vocab = draw, vocab
        page = context.size.geometry.page_layout(context.kv_itemsize)
        self._kv_bytes = load.num_adapters * page.pages_for_tokens(load.prompt_tokens) * page.page_bytes

    @contextmanager
    def _engine(self, *, tiers: bool = True, num_decoding: int = 0) -> Iterator[Subject]:
        load, files = self._load, {name: _size(path) for name, path in self._adapters.items()}
        page = self._context.size.geometry.page_layout(self._context.kv_itemsize)
        most = max(size // page.page_bytes + 1 for size in files.values())
        adapter_pages = most * max(1, int(POOL_SHARE * load.num_adapters))
        own = page.pages_for_tokens(load.prompt_tokens + 2 * ANSWER) + num_decoding * page.pages_for_tokens(DECODED)
        fields: dict[str, Any] = {
            "prefix_cache": True,
            "num_pages": 2 + adapter_pages + own + int(POOL_SHARE * self._kv_bytes / page.page_bytes),
            "memory_bytes": None,
            "host_cache_bytes": sum(files.values()) + int(HOST_SHARE * self._kv_bytes),
        }
        if tiers:
            fields |= {"kv_cache_dir": self._folder, "kv_cache_disk_bytes": max(1 << 20, 2 * self._kv_bytes)}
        limits = {
            "max_seqs": num_decoding + 1,
            "max_batched": 512,
            "max_len": max(load.prompt_tokens + 2 * ANSWER, DECODED),
        }
        with Subject(self._context, self._adapters, **limits, **fields) as subject:
            engine = subject.engine
            for _, adapter in list(engine.store.registered()):
                engine.store.note(adapter, with_content(adapter.manifest))
            if not tiers:
                engine.prefix.tier = engine.host = engine.memory.copies.host = None
            if self._context.smoke:  # times mean nothing
                engine.memory.copies.costs = RestoreCosts(prefix_page=1.0)
                if engine.disk is not None:
                    engine.disk.costs = engine.memory.copies.costs
            yield subject

    def _serve(self, subject: Subject, name: str, served: Served, prompt: Sequence[int] = (), beside: int = 0) -> None:
        """Serve a request, and note its time to first token and the tier that its prefix came from."""
        engine = subject.engine
        tokens = [*(prompt or self._prompts[name]), self._draw.randrange(3, self._vocab)]
        request = asked(tokens, name, ANSWER)
        before, began = engine.stats(), time.perf_counter()
        engine.add_request(request)
        while not request.num_output_tokens:
            if time.perf_counter() - began > _WAIT_SECONDS:
                raise TimeoutError(f"no first token within {_WAIT_SECONDS:g} s")
            self._step(subject, served, beside)
        seconds = time.perf_counter() - began
        served.ttft[_tier(before, engine.stats(), request)].append(seconds)
        while request.id in engine.scheduler.lifecycle.requests:
            self._step(subject, served, beside)

    def _step(self, subject: Subject, served: Served, beside: int) -> None:
        """A step, whose time counts if sequences decode beside."""
        outputs, seconds = subject.timed_step()
        if beside and sum(output.request_id.startswith("q") for output in outputs) >= beside:
            served.gaps.append(seconds)

    def tiers(self, found: dict[str, Any]) -> None:
        with self._engine() as subject:
            cold = Served()
            for name in self._prompts:
                self._serve(subject, name, cold)
            self._settle(subject)
            found["computed"] = median(cold.ttft["computed"])
            for law, weights in _laws(self._load.num_adapters).items():
                served = Served()
                for name in self._draw.choices(list(self._prompts), weights, k=self._load.num_requests):
                    self._serve(subject, name, served)
                found["rows"].append({"requests": law, **served.row()})
            found["bytes_written"] = subject.engine.stats().disk_bytes_written
            assert subject.engine.disk is not None
            subject.engine.disk.is_closed = True  # as if killed: what is not in files by now is lost

    def restart(self, found: dict[str, Any]) -> None:
        for files in ("in memory", "dropped"):
            with self._engine() as subject:
                if files == "dropped":
                    _drop_pages(self._folder)
                served = Served()
                for name in self._prompts:
                    self._serve(subject, name, served)
                stats = subject.engine.stats()
                found["rows"].append({"requests": f"begun anew, files {files}", **served.row()})
                page = subject.executor.layout.page_bytes
                needed = stats.num_disk_hit_tokens * subject.engine.pages_per_token * page
                found["read_over_needed"] = stats.disk_bytes_read / needed if needed else None
                assert subject.engine.disk is not None
                subject.engine.disk.is_closed = True

    def beside(self, found: dict[str, Any]) -> None:
        load, gaps = self._load, dict[str, list[float]]()
        for tiers in (True, False):
            with self._engine(tiers=tiers, num_decoding=load.num_decoding) as subject:
                served, names = Served(), list(self._prompts)
                kept = len(names) if tiers else int(POOL_SHARE * len(names)) + 1  # what the pool holds in the end
                for name in names[-kept:]:
                    self._serve(subject, name, served)
                if tiers:
                    self._settle(subject)
                decoding = [subject.add(16, DECODED - 32, None) for _ in range(load.num_decoding)]
                while not all(request.num_output_tokens for request in decoding):
                    subject.step()
                draw, weights = random.Random(self._context.seed), _laws(load.num_adapters)["zipf"]
                for name in draw.choices(names, weights, k=load.num_requests):
                    if any(request.num_output_tokens > DECODED - 64 for request in decoding):
                        break
                    self._serve(subject, name, served, beside=load.num_decoding)
                gaps["with tiers" if tiers else "without"] = served.gaps
                subject.clear(decoding)
        found["beside"] = [
            {"engine": name, "p50": float(np.percentile(each, 50)), "p99": float(np.percentile(each, 99))}
            for name, each in gaps.items()
        ]

    def nothing(self, found: dict[str, Any]) -> None:
        rates: dict[bool, list[float]] = {True: [], False: []}
        (name, *_) = self._prompts
        for turn in range(4):
            tiers = bool(turn % 2)
            with self._engine(tiers=tiers) as subject:
                served, began = Served(), time.perf_counter()
                for _ in range(self._load.num_fresh):
                    fresh = [self._draw.randrange(3, self._vocab) for _ in range(self._load.prompt_tokens)]
                    self._serve(subject, name, served, fresh)
                rates[tiers].append(self._load.num_fresh * self._load.prompt_tokens / (time.perf_counter() - began))
        found["nothing"] = {"with": median(rates[True]), "without": median(rates[False])}

    def rounds(self, found: dict[str, Any]) -> None:
        """Prompts are found whole or not at all: without its beginning nothing of a prompt is."""
        draw, tokens = random.Random(self._context.seed), self._load.prompt_tokens
        prompts = [[draw.randrange(3, self._vocab) for _ in range(tokens)] for _ in range(ROUND_PROMPTS)]
        found["rounds"] = []
        for way in ("one after another", "at once"):
            folder = self._folder.with_name("rounds")
            shutil.rmtree(folder, ignore_errors=True)
            with self._rounds_engine(folder) as subject:
                _, computed = self._ask(subject, prompts, "one after another")
                for _ in range(ROUND_PROMPTS * self._context.smoke):  # so small a model computes before any disk writes
                    self._settle(subject)
                    assert subject.engine.disk is not None
                    subject.engine.disk.write_paths()  # as while it is idle
                assert subject.engine.disk is not None
                subject.engine.disk.is_closed = True  # as if killed
            row = {"asked": way, "computed": computed}
            with self._rounds_engine(folder) as subject:
                row["killed"], row["killed_seconds"] = self._ask(subject, prompts, way)
                row["again"], row["again_seconds"] = self._ask(subject, prompts, way)
            found["rounds"].append(row)
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _rounds_engine(self, folder: Path) -> Iterator[Subject]:
        tokens = self._load.prompt_tokens + 2 * ANSWER
        page = self._context.size.geometry.page_layout(self._context.kv_itemsize)
        prompt_pages = page.pages_for_tokens(tokens)
        fields: dict[str, Any] = {
            "prefix_cache": True,
            "num_pages": 2 + int(ROUND_POOL * prompt_pages),
            "memory_bytes": None,
            "host_cache_bytes": int(ROUND_HOST * prompt_pages * page.page_bytes),
            "kv_cache_dir": folder,
            "kv_cache_disk_bytes": max(1 << 20, ROUND_FILES * prompt_pages * page.page_bytes),
        }
        with Subject(self._context, {}, max_seqs=2, max_batched=tokens, max_len=tokens, **fields) as subject:
            if self._context.smoke:  # times mean nothing
                costs = RestoreCosts(prefix_page=1e6)
                engine = subject.engine
                assert engine.disk is not None and engine.host is not None
                engine.memory.copies.costs = engine.disk.costs = engine.host.costs = costs
            yield subject

    def _ask(self, subject: Subject, prompts: Sequence[Sequence[int]], way: str) -> tuple[float, float]:
        """The share of prompts whose blocks were found, and seconds."""
        requests = [asked([*prompt, self._draw.randrange(3, self._vocab)], max_tokens=ANSWER) for prompt in prompts]
        began = time.perf_counter()
        for request in requests:
            subject.engine.add_request(request)
            if way == "one after another":
                subject.finish()
        subject.finish()
        hits = sum(2 * request.num_cached_tokens > request.num_prompt_tokens for request in requests)
        return hits / len(requests), time.perf_counter() - began

    def _settle(self, subject: Subject) -> None:
        """Have what left host memory written."""
        if subject.engine.disk is not None:
            subject.engine.disk.wait()


def _tier(before: Any, after: Any, request: Request) -> str:
    if after.num_disk_hit_tokens > before.num_disk_hit_tokens:
        return "files"
    if after.num_host_hit_tokens > before.num_host_hit_tokens:
        return "host"
    return "pool" if request.num_cached_tokens * 2 > request.num_prompt_tokens else "computed"


def _laws(count: int) -> Mapping[str, list[float]]:
    return {"zipf": [1 / (rank + 1) ** ZIPF for rank in range(count)], "uniform": [1.0] * count}


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def _drop_pages(folder: Path) -> None:
    """Have the system forget its copies of files."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with suppress(OSError), path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def goals(values: dict[str, Any]) -> list[Goal]:
    found, computed = [], values.get("computed")
    for name, most in (("host", MOST_HOST), ("files", MOST_FILES)):
        times = [row[name] for row in values["rows"] if row.get(name) is not None]
        if times and computed:
            about = f"time to first token, {name} over computed"
            found.append(Goal(about, median(times) / computed, most, at_most=True))
    if beside := values.get("beside"):
        with_tiers, without = (row["p99"] for row in beside)
        found.append(
            Goal("p99 between tokens beside, with tiers over without", with_tiers / without, MOST_BESIDE, True)
        )
    if nothing := values.get("nothing"):
        found.append(Goal("rate with nothing to reuse", nothing["with"] / nothing["without"], LEAST_RATE))
    for row in values.get("rounds", ()):
        for when, about in (("killed", "after the engine was killed"), ("again", "asked again")):
            found.append(Goal(f"share of prompts found, {row['asked']}, {about}", row[when], LEAST_HITS))
    return found


def tables(values: dict[str, Any]) -> list[Table]:
    computed = values.get("computed")
    columns = " | ".join(["requests", *(f"{tier}: {tier}_requests | {tier}, ms: {tier} * 1e3" for tier in TIERS)])
    about = f"{values['num_adapters']} adapters, prompts of {values['prompt_tokens']} tokens"
    first = f"(w) time to first token, median: {about}" + (f"; {computed * 1e3:.0f} ms computed" if computed else "")
    found = [rows_table(first, columns, values["rows"])]
    if beside := values.get("beside"):
        of = ": engine | p50, ms: p50 * 1e3 | p99, ms: p99 * 1e3"
        found.append(rows_table("(w) between tokens of sequences that decode beside", of, beside))
    if nothing := values.get("nothing"):
        found.append(rows_table("(w) nothing to reuse", "prompt tokens/s with tiers: with | without", [nothing]))
    if rounds := values.get("rounds"):
        columns = (
            "asked | found after a kill: killed | found again: again | computed, s: computed | "
            "killed, s: killed_seconds | again, s: again_seconds"
        )
        first = f"(w) rounds of {ROUND_PROMPTS} prompts, of which host memory holds {ROUND_HOST}"
        found.append(rows_table(first, columns, rounds))
    if (ratio := values.get("read_over_needed")) is not None:
        found.append(rows_table("(w) files", "bytes read over needed: r", [{"r": ratio}]))
    return found
