"""Strict JSON for files from strangers: ambiguity is an error, and no value takes long to read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from .error import shown

MAX_CONTAINERS = 1 << 15  # few enough that the garbage collector does not scan all objects of the process
MAX_DIGITS = 19  # a 64-bit integer has no more
MAX_NUMBER_CHARACTERS = 64
_PYTHONS_DIGITS = 4300  # json.loads itself refuses more


def loads(
    data: bytes, max_containers: int = MAX_CONTAINERS, convert: Callable[[dict[str, Any]], Any] = lambda found: found
) -> Any:
    """Parse UTF-8 JSON of so many lists and objects. Raises ValueError for malformed data, for a duplicate key in an
    object, and for endless nesting.

    convert: called with every object as it is read, inner ones first; returns what takes its place.

    An integer with more digits than a 64-bit one is read as infinity, which no field accepts. Python needs minutes to
    convert and multiply a header full of long ones.
    """
    check_containers(data.count(b"[") + data.count(b"{"), max_containers)
    try:
        return decoder(convert).decode(data.decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def decoder(convert: Callable[[dict[str, Any]], Any] = lambda found: found) -> json.JSONDecoder:
    """The parser of `loads`, which neither limits nesting nor the number of lists and objects."""
    return json.JSONDecoder(object_pairs_hook=partial(_unique, convert), parse_int=_integer, parse_float=_number)


def check_containers(found: int, most: int = MAX_CONTAINERS) -> None:
    """Raise ValueError for more lists and objects."""
    if found > most:
        raise ValueError(f"more than {most} lists and objects, nested or not")


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


def _unique(convert: Callable[[dict[str, Any]], Any], pairs: list[tuple[str, Any]]) -> Any:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {shown(twice)} occurs twice")
    return convert(result)
