"""JSON from files that others wrote: what is ambiguous is an error."""

from __future__ import annotations

import json
from typing import Any

from .adapter_error import shown


def loads(data: bytes) -> Any:
    """Parse UTF-8 JSON. ValueError for anything malformed, for a key that an object has twice, for endless nesting."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {shown(twice)} is there twice")
    return result
