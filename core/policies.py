"""Policies that an engine takes from outside."""

from __future__ import annotations

from dataclasses import dataclass

from .merging.mode_policy import ModePolicy
from .scheduling.policies import SchedulerPolicies


@dataclass(frozen=True)
class Policies(SchedulerPolicies):
    """One of each. mode: by default as configured."""

    mode: ModePolicy | None = None
