"""Many replicas under one router: events in order of virtual time, in one process."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush

from ...server.cluster.router import MostIdle, Policy, ReplicaState, Routed
from ..workload.request import TraceRequest
from .records import Records
from .replica import Replica

#: Told the time, and the replicas as they are then.
Watch = Callable[[float, Sequence[Replica]], None]

Prompt = Callable[[TraceRequest], list[int]]

least_loaded = MostIdle()


def first(request: Routed, replicas: Sequence[ReplicaState]) -> int | None:
    """The only replica."""
    return 0


def simulate(
    requests: Iterable[TraceRequest],
    replicas: Sequence[Replica],
    route: Policy = first,
    prompt: Prompt | None = None,
    *,
    watch: Watch | None = None,
    period: float = 1.0,
) -> Records:
    """Serve `requests`, which come in order of arrival, to the end of the last answer.

    route: what it leaves waiting is offered again, in order of arrival, when a request has ended. prompt: makes a
    request's token ids, for replicas with a prefix cache. watch: called every `period` seconds while requests come.
    Raises ValueError for an arrival that is earlier than the one before it.
    """
    events = _Events(replicas, route, prompt)
    now, next_look = -math.inf, period
    for request in requests:
        if request.arrival < now:
            raise ValueError(
                f"request {request.id} arrives at {request.arrival:g} s, after one at {now:g} s; sort them"
            )
        now = request.arrival
        while watch is not None and next_look <= now:
            events.run_until(next_look)
            watch(next_look, replicas)
            next_look += period
        events.run_until(now)
        events.offer(request)
    return events.finish()


def simulate_clients(
    requests: Iterable[TraceRequest],
    clients: int,
    replicas: Sequence[Replica],
    route: Policy = first,
    prompt: Prompt | None = None,
    *,
    think: float = 0.0,
    turns: float = 1.0,
    seed: int = 0,
) -> Records:
    """Serve `requests` to `clients` that each send one `think` seconds after the one before is answered.

    The requests' arrivals are ignored; that of each becomes the time at which it is sent. turns: how many requests in a
    row a client sends for one adapter, on average: after each it goes on with the adapter, or else takes the next
    request's own, by a draw from `seed`.
    """
    source = iter(requests)
    events = _Events(replicas, route, prompt, _Clients(source, think, turns, seed))
    for request in itertools.islice(source, clients):
        events.offer(request._replace(arrival=0.0))
    return events.finish()


class _Clients:
    """Clients of a closed loop: each sends its next request after an answer."""

    def __init__(self, requests: Iterator[TraceRequest], think: float, turns: float, seed: int) -> None:
        self._requests = requests
        self._think = think
        self._stay = 1 - 1 / turns
        self._random = random.Random(seed)

    def answered(self, now: float, ended: Sequence[tuple[str | None, int]]) -> Iterator[TraceRequest]:
        """The next requests of the clients whose last ones, for these adapters of these ranks, have ended."""
        sent = now + self._think
        for request, (adapter, rank) in zip(list(itertools.islice(self._requests, len(ended))), ended, strict=False):
            if self._stay and self._random.random() < self._stay:
                request = request._replace(adapter=adapter, rank=rank)
            yield request._replace(arrival=sent)


class _Events:
    """Replicas' wakes in order of time, and the requests that wait at the router."""

    def __init__(
        self, replicas: Sequence[Replica], route: Policy, prompt: Prompt | None, clients: _Clients | None = None
    ) -> None:
        """clients: that send more when requests have ended."""
        self._replicas = replicas
        self._states = [replica.state for replica in replicas]
        self._route = route
        self._prompt = prompt
        self._clients = clients
        self._records = Records()
        self._heap: list[tuple[float, int]] = []  # (wake, replica); stale unless it is the replica's wake now
        self._held: deque[TraceRequest] = deque()
        self._coming: deque[TraceRequest] = deque()  # from clients, in order of arrival

    def run_until(self, time: float) -> None:
        """Let happen what happens before `time`."""
        heap, replicas, coming = self._heap, self._replicas, self._coming
        done, waits = self._records.add, self._clients is not None
        while (heap and heap[0][0] < time) or coming:
            if coming and (not heap or coming[0].arrival <= heap[0][0]):
                self.offer(coming.popleft())
                continue
            wake, index = heappop(heap)
            replica = replicas[index]
            if replica.wake != wake:
                continue
            replica.advance(done)
            if replica.wake < math.inf:
                heappush(heap, (replica.wake, index))
            if (waits or self._held) and replica.ended:
                self._go_on(replica)

    def offer(self, request: TraceRequest) -> None:
        """A request comes; who came before it goes first."""
        if self._held or not self._place(request, request.arrival):
            self._held.append(request)

    def finish(self) -> Records:
        """Serve all that has come. Raises RuntimeError where the router leaves requests waiting for ever."""
        self.run_until(math.inf)
        if self._held:
            raise RuntimeError(f"the router left {len(self._held)} requests waiting while no replica had any")
        self._records.num_failed = sum(replica.num_failed for replica in self._replicas)
        return self._records

    def _go_on(self, replica: Replica) -> None:
        now = replica.clock.now
        if self._clients is not None:
            self._coming.extend(self._clients.answered(now, replica.ended))
        while self._held and self._place(self._held[0], now):
            self._held.popleft()

    def _place(self, request: TraceRequest, now: float) -> bool:
        index = self._route(request, self._states)
        if index is None:
            return False
        replica = self._replicas[index]
        before = replica.wake
        replica.give(request, None if self._prompt is None else self._prompt(request), now)
        if replica.wake != before:
            heappush(self._heap, (replica.wake, index))
        return True
