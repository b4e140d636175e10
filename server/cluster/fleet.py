"""The replicas of a front, as placing a request asks of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from .ledger import Ledger, OpenRequest
from .link import Link
from .router.replica_state import ReplicaState


class Fleet:
    """Links, and what they hold for the requests of a ledger. rank_of: of a request's adapter, 0 for none."""

    def __init__(self, links: Sequence[Link], ledger: Ledger, rank_of: Callable[[OpenRequest], int]) -> None:
        self.links = links
        self._ledger = ledger
        self._rank_of = rank_of

    def candidates(self, request: OpenRequest, refused_by: Collection[str]) -> list[Link]:
        """Replicas that may take a request: they have its adapter and are, if it has tokens, of the kind of these.

        refused_by: names of those that would not have it.
        """
        content = request.content_hash
        return [
            link
            for link in self.links
            if link.takes_requests
            and (content is None or content in link.loaded)
            and (not request.num_output_tokens or link.identity == request.kind)
            and link.name not in refused_by
        ]

    def load(self, content_hash: str, path: Path) -> None:
        """Have all replicas load an adapter that have not tried, so that any of them can go on with its requests."""
        for link in self.links:
            if content_hash not in link.failed:
                link.load(content_hash, path)

    def forget(self, content_hash: str) -> bool:
        """Have all replicas unregister an adapter; False while one is still loading it."""
        for link in self.links:
            link.forget(content_hash)
        return not any(content_hash in link.loading for link in self.links)

    def take_failure(self, content_hash: str | None) -> tuple[str, str] | None:
        """Why no replica that is up has an adapter; None while one has it or may get it. It is tried again then."""
        up = [link for link in self.links if link.is_up]
        if content_hash is None or not up or any(content_hash not in link.failed for link in up):
            return None
        failures = [link.failed.pop(content_hash) for link in up]
        return failures[0]

    def abort(self, request: OpenRequest) -> None:
        """Have the request's replica abort it."""
        for link in self.links:
            if link.name == request.replica:
                link.send("abort", request.id)

    def state_of(self, link: Link) -> ReplicaState:
        """A replica's load: what it reported of other fronts' requests, and what this front has there by now."""
        hello, report = link.hello, link.report
        state = ReplicaState(max_num_seqs=hello.max_num_seqs if hello else 1, name=link.name)
        if report is not None and hello is not None:
            stats = report.stats
            state.num_requests = max(0, stats.num_running + stats.num_waiting - report.num_yours)
            state.free_tokens = (stats.num_free_pages + stats.num_cached_pages) * hello.block_tokens
            state.kv_tokens = stats.num_kv_pages * hello.block_tokens
        state.resident, state.on_host = link.resident, link.on_host
        for request in self._ledger.at(link.name):
            rank = self._rank_of(request)
            state.add(rank)
            if not request.is_started:
                state.add_waiting(len(request.record["tokens"]), rank)
        return state
