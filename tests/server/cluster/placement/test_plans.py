"""Plans of migration: properties of every plan, and each planner's solutions of small problems."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.server.cluster.placement.plan import NEED_HIGHS, has_highs, plan_moves, planned
from chorus.server.cluster.placement.problem import Problem
from chorus.server.cluster.placement.program import GAP, Program
from chorus.server.cluster.placement.settings import PLANNERS, MigrationSettings

SETTINGS = MigrationSettings(solve_seconds=20.0, solve_nodes=10_000)


@st.composite
def problems(draw, most_requests=6, most_replicas=3):
    """A few requests for few adapters; some may not move, some replicas are short of pages or overfull."""
    n, m, a = draw(st.integers(1, most_requests)), draw(st.integers(1, most_replicas)), draw(st.integers(1, 3))

    def whole(*shape, least=0, most):
        count = int(np.prod(shape))
        return np.array(draw(st.lists(st.integers(least, most), min_size=count, max_size=count))).reshape(shape)

    home = whole(n, most=m - 1)
    allowed = whole(n, m, most=3) > 0
    allowed[np.arange(n), home] = True
    resident = whole(a, m, most=1) > 0
    resident[0] = True
    size, load = whole(a, most=3), whole(a, most=4) / 4
    size[0] = load[0] = 0
    return Problem(
        home=home,
        adapter=whole(n, most=a - 1),
        run_seconds=whole(n, most=8) / 2,
        move_seconds=whole(n, most=4) / 8,
        pages=whole(n, most=5),
        allowed=allowed,
        busy_seconds=whole(m, most=6) / 2,
        num_pages=whole(m, most=12),
        num_slots=whole(m, most=5),
        resident=resident,
        load_seconds=load,
        adapter_pages=size,
        page_seconds=draw(st.sampled_from([0.0, 0.01, 1.0])),
    )


def even(requests=4, replicas=2, **changes):
    """Equal requests of the base model, all at replica 0, with room everywhere."""
    fields = {
        "home": np.zeros(requests, np.int64),
        "adapter": np.zeros(requests, np.int64),
        "run_seconds": np.full(requests, 2.0),
        "move_seconds": np.full(requests, 0.05),
        "pages": np.full(requests, 2),
        "allowed": np.ones((requests, replicas), bool),
        "busy_seconds": np.zeros(replicas),
        "num_pages": np.full(replicas, 100),
        "num_slots": np.full(replicas, 32),
        "resident": np.ones((1, replicas), bool),
        "load_seconds": np.zeros(1),
        "adapter_pages": np.zeros(1, np.int64),
    }
    return Problem(**{**fields, **changes})


def places(problem):
    """All places that are allowed and fit."""
    choices = [np.flatnonzero(row) for row in problem.allowed]
    return [place for place in map(np.array, itertools.product(*choices)) if problem.fits(place)]


def planners():
    return [name for name in PLANNERS if name not in NEED_HIGHS or has_highs()]


@given(problems())
@settings(deadline=None, max_examples=20)
def test_a_plan_keeps_to_pages_and_to_the_replicas_that_are_allowed(problem):
    for name in planners():
        place = planned(problem, name, SETTINGS)
        assert problem.allowed[np.arange(len(place)), place].all(), name
        assert problem.fits(place), name


@given(problems())
@settings(deadline=None, max_examples=40)
def test_greedy_is_never_worse_than_staying(problem):
    assert problem.objective(planned(problem, "greedy", SETTINGS)) <= problem.objective(problem.home)


@given(problems(most_requests=5))
@settings(deadline=None, max_examples=20)
def test_the_program_finds_the_best_place_and_its_bound_is_below_all(problem):
    pytest.importorskip("highspy")
    objectives = [problem.objective(place) for place in places(problem)]
    best = problem.objective(planned(problem, "ilp", SETTINGS))
    bound = Program(problem).bound()
    assert bound is not None
    assert bound <= min(objectives) + 1e-6
    assert best <= min(objectives) * (1 + GAP) + 1e-6
    assert best <= problem.objective(planned(problem, "greedy", SETTINGS))


@pytest.mark.parametrize("name", PLANNERS)
def test_half_of_the_requests_leave_for_an_idle_replica(name):
    if name in NEED_HIGHS:
        pytest.importorskip("highspy")
    problem = even(num_slots=np.array([2, 32]))  # for Punica's planner the replica is full
    plan = plan_moves(problem, name, SETTINGS)
    assert sorted(plan.place.tolist()) == [0, 0, 1, 1]
    assert plan.before == 8.0 and plan.objective == pytest.approx(4.1, abs=0.01)


def test_regret_is_the_distance_from_the_bound():
    pytest.importorskip("highspy")
    plan = plan_moves(even(requests=3), "greedy", SETTINGS)  # the bound halves a request, no plan does
    assert plan.bound == pytest.approx(3.04, abs=0.01)
    assert plan.regret == pytest.approx(4 / 3.04 - 1, abs=0.01)


def test_the_newest_request_leaves_the_replica_whose_pages_are_short_for_the_busiest_one_with_room():
    problem = even(
        requests=6,
        replicas=4,
        home=np.array([0, 0, 0, 0, 1, 2]),
        pages=np.array([5, 5, 5, 5, 1, 1]),
        num_pages=np.array([15, 100, 100, 3]),
    )
    place = planned(problem, "newest", SETTINGS)
    assert place.tolist() == [0, 0, 0, 2, 1, 2], "of equally busy replicas the last"


def test_greedy_moves_requests_of_one_adapter_to_one_replica():
    """A load costs as much as two requests, so it is paid once."""
    problem = even(
        requests=8,
        replicas=3,
        adapter=np.array([0, 1] * 4),
        resident=np.array([[True] * 3, [True, False, False]]),
        run_seconds=np.ones(8),
        load_seconds=np.array([0.0, 2.0]),
        adapter_pages=np.array([0, 1]),
    )
    place = planned(problem, "greedy", SETTINGS)
    assert len({int(at) for at, adapter in zip(place, problem.adapter, strict=True) if adapter and at}) <= 1
    assert problem.objective(place) < problem.objective(problem.home)


def test_an_overfull_replica_gets_no_fuller_and_is_relieved():
    problem = even(num_pages=np.array([4, 6]), page_seconds=10.0)
    place = planned(problem, "greedy", SETTINGS)
    assert problem.pages_at(place).tolist() == [4, 4]
