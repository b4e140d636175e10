"""JSON from files that others wrote: what is ambiguous is an error, and no value takes long to read."""

from __future__ import annotations

import json
import math
from typing import Any

from .error import shown

MAX_CONTAINERS = 1 << 15  # so many that the garbage collector does not look at all that the process has
MAX_DIGITS = 19  # what 64 bits hold
MAX_NUMBER_CHARACTERS = 64
_PYTHONS_DIGITS = 4300  # more, and json.loads itself refuses


def loads(data: bytes) -> Any:
    """Parse UTF-8 JSON. ValueError for anything malformed, for a key that an object has twice, for endless nesting.

    An integer of more digits than 64 bits hold is read as infinity, which no field takes: Python needs minutes to
    convert and to multiply a header full of long ones.
    """
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        raise ValueError(f"more than {MAX_CONTAINERS} lists and objects, nested or beside each other")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_int=_integer, parse_float=_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _integer(text: str) -> int | float:
    if len(text) <= MAX_DIGITS:
        return int(text)
    if len(text) > _PYTHONS_DIGITS:
        raise ValueError(f"the number {shown(text[:MAX_NUMBER_CHARACTERS])}… has {len(text)} digits")
    return -math.inf if text.startswith("-") else math.inf


def _number(text: str) -> float:
    if len(text) > MAX_NUMBER_CHARACTERS:
        raise ValueError(f"the number {shown(text[:MAX_NUMBER_CHARACTERS])}… has {len(text)} characters")
    return float(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {shown(twice)} is there twice")
    return result
