"""A simulated cluster's machine: its processors, shared by all processes, and the processes other than replicas: API
server and client.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ...core.costs.profile import Number, Profile, Terms
from ..workload.request import TraceRequest
from .records import Served

#: Called with the time at which a job has ended.
Then = Callable[[float], None]


LONGEST_REST = 0.1
"""Seconds of rest after which a process's next job gets no more expensive: caches hold nothing of it. Chosen."""


class Machine:
    """Advances each busy process at speed · min(1, processors / busy processes).

    So all busy processes advance equally, and a job ends once each of them has advanced by the job's work since it
    began. The order of ends is known when a job begins, though their times move with every job that comes or ends.
    """

    def __init__(self, processors: float = math.inf, speed: float = 1.0) -> None:
        """processors: as many as there are processes, unless given. speed: the part of a busy processor's time that a
        hypervisor leaves.
        """
        if not processors > 0:
            raise ValueError(f"a machine can't have {processors:g} processors; give more than 0")
        if not 0 < speed <= 1:
            raise ValueError(f"a processor can't have a speed of {speed:g}; give more than 0 and at most 1")
        self.processors, self.speed = processors, speed
        self._jobs: list[tuple[float, int, Then]] = []  # (advance at its end, order, then)
        self._order = itertools.count()
        self._advance, self._now = 0.0, -math.inf  # of each busy process, up to that time

    @property
    def next_end(self) -> float:
        """The time at which the next job ends, if none comes before."""
        return self._now + (self._jobs[0][0] - self._advance) / self._rate if self._jobs else math.inf

    def begin(self, now: float, work: float, then: Then) -> None:
        """Give an idle process a job, of `work` seconds on its own processor."""
        if self._jobs:
            self._advance += (now - self._now) * self._rate
        self._now = now
        heappush(self._jobs, (self._advance + work, next(self._order), then))

    def end_next(self) -> None:
        """End the next job, at its time."""
        self._now = self.next_end
        self._advance, _, then = heappop(self._jobs)
        then(self._now)

    @property
    def _rate(self) -> float:
        return self.speed * min(1.0, self.processors / len(self._jobs))


class Process:
    """Runs its jobs on a machine, one after another.

    per_rest: seconds that a job takes longer for each second that the process rested before, up to `LONGEST_REST`.
    """

    def __init__(self, machine: Machine, per_rest: float = 0.0) -> None:
        self._machine = machine
        self._per_rest = per_rest
        self._ended_at = -math.inf
        self._jobs: deque[tuple[float, Then]] = deque()  # the first is running

    def do(self, now: float, work: float, then: Then) -> None:
        """Take on a job of `work` seconds; then: called when it has been done."""
        if not self._jobs:
            work += self._per_rest * min(now - self._ended_at, LONGEST_REST)
        self._jobs.append((work, then))
        if len(self._jobs) == 1:
            self._machine.begin(now, work, self._ended)

    def _ended(self, now: float) -> None:
        _, then = self._jobs.popleft()
        self._ended_at = now
        if self._jobs:
            self._machine.begin(now, self._jobs[0][0], self._ended)
        then(now)


@dataclass(frozen=True, slots=True)
class HostWork:
    """CPU seconds that a process needs for a request, a token of its prompt, a step of a replica, a sequence of the
    step, and a second of rest before (`machine.Process`).
    """

    per_prompt: float = 0.0
    per_prompt_token: float = 0.0
    per_step: float = 0.0
    per_row: float = 0.0
    per_rest: float = 0.0

    def of_prompt(self, tokens: int) -> float:
        return self.per_prompt + self.per_prompt_token * tokens

    def of_step(self, rows: int) -> float:
        return self.per_step + self.per_row * rows


_NO_WORK = HostWork()


@dataclass(frozen=True, slots=True)
class Works:
    """CPU seconds of a cluster's processes; a replica's are in addition to the profile's steps."""

    client: HostWork = _NO_WORK
    api_server: HostWork = _NO_WORK
    replica: HostWork = _NO_WORK
    latency: float = 0.0
    """Seconds that each request waits in addition, such as for timers and sockets."""
    processors: float = math.inf
    """Speed and processors of the machine."""

    def slower(self, profile: Profile) -> Profile:
        """Return the profile of an engine whose steps include the replica's work."""
        own = {} if profile.overhead is None else profile.overhead.terms
        work = self.replica
        added = {"base": work.per_step, "per_row": work.per_row, "per_prompt": work.per_prompt}
        terms = {
            name: Number(value=seconds + (own[name].value if name in own else 0.0), source="engine and replica")
            for name, seconds in added.items()
        }
        return profile.model_copy(update={"overhead": Terms(terms={**own, **terms})})


_NO_WORKS = Works()


class Host:
    """Simulates client and API server for each request; they and the replicas share a machine's processors."""

    def __init__(self, works: Works = _NO_WORKS, speed: float = 1.0) -> None:
        """speed: of the machine's processors."""
        self.machine, self._works = Machine(works.processors, speed), works
        self._api_server, self._client = (
            Process(self.machine, work.per_rest) for work in (works.api_server, works.client)
        )
        self._firsts: dict[int, float] = {}  # when the client had the first token of each request

    def replica(self) -> Process:
        """A replica's process."""
        return Process(self.machine, self._works.replica.per_rest)

    def send(self, request: TraceRequest, now: float, come: Then) -> None:
        """Pass a request through client and API server; come: called when it can be routed."""
        works, tokens = self._works, request.prompt_tokens

        def sent(at: float) -> None:
            self._api_server.do(at, works.api_server.of_prompt(tokens), come)

        self._client.do(now, works.client.of_prompt(tokens), sent)

    def deliver(
        self,
        now: float,
        rows: int,
        began: Sequence[TraceRequest],
        ended: Sequence[tuple[int, Served]],
        done: Callable[[Served], None],
    ) -> None:
        """Pass a step's tokens through API server and client.

        began: requests whose first token is among them. ended: requests that end, by id. done: called with these, as
        the client sees them.
        """
        works, firsts = self._works, self._firsts

        def seen(at: float) -> None:
            firsts.update((request.id, at + works.latency) for request in began)
            for request_id, served in ended:
                ttft, e2e = firsts.pop(request_id) - served.arrival, at + works.latency - served.arrival
                done(served._replace(ttft=ttft, e2e=e2e))

        def passed_on(at: float) -> None:
            self._client.do(at, works.client.of_step(rows), seen)

        self._api_server.do(now, works.api_server.of_step(rows), passed_on)
