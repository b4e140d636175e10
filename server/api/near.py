"""The name that a mistyped one may be meant for, found in a time that thousands of names do not lengthen much."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice

MAX_COMPARED = 64
"""Names that are compared letter by letter."""

MAX_LONGER = 3
"""Letters that the name may have more or fewer."""

ENDS = 2
"""Letters at the beginning, or at the end, that both names must share."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name among `names` that is most like `name`; None where none is near.

    A name is compared if it begins or ends as `name` does, whatever the case, and is about as long.
    """
    name = name[:256]
    low = name.lower()
    head, tail = low[:ENDS], low[-ENDS:]
    alike = (
        each
        for each in names
        if abs(len(each) - len(name)) <= MAX_LONGER and (each[:ENDS].lower() == head or each[-ENDS:].lower() == tail)
    )
    by_low = {each.lower(): each for each in islice(alike, MAX_COMPARED)}
    found = difflib.get_close_matches(low, by_low, n=1)
    return by_low[found[0]] if found else None
