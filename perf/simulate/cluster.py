"""Many replicas under one router: events in order of virtual time, in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from ..workload.request import TraceRequest
from .records import Records
from .replica import Replica

#: Which replica a request goes to, by its index. Replicas are as they are at the request's arrival.
Route = Callable[[TraceRequest, Sequence[Replica]], int]


def first(request: TraceRequest, replicas: Sequence[Replica]) -> int:
    """The only replica."""
    return 0


def least_loaded(request: TraceRequest, replicas: Sequence[Replica]) -> int:
    """The replica with the fewest requests, waiting and running."""
    return min(range(len(replicas)), key=lambda index: replicas[index].num_requests)


def simulate(
    requests: Iterable[TraceRequest],
    replicas: Sequence[Replica],
    route: Route = first,
    prompt: Callable[[TraceRequest], list[int]] | None = None,
) -> Records:
    """Serve `requests`, which come in order of arrival, to the end of the last answer.

    prompt: makes a request's token ids, for replicas with a prefix cache. Raises ValueError for an arrival that is
    earlier than the one before it.
    """
    records = Records()
    done = records.add
    events: list[tuple[float, int]] = []  # (wake, replica); stale unless it is the replica's wake now

    def run_until(time: float) -> None:
        while events and events[0][0] < time:
            wake, index = heappop(events)
            replica = replicas[index]
            if replica.wake != wake:
                continue
            replica.advance(done)
            if replica.wake < math.inf:
                heappush(events, (replica.wake, index))

    now = -math.inf
    for request in requests:
        if request.arrival < now:
            raise ValueError(
                f"request {request.id} arrives at {request.arrival:g} s, after one at {now:g} s; sort them"
            )
        now = request.arrival
        run_until(now)
        index = route(request, replicas)
        replica = replicas[index]
        before = replica.wake
        replica.give(request, None if prompt is None else prompt(request))
        if replica.wake != before:
            heappush(events, (replica.wake, index))
    run_until(math.inf)
    records.num_failed = sum(replica.num_failed for replica in replicas)
    return records
