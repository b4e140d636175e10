"""Simulation tests drawn by hypothesis, which extends runs that reach something new and shortens those that fail."""

from __future__ import annotations

import itertools
import logging
import random
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from .checked_run import CheckedRun

RNGS = st.randoms(use_true_random=False)
ACTS = [act for act, weight in CheckedRun.acts.items() for _ in range(weight)]
HEALTH_CHECKS: list[Any] = list(HealthCheck)
NUM_ACTS = 40
"""Most acts of a run."""


class Machine(RuleBasedStateMachine):
    """A run, act by act."""

    begin_run: ClassVar[type[CheckedRun]] = CheckedRun
    simulation: CheckedRun | None = None

    @initialize(rng=RNGS)
    def begin(self, rng: random.Random) -> None:
        self.simulation = self.begin_run(rng)

    @rule(rng=RNGS, act=st.sampled_from(ACTS))
    def act(self, rng: random.Random, act: str) -> None:
        assert self.simulation is not None
        self.simulation.rng = rng
        try:
            self.simulation.act(act)
        except BaseException:  # hypothesis ends an act, too, that draws too much
            self.close()
            raise

    def teardown(self) -> None:
        if self.simulation is not None:
            try:
                self.simulation.finish()
            finally:
                self.close()

    def close(self) -> None:
        assert self.simulation is not None
        self.simulation.engine.close()
        self.simulation = None


def run(begin_run: type[CheckedRun], seed: int, runs: int, *, shrinks: bool = True) -> None:
    """Have hypothesis draw runs; raises the error of a run that fails. shrinks: of the shortest one that it finds."""
    logging.disable(logging.CRITICAL)  # the engine logs each fault
    machine = seeded(seed)(type("Runs", (Machine,), {"begin_run": begin_run}))  # unseeded they are the same again
    phases = [each for each in Phase if shrinks or each is Phase.generate]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=runs,
            stateful_step_count=NUM_ACTS,
            phases=phases,
            report_multiple_bugs=shrinks,
            deadline=None,
            database=None,
            suppress_health_check=HEALTH_CHECKS,
        ),
    )


def runs_until_one_fails(most: int) -> int | None:
    begun = itertools.count(1)
    last = 0

    class Counted(CheckedRun):
        def __init__(self, rng: random.Random) -> None:
            nonlocal last
            last = next(begun)
            super().__init__(rng)

    try:
        run(Counted, 0, most, shrinks=False)
    except HypothesisException:
        raise
    except Exception:
        return last
    return None
