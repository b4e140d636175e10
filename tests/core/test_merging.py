"""Merging without a model: what its pauses are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from chorus.core.merging import Merging
from chorus.core.requests.types import CannotMerge


@pytest.mark.parametrize("has_room", [True, False])
def test_the_search_for_pages_is_a_pause(has_room):
    now, taken = [5.0], []

    def make_runs(sizes, wished):
        now[0] += 0.25
        return [range(1, 3)] if has_room else None

    reclaimer = SimpleNamespace(shadow=SimpleNamespace(take=taken.append), make_runs=make_runs)
    backend = SimpleNamespace(
        sizes=lambda adapter: [2], wished_runs=lambda adapter: None, begin=lambda adapter, runs: None
    )
    store = SimpleNamespace(hold=lambda adapter: None, let_go=lambda adapter: None)
    merging = Merging(backend, reclaimer, store, lambda: now[0])
    adapter = type("Resident", (), {"name": "a", "pages": (7,), "transfer": None})()
    if has_room:
        merging.merge(adapter)
        assert taken == [[range(1, 3)]]
    else:
        with pytest.raises(CannotMerge, match="no room"):
            merging.merge(adapter)
    assert merging.longest_pause == 0.25
