"""Placement: which requests move to which replica, and which adapters lie where beforehand. Pure code, no I/O."""

from .migration import Migration, Movable, Move
from .plan import PLANNERS, Plan, plan_moves
from .preloading import burst_tolerance
from .problem import Problem
from .settings import MigrationSettings

__all__ = [
    "PLANNERS", "Migration", "MigrationSettings", "Movable", "Move", "Plan", "Problem", "burst_tolerance", "plan_moves",
]  # fmt: skip
