"""The replicas of an API server: their known state, and which of them may take a request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...memory.adapters.adapter import Tier
from ...memory.files.error import AdapterFormatError, LoadFailure
from .in_flight_table import OpenRequest, Placements
from .link import Link, LoadRefusal
from .router import Holders, PrefixPlaces, Replicas, ReplicaState

RETRY_SECONDS = 10.0
"""Seconds after which a replica loads an adapter again that it could not read for a reason that may pass."""

_NEAREST = (Tier.DEVICE, Tier.LOADING, Tier.HOST, Tier.FAILED)


class Fleet(Placements):
    """Links, and the load of each: the reported load of other API servers' requests, plus this API server's, updated as
    requests come and go. Only `note_up`, `note_down` and `changed` take longer with more replicas or requests.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = links
        self._loads = {link.name: _ReplicaLoad(link) for link in links}
        self._holders = Holders()
        self.prefixes = PrefixPlaces()
        self._pins: Mapping[str, Path] = {}
        self._candidates: dict[str | None, tuple[Sequence[Link], Replicas]] = {}  # by content, for new requests

    def state_of(self, link: Link) -> ReplicaState:
        return self._loads[link.name].state

    # --- candidates ---

    def candidates(self, request: OpenRequest) -> tuple[Sequence[Link], Replicas]:
        """Replicas that may take a request: they have its adapter and, if it has tokens, are of the kind that sampled
        them.

        All replicas are sent the adapter to load, so any of them can continue its requests.
        """
        content, kind = request.content_hash, request.kind if request.num_output_tokens else None
        found = self._candidates.get(content)
        if found is None:
            found = self._candidates[content] = self._find(content, request.path)
        if kind is None and not request.refused_by:
            return found
        links = [
            link for link in found[0] if (kind is None or link.identity == kind) and link.name not in request.refused_by
        ]
        return found if len(links) == len(found[0]) else (links, self._view(links))

    def changed(self, content_hash: str | None = None) -> None:
        """Replicas may take requests of a content that they could not take before, or the other way round; None: of any
        content.
        """
        if content_hash is None:
            self._candidates.clear()
        else:
            self._candidates.pop(content_hash, None)

    def _find(self, content: str | None, path: Path | None) -> tuple[Sequence[Link], Replicas]:
        links = [link for link in self.links if link.takes_requests]
        if content is not None:
            for link in self.links:
                if path is not None and content not in link.failed:
                    link.load(content, path)
            links = [link for link in links if content in link.loaded]
            everyone, _ = found = self._candidates.get(None) or self._candidates.setdefault(
                None, self._find(None, None)
            )
            if len(everyone) == len(links):
                return found
        return links, self._view(links)

    def _view(self, links: Sequence[Link]) -> Replicas:
        return Replicas(map(self.state_of, links), self._holders)

    # --- adapters ---

    def forget(self, content_hash: str) -> bool:
        """Have all replicas unregister an adapter; False while one is still loading it."""
        for link in self.links:
            link.forget(content_hash)
        self.changed(content_hash)
        return not any(content_hash in link.loading for link in self.links)

    def pin(self, pins: Mapping[str, Path]) -> None:
        """Have all current and future replicas keep exactly these contents resident."""
        for content in self._pins.keys() - pins.keys():
            for link in self.links:
                link.unpin(content)
        self._pins = pins
        for link in self.links:
            self.keep_pins(link)

    def keep_pins(self, link: Link) -> None:
        """Have a replica load and pin missing contents; call it when the replica connected or has loaded something."""
        for content, path in self._pins.items():
            if content not in link.failed:
                link.load(content, path)
                link.pin(content)

    def note_failure(self, link: Link, content_hash: str, failure: LoadFailure, text: str, now: float) -> None:
        """A replica could not load an adapter. now: the dispatcher's clock, as in `retry`."""
        retry_at = now + RETRY_SECONDS if failure.may_pass else math.inf
        link.failed[content_hash] = LoadRefusal(failure, text, retry_at)

    def retry(self, now: float) -> None:
        """Have replicas load adapters again whose failures may have passed: pinned ones at once, others with their next
        request. Call this periodically.
        """
        for link in self.links:
            if not link.is_up:
                continue
            due = [content for content, refusal in link.failed.items() if now >= refusal.retry_at]
            for content in due:
                del link.failed[content]
                self.changed(content)
            if due:
                self.keep_pins(link)

    def take_failure(self, content_hash: str | None) -> LoadRefusal | None:
        """Why no connected replica has an adapter; None while one has it or may get it. Then the load is retried."""
        up = [link for link in self.links if link.is_up]
        if content_hash is None or not up or any(content_hash not in link.failed for link in up):
            return None
        failures = [link.failed.pop(content_hash) for link in up]
        self.changed(content_hash)
        return failures[0]

    def tier_of(self, content_hash: str | None) -> Tier:
        """Best tier of a content on any replica."""
        tiers = {link.report.tiers.get(content_hash or "") for link in self.links if link.report is not None}
        return next((tier for tier in _NEAREST if tier.value in tiers), Tier.DISK)

    def is_pinned(self, content_hash: str | None) -> bool:
        """True if every replica that takes requests keeps a content resident."""
        up = [link for link in self.links if link.takes_requests]
        return bool(up) and all(content_hash in link.pinned and link.pinned[content_hash] is None for link in up)

    def pin_failure(self, content_hash: str) -> AdapterFormatError | None:
        """The reason why a replica does not keep a content resident as requested."""
        for link in self.links:
            if (found := link.failed.get(content_hash) or link.pinned.get(content_hash)) is not None:
                error = AdapterFormatError(f"replica {link.name}: {found[1]}")
                error.failure = LoadFailure(found[0])
                return error
        return None

    def overflowing(self) -> set[str]:
        """Contents that had only non-finite logits on some replica."""
        return {one for link in self.links if link.report is not None for one in link.report.overflowing}

    # --- requests ---

    def abort(self, request: OpenRequest) -> None:
        """Have the request's replica abort it."""
        if request.replica is not None:
            self._loads[request.replica].link.send("abort", request.id)

    def placed(self, request: OpenRequest, replica: str) -> None:
        load, content = self._loads[replica], request.content_hash
        load.state.add(request.rank)
        load.state.add_waiting(len(request.record["tokens"]), request.rank)
        if content is not None:
            load.adapters[content] += 1
            if content not in load.held:
                self._holders.add(load.link.name, [content])
                load.held.add(content)
            load.resident.add(content)

    def started(self, request: OpenRequest, replica: str) -> None:
        self._loads[replica].state.remove_waiting(len(request.record["tokens"]), request.rank)

    def left(self, request: OpenRequest, replica: str) -> None:
        load, content = self._loads[replica], request.content_hash
        load.state.remove(request.rank)
        if not request.is_started:
            load.state.remove_waiting(len(request.record["tokens"]), request.rank)
        if content is not None:
            load.adapters[content] -= 1
            if not load.adapters[content]:
                del load.adapters[content]

    # --- links ---

    def note_up(self, link: Link) -> None:
        """A replica has connected, with nothing of this API server's."""
        if link.hello is not None:
            self.state_of(link).max_num_seqs = link.hello.max_num_seqs
            self.prefixes.note_folder(link.name, link.hello.kv_folder)
        self.changed()
        self.keep_pins(link)

    def note_down(self, link: Link) -> None:
        """A replica is gone, and this API server's requests have left it."""
        self._holders.remove(link.name, self._loads[link.name].held)
        self.prefixes.forget(link.name)
        self._loads[link.name] = _ReplicaLoad(link)
        self.changed()

    def note_report(self, link: Link) -> None:
        """A replica has reported its state. Adapters of this API server's requests are there, or being loaded."""
        load, hello, report = self._loads[link.name], link.hello, link.report
        if hello is not None and report is not None:
            stats, state = report.stats, load.state
            num_others = max(0, stats.num_running + stats.num_waiting - report.num_yours)
            state.num_requests += num_others - load.num_others
            load.num_others = num_others
            state.free_tokens = int((stats.num_free_pages + stats.num_cached_pages) / hello.pages_per_token)
            state.kv_tokens = int(stats.num_kv_pages / hello.pages_per_token)
            if hello.page_bytes:
                pages = stats.num_kv_pages + stats.num_cached_pages + stats.host_cached_bytes / hello.page_bytes
                coming = state.pending_tokens  # of prompts that the report may not have yet
                self.prefixes.limit(link.name, int(pages / hello.pages_per_token) + coming)
            held = {*link.on_host, *load.adapters}
            self._holders.remove(link.name, load.held - held)
            self._holders.add(link.name, held - load.held)
            load.held = state.on_host = held
            load.resident = state.resident = {*link.resident, *load.adapters}
        if link.draining:
            self.changed()


class _ReplicaLoad:
    """A replica's state, and its parts.

    num_others: requests of other API servers. adapters: how many of this API server's requests use each. resident,
    held: the state's `resident` and `on_host`, which this API server adds to.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.num_others = 0
        self.adapters: Counter[str] = Counter()
        self.resident: set[str] = set()
        self.held: set[str] = set()
        self.state = ReplicaState(1, resident=self.resident, on_host=self.held, name=link.name)
