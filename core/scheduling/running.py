"""The requests that run, in order of admission, by adapter and by call."""

from __future__ import annotations

from collections.abc import Iterable

from ...memory.adapters.adapter import Adapter
from ..requests.request import Request
from ..requests.types import StepPlan

#: Requests by adapter, in the order in which each adapter and each request of it come first.
Groups = dict[Adapter | None, list[Request]]


def group_by_adapter(requests: Iterable[Request]) -> Groups:
    groups: Groups = {}
    for request in requests:
        groups.setdefault(request.adapter, []).append(request)
    return groups


class Running(list[Request]):
    """Running requests in order of admission; only `append` and `remove` change it, which also maintain the rest."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: Groups | None = {}
        self.calls: dict[str, dict[Request, None]] = {}
        """Those that belong to a call with others, by call; whoever deals out their turns may reorder both."""
        self.lone: dict[Request, None] = {}
        """The others."""
        self.plan: StepPlan | None = None
        """The last step's, if each of them decoded a token in it and they are still the same: their rows are reused."""

    @property
    def num_calls(self) -> int:
        return len(self.calls) + len(self.lone)

    def append(self, request: Request) -> None:
        list.append(self, request)
        self.plan = None
        if self._groups is not None:
            self._groups.setdefault(request.adapter, []).append(request)
        (self.calls.setdefault(request.call, {}) if request.call else self.lone)[request] = None

    def remove(self, request: Request) -> None:
        list.remove(self, request)
        self.plan = None
        members = self.calls[request.call] if request.call else self.lone
        del members[request]
        if request.call and not members:
            del self.calls[request.call]
        if self._groups is None:
            return
        group = self._groups[request.adapter]
        if len(group) == 1:
            del self._groups[request.adapter]
        elif group[0] is request:
            self._groups = None  # the order of the groups may change: they are rebuilt when asked for
        else:
            group.remove(request)

    def by_adapter(self) -> Groups:
        """Return the requests grouped by adapter; callers must not change it."""
        if self._groups is None:
            self._groups = group_by_adapter(self)
        return self._groups
