"""Policies that an engine takes from outside."""

from __future__ import annotations

from dataclasses import dataclass

from .merging.mode_policy import ModePolicy
from .scheduling.service import QueuePolicy
from .speculation.proposer import Proposer


@dataclass(frozen=True)
class Policies:
    """One of each; by default as configured."""

    queue: QueuePolicy | None = None
    mode: ModePolicy | None = None
    proposer: Proposer | None = None
    """Has an effect only where the configuration speculates."""
