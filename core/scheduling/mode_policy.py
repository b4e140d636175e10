"""Policy that an engine takes from outside: with which adapter in the weights steps are computed (dLoRA §4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ...memory.adapters.adapter import Adapter


@dataclass(frozen=True, slots=True)
class ModeState:
    """State that dLoRA's Algorithm 1 decides by, before each step.

    requests: waiting and running ones of each adapter; None: of the base model. num_running: of all, the batch that
    first come, first served makes. merged: the adapter in the weights that steps use. shadowed: whose merged weights
    there are, so that merging it is a switch, or are being made. merge_seconds: what making them took the last time, 0
    before the first.
    """

    requests: Mapping[Adapter | None, int]
    num_running: int
    merged: Adapter | None
    shadowed: Adapter | None
    merge_seconds: float


class ModePolicy(Protocol):
    """Chooses between unmerged mode and merged mode with one adapter. In either, requests of all others run along."""

    def choose(self, state: ModeState) -> Adapter | None:
        """Return the adapter that steps are to have in their weights; None: none.

        One that can't be merged, or not yet, is served unmerged; until its merged weights are made, so is one that can.
        """
        ...
