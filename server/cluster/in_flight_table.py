"""The in-flight table of an API server: its open requests, where each runs, and the tokens its client has received. No
I/O.

A request's `attempt` counts its placements, and every row about it has the number. So a row of an earlier placement,
such as one on A in A → B → A, is recognized as stale and dropped. Another replica needs only the record to continue:
prompt, tokens received, seed and parameters (`core.requests.record`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_DEATHS = 2
"""Replicas that may die while they run a request; then it ends with an error, because it may be the cause."""

AND = "\n"
"""Separates the versions of several adapters of a request; no name contains it."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended."""

    id: str
    record: dict[str, Any]
    """See `core.requests.record`. `tokens` are the prompt's and all that the client has received."""
    rank: int = 0
    """LoRA rank of its adapter; 0 for none."""
    attempt: int = 0
    """Number of placements on a replica so far."""
    replica: str | None = None
    """The replica that runs it; None while it is queued at the API server."""
    kind: Hashable | None = None
    """Kind of the replicas that sampled its tokens; only these may continue it. None before the first token."""
    deaths: int = 0
    """Replicas that died while running it."""
    is_taken: bool = False
    """The replica has accepted it."""
    is_started: bool = False
    """A token came in this attempt."""
    path: Path | None = None
    """Directory of its adapter."""
    version: str = ""
    """Its adapter as `name@version`; several have `AND` between them."""
    accepted: Future[None] = field(default_factory=Future)
    """Completes once a replica has accepted the request, or with InvalidRequest."""
    arrival: float = 0.0
    """Time of arrival on this process's clock."""
    refused_by: set[str] = field(default_factory=set)
    """Names of replicas that refused it."""
    stuck_since: float | None = None
    """Time from which no replica was left that may run it."""

    @property
    def content_hash(self) -> str | None:
        return self.record["content_hash"]

    @property
    def num_prompt_tokens(self) -> int:
        return self.record["num_prompt_tokens"]

    @property
    def num_output_tokens(self) -> int:
        return len(self.record["tokens"]) - self.record["num_prompt_tokens"]


class Placements:
    """Notified of requests at replicas, on its thread; this base class ignores the notifications."""

    def placed(self, request: OpenRequest, replica: str) -> None:
        """A request comes to a replica."""

    def started(self, request: OpenRequest, replica: str) -> None:
        """Its first token there arrived; the record does not have it yet."""

    def left(self, request: OpenRequest, replica: str) -> None:
        """It leaves a replica, or has ended there."""


class InFlightTable:
    """Open requests by id. Each is in exactly one place: at the API server, in order of arrival, or at one replica."""

    def __init__(self, placements: Placements | None = None) -> None:
        self._placements = placements or Placements()
        self._open: dict[str, OpenRequest] = {}
        self._at: dict[str | None, dict[str, OpenRequest]] = {None: {}}
        self.unstarted: Counter[str] = Counter()
        """Requests of each tenant without a token."""
        self.num_moves = 0
        """Placements of requests that had been placed before."""
        self.num_stale = 0
        """Rows of an earlier attempt that were dropped."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def get(self, request_id: str) -> OpenRequest | None:
        return self._open.get(request_id)

    def open(self) -> Iterable[OpenRequest]:
        """All requests that have not ended."""
        return self._open.values()

    def waiting(self) -> list[OpenRequest]:
        """Requests that wait at the API server, those with tokens first: their clients are already reading."""
        waiting = list(self._at[None].values())
        waiting.sort(key=lambda request: request.num_output_tokens == 0)
        return waiting

    @property
    def num_waiting(self) -> int:
        return len(self._at[None])

    def at(self, replica: str) -> Iterator[OpenRequest]:
        """Requests at a replica."""
        return iter(self._at.get(replica, {}).values())

    def num_at(self, replica: str) -> int:
        return len(self._at.get(replica, ()))

    def add(self, record: dict[str, Any], rank: int = 0) -> OpenRequest:
        """A new request, which waits. Raises ValueError if its id is in use."""
        request_id = record["id"]
        if request_id in self._open:
            raise ValueError(f"request {request_id} exists already")
        request = self._open[request_id] = self._at[None][request_id] = OpenRequest(request_id, record, rank)
        self.unstarted[record["tenant"]] += 1
        return request

    def place(self, request: OpenRequest, replica: str, kind: Hashable) -> int:
        """Give a waiting request to a replica; return the number of the attempt."""
        if request.attempt:
            self.num_moves += 1
        self._put(request, replica)
        request.attempt += 1
        if not request.num_output_tokens:
            request.kind = kind
        return request.attempt

    def note_accepted(self, request_id: str, attempt: int) -> OpenRequest | None:
        """Note that the replica has accepted a request; None if the row is stale."""
        request = self._current(request_id, attempt)
        if request is not None:
            request.is_taken = True
        return request

    def receive(self, request_id: str, attempt: int, tokens: Sequence[int], *, last: bool) -> OpenRequest | None:
        """Record tokens that arrived, and the end; None if the row is stale, so nothing of it may reach the client."""
        request = self._current(request_id, attempt)
        if request is None:
            return None
        request.is_taken = True
        if tokens:
            if not request.is_started and request.replica is not None:
                self._start(request)
                self._placements.started(request, request.replica)
                request.is_started = True
            request.record["tokens"].extend(tokens)
        if last:
            self.remove(request_id)
        return request

    def give_back(self, request_id: str, attempt: int) -> OpenRequest | None:
        """A replica refused a request: it waits again; None if the row is stale."""
        request = self._current(request_id, attempt)
        if request is not None:
            self._put(request, None)
        return request

    def take_back(self, request: OpenRequest) -> None:
        """Make a request wait again, while its replica aborts it: rows that the replica still sends are stale."""
        self._put(request, None)

    def lose(self, replica: str) -> list[OpenRequest]:
        """A replica died: its requests wait again. Requests that have now seen `MAX_DEATHS` replicas die are removed
        and returned instead.
        """
        ended = []
        for request in list(self._at.get(replica, {}).values()):
            request.deaths += 1
            self._put(request, None)
            if request.deaths >= MAX_DEATHS:
                ended.append(self.remove(request.id) or request)
        return ended

    def remove(self, request_id: str) -> OpenRequest | None:
        """Forget a request that has ended; None if it is unknown."""
        request = self._open.pop(request_id, None)
        if request is not None:
            self._start(request)
            self._leave(request)
        return request

    def _current(self, request_id: str, attempt: int) -> OpenRequest | None:
        request = self._open.get(request_id)
        if request is None:  # it has ended, or was aborted
            return None
        if request.replica is None or request.attempt != attempt:
            self.num_stale += 1
            return None
        return request

    def _start(self, request: OpenRequest) -> None:
        """The request's first token came, or it ended before."""
        if not request.num_output_tokens:
            tenant = request.record["tenant"]
            self.unstarted[tenant] -= 1
            if not self.unstarted[tenant]:
                del self.unstarted[tenant]

    def _put(self, request: OpenRequest, replica: str | None) -> None:
        self._leave(request)
        self._at.setdefault(replica, {})[request.id] = request
        request.replica = replica
        request.is_taken = request.is_started = False
        if replica is not None:
            self._placements.placed(request, replica)

    def _leave(self, request: OpenRequest) -> None:
        del self._at[request.replica][request.id]
        if request.replica is not None:
            self._placements.left(request, request.replica)
