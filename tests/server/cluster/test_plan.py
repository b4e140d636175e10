"""The plan of a cluster, and what its fronts are told of it."""

from __future__ import annotations

import argparse
from pathlib import Path

from chorus.server.cluster.plan import Plan, add_front_flags


def test_a_front_is_told_what_the_plan_says_of_it():
    plan = Plan(
        replicas=3, policy="first-fit", tls=Path("/tls"), migration="greedy", preload=True,
        migration_setting=["interval_seconds=5", "kv_share=0.8"],
    )  # fmt: skip
    parser = argparse.ArgumentParser()
    add_front_flags(parser, int)
    assert Plan.of(parser.parse_args(plan.front_flags())) == plan
    assert Plan.of(parser.parse_args(Plan().front_flags())).migration == "off"
