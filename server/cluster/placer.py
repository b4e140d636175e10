"""The placer of an API server: chooses a replica for each request, or lets it wait.

A request waits while no replica may take it: none is connected, none has its adapter yet, none is of the kind that
sampled its tokens, or the policy defers it; later requests then wait, too. One with images also waits while its replica
has yet to read others'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...memory.files.error import LoadFailure
from .fleet import Fleet
from .in_flight_table import InFlightTable, OpenRequest
from .link import Link
from .router import FOLLOWS_PREFIXES, Policy, Replicas, runs_of


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request in the form that routing policies take; adapters are content hashes."""

    adapter: str | None
    prompt_tokens: int
    rank: int | None


class Placer:
    """Assigns waiting requests of an in-flight table to replicas of a fleet."""

    def __init__(
        self,
        in_flight: InFlightTable,
        fleet: Fleet,
        policy: Policy,
        fail: Callable[[OpenRequest, str, LoadFailure], None],
        clock: Callable[[], float],
    ) -> None:
        """fail: ends a request whose adapter no replica can load."""
        self._in_flight = in_flight
        self._fleet = fleet
        self._policy = policy
        self._follows_prefixes = isinstance(policy, FOLLOWS_PREFIXES)
        self._fail = fail
        self._clock = clock
        self._last_of_group: dict[str, OpenRequest] = {}  # the last request placed of each group of choices
        self._is_held = False  # the policy has deferred a request; later requests wait for it

    def place_waiting(self) -> None:
        self._is_held = False
        for request in self._in_flight.waiting():
            self.place(request)

    def place(self, request: OpenRequest, target: Link | None = None) -> None:
        """Give a waiting request to a replica, if one may take it: to `target`, or to the policy's choice."""
        content = request.content_hash
        links, replicas = self._fleet.candidates(request)
        if not links:
            if request.stuck_since is None:
                request.stuck_since = self._clock()
            if (failure := self._fleet.take_failure(content)) is not None:
                self._fail(request, failure.text, failure.failure)
            return
        request.stuck_since = None
        runs = runs_of(request.record) if self._follows_prefixes else []
        if target is None or target not in links:
            if self._is_held:  # first come, first served
                return
            wanted = RoutedRequest(content, len(request.record["tokens"]), request.rank)
            index = self._choose(wanted, request, replicas, runs)
            if index is None:
                self._is_held = True
                return
            target = links[index]
        if request.record.get("media") and target.is_behind:  # the next report places it
            return
        self._fleet.prefixes.note(target.name, runs)
        attempt = self._in_flight.place(request, target.name, target.identity)
        request.record["age"] = self._clock() - request.arrival
        request.record["num_paid_tokens"] = len(request.record["tokens"]) - 1 if request.num_output_tokens else 0
        target.send("submit", request.record, attempt)

    def _choose(self, wanted: RoutedRequest, request: OpenRequest, replicas: Replicas, runs: list[bytes]) -> int | None:
        """The index of the policy's choice, among replicas that have the prompt's beginning if there are any.

        Choices of one API request share a prompt, so a further one goes to the replica of the previous one while that
        has room. A request that finds no room even on an empty replica never will: it is sent there, and the replica
        reports the reason.
        """
        group = request.record["choice_group"]
        before = self._last_of_group.get(group)
        index = None if before is None or before.replica is None else replicas.find(before.replica)
        if index is None or not replicas[index].has_room(wanted):
            index = self._fleet.prefixes.choose(self._policy, wanted, runs, replicas)
        if index is None:
            index = next((i for i, replica in enumerate(replicas) if not replica.num_requests), None)
        if group and index is not None:
            self._last_of_group[group] = request
        return index

    def forget(self, request: OpenRequest) -> None:
        """A request has ended."""
        group = request.record["choice_group"]
        if self._last_of_group.get(group) is request:
            del self._last_of_group[group]
