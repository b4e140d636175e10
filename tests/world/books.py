"""What an engine's books must say at any time between two steps."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection

from chorus.core.engine import Engine
from chorus.core.requests.request import Request, RequestState
from chorus.memory.adapters.adapter import Adapter

from .asked import Violation, promise


class Books:
    """Compares an engine's counts with what it holds. reached: counts what is rare."""

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
        running, seats = self._engine.scheduler.running, self._engine.config.max_num_seqs
        promise(running.accounts == Counter(request.account for request in running), "wrong numbers of requests")
        promise(
            len(running.accounts) <= seats or bool(running.calls), "more tenants than seats"
        )  # one call may have many
        answers = Counter((request.call, request.account) for request in running if request.call)
        promise(all(count <= seats for count in answers.values()), "more answers of a call than seats")
        several = running.calls or len(running.accounts) > 1
        promise(len(running) <= seats or bool(several), "more requests than seats")  # else others are paused
        members = itertools.chain(running.lone, *running.calls.values())
        promise(set(members) == set(running), "calls have other requests than run")

    def _check_pages(self, active: Collection[Request]) -> None:
        engine, stats = self._engine, self._engine.stats()
        held = stats.num_kv_pages + stats.num_adapter_pages + stats.num_cached_pages + stats.num_shadow_pages
        copied = len(list(engine.swapped.holders()))  # the next step frees what is not copied any more
        kept = {
            "pages do not add up": stats.num_free_pages + held == engine.pool.num_usable,
            "other requests are counted": stats.num_running + stats.num_waiting == len(active),
            "KV of no request": not stats.num_kv_pages or stats.num_running or copied,
            "KV was swapped": engine.config.preemption != "recompute" or not stats.num_swaps_out,
            "more swapped KV than requests": stats.num_swapped <= len(active) + copied,
            "other pages of a shadow": stats.num_shadow_pages == engine.reclaimer.shadow.num_pages,
        }
        if not all(kept.values()):
            raise Violation(f"{[text for text, holds in kept.items() if not holds]}: {len(active)} requests, {stats}")

    def _check_states(self, active: Collection[Request]) -> None:
        scheduler = self._engine.scheduler
        for request in active:
            runs, is_loading = request in scheduler.running, request.state is RequestState.LOADING
            if not request.is_running == hasattr(request, "block_table") == runs:
                raise Violation(f"{request} runs, and does not")
            if runs == (request in scheduler.waiting):
                raise Violation(f"{request} is in both queues, or in none")
            if is_loading and request.adapter is None and not request.coming:
                raise Violation(f"{request} loads nothing")
            self._reached[f"state {request.state}"] += 1

    def _check_adapters(self, active: Collection[Request], pinned: Collection[Adapter]) -> None:
        store, versions = self._engine.store, set(self._engine.store.versions())
        idle = [each for each in versions if each.pages and not each.references and each.transfer is None]
        promise(store.num_idle_pages == sum(each.num_pages for each in idle), "wrong number of idle pages")
        promise(all(adapter.pages for adapter in pinned), "a pinned adapter was evicted")
        promise(store.num_pinned_pages == sum(each.num_pages for each in pinned), "wrong number of pinned pages")
        merging = self._engine.merging
        merged = merging.shadowed if merging.is_under_way else merging.merged
        holding = Counter(request.adapter for request in active)
        running = Counter(request.adapter for request in active if request.is_running)
        for adapter in versions:
            pin = adapter in pinned
            held, wanted = running[adapter] + pin, holding[adapter] + pin + (adapter is merged)
            if (adapter.references, adapter.requests) != (held, wanted):
                raise Violation(f"{adapter} is held, or wanted, by too many or by too few: {held}, {wanted}")
        promise({*holding} - {None} <= versions, "a request's adapter is unknown")

    def _check_merging(self) -> None:
        engine, merging, shadow = self._engine, self._engine.merging, self._engine.executor.shadow
        if shadow is None:
            promise(merging.shadowed is None, "a shadow where there is no merged mode")
            return
        adapter = merging.shadowed
        promise(adapter is shadow.adapter, f"the shadow is of {shadow.adapter}, not of {adapter}")
        promise(merging.merged in (None, adapter), f"{merging.merged} is merged, the shadow is of {adapter}")
        if adapter is not None:
            promise(adapter in engine.store.registered(), f"{adapter} is gone, or replaced, and still merged")
            promise(bool(adapter.pages), f"{adapter} has a shadow, and was evicted")
        self._reached["shadow kept"] += adapter is not None and merging.merged is None and not merging.is_under_way
        self._reached["shadow gone"] += self._had_shadow and adapter is None
        self._had_shadow = adapter is not None

    def _check_host_images(self) -> None:
        images = self._engine.store.images
        num_bytes = images.num_bytes + self._engine.swapped.num_bytes
        promise(images.budget.num_bytes == num_bytes, "the budget of host memory counts other bytes")
        entries = {*images._entries.values(), *images._given_up.values()}  # noqa: SLF001 - the books themselves
        promise(images.num_bytes == sum(entry.num_bytes for entry in entries), "host images have other bytes")
