"""The cost of making room by a preemption: KV goes to host memory and comes back, or it is computed again."""

from __future__ import annotations

from typing import Literal

from ...memory.pages.eviction import RestoreCosts


def swaps(setting: Literal["auto", "swap", "recompute"], costs: RestoreCosts) -> bool:
    """Return whether a request's KV is to be swapped; `auto` takes what is measured to take less time.

    Both grow with the pages, so that a page of the one is compared with a page of the other. A copy is taken to cost
    its whole time, though a GPU computes meanwhile: the estimate errs on the side of computing again. What the prefix
    cache may keep by chance is not counted on.
    """
    return setting == "swap" or (setting == "auto" and costs.swapped_page < costs.prefix_page)
