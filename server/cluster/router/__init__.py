"""Routing of requests to replicas: pure policy code, fed with snapshots, under test in the simulator."""

from .pending_time import PendingTime
from .rank_aware import RankAware
from .replica_state import Policy, ReplicaState, Routed
from .simple import Consolidate, FirstFit, MostIdle, Random, Sampled

__all__ = [
    "Consolidate", "FirstFit", "MostIdle", "PendingTime", "Policy", "Random", "RankAware", "ReplicaState", "Routed",
    "Sampled",
]  # fmt: skip
