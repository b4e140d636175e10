"""Routing of requests to replicas: pure policy code, fed with snapshots, under test in the simulator."""

from .affinity import Affinity
from .pending_time import PendingTime
from .rank_aware import RankAware
from .replica_state import Policy, ReplicaState, Routed
from .simple import Consolidate, FirstFit, MostIdle, Random, Sampled

#: Policies that need nothing but what replicas report, by the names that `chorus cluster up --policy` takes.
POLICIES = {
    "affinity": Affinity, "most-idle": MostIdle, "consolidate": Consolidate, "first-fit": FirstFit, "random": Random,
}  # fmt: skip

__all__ = [
    "POLICIES", "Affinity", "Consolidate", "FirstFit", "MostIdle", "PendingTime", "Policy", "Random", "RankAware",
    "ReplicaState", "Routed", "Sampled",
]  # fmt: skip
