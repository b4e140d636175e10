"""Commands to a replica's engine, and their failures, as words on the wire.

Tests: tests/server/cluster/test_control.py
"""

from __future__ import annotations

from collections.abc import Iterable

from ...core.requests.request_params import InvalidRequest
from ...core.sleep import CannotSleep
from ...memory.pages.block import Medium
from ..errors import EngineUnavailable

FREEZE, SLEEP, WAKE, RESET, RESET_ROWS = "freeze", "sleep", "wake", "reset", "reset-rows"

BUSY = "busy"
"""Failure of a sleep that may be tried again; other failures name a wrong field, or are empty."""


def reset_of(tiers: Iterable[Medium]) -> str:
    """The word for a reset of the prefix cache's tiers."""
    return f"{RESET}:{','.join(tiers)}"


def tiers_of(kind: str) -> list[Medium]:
    """The tiers that a word of `reset_of` names. Raises ValueError for any other."""
    word, _, names = kind.partition(":")
    if word != RESET:
        raise ValueError(f"{kind!r} is no reset")
    return [Medium(each) for each in names.split(",")]


def failure_of(error: BaseException) -> str:
    """The failure of a command, for the wire."""
    if isinstance(error, CannotSleep):
        return BUSY
    return f"field:{error.field}" if isinstance(error, InvalidRequest) else ""


def error_of(failure: str, text: str) -> Exception:
    """The error of a command, from the wire."""
    if failure == BUSY:
        return CannotSleep(text)
    if failure.startswith("field:"):
        return InvalidRequest(failure.removeprefix("field:"), text)
    return EngineUnavailable(text)
