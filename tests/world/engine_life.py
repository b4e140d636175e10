"""Life of an engine, drawn from a seed: what callers, operators and faults do to it, and what must hold meanwhile."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chorus.core.requests.record import NotHere
from chorus.core.requests.request import Request, RequestState
from chorus.core.requests.sampling_params import InvalidRequest, SamplingParams
from chorus.core.requests.types import CannotMerge, FinishReason, RequestOutput
from chorus.core.scheduling.overload import Overloaded
from chorus.memory.adapters.adapter import Adapter, Tier
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.identity import with_content

from .asked import Asked, Violation, promise


class EngineLife:
    """An engine from its start to its end; a subclass makes it, over an executor that has the faults of `_fault`.

    The subclass has, too: names, weights: adapters that may come; how often it asks and steps for each rarer act.
    _span(), _ask(), _directory(name): an item for each act; submits requests; directory of an adapter's next version.
    _alone(asked): the outputs of the request when it runs alone.
    has_hung, _is_unlucky(asked), _break_files(path): a read hung; a request's files may fail; from now on they do.
    _wait(), _pause(), _drain(): let time go by; the same after a step without outputs; go on until all has ended.
    """

    weights = (6, 14)

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.reached: Counter[str] = Counter()
        self.asked: dict[str, Asked] = {}
        self.active: dict[str, Asked] = {}
        self.current: dict[str, Adapter] = {}
        self.num_directories = self._num_preemptions = self._num_given_up = 0

    def run(self) -> None:
        """Live; raises Violation, or whatever the engine raises that it must not."""
        asks, steps = self.weights
        try:
            actions = [
                *[self._ask] * asks, *[self._step] * steps, self._abort, self._load, self._load, self._unload,
                self._pin, self._unpin, self._wait, self._break, self._fault, self._reclaim, self._preempt, self._move,
                self._merge, self._unmerge,
            ]  # fmt: skip
            for _ in self._span():
                self.rng.choice(actions)()
                self._check_books()
            self._finish()
        finally:
            self.engine.close()

    # -- what happens

    def _register(self, name: str, path: Path) -> None:
        try:
            adapter = self.current[name] = self.engine.store.register(name, path)
            if adapter.manifest.content_hash is None:  # without it no request can be moved
                self.engine.store.note(adapter, with_content(adapter.manifest))
            self.reached["loaded"] += 1
        except AdapterFormatError:
            adapters = self.engine.executor.adapters
            pages = adapters.layout(adapters.inspect(path)).num_pages
            promise(pages >= self.engine.stats().num_pages, "an adapter that fits was refused")
            self.reached["refused: an adapter too large"] += 1

    def _submit(
        self, name: str | None, prompt: list[int], params: SamplingParams, tenant: str, salt: str
    ) -> Asked | None:
        request = Request(f"r{len(self.asked)}", list(prompt), params, name, tenant=tenant, cache_salt=salt)
        if not self._add(lambda: self.engine.add_request(request)):
            return None
        adapter = None if name is None else self.current[name]
        promise(request.adapter is adapter, "a request got another version than the current one")
        scope = ("" if self.engine.config.share_prefix_cache else tenant, salt)
        asked = self.asked[request.id] = self.active[request.id] = Asked(request, adapter, prompt, scope)
        return asked

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
        if not ids:
            return
        asked = self.active[self.rng.choice(ids)]
        record = self.engine.export_request(asked.request.id)
        self._drop(asked.request.id)
        answers: list[Request | NotHere] = []
        if not self._add(lambda: answers.append(self.engine.resume(record))):
            return
        (answer,) = answers
        content = record["content_hash"]
        if isinstance(answer, NotHere):
            is_here = content in [adapter.manifest.content_hash for adapter in self.current.values()]
            promise(not is_here, "a request's adapter was not found")
            self.reached["not moved: its adapter is gone"] += 1
            return
        found = answer.adapter
        promise((found and found.manifest.content_hash) == content, "a request goes on with another adapter")
        asked.request, asked.adapter = answer, found
        asked.aborted, asked.was_sent_back = False, True
        self.active[answer.id] = asked
        self.reached["moved"] += 1

    def _load(self) -> None:
        name = self.rng.choice(self.names)
        self._register(name, self._directory(name))

    def _unload(self) -> None:
        name = self.rng.choice(self.names)
        if self.current.pop(name, None) is not None:
            self.engine.store.unregister(name)
            self.reached["unloaded"] += 1

    def _pin(self) -> None:
        name = self.rng.choice(self.names)
        if name in self.current:
            try:
                is_pinned = self.engine.adapters.pin(name)
            except (InvalidRequest, AdapterFormatError, OSError, TimeoutError):
                is_pinned = False
            self.reached["pinned" if is_pinned else "not pinned"] += 1

    def _unpin(self) -> None:
        name = self.rng.choice(self.names)
        if name in self.current:
            self.engine.adapters.unpin(name)

    def _break(self) -> None:
        if self.current and self.rng.random() < 0.3:
            self._break_files(self.rng.choice(list(self.current.values())).manifest.path)

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
            scheduler.lifecycle.preempt(self.rng.choice(list(scheduler.running)))

    def _merge(self) -> None:
        if self.current:
            with suppress(CannotMerge):
                self.engine.merge(self.rng.choice(sorted(self.current)))

    def _unmerge(self) -> None:
        if self.rng.random() < 0.3:
            self.engine.unmerge()

    def _reclaim(self) -> None:
        if self.rng.random() < 0.3:
            self.engine.reclaim_idle()

    def _step(self) -> bool:
        """One step of the engine; False if there was nothing to run and nothing to tell."""
        plan = self.engine.begin_step()
        outputs = self.engine.end_step(plan)
        for violation in self.executor.violations:
            raise violation
        self.executor.glitches = 0
        for output in outputs:
            self._take(output)
        stats = self.engine.stats()
        self.reached["steps"] += plan is not None
        self.reached["steps ahead"] += plan is not None and plan.sources is not None
        self.reached["merged steps"] += plan is not None and plan.merged is not None
        self.reached["preempted"] += stats.num_preemptions > self._num_preemptions
        self.reached["reads given up"] += stats.num_given_up_reads > self._num_given_up
        self._num_preemptions, self._num_given_up = stats.num_preemptions, stats.num_given_up_reads
        if not outputs:
            self._pause()
        return plan is not None or bool(outputs)

    def _finish(self) -> None:
        """Nothing new comes: every request ends, and every page and byte comes back."""
        self._drain()
        for asked in self.asked.values():
            promise(asked.ended, f"{asked.request.id} was forgotten")
        self.engine.step()
        self.engine.check_when_idle()
        self.engine.reclaim_idle()
        self.engine.check_integrity()
        stats = self.engine.stats()
        promise(stats.num_free_pages == stats.num_pages, f"pages were lost: {stats}")
        promise(stats.num_swapped == stats.swapped_bytes == 0, f"host memory was lost: {stats}")
        self.reached["merges"] += stats.num_merges
        self.reached["swaps out"] += stats.num_swaps_out
        self.reached["swaps in"] += stats.num_swaps_in
        self.reached["swaps dropped"] += stats.num_swaps_dropped

    def _remove_adapters(self) -> None:
        for name in list(self.current):
            self.engine.adapters.unpin(name)
            self.engine.store.unregister(name)
        self.current.clear()

    # -- what must hold

    def _check_books(self) -> None:
        self.engine.check_integrity()
        store = self.engine.store
        held = {adapter: (pins := int(store.is_pinned(adapter)), pins) for adapter in self.current.values()}
        merging = self.engine.merging
        merged = merging.shadowed if merging.is_under_way else merging.merged
        if merged is not None:
            references, requests = held.get(merged, (0, 0))
            held[merged] = references, requests + 1
        for asked in self.active.values():
            request, adapter = asked.request, asked.adapter
            if request.state in (RequestState.LATE, RequestState.SWAPPED):
                asked.was_sent_back = True
            if adapter is None:
                continue
            references, requests = held.get(adapter, (0, 0))
            is_here = request.state is not RequestState.DONE  # else only its error is left to deliver
            held[adapter] = references + request.is_running, requests + is_here
            if not asked.was_here:
                asked.was_here = store.tier(adapter) in (Tier.HOST, Tier.DEVICE)
        for adapter, expected in held.items():
            if (adapter.references, adapter.requests) != expected:
                raise Violation(f"{adapter} is held, or wanted, by too many or by too few: {expected}")

    def _take(self, output: RequestOutput) -> None:
        asked = self.asked[output.request_id]
        asked.take(output, self.asked.values())
        if output.finish_reason is None:
            return
        del self.active[output.request_id]
        asked.check_end(self._alone(asked))
        if output.finish_reason is not FinishReason.ERROR:
            self.reached["answered"] += 1
            self.reached["answered from the prefix cache"] += asked.request.num_cached_tokens > 0
            return
        self.reached["ended with an error"] += 1
        id, text = output.request_id, asked.error
        if id not in self.executor.raises_for and id not in self.executor.sick and "pinned adapters" not in text:
            waited = self.has_hung and "could not begin, because all others hang" in text
            promise(waited or self._is_unlucky(asked), f"{id} failed without a reason: {text}")
            promise("changed on disk" not in text or not asked.was_here, f"{id} lost bytes that were here: {text}")


Lived = tuple[int, str | None, Counter[str]]
"""A life's seed, why it failed or None, and what it reached."""


