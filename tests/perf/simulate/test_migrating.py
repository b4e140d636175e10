"""Migration and preloading in the simulator: the same planners as in an API server, and their effects."""

from __future__ import annotations

import csv

import pytest
from pydantic import ValidationError

from chorus.perf.simulate.__main__ import main
from chorus.perf.simulate.cluster import simulate
from chorus.perf.simulate.controllers import Migrating
from chorus.perf.simulate.serving import run_serving
from chorus.perf.simulate.setup import Setup
from chorus.perf.simulate.study import load_study
from chorus.perf.workload.request import TraceRequest
from chorus.server.cluster.placement.plan import NEED_HIGHS
from chorus.server.cluster.placement.settings import MigrationSettings
from tests.perf.simulate.test_cluster import PROFILE, make_replicas

pytestmark = pytest.mark.wide

SETTINGS = MigrationSettings(interval_seconds=1.0, excess_requests=4.0)


def crowded(**changes):
    """All requests begin at the first of two replicas."""
    replicas = make_replicas(2)
    catalogue = replicas[0]._adapters  # noqa: SLF001
    requests = [TraceRequest(index, 0.01 * index, None, 50, 200) for index in range(24)]
    controller = Migrating("greedy", MigrationSettings(**changes), PROFILE.costs(), catalogue) if changes else None
    return simulate(requests, replicas, lambda request, replicas: 0, controller=controller)


def test_requests_leave_a_crowded_replica_and_all_are_answered():
    stayed, moved = crowded(), crowded(interval_seconds=1.0, excess_requests=4.0)
    assert stayed.num_moved == 0 and set(stayed.column("replica")) == {0}
    assert 0 < moved.num_moved < 24 and set(moved.column("replica")) == {0, 1}
    assert len(moved) == len(stayed) == 24
    assert moved.column("tokens").sum() == stayed.column("tokens").sum()


SETUP = {
    "profile": "a10-llama2-7b-bgmv",
    "replicas": 3,
    "router": {"policy": "random"},
    "targets": ["q_proj"],
    "engine": {"max_num_seqs": 8},
    "workload": {
        "requests": 200,
        "arrivals": {"process": "poisson", "rate": 20.0},
        "popularity": {"kind": "power_law", "exponent": 1.0},
        "lengths": {"kind": "alpaca"},
        "adapters": {"count": 12, "ranks": {"kind": "fixed", "rank": 8}},
    },
}


MIGRATION = {"settings": {"interval_seconds": 3.0, "excess_requests": 3.0, "solve_nodes": 1}}


def metrics(**changes):
    return run_serving(Setup.model_validate({**SETUP, **changes}))


@pytest.mark.parametrize("planner", ["newest", "rounding"])
def test_every_planner_moves_requests_in_a_study(planner):
    if planner in NEED_HIGHS:
        pytest.importorskip("highspy")
    found = metrics(migration={**MIGRATION, "planner": planner})
    assert found["moved"] > 0 and found["requests"] == 200 and found["failed"] == 0


@pytest.mark.wide
def test_a_run_with_an_integer_program_is_the_same_every_time():
    pytest.importorskip("highspy")
    once, again = (metrics(migration={**MIGRATION, "planner": "ilp"}) for _ in range(2))
    assert once == again and once["moved"] > 0


def test_settings_of_migration_have_names():
    with pytest.raises(ValidationError, match="'speed' is not a setting"):
        Setup.model_validate({**SETUP, "migration": {"planner": "greedy", "settings": {"speed": 1.0}}})


@pytest.mark.parametrize("rule", ["burst-tolerance", "known", "popular"])
def test_preloading_spares_cold_starts_of_the_second_half(rule):
    none, found = (metrics(preload={"rule": each, "fit_seconds": 5.0}) for each in ("none", rule))
    assert none["requests"] == found["requests"] < 200
    assert found["cold_starts_per_second"] < none["cold_starts_per_second"]


def test_a_study_whose_trace_is_not_there_says_how_to_get_it(capsys, tmp_path):
    assert main(["preloading", "--traces", str(tmp_path)]) == 2
    assert "preloading needs lora_requests.csv: take lora_request_trace.csv, in the form" in capsys.readouterr().err
    with (tmp_path / "lora_requests.csv").open("w") as file:
        csv.writer(file).writerows([("row", "lora_ids"), (0, "a")])
    assert load_study("preloading", tmp_path).missing is None
