"""Simulation tests in which some requests have heavy grammars, which steps leave out."""

from __future__ import annotations

import zlib
from collections import Counter

import pytest

from chorus.core.scheduling.scheduler import Scheduler
from chorus.core.scheduling.step_time import GrammarBudget

from . import checked_order
from .seeds import simulate

BY_DESIGN = ("one that is alone in its call sat out", "a tenant whose requests all sit out")
"""Promises that hold for requests without heavy grammars."""


@pytest.mark.slow
def test_runs_make_progress_whatever_steps_leave_out(monkeypatch):
    """Every other promise holds: each request ends once, with its own tokens, KV and pages."""
    update, choose, promise, seen = Scheduler.update, GrammarBudget.choose, checked_order.promise, Counter()

    def is_one_of(count, text):
        return not zlib.crc32(text.encode()) % count

    def slow(self, plan, result):
        names = [] if result.unready else [name for name in result.tokens if is_one_of(2, name)]
        result.grammar_seconds = {name: 0.02 * is_one_of(3, f"{name} {self.num_steps // 40}") for name in names}
        seen["steps"] += 1
        return update(self, plan, result)

    def counted(self, candidates):
        chosen = choose(self, candidates)
        seen["left out"] += chosen is not None
        return chosen

    monkeypatch.setattr(Scheduler, "update", slow)
    monkeypatch.setattr(GrammarBudget, "choose", counted)
    monkeypatch.setattr(
        checked_order, "promise", lambda holds, what, *more: what in BY_DESIGN or promise(holds, what, *more)
    )
    for seed in range(120):
        _, failure, *_ = simulate(seed)
        assert failure is None, f"seed {seed}: {failure}"
    assert seen["left out"] > 500 and seen["steps"] > 4 * seen["left out"], seen
