"""The same policies route in a cluster and in the simulator."""

from __future__ import annotations

import ast
import inspect
from types import SimpleNamespace

import pytest

from chorus.perf.simulate import baselines, cluster, serving, setup, simulation
from chorus.perf.simulate.setup import Router
from chorus.server.cluster import dispatcher, fleet, plan, router, up
from chorus.server.cluster.router import POLICIES, Estimates, Replicas

from ..replica_states import replica_state


def test_cluster_and_simulator_have_the_same_objects():
    assert plan.POLICIES is up.POLICIES is serving.POLICIES is setup.POLICIES is router.POLICIES
    assert dispatcher.Estimates is up.Estimates is simulation.Estimates
    assert fleet.Replicas is cluster.Replicas is baselines.Replicas
    for module in (serving, setup, cluster, up, dispatcher):
        classes = {
            node.name for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.ClassDef)
        }
        assert not classes & {type(make(Estimates(), 0)).__name__ for make in POLICIES.values()}


@pytest.mark.parametrize("name", POLICIES)
def test_a_study_may_name_every_policy_that_a_cluster_takes(name):
    assert Router(policy=name, slo=0.05).policy == Router(policy=name.replace("-", "_"), slo=0.05).policy == name
    replicas = Replicas(replica_state(8, [8] * count, name=str(count)) for count in (3, 2))
    request = SimpleNamespace(adapter="a", prompt_tokens=10, rank=8)
    assert POLICIES[name](Estimates(), 0)(request, replicas) in (0, 1)
