"""Plans of migration as they are measured: regrets, and the part that the gate reads."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from chorus.perf.gate.baseline import Run
from chorus.perf.gate.suite import suite_of, suites
from chorus.perf.serving import placement_plans

pytest.importorskip("highspy")

BASELINES = Path(placement_plans.__file__).parents[1] / "gate" / "baselines"


@pytest.fixture(scope="module")
def result():
    """What one run of the command printed at its end."""
    out = io.StringIO()
    flags = "--replicas 12 --requests 60 --adapters 20 --seeds 2 --most-replicas 2 5 60 --programs-to 5"
    with redirect_stdout(out):
        assert placement_plans.main(flags.split()) == 0
    return json.loads(out.getvalue().splitlines()[-1])


@pytest.mark.wide
def test_no_planner_is_below_the_bound_and_only_newest_may_be_worse_than_staying(result):
    for lines in result["plans"].values():
        regrets = {line["planner"]: line["regret"] for line in lines}
        assert all(regret > -1e-6 for regret in regrets.values())
        assert regrets["greedy"] < regrets["stay"]
        assert regrets.get("ilp", 0.0) <= regrets["greedy"]


def test_programs_are_left_out_above_their_size(result):
    planners = {shape: {line["planner"] for line in lines} for shape, lines in result["plans"].items()}
    assert planners["K = 5"] >= {"ilp", "rounding"}
    assert planners["K = 60"] == {"stay", "newest", "greedy"}


def test_the_gate_reads_regrets_and_times(result):
    run = Run.of(suite_of(result, suites(BASELINES)), [result])
    assert run.suite.name == "placement_plans"
    assert set(run.readings) >= {"K = 2 greedy regret", "K = 5, ilp / loop", "K = 60, greedy / loop"}
    assert all(values for _, values in run.readings.values())
