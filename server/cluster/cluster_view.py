"""What a front's metrics tell of its adapters, from the reports of its replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import itemgetter

from ...memory.adapters.adapter import Tier
from ...memory.files.error import AdapterFormatError, LoadFailure
from ..engine.engine_view import MAX_TIER_SERIES, AdapterView, EngineView
from ..engine.picture import AdapterRow, Phase, Picture, ReplicaRow
from . import totals
from .catalog import Catalog
from .ledger import OpenRequest
from .link import Link

_NEAREST = (Tier.DEVICE, Tier.LOADING, Tier.HOST, Tier.FAILED)


def tier_of(links: Sequence[Link], content_hash: str | None) -> str:
    """Tier of a content at the replica that has it nearest."""
    if content_hash is None:
        return Tier.DISK.value
    tiers = {link.report.tiers.get(content_hash) for link in links if link.report is not None}
    return next((tier.value for tier in _NEAREST if tier.value in tiers), Tier.DISK.value)


def is_pinned(links: Sequence[Link], content_hash: str | None) -> bool:
    """True if every replica that takes requests keeps a content resident."""
    up = [link for link in links if link.takes_requests]
    return bool(up) and all(content_hash in link.pinned and link.pinned[content_hash] is None for link in up)


def pin_failure(links: Sequence[Link], content_hash: str) -> AdapterFormatError | None:
    """Why a replica does not keep a content resident that it was told to."""
    for link in links:
        if (found := link.failed.get(content_hash) or link.pinned.get(content_hash)) is not None:
            error = AdapterFormatError(f"replica {link.name}: {found[1]}")
            error.failure = LoadFailure(found[0])
            return error
    return None


def overflowing(links: Sequence[Link]) -> set[str]:
    """Contents with which no request has had finite logits on some replica."""
    return {one for link in links if link.report is not None for one in link.report.overflowing}


def view_of(links: Sequence[Link], catalog: Catalog) -> EngineView:
    """A snapshot, as of one engine."""
    reports = [link.report for link in links if link.report is not None]
    hellos = [link.hello for link in links if link.hello is not None]
    registered, nearest = catalog.registered(), _nearest_tiers(links)
    near = [
        (name, nearest[content], one) for name, one in registered if (content := one.manifest.content_hash) in nearest
    ]
    near.sort(key=itemgetter(0))
    counts = Counter(tier for _, tier, _ in near)
    counts[Tier.DISK] += len(registered) - len(near)
    return EngineView(
        registered=registered,
        adapters=[
            AdapterView(
                name, tier, one.manifest.rank, one.pinned and is_pinned(links, one.manifest.content_hash), None, None
            )
            for name, tier, one in near[:MAX_TIER_SERIES]
        ],
        tier_counts={tier.value: counts[tier] for tier in Tier},
        running=sorted({name for report in reports for name in report.running}),
        waiting=sorted({name for report in reports for name in report.waiting}),
        max_adapters=sum(hello.max_adapters for hello in hellos),
        block_tokens=hellos[0].block_tokens if hellos else 0,
        num_quarantined=len(catalog.quarantine),
        accounts=totals.accounts(links),
    )


def _nearest_tiers(links: Sequence[Link]) -> dict[str, Tier]:
    """Of each content the tier that is nearest to steps, on any replica."""
    nearest: dict[str, Tier] = {}
    for tiers in (link.report.tiers for link in links if link.report is not None):
        for content, text in tiers.items():
            tier, known = Tier(text), nearest.get(content, Tier.FAILED)
            if tier in _NEAREST and _NEAREST.index(tier) <= _NEAREST.index(known):
                nearest[content] = tier
    return nearest


def picture_of(links: Sequence[Link], catalog: Catalog, requests: Iterable[OpenRequest]) -> Picture:
    """A snapshot for the operator's page, without pages: which is whose is known to the replicas alone.

    requests: open ones. A request counts as running from its first token on.
    """
    nearest = _nearest_tiers(links)
    registered = catalog.registered()

    def rows() -> list[AdapterRow]:
        return [
            (
                name,
                nearest.get(content := one.manifest.content_hash or "", Tier.DISK),
                one.manifest.rank,
                0,
                None,
                one.pinned and is_pinned(links, content),
            )
            for name, one in registered
        ]

    phases = Counter(
        (one.record["adapter"] or "", one.record["tenant"], Phase.RUNNING if one.num_output_tokens else Phase.WAITING)
        for one in requests
    )
    replicas = [
        ReplicaRow(link.name, "draining" if link.draining else "up" if link.is_up else "down", link.stats)
        for link in links
    ]
    return Picture(rows, phases, replicas=replicas)
