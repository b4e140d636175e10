"""Triggers and constants of migration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

PLANNERS = ("newest", "greedy", "ilp", "rounding")
"""Names of the planners, see `plan_moves`."""


@dataclass(frozen=True, slots=True)
class MigrationSettings:
    """When requests move, and what a move is taken to cost.

    Where dLoRA's paper (§5.2) names no number, the value is its authors' code's (LLMServe/dLoRA-artifact,
    `engine_manager.py` and `migration_ilp.py`), but for the last five fields, which are ours.
    """

    interval_seconds: float = 10.0
    """Between two plans."""
    kv_share: float = 0.9
    """A replica is full if its requests want this share of its KV pages; a plan fills no replica further."""
    excess_requests: float = 16.0
    """Above the mean of the replicas, a replica has too many."""
    move_seconds: float = 0.05
    """Of a moved request, beside computing its KV again."""
    answer_seconds: float = 5.0
    """Of an answer, before one of its adapter has ended."""
    most_replicas: int = 2
    """A plan is for so many of the most and of the least loaded replicas (the paper's K; the authors' code has 1)."""
    page_seconds: float = 0.000122
    """Of a KV page that finds no room: out and in again over 32 GB/s, of 2 MiB."""
    hold_seconds: float = 30.0
    """For which a request that moved is not moved again."""
    solve_seconds: float = 1.0
    solve_nodes: int = 10
    """Most time and most nodes of the integer program's search; where nodes end it, the plan is the same every time."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> MigrationSettings:
        """Settings that differ from the defaults in fields written NAME=VALUE. Raises ValueError."""
        known = {field.name: field.default for field in fields(cls)}
        found: dict[str, Any] = {}
        for text in texts:
            name, _, value = text.partition("=")
            if name not in known:
                raise ValueError(f"{name!r} is no setting of migration; use one of {', '.join(known)}")
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
