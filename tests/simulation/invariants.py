"""The engine's accounting invariants, which hold between any two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from chorus.core.engine import Engine
from chorus.core.requests.request import Request, RequestState
from chorus.memory.adapters.adapter import Adapter
from chorus.memory.pages.pool import PageKind

from .asked import Violation, promise

STATES = {state: f"state {state}" for state in RequestState}
_RUNNING, _LOADING = RequestState.RUNNING, RequestState.LOADING
_KINDS = [kind for kind in PageKind if kind is not PageKind.RESERVED]


class Invariants:
    """Compares an engine's counts with its state. reached: counts rare events."""

    def __init__(self, engine: Engine, reached: Counter[str]) -> None:
        self._engine = engine
        self._reached = reached
        self._had_shadow = False

    def check(self, active: Collection[Request], pinned: Collection[Adapter]) -> None:
        """active: the requests in progress. pinned: the adapters that are to be resident."""
        self._engine.check_integrity()
        self._check_running()
        self._check_pages(active)
        self._check_states(active)
        self._check_adapters(active, pinned)
        self._check_merging()
        self._check_host_images()

    def _check_running(self) -> None:
        running, slots = self._engine.scheduler.running, self._engine.config.max_num_seqs
        tenants, calls = running.tenants, running.choice_groups
        promise(tenants == Counter([request.fairness_key for request in running]), "wrong numbers of requests")
        may_have_more = bool(calls) or self._engine.config.max_adapters_per_step is not None  # without an index
        promise(len(tenants) <= slots or may_have_more, "more tenants than slots")  # one call may have many
        promise(len(running) <= slots or may_have_more or len(tenants) > 1, "more requests than slots")  # paused ones
        promise({*running.single_requests}.union(*calls.values()) == {*running}, "calls have other requests than run")
        if calls:
            answers = Counter(
                [(request.choice_group, request.fairness_key) for request in running if request.choice_group]
            )
            promise(max(answers.values()) <= slots, "more answers of a call than slots")

    def _check_pages(self, active: Collection[Request]) -> None:
        engine, count, swapped = self._engine, self._engine.pool.count, self._engine.swapped
        promise(sum(map(count, _KINDS)) == engine.pool.num_usable, "pages do not add up")
        num_running, num_waiting = len(engine.scheduler.running), len(engine.scheduler.waiting)
        promise(num_running + num_waiting == len(active), "other requests run or wait than are in progress")
        copied = len(list(swapped.holders()))  # the next step frees pages whose copies have ended
        promise(not count(PageKind.KV) or num_running + copied > 0, "pages hold KV of no request")
        promise(swapped.num_out == 0 or engine.config.preemption != "recompute", "KV was swapped out, and must not be")
        promise(len(swapped) <= len(active) + copied, "more swapped KV than requests")
        promise(count(PageKind.SHADOW) == engine.reclaimer.shadow.num_pages, "a shadow has other pages than it says")

    def _check_states(self, active: Collection[Request]) -> None:
        running, waiting, reached = set(self._engine.scheduler.running), self._engine.scheduler.waiting, self._reached
        for request in active:
            runs, state = request in running, request.state
            if not (state is _RUNNING or state is _LOADING) == hasattr(request, "block_table") == runs:
                raise Violation(f"{request} runs, and does not")
            if runs == (request in waiting):
                raise Violation(f"{request} is in both queues, or in none")
            if state is _LOADING and request.adapter is None and not request.restoring:
                raise Violation(f"{request} loads nothing")
            reached[STATES[state]] += 1

    def _check_adapters(self, active: Collection[Request], pinned: Collection[Adapter]) -> None:
        store, versions = self._engine.store, set(self._engine.store.versions())
        idle = [each for each in versions if each.pages and not each.references and each.transfer is None]
        promise(store.num_idle_pages == sum(each.num_pages for each in idle), "wrong number of idle pages")
        promise(all(adapter.pages for adapter in pinned), "a pinned adapter was evicted")
        promise(store.pins.num_pages == sum(each.num_pages for each in pinned), "wrong number of pinned pages")
        merging = self._engine.merging
        merged = merging.shadowed if merging.is_under_way else merging.merged
        holding = [request.adapter for request in active]
        running = [request.adapter for request in self._engine.scheduler.running]
        for adapter in versions:
            pin = adapter in pinned
            held, wanted = running.count(adapter) + pin, holding.count(adapter) + pin + (adapter is merged)
            if (adapter.references, adapter.requests) != (held, wanted):
                raise Violation(f"{adapter} is held, or wanted, by too many or by too few: {held}, {wanted}")
        promise({None, *versions}.issuperset(holding), "a request's adapter is unknown")

    def _check_merging(self) -> None:
        engine, merging, shadow = self._engine, self._engine.merging, self._engine.executor.shadow
        if shadow is None:
            promise(merging.shadowed is None, "a shadow where there is no merged mode")
            return
        adapter = merging.shadowed
        promise(merging.merged in (None, adapter), f"{merging.merged} is merged, the shadow is of {adapter}")
        if adapter is not None:
            registered = [each for _, each in engine.store.registered()]
            promise(adapter in registered, "{} is gone, or replaced, and still merged", adapter)
            promise(bool(adapter.pages), f"{adapter} has a shadow, and was evicted")
        self._reached["shadow kept"] += adapter is not None and merging.merged is None and not merging.is_under_way
        self._reached["shadow gone"] += self._had_shadow and adapter is None
        self._had_shadow = adapter is not None

    def _check_host_images(self) -> None:
        images = self._engine.store.images
        host = self._engine.host
        num_bytes = images.num_bytes + self._engine.swapped.num_bytes + (0 if host is None else host.num_bytes)
        num_bytes += 0 if self._engine.disk is None else self._engine.disk.num_bytes
        num_bytes += 0 if self._engine.encoder is None else self._engine.encoder.cache.num_bytes
        if host is not None and (ahead := host.ahead) is not None:
            num_bytes += ahead.num_bytes
            self._reached["copied ahead"] += ahead.num_begun_pages > 0
            self._reached["copied ahead in vain"] += ahead.num_void_pages > 0
        promise(images.budget.num_bytes == num_bytes, "the budget of host memory counts other bytes")
        entries = {*images._entries.values(), *images._given_up.values()}  # noqa: SLF001 - the accounting itself
        promise(images.num_bytes == sum(entry.num_bytes for entry in entries), "host images have other bytes")
