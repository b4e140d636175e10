"""One step ahead: while a device runs a decode step, the host plans and launches the next one."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..memory.transfers.transfer import ExecutorLost
from .executors.base import Executor, StartedStep
from .requests.types import StepPlan, StepResult
from .scheduling.running import take_back

logger = logging.getLogger(__name__)


class StepAhead:
    """Runs steps, each launched before the tokens of the one before it are read, where it can be foreseen.

    The device takes these tokens from its own memory, so that it has work all the time; the host deals with them while
    it does that. What the tokens turn out to end is dropped from the step that is under way by then
    (`Scheduler.update`). Such a row may still write KV behind its request's last token, and read its pages and its
    adapter's, after the request has given them up: steps and copies of a device do their work in the order in which
    they were launched, so it does that before whoever has these pages next writes there. No known block holds what it
    writes, since blocks become known by the tokens that have been read.

    plan: of the step that was launched ahead by the last `run`, and is to be given to the next; None if there is none.
    """

    def __init__(
        self,
        start: Callable[[StepPlan], StartedStep],
        executor: Executor,
        foresee: Callable[[StepPlan], StepPlan | None],
    ) -> None:
        """start, executor: begins steps; runs one. foresee: the plan behind one that is under way, if that can be told.

        Its rows have been moved on, see `running.follow`.
        """
        self._start = start
        self._executor = executor
        self._foresee = foresee
        self._started: StartedStep | None = None  # of `plan`
        self._runs_alone = False  # the next step, which failed with another behind it
        self.plan: StepPlan | None = None
        self.num_ahead = 0
        """Steps launched ahead."""

    def run(self, plan: StepPlan) -> StepResult | None:
        """Return the result of a step, having launched the one behind it if that can be foreseen.

        None when it failed and one of the two was ahead: neither has happened, and the next step that is run has none
        behind it. Otherwise it raises what `Executor.execute` raises.
        """
        if self._runs_alone:
            self._runs_alone = False
            return self._executor.execute(plan)
        started = self._started if plan is self.plan else None
        self.plan = self._started = None
        if started is None:
            started = self._start(plan)
        self._launch_behind(plan)
        try:
            return started.result()
        except ExecutorLost:
            raise
        except Exception:
            if self.plan is None and plan.sources is None:
                raise
            logger.exception("step %d failed; it is run again with none ahead of it", plan.step_id)
        if self.plan is not None:
            take_back(self.plan)
            self.plan = self._started = None
        self._runs_alone = True
        return None

    def _launch_behind(self, plan: StepPlan) -> None:
        ahead = self._foresee(plan)
        if ahead is None:
            return
        try:
            self._started = self._start(ahead)
        except ExecutorLost:
            raise
        except Exception:
            logger.exception("step %d could not be launched ahead", ahead.step_id)
            take_back(ahead)
            return
        self.plan = ahead
        self.num_ahead += 1
