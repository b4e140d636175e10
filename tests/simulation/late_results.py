"""Steps that are launched before the tokens of the last one are read, over an executor that computes at once."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from chorus.core.requests.types import PENDING, ScheduledSequence, StepPlan, StepResult

from .asked import Violation


@dataclass(eq=False)
class Launched:
    """A step. It has been computed, as a device with one stream may have by any time, but says so when it is asked."""

    _owner: LateResults
    number: int
    requests: list[str]  # of its rows
    outcome: StepResult | Exception
    unseen: list[
        tuple[ScheduledSequence, list[int]]
    ]  # rows to be sampled after tokens that the host has to have by then
    before: Launched | None  # the step under way when it was launched
    was_read: bool = False
    was_drawn: bool = False

    def sample(self) -> None:
        owner = self._owner
        owner.promise(not self.was_drawn, "a step is drawn twice")
        owner.promise(self.before is not None and self.before.was_read, "a step is drawn before the last one is read")
        for row, token_ids in self.unseen:
            stale = row.tokens is PENDING  # its request was aborted or sent back
            owner.promise(stale or row.token_ids == token_ids, "a token is drawn before the host has the last one")
        owner.num_drawn_later += bool(self.unseen)
        self.was_drawn = True

    def result(self) -> StepResult:
        owner = self._owner
        owner.promise(not self.was_read, "a step is read twice")
        owner.promise(self.was_drawn or not self.unseen, "a step is read before it is drawn")
        owner.promise(owner.num_launched <= self.number + 1, "a step is read after more than the next was launched")
        self.was_read = True
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def late_results(executor: Any, rng: random.Random) -> Any:
    """Return the executor, every other time a step ahead."""
    return LateResults(executor, fails_at_once=rng.random() < 0.5) if rng.random() < 0.5 else executor


class LateResults:
    """Another executor, a step ahead. Raises Violation, kept in `violations`, where its caller breaks the rules of
    `Executor.start`.

    fails_at_once: steps that fail do so when they are launched, not when they are read.
    """

    def __init__(self, inner: Any, *, fails_at_once: bool = False) -> None:
        self.violations: list[Violation] = getattr(inner, "violations", [])
        self.num_launched = 0
        self.num_ahead = 0
        self.num_drawn_later = 0
        self._inner = inner
        self._fails_at_once = fails_at_once
        self._last: Launched | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, plan: StepPlan) -> StepResult:
        self.promise(plan.sources is None, "a step that is ahead is to be launched")
        self.num_launched += 1
        self._last = None
        return self._inner.execute(plan)

    def start(self, plan: StepPlan) -> Launched:
        before, last, unseen = self._last, None, []
        self.promise(before is None or before.was_drawn or not before.unseen, "a step is launched before one is drawn")
        if plan.sources is not None:
            rows, last, plan = plan.sequences, before, self._told(plan)
            unseen = [(row, told.token_ids) for row, told in zip(rows, plan.sequences, strict=True) if row.looks_back]
            self.num_ahead += 1
        outcome: StepResult | Exception = StepResult()
        if last is not None and isinstance(last.outcome, Exception):
            outcome = RuntimeError("a step behind one that failed was read")  # it can compute nothing of use
        else:
            try:
                outcome = self._inner.execute(plan)
            except Exception as error:
                if self._fails_at_once:
                    raise
                outcome = error
        self.num_launched += 1
        if before is not None:
            before.before = None
        requests = [row.request_id for row in plan.sequences]
        self._last = Launched(self, self.num_launched, requests, outcome, unseen, before)
        return self._last

    def promise(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.violations.append(Violation(otherwise))
            raise self.violations[-1]

    def _told(self, plan: StepPlan) -> StepPlan:
        """Return a plan with the tokens that the host does not know: any, where the last step drew none."""
        last, sources = self._last, plan.sources or ()
        self.promise(len(sources) == len(plan.sequences), "a step ahead without a source for each row")
        if last is None or last.was_read:
            self.promise(False, "no step is under way that this one could be ahead of")
            return plan
        drawn = last.outcome.tokens if isinstance(last.outcome, StepResult) else {}
        rows: list[ScheduledSequence] = []
        for row, place in zip(plan.sequences, sources, strict=True):
            self.promise((row.tokens is PENDING) == (place >= 0), "the host knows a token that it has not read")
            if place < 0:
                self.promise(-1 not in row.tokens, "a token that is not known is to be computed")
                rows.append(row)
                continue
            self.promise(last.requests[place] == row.request_id, "a row goes on from another's token")
            token = drawn.get(row.request_id, 0)
            rows.append(replace(row, tokens=[token], token_ids=[*row.token_ids, token]))
        return replace(plan, sequences=rows)
