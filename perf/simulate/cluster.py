"""Many replicas with one router: events in order of virtual time, in one process."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from typing import Any

from ...server.cluster.router import AnswerLengths, MostIdle, Policy, Replicas, ReplicaState, Routed
from ..workload.fields import WorkloadError
from ..workload.request import TraceRequest
from .records import Records
from .replica import NOTHING, Left, Phase, Progress, Replica

#: Called with the time, and the replicas as they are then.
Watch = Callable[[float, Sequence[Replica]], None]

#: Makes replica number `index`, which begins to serve at a given time.
Make = Callable[[int, float], Replica]

least_loaded = MostIdle()


def first(request: Routed, replicas: Sequence[ReplicaState]) -> int | None:
    """The only replica."""
    return 0


class NoReplica(WorkloadError):
    """Requests that no replica will ever take."""


class Happened(StrEnum):
    """Events that a controller is called with."""

    ARRIVED = "arrived"  # a request arrived, and has not been routed yet
    ENDED = "ended"  # requests of a replica have ended
    CAME = "came"  # a replica serves from now on
    WENT = "went"  # a replica is gone for good
    TICK = "tick"  # a timer of the controller has fired


@dataclass(frozen=True, slots=True)
class Event:
    """time: seconds. replica: its index. request: that arrived."""

    kind: Happened
    time: float
    replica: int | None = None
    request: TraceRequest | None = None


#: Called with each event after it has happened; it may act on the cluster then.
Controller = Callable[[Event, "Cluster"], None]


def simulate(
    requests: Iterable[TraceRequest],
    replicas: Sequence[Replica],
    route: Policy = first,
    *,
    clients: int | None = None,
    watch: Watch | None = None,
    period: float = 1.0,
    **options: Any,
) -> Records:
    """Serve `requests`, which come in order of arrival, until the last completion ends.

    clients: so many clients send one request each after the previous one has ended, instead of the requests' own
    arrivals.

    route: requests that it leaves waiting are offered again, in order of arrival, when a request has ended. watch:
    called every `period` seconds while requests come. options: `Cluster`'s. Raises ValueError for an arrival that is
    earlier than the one before it.
    """
    source = iter(requests)
    cluster = Cluster(replicas, route, source if clients else None, **options)
    if clients:
        for request in itertools.islice(source, clients):
            cluster.offer(request._replace(arrival=0.0))
        return cluster.finish()
    now, next_look = -math.inf, period
    for request in source:
        if request.arrival < now:
            raise ValueError(
                f"request {request.id} arrives at {request.arrival:g} s, after one at {now:g} s; sort them"
            )
        now = request.arrival
        while watch is not None and next_look <= now:
            cluster.run_until(next_look)
            watch(next_look, cluster.replicas)
            next_look += period
        cluster.run_until(now)
        cluster.offer(request)
    return cluster.finish()


class Cluster:
    """Replicas, the requests that wait at their router, and all future events, in order of time.

    A controller acts on it through `boot`, `drain`, `migrate` and `tick`. Actions on a replica take effect when its
    current step ends.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        route: Policy,
        more: Iterator[TraceRequest] | None = None,
        *,
        staleness: float = 0.0,
        controller: Controller | None = None,
        make: Make | None = None,
        answers: AnswerLengths | None = None,
    ) -> None:
        """more: one of these is sent for each request that has ended. staleness: all replicas report every so many
        seconds, and the router knows only the last report, so its knowledge is up to so old; requests that it has sent
        since don't count, as if it were one of many routers. 0: it knows everything. make: makes replicas that boot.
        answers: gets the lengths of completions. Each replica has its own processors, and API server and client take no
        time.
        """
        self.now = 0.0
        self.replicas = list(replicas)
        self._route = route
        self._more = more
        self._controller = controller
        self._make = make
        self._answers = answers
        self._records = Records()
        self._heap: list[tuple[float, int]] = []  # (wake, replica); stale unless it is the replica's current wake
        self._timers: list[tuple[float, int, bool, Callable[[], None]]] = []  # time, order, whether it is a tick
        self._order = itertools.count()
        self._num_due = 0  # timers other than ticks
        self._held: deque[tuple[TraceRequest, Progress]] = deque()
        self._coming: deque[TraceRequest] = deque()  # from `more`, in order of arrival
        self._period = staleness
        self._next_report = 0.0 if staleness else math.inf
        self._serving: list[Replica] = []
        self._states = Replicas([])  # of these, as the router knows them
        self._note_serving()
        if controller is not None:
            for replica in self.replicas:
                self._tell(Happened.CAME, replica.index)

    # -- actions of a controller

    @property
    def serving(self) -> list[Replica]:
        """Replicas that take requests."""
        return list(self._serving)

    @property
    def num_held(self) -> int:
        """Requests that wait at the router."""
        return len(self._held)

    def tick(self, seconds: float) -> None:
        """Notify the controller after so many seconds, unless all requests have ended by then."""
        self._after(seconds, lambda: self._tell(Happened.TICK), is_tick=True)

    def boot(self, seconds: float) -> int:
        """Start another replica, which serves after so many seconds; returns its index. Raises ValueError without
        `make`.
        """
        if self._make is None:
            raise ValueError("replicas can't boot here; give the simulation `make`")
        index = len(self.replicas)
        replica = self._make(index, self.now + seconds)
        replica.phase = Phase.BOOTING
        self.replicas.append(replica)
        self._after(seconds, lambda: self._came(replica))
        return index

    def drain(self, index: int) -> None:
        """Let a replica finish its requests and take no more; then it is gone."""
        replica = self.replicas[index]
        if replica.phase is Phase.SERVING:
            replica.phase = Phase.DRAINING
            self._note_serving()
            self._check_gone(replica)

    def migrate(self, request_id: int, source: int, target: int) -> None:
        """Move a request to another replica, which recomputes its KV (Punica §5.3).

        The transfer takes the network's latency. The target prefills the prompt and the tokens so far: together this
        takes `CostModel.migrate_seconds`, if nothing else is to be done there.
        """
        replica = self.replicas[source]
        network = replica.executor.costs.network
        seconds = 0.0 if network is None else network.latency
        self._ask(replica, lambda: replica.take_out(str(request_id), target, seconds))

    # -- the loop

    def run_until(self, time: float) -> None:
        """Process the events before `time`."""
        heap, timers, coming, replicas = self._heap, self._timers, self._coming, self.replicas
        while True:
            wake = heap[0][0] if heap else math.inf
            due = timers[0][0] if timers else math.inf
            sent = coming[0].arrival if coming else math.inf
            now = min(wake, due, sent)
            if now >= time:
                return
            if now >= self._next_report:
                self._report(now)
                continue
            self.now = now
            if sent <= now:
                self.offer(coming.popleft())
            elif due <= now:
                if wake == sent == time == math.inf and not self._num_due:
                    return
                _, _, is_tick, action = heappop(timers)
                self._num_due -= not is_tick
                action()
            else:
                wake, index = heappop(heap)
                if replicas[index].wake == wake:
                    self._advance(replicas[index])

    def _advance(self, replica: Replica) -> None:
        """End a replica's step and begin the next; requests that it gave up, or made room for, continue."""
        replica.advance(self._records.add)
        if replica.wake < math.inf:
            heappush(self._heap, (replica.wake, replica.index))
        if self._answers is not None:
            for request in replica.ended:
                self._answers.end(request.adapter, request.output_tokens)
        if replica.left:
            self._pass_on(replica.left)
        if replica.ended and (self._more is not None or self._controller is not None or self._held):
            self._go_on(replica)
        if replica.phase is Phase.DRAINING:
            self._check_gone(replica)

    def offer(self, request: TraceRequest) -> None:
        """A request arrives; earlier requests go first."""
        self.now = request.arrival
        while self.now >= self._next_report:
            self._report(self.now)
        if self._controller is not None:
            self._tell(Happened.ARRIVED, request=request)
        self._offer(request, NOTHING)

    def finish(self) -> Records:
        """Serve all requests that have arrived. Raises NoReplica if the router leaves requests waiting forever."""
        self.run_until(math.inf)
        while self._held and self._period:  # everything has ended, which the router learns with the next report
            held = len(self._held)
            self._report(self._next_report)
            self.run_until(math.inf)
            if len(self._held) == held:
                break
        if self._held:
            raise NoReplica(f"the router left {len(self._held)} requests waiting while no replica had any")
        self._records.failures = [failure for replica in self.replicas for failure in replica.failures]
        return self._records

    def _report(self, now: float) -> None:
        """All replicas report their state at the last time that was due by `now`; nothing happened since."""
        due = math.floor(now / self._period) * self._period
        self.now = max(self.now, due)
        self._states = Replicas(replica.look(due).copy() for replica in self._serving)
        self._next_report = due + self._period
        if self._next_report <= now:  # `due` is rounded
            self._next_report = now + self._period
        self._place_held()

    def _note_serving(self) -> None:
        """Replicas came or went. The router's knowledge of the others stays."""
        known = dict(zip(map(id, self._serving), self._states, strict=True))
        self._serving = [replica for replica in self.replicas if replica.phase is Phase.SERVING]
        fresh = (lambda state: state.copy()) if self._period else (lambda state: state)
        self._states = Replicas(known.get(id(each)) or fresh(each.look(self.now)) for each in self._serving)

    def _came(self, replica: Replica) -> None:
        replica.phase = Phase.SERVING
        self._note_serving()
        self._tell(Happened.CAME, replica.index)
        self._place_held()

    def _check_gone(self, replica: Replica) -> None:
        if not replica.state.num_requests:
            replica.phase = Phase.GONE
            self._tell(Happened.WENT, replica.index)

    def _tell(self, kind: Happened, replica: int | None = None, request: TraceRequest | None = None) -> None:
        if self._controller is not None:
            self._controller(Event(kind, self.now, replica, request), self)

    def _after(self, seconds: float, action: Callable[[], None], *, is_tick: bool = False) -> None:
        self._num_due += not is_tick
        heappush(self._timers, (self.now + seconds, next(self._order), is_tick, action))

    def _ask(self, replica: Replica, action: Callable[[], object]) -> None:
        before = replica.wake
        replica.order(action, self.now)
        if replica.wake != before:
            heappush(self._heap, (replica.wake, replica.index))

    def _pass_on(self, left: Sequence[Left]) -> None:
        """Requests that a replica has given up continue elsewhere."""
        self._records.num_moved += len(left)
        for each in left:
            if each.to is None:
                self._offer(each.request, each.progress)
            else:
                self._after(each.seconds, lambda each=each: self._arrive(each))

    def _arrive(self, left: Left) -> None:
        """A migrated request arrives; if its target is gone, it is routed."""
        target = self.replicas[left.to or 0]
        if target.phase in (Phase.SERVING, Phase.DRAINING):
            self._give(target, left.request, left.progress)
        else:
            self._offer(left.request, left.progress)

    def _go_on(self, replica: Replica) -> None:
        if self._more is not None:
            now, sent = replica.clock.now, itertools.islice(self._more, len(replica.ended))
            self._coming.extend(request._replace(arrival=now) for request in sent)
        self._tell(Happened.ENDED, replica.index)
        self._place_held()

    def _place_held(self) -> None:
        while self._held and self._place(*self._held[0]):
            self._held.popleft()

    def _offer(self, request: TraceRequest, progress: Progress) -> None:
        if self._held or not self._place(request, progress):
            self._held.append((request, progress))

    def _place(self, request: TraceRequest, progress: Progress) -> bool:
        if not self._serving:
            return False
        if not self._period:
            now = self.now
            for replica in self._serving:
                replica.look(now)
        routed = request
        if progress.tokens:
            routed = request._replace(prompt_tokens=request.prompt_tokens + progress.tokens)
        index = self._route(routed, self._states)
        if index is None:
            return False
        self._give(self._serving[index], request, progress)
        return True

    def _give(self, replica: Replica, request: TraceRequest, progress: Progress) -> None:
        before = replica.wake
        replica.give(request, self.now, progress)
        if replica.wake != before:
            heappush(self._heap, (replica.wake, replica.index))
