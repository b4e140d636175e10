"""The plan of a cluster, and the part that its API servers get."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from chorus.server.cluster.plan import ClusterPlan, add_up_flags
from chorus.server.cluster.up import up
from chorus.server.demo.builtin import BUILTIN_MODEL
from chorus.server.settings import Settings
from chorus.server.start.checks import LaunchError


def test_a_front_is_told_what_the_plan_says_of_it():
    plan = ClusterPlan(
        replicas=3,
        policy="first-fit",
        tls=Path("/tls"),
        migration="greedy",
        preload=True,
        migration_setting=("interval_seconds=5", "kv_share=0.8"),
    )
    assert ClusterPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert ClusterPlan.from_json(json.loads(json.dumps(ClusterPlan().to_json()))) == ClusterPlan()


def test_times_are_seconds_or_have_a_unit():
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_up_flags(parser, int)
    assert parser.parse_args(["--slo-tpot", "50ms", "--scale-seconds", "2s"]).slo_tpot == 0.05
    assert parser.parse_args(["--slo-tpot", "0.05"]).slo_tpot == 0.05
    for flag in ("--slo-tpot", "--scale-seconds"):
        wrong = {"fast": "'fast' is no time; give one with a unit", "-1": "must be a number of seconds above 0"}
        for text, said in wrong.items():
            with pytest.raises(argparse.ArgumentError, match=said):
                parser.parse_args([f"{flag}={text}"])


def test_settings_of_a_migration_that_is_off_are_refused(tmp_path):
    plan = ClusterPlan(migration_setting=("interval_seconds=5",))
    with pytest.raises(LaunchError, match="interval_seconds=5 changes nothing while --migration is off; give"):
        up(plan, Settings(model=BUILTIN_MODEL), {})
