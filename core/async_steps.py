"""Async scheduling: while a device runs a step, the host plans and launches the next one.

Tests: tests/core/test_async_steps.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..memory.transfers.transfer import ExecutorLost
from .executors.base import Executor, StartedStep
from .requests.types import StepPlan, StepResult

logger = logging.getLogger(__name__)


class AsyncSteps:
    """Runs steps. Each is launched before the tokens of the step before it are read, if it can be planned by then.

    The device takes these tokens from its own memory and is never idle; the host reads them meanwhile. If a token ends
    a request, its sequence in the launched step is stale, and `Scheduler.update` discards it. A stale sequence may
    still write KV after its request's last token, and read the pages of the request and its adapter, after the request
    has freed them. This is safe: a device runs steps and copies in the order of their launches, hence before any write
    by the next owner of the pages. And no known block contains KV of a stale sequence: blocks become known only by
    tokens that have been read.
    """

    def __init__(
        self,
        start: Callable[[StepPlan], StartedStep],
        executor: Executor,
        plan_ahead: Callable[[StepPlan], StepPlan | None],
        rollback: Callable[[], None],
    ) -> None:
        """start: launches a step. executor: runs one to its end. plan_ahead: returns the plan after one that still
        runs, with its sequences advanced, or None. rollback: undoes that.
        """
        self._start = start
        self._executor = executor
        self._plan_ahead = plan_ahead
        self._rollback = rollback
        self._started: StartedStep | None = None  # of `plan`
        self._runs_alone = False  # the next step, which has failed
        self.plan: StepPlan | None = None
        """The plan of the step that the last `run` launched, to be passed to the next `run`; None if there is none."""
        self.num_async = 0
        """Steps launched before the step before them had ended."""

    def run(self, plan: StepPlan) -> StepResult | None:
        """Launch the next step, if `plan_ahead` plans it, and return the result of this one.

        None if this step failed: discard it and the next one, and plan it anew. Planning the next one may have changed
        its sequences, and taken the pages of its shadow weights. The next `run` launches nothing ahead, and raises the
        errors of `Executor.execute`.
        """
        if self._runs_alone:
            self._runs_alone = False
            return self._executor.execute(plan)
        started = self._started if plan is self.plan else None
        self.plan = self._started = None
        try:
            if started is None:
                started = self._start(plan)
            else:
                started.sample()
            self._launch_next(plan)
            return started.result()
        except ExecutorLost:
            raise
        except Exception:
            logger.exception("step %d failed; it is run again with none ahead of it", plan.step_id)
        if self.plan is not None:
            self._rollback()
            self.plan = self._started = None
        self._runs_alone = True
        return None

    def _launch_next(self, plan: StepPlan) -> None:
        following = self._plan_ahead(plan)
        if following is None:
            return
        try:
            self._started = self._start(following)
        except ExecutorLost:
            raise
        except Exception:
            logger.exception("step %d could not be launched ahead", following.step_id)
            self._rollback()
            return
        self.plan = following
        self.num_async += 1
