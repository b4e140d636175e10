"""A simulated cluster's machine: its processors, and its processes beside the replicas: the front, and the client."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...core.costs.profile import Number, Profile, Terms
from ..workload.request import TraceRequest
from .machine import Machine, Process, Then
from .records import Served


@dataclass(frozen=True, slots=True)
class HostWork:
    """Seconds of a processor that a process needs, for a request, a token of its prompt, a step of a replica, a row of
    the step, and a second of rest before (`machine.Process`).
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


class Host:
    """Has client and front do their part in each request, and replicas, front and client share a machine's processors.

    latency: seconds that each request waits for beside that, such as for timers and sockets. replica_per_rest: of a
    replica's process.
    """

    def __init__(
        self, machine: Machine, front: HostWork | None = None, client: HostWork | None = None, latency: float = 0.0,
        replica_per_rest: float = 0.0,
    ) -> None:  # fmt: skip
        self.machine = machine
        self._latency = latency
        self._replica_per_rest = replica_per_rest
        works = front or HostWork(), client or HostWork()
        self._front, self._client = (_Worker(Process(machine, work.per_rest), work) for work in works)
        self._firsts: dict[int, float] = {}  # when the client had the first token of each request

    def replica(self) -> Process:
        """A replica's process."""
        return Process(self.machine, self._replica_per_rest)

    def send(self, request: TraceRequest, now: float, come: Then) -> None:
        """Have a request go through client and front; come: called when it can be routed."""
        client, front, tokens = self._client, self._front, request.prompt_tokens

        def sent(at: float) -> None:
            front.process.do(at, front.work.of_prompt(tokens), come)

        client.process.do(now, client.work.of_prompt(tokens), sent)

    def deliver(
        self, now: float, rows: int, began: Sequence[TraceRequest], ended: Sequence[tuple[int, Served]],
        done: Callable[[Served], None],
    ) -> None:  # fmt: skip
        """Have a step's tokens go through front and client.

        began: requests that have their first token among them. ended: requests that end, by id. done: called with
        these, as the client sees them.
        """
        client, front, firsts = self._client, self._front, self._firsts

        def seen(at: float) -> None:
            firsts.update((request.id, at + self._latency) for request in began)
            for request_id, served in ended:
                ttft, e2e = firsts.pop(request_id) - served.arrival, at + self._latency - served.arrival
                done(served._replace(ttft=ttft, e2e=e2e))

        def passed_on(at: float) -> None:
            client.process.do(at, client.work.of_step(rows), seen)

        front.process.do(now, front.work.of_step(rows), passed_on)


@dataclass(frozen=True, slots=True)
class _Worker:
    process: Process
    work: HostWork


_NO_WORK = HostWork()


@dataclass(frozen=True, slots=True)
class Works:
    """Processor seconds of a cluster's processes: of a replica, beside the steps that a profile has.

    latency: `Host`'s. processors: of the machine.
    """

    client: HostWork = _NO_WORK
    front: HostWork = _NO_WORK
    replica: HostWork = _NO_WORK
    latency: float = 0.0
    processors: float = math.inf

    def host(self, speed: float = 1.0) -> Host:
        """speed: of the machine's processors."""
        machine = Machine(self.processors, speed)
        return Host(machine, self.front, self.client, self.latency, self.replica.per_rest)

    def slower(self, profile: Profile) -> Profile:
        """Return the profile of an engine whose steps take as long as with the replica's work."""
        own = {} if profile.overhead is None else profile.overhead.terms
        work = self.replica
        added = {"base": work.per_step, "per_row": work.per_row, "per_prompt": work.per_prompt}
        terms = {
            name: Number(value=seconds + (own[name].value if name in own else 0.0), source="engine and replica")
            for name, seconds in added.items()
        }
        return profile.model_copy(update={"overhead": Terms(terms={**own, **terms})})
