"""Cluster fields of a study: placement, a script, service classes, and the knowledge of its router."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from chorus.perf.simulate.serving import run_serving
from chorus.perf.simulate.setup import Setup, StudyError

BASE = {
    "profile": "a10-llama2-7b-bgmv",
    "replicas": 2,
    "router": {"policy": "most_idle"},
    "targets": ["q_proj"],
    "workload": {
        "requests": 60,
        "arrivals": {"process": "poisson", "rate": 10.0},
        "popularity": {"kind": "uniform"},
        "lengths": {"kind": "alpaca"},
        "adapters": {"count": 4, "ranks": {"kind": "fixed", "rank": 8}},
    },
}


def metrics(**changes):
    return run_serving(Setup.model_validate({**BASE, **changes}))


def test_what_is_placed_needs_no_load():
    assert metrics()["cold_starts_per_second"] > 0
    assert metrics(placement=[[0, 1, 2, 3], [0, 1, 2, 3]])["cold_starts_per_second"] == 0
    assert 0 < metrics(placement=[[0, 1]])["cold_starts_per_second"] < metrics()["cold_starts_per_second"]


def refusing(**changes):
    """Half of the prompts are longer than the engine takes."""
    prompt, output = {"law": "uniform", "low": 1, "high": 200}, {"law": "constant", "tokens": 8}
    workload = {**BASE["workload"], "lengths": {"kind": "laws", "prompt": prompt, "output": output}}
    return metrics(workload=workload, engine={"max_model_len": 100}, **changes)


def test_requests_that_are_refused_are_out_of_the_slo():
    found = refusing(slo=100.0)
    assert 20 < found["failed"] < 40
    assert found["requests"] + found["failed"] == 60
    assert found["slo_attainment"] == pytest.approx(found["requests"] / 60)
    late = refusing(slo=100.0, warmup=3.0)
    assert 0 < late["failed"] < found["failed"], "those before the warm-up count as little as its answers"
    assert late["slo_attainment"] == pytest.approx(late["requests"] / (late["requests"] + late["failed"]))


def test_clients_go_on_after_a_refusal():
    assert refusing(clients=1)["requests"] == refusing()["requests"]


def test_a_setup_that_refuses_every_request_says_so():
    with pytest.raises(StudyError, match="all 60 requests were refused or failed"):
        metrics(engine={"max_model_len": 2})


@pytest.mark.wide
def test_a_flood_is_noticed_by_others_where_the_engine_is_not_told_whose_requests_are():
    tenants = {"flood": 10.0, "other": 1.0}
    workload = {
        **BASE["workload"],
        "requests": 300,
        "arrivals": {"process": "poisson", "rate": 300.0},
        "tenants": tenants,
        "adapters": {"count": 22, "ranks": {"kind": "fixed", "rank": 8}},
    }
    changes = {"workload": workload, "engine": {"max_num_seqs": 4}}
    fair, untold = (metrics(**changes, flood="flood", tells_tenants=told) for told in (True, False))
    assert fair["others_ttft_p99"] < 0.5 * untold["others_ttft_p99"]
    assert "others_ttft_p99" not in metrics(**changes)


def test_a_router_may_know_little():
    rank_aware = {"policy": "rank_aware", "slo": 0.05, "mean_output_tokens": 58.0}
    found = metrics(router={**rank_aware, "choices": 1, "staleness": 0.2})
    assert found["requests"] == 60
    assert found != metrics(router=rank_aware)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"placement": [[0], [0], [0]]}, "placement has 3 replicas, the setup has 2"),
        ({"placement": [[4]]}, "the workload has no adapter number 4"),
        ({"engine": {"speculation": "ngram"}}, "engine.speculation is 'ngram', but simulated steps verify nothing"),
        ({"flood": "all", "workload": {**BASE["workload"], "tenants": {"all": 1.0}}}, "no other tenant sends"),
    ],
)
def test_wrong_fields_are_told(changes, message):
    with pytest.raises((StudyError, ValidationError), match=message):
        metrics(**changes)


def test_a_crowd_comes_for_one_adapter_and_goes():
    """Each replica that is asked for it loads it, and nothing else is: the workload's own adapters are there."""
    placement = [[0, 1, 2], [0, 1, 2]]
    workload = {**BASE["workload"], "popularity": {"kind": "power_law", "exponent": 40.0}}
    crowd = {"adapter": 3, "at": 2.0, "seconds": 1.0, "share": 1.0}
    assert metrics(placement=placement, workload=workload)["cold_starts_per_second"] == 0
    found = metrics(placement=placement, workload=workload, flash=crowd)
    assert round(found["cold_starts_per_second"] * found["simulated_seconds"]) == 2
    late = {**crowd, "at": 1000.0}
    assert metrics(placement=placement, workload=workload, flash=late)["cold_starts_per_second"] == 0


def test_turns_go_to_the_replicas_that_hold_the_adapter():
    workload = {**BASE["workload"], "popularity": {"kind": "identical"}}
    alone, both = (
        metrics(workload=workload, placement=placement, router={"policy": "round-robin"})
        for placement in ([[0]], [[0], [0]])
    )
    assert alone["busy_batch"] > both["busy_batch"]
    assert alone["cold_starts_per_second"] == both["cold_starts_per_second"] == 0


def test_replicas_that_follow_the_load_take_fewer_hours():
    fixed, scaled = metrics(), metrics(scaling={"least": 1, "steady_seconds": 1.0})
    assert fixed["replica_hours"] == pytest.approx(2 * fixed["simulated_seconds"] / 3600)
    assert scaled["replica_hours"] < 0.9 * fixed["replica_hours"]


@pytest.mark.wide
def test_the_rate_at_a_limit_is_between_the_rates_around_it():
    limit = {"metric": "ttft_mean", "value": 0.2, "rates": [1.0, 40.0, 1000.0]}
    workload = {**BASE["workload"], "requests": 100}
    low, high = (
        metrics(workload={**workload, "arrivals": {"process": "poisson", "rate": rate}})["ttft_mean"]
        for rate in (1.0, 1000.0)
    )
    assert low < 0.2 < high
    assert 1.0 < metrics(workload=workload, limit=limit)["rate_at_limit"] < 1000.0
    with pytest.raises(StudyError, match="add higher rates"):
        metrics(workload=workload, limit={**limit, "value": 1000.0})
