"""Slots that one tenant gives to another when every slot of a step is taken."""

from __future__ import annotations

from collections.abc import Mapping, Set

from .service import Service


class SlotLending:
    """Chooses the donor of a slot, and the tenants that may get one.

    The donor is the tenant with the highest served cost among the tenants with two or more sequences; its newest
    decoding sequence is descheduled. A recipient has no sequence, or a lower served cost than the donor. A tenant with
    a descheduled request gets no slot: that request comes first.
    """

    __slots__ = ("_costs", "_counts", "_donor", "_max_num_seqs", "_num_given", "_num_new", "_running", "_service")

    def __init__(
        self, max_num_seqs: int, service: Service, running: Mapping[str, int], counts: Mapping[str, int]
    ) -> None:
        """running: number of running requests by tenant; the caller changes it. counts: number of sequences of the
        step by tenant, before requests are admitted.
        """
        self._max_num_seqs = max_num_seqs
        self._service = service
        self._running = running
        self._counts = dict(counts)
        self._num_new: dict[str, int] = {}  # of `_counts`: of requests that were just admitted
        self._num_given: dict[str, int] = {}  # sequences that gave their slots to admitted requests
        self._costs: dict[str, float] = {}  # served costs, as of this step
        self._donor: tuple[str | None] | None = None  # None: unknown

    def has_donor_for(self, tenant: str) -> bool:
        """True if a tenant may begin a request although every slot is taken: another one can give it a slot."""
        own, donor = self._counts.get(tenant, 0), self._find_donor()
        if donor is None or own < self._running.get(tenant, 0):  # some of its own are descheduled
            return False
        if not own:
            return len(self._running) < self._max_num_seqs  # each tenant keeps a slot
        return self._served_cost(tenant) < self._served_cost(donor)

    def has_donor_for_any(self, tenants: Set[str]) -> bool:
        """True if one of the tenants may begin a request although every slot is taken."""
        if self._find_donor() is None:
            return False
        if len(self._running) < self._max_num_seqs and not tenants <= self._running.keys():
            return True
        return len(self._running) > 1 and any(map(self.has_donor_for, self._running.keys() & tenants))

    def admit(self, tenant: str, count: int) -> None:
        """Count a request that has begun with `count` tokens; beyond the slots, the donor gives it one."""
        if not count:  # it is in no step yet
            self.change(tenant, 0)
            return
        self._num_new[tenant] = self._num_new.get(tenant, 0) + 1
        self.change(tenant, 1)
        if sum(self._counts.values()) > self._max_num_seqs and (donor := self._find_donor()) is not None:
            self._num_given[donor] = self._num_given.get(donor, 0) + 1
            self.change(donor, -1)

    def drop(self, tenant: str) -> None:
        """Count a sequence that is not in the step after all: first one that gave its slot already."""
        if given := self._num_given.get(tenant, 0):
            self._num_given[tenant] = given - 1
            self.change(tenant, 0)
        else:
            self.change(tenant, -1)

    def retract(self, tenant: str) -> None:
        """Undo `admit` for a request with tokens, whose sequence is descheduled in the same step."""
        self._num_new[tenant] -= 1

    def change(self, tenant: str, by: int) -> None:
        """Change a tenant's number of sequences; its served cost may have changed, too."""
        self._counts[tenant] = self._counts.get(tenant, 0) + by
        self._costs.pop(tenant, None)
        self._donor = None

    def _served_cost(self, tenant: str) -> float:
        cost = self._costs.get(tenant)
        if cost is None:
            cost = self._costs[tenant] = self._service.served_cost(tenant)
        return cost

    def _find_donor(self) -> str | None:
        """Return the tenant that gives a slot to the next admitted request; None if no tenant has one to give."""
        if self._donor is None:
            counts, new = self._counts, self._num_new
            donors = [tenant for tenant, own in counts.items() if own > 1 and own > new.get(tenant, 0)]
            self._donor = (max(donors, key=lambda each: (self._served_cost(each), counts[each]), default=None),)
        return self._donor[0]
