"""Pages that running requests are expected to need, which admission reserves for them.

Tests: tests/core/scheduling/test_scheduling.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...memory.pages.layout import PageLayout
from ..requests.request import Request
from .service import OutputLengths

if TYPE_CHECKING:
    import numpy as np


class Growth:
    """Pages that running requests are expected to need beyond the pages that they have."""

    def __init__(self, lengths: OutputLengths, layout: PageLayout, running: Sequence[Request]) -> None:
        self._lengths = lengths
        self._layout = layout
        self._pages_of = layout.pages_for_tokens
        self._running = running
        ends = lengths.final_lengths(running)
        self.finals = layout.pages_for_each([end - 1 for end in ends])
        """Pages that each running request is expected to end with."""
        has = layout.pages_for_each([request.room for request in running])
        grown = [final - pages for final, pages in zip(self.finals, has, strict=True)]
        self.total = sum([pages for pages in grown if pages > 0])
        """Pages by which all of them grow."""
        self._by_tenant: Counter[str] | None = None
        self._ends: np.ndarray | None = None  # `_ends_of` all; computed only if the sum does not fit

    def add(self, request: Request) -> None:
        """Add a running request, the last of them."""
        self.total += self._pages(request, request.room)
        self.finals.append(pages := self.final_pages(request))
        if self._by_tenant is not None:
            self._by_tenant[request.fairness_key] += pages
        if self._ends is not None:
            import numpy as np

            self._ends = np.vstack((self._ends, self._ends_of([request])))

    @property
    def by_tenant(self) -> Counter[str]:
        """Pages that each tenant's running requests are expected to end with."""
        if self._by_tenant is None:
            self._by_tenant = Counter()
            for request, pages in zip(self._running, self.finals, strict=True):
                self._by_tenant[request.fairness_key] += pages
        return self._by_tenant

    def final_pages(self, request: Request) -> int:
        """Return the pages that a request which does not run yet is expected to end with."""
        return self._pages_of(self._lengths.final_length(request) - 1)

    def total_with(self, request: Request) -> int:
        """Return the pages by which they and `request` grow in all; its known tokens count as having pages."""
        return self.total + self._pages(request, request.num_tokens)

    def peak_with(self, request: Request) -> int:
        """Return the most pages, beyond today's, that they and `request` will need at any time while it runs.

        Less than they grow by in all: a request that ends frees its pages while others go on growing. Pages that it
        shares with the prefix cache are not freed. `request` counts as having pages for its known tokens; once it has
        ended, the others need as many as without it.
        """
        import numpy as np  # not above: a command line that only names routing policies does without

        if self._ends is None:
            self._ends = np.array(self._ends_of(self._running), np.int64).reshape(-1, 3)
        layout, count, final = self._layout, request.num_tokens, self._lengths.final_length(request)
        frees = layout.blocks_for_tokens(count) * layout.num_growing + layout.fixed_pages(final - 1)
        own = final - 1 - count, frees, layout.pages_for_tokens(count)
        steps, frees, has = np.vstack((self._ends, own)).T
        order = np.argsort(-steps)  # when a request ends, the earlier ones in this order still run
        block, growing = layout.block_tokens, layout.num_growing
        needs = np.cumsum(frees[order]) * block + np.arange(1, len(steps) + 1) * steps[order] * growing
        most = int(needs[steps[order] <= own[0]].max())
        return max(0, -(-most // block) - int(has.sum()))

    def _pages(self, request: Request, room: int) -> int:
        """Return the pages that a request with room for `room` tokens grows by."""
        return max(0, self.final_pages(request) - self._pages_of(room))

    def _ends_of(self, requests: Sequence[Request]) -> list[tuple[int, int, int]]:
        """For each request, return the steps until it ends, the pages that it frees then if its tokens are today's, and
        how many of these it has now.

        Pages that do not grow without end count as many as at the end.
        """
        layout = self._layout
        block, growing, fixed_pages = layout.block_tokens, layout.num_growing, layout.fixed_pages
        has = layout.pages_for_each([request.room for request in requests])
        ends = []
        for request, final, pages in zip(requests, self._lengths.final_lengths(requests), has, strict=True):
            count, shared = len(request.token_ids), request.began_at // block * growing
            blocks = -(-max(request.room, count) // block)
            ends.append((final - 1 - count, blocks * growing + fixed_pages(final - 1) - shared, pages - shared))
        return ends
