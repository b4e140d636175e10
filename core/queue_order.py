"""In which order waiting requests are considered for admission (papers/004: resident first, bounded)."""

from __future__ import annotations

from collections.abc import Iterable

from ..memory.adapter_store import AdapterStore
from .request import Request


def queue_order(waiting: Iterable[Request], store: AdapterStore, overdue_before: float) -> list[Request]:
    """Requests whose adapter is resident (or that need none), then those whose adapter is on its way.

    First come first served within each class. The cold ones, whose adapter is on disk only, can't run and are left out.
    But what came before `overdue_before` has been overtaken long enough: it goes first, whatever its adapter, in the
    order of arrival. waiting: in order of arrival.
    """
    overdue, resident, coming = [], [], []
    for request in waiting:
        if request.arrival_time < overdue_before:
            overdue.append(request)
        elif request.adapter is None or request.adapter.pages:
            resident.append(request)
        elif store.is_requested(request.adapter):
            coming.append(request)
    return overdue + resident + coming
