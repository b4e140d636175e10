"""Triggers and constants of migration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

PLANNERS = ("newest", "greedy", "ilp", "rounding")
"""Names of the planners, see `plan_moves`."""


@dataclass(frozen=True, slots=True)
class MigrationSettings:
    """Triggers of migration, and assumed costs of a move.

    If dLoRA's paper (§5.2) gives no number, the value is from its authors' code (LLMServe/dLoRA-artifact,
    `engine_manager.py` and `migration_ilp.py`). The last five fields are ours.
    """

    interval_seconds: float = 10.0
    """Seconds between two plans."""
    kv_share: float = 0.9
    """A replica is full if its requests need this share of its KV pages; a plan fills no replica further."""
    excess_requests: float = 16.0
    """A replica has too many requests if it has more than the replicas' mean times this."""
    move_seconds: float = 0.05
    """Seconds of a moved request, in addition to computing its KV again."""
    answer_seconds: float = 5.0
    """Seconds of a completion, before one with its adapter has ended."""
    most_replicas: int = 2
    """A plan covers so many of the most and of the least loaded replicas (the paper's K; the authors' code has 1)."""
    page_seconds: float = 0.000122
    """Seconds for a KV page without room: swapping 2 MiB out and in over 32 GB/s."""
    hold_seconds: float = 30.0
    """Seconds for which a moved request is not moved again."""
    solve_seconds: float = 1.0
    solve_nodes: int = 10
    """Most seconds and nodes of the integer program's search; ending by nodes gives the same plan every time."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> MigrationSettings:
        """Settings with some fields replaced, written NAME=VALUE. Raises ValueError."""
        known = {field.name: field.default for field in fields(cls)}
        found: dict[str, Any] = {}
        for text in texts:
            name, _, value = text.partition("=")
            if name not in known:
                raise ValueError(f"{name!r} is not a setting of migration; use one of {', '.join(known)}")
            try:
                found[name] = type(known[name])(value)
            except ValueError:
                kind = "whole number" if isinstance(known[name], int) else "number"
                raise ValueError(f"{name} is {value!r}; give a {kind}") from None
            if not 0 < found[name] < float("inf"):
                raise ValueError(f"{name} is {value}; give a number above 0")
            if name == "kv_share" and found[name] > 1:
                raise ValueError(f"{name} is {value}; give a share up to 1, such as 0.9")
        return cls(**found)
