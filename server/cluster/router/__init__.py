"""Routing policies: pure code, used in a cluster's API servers and in the simulator."""

from collections.abc import Callable, Mapping

from .affinity import Affinity
from .estimates import AnswerLengths, Estimates
from .least_delay import LeastDelay
from .pending_time import PendingTime
from .prefixes import PrefixPlaces, runs_of
from .rank_aware import RankAware
from .replicas import Holders, Policy, Replicas, ReplicaState, Routed
from .simple import Consolidate, FirstFit, MostIdle, Random, Sampled

# Factories of all policies, by the names in `chorus cluster up --policy` and in studies. A seed of None: each router
# draws different random numbers.
POLICIES: Mapping[str, Callable[[Estimates, int | None], Policy]] = {
    "least-delay": LeastDelay,
    "affinity": lambda estimates, seed: Affinity(),
    "rank-aware": lambda estimates, seed: RankAware(estimates),
    "pending-time": lambda estimates, seed: PendingTime(estimates),
    "most-idle": lambda estimates, seed: MostIdle(),
    "consolidate": lambda estimates, seed: Consolidate(),
    "first-fit": lambda estimates, seed: FirstFit(),
    "random": lambda estimates, seed: Random(seed),
}

FOLLOWS_PREFIXES = (LeastDelay, Affinity)
"""Policies that choose among replicas with a prompt's beginning first; the others are baselines."""

__all__ = [
    "FOLLOWS_PREFIXES",
    "POLICIES",
    "Affinity",
    "AnswerLengths",
    "Consolidate",
    "Estimates",
    "FirstFit",
    "Holders",
    "LeastDelay",
    "MostIdle",
    "PendingTime",
    "Policy",
    "PrefixPlaces",
    "Random",
    "RankAware",
    "ReplicaState",
    "Replicas",
    "Routed",
    "Sampled",
    "runs_of",
]
