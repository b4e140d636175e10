"""Routing of requests to replicas: pure policy code, fed with snapshots, under test in the simulator."""

from .consolidate import Consolidate
from .pending_time import PendingTime
from .policy import Policy
from .rank_aware import RankAware
from .replica_state import ReplicaState, Routed
from .simple import FirstFit, MostIdle, Random, Sampled

__all__ = [
    "Consolidate", "FirstFit", "MostIdle", "PendingTime", "Policy", "Random", "RankAware", "ReplicaState", "Routed",
    "Sampled",
]  # fmt: skip
