"""Turns of adapters in the batch, if more adapters have running sequences than a step may have.

Tests: tests/core/scheduling/test_adapter_turns.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice

from ...memory.adapters.adapter import Adapter
from ..config import EngineConfig
from ..requests.request import Request
from .queues import Running, WaitingQueue

LONGEST_ROUND = 1.0
"""Seconds at most in which all adapters that are overdue at once have a turn of equal length. Chosen."""

_MOST_WAITING = 64
"""Number of first waiting requests searched for one that waits for an index. Chosen."""

_MOST_REMEMBERED = 4096
"""Adapters whose last step is remembered. Beyond that, those that could be overdue are forgotten. Chosen."""

Order = Callable[[Sequence[Request]], list[Request]]
"""Sorts requests by the order in which they keep their slots (`Service.order`)."""


class AdapterTurns:
    """Chooses the adapters of a step, at most `max_adapters_per_step`.

    Sequences of the other adapters are descheduled: they keep their KV. An adapter that has had no step for
    `max_overtake_seconds` takes the `lora_index` of another, even for a request that has yet to begin. The donor is the
    adapter whose sequences come last in the order of slots. Each adapter keeps its index for an equal part of a round,
    and for at least one step. A round takes at most `LONGEST_ROUND`. Hence an adapter waits for at most
    `max_overtake_seconds` and a round. A free index goes to the adapter that has waited longest.
    """

    def __init__(self, limits: EngineConfig, running: Running, waiting: WaitingQueue) -> None:
        """running, waiting: the queues; the scheduler changes them."""
        self._running = running
        self._waiting = waiting
        self.most = limits.max_adapters_per_step
        """None: no limit."""
        self._patience = limits.max_overtake_seconds
        self._round = min(self._patience, LONGEST_ROUND)
        self._ran: dict[Adapter, float] = {}  # when each one's last step ended, the latest last
        self._last: dict[Adapter, float] = {}  # adapters of the last step, and since when each has been in every step
        self._denied: Adapter | None = None  # had no turn because an index was left to a waiting request

    def note_step(self, adapters: Collection[Adapter], now: float) -> None:
        """Record the adapters of a step that has ended. Needed only if there is a limit."""
        if self._denied in adapters:
            self._denied = None
        self._last = {adapter: self._last.get(adapter, now) for adapter in adapters}
        for adapter in adapters:
            self._ran.pop(adapter, None)
            self._ran[adapter] = now
        if len(self._ran) > _MOST_REMEMBERED:
            self._ran = {each: then for each, then in self._ran.items() if then > now - self._patience}

    def is_overdue(self, adapter: Adapter, arrival: float, now: float) -> bool:
        """True if an adapter without an index has waited long enough to take another's.

        arrival: of its first request.
        """
        return self._since(adapter, arrival) < now - self._patience

    def note_taken(self) -> None:
        """Record that a waiting request has taken an index."""
        self._denied = None

    def share(self, requests: list[Request], order: Order, now: float) -> list[Request]:
        """Return the running requests of the adapters that are in the next step, and of the base model."""
        arrivals: dict[Adapter, float] = {}
        for request in requests:
            if (adapter := request.adapter) is not None:
                arrivals[adapter] = min(request.arrival_time, arrivals.get(adapter, math.inf))
        if self.most is None or len(arrivals) <= self.most:
            return requests
        since = {adapter: self._since(adapter, arrival) for adapter, arrival in arrivals.items()}
        chosen = self._choose(since, self.most, partial(self.donors, requests, order, now), now)
        return [request for request in requests if request.adapter is None or request.adapter in chosen]

    def _choose(
        self, since: Mapping[Adapter, float], most: int, donors: Callable[[], list[Adapter]], now: float
    ) -> set[Adapter]:
        """Return `most` of the adapters. since: when each had a step last."""
        chosen = {adapter for adapter in since if adapter in self._last}
        others = sorted(since.keys() - chosen, key=lambda each: (since[each], each.name, each.version))
        num_free = max(0, most - len(chosen))
        recipients: list[Adapter | None] = [each for each in others[num_free:] if since[each] < now - self._patience]
        if recipients and (may_give := donors()):
            self._leave_one(recipients, since, now)
            for donor, recipient in zip(may_give, recipients, strict=False):
                if recipient is not None:
                    chosen.remove(donor)
                    chosen.add(recipient)
        return chosen.union(others[:num_free])

    def _leave_one(self, recipients: list[Adapter | None], since: Mapping[Adapter, float], now: float) -> None:
        """Put None among the recipients of indices, longest wait first, at the rank of an overdue waiting request.

        If the request doesn't take the index, because it lacks pages or its adapter, no further index is left for one
        until the adapter that lost its turn has had one, even if its requests were preempted and wait again.
        """
        if self._denied in since or self._denied in self._waiting.by_adapter:
            return
        first = islice(self._waiting, _MOST_WAITING)
        waits = [self._since(each.adapter, each.arrival_time) for each in first if each.adapter not in (None, *since)]
        oldest = min(waits, default=math.inf)
        if oldest < now - self._patience:
            self._denied = recipients[0]
            recipients.insert(sum(each is not None and since[each] <= oldest for each in recipients), None)

    def donors(self, requests: Sequence[Request], order: Order, now: float) -> list[Adapter]:
        """Return the adapters of `requests` that may give their index, the last in the order of slots first."""
        num_adapters = len(self._running.by_adapter().keys() | self._waiting.by_adapter.keys())
        turn = self._round * min(1.0, (self.most or 1) / max(1, num_adapters))
        old = [adapter for adapter, since in self._last.items() if since <= now - turn]
        if not old:
            return []
        firsts = dict.fromkeys(request.adapter for request in order(requests))
        return [adapter for adapter in reversed(firsts) if adapter is not None and adapter in old]

    def _since(self, adapter: Adapter | None, arrival: float) -> float:
        """Return the time since which an adapter has had no step."""
        return arrival if adapter is None else max(arrival, self._ran.get(adapter, arrival))