def lived(seed: int, begin: Callable[[int], EngineLife]) -> Lived:
    """Live one life."""
    logging.disable(logging.CRITICAL)
    life = None
    try:
        life = begin(seed)
        life.run()
    except Exception as error:
        return seed, f"{type(error).__name__}: {error}", life.reached if life else Counter()
    return seed, None, life.reached


@dataclass
class Campaign:
    """Many lives: what they reached and which failed. log: a file to which progress is appended now and then."""

    log: Path | None
    log_every: int
    count: int = 0
    failed: list[int] = field(default_factory=list)
    reached: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.perf_counter)

    def add(self, life: Lived) -> None:
        seed, cause, found = life
        self.count += 1
        self.reached += found
        if cause is not None:
            self.failed.append(seed)
            if len(self.failed) <= 20:
                print(f"seed {seed}: {cause}", flush=True)
        if self.log is not None and (cause is not None or (seed + 1) % self.log_every == 0):
            with self.log.open("a") as log:
                where = f"{time.strftime('%H:%M:%S')} {self.count} lives to {seed}: {len(self.failed)} failed"
                log.write(f"{where}, {self.reached['answered']} answers{f', seed {seed}: {cause}' if cause else ''}\n")

    def result(self) -> dict[str, Any]:
        for name, count in sorted(self.reached.items()):
            print(f"{name:32} {count:10}")
        seconds = round(time.perf_counter() - self.began, 1)
        return {"seeds": self.count, "failed": self.failed[:1000], "seconds": seconds, "reached": self.reached}
