"""Finds the existing name nearest to a mistyped one, fast even among thousands of names."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING

from ..errors import ApiError, no_model

if TYPE_CHECKING:
    from ..access.grants import Grant
    from ..engine.backend_adapters import BackendAdapters
    from ..executors import DaemonPool

MAX_COMPARED = 64
"""Most names compared letter by letter."""

MAX_LONGER = 3
"""Most letters by which the lengths may differ."""

ENDS = 2
"""Letters at the beginning, or at the end, that both names must share."""


async def no_model_like(name: str, adapters: BackendAdapters, base: str, grant: Grant, threads: DaemonPool) -> ApiError:
    """The error for an unknown model, with a suggestion if the key may use it.

    threads: pool that compares the names, which may be thousands.
    """
    names = await asyncio.wrap_future(adapters.names())

    def allows(each: str) -> bool:
        return grant.allows(None if each == base else each)

    return no_model(name, await threads.run(nearest, name, [base, *names], allows))


def nearest(name: str, names: Iterable[str], allows: Callable[[str], bool] = lambda _: True) -> str | None:
    """The name among `names` most like `name`; None if none is near. allows: tests which ones may be told.

    A name is compared if it begins or ends like `name`, ignoring case, and is about as long.
    """
    name = name[:256]
    low = name.lower()
    head, tail = low[:ENDS], low[-ENDS:]
    alike = (
        each
        for each in names
        if abs(len(each) - len(name)) <= MAX_LONGER
        and (each[:ENDS].lower() == head or each[-ENDS:].lower() == tail)
        and allows(each)
    )
    by_low = {each.lower(): each for each in islice(alike, MAX_COMPARED)}
    found = difflib.get_close_matches(low, by_low, n=1)
    return by_low[found[0]] if found else None
