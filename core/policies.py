"""Policies that an engine takes from outside."""

from __future__ import annotations

from dataclasses import dataclass

from .merging.mode_policy import ModePolicy, ModePrices
from .scheduling.policies import SchedulerPolicies


@dataclass(frozen=True)
class Policies(SchedulerPolicies):
    """One of each. mode: by default as configured. prices: the costs by which `mode` compares modes; by default
    learned.
    """

    mode: ModePolicy | None = None
    prices: ModePrices | None = None
