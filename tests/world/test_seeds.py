"""Lives drawn from seeds: the engine passes them, and faults that are planted in it are found."""

from dataclasses import replace

import pytest

from chorus.core import engine
from chorus.core.requests.record import from_record
from chorus.core.scheduling.request_memory import RequestMemory
from chorus.core.scheduling.scheduler import Scheduler
from chorus.memory.adapters.store import AdapterStore
from chorus.memory.pages.prefix import PrefixCache

from .checked_executor import CheckedTransfer
from .checked_swaps import SwapCopy
from .seeds import live


def test_the_engine_keeps_its_promises():
    assert [(seed, cause) for seed, cause, _ in map(live, range(50)) if cause is not None] == []


def test_a_seed_gives_the_same_life():
    assert live(7) == live(7)


def blind_prefixes(monkeypatch):
    """Cached KV of one adapter version is taken for another's."""
    match, insert = PrefixCache.match, PrefixCache.insert
    monkeypatch.setattr(PrefixCache, "match", lambda self, version, *rest: match(self, 0, *rest))
    monkeypatch.setattr(PrefixCache, "insert", lambda self, version, *rest: insert(self, 0, *rest))


def hasty_release(monkeypatch):
    """Pages of a cancelled load are free while a copy still writes to them."""
    monkeypatch.setattr(CheckedTransfer, "is_quiet", lambda self: True)


def hasty_swaps(monkeypatch):
    """Pages are free while a copy of a preempted request's KV still reads or writes them."""
    monkeypatch.setattr(SwapCopy, "is_quiet", lambda self: True)


def lost_swaps(monkeypatch):
    """A copy that failed is taken for one that is done."""
    monkeypatch.setattr(SwapCopy, "has_failed", lambda self: False)


def lasting_pins(monkeypatch):
    """The pages that a running request holds of its adapter are never given back."""
    monkeypatch.setattr(AdapterStore, "release", lambda self, adapter: None)


def stale_versions(monkeypatch):
    """Blocks of a version that is gone stay known, and their pages are lost when it comes to the end."""
    monkeypatch.setattr(PrefixCache, "_forget", lambda self, block: None)


def shared_cache(monkeypatch):
    """A tenant starts from what another has asked."""
    monkeypatch.setattr(RequestMemory, "scope", lambda self, request: ("", ""))


def scores_of_what_is_left(monkeypatch):
    """A prompt of which the beginning is cached gets log-probabilities of the rest only."""
    match = RequestMemory.match

    def as_if_unscored(self, request):
        params, request.params = request.params, replace(request.params, prompt_logprobs=None)
        try:
            return match(self, request)
        finally:
            request.params = params

    monkeypatch.setattr(RequestMemory, "match", as_if_unscored)


def forgetful_moves(monkeypatch):
    """A request that comes from another engine has lost what it had drawn."""

    def forget(record, now):
        return from_record({**record, "tokens": record["tokens"][: record["num_prompt_tokens"]]}, now)

    monkeypatch.setattr(engine, "from_record", forget)


def rows_of_the_gone(monkeypatch):
    """The token that a step ahead has drawn for an aborted request goes to one that came by its name."""
    update = Scheduler.update
    monkeypatch.setattr(
        Scheduler, "update", lambda self, plan, result: update(self, replace(plan, sources=None), result)
    )


def rows_left_ahead(monkeypatch):
    """The rows of a step that is not to happen stay where it would have them."""
    monkeypatch.setattr(Scheduler, "take_back", lambda self, plan: None)


FAULTS = [
    blind_prefixes,
    hasty_release,
    hasty_swaps,
    lost_swaps,
    lasting_pins,
    stale_versions,
    shared_cache,
    scores_of_what_is_left,
]


#: Lives that pass in spite of a fault which few of them show, so that others are tried first.
SPARED = {hasty_swaps: 450}


@pytest.mark.parametrize("plant", [*FAULTS, forgetful_moves, rows_of_the_gone, rows_left_ahead])
def test_a_planted_fault_is_found(plant, monkeypatch):
    plant(monkeypatch)
    first = SPARED.get(plant, 0)
    assert any(cause is not None for _, cause, _ in map(live, range(first, first + 600)))
