"""Lives of an engine drawn by hypothesis, which goes on from what a life has reached, and shortens one that fails."""

from __future__ import annotations

import itertools
import logging
import random
from typing import ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from .checked_life import CheckedLife

RNGS = st.randoms(use_true_random=False)
ACTS = [act for act, weight in CheckedLife.acts.items() for _ in range(weight)]
NUM_ACTS = 40
"""Most acts of a life."""


class Machine(RuleBasedStateMachine):
    """A life, act by act."""

    begin_life: ClassVar[type[CheckedLife]] = CheckedLife
    life: CheckedLife | None = None

    @initialize(rng=RNGS)
    def begin(self, rng: random.Random) -> None:
        self.life = self.begin_life(rng)

    @rule(rng=RNGS, act=st.sampled_from(ACTS))
    def act(self, rng: random.Random, act: str) -> None:
        self.life.rng = rng
        try:
            self.life.act(act)
        except BaseException:  # hypothesis ends an act, too, that draws too much
            self.close()
            raise

    def teardown(self) -> None:
        if self.life is not None:
            try:
                self.life.finish()
            finally:
                self.close()

    def close(self) -> None:
        self.life.engine.close()
        self.life = None


def run(begin_life: type[CheckedLife], seed: int, lives: int, *, shrinks: bool = True) -> None:
    """Have hypothesis draw lives; raises what one of them raises. shrinks: of the shortest one that it finds."""
    logging.disable(logging.CRITICAL)  # the engine logs each fault
    machine = seeded(seed)(type("Lives", (Machine,), {"begin_life": begin_life}))  # unseeded they are the same again
    phases = [each for each in Phase if shrinks or each is Phase.generate]
    run_state_machine_as_test(machine, settings=settings(
        max_examples=lives, stateful_step_count=NUM_ACTS, phases=phases, report_multiple_bugs=shrinks, deadline=None,
        database=None, suppress_health_check=list(HealthCheck),
    ))  # fmt: skip


def lives_until_one_fails(most: int) -> int | None:
    begun = itertools.count(1)
    last = 0

    class Counted(CheckedLife):
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
