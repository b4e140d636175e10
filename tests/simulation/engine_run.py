"""A simulated run of an engine, drawn from a seed: acts of callers, operators and faults, and the checks after each."""

from __future__ import annotations

import logging
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chorus.core.engine import Engine
from chorus.core.requests.blocks import Blocks
from chorus.core.requests.record import NotHere, to_record
from chorus.core.requests.request import Request, RequestState
from chorus.core.requests.request_params import InvalidRequest, RequestParams
from chorus.core.requests.types import CannotMerge, FinishReason, RequestOutput
from chorus.core.scheduling.overload import Overloaded
from chorus.memory.adapters.adapter import Adapter, Tier
from chorus.memory.adapters.composition import read_composition
from chorus.memory.adapters.store import UnknownAdapter
from chorus.memory.files.error import AdapterFormatError, LoadFailure, PagesInUse
from chorus.memory.files.identity import with_content

from .asked import Asked, Told, Violation, invoked_at, promise
from .invariants import Invariants
from .made_up_images import Prompt

OVERLOADED = "too many wait"


class EngineRun(ABC):
    """An engine from its start to its end; a subclass makes it, over an executor that has the faults of `_fault`.

    `acts` names possible events, and their frequencies. `rng`, the source of all of it, may be another for each.
    """

    engine: Engine
    executor: Any
    names: Sequence[str]
    """Adapters that may come."""
    invariants: Invariants

    acts: Mapping[str, int] = {
        "ask": 6,
        "step": 14,
        "abort": 1,
        "load": 2,
        "unload": 1,
        "pin": 1,
        "unpin": 1,
        "wait": 1,
        "break": 1,
        "fault": 1,
        "reclaim": 1,
        "preempt": 1,
        "move": 1,
        "merge": 1,
        "merge_whole": 1,
        "unmerge": 1,
    }
    not_pinned: Collection[Tier] = (Tier.LOADING,)
    """Where an adapter's bytes may be when it can't be pinned yet."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.reached: Counter[str] = Counter()
        self.asked: dict[str, Asked] = {}
        self.active: dict[str, Asked] = {}
        self.current: dict[str, Adapter] = {}
        self.pinned: set[Adapter] = set()
        self.predict: Callable[[], list[int]] = list
        """Draws the predictions of requests."""
        self.is_asleep = False
        self.num_directories = self._num_preemptions = self._num_given_up = 0

    def _now(self) -> float:
        """Return the time by the engine's clock."""
        return time.monotonic()

    @abstractmethod
    def _span(self) -> Iterable[object]:
        """Return an iterable with one item for each act."""

    @abstractmethod
    def _ask(self) -> None:
        """Submit requests."""

    @abstractmethod
    def _alone(self, asked: Asked) -> Told:
        """Return the outputs of the request when it runs alone."""

    @abstractmethod
    def _directory(self, name: str) -> Path:
        """Return the directory of an adapter's next version."""

    @property
    @abstractmethod
    def has_hung(self) -> bool:
        """True if a read hung."""

    @abstractmethod
    def _is_unlucky(self, adapter: Adapter | None) -> bool:
        """Return True if reading the adapter's files may fail."""

    @abstractmethod
    def _break_files(self, path: Path) -> None:
        """Let all later reads of these files fail."""

    @abstractmethod
    def _wait(self) -> None:
        """Let time go by."""

    @abstractmethod
    def _pause(self) -> None:
        """Let time go by after a step without outputs."""

    @abstractmethod
    def _drain(self) -> None:
        """Continue until all requests have ended."""

    def run(self) -> None:
        """Perform the acts; raises Violation, or any error that the engine must not raise."""
        acts = [act for act, weight in self.acts.items() for _ in range(weight)]
        try:
            for _ in self._span():
                self.act(self.rng.choice(acts))
            self.finish()
        finally:
            self.engine.close()

    def act(self, name: str) -> None:
        """Perform one of `acts`, then check the invariants."""
        getattr(self, f"_{name}")()
        self._check_invariants()

    def _note_sent_back(self) -> None:
        """Note from now on which requests have been: they may begin again before the step ends that sent them back."""
        lifecycle = self.engine.scheduler.lifecycle
        send_back = lifecycle.send_back

        def noted(request: Request, state: RequestState) -> None:
            self.asked[request.id].was_sent_back = True
            send_back(request, state)

        lifecycle.send_back = noted

    # -- events

    def _register(self, name: str, path: Path) -> None:
        old, usable = self.current.get(name), self.engine.pool.num_usable
        try:
            adapter = self.engine.store.register(name, path)
        except AdapterFormatError:
            adapters = self.engine.executor.adapters
            pages = adapters.layout(adapters.inspect(path)).num_pages
            promise(pages >= usable, "an adapter that fits was refused")
            self.reached["refused: an adapter too large"] += 1
            return
        promise(adapter.num_pages < usable, "an adapter that does not fit was registered")
        self._replace(name, adapter, old)

    def _replace(self, name: str, adapter: Adapter, old: Adapter | None) -> None:
        promise(adapter is self.engine.store.get(name), f"{name} is not its newest version")
        if adapter.manifest.content_hash is None:  # without it no request can be moved
            self.engine.store.note(adapter, with_content(adapter.manifest))
        self.current[name] = adapter
        self.pinned.discard(old)
        self.reached["loaded"] += 1
        self.reached["reload in use"] += old is not None and old.requests > 0

    def _submit(
        self, name: str | None, sent: Prompt, params: RequestParams, tenant: str, salt: str, call: str = ""
    ) -> Asked | None:
        prompt = sent.tokens
        request = Request(
            f"r{len(self.asked)}",
            list(prompt),
            params,
            name,
            tenant=tenant,
            cache_salt=salt,
            choice_group=call,
            media=sent.media,
            prediction=self.predict(),
        )
        expected = self._refusal(name, sent, params.max_tokens)
        refused = self._add(lambda: self.engine.add_request(request))
        is_right = refused == expected or (refused == OVERLOADED and expected is None)
        promise(is_right, "{} was refused for {}, not for {}", request.id, refused, expected)
        if refused is not None:
            return None
        adapter = request.adapter
        self.reached["an adapter that is not invoked"] += name is not None and adapter is None
        self.reached["a composed adapter"] += adapter is not None and bool(adapter.sources)
        self._check_bound(adapter, self._invoked(name, prompt))
        scope = ("" if self.engine.config.share_prefix_cache else tenant, salt)
        asked = self.asked[request.id] = self.active[request.id] = Asked(request, adapter, prompt, scope)
        self.reached["asked about an image"] += bool(sent.media)
        return asked

    def _invoked(self, name: str | None, prompt: list[int]) -> list[tuple[Adapter, float]]:
        """The adapters that a prompt is computed with, and their scales."""
        found = [(self.current[part], scale) for part, scale in _terms(name)]
        return [] if len(found) == 1 and invoked_at(found[0][0], prompt) is None else found

    def _check_bound(self, adapter: Adapter | None, wanted: Sequence[tuple[Adapter, float]]) -> None:
        """Check that a request got the current versions, with the scales that it named."""
        sources = () if adapter is None else adapter.sources or (adapter,)
        promise(list(sources) == [each for each, _ in wanted], "a request got another version than the current one")
        if adapter is not None and adapter.sources:
            scales = [scale for _, scale in adapter.manifest.sources]
            promise(scales == [scale for _, scale in wanted], "a request got other scales than it named")
            promise(adapter in self.engine.store.versions(), "a request got a composed adapter that is not kept")

    def _refusal(self, name: str | None, sent: Prompt, max_tokens: int | None) -> str | None:
        """The field that a request must be refused for."""
        prompt = sent.tokens
        config, most, length = self.engine.config, self.engine.model.max_model_len, len(prompt)
        total = min(most, length + (max_tokens or 1))
        if not 0 < length < most:
            return "prompt"
        terms = _terms(name)
        if not self.current.keys() >= {part for part, _ in terms}:
            return "model"
        if name is not None and name != terms[0][0]:
            parts = [self.current[part] for part, _ in terms]
            num_pages, usable = sum(part.num_pages for part in parts), self.engine.pool.num_usable
            if any(part.manifest.invocation_tokens for part in parts) or num_pages >= usable:
                return "adapters"
        if (refused := self._refusal_of_blocks(name, sent)) is not None:
            return refused
        if not config.chunked_prefill and total - 1 > config.max_num_batched_tokens:
            return "prompt"
        parts = [each for each, _ in self._invoked(name, prompt)]
        is_pinned = name in self.current and self.current[name] in self.pinned  # one with a scale has its own pages
        fits = self._could_fit(0 if is_pinned else sum(part.num_pages for part in parts), total - 1)
        return None if fits else "prompt" if max_tokens is None else "max_tokens"

    def _refusal_of_blocks(self, name: str | None, sent: Prompt) -> str | None:
        """The field that a prompt is refused for whose positions see each other."""
        config, kind = self.engine.config, self.engine.model.image_blocks
        if kind is None:
            return None
        longest = max((count for item in sent.media for _, count in item.runs), default=0)
        if kind is Blocks.PROMPT:
            longest = len(sent.tokens)
        if longest > config.max_num_batched_tokens - config.max_num_seqs:
            return "messages"
        begins = [invoked_at(each, sent.tokens) for each, _ in self._invoked(name, sent.tokens)]
        return "model" if kind is Blocks.PROMPT and any(begins) else None

    def _could_fit(self, num_pages: int, num_tokens: int) -> bool:
        """True if an adapter's pages and tokens fit in addition to pinned adapters when nothing else is there."""
        beside = self._num_pinned + num_pages
        layout, chunk = self.engine.executor.layout, self.engine.config.max_num_batched_tokens
        return beside + layout.pages_for_tokens(num_tokens, chunk) <= self.engine.pool.num_usable

    @property
    def _num_pinned(self) -> int:
        return sum(adapter.num_pages for adapter in self.pinned)

    def _add(self, add: Callable[[], object]) -> str | None:
        """Queue a request; why it was refused: the field, or OVERLOADED."""
        try:
            add()
        except Overloaded as error:
            most = self.engine.config.max_waiting
            promise(most is not None and len(self.engine.scheduler.waiting) >= most // 2, "refused, with room to wait")
            promise(1 <= error.retry_after <= 60, f"it may come again in {error.retry_after} s")
            self.reached["refused: overloaded"] += 1
            return OVERLOADED
        except InvalidRequest as error:
            self.reached["refused: invalid"] += 1
            return error.field
        return None

    def _abort(self) -> None:
        """Any request, which may have ended."""
        if not self.asked:
            return
        id = self.rng.choice(list(self.active or self.asked))
        if id in self._live:
            self._drop(id)
            self.reached["aborted"] += 1
        else:
            promise(not self.engine.abort(id), "a request that has ended was aborted")

    @property
    def _live(self) -> list[str]:
        """Ids of the requests in progress; of other active ones only an error is left to deliver."""
        return [id for id, asked in self.active.items() if asked.request.state is not RequestState.DONE]

    def _drop(self, id: str) -> None:
        promise(self.engine.abort(id), "a live request could not be aborted")
        self.active.pop(id).aborted = True
        self._note()
        promise(not self.engine.abort(id), "a request was aborted twice")

    def _move(self) -> None:
        """Take a request out as plain data and let it come back, as if from another engine."""
        if not (ids := self._live):
            return
        asked = self.active[self.rng.choice(ids)]
        record = to_record(asked.request, self._now())
        self._drop(asked.request.id)
        answers: list[Request | NotHere] = []
        if self._add(lambda: answers.append(self.engine.resume(record))) is not None:
            return
        (answer,) = answers
        content = record["content_hash"]
        if isinstance(answer, NotHere):
            assert asked.adapter is not None
            is_here = set(asked.adapter.sources or (asked.adapter,)) <= set(self.current.values())
            is_here |= content in [adapter.manifest.content_hash for adapter in self.current.values()]
            promise(not is_here, "a request's adapter was not found")
            self.reached["not moved: its adapter is gone"] += 1
            return
        found = answer.adapter
        promise((found and found.manifest.content_hash) == content, "a request goes on with another adapter")
        asked.earlier.append(asked.adapter)
        asked.request, asked.adapter = answer, found
        asked.aborted, asked.was_sent_back, asked.was_moved = False, True, True
        asked.was_here = False  # nothing held its adapter in between
        self.active[answer.id] = asked
        self.reached["moved"] += 1

    def _load(self) -> None:
        name = self.rng.choice(self.names)
        self._register(name, self._directory(name))

    def _unload(self) -> None:
        """By force every request that holds a version ends at once, and nothing of it is left in the arena."""
        engine, name, force = self.engine, self.rng.choice(self.names), self.rng.random() < 0.3
        if name not in self.current:
            try:
                engine.adapters.remove(name, force=force)
            except UnknownAdapter:
                return
            raise Violation(f"{name} was removed and was not there")
        held = [self.active[id] for id in self._live]
        users = [each for each in held if force and name in _names_of(each.adapter)]
        promise(engine.adapters.remove(name, force=force) == len(users), "too few requests were ended, or too many")
        for asked in users:
            asked.was_removed = True
        self.pinned.discard(self.current.pop(name))
        self.reached["unloaded"] += 1
        if force:
            self.reached["ended by force"] += bool(users)
            promise(
                all(name not in _names_of(each) for each in engine.store.versions()), f"{name} was removed and is there"
            )

    def _pin(self) -> None:
        engine, name = self.engine, self.rng.choice(self.names)
        adapter, store, usable, stats = self.current.get(name), engine.store, engine.pool.num_usable, engine.stats()
        held = stats.num_kv_pages + stats.num_adapter_pages - store.num_idle_pages
        try:
            is_pinned = engine.adapters.pin(name)
        except UnknownAdapter:
            promise(adapter is None, f"{name} is unknown")
            return
        except (InvalidRequest, PagesInUse) as error:
            assert adapter is not None
            promise(adapter not in self.pinned, f"{name} is pinned, and refused: {error}")
            is_too_much = 2 * (self._num_pinned + adapter.num_pages) > usable
            has_no_room = not adapter.pages and held + adapter.num_pages > usable
            is_told = is_too_much if isinstance(error, InvalidRequest) else has_no_room and not is_too_much
            promise(is_told, f"there is room to pin {name}")
            self.reached["no room to pin"] += 1
            return
        except (AdapterFormatError, OSError, TimeoutError) as error:
            assert adapter is not None
            promise(self.has_hung or self._is_unlucky(adapter), f"{name} can't be pinned: {error}")
            promise(adapter.transfer is not None or not adapter.pages, f"{name} is there, and can't be pinned: {error}")
            self.reached["not pinned"] += 1
            return
        assert adapter is not None
        if is_pinned:
            self.pinned.add(adapter)
            has_pages = bool(adapter.pages) != self.is_asleep
            promise(has_pages and 2 * self._num_pinned <= usable, f"{name} is pinned without pages, or room")
        else:
            promise(store.tier(adapter) in self.not_pinned, f"{name} is {store.tier(adapter)}, and not pinned")
            promise(adapter not in store.pins, f"{name} is pinned, and is not")
        self.reached["pinned" if is_pinned else "not pinned"] += 1

    def _unpin(self) -> None:
        name = self.rng.choice(self.names)
        try:
            self.engine.adapters.unpin(name)
        except UnknownAdapter:
            promise(name not in self.current, f"{name} is unknown")
        else:
            self.pinned.discard(self.current[name])

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
        engine, name = self.engine, self.rng.choice(self.names)
        adapter, merging, shadow = self.current.get(name), engine.merging, engine.executor.shadow
        try:
            engine.merge(name)
        except UnknownAdapter:
            promise(adapter is None, f"{name} is unknown")
        except CannotMerge as error:
            assert adapter is not None
            if "no merged mode" in str(error):
                promise(shadow is None, "merging is refused where there is a merged mode")
            elif "resident" in str(error):
                promise(not adapter.pages or adapter.transfer is not None, f"{name} is not merged, and is resident")
            elif "outweighs" in str(error):
                promise(self._outweighs(adapter), f"{name} is not merged, and weighs little")
            else:
                promise("no room" in str(error), f"{name} is not merged: {error}")
                self.reached["no room for a shadow"] += 1
        else:
            promise(merging.shadowed is adapter, f"{name} is not merged")

    def _outweighs(self, adapter: Adapter) -> bool:
        """True if an adapter may be refused as too much for the weights; of real ones nothing is known here."""
        return True

    def _merge_whole(self) -> None:
        """Merge an adapter that is there, and switch back and forth once its shadow is whole."""
        merging = self.engine.merging
        there = [each for _, each in sorted(self.current.items()) if each.pages and each.transfer is None]
        if not there:
            return
        adapter = self.rng.choice(there)
        try:
            self.engine.merge(adapter.name)
            while merging.is_under_way:
                merging.advance(0.0)
            for _ in range(self.rng.randint(0, 3)):
                self._step()
                self._check_invariants()
                self.engine.unmerge()
                if merging.shadowed is not adapter:
                    break
                self.engine.merge(adapter.name)
                promise(merging.merged is adapter, f"{adapter} has a shadow, and is not merged")
        except CannotMerge:
            promise(merging.shadowed is not adapter, f"{adapter} can't be merged, and has a shadow")

    def _unmerge(self) -> None:
        self.engine.unmerge()
        promise(self.engine.stats().merged_adapter is None, "an adapter is merged yet")

    def _reclaim(self) -> None:
        """All that nothing uses is free then; running requests are not touched."""
        if self.rng.random() < 0.7:
            return
        before = self.engine.stats()
        freed = self.engine.reclaimer.reclaim_all()
        after, store = self.engine.stats(), self.engine.store
        promise(after.num_free_pages == before.num_free_pages + freed, "other pages were freed than it says")
        promise(after.num_kv_pages == before.num_kv_pages, "pages of running requests were freed")
        promise(after.num_cached_pages == after.num_shadow_pages == 0, "a shadow is left, or a cached page")
        used = sum(len(each.pages) for each in store.versions() if each.references or each.transfer is not None)
        used += sum(len(pages) for _, pages in store.loads.holders())
        promise(after.num_adapter_pages == used, "an adapter is left that nothing uses")

    def _step(self) -> bool:
        """One step of the engine; False if there was nothing to run and nothing to tell."""
        self._before_step()
        plan = self.engine.begin_step()
        outputs = self.engine.end_step(plan)
        for violation in self.executor.violations:
            raise violation
        self.executor.glitches = 0
        self._after_step()
        for output in outputs:
            self._take(output)
        self.reached["steps"] += plan is not None
        self.reached["steps ahead"] += plan is not None and plan.sources is not None
        self.reached["merged steps"] += plan is not None and plan.merged is not None
        num_preemptions = self.engine.scheduler.lifecycle.num_preemptions
        num_given_up = self.engine.store.images.counts().num_given_up
        self.reached["preempted"] += num_preemptions > self._num_preemptions
        self.reached["reads given up"] += num_given_up > self._num_given_up
        self._num_preemptions, self._num_given_up = num_preemptions, num_given_up
        if not outputs:
            self._pause()
        return plan is not None or bool(outputs)

    def _note(self) -> None:  # noqa: B027 - optional
        """Called between any two changes of the engine within an act, for subclasses that follow it more closely."""

    _before_step = _after_step = _note

    def finish(self) -> None:
        """Nothing new comes: every request ends, and every page and byte comes back."""
        self._drain()
        for asked in self.asked.values():
            promise(asked.ended, f"{asked.request.id} was forgotten")
        self.engine.step()
        self.engine.check_when_idle()
        self.engine.reclaimer.reclaim_all()
        self.engine.check_integrity()
        stats = self.engine.stats()
        promise(stats.num_free_pages == stats.num_pages, f"pages were lost: {stats}")
        promise(stats.num_swapped == stats.swapped_bytes == 0, f"host memory was lost: {stats}")
        promise(stats.num_kv_pages == len(self.engine.prefix) == 0, "a block is known of nothing")
        promise(not list(self.engine.store.versions()), "an adapter is left that nothing holds")
        self.reached["merges"] += stats.num_merges
        self.reached["swaps out"] += stats.num_swaps_out
        self.reached["swaps in"] += stats.num_swaps_in
        self.reached["swaps dropped"] += stats.num_swaps_dropped

    def _remove_adapters(self) -> None:
        for name in list(self.current):
            self.engine.adapters.unpin(name)
            self.engine.store.unregister(name)
        self.current.clear()
        self.pinned.clear()

    # -- invariants

    def _check_invariants(self) -> None:
        self._note()
        here: dict[Adapter | None, bool] = {None: False}
        unseen = [asked for asked in self.active.values() if not asked.was_here]
        for asked in unseen:
            adapter = asked.adapter
            if adapter is not None and adapter not in here:
                here[adapter] = self.engine.store.tier(adapter) in (Tier.HOST, Tier.DEVICE)
            asked.was_here = here[adapter]
        live = [request for asked in self.active.values() if (request := asked.request).state is not RequestState.DONE]
        self.invariants.check(live, self.pinned)

    def earlier(self) -> Iterable[Asked]:
        """Requests of engines before this one, whose cached prefixes it may find."""
        return ()

    def _take(self, output: RequestOutput) -> None:
        asked = self.asked[output.request_id]
        asked.take(output, (*self.earlier(), *self.asked.values()))
        if output.finish_reason is None:
            return
        del self.active[output.request_id]
        asked.check_end(self._alone(asked))
        if output.finish_reason is FinishReason.ERROR:
            self.reached["ended with an error"] += 1
            self._check_error(asked, output)
        else:
            self.reached["answered"] += 1
            self.reached["answered from the prefix cache"] += asked.request.num_cached_tokens > 0

    def _check_error(self, asked: Asked, output: RequestOutput) -> None:
        """Check that a request failed for a reason: its own fault, its adapter's, or that there was no room."""
        id, text = output.request_id, asked.error
        promise((output.failure is LoadFailure.REMOVED) == asked.was_removed, "{} ended by a removal that was none", id)
        if id in self.executor.raises_for or id in self.executor.sick or asked.was_removed:
            return
        if "pinned adapters" in text:
            num_pages = 0 if asked.adapter is None or asked.adapter in self.pinned else asked.adapter.num_pages
            promise(not self._could_fit(num_pages, len(asked.tokens)), f"there was room for {id}")
            self.reached["no room beside pinned"] += 1
            return
        waited = self.has_hung and "could not begin, because all others hang" in text
        promise(waited or self._is_unlucky(asked.adapter), f"{id} failed without a reason: {text}")
        promise("changed on disk" not in text or not asked.was_here, f"{id} lost bytes that were here: {text}")


def _terms(name: str | None) -> Sequence[tuple[str, float]]:
    """The adapters that a model's name means, and their scales."""
    composition = None if name is None else read_composition(name)
    return composition.terms if composition is not None else [] if name is None else [(name, 1.0)]


def _names_of(adapter: Adapter | None) -> set[str]:
    """An adapter's name and those of what it is composed of."""
    return set() if adapter is None else {each.name for each in (adapter, *adapter.sources)}


Outcome = tuple[int, str | None, Counter[str]]
"""A run's seed, the reason why it failed or None, and the rare events that it reached."""


def run_seed(seed: int, begin: Callable[[random.Random], EngineRun]) -> Outcome:
    """Run the simulation of a seed."""
    logging.disable(logging.CRITICAL)
    run = None
    try:
        run = begin(random.Random(seed))
        run.run()
    except Exception as error:
        return seed, f"{type(error).__name__}: {error}", run.reached if run else Counter()
    return seed, None, run.reached


@dataclass
class Campaign:
    """Many runs: the events that they reached, and the seeds that failed. log: a file to which progress is appended."""

    log: Path | None
    log_every: int
    count: int = 0
    failed: list[int] = field(default_factory=list)
    reached: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.perf_counter)

    def add(self, outcome: Outcome) -> None:
        seed, cause, found = outcome
        self.count += 1
        self.reached += found
        if cause is not None:
            self.failed.append(seed)
            if len(self.failed) <= 20:
                print(f"seed {seed}: {cause}", flush=True)
        if self.log is not None and (cause is not None or (seed + 1) % self.log_every == 0):
            with self.log.open("a") as log:
                where = f"{time.strftime('%H:%M:%S')} {self.count} runs to {seed}: {len(self.failed)} failed"
                log.write(f"{where}, {self.reached['answered']} answers{f', seed {seed}: {cause}' if cause else ''}\n")

    def result(self) -> dict[str, Any]:
        for name, count in sorted(self.reached.items()):
            print(f"{name:32} {count:10}")
        seconds = round(time.perf_counter() - self.began, 1)
        return {"seeds": self.count, "failed": self.failed[:1000], "seconds": seconds, "reached": self.reached}
