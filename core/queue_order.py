"""In which order waiting requests are considered for admission (papers/004: resident first, bounded)."""

from __future__ import annotations

from collections.abc import Iterable

from ..memory.adapter_store import AdapterStore, Tier
from .request import Request

_CLASS = {Tier.DEVICE: 0, Tier.HOST: 1, Tier.LOADING: 1, Tier.DISK: 2}


def queue_order(waiting: Iterable[Request], store: AdapterStore, overdue_before: float) -> list[Request]:
    """Requests whose adapter is resident (or that need none), then those on their way, then the cold ones.

    First come first served within each class. What came before `overdue_before` has been overtaken long enough: it goes
    first, in the order of arrival. waiting: in order of arrival.
    """
    classes: tuple[list[Request], ...] = ([], [], [], [])
    for request in waiting:
        if request.arrival_time < overdue_before:
            classes[0].append(request)
        elif request.adapter is None or request.adapter.pages:
            classes[1].append(request)
        else:
            classes[1 + _CLASS[store.tier(request.adapter)]].append(request)
    return [request for group in classes for request in group]
