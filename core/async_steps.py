"""One step ahead: while a device runs a step, the host plans and launches the next one."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..memory.transfers.transfer import ExecutorLost
from .executors.base import Executor, StartedStep
from .requests.types import StepPlan, StepResult

logger = logging.getLogger(__name__)


class AsyncSteps:
    """Runs steps, each launched before the tokens of the one before it are read, where it can be foreseen.

    The device takes these tokens from its own memory, so that it is never idle; the host reads them meanwhile. A row of
    a request that they end is stale, and `Scheduler.update` drops it. A stale row may still write KV behind its
    request's last token, and read the request's and its adapter's pages, after the request has freed them. This is
    safe: a device runs steps and copies in the order of their launches, so before any write of the pages' next owner.
    And no known block contains the stale row's KV, since blocks become known only by tokens that have been read.

    plan: of the step that the last `run` launched ahead, to be passed to the next `run`; None if there is none.
    """

    def __init__(
        self,
        start: Callable[[StepPlan], StartedStep],
        executor: Executor,
        plan_ahead: Callable[[StepPlan], StepPlan | None],
        rollback: Callable[[], None],
    ) -> None:
        """start: launches a step. executor: runs one to its end. plan_ahead: returns the plan after one under way, with
        its rows moved on, or None. take_back: undoes that.
        """
        self._start = start
        self._executor = executor
        self._plan_ahead = plan_ahead
        self._rollback = rollback
        self._started: StartedStep | None = None  # of `plan`
        self._runs_alone = False  # the next step, which has failed
        self.plan: StepPlan | None = None
        self.num_async = 0
        """Steps launched ahead."""

    def run(self, plan: StepPlan) -> StepResult | None:
        """Return the result of a step, having launched the next one if `plan_ahead` plans it.

        None when it failed: neither has happened, and the step is to be planned anew, as planning the next one may have
        changed its rows, and taken the pages of its shadow weights. The next `run` launches nothing ahead, and raises
        what `Executor.execute` raises.
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
